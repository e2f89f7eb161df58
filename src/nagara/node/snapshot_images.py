"""The snapshots of a node as images of its store: mounted for a restore, pinned by replicas.

A restore reads the memory through one read-only overlay: the image's index over the machine's
own objects when all are here, else over the daemon that fetches them. Blocking: worker threads.
"""

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.base.units import format_bytes
from nagara.image.images import Image
from nagara.image.lazy_layer import DaemonError
from nagara.image.mounting import Gathering, MountedImage
from nagara.image.mounts import unmount_if_mounted
from nagara.image.shelf import Fault, Shelf
from nagara.image.trace import NO_TRACE, Trace, whole
from nagara.image.tracing import touches_of_stretches
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.replica_images import NodeImages
from nagara.node.sealing import Sealing, memory_folder, mount_memory, unmount_memory
from nagara.snapshot.catalog import KIND, LAYER, MEMORY, Snapshot
from nagara.snapshot.errors import BadSnapshotError
from nagara.snapshot.prefetch import ReadAhead, prefetch
from nagara.store.errors import CorruptError
from nagara.store.ledger import Pin
from nagara.store.names import ObjectName
from nagara.store.roots import read_list

_log = logging.getLogger(__name__)
_SMALL_BYTES = 1 << 20
_MOMENT_S = 10.0  # for so long a start waits for all of it
_INDEX_S = 10.0  # so long a start waits for a tier that has begun to answer and does not go on
_ASKED = 4  # of many objects that are not here


class SnapshotImages:
    """What a node's snapshots are kept and shown by."""

    def __init__(self, images: NodeImages, sealing: Sealing) -> None:
        self._images = images
        self.sealing = sealing
        self._lazy: dict[str, MountedImage] = {}  # of replicas that have just been restored
        self._read_ahead = ReadAhead()

    def close(self) -> None:
        """Ends what goes on in the background."""
        self._read_ahead.close()

    def shelf(self, tenant: str) -> Shelf:
        """A tenant's snapshots in the store."""
        return Shelf(self._images.opened().store(tenant), KIND)

    def tenants(self) -> Sequence[str]:
        """Who has a part of the store."""
        return self._images.opened().objects.tenant_names()

    def has_tiers(self, tenant: str) -> bool:
        """Whether there are other places that may have what is not here."""
        return bool(self.shelf(tenant).store.transfer.tiers)

    def cannot_be_had(self, tenant: str, faults: Sequence[Fault]) -> list[Fault]:
        """Those of a snapshot's faults that no other tier makes up for.

        Raises `UnavailableError` when that cannot be found out.
        """
        shelf = self.shelf(tenant)
        # Who has some of a snapshot has all of it: its root came last.
        asked = [fault for fault in faults if fault.is_wrong] or list(faults[:_ASKED])
        return [fault for fault in asked if not shelf.is_elsewhere(fault.object)]

    def trust(self, tenant: str, image: Image) -> None:
        """The image was made here."""
        self._images.opened().trust(tenant, image)

    def pin(self, replica: str, snapshot: Snapshot) -> None:
        """Until the replica's images are released nothing of the snapshot is evicted."""
        pin = Pin(self._holder(replica), snapshot.tenant, str(snapshot.image.list))
        self._images.opened().objects.ledger.pin(pin)

    def read_small(self, snapshot: Snapshot, programs: Sequence[Path]) -> None:
        """Reads what is here of the snapshot and small, what else a mount looks at, and the
        programs of a restore: behind large reads each of these would wait for the disk."""
        self._images.opened().prepare(snapshot.tenant, snapshot.image)
        small = [path for path, size in self._here(snapshot) if size <= _SMALL_BYTES]
        prefetch([*small, *programs])

    def begin_reading(self, snapshot: Snapshot, weights: Sequence[Path]) -> None:
        """Begins to read ahead what is here of the snapshot and large, and `weights`.

        The frozen layer comes after the memory, which a restore reads all of: of the layer it
        reads a few files.
        """
        large = [path for path, size in self._here(snapshot) if size > _SMALL_BYTES]
        self._read_ahead.begin([*large, *weights])

    def _here(self, snapshot: Snapshot) -> list[tuple[Path, int]]:
        """The snapshot's objects, the largest last, and of these the layer."""
        store = self.shelf(snapshot.tenant).store
        is_listed = store.local.has(snapshot.image.list)
        names = read_list(store, snapshot.image.list) if is_listed else []
        layer_bytes = snapshot.record.layer_bytes
        names.sort(key=lambda name: (name.size == layer_bytes, name.size))
        return [(store.local.path(name), name.size) for name in names]

    def touches(self, snapshot: Snapshot, read: Mapping[ObjectName, Collection[int]]) -> Trace:
        """What starts elsewhere fetch, given the objects that one read and the stretches of each.

        A sealed snapshot is believed because of its seal, and excerpts have none.

        Raises `StoreError`, OSError.
        """
        store = self._images.opened().store(snapshot.tenant)
        is_sealed = snapshot.record.sealed_by is not None
        return touches_of_stretches(store, read, may_excerpt=not is_sealed)

    def gather(self, folder: ReplicaFolder, snapshot: Snapshot) -> Gathering | None:
        """Begins to fetch what is not here of the snapshot, and then what its memory maps of image
        and models; None when all of it is here.

        Raises `MountError`, `StoreError`, OSError.
        """
        names = read_list(self.shelf(snapshot.tenant).store, snapshot.image.list)
        names.sort(key=lambda name: name.size)
        touches = snapshot.record.touches
        excerpts = touches.excerpts if snapshot.record.sealed_by is None else None
        wanted = Trace((*map(whole, names), *touches.objects), excerpts=excerpts)
        return self._images.opened().gather(snapshot.tenant, self._holder(folder.name), wanted)

    def mount(
        self, folder: ReplicaFolder, snapshot: Snapshot, gathering: Gathering | None
    ) -> MountedImage:
        """Shows the snapshot at `folder.snapshot`, and its memory where `memory_of` says.

        What comes within a moment is waited for, if all that will be read is known: read as files
        of this machine it takes less than through the daemon. Else it is read while it comes.

        Raises `MountError`, `StoreError`, OSError.
        """
        mounts = self._images.opened()
        holder = self._holder(folder.name)
        if gathering is not None and snapshot.record.touches != NO_TRACE:
            self._await(gathering)
        deadline_s = time.monotonic() + _INDEX_S
        mounted = mounts.mount(
            snapshot.tenant, snapshot.image, holder, deadline_s=deadline_s, gathering=gathering
        )
        folder.snapshot.mkdir(exist_ok=True)
        mounts.mount_at(mounted, folder.snapshot)
        if mounted.is_lazy:
            self._lazy[folder.name] = mounted
            if gathering is None:
                mounts.fill(mounted)
        if snapshot.record.sealed_by is not None:
            mount_memory(folder.opened)
            for path in sorted((folder.snapshot / MEMORY).iterdir()):
                self._open(snapshot, f"{MEMORY}/{path.name}", path, folder.opened / path.name)
        return mounted

    def _await(self, gathering: Gathering) -> None:
        try:
            found = self._images.opened().gathered(gathering, _MOMENT_S)
        except DaemonError as error:  # another one is coming, which fetches what is read
            _log.warning("a snapshot is read as it comes: %s", error)
        else:
            _log.debug("%s have come, %s are to come",
                format_bytes(found.bytes), format_bytes(found.left_bytes),
            )  # fmt: skip

    def _open(self, snapshot: Snapshot, inside: str, sealed: Path, target: Path) -> None:
        try:
            self.sealing.open_file(snapshot.tenant, snapshot.name, inside, sealed, target)
        except CorruptError as error:
            raise BadSnapshotError(error.what, where=f"{snapshot.name}/{inside}") from error

    def unmount(self, folder: ReplicaFolder) -> None:
        """Nobody reads it there any more; the replica goes on holding its objects."""
        unmount_memory(folder.opened)
        unmount_if_mounted(folder.snapshot)

    def forget(self, replica: str) -> None:
        """The replica is taken down."""
        self._lazy.pop(replica, None)

    def not_fetched(self, replica: str) -> str | None:
        """Why something of a snapshot that comes from another tier could not be had so far."""
        mounted = self._lazy.get(replica)
        try:
            return None if mounted is None else self._images.opened().progress(mounted).error
        except DaemonError as error:
            return str(error)

    def afterwards(self, replica: str) -> Callable[[], None]:
        """What is left to do, at leisure, about a snapshot that came from another tier."""
        return functools.partial(self._keep, self._lazy.pop(replica, None))

    def _keep(self, mounted: MountedImage | None) -> None:
        """The next start here needs no daemon for it."""
        if mounted is None:
            return
        try:
            self._images.opened().fill(mounted, at_leisure=True)
        except (NagaraError, OSError) as error:
            _log.warning("%s: is not kept: %s", mounted.image.name, error)

    @contextmanager
    def layer(self, snapshot: Snapshot, scratch: Path) -> Iterator[Path]:
        """The frozen layer as a file of this machine; fetched if need be.

        Args:
            scratch: a folder to make for as long as it takes, if the layer is encrypted.
        """
        kept = self._kept_layer(snapshot)
        if snapshot.record.sealed_by is None:
            yield kept
            return
        with memory_folder(scratch) as folder:
            self._open(snapshot, LAYER, kept, folder / LAYER)
            yield folder / LAYER

    def _kept_layer(self, snapshot: Snapshot) -> Path:
        shelf = self.shelf(snapshot.tenant)
        name = shelf.object_at(snapshot.image, LAYER)
        shelf.store.ensure(name)
        return shelf.local.path(name)

    def _holder(self, replica: str) -> str:
        return f"{self._images.holder(replica)}{KIND}"


def memory_of(folder: ReplicaFolder) -> Path:
    """The tool's files of a mounted snapshot."""
    return folder.opened if folder.opened.is_mount() else folder.snapshot / MEMORY
