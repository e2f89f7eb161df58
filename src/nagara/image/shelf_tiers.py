"""A shelf and the tiers behind the store: bringing images there, finding and fetching them.

Most tiers cannot be listed. So what a tier has of one subject (of an app, say) stands in a document
of its own, a root that keeps nothing:

    roots/KIND/SUBJECT~   entries: image's name → what a chooser needs to know of it

It is written after the image is there. Tiers know no locks: who has written looks again a moment
later, and once more adds what somebody who had read it before has taken away. Blocking; from any
thread.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from nagara.image.shelf import Shelf, Shelved, shelved_from
from nagara.store.errors import AbsentError, CorruptError, StoreError, UnavailableError
from nagara.store.moving import Moved, pull, push
from nagara.store.roots import (
    DOCUMENT_LIMIT_BYTES,
    Root,
    fetch_root,
    parse_root,
    read_root,
    remove_root,
    root_key,
    write_root,
)
from nagara.store.tier import Tier

_log = logging.getLogger(__name__)
_TRIES = 16
_MOMENT_S = 0.5  # longer than between another's reading and writing

Entries = dict[str, Mapping[str, Any]]


def push_shelved(
    shelf: Shelf, tier: Tier, shelved: Shelved, subject: str, entry: Mapping[str, Any]
) -> Moved:
    """Brings an image to a tier, all that it needs first, and lets it be found there.

    Raises `StoreError`.
    """
    moved = push(shelf.store, tier, shelved.to_root(shelf.kind))
    _change(shelf, tier, subject, shelved.name, entry)
    return moved


def list_here(shelf: Shelf, subjects: Mapping[str, Entries]) -> None:
    """Lets this machine's own folder say what it has of each subject, and of no other one: for who
    serves it to others. Raises `StoreError`, OSError."""
    roots = shelf.local.root / "roots" / shelf.kind
    known = {path.name for path in roots.glob("*~")} if roots.is_dir() else set()
    for subject, entries in subjects.items():
        document = Root(shelf.kind, _document(subject), (), {"entries": entries})
        known.discard(document.name)
        with contextlib.suppress(AbsentError):
            if read_root(shelf.local, shelf.kind, document.name) == document:
                continue
        write_root(shelf.local, document)
    for gone in known:
        remove_root(shelf.local, shelf.kind, gone)


def withdraw(shelf: Shelf, tier: Tier, name: str, subject: str) -> None:
    """Takes an image out of a tier; what it needed goes with the tier's next collection."""
    _change(shelf, tier, subject, name, None)
    tier.delete(root_key(shelf.kind, name), shelf.store.deadline(None))


def far_entries(shelf: Shelf, subject: str, deadline_s: float) -> Entries:
    """What any tier has of a subject. Raises `StoreError` when none could be asked."""
    found: Entries = {}
    errors: list[StoreError] = []
    tiers = shelf.store.transfer.tiers
    for tier in reversed(tiers):  # the nearest one's word counts
        try:
            found |= tier_entries(shelf, tier, subject, deadline_s)
        except StoreError as error:
            errors.append(error)
            _log.warning("what %s has of %s is not known: %s", tier.name, subject, error)
    if errors and len(errors) == len(tiers):
        raise errors[0]
    return found


def adopt(shelf: Shelf, name: str, deadline_s: float) -> Shelved:
    """Lets an image of a tier be one of this shelf; its objects come when they are needed.

    Raises `StoreError`.
    """
    root = fetch_root(shelf.store, shelf.kind, name, deadline_s)
    shelved = shelved_from(root)
    for listing in root.lists:  # the collection reads them
        shelf.store.ensure(listing, deadline_s)
    shelf.write(shelved)
    return shelved


def pull_shelved(
    shelf: Shelf, name: str, arrived: Callable[[int], None] | None = None
) -> tuple[Shelved, Moved]:
    """Brings an image here with all it needs. Raises `StoreError`."""
    root = fetch_root(shelf.store, shelf.kind, name)
    shelved = shelved_from(root)
    return shelved, pull(shelf.store, root, arrived)


def tier_entries(shelf: Shelf, tier: Tier, subject: str, deadline_s: float) -> Entries:
    """What one tier has of a subject. Raises `StoreError`."""
    try:
        raw = tier.read_all(_key(shelf, subject), DOCUMENT_LIMIT_BYTES, deadline_s)
    except AbsentError:
        return {}
    content = parse_root(shelf.kind, _document(subject), raw).content
    entries = content.get("entries")
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        raise CorruptError("is no list of images", where=f"{tier.name} {subject}")
    return entries


def _change(
    shelf: Shelf, tier: Tier, subject: str, name: str, entry: Mapping[str, Any] | None
) -> None:
    """Makes the tier's document say `entry` of the image; None: nothing."""
    wanted = None if entry is None else dict(entry)
    for _ in range(_TRIES):
        deadline_s = shelf.store.deadline(None)
        entries = dict(tier_entries(shelf, tier, subject, deadline_s))
        if entries.get(name) == wanted:
            return
        entries.pop(name, None)
        if wanted is not None:
            entries[name] = wanted
        document = Root(shelf.kind, _document(subject), (), {"entries": entries})
        tier.write(_key(shelf, subject), document.to_bytes(), deadline_s)
        time.sleep(_MOMENT_S)
    raise UnavailableError("too many write there at once", where=f"{tier.name} {subject}")


def _document(subject: str) -> str:
    return f"{subject}~"


def _key(shelf: Shelf, subject: str) -> str:
    return root_key(shelf.kind, _document(subject))
