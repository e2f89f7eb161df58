"""Where device work runs: in order within a stream, beside the host, ordered across by events.

`Stream.submit(work, after)` queues a call that runs once everything in `after` has happened and
returns the event of its end. The host waits in one place, `Event.wait`, for the step it is about
to commit. A device has three streams: transfer in, compute, transfer out.

| implementation    | runs work                                                     | for       |
|-------------------|---------------------------------------------------------------|-----------|
| `InlineStream`    | at once, on the host's thread                                 | CPU       |
| `WorkerStream`    | on one thread of its own; the calls are long and release the GIL | CPU    |
| `CudaStream`      | on the GPU                                                    | CUDA      |
| `ScriptedStream`  | as late as possible, or when a test says so                   | tests     |
| `SimulatedStream` | in no time, but is done only after a given time               | measuring |
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from nagara.engine.errors import EngineError, UnsupportedError

Work = Callable[[], object]  # what it returns is not used


class Event(Protocol):
    """The end of one piece of work."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Block the host until the work has ended; raises what the work raised."""


class Stream(Protocol):
    """A queue of device work."""

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event: ...

    def busy_s(self) -> float:
        """Time between the device's own marks of start and end, summed over the work so far."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Device:
    """A device's streams and its torch name."""

    torch_device: torch.device
    inward: Stream
    compute: Stream
    outward: Stream
    has_pinned_memory: bool = False

    def settle(self) -> None:
        """Wait for what was started outside the streams: memory made, weights moved."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def give_back(self) -> None:
        """Return memory that was freed to whoever else uses the device."""
        if self.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        for stream in {id(s): s for s in (self.inward, self.compute, self.outward)}.values():
            stream.close()


@dataclass(slots=True)
class _Done:
    """An event of work that has run already."""

    error: BaseException | None = None

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class InlineStream:
    """Runs work on the caller's thread: nothing overlaps."""

    def __init__(self) -> None:
        self._busy_s = 0.0

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        for event in after:
            event.wait()
        started = time.perf_counter()
        work()
        self._busy_s += time.perf_counter() - started
        return _Done()

    def busy_s(self) -> float:
        return self._busy_s

    def close(self) -> None:
        pass


class _ThreadEvent:
    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def set(self) -> None:
        self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error


class WorkerStream:
    """Runs work on one thread. Work whose predecessors failed fails with their error."""

    def __init__(self, name: str = "engine-device") -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Event], _ThreadEvent] | None] = (
            queue.SimpleQueue()
        )
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        event = _ThreadEvent()
        self._queue.put((work, after, event))
        return event

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, after, event = item
            started = time.perf_counter()
            try:
                for earlier in after:
                    earlier.wait()
                work()
            except BaseException as error:  # noqa: BLE001  handed to whoever waits for the event
                event.error = error
            self._busy_s += time.perf_counter() - started
            event.set()

    def busy_s(self) -> float:
        return self._busy_s

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)


class CudaStream:
    """A stream of the GPU. Errors of kernels surface when the host waits."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("no CUDA device is usable", where="device", hint="use cpu")
        self._stream = torch.cuda.Stream(device)
        self._marks: deque[tuple[Any, Any]] = deque()
        self._busy_s = 0.0
        self._lock = threading.Lock()  # the step thread submits, any thread asks how busy it is

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            for event in after:
                assert isinstance(event, _CudaEvent)
                self._stream.wait_event(event.event)
            begin.record(self._stream)
            work()
            end.record(self._stream)
        with self._lock:
            self._marks.append((begin, end))
            if len(self._marks) > 64:
                self._add_up()
        return _CudaEvent(end)

    def _add_up(self) -> None:
        while self._marks and self._marks[0][1].query():
            begin, end = self._marks.popleft()
            self._busy_s += begin.elapsed_time(end) / 1e3

    def busy_s(self) -> float:
        with self._lock:
            self._add_up()
            return self._busy_s

    def close(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class _CudaEvent:
    event: Any

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(slots=True)
class _LazyEvent:
    """Work of a scripted stream; waiting for it runs it and all it needs, and nothing else."""

    stream: "ScriptedStream"
    work: Work
    after: Sequence[Event]
    has_run: bool = False

    def is_done(self) -> bool:
        return self.has_run

    def wait(self) -> None:
        self.stream.run_until(self)


class ScriptedStream:
    """Holds work back until somebody needs it or a test releases it.

    The host sees the slowest device that is still correct: whatever relies on luck instead of on
    events shows. `run_next` lets a test choose other orders.
    """

    def __init__(self) -> None:
        self.held: deque[_LazyEvent] = deque()
        self.ran = 0

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        event = _LazyEvent(self, work, tuple(after))
        self.held.append(event)
        return event

    def run_next(self) -> bool:
        """Run the oldest held work and what it waits for; False if there is none."""
        if not self.held:
            return False
        event = self.held[0]
        for earlier in event.after:
            earlier.wait()
        if not event.has_run:  # a predecessor of its own stream may have run it
            self.held.popleft()
            event.work()
            event.has_run = True
            self.ran += 1
        return True

    def run_until(self, event: _LazyEvent) -> None:
        while not event.has_run:
            if not self.run_next():
                raise EngineError("an event was waited for whose work is not queued")

    def busy_s(self) -> float:
        return 0.0

    def close(self) -> None:
        while self.run_next():
            pass


@dataclass(slots=True)
class _TimedEvent:
    stream: "SimulatedStream"
    work: Work
    end_s: float
    has_run: bool = False

    def is_done(self) -> bool:
        return time.perf_counter() >= self.end_s

    def wait(self) -> None:
        self.stream.run_until(self)


class SimulatedStream:
    """A device whose work takes a given time and keeps no processor busy.

    Work starts when the one before has ended, and ends `duration` later by the device's own marks;
    the host's wake-up may come later and is the host's time. `next_duration_s` is asked once for
    each piece of work.
    """

    def __init__(self, next_duration_s: Callable[[], float]) -> None:
        self._next_duration_s = next_duration_s
        self._held: deque[_TimedEvent] = deque()
        self._free_s = 0.0
        self._busy_s = 0.0
        self.marks: list[tuple[float, float]] = []

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        return self.submit_for(self._next_duration_s(), work)

    def submit_for(self, duration: float, work: Work) -> Event:
        start = max(time.perf_counter(), self._free_s)
        self._free_s = start + duration
        self._busy_s += duration
        if duration:
            self.marks.append((start, self._free_s))
        event = _TimedEvent(self, work, self._free_s)
        self._held.append(event)
        return event

    def run_until(self, event: _TimedEvent) -> None:
        left = event.end_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
        while not event.has_run:
            first = self._held.popleft()
            first.work()
            first.has_run = True

    def busy_s(self) -> float:
        return self._busy_s

    def close(self) -> None:
        self._held.clear()


@dataclass(frozen=True, slots=True)
class _InstantCopies:
    """Transfers of a simulated device: in order with its work, and taking no time."""

    stream: SimulatedStream

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        return self.stream.submit_for(0.0, work)

    def busy_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


def simulated_device(stream: SimulatedStream) -> Device:
    copies = _InstantCopies(stream)
    return Device(torch.device("cpu"), copies, stream, copies)


@dataclass(slots=True)
class ScriptedDevice:
    """Three scripted streams and the device made of them."""

    inward: ScriptedStream = field(default_factory=ScriptedStream)
    compute: ScriptedStream = field(default_factory=ScriptedStream)
    outward: ScriptedStream = field(default_factory=ScriptedStream)

    @property
    def device(self) -> Device:
        return Device(torch.device("cpu"), self.inward, self.compute, self.outward)


def inline_device() -> Device:
    stream = InlineStream()
    return Device(torch.device("cpu"), stream, stream, stream)


def worker_device() -> Device:
    stream = WorkerStream()
    return Device(torch.device("cpu"), stream, stream, stream)


def cuda_device() -> Device:
    device = torch.device("cuda")
    return Device(
        device, CudaStream(device), CudaStream(device), CudaStream(device), has_pinned_memory=True
    )
