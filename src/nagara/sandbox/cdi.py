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
_NAME = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)=([A-Za-z0-9][\w.:-]*)", re.ASCII
)
_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})\.[0-9]{1,3}")
_OLDEST, _NEWEST = (0, 3), (1, 1)
_SPEC_LIMIT_BYTES = 16 << 20
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
        process = config["process"]
        given = {value.partition("=")[0]: value for value in self.env}
        others = [each for each in process["env"] if each.partition("=")[0] not in given]
        process["env"] = [*others, *given.values()]
        if self.groups:
            groups = [*process["user"].get("additionalGids", ()), *self.groups]
            process["user"]["additionalGids"] = list(dict.fromkeys(groups))
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
    """Kind → device → edits, and what could not be used, with the reason."""
    specs: dict[str, dict[str, DeviceEdits]] = {}
    unreadable = []
    for folder in folders:
        places: dict[tuple[str, str], Path] = {}
        for file in sorted(folder.glob("*")):
            if file.suffix not in (".json", ".yaml", ".yml"):
                continue
            try:
                kind, devices = parse_spec(_load(file))
            except (CdiError, OSError, ValueError, RecursionError) as error:
                what = error.what if isinstance(error, CdiError) else str(error)
                unreadable.append(f"{file}: {what}")
                continue
            for device, edits in devices.items():
                known = specs.setdefault(kind, {})
                if (other := places.setdefault((kind, device), file)) is file:
                    known[device] = edits
                    continue
                # Nobody says which of the two is meant; a later folder may.
                known.pop(device, None)
                unreadable.append(f"{kind}={device} is in {other} and in {file}")
    return specs, unreadable


def _load(file: Path) -> Any:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):  # links are followed; a pipe would never end
            raise CdiError("is no file")
        if state.st_size > _SPEC_LIMIT_BYTES:
            raise CdiError(f"has {state.st_size} bytes, more than any spec")
        raw = stream.read(_SPEC_LIMIT_BYTES)
    if file.suffix == ".json":
        return json.loads(raw)
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise CdiError("is YAML, which cannot be read here (no PyYAML)") from None
    try:
        return yaml.safe_load(raw)
    except getattr(yaml, "YAMLError", ValueError) as error:
        raise CdiError(f"is no YAML: {error}") from error


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
        CdiError: of a version that is not known, or a key is unknown or has the wrong kind of
            value, or a name stands there twice, or a device node is not there.
    """
    _check_keys(spec, _SPEC_KEYS, "the file")
    version = _text(spec["cdiVersion"], "cdiVersion")
    found = _VERSION.fullmatch(version)
    if found is None or not _OLDEST <= (int(found[1]), int(found[2])) <= _NEWEST:
        raise CdiError(f"is of version {version}, which is not understood (0.3 to 1.1 are)")
    kind = _text(spec["kind"], "kind")
    common = _edits(spec.get("containerEdits") or {})
    devices: dict[str, DeviceEdits] = {}
    for device in _list(spec, "devices"):
        _check_keys(device, {"name", "annotations", "containerEdits"}, "a device")
        name = _text(device["name"], "a device's name")
        if not _NAME.fullmatch(f"{kind}={name}"):
            raise CdiError(f"{kind}={name} cannot name a device")
        if name in devices:
            raise CdiError(f"has {kind}={name} twice")
        devices[name] = common + _edits(device.get("containerEdits") or {})
    return kind, devices


def _edits(edits: Any) -> DeviceEdits:
    _check_keys(edits, _EDIT_KEYS, "containerEdits")
    return DeviceEdits(
        tuple(_node(node) for node in _list(edits, "deviceNodes")),
        tuple(_mount(mount) for mount in _list(edits, "mounts")),
        tuple(_variable(value) for value in _list(edits, "env")),
        tuple(_hook(hook) for hook in _list(edits, "hooks")),
        tuple(_number(group, "a group") for group in _list(edits, "additionalGids")),
    )


def _node(node: Any) -> DeviceNode:
    _check_keys(node, _NODE_KEYS, "a device node")
    path = _path(node["path"], "a device node")
    kind, major, minor = node.get("type"), node.get("major"), node.get("minor")
    if kind is None or major is None:
        outside = _path(node.get("hostPath") or path, "a device node")
        try:
            state = os.stat(outside)  # noqa: PTH116 - its numbers are wanted
        except OSError as error:
            raise CdiError(f"{outside}: {error.strerror}") from error
        if not stat.S_ISCHR(state.st_mode) and not stat.S_ISBLK(state.st_mode):
            raise CdiError(f"{outside} is no device")
        kind = "c" if stat.S_ISCHR(state.st_mode) else "b"
        major, minor = os.major(state.st_rdev), os.minor(state.st_rdev)
    if kind not in ("b", "c", "u"):
        raise CdiError(f"{path}: a device is of the type b, c or u, not {kind!r}")
    permissions = _text(node.get("permissions") or "rwm", "permissions")
    if not set(permissions) <= set("rwm"):
        raise CdiError(f"{path}: permissions are of r, w and m, not {permissions!r}")
    own = [
        None if node.get(key) is None else _number(node[key], key)
        for key in ("fileMode", "uid", "gid")
    ]
    kind = "b" if kind == "b" else "c"  # u, unbuffered, is another word for c
    numbers = _number(major, "major"), _number(minor or 0, "minor")
    return DeviceNode(path, kind, *numbers, permissions, *own)


def _mount(mount: Any) -> dict[str, Any]:
    _check_keys(mount, _MOUNT_KEYS, "a mount")
    options = [_text(option, "an option") for option in _list(mount, "options") or _MOUNT_OPTIONS]
    return {
        "destination": _path(mount["containerPath"], "a mount"),
        "source": _path(mount["hostPath"], "a mount"),
        "type": _text(mount.get("type") or "bind", "a mount's type"),
        "options": options if {"bind", "rbind"} & set(options) else ["bind", *options],
    }


def _hook(hook: Any) -> tuple[str, dict[str, Any]]:
    _check_keys(hook, _HOOK_KEYS, "a hook")
    name = _text(hook["hookName"], "hookName")
    if name not in _HOOKS:
        raise CdiError(f"unknown kind of hook {name!r}")
    made: dict[str, Any] = {"path": _path(hook["path"], "a hook")}
    if hook.get("args") is not None:
        made["args"] = [_text(value, "an argument") for value in _list(hook, "args")]
    if hook.get("env") is not None:
        made["env"] = [_variable(value) for value in _list(hook, "env")]
    if hook.get("timeout") is not None:
        made["timeout"] = _number(hook["timeout"], "a hook's timeout")
    return name, made


def _list(table: Mapping[str, Any], key: str) -> list[Any]:
    value = table.get(key)
    if not isinstance(value, list | None):
        raise CdiError(f"{key} is no list")
    return value or []


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise CdiError(f"{what} is no text: {value!r}"[:200])
    return value


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise CdiError(f"{what} is no number: {value!r}"[:200])
    return value


def _path(value: Any, what: str) -> str:
    path = _text(value, what)
    if not path.startswith("/") or ".." in path.split("/"):
        raise CdiError(f"{what} is at {path!r}, which is no path from the root"[:200])
    return path


def _variable(value: Any) -> str:
    text = _text(value, "a variable")
    if text.find("=") < 1:
        raise CdiError(f"{text[:80]!r} is no variable")
    return text


def _check_keys(value: Any, known: frozenset[str] | set[str], what: str) -> None:
    if not isinstance(value, Mapping):
        raise CdiError(f"{what} is no table")
    if unknown := sorted(set(map(str, value)) - known):
        raise CdiError(f"{what} has the key {unknown[0]!r}, which is not understood")
    needed: dict[str, tuple[str, ...]] = {
        "the file": ("cdiVersion", "kind"),
        "a device": ("name",),
        "a device node": ("path",),
    }
    needed |= {"a mount": ("hostPath", "containerPath"), "a hook": ("hookName", "path")}
    if missing := [key for key in needed.get(what, ()) if key not in value]:
        raise CdiError(f"{what} lacks {missing[0]!r}")


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return first + tuple(value for value in second if value not in first)
