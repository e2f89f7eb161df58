"""Whether a replica's failure lies with its machine rather than with its app. Pure.

Two signs: words that an app does not write for its own faults, and failures of several apps on
one machine within a while. One app that fails everywhere says nothing of machines.
"""

import re
from dataclasses import dataclass, field

WINDOW_S = 900.0
FAILURES, APPS = 3, 2  # so many, of so many apps, on one machine

_WORDS = re.compile(
    r"uncorrectable ECC|ECC error encountered|CUDA-capable device\(s\) is/are busy or unavailable"
    r"|device-side hardware|hardware stack error|GPU is lost|fallen off the bus|Unknown Error.*NVML"
    r"|NVRM: Xid|no CUDA-capable device is detected|Input/output error|Structure needs cleaning"
    r"|Read-only file system|the machine failed",
    re.IGNORECASE,
)


def names_machine(reason: str) -> str | None:
    """The words in a failure's reason that speak of the machine; None if it has none."""
    found = _WORDS.search(reason)
    return None if found is None else found[0]


@dataclass(slots=True)
class Blame:
    """Failures of replicas by machine, for as long as they count."""

    _failures: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def failed(self, machine: str, app: str, reason: str, now_s: float) -> str | None:
        """Takes note of one failure; returns why the machine is to be looked at, or None."""
        words = names_machine(reason)
        if words is not None:
            return f"a replica of {app} failed: {words}"
        recent = [
            (at_s, name)
            for at_s, name in self._failures.get(machine, ())
            if now_s - at_s < WINDOW_S
        ]
        recent.append((now_s, app))
        self._failures[machine] = recent
        apps = sorted({name for _, name in recent})
        if len(recent) < FAILURES or len(apps) < APPS:
            return None
        del self._failures[machine]
        return f"{len(recent)} replicas of {', '.join(apps)} failed there"

    def served(self, machine: str) -> None:
        """A replica has become ready there: what failed before was not the machine."""
        self._failures.pop(machine, None)
