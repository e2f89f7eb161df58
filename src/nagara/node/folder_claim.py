"""A node's claim on its folder, held by the kernel for as long as the process lives."""

import fcntl
import os
from pathlib import Path

from nagara.contract.node import NodeError


class FolderClaim:
    """At most one node has a folder open. Belongs to one node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1

    def take(self) -> None:
        """Raises `NodeError` when another node has it, OSError when it cannot be used."""
        path = self._folder / ".lock"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise NodeError(
                "another node agent uses this state folder",
                where=str(self._folder.parent),
                hint="end it (`nagara up` or `nagara agent`), or name another folder with --state",
            ) from error
        self._descriptor = descriptor

    def give_up(self) -> None:
        """May be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
