"""The images a store knows: adding a tree under a name, finding it, comparing, verifying.

An image is a root of the store (kind `images`):

    index    the object that holds the tree
    lists    reference lists: what the tree needs; what its trace needs, once there is one
    trace    the object that says what a start touches, once one was recorded
    config   how its command is run, if its source said so: env, entrypoint, cmd, workdir, user;
             and what it will miss
    source_state   what its source was: equal states, equal trees; None where that is unknown

Its fingerprint is the index's name: equal fingerprints, equal trees. Blocking; from any thread.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nagara.image.errors import ImageError, UnknownImageError
from nagara.image.index import build_index
from nagara.image.index_reader import read_index
from nagara.image.tree import Node, contents, printable, walk
from nagara.store.errors import AbsentError, BadNameError, CorruptError, StoreError
from nagara.store.local import LocalTier
from nagara.store.names import ObjectName, parse_name
from nagara.store.roots import (
    Root,
    fetch_root,
    list_roots,
    put_list,
    read_list,
    remove_root,
    write_root,
)
from nagara.store.store import Store

_log = logging.getLogger(__name__)
KIND = "images"


@dataclass(frozen=True, slots=True)
class Image:
    """One image as its root describes it."""

    name: str
    index: ObjectName
    list: ObjectName  # what the tree needs, the index included
    source: str
    files: int
    size_bytes: int  # of all files as they seem
    is_layer: bool = False
    trace: ObjectName | None = None
    trace_list: ObjectName | None = None  # of what is known of its starts
    starts: int = 0  # recorded so far
    config: Mapping[str, Any] | None = None
    source_state: str | None = None

    @property
    def fingerprint(self) -> str:
        return str(self.index)

    def to_root(self) -> Root:
        lists = (self.list,) if self.trace_list is None else (self.list, self.trace_list)
        content = {
            "index": str(self.index),
            "source": self.source,
            "files": self.files,
            "size_bytes": self.size_bytes,
            "is_layer": self.is_layer,
            "trace": str(self.trace) if self.trace else None,
            "starts": self.starts,
            "config": dict(self.config or {}),
            "source_state": self.source_state,
        }
        return Root(KIND, self.name, lists, content)


@dataclass(frozen=True, slots=True)
class Added:
    """What an import brought, and how much of it was there before."""

    image: Image
    objects: int
    object_bytes: int
    new_objects: int
    new_bytes: int
    index_bytes: int
    inline_files: int


def image_from(root: Root) -> Image:
    """Raises `CorruptError` for a root that is no image's."""
    try:
        trace = root.content["trace"]
        return Image(
            name=root.name,
            index=parse_name(root.content["index"]),
            list=root.lists[0],
            source=str(root.content["source"]),
            files=int(root.content["files"]),
            size_bytes=int(root.content["size_bytes"]),
            is_layer=bool(root.content["is_layer"]),
            trace=parse_name(trace) if trace else None,
            trace_list=root.lists[1] if len(root.lists) > 1 else None,
            starts=int(root.content["starts"]),
            config=dict(root.content["config"]),
            source_state=root.content.get("source_state"),
        )
    except (KeyError, ValueError, TypeError, IndexError, BadNameError) as error:
        raise CorruptError(f"is no image: {error!r}"[:200], where=root.name) from error


def add_image(
    store: Store,
    name: str,
    tree: Node,
    source: str,
    *,
    new: Mapping[ObjectName, int] | None = None,
    is_layer: bool = False,
    config: Mapping[str, Any] | None = None,
    source_state: str | None = None,
) -> Added:
    """Writes the index of a tree whose contents are in the store, and names the image.

    Args:
        new: the objects that the import brought, for the report.

    Raises:
        UnrepresentableError: names what cannot be kept.
    """
    with store.local.temporary() as path:
        with path.open("wb") as file:
            for piece in build_index(tree, is_layer=is_layer):
                file.write(piece)
        index = store.put_temporary(path)
    needed: set[ObjectName] = set()
    files = size = inline = 0
    for _, node in walk(tree):
        files += 1
        size += node.size
        inline += node.inline is not None
        if node.content is not None:
            needed.add(node.content)
    listing = put_list(store, [*needed, index])
    image = Image(
        name, index, listing, source, files, size, is_layer,
        config=config, source_state=source_state,
    )  # fmt: skip
    write_root(store.local, image.to_root())
    brought = {each: each.size for each in new or {} if each in needed}
    return Added(
        image=image,
        objects=len(needed),
        object_bytes=sum(each.size for each in needed),
        new_objects=len(brought),
        new_bytes=sum(brought.values()),
        index_bytes=index.size,
        inline_files=inline,
    )


def find_image(store: Store, name: str) -> Image:
    """An image of this machine or of a tier behind it. Raises `UnknownImageError`."""
    try:
        return image_from(fetch_root(store, KIND, name))
    except AbsentError:
        known = ", ".join(image.name for image in list_images(store.local)) or "none"
        raise UnknownImageError(
            f"no image named {name!r} (here: {known})",
            hint="add one: nagara image import dir:/some/folder --name NAME",
        ) from None


def list_images(local: LocalTier) -> list[Image]:
    """The images this machine has names of."""
    return [image_from(root) for root in list_roots(local, KIND)]


def remove_image(local: LocalTier, name: str) -> None:
    """Forgets the name; the objects go with the next collection."""
    try:
        remove_root(local, KIND, name)
    except AbsentError:
        raise UnknownImageError(f"no image named {name!r}") from None


def load_tree(store: Store, image: Image) -> Node:
    """An image's tree. Raises `BadIndexError`, `StoreError`."""
    return read_index(store.read(image.index), is_layer=image.is_layer)


def load_lower(store: Store, index: ObjectName) -> Node:
    """The tree of an index that was checked, for what stands in for it below overlay.

    The marks of a layer are what they are; an image's own attributes that overlay would take for
    marks stay escaped, and overlay shows them as they were. Raises `BadIndexError`, `StoreError`.
    """
    return read_index(store.read(index), is_layer=True)


def fetch_metadata(
    store: Store, image: Image, deadline_s: float | None = None, *, with_trace: bool = True
) -> None:
    """Brings index, list and trace here, all at once: each wait is a round trip.

    A trace may have been recorded here, and evicted: it is done without.
    """
    named = (image.trace, image.trace_list) if with_trace else ()
    trace = [name for name in named if name is not None]
    limit_s = store.deadline(deadline_s)
    wanted = [image.index, image.list, *trace]
    absent = [name for name in wanted if not store.local.has(name)]
    if not absent:
        return  # threads take longer to begin than this took

    def bring(name: ObjectName) -> None:
        try:
            store.ensure(name, limit_s)
        except StoreError as error:
            if name not in trace:
                raise
            _log.warning("%s starts without its trace: %s", image.name, error)

    with ThreadPoolExecutor(len(absent), "metadata") as pool:
        for _ in pool.map(bring, absent):
            pass


def check_index(store: Store, image: Image) -> Node:
    """Reads an index that may come from outside, and compares it with its reference list.

    Raises:
        BadIndexError: it is malformed.
        ImageError: it needs objects that its list does not keep.
    """
    tree = load_tree(store, image)
    lost = contents(tree) - set(read_list(store, image.list))
    for path, node in walk(tree) if lost else ():
        if node.content in lost:
            raise ImageError(
                "its list does not keep all that its index needs", where=printable(path)
            )
    return tree


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification read."""

    objects: int
    bytes: int
    absent: int  # not on this machine
    wrong: tuple[ObjectName, ...]  # removed; they will be fetched again


def verify_image(store: Store, image: Image) -> Verified:
    """Reads everything of an image that is on this machine, whatever was recorded about it."""
    check_index(store, image)
    objects = size = absent = 0
    wrong = []
    for name in read_list(store, image.list):
        if not store.local.path(name).exists():
            absent += 1
        elif store.local.verify(name):
            objects, size = objects + 1, size + name.size
        else:
            wrong.append(name)
    return Verified(objects, size, absent, tuple(wrong))


def diff_trees(before: Node, after: Node) -> Iterator[tuple[str, bytes]]:
    """("+" | "-" | "~", path) for what came, went or changed, sorted by path."""
    old, new = dict(walk(before)), dict(walk(after))
    for path in sorted(old.keys() | new.keys()):
        if path not in old:
            yield "+", path
        elif path not in new:
            yield "-", path
        elif _facts(old[path]) != _facts(new[path]):
            yield "~", path


def _facts(node: Node) -> tuple[Any, ...]:
    return (
        node.mode, node.uid, node.gid, node.size, node.rdev, node.xattrs, node.target,
        node.content, node.inline, None if node.is_folder else node.mtime_ns,
    )  # fmt: skip
