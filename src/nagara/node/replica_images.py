"""The images of a node's replicas: brought to the store, mounted, their starts counted, released.

Every app keeps images of its own under names it alone uses, so that what one tenant or app calls
its own another cannot name:

    app.APP.INDEX        the tree an app's version is started from
    model.MODEL.DIGEST   a model as one more layer of it

The store and the mounts are opened when the first image is asked for: a node whose apps use the
machine's own tree has neither. Blocking; called from worker threads.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.base.units import format_bytes
from nagara.contract.node import BadImageError
from nagara.contract.replica import (
    FilesReport,
    ImageOrder,
    ImageReport,
    ModelMount,
    ReplicaSpec,
    TierRead,
)
from nagara.image.content_writer import ContentWriter
from nagara.image.errors import UnknownImageError
from nagara.image.file_memory import FileMemory
from nagara.image.images import Added, Image, find_image, image_from, list_images, remove_image
from nagara.image.lazy_layer import DaemonError
from nagara.image.model_import import import_model
from nagara.image.mounting import Gathering, ImageMounts, MountedImage, data_layers
from nagara.image.mounts import mount_points
from nagara.image.recorder import Touch, touched_bytes
from nagara.image.sources import import_image, memory_path, parse_source
from nagara.image.trace import read_trace, touches_of
from nagara.image.tracing import wants_recording
from nagara.node.far_images import far_image
from nagara.node.files_read import difference, with_recorded
from nagara.store.errors import AbsentError
from nagara.store.roots import read_list, read_root, write_root
from nagara.store.store import Store

_log = logging.getLogger(__name__)
APP_IMAGES = "app."  # how their names begin
HOST = "host"
STORED = "image:"  # an image that was imported under a name before
_PART = "#"  # between a replica's folder and the number of what it holds
_TREES_KEPT = 4  # of an app: the newest
_INDEX_CHARS = 20  # of a base32 digest: 100 bits
_BYTES_PER_LISTED = 40


@dataclass(frozen=True, slots=True)
class ReplicaImages:
    """What is mounted for one replica: its models and its image, topmost first."""

    mounted: tuple[MountedImage, ...]
    kind: str
    before: tuple[TierRead, ...] = ()  # what the tenant's daemon had fetched until then
    gathering: Gathering | None = None

    @property
    def image(self) -> Image:
        return self.mounted[-1].image

    @property
    def layers(self) -> tuple[Path, ...]:
        return tuple(layer for each in self.mounted for layer in each.layers)

    @property
    def data_layers(self) -> tuple[Path, ...]:
        return data_layers(self.mounted)

    @property
    def is_lazy(self) -> bool:
        return any(each.is_lazy for each in self.mounted)


class NodeImages:
    """The images of one node.

    Args:
        state: the machine's state folder: the store, the mounts and the models are below it.
        open_mounts: opens store and mounts, with supervision of the daemons.
    """

    def __init__(self, state: Path, open_mounts: Callable[[], ImageMounts]) -> None:
        self._state = state
        self._models = state / "models"
        self._replicas = state.resolve() / "node/replicas"
        self._open_mounts = open_mounts
        self._mounts: ImageMounts | None = None
        self._opening = threading.Lock()
        self._importing = threading.Lock()
        self._tracing = threading.Lock()
        self._traces: dict[str, list[Touch]] = {}  # by the trace's name
        self._bringing: dict[str, Callable[[], str]] = {}

    def bringing(self) -> tuple[str, ...]:
        """The imports under way, in words."""
        return tuple(describe() for describe in list(self._bringing.values()))

    # -- bringing ----------------------------------------------------------------------------

    def bring(self, order: ImageOrder) -> ImageReport:
        """Imports the app's image and models. Raises `BadImageError` naming the source."""
        begun_s = time.monotonic()
        with self._importing, _named(order.image):
            store = self.opened().store(order.tenant)
            if order.image.startswith(STORED):
                image = find_image(store, order.image.removeprefix(STORED))
                new_bytes, missing = 0, tuple[str, ...]()
            else:
                self._refuse_own_state(order.image)
                added, missing = self._import(store, order)
                image, new_bytes = added.image, added.new_bytes
                self.opened().trust(order.tenant, image)
            self._keep(store, image, order.app)
        for model in order.models:
            self._model_image(store, model)
        elapsed_s = time.monotonic() - begun_s
        _log.info(
            "%s: %s has %d files, %s; %s of it new, in %.1f s", order.app, order.image,
            image.files, format_bytes(image.size_bytes), format_bytes(new_bytes), elapsed_s,
        )  # fmt: skip
        for line in missing:
            _log.warning("%s: %s: this machine does not have %s", order.app, order.image, line)
        return ImageReport(
            str(image.index), image.files, image.size_bytes, new_bytes, missing, elapsed_s
        )

    def _import(self, store: Store, order: ImageOrder) -> tuple[Added, tuple[str, ...]]:
        name = f"app.{order.app}.new"
        try:
            _log.info("%s: bringing %s into the store", order.app, order.image)
            with self._shown(f"{order.app}: {order.image}") as watch:
                return import_image(store, order.image, name, watch=watch)
        finally:
            with contextlib.suppress(UnknownImageError):
                remove_image(store.local, name)

    def _keep(self, store: Store, image: Image, app: str) -> None:
        """Names the tree as one of the app's; with the trace it has there already.

        The oldest ones lose their names: an app that is deployed daily shall not fill the disk.
        What replicas still run from is pinned by them.
        """
        name = app_image(app, str(image.index))
        kept = replace(_local_image(store, name) or image, name=name)
        write_root(store.local, kept.to_root())  # also one that is there: it is the newest now
        trees = [each for each in list_images(store.local) if each.name.startswith(f"app.{app}.")]
        trees.sort(key=lambda each: (store.local.root / each.to_root().key).stat().st_mtime_ns)
        for old in trees[:-_TREES_KEPT]:
            remove_image(store.local, old.name)

    def _model_image(self, store: Store, model: ModelMount) -> Image:
        name = model_image(model)
        if (found := _local_image(store, name)) is not None:  # no start waits for an import
            return found
        with self._importing:
            if (found := _local_image(store, name)) is not None:
                return found
            folder = self._models / model.name
            if not folder.is_dir():
                if (found := self._far_image(store, name)) is not None:
                    return found
                raise BadImageError(
                    "there is no such model on this machine, nor in its zone",
                    where=model.name,
                    hint="nagara models add",
                )
            with (
                _named(f"model {model.name}"),
                FileMemory(memory_path(store)) as memory,
                self._shown(f"model {model.name}") as watch,
            ):
                writer = ContentWriter(store, memory, keeps_files=True)
                watch(writer)
                # Links are followed: the store's folder may be another place's.
                return import_model(store, folder.resolve(), model.name, writer, name).image

    def _refuse_own_state(self, source: str) -> None:
        """An image of nagara's own state would hold every app's secrets, and itself."""
        place = Path(parse_source(source).place).resolve()
        state = self._state.resolve()
        if not source.startswith("registry:") and (
            place.is_relative_to(state) or state.is_relative_to(place)
        ):
            raise BadImageError("holds nagara's own state or lies in it", where=source)

    @contextmanager
    def _shown(self, what: str) -> Iterator[Callable[[ContentWriter], None]]:
        """Shows how far an import is, for as long as it lasts."""
        begun_s = time.monotonic()

        def watch(writer: ContentWriter) -> None:
            self._bringing[what] = lambda: (
                f"{what}: {writer.files} files, {format_bytes(writer.bytes)}, "
                f"{time.monotonic() - begun_s:.0f} s"
            )

        try:
            yield watch
        finally:
            self._bringing.pop(what, None)

    # -- starting ----------------------------------------------------------------------------

    def find(self, spec: ReplicaSpec) -> Image:
        """The app's image as it was deployed; from another machine, or imported again, if the store
        has not got it.

        Raises `BadImageError` when it cannot be had, or its source is another tree by now.
        """
        assert spec.image_index is not None
        with _named(spec.image):
            store = self.opened().store(spec.tenant)
            name = app_image(spec.app, spec.image_index)
            image = _local_image(store, name) or self._far_image(store, name)
            if image is None:
                self.bring(ImageOrder(spec.tenant, spec.app, spec.image))
                image = _local_image(store, name)
            if image is None or str(image.index) != spec.image_index:
                raise BadImageError(
                    "is not what it was when the app was deployed", where=spec.image,
                    hint="deploy the app again",
                )  # fmt: skip
        return image

    def mount(
        self,
        replica: str,
        spec: ReplicaSpec,
        *,
        is_restore: bool,
        gathering: Gathering | None = None,
    ) -> ReplicaImages:
        """Mounts image and models for a replica, which holds them until `release`.

        A first plain start reads through the daemon even if all is here: it notes what is read.
        What `gathering` brings, nothing else does. Raises `BadImageError`, or what the mount
        failed of.
        """
        # What this start fetches is the difference: as early as can be.
        before = () if gathering is None else self._tiers(spec.tenant)
        image = self.find(spec)
        mounts = self.opened()
        store = mounts.store(spec.tenant)
        models = [self._model_image(store, model) for model in spec.models]
        wanted = [*models, image]
        prefer_lazy = not is_restore and image.starts == 0
        mounted = self._mounted(replica, spec.tenant, wanted, prefer_lazy, gathering)
        if len({each.is_lazy for each in mounted}) > 1:
            # One data layer for all: what is looked up in two would be verified by neither.
            mounted = self._mounted(replica, spec.tenant, wanted, True, gathering)
        kind = spec.image.partition(":")[0]
        if gathering is None and any(each.is_lazy for each in mounted):
            before = self._tiers(spec.tenant)
        return ReplicaImages(tuple(mounted), kind, before, gathering)

    def _far_image(self, store: Store, name: str) -> Image | None:
        """From the zone, whose machines could as well order us to run something: what they have
        read and found good need not be read again."""
        image = far_image(store, name)
        if image is not None and store.transfer.is_zone_alone:
            self.opened().trust(store.local.tenant, image)
        return image

    def _mounted(
        self,
        replica: str,
        tenant: str,
        wanted: list[Image],
        prefer_lazy: bool,
        gathering: Gathering | None,
    ) -> list[MountedImage]:
        mounts = self.opened()
        holders = [f"{self.holder(replica)}{number}" for number in range(len(wanted))]
        try:
            return [
                mounts.mount(tenant, image, holder, prefer_lazy=prefer_lazy, gathering=gathering)
                for image, holder in zip(wanted, holders, strict=True)
            ]
        except BaseException:
            for holder in holders:
                mounts.release(holder)
            raise

    def report(self, images: ReplicaImages, tenant: str) -> tuple[FilesReport, Callable[[], None]]:
        """What the start read until now; and what is left to do about it, at leisure."""
        objects = sum(each.image.list.size // _BYTES_PER_LISTED for each in images.mounted)
        size = sum(each.image.size_bytes for each in images.mounted)
        way = images.mounted[-1].way if not images.is_lazy else "lazy"
        recorded = self._recorded(images, tenant)
        if not images.is_lazy:
            files = FilesReport(images.kind, way, objects, size)
            return with_recorded(files, recorded), lambda: None
        touched = {each.holder: self._touched(each) for each in images.mounted}
        reads = [touch for touches in touched.values() for touch in touches or ()]
        if images.gathering is None:
            progress = [self.opened().progress(each) for each in images.mounted]
        else:
            progress = [self.opened().gathered(images.gathering, 0.0)]
        is_counted = all(touches is not None for touches in touched.values()) and not any(
            each.passing for each in images.mounted
        )
        report = FilesReport(
            kind=images.kind,
            way=way,
            objects=objects,
            size_bytes=size,
            read_objects=len({name for name, _ in reads}) if is_counted else None,
            read_bytes=sum(map(touched_bytes, reads)) if is_counted else None,
            prefetched_objects=sum(each.objects for each in progress),
            prefetched_bytes=sum(each.bytes for each in progress),
            tiers=difference(images.before, self._tiers(tenant)),
        )
        if not is_counted:
            report = with_recorded(report, recorded)
        return report, lambda: self._afterwards(images, touched)

    def _recorded(self, images: ReplicaImages, tenant: str) -> list[Touch]:
        """What is known of what such starts touch."""
        if images.gathering is not None:
            return list(touches_of(images.gathering.wanted))
        found: list[Touch] = []
        for each in images.mounted:
            trace = each.image.trace
            if trace is None:
                continue
            if str(trace) not in self._traces:
                try:
                    raw = self.opened().store(tenant).read(trace)
                    objects = read_trace(raw).objects
                except NagaraError as error:
                    _log.warning("the trace of %s is not used: %s", each.image.name, error)
                    continue
                self._traces[str(trace)] = [(n, c) for n, chunks in objects for c in chunks or (0,)]
            found += self._traces[str(trace)]
        return found

    def _afterwards(self, images: ReplicaImages, touched: dict[str, list[Touch] | None]) -> None:
        """Keeps what the start touched as the images' trace, and fetches the rest of them."""
        for each in images.mounted:
            try:
                touches = touched[each.holder]
                if touches is not None:
                    with self._tracing:
                        self.opened().add_touches(each, touches)
                self.opened().fill(each, at_leisure=True)
            except (NagaraError, OSError) as error:
                _log.warning("%s: its trace is not kept: %s", each.image.name, error)

    def _touched(self, mounted: MountedImage) -> list[Touch] | None:
        if mounted.is_gathered or not wants_recording(mounted.image):
            return None
        try:
            return self.opened().touches(mounted)
        except DaemonError as error:
            _log.warning("%s: nobody knows what it read: %s", mounted.image.name, error)
            return None

    def _tiers(self, tenant: str) -> tuple[TierRead, ...]:
        try:
            reports = self.opened().tier_reports(tenant)
        except DaemonError:
            return ()
        return tuple(TierRead(each.tier, each.hits, each.read_bytes) for each in reports)

    def weights(self, spec: ReplicaSpec) -> list[Path]:
        """The large objects of the app's models that are here, to be read ahead."""
        store = self.opened().store(spec.tenant)
        listed = (read_list(store, self._model_image(store, m).list) for m in spec.models)
        large = sorted({n for names in listed for n in names if n.is_chunked}, key=str)
        return [store.local.path(name) for name in large if store.local.has(name)]

    # -- ending ------------------------------------------------------------------------------

    def release(self, replica: str) -> None:
        """The replica needs its images no more. May be repeated."""
        if self._mounts is None and not self._has_store():
            return
        mounts = self.opened()
        holder = self.holder(replica)
        for each in {pin.holder for pin in mounts.pins() if pin.holder.startswith(holder)}:
            mounts.release(each)

    def reconcile(self, replicas: Collection[str]) -> None:
        """Releases what replicas of an earlier node held that are gone."""
        if self._mounts is None and not self._has_store():
            return
        mounts = self.opened()
        alive = tuple(self.holder(replica) for replica in replicas)
        holders = {pin.holder for pin in mounts.pins()}
        for holder in holders:
            if holder.startswith(alive) or not self._is_gone(holder):
                continue
            mounts.release(holder)
        mounts.take_down_unneeded()

    def resume(self) -> None:
        """Looks after the file daemons of an earlier node again: of tenants with replicas."""
        if self._mounts is None:
            return
        for tenant in {pin.tenant for pin in self._mounts.pins()}:
            try:
                self._mounts.resume(tenant)
            except NagaraError as error:
                _log.error("files of %s's replicas cannot be read: %s", tenant, error)

    def forget_app(self, tenant: str, app: str) -> None:
        """Takes the names of the app's images away; `nagara store gc` frees what they kept."""
        if self._mounts is None and not self._has_store():
            return
        if tenant not in self.opened().objects.tenant_names():
            return  # and perhaps cannot have a part of the store at all
        local = self.opened().store(tenant).local
        for image in list_images(local):
            if image.name.startswith(f"app.{app}."):
                remove_image(local, image.name)

    def close(self, *, take_down: bool) -> None:
        """Ends the supervision; with `take_down` also mounts and daemons that nobody needs."""
        if self._mounts is not None:
            if take_down:
                self._mounts.take_down_unneeded()
            self._mounts.close()
            self._mounts.objects.close()
            self._mounts = None

    def holder(self, replica: str) -> str:
        """Several nodes may share a store: a holder is named by its replica's folder."""
        return f"{self._replicas / replica}{_PART}"

    def _is_gone(self, holder: str) -> bool:
        """Whether a holder is one no longer; `holder` is no replica of this node that runs."""
        place, part, _ = holder.partition(_PART)
        if not part:  # a person's mount point
            return not any(point.target == Path(place) for point in mount_points(Path(place)))
        return Path(place).parent == self._replicas or not Path(place).exists()

    def _has_store(self) -> bool:
        return (self._state / "store/ledger.sqlite").exists()

    def opened(self) -> ImageMounts:
        """The mounts, and the store under them; opened the first time."""
        with self._opening:
            if self._mounts is None:
                self._mounts = self._open_mounts()
            return self._mounts


def app_image(app: str, index: str) -> str:
    """The name of one of an app's images."""
    return f"{APP_IMAGES}{app}.{index[:_INDEX_CHARS]}"


def _local_image(store: Store, name: str) -> Image | None:
    try:
        return image_from(read_root(store.local, "images", name))
    except AbsentError:
        return None


def model_image(model: ModelMount) -> str:
    """The name of a model's image."""
    return f"model.{model.name}.{model.digest.removeprefix('sha256:')[:_INDEX_CHARS]}"


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Whatever is wrong with a source becomes one error that names it."""
    try:
        yield
    except BadImageError:
        raise
    except NagaraError as error:
        where = f"{source}: {error.where}" if error.where else source
        raise BadImageError(error.what, where=where, hint=error.hint) from error
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise BadImageError(what, where=source) from error
