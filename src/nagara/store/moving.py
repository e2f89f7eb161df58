"""Moving what a root names between the local folder and one tier. Called from one thread."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nagara.store.names import ObjectName
from nagara.store.roots import Root, read_list, write_root
from nagara.store.store import Store
from nagara.store.tier import Tier

_THREADS = 32
_OBJECT_S = 300.0


@dataclass(frozen=True, slots=True)
class Moved:
    """How much there was, and how much of it had to move."""

    objects: int
    moved_objects: int
    moved_bytes: int


def push(store: Store, tier: Tier, root: Root) -> Moved:
    """Puts everything a root names into the tier, then the root itself.

    In that order: whoever finds the root there finds all of it. Raises `StoreError`.
    """
    names = set(root.lists)
    for list_name in root.lists:
        names |= set(read_list(store, list_name))
    local = store.local

    def send(name: ObjectName) -> bool:
        deadline_s = store.deadline(None) + _OBJECT_S
        if tier.has(name.key, deadline_s):
            return False
        store.ensure(name, deadline_s)
        if name.is_chunked:
            tier.write(name.list_key, local.list_path(name), deadline_s)
        tier.write(name.key, local.path(name), deadline_s)
        return True

    moved = _each(names, send)
    tier.write(root.key, root.to_bytes(), store.deadline(None))
    return moved


def pull(store: Store, root: Root, arrived: Callable[[int], None] | None = None) -> Moved:
    """Gets everything a root names, keeps the root, and returns what was not here before."""
    names = set(root.lists)
    for list_name in root.lists:
        names |= set(read_list(store, list_name))

    def get(name: ObjectName) -> bool:
        if store.local.has(name):
            return False
        store.ensure(name, store.deadline(None) + _OBJECT_S)
        if arrived is not None:
            arrived(name.size)
        return True

    moved = _each(names, get)
    write_root(store.local, root)
    return moved


def _each(names: Iterable[ObjectName], work: Callable[[ObjectName], bool]) -> Moved:
    """Runs `work` for all names; the first error ends it."""
    lock = threading.Lock()
    counts = [0, 0, 0]
    stop = threading.Event()

    def one(name: ObjectName) -> None:
        if stop.is_set():
            return
        try:
            is_moved = work(name)
        except BaseException:
            stop.set()
            raise
        with lock:
            counts[0] += 1
            if is_moved:
                counts[1] += 1
                counts[2] += name.size

    with ThreadPoolExecutor(_THREADS, "move") as pool:
        for _ in pool.map(one, sorted(names, key=lambda name: name.size)):
            pass
    return Moved(*counts)
