"""Frozen layers of snapshots, each mounted once however many replicas stand on it. Needs root.

An overlay keeps its own hold on the layers below it: a layer may be taken down while replicas
stand on it, and mounted again beside them.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from nagara.image.mounts import MountError, mount_erofs, unmount_if_mounted, unmount_tree
from nagara.node.owned_tasks import in_thread
from nagara.snapshot.capture import listing_digest
from nagara.snapshot.catalog import Snapshot
from nagara.snapshot.errors import BadSnapshotError, RestoreError


class FrozenLayers:
    """The mounts below one folder. Belongs to one event loop.

    Args:
        layer: the file of a snapshot's layer, for as long as the context lasts, with the help of
            a folder that it may make; blocking.
    """

    def __init__(
        self, folder: Path, layer: Callable[[Snapshot, Path], AbstractContextManager[Path]]
    ) -> None:
        self._folder = folder
        self._layer = layer
        self._mounted: set[str] = set()
        self._turn = asyncio.Lock()

    async def mount(self, snapshot: Snapshot) -> Path:
        """Where the snapshot's layer is mounted; mounts and checks it the first time.

        It stays there at least until the caller next gives up control.

        Raises:
            BadSnapshotError: the layer does not hold what was frozen.
            RestoreError: this kernel refuses the mount.
        """
        target = self._folder / snapshot.name
        while snapshot.name not in self._mounted:
            async with self._turn:
                if snapshot.name not in self._mounted:
                    await in_thread(self._mount, snapshot, target)
                    self._mounted.add(snapshot.name)
        return target

    async def unmount(self, name: str) -> None:
        """Takes one layer down. Replicas that stand on it keep it until they end."""
        async with self._turn:
            self._mounted.discard(name)
            target = self._folder / name
            if unmount_if_mounted(target) or target.exists():
                target.rmdir()

    async def unmount_all(self) -> None:
        """Takes all layers down, also those an earlier process has mounted."""
        async with self._turn:
            self._mounted.clear()
            unmount_tree(self._folder)
            if self._folder.is_dir():
                for left in self._folder.iterdir():
                    left.rmdir()

    def _mount(self, snapshot: Snapshot, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        unmount_if_mounted(target)  # somebody who was interrupted may have got here before
        try:
            with self._layer(snapshot, target.with_name(f".{target.name}")) as file:
                mount_erofs(file, target)
        except MountError as error:
            raise RestoreError(str(error), where=snapshot.name) from error
        if listing_digest(target) != snapshot.record.layer_digest:
            unmount_if_mounted(target)
            raise BadSnapshotError("the frozen layer is not what was frozen", where=snapshot.name)
