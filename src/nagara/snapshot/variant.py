"""Which saved variant fits which host. Pure.

All variants under one key are saves of the same app; they differ in the class of host that they
were made on and therefore need.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host, as far as saved memory is concerned."""

    cpu_flags: frozenset[str]
    signal_frame_bytes: int  # grows with the extended registers: AT_MINSIGSTKSZ
    cache_line_bytes: int
    kernel_class: str  # "6.18"
    tools: tuple[str, ...]  # versions of runtime and checkpoint tool
    devices: tuple[str, ...] = ()  # their driver's version and their models


def host_class(facts: HostFacts) -> str:
    """Equal for hosts that saved memory cannot tell apart: one snapshot does for all of them."""
    text = json.dumps(dataclasses.asdict(facts) | {"cpu_flags": sorted(facts.cpu_flags)})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Variant:
    """What a host must have for a snapshot made on a host like it.

    `is_levelled`: its libraries were told to use no more than `cpu_flags`. Then a host whose
    extended registers take less does too: what was saved has none of the others in use, and the
    space that was set aside for them is only larger than needed.
    """

    cpu_flags: frozenset[str]
    signal_frame_bytes: int
    cache_line_bytes: int
    is_levelled: bool = False

    @classmethod
    def of_host(cls, facts: HostFacts) -> "Variant":
        """The variant that a capture on this host makes."""
        return cls(facts.cpu_flags, facts.signal_frame_bytes, facts.cache_line_bytes)

    def misfit(self, facts: HostFacts) -> str | None:
        """Why the host cannot run it; None when it can."""
        if missing := sorted(self.cpu_flags - facts.cpu_flags):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            return f"this CPU lacks {shown}"
        is_less = facts.signal_frame_bytes < self.signal_frame_bytes
        if self.signal_frame_bytes != facts.signal_frame_bytes and not (
            self.is_levelled and is_less
        ):
            return (
                f"extended registers take {facts.signal_frame_bytes} bytes here, "
                f"{self.signal_frame_bytes} where it was made"
            )
        if self.cache_line_bytes != facts.cache_line_bytes:
            return (
                f"cache lines have {facts.cache_line_bytes} bytes here, "
                f"{self.cache_line_bytes} where it was made"
            )
        return None


Named = TypeVar("Named")


@dataclass(frozen=True, slots=True)
class NoneFits:
    """No variant can run here: why, one reason per kind."""

    reasons: tuple[str, ...]


def choose(variants: Mapping[Named, Variant], facts: HostFacts) -> Named | NoneFits:
    """The fitting variant that uses most of the CPU, by its name."""
    misfits = {name: variant.misfit(facts) for name, variant in variants.items()}
    fitting = [name for name, misfit in misfits.items() if misfit is None]
    if not fitting:
        return NoneFits(tuple(sorted({misfit for misfit in misfits.values() if misfit})))
    return max(fitting, key=lambda name: len(variants[name].cpu_flags))


def snapshot_key(app: Mapping[str, object], facts: HostFacts, code: Iterable[str]) -> str:
    """Digest of everything that must be equal for a snapshot to be this app's.

    Args:
        app: what defines the app (tenant, name, definition, image, models, ...) as JSON values.
        facts: of the host; only what no variant covers enters the key.
        code: versions of whatever else made the saved state, such as nagara's own.
    """
    parts = {
        "app": app,
        "kernel": facts.kernel_class,
        "tools": facts.tools,
        "devices": facts.devices,
        "code": sorted(code),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
