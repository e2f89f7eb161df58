"""The OCI bundle of a replica: one `config.json` for runc. Pure.

Format: OCI runtime specification 1.0.2.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nagara.sandbox.cdi import DeviceEdits
from nagara.sandbox.cgroups import PARENT
from nagara.sandbox.seccomp import SECCOMP_PROFILE

# What servers legitimately need as root of their own namespaces: to bind low ports and to give
# up root for a service user. Everything that reaches beyond the container is absent.
CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETGID",
    "CAP_SETUID",
)

_CPU_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Bind:
    """A folder or file of the machine shown inside the replica, read-only unless said."""

    source: Path
    target: Path
    is_writable: bool = False


@dataclass(frozen=True, slots=True)
class User:
    """Who the command runs as, in the replica's own numbers."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()

    def config(self) -> dict[str, Any]:
        return {"uid": self.uid, "gid": self.gid, "additionalGids": list(self.groups)}


@dataclass(frozen=True, slots=True)
class Bundle:
    """All that decides how a replica's container is made."""

    container: str
    control_group: str
    root: Path
    command: tuple[str, ...]
    env: dict[str, str]
    network_namespace: Path
    folder: str = "/"  # that the command begins in
    user: User = User()
    binds: tuple[Bind, ...] = ()
    cpu_cores: float | None = None
    memory_bytes: int | None = None
    tasks: int = 4096  # processes and threads together
    shared_memory_bytes: int = 1 << 30
    criu_config: Path | None = None  # read by CRIU at checkpoint and restore
    devices: DeviceEdits = field(default_factory=DeviceEdits)

    def config(self) -> dict[str, Any]:
        """The bundle's `config.json` as plain values."""
        capability_sets = ("bounding", "effective", "permitted")
        config = {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                "user": self.user.config(),
                "args": list(self.command),
                "env": [f"{name}={value}" for name, value in self.env.items()],
                "cwd": self.folder,
                "capabilities": {name: list(CAPABILITIES) for name in capability_sets},
                "noNewPrivileges": True,
                "oomScoreAdj": 500,  # replicas are given up before the processes that run them
            },
            "root": {"path": str(self.root), "readonly": False},
            "hostname": self.container[:63],
            "mounts": self._mounts(),
            "annotations": {"org.criu.config": str(self.criu_config)} if self.criu_config else {},
            "linux": self._linux(),
        }
        self.devices.apply(config)
        return config

    def write(self, folder: Path) -> None:
        """Writes `config.json` into `folder`, the bundle, for its owner alone: the environment may
        hold secrets."""
        file = folder / "config.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps(self.config(), indent=1))

    def _mounts(self) -> list[dict[str, Any]]:
        shared_memory = f"size={self.shared_memory_bytes}"
        special = [
            _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666"),
            _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", shared_memory),  # noqa: S108
            _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
        ]
        return special + [
            {
                "destination": str(bind.target),
                "type": "bind",
                "source": str(bind.source),
                "options": ["bind", "nosuid", "nodev", "rw" if bind.is_writable else "ro"],
            }
            for bind in self.binds
        ]

    def _linux(self) -> dict[str, Any]:
        resources: dict[str, Any] = {
            "devices": [{"allow": False, "access": "rwm"}],
            "pids": {"limit": self.tasks},
        }
        if self.memory_bytes is not None:
            resources["memory"] = {"limit": self.memory_bytes}
        if self.cpu_cores is not None:
            quota = int(self.cpu_cores * _CPU_PERIOD_US)
            resources["cpu"] = {"quota": quota, "period": _CPU_PERIOD_US}
        private = [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]
        return {
            "namespaces": [*private, {"type": "network", "path": str(self.network_namespace)}],
            "cgroupsPath": f"/{PARENT}/{self.control_group}",
            "resources": resources,
            "seccomp": SECCOMP_PROFILE,
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/sysrq-trigger", "/sys/firmware"],
            "readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus"],
        }


def _mount(target: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": kind, "options": list(options)}


def bound_sources(bundle: Path) -> list[Path]:
    """What of the machine a written bundle shows inside, devices' files included."""
    mounts = json.loads((bundle / "config.json").read_bytes())["mounts"]
    return [Path(mount["source"]) for mount in mounts if "bind" in mount.get("options", ())]
