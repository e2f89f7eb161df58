"""One bound for everything that a node keeps on its disk, and what goes first when it is passed.

    1  logs of replicas that have ended, the oldest first
    2  objects that no root names and nobody holds (fetched, or left by what was removed)
    3  snapshots of earlier versions of apps, the oldest first
    4  images of earlier versions of apps, the oldest first

Never what is in use: a replica's log while it runs, the newest snapshots and image of an app, what
a pin or another root keeps. When all of the above has gone and it is still too much, that is said.
`order` is pure; the rest blocks: worker threads. Runs every minute on the node's loop.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.base.units import format_bytes
from nagara.contract.replica import DiskReport
from nagara.node.logs import ReplicaLogs
from nagara.node.owned_tasks import in_thread
from nagara.node.replica_images import APP_IMAGES, NodeImages
from nagara.node.replica_usage import layer_bytes
from nagara.snapshot.catalog import Catalog, Listed
from nagara.store.collecting import collect_local
from nagara.store.errors import AbsentError
from nagara.store.local import LocalTier
from nagara.store.roots import list_roots, remove_root

LOOK_EVERY_S = 60.0
GRACE_S = 3600.0  # for those who have added objects and not yet their root
_CONTROL_FILES = "control.db*"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Old:
    """Something that nobody needs any more, and when it was last of use."""

    kind: str
    name: str
    at_s: float
    remove: Callable[[], int]  # gives back how many bytes that has freed outside the store


class DiskBudget:
    """The bound of one node.

    Args:
        state: the whole state folder.
        catalog: of the node's snapshots; None where there are none.
        limit_bytes: None bounds nothing, and only tells.
        grace_s: so long an object that no root names was not used before it goes.
    """

    def __init__(
        self,
        state: Path,
        images: NodeImages,
        logs: ReplicaLogs,
        catalog: Catalog | None,
        limit_bytes: int | None = None,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self._state = state
        self._images = images
        self._logs = logs
        self._catalog = catalog
        self.limit_bytes = limit_bytes
        self._grace_s = grace_s
        self._freed: Counter[str] = Counter()
        self._is_said = False

    async def keep(self, running: Callable[[], Collection[str]]) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await in_thread(self.look, frozenset(running()))
            except (NagaraError, OSError) as error:
                _log.warning("the disk could not be tidied: %s", error)

    def look(self, running: Collection[str]) -> None:
        """Removes what has to go, in order, until everything fits."""
        if self.limit_bytes is None:
            return
        over_bytes = sum(self._parts().values()) - self.limit_bytes
        if over_bytes <= 0:
            self._is_said = False
            return
        for old in order(self._logs_ended(running)):
            if over_bytes <= 0:
                return
            over_bytes -= self._remove(old)
        over_bytes -= self._count("objects", self._collect)
        for old in order([*self._old_snapshots(), *self._old_images()]):
            if over_bytes <= 0:
                return
            over_bytes -= self._remove(old)
        if over_bytes > 0 and not self._is_said:
            self._is_said = True
            _log.warning(
                "the disk budget of %s is passed by %s, and all of it is in use",
                *(format_bytes(self.limit_bytes), format_bytes(over_bytes)),
            )

    def report(self) -> DiskReport:
        """What is there by part, and what was removed since this node began."""
        return DiskReport(
            self.limit_bytes,
            tuple(sorted(self._parts().items())),
            tuple(sorted(self._freed.items())),
        )

    def _parts(self) -> dict[str, int]:
        return {
            "logs": layer_bytes(self._state / "node/logs"),
            "store": self._store_bytes(),
            "layers": sum(map(layer_bytes, (self._state / "node/replicas").glob("*/upper"))),
            "history": sum(_size(path) for path in self._state.glob(_CONTROL_FILES)),
        }

    def _remove(self, old: Old) -> int:
        freed_bytes = self._count(old.kind, old.remove)
        _log.info("to keep to the disk budget: removed the %s %s", old.kind, old.name)
        return freed_bytes

    def _count(self, kind: str, remove: Callable[[], int]) -> int:
        """What a removal frees: what it says itself, and what the store has become smaller by."""
        before_bytes = self._store_bytes()
        freed_bytes = remove() + before_bytes - self._store_bytes()
        self._freed[kind] += freed_bytes
        return freed_bytes

    def _store_bytes(self) -> int:
        has_store = (self._state / "store/ledger.sqlite").exists()
        return self._images.opened().objects.ledger.total_bytes() if has_store else 0

    def _collect(self) -> int:
        if (self._state / "store/ledger.sqlite").exists():
            objects = self._images.opened().objects
            for tenant in objects.tenant_names():
                collect_local(objects.tenant(tenant), self._grace_s)
        return 0

    def _logs_ended(self, running: Collection[str]) -> Iterator[Old]:
        for log in self._logs.ended(running):
            yield Old("log", log.stem, _changed_s(log), partial(self._logs.remove, log))

    def _old_snapshots(self) -> Iterator[Old]:
        """All whose key is not that of the newest one of their app."""
        by_app: dict[tuple[str, str], list[Listed]] = {}
        for listed in self._catalog.everything() if self._catalog is not None else ():
            by_app.setdefault((listed.tenant, listed.app), []).append(listed)
        for listed_ones in by_app.values():
            newest = max(listed_ones, key=_created_s)
            for listed in listed_ones:
                if listed.key != newest.key:
                    remove = partial(self._drop_snapshot, listed)
                    yield Old("snapshot", listed.name, _created_s(listed), remove)

    def _drop_snapshot(self, listed: Listed) -> int:
        """Takes a snapshot's root away; what that frees is collected."""
        assert self._catalog is not None
        with contextlib.suppress(AbsentError):  # somebody was quicker
            self._catalog.remove(listed)
        return self._collect()

    def _old_images(self) -> Iterator[Old]:
        if not (self._state / "store/ledger.sqlite").exists():
            return
        objects = self._images.opened().objects
        for tenant in objects.tenant_names():
            local = objects.tenant(tenant)
            by_app: dict[str, list[tuple[float, str]]] = {}
            for root in list_roots(local, "images"):
                if root.name.startswith(APP_IMAGES):
                    app = root.name.removeprefix(APP_IMAGES).partition(".")[0]
                    by_app.setdefault(app, []).append(
                        (_changed_s(local.root / root.key), root.name)
                    )
            for found in by_app.values():
                for at_s, name in sorted(found)[:-1]:
                    yield Old("image", name, at_s, partial(self._drop_image, local, name))

    def _drop_image(self, local: LocalTier, name: str) -> int:
        with contextlib.suppress(AbsentError):
            remove_root(local, "images", name)
        return self._collect()


def order(candidates: Iterable[Old]) -> Sequence[Old]:
    """What goes first: by kind as the table above says, then by age."""
    kinds = ("log", "snapshot", "image")
    return sorted(candidates, key=lambda old: (kinds.index(old.kind), old.at_s, old.name))


def _created_s(listed: Listed) -> float:
    """Damaged ones count as the oldest."""
    return 0.0 if listed.snapshot is None else listed.snapshot.record.created_at_s


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
