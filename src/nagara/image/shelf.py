"""Folders that became images: their files are moved into the store, nothing is copied.

For what a program has written and nobody writes any more, such as a saved replica. Such images
are roots of a kind of their own and carry what their owner wants to know about them:

    image    what `images` keeps of an image
    about    the owner's own

Order of putting one on the shelf: everything is named, what is new is noted, files move, the root
appears. So a reader finds all of it or nothing, and whoever was interrupted can be undone by the
note. Blocking; from any thread.
"""

import errno
import logging
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from nagara.base.folder_lock import folder_lock
from nagara.image.errors import ImageError
from nagara.image.images import Image, image_from
from nagara.image.index import build_index
from nagara.image.index_reader import read_index
from nagara.image.prefetch import boot_id, check_complete
from nagara.image.tree import INLINE_LIMIT_BYTES, Node, new_folder, walk
from nagara.store.collecting import BrokenRootError, alive_in_local
from nagara.store.errors import AbsentError, CorruptError, StoreError
from nagara.store.hashing import Hashed
from nagara.store.local import LocalTier
from nagara.store.names import ObjectName, name_bytes, pack_names, parse_name
from nagara.store.roots import (
    Root,
    put_list,
    read_list,
    read_root,
    remove_root,
    root_key,
    write_root,
)
from nagara.store.store import Store

_log = logging.getLogger(__name__)
_HASH_THREADS = 2
_ASK_S = 5.0  # a start waits for the answer
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_putting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Shelved:
    """One image of a shelf."""

    image: Image
    about: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.image.name

    def to_root(self, kind: str) -> Root:
        root = self.image.to_root()
        return Root(kind, root.name, root.lists, {"image": root.content, "about": self.about})


@dataclass(frozen=True, slots=True)
class Put:
    """What came of putting a folder on the shelf."""

    shelved: Shelved
    bytes: int  # of its objects
    new_bytes: int  # of those that were not in the store before


@dataclass(frozen=True, slots=True)
class Plan:
    """A folder whose content has been named; nothing of it has been moved yet."""

    files: Mapping[str, Hashed]  # path below the folder → what its content is called
    index: bytes
    names: tuple[ObjectName, ...]  # all it needs, the index included
    count: int  # of all files, also those in the index
    size_bytes: int

    @property
    def listing(self) -> bytes:
        return pack_names(list(self.names))


@dataclass(frozen=True, slots=True)
class Fault:
    """A file of an image that is not what it should be here."""

    path: str
    object: ObjectName
    is_wrong: bool  # was here with other bytes, and was removed; else it is not here


@dataclass(frozen=True, slots=True)
class Share:
    """What an image's objects take, and how much of that others of the shelf need as well."""

    stored_bytes: int = 0
    shared_bytes: int = 0


NOTHING = Share()


class Shelf:
    """The images of one kind of one tenant."""

    def __init__(self, store: Store, kind: str) -> None:
        self.store = store
        self.kind = kind

    @property
    def local(self) -> LocalTier:
        return self.store.local

    # -- putting -----------------------------------------------------------------------------

    def plan(self, folder: Path) -> Plan:
        """Names everything in a folder of regular files and folders. Reads all of it."""
        tree, found = new_folder(_FOLDER_MODE), {}
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        with ThreadPoolExecutor(_HASH_THREADS, "name") as pool:
            for path, hashed in zip(paths, pool.map(self.store.named, paths), strict=True):
                place = path.relative_to(folder)
                node = _at(tree, place)
                node.size = hashed.name.size
                if node.size <= INLINE_LIMIT_BYTES:
                    node.inline = path.read_bytes() or None
                else:
                    node.content = hashed.name
                    found[str(place)] = hashed
        index = b"".join(build_index(tree))
        names = {hashed.name for hashed in found.values()} | {name_bytes(index)}
        size = sum(node.size for _, node in walk(tree))
        return Plan(found, index, tuple(sorted(names)), len(paths), size)

    def put(
        self,
        folder: Path,
        plan: Plan,
        name: str,
        about: Mapping[str, Any],
        note: Callable[[list[str]], None],
        stored: Callable[[], None] = lambda: None,
    ) -> Put:
        """Moves the files of `folder` into the store and names the image.

        Args:
            note: told what is about to come into the store, before anything does.
            stored: called when everything but the name is there.

        Raises:
            StoreError, OSError: it cannot be kept; `undo` with what was noted.
        """
        listing = name_bytes(plan.listing)
        wanted = (*plan.names, listing)
        with self._alone():
            new = [each for each in wanted if not self.local.has(each)]
            note([str(each) for each in new])
            for place, hashed in plan.files.items():
                self._take(folder / place, hashed)
            index = self.store.put_bytes(plan.index)
            self.store.put_bytes(plan.listing)
            if not check_complete(self.store, listing, wanted):
                raise CorruptError("what was there before is not right", where=name)
            stored()
            image = Image(name, index, listing, self.kind, plan.count, plan.size_bytes, config={})
            shelved = Shelved(image, about)
            self.write(shelved)
        here = set(new)
        return Put(
            shelved,
            sum(each.size for each in wanted),
            sum(each.size for each in wanted if each in here),
        )

    def write(self, shelved: Shelved) -> None:
        """Puts the root in place, at once."""
        write_root(self.local, shelved.to_root(self.kind))

    def describe(
        self, name: str, about: Mapping[str, Any], kept: Sequence[ObjectName] = ()
    ) -> bool:
        """Lets its owner know something else about an image; False if it is not here any more.

        Args:
            kept: objects of the store that what is said speaks of: they live as long.
        """
        with self._alone():
            try:
                shelved = self.read(name)
            except AbsentError:
                return False
            listing = put_list(self.store, list(kept)) if kept else None
            self.write(Shelved(replace(shelved.image, trace_list=listing), about))
        return True

    def undo(self, noted: Iterable[str]) -> None:
        """Removes what an interrupted `put` has brought and nothing else needs."""
        with self._alone():
            self._discard(noted)

    def _take(self, path: Path, hashed: Hashed) -> None:
        """Makes the file an object; the same content that is here stays if it is right."""
        if (reader := self.store.open_here(hashed.name)) is not None:
            reader.close()
            return
        try:
            self.store.add_hashed(path, *hashed)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with self.local.temporary() as copy:  # the store is on another disk
                shutil.copyfile(path, copy)
                if self.store.put_temporary(copy) != hashed.name:
                    raise CorruptError("changed while it was copied", where=str(path)) from None

    # -- finding -----------------------------------------------------------------------------

    def all(self, prefix: str = "") -> list[Shelved]:
        """The images here whose names begin so; damaged ones are passed over."""
        return [found for _, found in self.look(prefix) if found is not None]

    def look(self, prefix: str = "") -> Iterator[tuple[str, Shelved | None]]:
        """Every name here that begins so; None with it for a damaged one."""
        for name in self._names(prefix):
            try:
                yield name, self.read(name)
            except CorruptError:
                yield name, None
            except AbsentError:
                continue

    def read(self, name: str) -> Shelved:
        """Raises `AbsentError`, `CorruptError`."""
        return shelved_from(read_root(self.local, self.kind, name))

    def has(self, name: str) -> bool:
        """Whether there is one of that name, damaged or not."""
        return (self.local.root / root_key(self.kind, name)).exists()

    def remove(self, name: str) -> None:
        """Takes an image away, and at once what only it needed; pinned objects stay."""
        with self._alone():
            try:
                lists = read_root(self.local, self.kind, name).lists
            except StoreError:
                lists = ()
            try:
                remove_root(self.local, self.kind, name)
            except AbsentError:
                return
            for listing in lists:
                self._discard(self.local.listed(str(listing)) or ())

    # -- looking after -----------------------------------------------------------------------

    def faults(self, shelved: Shelved) -> list[Fault]:
        """What of a pinned image is not here, or not right; what was proven is not read again.

        One without faults is mounted without a daemon from then on.
        """
        found = list(self._faults(shelved, self._is_right))
        listing, ledger = shelved.image.list, self.local.folder.ledger
        if not found and not ledger.is_complete(self.local.tenant, str(listing), boot_id()):
            check_complete(self.store, listing, read_list(self.store, listing))
        return found

    def verify(self, shelved: Shelved) -> list[Fault]:
        """The same, but everything is read from the disk, whatever was recorded about it."""
        return list(self._faults(shelved, self.local.verify))

    def _faults(self, shelved: Shelved, is_right: Callable[[ObjectName], bool]) -> Iterator[Fault]:
        image = shelved.image
        paths: dict[ObjectName, str] | None = None
        for name in (image.list, image.index):
            was_here = self.local.has(name)
            if not was_here or not is_right(name):
                yield Fault("its list" if name == image.list else "its index", name, was_here)
                return
        for name in read_list(self.store, image.list):
            was_here = self.local.path(name).exists()
            if was_here and is_right(name):
                continue
            paths = paths if paths is not None else self.paths(image)
            yield Fault(paths.get(name, str(name)), name, was_here)

    def shares(self) -> dict[str, Share]:
        """What each image's objects take, by its name."""
        needed = {
            shelved.name: self.local.listed(str(shelved.image.list)) or frozenset()
            for shelved in self.all()
        }
        users = Counter(chain.from_iterable(needed.values()))
        return {
            name: Share(_sum_bytes(mine), _sum_bytes(each for each in mine if users[each] > 1))
            for name, mine in needed.items()
        }

    def here_bytes(self, image: Image) -> int | None:
        """How much of an image is on this machine; None: all of it."""
        listed = self.local.listed(str(image.list))
        if listed is None:
            return 0
        names = [parse_name(name) for name in listed]
        here = [name for name in names if self.local.has(name)]
        return None if len(here) == len(names) else sum(name.size for name in here)

    def paths(self, image: Image) -> dict[ObjectName, str]:
        """Where each object lies in the image; the first place of several."""
        tree = read_index(self.store.read(image.index))
        found: dict[ObjectName, str] = {}
        for path, node in walk(tree):
            if node.content is not None:
                found.setdefault(node.content, path.decode())
        return found

    def is_elsewhere(self, name: ObjectName) -> bool:
        """A tier has the object. Raises `UnavailableError` when that cannot be found out."""
        deadline_s = time.monotonic() + _ASK_S
        return any(tier.has(name.key, deadline_s) for tier in self.store.transfer.tiers)

    def object_at(self, image: Image, path: str) -> ObjectName:
        """The object of one file. Raises `ImageError` when there is none."""
        for name, place in self.paths(image).items():
            if place == path:
                return name
        raise ImageError(f"has no {path}", where=image.name)

    def _is_right(self, name: ObjectName) -> bool:
        reader = self.store.open_here(name)
        if reader is None:
            return False
        reader.close()
        return True

    def _names(self, prefix: str) -> list[str]:
        folder = self.local.root / "roots" / self.kind
        if not folder.is_dir():
            return []
        names = (path.name for path in folder.iterdir() if path.name[0] != ".")
        # Of those with a `~` see `shelf_tiers`.
        return sorted(n for n in names if n.startswith(prefix) and not n.endswith("~"))

    def _discard(self, names: Iterable[str]) -> None:
        """Removes objects that nothing needs; none where that cannot be known."""
        try:
            alive = alive_in_local(self.local)
        except (BrokenRootError, CorruptError) as error:
            _log.warning("left to the collection: %s", error)
            return
        for name in names:
            if name not in alive:
                self.local.discard(parse_name(name))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else puts or removes here, in this process or another."""
        with _putting, folder_lock(self.local.root / "shelves"):
            yield


def _sum_bytes(names: Iterable[str]) -> int:
    return sum(parse_name(name).size for name in names)


def shelved_from(root: Root) -> Shelved:
    """Raises `CorruptError` for a root that is none of a shelf."""
    try:
        content, about = dict(root.content["image"]), dict(root.content["about"])
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptError(f"is no shelved image: {error!r}"[:200], where=root.name) from error
    return Shelved(image_from(replace(root, content=content)), about)


def _at(tree: Node, place: Path) -> Node:
    """A new file's node at a path; the folders above it are made."""
    folder = tree
    for part in place.parts[:-1]:
        assert folder.kids is not None
        folder = folder.kids.setdefault(part.encode(), new_folder(_FOLDER_MODE))
    assert folder.kids is not None
    node = folder.kids[place.name.encode()] = Node(stat.S_IFREG | _FILE_MODE)
    return node
