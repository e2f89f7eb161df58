"""The system calls a replica does not have, as data for the OCI bundle.

Capabilities already keep a replica from administering the machine. This profile takes away two
more kinds: calls that make a process impossible to checkpoint, answered with ENOSYS so that
libraries use their other way (an open io_uring cannot be saved), and calls that reach into the
kernel without needing a capability.
"""

import errno
from typing import Any

_NO_CHECKPOINT = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_KERNEL_REACH = ("add_key", "keyctl", "request_key", "userfaultfd", "bpf", "perf_event_open")

SECCOMP_PROFILE: dict[str, Any] = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [
        {
            "names": list(_NO_CHECKPOINT),
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": errno.ENOSYS,
        },
        {
            "names": list(_KERNEL_REACH),
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": errno.EPERM,
        },
    ],
}
