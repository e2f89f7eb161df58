"""The actor that Ray runs on each machine: nagara's supervisor there, and no more.

Ray restarts it when it dies. It carries no requests: a Ray that is slow or gone delays nothing
but the lending of machines. Imports no Ray: the bridge makes an actor of it.
"""

import os
from pathlib import Path
from typing import Any

from nagara.cli.cluster.supervisor import Lent, Supervisor
from nagara.cli.settings import read_settings


class MachineActor:
    """One machine of the cluster.

    Args:
        host: its address.
        state: its state folder; None: as `nagara` finds it there.
    """

    def __init__(self, host: str, state: str | None = None) -> None:
        named = state or os.environ.get("NAGARA_STATE")
        folder = read_settings(Path(named) if named else None, verbose=False).state
        self._supervisor = Supervisor(folder, host)
        self._folder = folder

    def status(self) -> dict[str, Any]:
        """As the supervisor's, with `memory_bytes` and `disk_bytes` of the machine."""
        disk = os.statvfs(_nearest(self._folder))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {
            **self._supervisor.status(),
            "memory_bytes": memory,
            "disk_bytes": disk.f_blocks * disk.f_frsize,
        }

    def lend(self, name: str, token: str, port: int, certificates: str | None) -> bool:
        """As the supervisor's."""
        return self._supervisor.lend(Lent(name, port, certificates), token)

    def take_back(self) -> None:
        """As the supervisor's."""
        self._supervisor.take_back()


def _nearest(folder: Path) -> Path:
    return next(one for one in (folder, *folder.parents) if one.exists())
