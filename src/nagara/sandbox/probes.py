"""Tries out what containers need of this kernel: rights, namespaces, control groups, seccomp.

Each probe does the thing once, on a small scale, and says what it found. It raises OSError, a
`NagaraError` or a `ProbeError` where that does not work. Blocking: some milliseconds each.
"""

import ctypes
import errno
import os
import platform
import struct
import threading
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.sandbox.cgroups import PARENT, hierarchies
from nagara.sandbox.netns import NetworkNamespace
from nagara.sandbox.rights import CAP_SYS_ADMIN, CAP_SYS_RESOURCE, has_capability

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_IO_URING_SETUP = 425  # the same on every architecture
_REFUSAL = errno.EXDEV  # an error that io_uring_setup(2) itself never gives
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RUN = "/run"


class ProbeError(NagaraError):
    """The trial ended otherwise than it must."""


def check_root() -> str:
    """User 0 with the capability that mounts and namespaces need."""
    if os.geteuid() != 0:
        raise ProbeError(f"this process runs as user {os.geteuid()}")
    if not has_capability(CAP_SYS_ADMIN):
        raise ProbeError("user 0, but without CAP_SYS_ADMIN (a container?)")
    return "user 0 with CAP_SYS_ADMIN"


def check_other_users() -> str:
    """The capability by which CRIU reads and sets the limits of another user's processes."""
    if not has_capability(CAP_SYS_RESOURCE):
        raise ProbeError("this process lacks CAP_SYS_RESOURCE")
    return "CAP_SYS_RESOURCE"


def try_network_namespace() -> str:
    """A namespace of its own in which a socket can listen and be reached."""
    namespace = NetworkNamespace.create()
    try:
        with namespace.open_socket() as server, namespace.open_socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.setblocking(True)
            client.settimeout(5)
            client.connect(server.getsockname())
    finally:
        namespace.close()
    return "made, with a loopback interface"


def try_cgroup() -> str:
    """A control group made and taken away again in each hierarchy."""
    found = hierarchies()
    if not found:
        raise ProbeError("no control groups are mounted", where="/sys/fs/cgroup")
    for hierarchy in found:
        parent = hierarchy / PARENT
        is_new = not parent.exists()
        group = parent / f"doctor-{os.getpid()}"
        parent.mkdir(exist_ok=True)
        group.mkdir()
        group.rmdir()
        if is_new:
            parent.rmdir()
    if (found[0] / "cgroup.controllers").exists():
        return "version 2"
    return f"version 1 ({len(found)} hierarchies)"


def try_seccomp() -> str:
    """A filter that answers one system call with an error of ours, on a thread of its own."""
    if struct.calcsize("P") != 8:  # the layout below is that of 64-bit systems
        raise ProbeError(f"not tried on {platform.machine()}")
    given: list[int] = []
    thread = threading.Thread(target=lambda: given.append(_filtered_errno()), name="probe seccomp")
    thread.start()
    thread.join()
    if given != [_REFUSAL]:
        raise ProbeError(f"the kernel takes no filter: {os.strerror(given[0]) if given else '?'}")
    return "filters are obeyed"


def _filtered_errno() -> int:
    """What io_uring_setup answers behind a filter that refuses it; else why there is no filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    allow, refuse = 0x7FFF0000, 0x00050000 | _REFUSAL
    instructions = (  # struct sock_filter: code, jump if true, jump if false, operand
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, _IO_URING_SETUP),  # is it this one? then the next, else the one after
        (0x06, 0, 0, refuse),
        (0x06, 0, 0, allow),
    )
    code = b"".join(struct.pack("HBBI", *one) for one in instructions)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(held))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return ctypes.get_errno()
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) != 0:
        return ctypes.get_errno()
    libc.syscall(_IO_URING_SETUP, 0, None)
    return ctypes.get_errno()


def check_run_folder() -> str:
    """Whether /run is in memory: only there does CRIU keep what it has found out of the kernel."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind = line.split(" ")[:3]
        if target == _RUN and kind == "tmpfs":
            return "tmpfs"
    raise ProbeError("is not a tmpfs", where=_RUN)


def read_huge_pages() -> str:
    """How the kernel gives out transparent huge pages: `always`, `madvise` or `never`."""
    text = _THP.read_text()
    return text[text.index("[") + 1 : text.index("]")]


def read_c_library() -> str:
    """The C library and its version."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):  # another C library does not know the word
        name = None
    if not name:
        raise ProbeError(f"not glibc: {' '.join(platform.libc_ver()).strip() or 'unknown'}")
    return name
