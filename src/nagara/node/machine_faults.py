"""What the machine's own failures mean to whoever ordered something: one place of translation."""

import errno

from nagara.base.errors import NagaraError
from nagara.contract.node import NodeError

_HINTS = {
    errno.ENOSPC: "free space on the file system of the state folder",
    errno.EDQUOT: "raise the quota of the state folder's file system",
    errno.EROFS: "the state folder must be writable; name another one with --state",
    errno.EACCES: "the state folder must belong to the user of the node agent",
    errno.EMFILE: "raise the limit of open files (ulimit -n) of the node agent",
    errno.ENFILE: "raise fs.file-max: the whole machine is out of open files",
    errno.EIO: "check the disk of the state folder",
}


def as_node_error(error: Exception) -> Exception:
    """The error as the `Node` protocol names it; what is a fault in nagara itself stays."""
    if isinstance(error, NodeError):
        return error
    if isinstance(error, NagaraError):
        return NodeError(error.what, where=error.where, hint=error.hint)
    if isinstance(error, OSError):
        hint = _HINTS.get(error.errno or 0)
        where = str(error.filename) if error.filename is not None else None
        return NodeError(f"the machine failed: {error.strerror or error}", where=where, hint=hint)
    return error
