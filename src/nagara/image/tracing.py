"""Making an image's trace from what its starts touched, and keeping it beside the image.

Blocking; called from any thread, for one image at a time.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from nagara.base.errors import NagaraError
from nagara.image.errors import BadTraceError
from nagara.image.excerpts import is_worth, make_excerpts, touch_of
from nagara.image.images import Image
from nagara.image.recorder import Touch
from nagara.image.trace import (
    Pack,
    Trace,
    from_touches,
    merge,
    plan_packs,
    read_trace,
    write_trace,
)
from nagara.store.names import ObjectName
from nagara.store.roots import put_list, write_root
from nagara.store.store import Store

_log = logging.getLogger(__name__)
STARTS_RECORDED = 3


def wants_recording(image: Image) -> bool:
    """The first starts of an image are recorded; later ones bring little that is new."""
    return image.starts < STARTS_RECORDED


def add_recording(
    store: Store, image: Image, touches: Iterable[Touch], *, is_partial: bool = False
) -> Image:
    """Merges a recording into the image's trace and packs it; the image's root is written anew if
    that changes it.

    Everything touched has to be in the local folder, as it is right after a start.
    Returns the image with its new trace.

    Args:
        is_partial: only what did not come ahead of need was seen: it is added at the end.
    """
    trace = from_touches(touches)
    if trace.objects:
        image = _merged(store, image, trace, is_partial=is_partial)
    elif not is_partial:
        return image
    image = replace(image, starts=image.starts + 1)
    write_root(store.local, image.to_root())
    return image


def touches_of_stretches(
    store: Store, read: Mapping[ObjectName, Collection[int]], *, may_excerpt: bool = True
) -> Trace:
    """What to fetch where nothing is, given stretches of objects that were read: excerpts of what
    was read a little of, then the rest, what is small first: large ones are mostly weights.

    Raises `StoreError`, OSError.
    """
    excerpted = {
        name: numbers for name, numbers in read.items() if may_excerpt and is_worth(name, numbers)
    }
    fetched = {name: numbers for name, numbers in read.items() if name not in excerpted}
    trace = from_touches(
        touch_of(name, number)
        for name in sorted(fetched, key=lambda name: (name.is_chunked, len(fetched[name])))
        for number in sorted(fetched[name])
    )
    return replace(trace, excerpts=make_excerpts(store, excerpted))


def _merged(store: Store, image: Image, trace: Trace, *, is_partial: bool) -> Image:
    if image.trace is not None:
        try:
            old = read_trace(store.read(image.trace))
            trace = merge(trace, old) if is_partial else merge(old, trace)
        except (BadTraceError, NagaraError) as error:
            _log.warning("the old trace of %s is not used: %s", image.name, error)
    packs = tuple(_pack(store, members) for members in plan_packs(trace))
    stored = store.put_bytes(write_trace(Trace(trace.objects, packs)))
    kept = put_list(store, [stored, *(pack.name for pack in packs)])
    return replace(image, trace=stored, trace_list=kept)


def _pack(store: Store, members: list[ObjectName]) -> Pack:
    placed = []
    offset = 0
    with store.local.temporary() as path:
        with path.open("wb") as file:
            for member in members:
                file.write(store.read(member))
                placed.append((member, offset))
                offset += member.size
        name = store.put_temporary(path)
    return Pack(name, tuple(placed))
