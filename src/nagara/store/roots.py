"""Named documents that keep objects alive: what garbage collection starts from.

    roots/KIND/NAME   JSON: {"version": 1, "lists": [reference lists], ...}

A reference list is an object: 40 bytes for each name it keeps. Whoever knows a root can tell what
belongs to it without understanding what it is (an image, a trace, a snapshot). Called from any
thread.
"""

import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nagara.base.durable import sync_folder, write_durably
from nagara.base.errors import UsageError
from nagara.store.documents import parse_json
from nagara.store.errors import AbsentError, CorruptError, StoreError
from nagara.store.local import LocalTier
from nagara.store.names import ObjectName, pack_names, parse_name, unpack_names
from nagara.store.store import Store

VERSION = 1
DOCUMENT_LIMIT_BYTES = 4 << 20
LIST_LIMIT_BYTES = 1 << 30
_NAME_LIMIT = 120
_KINDS = ("images", "traces", "snapshots", "models")


@dataclass(frozen=True, slots=True)
class Root:
    """One named document."""

    kind: str
    name: str
    lists: tuple[ObjectName, ...]
    content: dict[str, Any]  # everything else in it

    @property
    def key(self) -> str:
        return root_key(self.kind, self.name)

    def to_bytes(self) -> bytes:
        lists = [str(name) for name in self.lists]
        document = {"version": VERSION, "name": self.name, "lists": lists, **self.content}
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def root_key(kind: str, name: str) -> str:
    """Where a root lies. Raises `UsageError` for a name that cannot be one."""
    if kind not in _KINDS:
        raise UsageError(f"{kind!r} is no kind of root; kinds are {', '.join(_KINDS)}")
    quoted = urllib.parse.quote(name, safe="")
    if not name or len(quoted) > _NAME_LIMIT or name.startswith("."):
        raise UsageError(f"{name!r} cannot be a name", hint="1 to 120 characters, no `.` first")
    return f"roots/{kind}/{quoted}"


def parse_root(kind: str, name: str, raw: bytes) -> Root:
    """A root as it is stored. Raises `CorruptError` for anything that is none."""
    try:
        document = parse_json(raw)
        if document.pop("version") != VERSION or document.pop("name") != name:
            raise ValueError("another version or name")
        lists = tuple(parse_name(text) for text in document.pop("lists"))
    except (ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
        raise CorruptError(f"is no root: {error}"[:200], where=f"{kind}/{name}") from error
    return Root(kind, name, lists, document)


def write_root(local: LocalTier, root: Root) -> None:
    """Puts a root into the local folder, durably."""
    path = local.root / root.key
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, root.to_bytes(), mode=0o444)


def read_root(local: LocalTier, kind: str, name: str) -> Root:
    """A root of the local folder. Raises `AbsentError`, `CorruptError`."""
    try:
        raw = (local.root / root_key(kind, name)).read_bytes()
    except FileNotFoundError:
        raise AbsentError("is not known here", where=f"{kind}/{name}") from None
    return parse_root(kind, name, raw)


def fetch_root(store: Store, kind: str, name: str, deadline_s: float | None = None) -> Root:
    """A root from here or, when it is not here, from the nearest tier that has it."""
    try:
        return read_root(store.local, kind, name)
    except AbsentError:
        if not store.transfer.tiers:
            raise
    key = root_key(kind, name)
    raw = store.transfer.document(key, DOCUMENT_LIMIT_BYTES, store.deadline(deadline_s))
    return parse_root(kind, name, raw)


def remove_root(local: LocalTier, kind: str, name: str) -> None:
    """Takes a root away; its objects go with the next collection. Raises `AbsentError`."""
    path = local.root / root_key(kind, name)
    try:
        path.unlink()
    except FileNotFoundError:
        raise AbsentError("is not known here", where=f"{kind}/{name}") from None
    sync_folder(path.parent)


def list_roots(local: LocalTier, kind: str | None = None) -> Iterator[Root]:
    """All roots of the local folder, by kind and name. Raises `CorruptError`."""
    for each in (kind,) if kind else _KINDS:
        folder = local.root / "roots" / each
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not path.name.startswith("."):
                name = urllib.parse.unquote(path.name)
                yield parse_root(each, name, path.read_bytes())


def put_list(store: Store, names: list[ObjectName]) -> ObjectName:
    """Stores a reference list."""
    return store.put_bytes(pack_names(names))


def read_list(store: Store, name: ObjectName, deadline_s: float | None = None) -> list[ObjectName]:
    """What a reference list names. Raises `BadNameError` when it is none."""
    if name.size > LIST_LIMIT_BYTES:
        raise CorruptError("is too large for a reference list", where=str(name))
    return list(unpack_names(store.read(name, deadline_s)))
