"""Examines this machine: tries each capability out and says what follows from it.

Called from the command line; blocks for some seconds. Works below one scratch folder and leaves
nothing.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.image import probes as image
from nagara.image.probing import probe
from nagara.node.capabilities import CAPABILITIES, CONTAINERS, SNAPSHOTS, Capability
from nagara.sandbox import probes as sandbox
from nagara.sandbox.cdi import known_devices
from nagara.sandbox.egress import try_egress
from nagara.sandbox.scratch import scratch_folder
from nagara.sandbox.tools import Tools, find_tools
from nagara.snapshot.device.cuda import CudaDevice
from nagara.snapshot.device_probes import try_cuda, try_nvml
from nagara.snapshot.self_test import self_test

_log = logging.getLogger(__name__)


class Status(StrEnum):
    """What came of a trial."""

    WORKS = "works"
    LACKING = "lacking"
    UNTRIED = "untried"  # something it needs is lacking


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability as it was found: evidence, or the reason why not."""

    capability: Capability
    status: Status
    detail: str


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, in the table's order, and what they come to."""

    findings: tuple[Finding, ...]

    def _all_work(self, names: tuple[str, ...]) -> bool:
        working = {f.capability.name for f in self.findings if f.status is Status.WORKS}
        return working.issuperset(names)

    @property
    def has_containers(self) -> bool:
        """Whether replicas run as containers here."""
        return self._all_work(CONTAINERS)

    @property
    def has_snapshots(self) -> bool:
        """Whether replicas can be saved and put back here."""
        return self._all_work((*CONTAINERS, *SNAPSHOTS))


Probe = Callable[[], str]


def examine(state: Path) -> Examination:
    """Tries everything out for a node with this state folder."""
    tools = find_tools(state / "tools")
    with scratch_folder(state) as scratch:
        return judged(_probes(scratch, tools))


def judged(probes: Mapping[str, Probe]) -> Examination:
    """Runs the probe of each capability, unless one that it needs has failed."""
    found: dict[str, Finding] = {}
    for capability in CAPABILITIES:
        lacking = [name for name in capability.needs if found[name].status is not Status.WORKS]
        if lacking:
            finding = Finding(capability, Status.UNTRIED, f"needs {', '.join(lacking)}")
        else:
            finding = _tried(capability, probes[capability.name])
        found[capability.name] = finding
    return Examination(tuple(found.values()))


def _tried(capability: Capability, probe: Probe) -> Finding:
    try:
        return Finding(capability, Status.WORKS, probe())
    except NagaraError as error:
        _log.debug("%s", capability.name, exc_info=True)
        detail = f"{error.where}: {error.what}" if error.where else error.what
    except OSError as error:
        _log.debug("%s", capability.name, exc_info=True)
        detail = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return Finding(capability, Status.LACKING, detail)


def _probes(scratch: Path, tools: Tools) -> dict[str, Probe]:
    return {
        "root": sandbox.check_root,
        "runc": lambda: _tool(tools.runc, tools.runc_version, "runc", tools),
        "overlay": lambda: image.try_overlay(scratch),
        "network_namespaces": sandbox.try_network_namespace,
        "cgroups": sandbox.try_cgroup,
        "seccomp": sandbox.try_seccomp,
        "egress": try_egress,
        "criu": lambda: _tool(tools.criu, tools.criu_version, "criu", tools),
        "mkfs_erofs": image.find_mkfs_erofs,
        "erofs_files": lambda: image.try_erofs(scratch),
        "checkpoint": lambda: _checkpoint(scratch, tools),
        "other_users": sandbox.check_other_users,
        "run_in_memory": sandbox.check_run_folder,
        "data_layers": lambda: image.try_data_layers(scratch),
        "fuse": lambda: image.try_fuse(scratch),
        "image_mounts": lambda: _image_mounts(scratch),
        "fuse_passthrough": lambda: image.try_fuse_passthrough(scratch),
        "c_library": sandbox.read_c_library,
        "huge_pages": sandbox.read_huge_pages,
        "page_cache": image.try_drop_caches,
        "cuda": try_cuda,
        "device_memory": _device_memory,
        "cdi": known_devices,
        "nvml": try_nvml,
    }


def _tool(path: Path | None, version: str | None, name: str, tools: Tools) -> str:
    if path is None:
        raise NagaraError(next((gap for gap in tools.missing if gap.startswith(name)), "not found"))
    doubt = next((doubt for doubt in tools.doubts if doubt.startswith(name)), None)
    return f"{version} at {path}" + (f"; {doubt}" if doubt else "")


def _device_memory() -> str:
    """How the driver's checkpoint calls are reached, and whether they are there."""
    device = CudaDevice()
    try:
        facts = device.facts()
    finally:
        device.close()
    if not facts.can_save:
        raise NagaraError(facts.why_not or "the driver cannot save")
    elsewhere = "also on another device" if facts.can_map else "on the same device"
    return f"driver {facts.driver}, by {facts.way}; put back {elsewhere}"


_METHODS = {
    "overlay": "an index, and contents that come when they are read",
    "tree": "one FUSE file system for the whole image",
}


def _image_mounts(scratch: Path) -> str:
    """What nagara chooses here, and what it does without."""
    found = probe(scratch / "images")
    if (method := found.method()) not in _METHODS:
        raise NagaraError("no way of mounting them was found")
    lacking = (each for each in found.described() if not each.is_there)
    without = [each.without for each in lacking if each.name != "reflink"]  # for copies only
    return "; ".join([_METHODS[method], *without])


def _checkpoint(scratch: Path, tools: Tools) -> str:
    assert tools.runc is not None
    assert tools.criu is not None
    done = self_test(tools.runc, tools.criu, scratch)
    return f"saved in {done.saved_in_s:.2f} s, put back in {done.restored_in_s:.2f} s"
