"""Mounting images for replicas: what lies below a writable layer, and who takes it down again.

    FOLDER/index/TENANT/INDEX   an EROFS mount of an index, shared by all who need it
    FOLDER/lazy/TENANT          the lazy data layer (see `lazy_layer`)
    FOLDER/checked/TENANT/INDEX an index from outside that was read and found good
    FOLDER/tree/TENANT/INDEX    where overlay lacks data-only layers: the whole image by FUSE
    FOLDER/copy/TENANT/INDEX    where FUSE is missing too: the image as plain files

A holder (a replica, a mount point) gets the layers and pins the image's objects; when the last
holder of an index lets go, its mount is taken down. Pins are in the store's ledger, so that a new
process knows them: `reconcile` drops those of holders that are gone.

Blocking, needs root. Called from any thread.
"""

import contextlib
import logging
import shutil
import subprocess
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nagara.image.checkout import check_out
from nagara.image.images import Image, check_index, fetch_metadata, find_image, load_lower
from nagara.image.lazy_layer import (
    DaemonError,
    DescriptorKeeper,
    Launch,
    LazyLayer,
    launch_detached,
)
from nagara.image.mount_api import mount_overlay_on
from nagara.image.mounts import MountError, mount_erofs, mount_points, unmount_if_mounted
from nagara.image.prefetch import Progress, boot_id
from nagara.image.recorder import Touch
from nagara.image.trace import NO_TRACE, Trace, plain_touches, without
from nagara.image.tracing import add_recording, wants_recording
from nagara.store.ledger import Pin
from nagara.store.local import ObjectFolder
from nagara.store.names import parse_name
from nagara.store.statistics import TierReport
from nagara.store.store import Store

_log = logging.getLogger(__name__)
_FORGET_S = 1.0
_ANSWER_S = 10.0
_FEW_OBJECTS = 2048  # to look at that many takes some milliseconds
Method = Literal["overlay", "tree", "checkout"]  # see `probing`


@dataclass(frozen=True, slots=True)
class MountedImage:
    """The layers of one image for one holder. Has the same questions as `HostImage`."""

    image: Image
    tenant: str
    holder: str
    layers: tuple[Path, ...]  # read-only, topmost first
    data_layers: tuple[Path, ...]  # they only give bytes
    is_lazy: bool
    passing: tuple[Path, ...] = ()  # where what is proven is read past the daemon
    way: str = "local"  # how it is shown: lazy, local, tree, copy
    is_gathered: bool = False  # see `ImageMounts.gather`

    def prepare_upper(self, upper: Path) -> None:
        """An image has nothing to hide."""

    def bound_folders(self) -> tuple[Path, ...]:
        """An image brings everything it needs."""
        return ()

    def fingerprint(self) -> str:
        """Equal fingerprints, equal trees; part of a snapshot's key."""
        return f"image:{self.image.fingerprint}"

    def kept_files(self) -> tuple[Path, ...]:
        """Files of this machine that must stay as they are while it is mounted."""
        return self.layers


@dataclass(frozen=True, slots=True)
class Gathering:
    """What a start will read is on its way to this machine.

    `passing`: where what has come is read past the daemon.
    """

    tenant: str
    holder: str
    wanted: Trace
    passing: tuple[Path, ...]


class ImageMounts:
    """The image mounts of one machine.

    Args:
        folder: for mount points and sockets; private to its owner.
        objects: the object folder.
        open_store: a tenant's store over it.
        keeper: holds the descriptors of lazy layers.
        command: the file daemon's command line for a tenant, without name and socket.
        method: what `probing` found this machine can do.
        supervise: replace a daemon that died at once; for processes that live long.
    """

    def __init__(
        self,
        folder: Path,
        objects: ObjectFolder,
        open_store: Callable[[str], Store],
        keeper: DescriptorKeeper,
        command: Callable[[str], Sequence[str]],
        *,
        launch: Launch = launch_detached,
        method: Method = "overlay",
        supervise: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)  # probing may have made it; what is mounted in it is not for everybody
        self._folder = folder
        self.objects = objects
        self._open_store = open_store
        self._keeper = keeper
        self._command = command
        self._launch = launch
        self._method = method
        self._supervise = supervise
        self._lock = threading.RLock()
        self._lazy: dict[str, LazyLayer] = {}
        self._stores: dict[str, Store] = {}

    def store(self, tenant: str) -> Store:
        """The tenant's store, opened once."""
        with self._lock:
            if tenant not in self._stores:
                self._stores[tenant] = self._open_store(tenant)
            return self._stores[tenant]

    def lazy_layer(self, tenant: str) -> LazyLayer:
        """The tenant's lazy data layer; `ensure` it before use."""
        with self._lock:
            if tenant not in self._lazy:
                self._lazy[tenant] = LazyLayer(
                    self._folder, tenant, self._keeper, self._command(tenant), launch=self._launch
                )
            return self._lazy[tenant]

    def mount(
        self,
        tenant: str,
        image: Image,
        holder: str,
        *,
        prefer_lazy: bool = False,
        deadline_s: float | None = None,
        gathering: Gathering | None = None,
    ) -> MountedImage:
        """The layers of an image for `holder`, which pins it until `release`.

        Prefetching of what a start touches has begun when this returns; or, for the first starts
        of an image, recording.

        Args:
            prefer_lazy: use the lazy layer even when everything is here.
            deadline_s: until then the index must have come; None: the store's usual limit.
            gathering: brings what the start reads; then nothing is prefetched or recorded.

        Raises:
            StoreError: the index cannot be had.
            BadIndexError, ImageError: the index is not to be trusted.
            MountError, DaemonError: this machine cannot mount it.
        """
        store = self.store(tenant)
        ledger = self.objects.ledger
        ledger.pin(Pin(holder, tenant, str(image.list)))
        try:
            is_local = not prefer_lazy and ledger.is_complete(tenant, str(image.list), boot_id())
            fetch_metadata(store, image, deadline_s, with_trace=gathering is None)
            if self._method != "overlay":
                return self._mount_otherwise(store, tenant, image, holder)
            # Before anything else is fetched: what comes then is right, but not recorded yet.
            if is_local:
                passing: tuple[Path, ...] = ()
            elif gathering is not None:
                passing = gathering.passing
            else:
                passing = _passing(store, image)
                self._serve_lazily(tenant, image, holder)
            self._check(store, tenant, image)
            layer = self._mount_index(store, tenant, image)
        except BaseException:
            self.release(holder)
            raise
        if is_local:
            return MountedImage(
                image, tenant, holder, (layer,), (store.local.objects,), is_lazy=False
            )
        data = (self.lazy_layer(tenant).path,)
        return MountedImage(
            image, tenant, holder, (layer,), data, True, passing, "lazy", gathering is not None
        )

    def mount_at(
        self,
        mounted: MountedImage,
        target: Path,
        *,
        upper: Path | None = None,
        work: Path | None = None,
        above: Sequence[MountedImage] = (),
    ) -> None:
        """The whole tree at `target`; read-only without `upper`.

        Args:
            above: layer images (frozen uppers) on top of it, the topmost first.
        """
        stack = (*above, mounted)
        lower = [layer for each in stack for layer in each.layers]
        data = data_layers(stack)
        if upper is None and not data and len(lower) == 1:
            # Overlay wants two layers; it alone shows escaped attributes as they were.
            empty = self._folder / "empty"
            empty.mkdir(exist_ok=True)
            lower.append(empty)
        mount_overlay_on(lower, target, data=data, upper=upper, work=work)

    def gather(self, tenant: str, holder: str, wanted: Trace) -> Gathering | None:
        """Begins to fetch what a start is known to read of its images, in this order; None when
        all of it is here, or this machine shows images otherwise."""
        store = self.store(tenant)
        if self._method != "overlay" or not store.transfer.tiers:
            return None
        if (wanted := without(wanted, store.local.has)) == NO_TRACE:
            return None
        # Before anything comes: that is right, but not recorded yet.
        is_passed = store.local.is_all_proven(_FEW_OBJECTS)
        passing = (store.local.objects,) if is_passed else ()
        gathering = Gathering(tenant, holder, wanted, passing)
        lazy = self._served_layer(tenant)
        request = {"op": "gather", "name": holder, "wanted": plain_touches(wanted)}
        self._try(lazy, {**request, "distance_s": store.transfer.distance_s})
        return gathering

    def gathered(self, gathering: Gathering, limit_s: float) -> Progress:
        """Waits until all has come, unless that would take longer than `limit_s`; what has come
        by then. Raises `DaemonError`."""
        request = {"op": "gathered", "name": gathering.holder, "limit_s": limit_s}
        lazy = self.lazy_layer(gathering.tenant)
        found = lazy.ask(request, time_limit_s=limit_s + _ANSWER_S)
        return Progress(**found["progress"])

    def release(self, holder: str) -> None:
        """The holder needs its image no more: pins go, and mounts that nobody else needs."""
        with self._lock:
            mine = [pin for pin in self.objects.ledger.pins() if pin.holder == holder]
            self.objects.ledger.unpin(holder)
            for pin in mine:
                self._drop_unneeded(pin.tenant)
        for tenant in {pin.tenant for pin in mine}:
            self._forget(tenant, holder)

    def reconcile(self, alive: Collection[str]) -> None:
        """Releases the holders that are gone; after a restart of this process."""
        for holder in {pin.holder for pin in self.objects.ledger.pins()} - set(alive):
            self.release(holder)

    def finish_recording(self, mounted: MountedImage) -> Image:
        """The start is over: what it touched becomes part of the image's trace."""
        if not mounted.is_lazy or not wants_recording(mounted.image):
            return mounted.image
        return self.add_touches(mounted, self.touches(mounted))

    def touches(self, mounted: MountedImage) -> list[Touch]:
        """Ends the recording of a start: what it touched, in order."""
        answer = self.lazy_layer(mounted.tenant).ask({"op": "recorded", "name": mounted.holder})
        return [(parse_name(text), int(chunk)) for text, chunk in answer["touches"]]

    def add_touches(self, mounted: MountedImage, touches: Sequence[Touch]) -> Image:
        """Makes a recording part of the trace that the image has by now; one at a time."""
        store = self.store(mounted.tenant)
        image = find_image(store, mounted.image.name)
        return add_recording(store, image, touches, is_partial=bool(mounted.passing))

    def progress(self, mounted: MountedImage) -> Progress:
        """How far prefetching is; zeros for the local layer."""
        if not mounted.is_lazy:
            return Progress()
        found = self.lazy_layer(mounted.tenant).ask({"op": "progress", "name": mounted.holder})
        return Progress(**found["progress"])

    def tier_reports(self, tenant: str) -> list[TierReport]:
        """What the tenant's daemon had from each tier, nearest first. Raises `DaemonError`."""
        answer = self.lazy_layer(tenant).ask({"op": "stats"})
        return [TierReport(**report) for report in answer["tiers"]]

    def fill(self, mounted: MountedImage, *, at_leisure: bool = False) -> None:
        """Begins to fetch the rest of an image, so that its next mount is local.

        `at_leisure`: whoever reads what is not here yet comes first.
        """
        ledger, image = self.objects.ledger, mounted.image
        if mounted.is_lazy and not ledger.is_complete(mounted.tenant, str(image.list), boot_id()):
            request = {"op": "fill", "name": mounted.holder, "at_leisure": at_leisure}
            request |= {"list": str(image.list), "index": str(image.index)}
            self.lazy_layer(mounted.tenant).ask(request)

    def trust(self, tenant: str, image: Image) -> None:
        """The index was made on this machine: it need not be read before it is mounted."""
        mark = self._mark(tenant, image)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    def prepare(self, tenant: str, image: Image) -> None:
        """Looks at what mounting the image will need, while the disk is idle."""
        self._mark(tenant, image).exists()
        (self._folder / "index" / tenant / str(image.index)).mkdir(parents=True, exist_ok=True)
        self.objects.ledger.pins()

    def expect(self, tenant: str) -> None:
        """An image is going to be mounted that is not here: its daemon is there already then.

        Raises `MountError`, `DaemonError`.
        """
        if self._method == "overlay":
            self._served_layer(tenant)

    def pins(self) -> list[Pin]:
        """Who holds what."""
        return self.objects.ledger.pins()

    def resume(self, tenant: str) -> None:
        """After a restart of this process: looks after the tenant's daemon again, if it has one.

        Raises `MountError`, `DaemonError`.
        """
        lazy = self.lazy_layer(tenant)
        if lazy.is_mounted():
            self._served_layer(tenant)

    def take_down_unneeded(self) -> None:
        """Takes down what nobody holds: mounts of indexes, lazy layers and their daemons."""
        held = {pin.tenant for pin in self.pins()}
        for place in ("index", "lazy", "tree", "copy"):
            for entry in sorted((self._folder / place).glob("*")):
                with self._lock:
                    self._drop_unneeded(entry.name)
                    if place == "lazy" and entry.name not in held:
                        self.lazy_layer(entry.name).unmount()
                        with contextlib.suppress(OSError):
                            entry.rmdir()

    def close(self) -> None:
        """Ends supervision and stores; mounts and daemons stay."""
        for lazy in self._lazy.values():
            lazy.leave()
        for store in self._stores.values():
            store.close()

    def _serve_lazily(self, tenant: str, image: Image, holder: str) -> None:
        lazy = self._served_layer(tenant)
        if image.trace is not None:
            request = {"op": "prefetch", "name": holder, "trace": str(image.trace)}
            request |= {"list": str(image.list)}
            distance_s = self.store(tenant).transfer.distance_s
            self._try(lazy, {**request, "distance_s": distance_s})
        if wants_recording(image):
            self._try(lazy, {"op": "record", "name": holder, "list": str(image.list)})

    def _served_layer(self, tenant: str) -> LazyLayer:
        lazy = self.lazy_layer(tenant)
        lazy.ensure()
        if self._supervise:
            lazy.supervise()
        return lazy

    def _mount_otherwise(
        self, store: Store, tenant: str, image: Image, holder: str
    ) -> MountedImage:
        """The fallbacks: one layer that has the contents too."""
        self._check(store, tenant, image)
        part = str(image.index)
        if self._method == "tree":
            layer = self._tree_layer(tenant, part)
            layer.ensure()
            return MountedImage(image, tenant, holder, (layer.path,), (), is_lazy=False, way="tree")
        target = self._folder / "copy" / tenant / part
        with self._lock:
            if not target.exists():
                making = target.with_name(f".{part}.new")
                shutil.rmtree(making, ignore_errors=True)
                done = check_out(store, load_lower(store, image.index), making)
                if done.left_out:
                    _log.warning(
                        "%s: %d things could not be copied as they are, such as %s",
                        image.name, len(done.left_out), done.left_out[0],
                    )  # fmt: skip
                making.rename(target)
        return MountedImage(image, tenant, holder, (target,), (), is_lazy=False, way="copy")

    def _tree_layer(self, tenant: str, index: str) -> LazyLayer:
        command = self._command(tenant)
        return LazyLayer(
            self._folder, tenant, self._keeper, command, launch=self._launch, tree=index
        )

    def _try(self, lazy: LazyLayer, request: dict[str, Any]) -> None:
        """A start does without prefetch and recording if it must."""
        try:
            lazy.ask(request)
        except DaemonError as error:
            _log.warning("%s does not begin: %s", request["op"], error)

    def _forget(self, tenant: str, holder: str) -> None:
        """The daemon keeps nothing about a holder that is gone; a dead one has forgotten all."""
        lazy = self.lazy_layer(tenant)
        if lazy.socket.exists():
            with contextlib.suppress(DaemonError):
                lazy.ask({"op": "forget", "name": holder}, time_limit_s=_FORGET_S)

    def _check(self, store: Store, tenant: str, image: Image) -> None:
        if not self._mark(tenant, image).exists():
            check_index(store, image)
            self.trust(tenant, image)

    def _mark(self, tenant: str, image: Image) -> Path:
        return self._folder / "checked" / tenant / str(image.index)

    def _mount_index(self, store: Store, tenant: str, image: Image) -> Path:
        target = self._folder / "index" / tenant / str(image.index)
        with self._lock:
            if not any(point.target == target for point in mount_points(target)):
                target.mkdir(parents=True, exist_ok=True)
                mount_index(store.local.path(image.index), target)
        return target

    def _drop_unneeded(self, tenant: str) -> None:
        """Takes down the index mounts of a tenant whose images nobody pins."""
        folder = self._folder / "index" / tenant
        local = self.objects.tenant(tenant)
        needed: set[str] = set()
        for pin in self.objects.ledger.pins():
            if pin.tenant == tenant:
                needed |= local.listed(pin.list) or set()
        for point in mount_points(folder):
            if point.target.parent == folder and point.target.name not in needed:
                unmount_if_mounted(point.target)
                with contextlib.suppress(OSError):
                    point.target.rmdir()
        trees = self._folder / "tree" / tenant
        for point in mount_points(trees):
            if point.target.parent == trees and point.target.name not in needed:
                self._tree_layer(tenant, point.target.name).unmount()
                point.target.rmdir()
        for copy in (self._folder / "copy" / tenant).glob("[!.]*"):
            if copy.name not in needed:
                shutil.rmtree(copy)


def data_layers(stack: Sequence[MountedImage]) -> tuple[Path, ...]:
    """What gives bytes to images on top of each other.

    Where one of them has to ask the daemon for everything, they all do.
    """
    is_passed = all(each.passing for each in stack if each.is_lazy)
    passing = [layer for each in stack for layer in each.passing] if is_passed else []
    return tuple(dict.fromkeys([*passing, *(d for each in stack for d in each.data_layers)]))


def _passing(store: Store, image: Image) -> tuple[Path, ...]:
    """Folders of the store that a mount may read past the daemon.

    The whole object folder while it has so few objects that all of them can be looked at: on a
    machine that has just come, what is fetched ahead of need is then read without asking anybody.
    Else the large ones. The start that makes an image's first trace asks for everything.
    """
    if image.trace is None and wants_recording(image):
        return ()
    if store.local.is_all_proven(_FEW_OBJECTS):
        return (store.local.objects,)
    return (store.local.proven.folder,) if store.local.offer_large(image.list) else ()


def mount_index(index: Path, target: Path) -> None:
    """Mounts an index: from the file itself (Linux 6.12), else through a loop device."""
    try:
        mount_erofs(index, target)
    except MountError as error:
        done = subprocess.run(
            ["mount", "-t", "erofs", "-o", "loop,ro,nodev,nosuid", str(index), str(target)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise MountError(f"{error.what}; by loop: {done.stderr.strip()}") from error
