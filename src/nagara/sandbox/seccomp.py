"""The system calls a replica does not have, as data for the OCI bundle.

Capabilities already keep a replica from administering the machine. This profile takes away more:
calls that make a process impossible to checkpoint, answered with ENOSYS so that libraries use
their other way (an open io_uring cannot be saved); calls that reach into the kernel without
needing a capability; user namespaces, in which a process would have every capability again; and
kinds of sockets that no network namespace holds back, such as the one to a virtual machine's
host.
"""

import errno
import socket
from typing import Any

_NO_CHECKPOINT = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_CLONE_NEWUSER = 0x10000000
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
        # Its flags lie in memory and cannot be looked at; libraries then use clone.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        *(
            {
                "names": [name],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": errno.EPERM,
                "args": [
                    {
                        "index": 0,
                        "value": _CLONE_NEWUSER,
                        "valueTwo": _CLONE_NEWUSER,
                        "op": "SCMP_CMP_MASKED_EQ",
                    }
                ],
            }
            for name in ("clone", "unshare")
        ),
        *(
            {
                "names": ["socket"],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": errno.EAFNOSUPPORT,
                "args": [{"index": 0, "value": int(family), "op": "SCMP_CMP_EQ"}],
            }
            for family in (socket.AF_VSOCK, socket.AF_ALG)
        ),
    ],
}
