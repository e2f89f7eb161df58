"""Weights read by several readers at once, tensor by tensor, their values checked as they pass.

    file ──read──▶ slot ──fold and copy──▶ memory          on a CPU
    file ──read──▶ pinned slot ──fold──▶ copy on a stream ──▶ device memory

Each reader has slots of its own. It reads a span of the file into one, and the next span into
another while the first one's chunks are carried to their targets. What is in the kernel's page
cache is taken from there; the rest is read past it (O_DIRECT), since nobody needs it twice. The
order is that of the computation: embeddings, layers one after the other, the rest. Nothing may be
computed with a tensor before `finish` has returned or `wait_for` has said that it is there; values
are right only after `finish`.

`begin`, `finish` and `wait_for` may be called from any thread.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nagara.engine.errors import ModelFolderError
from nagara.engine.modelfolder import TensorPlace
from nagara.engine.weight_values import CHUNK_BYTES, carry, digest_of, fold

SPAN_BYTES = 16 * CHUNK_BYTES  # one read past the page cache
PAGE = 4096
DEFAULT_READERS = 4
_SLOTS = 2  # of a reader: one is read into while the other is carried away
_LAYER = re.compile(r"\.(\d+)\.")
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Slot(Protocol):
    """A page-aligned piece of memory that is read into."""

    address: int
    view: memoryview

    def free(self) -> None:
        """Blocks until what was in it is not needed any more."""


class Target(Protocol):
    """Where a tensor's bytes go."""

    def put(self, slot: Slot, start: int, size: int, offset: int) -> bytes:
        """Takes `size` bytes at `start` of the slot for `offset` of the tensor; their lanes.

        The slot stays in use until `slot.free` has returned.
        """

    def take_cached(
        self, file: int, start: int, size: int, slot: Slot, offset: int
    ) -> tuple[int, list[bytes]] | None:
        """Takes what the page cache has of the file's bytes, as `weight_values.carry` does."""


class HostSlot:
    """Pages of this process's own."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._pages = mmap.mmap(-1, size, flags=flags)
        self.view = memoryview(self._pages)
        self.address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._pages))

    def free(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class HostTarget:
    """Memory of this process at an address."""

    address: int

    def put(self, slot: Slot, start: int, size: int, offset: int) -> bytes:
        return fold(slot.address + start, size, self.address + offset)

    def take_cached(
        self, file: int, start: int, size: int, slot: Slot, offset: int
    ) -> tuple[int, list[bytes]] | None:
        return carry(file, start, size, slot.address, self.address + offset)


class NoTarget:
    """Only looks at the values."""

    def put(self, slot: Slot, start: int, size: int, offset: int) -> bytes:
        return fold(slot.address + start, size)

    def take_cached(
        self, file: int, start: int, size: int, slot: Slot, offset: int
    ) -> tuple[int, list[bytes]] | None:
        return carry(file, start, size, slot.address, None)


@dataclass(frozen=True, slots=True)
class _Part:
    """One chunk of a tensor, in the file at `start`."""

    tensor: int
    chunk: int
    start: int
    size: int


@dataclass(slots=True)
class _Span:
    """Neighbouring parts of one file, read at once."""

    file: Path
    parts: list[_Part]

    @property
    def end(self) -> int:
        return self.parts[-1].start + self.parts[-1].size


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it has come."""

    done_bytes: int
    total_bytes: int
    elapsed_s: float

    @property
    def gb_s(self) -> float:
        return self.done_bytes / self.elapsed_s / 1e9 if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True)
class Streamed:
    """What has been read. `values`: tensor → value hash. `cached_bytes` were in the page cache."""

    size_bytes: int
    seconds: float
    cached_bytes: int
    values: Mapping[str, str]

    @property
    def gb_s(self) -> float:
        return self.size_bytes / self.seconds / 1e9 if self.seconds else 0.0


def in_order(places: Collection[TensorPlace]) -> list[TensorPlace]:
    """As the computation needs them: what comes before the layers, the layers, what comes after."""

    def key(place: TensorPlace) -> tuple[int, int, Path, int]:
        found = _LAYER.search(place.name)
        if found is not None:
            return 1, int(found[1]), place.file, place.start
        stage = 0 if "embed" in place.name or "wte" in place.name else 2
        return stage, 0, place.file, place.start

    return sorted(places, key=key)


def plan(places: Sequence[TensorPlace]) -> list[_Span]:
    """Spans of neighbouring chunks, in the order of the tensors."""
    spans: list[_Span] = []
    for tensor, place in enumerate(places):
        for chunk, start in enumerate(range(place.start, place.end, CHUNK_BYTES)):
            part = _Part(tensor, chunk, start, min(CHUNK_BYTES, place.end - start))
            last = spans[-1] if spans else None
            if (
                last is not None
                and (last.file, last.end) == (place.file, start)
                and start + part.size - last.parts[0].start <= SPAN_BYTES
            ):
                last.parts.append(part)
            else:
                spans.append(_Span(place.file, [part]))
    return spans


class _File:
    """One file, open for reading through the page cache and, if possible, past it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cached = os.open(path, os.O_RDONLY)
        self.direct: int | None = None
        with contextlib.suppress(OSError):  # a file system without it
            self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.can_ask_cache = True  # until it turns out that it cannot

    def read(self, into: memoryview, start: int) -> int:
        """Reads whole pages from the page border `start`; how many bytes there were."""
        if self.direct is not None:
            try:
                return _read_all(self.direct, into, start)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                os.close(self.direct)
                self.direct = None
        return _read_all(self.cached, into, start)

    def close(self) -> None:
        for descriptor in (self.cached, self.direct):
            if descriptor is not None:
                os.close(descriptor)


def _read_all(descriptor: int, into: memoryview, start: int) -> int:
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [into[done:]], start + done)
        done += got
        if got == 0 or done % PAGE:  # the file's end
            break
    return done


@dataclass(slots=True)
class _State:
    """Shared by the readers; guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    next_span: int = 0
    done_bytes: int = 0
    cached_bytes: int = 0
    error: BaseException | None = None
    running: int = 0
    ended_s: float | None = None


class WeightStream:
    """Reads tensors into their targets.

    Args:
        expected: tensor → value hash; others are not judged.
        make_slot: where to read into; called once for each slot.
    """

    def __init__(
        self,
        targets: Sequence[tuple[TensorPlace, Target]],
        expected: Mapping[str, str] | None = None,
        *,
        readers: int = DEFAULT_READERS,
        make_slot: Callable[[int], Slot] = HostSlot,
    ) -> None:
        by_place = {(place.file, place.start, place.name): target for place, target in targets}
        self._places = in_order([place for place, _ in targets])
        self._targets = [by_place[p.file, p.start, p.name] for p in self._places]
        self._spans = plan(self._places)
        self._expected = dict(expected or {})
        self._readers = readers
        self._make_slot = make_slot
        self._lanes: list[list[bytes]] = [
            [b""] * -(-(p.end - p.start) // CHUNK_BYTES) for p in self._places
        ]
        self._missing = [len(lanes) for lanes in self._lanes]
        self._total = sum(place.end - place.start for place in self._places)
        self._state = _State()
        self._files: dict[Path, _File] = {}
        self._threads: list[threading.Thread] = []
        self._began_s = 0.0

    def begin(self) -> None:
        """Opens the files, makes the slots and lets the readers run. Raises `ModelFolderError`."""
        try:
            for path in {span.file for span in self._spans}:
                self._files[path] = _File(path)
        except OSError as error:
            self._close()
            raise ModelFolderError(
                f"cannot be read: {error.strerror}", where=str(error.filename)
            ) from error
        count = max(1, min(self._readers, len(self._spans)))
        size = SPAN_BYTES + 2 * PAGE
        slots = [[self._make_slot(size) for _ in range(_SLOTS)] for _ in range(count)]
        self._began_s = time.perf_counter()
        self._state.running = count
        for number, own in enumerate(slots):
            thread = threading.Thread(
                target=self._read, args=(own,), name=f"weights-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def progress(self) -> Progress:
        state = self._state
        with state.changed:
            end_s = state.ended_s or time.perf_counter()
            return Progress(state.done_bytes, self._total, max(0.0, end_s - self._began_s))

    def wait_for(self, names: Collection[str]) -> None:
        """Returns once these tensors are there (on a device: under way on its streams).

        Raises whatever ended a reader.
        """
        wanted = [index for index, place in enumerate(self._places) if place.name in set(names)]
        state = self._state
        with state.changed:
            state.changed.wait_for(
                lambda: state.error is not None or not any(self._missing[i] for i in wanted)
            )
            if state.error is not None:
                raise state.error

    def finish(
        self, tell: Callable[[Progress], None] | None = None, *, every_s: float = 5.0
    ) -> Streamed:
        """Waits for the end and judges the values.

        Args:
            tell: is told how far it has come, now and then while it is waited for.

        Raises:
            ModelFolderError: a file is too short, unreadable, or holds other values than expected.
        """
        for thread in self._threads:
            thread.join(every_s if tell is not None else None)
            while tell is not None and thread.is_alive():
                tell(self.progress())
                thread.join(every_s)
        self._close()
        state = self._state
        if state.error is not None:
            raise state.error
        values = {
            place.name: digest_of(place, lanes)
            for place, lanes in zip(self._places, self._lanes, strict=True)
        }
        for place in self._places:
            if self._expected.get(place.name, values[place.name]) != values[place.name]:
                raise ModelFolderError(
                    f"holds other values for {place.name!r} than it should",
                    where=str(place.file),
                    hint="the file is damaged or another model's: add the model again",
                )
        if missing := sorted(self._expected.keys() - values.keys()):
            raise ModelFolderError(
                f"lacks {missing[0]!r}", where=str(self._places[0].file if self._places else "")
            )
        assert state.ended_s is not None
        return Streamed(self._total, state.ended_s - self._began_s, state.cached_bytes, values)

    def _close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _read(self, slots: Sequence[Slot]) -> None:
        """One reader's life."""
        state = self._state
        try:
            with ThreadPoolExecutor(1) as carrier:
                carried: list[Future[None] | None] = [None] * _SLOTS
                for turn, span in enumerate(iter(self._next, None)):
                    at = turn % _SLOTS
                    _free(slots[at], carried[at])
                    carried[at] = self._carry(span, slots[at], carrier)
                for slot, last in zip(slots, carried, strict=True):
                    _free(slot, last)
        except OSError as error:
            self._fail(ModelFolderError(f"cannot be read: {error.strerror}"))
        except BaseException as error:  # noqa: BLE001  handed to whoever waits
            self._fail(error)
        with state.changed:
            state.running -= 1
            if not state.running:
                state.ended_s = time.perf_counter()
            state.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._state.changed:
            self._state.error = self._state.error or error

    def _next(self) -> _Span | None:
        state = self._state
        with state.changed:
            if state.error is not None or state.next_span == len(self._spans):
                return None
            state.next_span += 1
            return self._spans[state.next_span - 1]

    def _carry(self, span: _Span, slot: Slot, carrier: Executor) -> Future[None] | None:
        """What the page cache has first, tensor by tensor; from the first gap on, the file."""
        file, parts = self._files[span.file], span.parts
        done, rest = 0, None
        while done < len(parts):
            run = [part for part in parts[done:] if part.tensor == parts[done].tensor]
            taken = self._take_cached(file, run, slot)
            done += taken
            if taken < len(run):
                slot.free()  # what was taken of this span may still be on its way
                rest = self._carry_uncached(file, parts[done:], slot, carrier)
                break
        with self._state.changed:
            self._state.cached_bytes += sum(part.size for part in parts[:done])
        return rest

    def _take_cached(self, file: _File, run: Sequence[_Part], slot: Slot) -> int:
        """Of one tensor's neighbouring parts; how many of them were there."""
        first, size = run[0], sum(part.size for part in run)
        offset = first.chunk * CHUNK_BYTES
        if not file.can_ask_cache:
            return 0
        target = self._targets[first.tensor]
        taken = target.take_cached(file.cached, first.start, size, slot, offset)
        if taken is None:
            file.can_ask_cache = False
            return 0
        _, lanes = taken
        self._note(run[: len(lanes)], lanes)
        return len(lanes)

    def _carry_uncached(
        self, file: _File, parts: Sequence[_Part], slot: Slot, carrier: Executor
    ) -> Future[None]:
        begin = parts[0].start - parts[0].start % PAGE
        end = parts[-1].start + parts[-1].size
        got = file.read(slot.view[: -(-(end - begin) // PAGE) * PAGE], begin)
        if begin + got < end:
            raise ModelFolderError(
                f"ends after {begin + got} bytes where its header needs {end}",
                where=str(file.path),
                hint="the file is truncated: fetch it again",
            )
        return carrier.submit(self._put, parts, slot, begin)

    def _put(self, parts: Sequence[_Part], slot: Slot, begin: int) -> None:
        for part in parts:
            target, offset = self._targets[part.tensor], part.chunk * CHUNK_BYTES
            lanes = target.put(slot, part.start - begin, part.size, offset)
            self._note([part], [lanes])

    def _note(self, parts: Sequence[_Part], lanes: Sequence[bytes]) -> None:
        state = self._state
        with state.changed:
            for part, folded in zip(parts, lanes, strict=True):
                self._lanes[part.tensor][part.chunk] = folded
                self._missing[part.tensor] -= 1
                state.done_bytes += part.size
                if not self._missing[part.tensor]:
                    state.changed.notify_all()


def _free(slot: Slot, carried: "Future[None] | None") -> None:
    """Returns when the slot may be read into. Raises what carrying it away has raised."""
    if carried is not None:
        carried.result()
    slot.free()


def values_of(places: Collection[TensorPlace], *, readers: int = DEFAULT_READERS) -> dict[str, str]:
    """The value hashes of tensors in their files. Raises `ModelFolderError`."""
    nowhere = NoTarget()
    stream = WeightStream([(place, nowhere) for place in places], readers=readers)
    stream.begin()
    return dict(stream.finish().values)
