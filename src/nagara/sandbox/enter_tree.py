"""A plain process whose root is a file tree: `python -m nagara.sandbox.enter_tree ORDER`.

For users without root. ORDER is JSON: {"tree", "upper", "work", "root", "folder", "binds":
[[source, path inside], ...], "command", "path"}. In a user and a mount namespace of its own the
tree is mounted read-only below the replica's layer; then the command is run in it, as the same
process. The mounts go when the last process of the namespace ends. No isolation beyond that:
processes and network are the machine's.

Ends with 126 and a message where user namespaces are not allowed, with 127 where the command is
not there.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from nagara.base.linux import MS_BIND, MS_NODEV, MS_NOSUID, die_with_parent, mount, unshare

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_MACHINES = ("dev", "proc", "sys")


def enter(order: dict[str, Any]) -> None:
    """Makes the tree this process's root. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(_NEW_USER | _NEW_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    die_with_parent(signal.SIGKILL)  # the kernel has forgotten it with the change of user
    root = Path(order["root"])
    mount("none", Path("/"), "", _MS_REC | _MS_PRIVATE)
    layers = f"lowerdir={order['tree']},upperdir={order['upper']},workdir={order['work']}"
    mount("overlay", root, "overlay", MS_NODEV | MS_NOSUID, f"{layers},userxattr")
    for name in _MACHINES:
        (root / name).mkdir(exist_ok=True)
        mount(f"/{name}", root / name, "", MS_BIND | _MS_REC)
    for source, inside in order["binds"]:
        target = root / inside.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        mount(source, target, "", MS_BIND | _MS_REC)
    os.chroot(root)
    os.chdir("/")
    with contextlib.suppress(OSError):
        os.chdir(order["folder"])


def main() -> None:
    order = json.loads(sys.argv[1])
    command = order["command"]
    try:
        enter(order)
    except OSError as error:
        sys.stderr.write(
            f"nagara: the image cannot be this process's root: {error}\n"
            "hint: run nagara as root, allow user namespaces, or use the host image\n"
        )
        sys.exit(126)
    os.environ["PATH"] = order["path"]
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"nagara: {command[0]} cannot be run: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
