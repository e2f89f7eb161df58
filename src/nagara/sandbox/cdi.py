"""Devices of the machine inside a replica, by the Container Device Interface.

A device has a name such as `nvidia.com/gpu=0`; a spec file in `/etc/cdi` or `/var/run/cdi` says
what a container needs for it: device nodes, libraries to mount, variables, hooks. Format:
https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md, versions 0.3 to 1.1.
As it asks for, files with unknown keys are refused rather than half understood.

NVIDIA's toolkit writes such files, and writes one to order where there is none. Blocking, for as
long as that takes (a second).
"""

import importlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagara.base.errors import NagaraError

FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))  # later ones win
NVIDIA_KIND = "nvidia.com/gpu"
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)=([A-Za-z0-9][\w.:-]*)")
_TOOLKIT_S = 30.0
_SHOWN = 4
_SPEC_KEYS = frozenset({"cdiVersion", "kind", "annotations", "devices", "containerEdits"})
_EDIT_KEYS = frozenset({"env", "deviceNodes", "mounts", "hooks", "additionalGids"})
_NODE_KEYS = frozenset(
    {"path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"}
)
_MOUNT_KEYS = frozenset({"hostPath", "containerPath", "options", "type"})
_HOOK_KEYS = frozenset({"hookName", "path", "args", "env", "timeout"})
_HOOKS = frozenset(
    {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}
)
_MOUNT_OPTIONS = ("bind", "ro", "nosuid", "nodev")


class CdiError(NagaraError):
    """A device is not known, or its spec file cannot be used."""


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file inside, and what may be done with it (of `rwm`)."""

    path: str
    kind: str  # "c" or "b"
    major: int
    minor: int
    permissions: str = "rwm"
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None

    def oci(self) -> dict[str, Any]:
        """The entry of `linux.devices`."""
        entry = {"path": self.path, "type": self.kind, "major": self.major, "minor": self.minor}
        own = {"fileMode": self.mode, "uid": self.uid, "gid": self.gid}
        return entry | {key: value for key, value in own.items() if value is not None}

    def rule(self) -> dict[str, Any]:
        """The entry of the control group's list of devices."""
        numbers = {"type": self.kind, "major": self.major, "minor": self.minor}
        return {"allow": True, **numbers, "access": self.permissions}


@dataclass(frozen=True, slots=True)
class DeviceEdits:
    """What containers get for the devices they were promised."""

    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()  # as OCI has them
    env: tuple[str, ...] = ()
    hooks: tuple[tuple[str, dict[str, Any]], ...] = ()
    groups: tuple[int, ...] = ()

    def __add__(self, other: "DeviceEdits") -> "DeviceEdits":
        """Both; what is in the first already is not repeated."""
        return DeviceEdits(
            _joined(self.nodes, other.nodes),
            _joined(self.mounts, other.mounts),
            _joined(self.env, other.env),
            _joined(self.hooks, other.hooks),
            _joined(self.groups, other.groups),
        )

    def apply(self, config: dict[str, Any]) -> None:
        """Adds everything to a container's `config.json`."""
        config["process"]["env"] += self.env
        if self.groups:
            config["process"]["user"]["additionalGids"] = list(self.groups)
        config["mounts"] += self.mounts
        linux = config["linux"]
        linux["devices"] = [node.oci() for node in self.nodes]
        linux["resources"]["devices"] += [node.rule() for node in self.nodes]
        for name, hook in self.hooks:
            config.setdefault("hooks", {}).setdefault(name, []).append(hook)


def check_device_name(name: str) -> str | None:
    """Why this names no device; None when it may."""
    if _NAME.fullmatch(name):
        return None
    return f"{name!r} names no device: write VENDOR/CLASS=NAME, such as {NVIDIA_KIND}=0"


def find_devices(names: Sequence[str], folders: Sequence[Path] | None = None) -> DeviceEdits:
    """What a container needs for these devices.

    Raises:
        CdiError: a name is unknown, or a file that could have it cannot be used.
    """
    if not names:
        return DeviceEdits()
    specs, unreadable = _read_specs(FOLDERS if folders is None else folders)
    edits = DeviceEdits()
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise CdiError(check_device_name(name) or "", where="devices")
        found = specs.get(match[1], {}).get(match[2])
        if found is None and match[1] == NVIDIA_KIND and shutil.which("nvidia-ctk"):
            found = _by_toolkit().get(match[2])
        if found is None:
            raise _unknown(name, specs, unreadable)
        edits = edits + found
    return edits


def known_devices() -> str:
    """What the spec files of this machine name. Raises `CdiError` when that is nothing."""
    specs, unreadable = _read_specs(FOLDERS)
    known = sorted(f"{kind}={device}" for kind, devices in specs.items() for device in devices)
    if known:
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        return ", ".join(known[:_SHOWN]) + more
    if shutil.which("nvidia-ctk"):
        return "by NVIDIA's toolkit"
    raise CdiError("; ".join(unreadable) or "no spec file in /etc/cdi or /var/run/cdi")


def _unknown(
    name: str, specs: Mapping[str, Mapping[str, DeviceEdits]], unreadable: Sequence[str]
) -> CdiError:
    known = [f"{kind}={device}" for kind, devices in specs.items() for device in devices]
    why = f"; {'; '.join(unreadable)}" if unreadable else ""
    return CdiError(
        f"there is no such device (known: {', '.join(sorted(known)) or 'none'}){why}",
        where=name,
        hint="nvidia-ctk cdi generate --format=json --output=/etc/cdi/nvidia.json",
    )


def _read_specs(
    folders: Sequence[Path],
) -> tuple[dict[str, dict[str, DeviceEdits]], list[str]]:
    """Kind → device → edits, and which files could not be used, with the reason."""
    specs: dict[str, dict[str, DeviceEdits]] = {}
    unreadable = []
    for folder in folders:
        for file in sorted(folder.glob("*")):
            if file.suffix not in (".json", ".yaml", ".yml"):
                continue
            try:
                kind, devices = parse_spec(_load(file))
            except (CdiError, OSError, ValueError) as error:
                what = error.what if isinstance(error, CdiError) else str(error)
                unreadable.append(f"{file}: {what}")
                continue
            specs.setdefault(kind, {}).update(devices)
    return specs, unreadable


def _load(file: Path) -> Any:
    if file.suffix == ".json":
        return json.loads(file.read_bytes())
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise CdiError("is YAML, which cannot be read here (no PyYAML)") from None
    return yaml.safe_load(file.read_bytes())


def _by_toolkit() -> dict[str, DeviceEdits]:
    command = ["nvidia-ctk", "cdi", "generate", "--format=json"]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_TOOLKIT_S, check=False
        )
        if done.returncode != 0:
            raise CdiError(f"nvidia-ctk: {done.stderr.decode(errors='replace').strip()[-200:]}")
        return parse_spec(json.loads(done.stdout))[1]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise CdiError(f"nvidia-ctk: {error}") from error


def parse_spec(spec: Any) -> tuple[str, dict[str, DeviceEdits]]:
    """The kind that a spec file is about, and what each of its devices needs.

    Raises:
        CdiError: a key is unknown or has the wrong kind of value, or a device node is not there.
    """
    _check_keys(spec, _SPEC_KEYS, "the file")
    common = _edits(spec.get("containerEdits") or {})
    devices = {}
    for device in spec.get("devices") or ():
        _check_keys(device, {"name", "annotations", "containerEdits"}, "a device")
        devices[str(device["name"])] = common + _edits(device.get("containerEdits") or {})
    return str(spec["kind"]), devices


def _edits(edits: Any) -> DeviceEdits:
    _check_keys(edits, _EDIT_KEYS, "containerEdits")
    return DeviceEdits(
        tuple(_node(node) for node in edits.get("deviceNodes") or ()),
        tuple(_mount(mount) for mount in edits.get("mounts") or ()),
        tuple(str(value) for value in edits.get("env") or ()),
        tuple(_hook(hook) for hook in edits.get("hooks") or ()),
        tuple(int(group) for group in edits.get("additionalGids") or ()),
    )


def _node(node: Any) -> DeviceNode:
    _check_keys(node, _NODE_KEYS, "a device node")
    path = str(node["path"])
    kind, major, minor = node.get("type"), node.get("major"), node.get("minor")
    if kind is None or major is None:
        outside = str(node.get("hostPath") or path)
        try:
            state = os.stat(outside)  # noqa: PTH116 - its numbers are wanted
        except OSError as error:
            raise CdiError(f"{outside}: {error.strerror}") from error
        if not stat.S_ISCHR(state.st_mode) and not stat.S_ISBLK(state.st_mode):
            raise CdiError(f"{outside} is no device")
        kind = "c" if stat.S_ISCHR(state.st_mode) else "b"
        major, minor = os.major(state.st_rdev), os.minor(state.st_rdev)
    permissions = str(node.get("permissions") or "rwm")
    if not set(permissions) <= set("rwm"):
        raise CdiError(f"{path}: permissions are of r, w and m, not {permissions!r}")
    own = (node.get("fileMode"), node.get("uid"), node.get("gid"))
    return DeviceNode(path, str(kind), int(major), int(minor or 0), permissions, *own)


def _mount(mount: Any) -> dict[str, Any]:
    _check_keys(mount, _MOUNT_KEYS, "a mount")
    options = [str(option) for option in mount.get("options") or _MOUNT_OPTIONS]
    return {
        "destination": str(mount["containerPath"]),
        "source": str(mount["hostPath"]),
        "type": str(mount.get("type") or "bind"),
        "options": options if {"bind", "rbind"} & set(options) else ["bind", *options],
    }


def _hook(hook: Any) -> tuple[str, dict[str, Any]]:
    _check_keys(hook, _HOOK_KEYS, "a hook")
    name = str(hook["hookName"])
    if name not in _HOOKS:
        raise CdiError(f"unknown kind of hook {name!r}")
    more = {key: hook[key] for key in ("args", "env", "timeout") if hook.get(key) is not None}
    return name, {"path": str(hook["path"]), **more}


def _check_keys(value: Any, known: frozenset[str] | set[str], what: str) -> None:
    if not isinstance(value, Mapping):
        raise CdiError(f"{what} is no table")
    if unknown := sorted(set(map(str, value)) - known):
        raise CdiError(f"{what} has the key {unknown[0]!r}, which is not understood")
    needed: dict[str, tuple[str, ...]] = {
        "the file": ("kind",),
        "a device": ("name",),
        "a device node": ("path",),
    }
    needed |= {"a mount": ("hostPath", "containerPath"), "a hook": ("hookName", "path")}
    if missing := [key for key in needed.get(what, ()) if key not in value]:
        raise CdiError(f"{what} lacks {missing[0]!r}")


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return first + tuple(value for value in second if value not in first)
