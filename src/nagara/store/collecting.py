"""Garbage collection by references: what no root names and nobody used lately goes.

The grace time is what makes it safe beside writers: an import adds objects first and its root
last, so an object without a root may be one whose root is about to come. Called from one thread.
"""

import time
import urllib.parse
from dataclasses import dataclass

from nagara.base.errors import NagaraError
from nagara.store.errors import StoreError
from nagara.store.local import LocalTier
from nagara.store.names import parse_name, unpack_names
from nagara.store.roots import DOCUMENT_LIMIT_BYTES, LIST_LIMIT_BYTES, list_roots, parse_root
from nagara.store.tier import Tier

DEFAULT_GRACE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection did, or would do."""

    kept: int
    removed: int
    removed_bytes: int


class BrokenRootError(StoreError):
    """A root's references cannot be read: nothing may be collected."""


def collect_local(
    local: LocalTier, grace_s: float = DEFAULT_GRACE_S, *, is_dry: bool = False
) -> Collection:
    """Collects one tenant's part of the local folder.

    Pins count as references. Raises `BrokenRootError` before anything is removed.
    """
    ledger, alive = local.folder.ledger, alive_in_local(local)
    limit_s = time.time() - grace_s
    kept = removed = removed_bytes = 0
    for found, space, used_s in list(ledger.names(local.tenant)):
        if found in alive or used_s > limit_s:
            kept += 1
            continue
        removed, removed_bytes = removed + 1, removed_bytes + space
        if not is_dry:
            local.discard(parse_name(found))
    return Collection(kept, removed, removed_bytes)


def alive_in_local(local: LocalTier) -> set[str]:
    """What roots and pins of one tenant's part keep. Raises `BrokenRootError`, `CorruptError`."""
    alive: set[str] = set()
    for root in list_roots(local):
        for name in root.lists:
            alive |= _listed(local, str(name), f"{root.kind}/{root.name}")
    for pin in local.folder.ledger.pins():
        if pin.tenant == local.tenant:
            alive |= _listed(local, pin.list, pin.holder)
    return alive


def _listed(local: LocalTier, list_name: str, owner: str) -> frozenset[str]:
    found = local.listed(list_name)
    if found is None:
        # A list may have been evicted from a cache; then its root protects nothing here, and
        # what it named would go. Better nothing goes.
        raise BrokenRootError(
            f"its reference list {list_name} is not here",
            where=owner,
            hint="fetch it (`nagara store pull`) or remove the root",
        )
    return found


def collect_tier(
    tier: Tier, grace_s: float, deadline_s: float, *, is_dry: bool = False
) -> Collection:
    """Collects one tenant's part of a tier that can be listed.

    Raises `BrokenRootError` before anything is removed, `UnavailableError`.
    """
    alive = _alive_in(tier, deadline_s)
    limit_s = time.time() - grace_s
    kept = removed = removed_bytes = 0
    for entry in list(tier.entries("sha256", deadline_s)):
        name = entry.key.removeprefix("sha256/")
        if name in alive or entry.changed_s > limit_s:
            kept += 1
            continue
        removed, removed_bytes = removed + 1, removed_bytes + entry.size_bytes
        if not is_dry:
            tier.delete(entry.key, deadline_s)
            if parse_name(name).is_chunked:
                tier.delete(f"chunks/{name}", deadline_s)
    return Collection(kept, removed, removed_bytes)


def _alive_in(tier: Tier, deadline_s: float) -> set[str]:
    alive: set[str] = set()
    for entry in tier.entries("roots", deadline_s):
        _, kind, quoted = entry.key.split("/", 2)
        try:
            raw = tier.read_all(entry.key, DOCUMENT_LIMIT_BYTES, deadline_s)
            for name in parse_root(kind, urllib.parse.unquote(quoted), raw).lists:
                alive.add(str(name))
                content = tier.read_all(name.key, LIST_LIMIT_BYTES, deadline_s)
                alive |= {str(each) for each in unpack_names(content)}
        except NagaraError as error:
            raise BrokenRootError(f"cannot be followed: {error.what}", where=entry.key) from error
    return alive
