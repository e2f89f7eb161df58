"""The snapshots of a node as images of its store: mounted for a restore, pinned by replicas.

A restore reads the memory through one read-only overlay: the image's index over the machine's
own objects when all are here, else over the daemon that fetches them. Blocking: worker threads.
"""

from collections.abc import Sequence
from pathlib import Path

from nagara.image.images import Image
from nagara.image.mounting import MountedImage
from nagara.image.mounts import unmount_if_mounted
from nagara.image.shelf import Shelf
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.replica_images import NodeImages
from nagara.snapshot.catalog import KIND, LAYER, MEMORY, Snapshot
from nagara.store.ledger import Pin
from nagara.store.roots import read_list


class SnapshotImages:
    """What a node's snapshots are kept and shown by."""

    def __init__(self, images: NodeImages) -> None:
        self._images = images

    def shelf(self, tenant: str) -> Shelf:
        """A tenant's snapshots in the store."""
        return Shelf(self._images.opened().store(tenant), KIND)

    def tenants(self) -> Sequence[str]:
        """Who has a part of the store."""
        return self._images.opened().objects.tenant_names()

    def has_tiers(self, tenant: str) -> bool:
        """Whether what is not here may be had from elsewhere."""
        return bool(self.shelf(tenant).store.transfer.tiers)

    def trust(self, tenant: str, image: Image) -> None:
        """The image was made here."""
        self._images.opened().trust(tenant, image)

    def pin(self, replica: str, snapshot: Snapshot) -> None:
        """Until the replica's images are released nothing of the snapshot is evicted."""
        pin = Pin(self._holder(replica), snapshot.tenant, str(snapshot.image.list))
        self._images.opened().objects.ledger.pin(pin)

    def mount(self, folder: ReplicaFolder, snapshot: Snapshot) -> MountedImage:
        """Shows the snapshot at `folder.snapshot`. Raises `MountError`, `StoreError`."""
        mounts = self._images.opened()
        mounted = mounts.mount(snapshot.tenant, snapshot.image, self._holder(folder.name))
        folder.snapshot.mkdir(exist_ok=True)
        mounts.mount_at(mounted, folder.snapshot)
        return mounted

    def unmount(self, folder: ReplicaFolder) -> None:
        """Nobody reads it there any more; the replica goes on holding its objects."""
        unmount_if_mounted(folder.snapshot)

    def layer(self, snapshot: Snapshot) -> Path:
        """The frozen layer as a file of this machine; fetched if need be."""
        shelf = self.shelf(snapshot.tenant)
        name = shelf.object_at(snapshot.image, LAYER)
        shelf.store.ensure(name)
        return shelf.local.path(name)

    def largest_last(self, snapshot: Snapshot) -> list[Path]:
        """Its objects that are here, in the order in which the tool reads them, more or less."""
        store = self.shelf(snapshot.tenant).store
        if not store.local.has(snapshot.image.list):
            return []
        names = read_list(store, snapshot.image.list)
        return [store.local.path(name) for name in sorted(names, key=lambda name: name.size)]

    def _holder(self, replica: str) -> str:
        return f"{self._images.holder(replica)}{KIND}"


def memory_of(folder: ReplicaFolder) -> Path:
    """The tool's files of a mounted snapshot."""
    return folder.snapshot / MEMORY
