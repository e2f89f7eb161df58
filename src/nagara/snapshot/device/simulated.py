"""A simulated device: the same states as the driver's, memory sizes, rates, and every fault.

Time is the simulation's own clock: a call that takes half a second of it takes none. What the
hardware could not do is refused: memory that is not there, a copy to a device that a process
does not hold, a call of a process that is locked (which would hang). All figures made with it
are simulated and have to be called so.

Not safe to use from several threads at once.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from nagara.snapshot.device.errors import (
    DeviceBusyError,
    DeviceFullError,
    DeviceGoneError,
    DeviceLostError,
    DeviceRefusedError,
    DeviceSilentError,
)
from nagara.snapshot.device.protocol import DeviceFacts
from nagara.snapshot.states import DeviceEvent, DeviceState, after, can

HANG_S = 3600.0  # of a call that nobody waits for any more


class Fault(StrEnum):
    """What a driver has been seen to do."""

    BUSY = "lock time-out"
    OUT_OF_MEMORY = "restore out of memory"
    BROKEN = "error"
    EXITS = "process exits"
    EMPTY = "checkpoint without memory"
    HANGS = "hang"
    FORGOTTEN = "unlock that does nothing"


@dataclass(slots=True)
class SimulatedClock:
    """Seconds that pass when somebody spends them. `watchers` see each span before it is over."""

    now_s: float = 0.0
    watchers: list[Callable[[float], None]] = field(default_factory=list)

    def monotonic_s(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        for watcher in self.watchers:
            watcher(seconds)
        self.now_s += seconds


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """How fast a device is; the defaults are of no particular one."""

    link_bytes_s: float = 50e9  # between host memory and the device
    lock_s: float = 0.005
    unlock_s: float = 0.002
    context_s: float = 0.15  # to give a context up, or make it anew
    plain_s: float = 30.0  # preparing the device without a snapshot, weights apart


@dataclass(slots=True)
class _Process:
    held: dict[str, int]
    host_bytes: int
    state: DeviceState = DeviceState.RUNNING
    saved: dict[str, int] = field(default_factory=dict)
    busy_s: float = 0.0  # of work it has submitted


class SimulatedDevice:
    """Devices of the given sizes, by uuid, and the processes that use them."""

    kind = "simulated"

    def __init__(
        self,
        memory_bytes: Mapping[str, int],
        *,
        clock: SimulatedClock | None = None,
        rates: DeviceRates | None = None,
        can_map: bool = True,
    ) -> None:
        self.clock = clock or SimulatedClock()
        self.rates = rates or DeviceRates()
        self._memory_bytes = dict(memory_bytes)
        self._can_map = can_map
        self._processes: dict[int, _Process] = {}
        self._faults: dict[tuple[DeviceEvent, int], Fault] = {}
        self._calls: dict[DeviceEvent, int] = {}

    # What a test or a benchmark does to it

    def start(self, pid: int, held: Mapping[str, int], *, host_bytes: int = 0) -> None:
        """A process with memory on devices. Raises `DeviceFullError` when it does not fit."""
        free = self.free_bytes()
        if too_large := [uuid for uuid, size in held.items() if size > free[uuid]]:
            raise DeviceFullError("out of memory", where=too_large[0])
        self._processes[pid] = _Process(dict(held), host_bytes)

    def end(self, pid: int) -> None:
        """The process ends, however; its memory is free again."""
        process = self._processes[pid]
        process.state = after(process.state, DeviceEvent.ENDED)
        process.held, process.saved = {}, {}

    def carry(self, other: "SimulatedDevice", pids: Mapping[int, int]) -> None:
        """Checkpointed processes as a host restore makes them anew on another machine (or this
        one): pid there → pid here."""
        for old, new in pids.items():
            process = other._processes[old]
            if process.state is not DeviceState.CHECKPOINTED:
                raise DeviceRefusedError(f"is {process.state}: the tool cannot save it")
            self._processes[new] = _Process(
                {}, process.host_bytes, DeviceState.CHECKPOINTED, dict(process.saved)
            )

    def submit(self, pid: int, seconds: float) -> None:
        """The process gives the device work. Raises `DeviceSilentError` where it would hang."""
        process = self._alive(pid)
        if process.state is not DeviceState.RUNNING:
            self.clock.spend(HANG_S)
            raise DeviceSilentError(
                f"is {process.state}: its call does not return", where=f"process {pid}"
            )
        process.busy_s += seconds

    def fail(self, event: DeviceEvent, fault: Fault, *, call: int = 1) -> None:
        """The n-th call of that kind from now on meets the fault."""
        self._faults[event, self._calls.get(event, 0) + call] = fault

    # The protocol

    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            self.kind,
            "simulated",
            dict(self._memory_bytes),
            can_save=True,
            can_map=self._can_map,
            names=dict.fromkeys(self._memory_bytes, "simulated device"),
        )

    def holders(self, pids: Collection[int]) -> tuple[int, ...]:
        states = {pid: p.state for pid, p in self._processes.items()}
        gone = DeviceState.GONE
        return tuple(pid for pid in sorted(pids) if states.get(pid, gone) is not gone)

    def state(self, pid: int) -> DeviceState:
        return self._alive(pid).state

    def held_bytes(self, pid: int) -> Mapping[str, int]:
        return dict(self._alive(pid).held)

    def kept_bytes(self, pid: int) -> int:
        process = self._alive(pid)
        return process.host_bytes + sum(process.saved.values())

    def free_bytes(self) -> Mapping[str, int]:
        free = dict(self._memory_bytes)
        for process in self._processes.values():
            for uuid, size in process.held.items():
                free[uuid] -= size
        return free

    def lock(self, pid: int, *, time_limit_s: float) -> None:
        process, fault = self._begin(pid, DeviceEvent.LOCK, time_limit_s)
        if fault is Fault.BUSY or process.busy_s > time_limit_s:
            self.clock.spend(time_limit_s)
            process.busy_s = max(0.0, process.busy_s - time_limit_s)
            process.state = after(process.state, DeviceEvent.REFUSED)
            raise DeviceBusyError(
                f"could not be locked in {time_limit_s:g} s", where=f"process {pid}"
            )
        self._take(process, self.rates.lock_s + process.busy_s, time_limit_s)
        process.busy_s = 0.0
        self._end(process)

    def checkpoint(self, pid: int, *, time_limit_s: float) -> None:
        process, fault = self._begin(pid, DeviceEvent.CHECKPOINT, time_limit_s)
        size = sum(process.held.values())
        self._take(process, self.rates.context_s + size / self.rates.link_bytes_s, time_limit_s)
        process.saved = {} if fault is Fault.EMPTY else process.held
        process.held = {}
        self._end(process)

    def restore(self, pid: int, device_map: Mapping[str, str], *, time_limit_s: float) -> None:
        saved = self._alive(pid).saved
        wanted = {device_map.get(uuid, uuid): size for uuid, size in saved.items()}
        free = self.free_bytes()
        process, fault = self._begin(pid, DeviceEvent.RESTORE, time_limit_s)
        if unknown := sorted(wanted.keys() - free.keys()):
            self._lose(process, pid, f"no device {unknown[0]} here")
        if device_map and set(device_map.values()) != set(self._memory_bytes):
            self._lose(process, pid, "the map does not name every device once")
        if len(wanted) != len(process.saved):
            self._lose(process, pid, "the map sends two devices to one")
        # Whatever fails from here on leaves part of the memory taken until the process is ended.
        process.held = {uuid: min(size, free[uuid]) for uuid, size in wanted.items()}
        if process.held != wanted or fault is Fault.OUT_OF_MEMORY:
            process.state = after(process.state, DeviceEvent.BROKE)
            raise DeviceFullError("out of memory", where=f"process {pid}")
        size = sum(wanted.values())
        self._take(process, self.rates.context_s + size / self.rates.link_bytes_s, time_limit_s)
        process.saved = {}
        self._end(process)

    def unlock(self, pid: int, *, time_limit_s: float) -> None:
        process, fault = self._begin(pid, DeviceEvent.UNLOCK, time_limit_s)
        if fault is Fault.FORGOTTEN:
            process.state = DeviceState.LOCKED
            return
        self._take(process, self.rates.unlock_s, time_limit_s)
        self._end(process)

    def _alive(self, pid: int) -> _Process:
        process = self._processes.get(pid)
        if process is None or process.state is DeviceState.GONE:
            raise DeviceGoneError("has ended", where=f"process {pid}")
        return process

    def _begin(
        self, pid: int, event: DeviceEvent, time_limit_s: float
    ) -> tuple[_Process, Fault | None]:
        process = self._alive(pid)
        if not can(process.state, event):
            raise DeviceRefusedError(f"is {process.state}: no {event}", where=f"process {pid}")
        process.state = after(process.state, event)
        self._calls[event] = self._calls.get(event, 0) + 1
        fault = self._faults.pop((event, self._calls[event]), None)
        if fault is Fault.EXITS:
            self.end(pid)
            raise DeviceGoneError(f"ended at its {event}", where=f"process {pid}")
        if fault is Fault.HANGS:
            self._silent(process, pid, time_limit_s)
        if fault is Fault.BROKEN:
            self._lose(process, pid, f"{event} failed")
        return process, fault

    def _take(self, process: _Process, seconds: float, time_limit_s: float) -> None:
        if seconds > time_limit_s:
            self._silent(process, None, time_limit_s)
        self.clock.spend(seconds)

    def _end(self, process: _Process) -> None:
        process.state = after(process.state, DeviceEvent.DONE)

    def _silent(self, process: _Process, pid: int | None, time_limit_s: float) -> NoReturn:
        self.clock.spend(time_limit_s)
        process.state = after(process.state, DeviceEvent.BROKE)
        where = None if pid is None else f"process {pid}"
        raise DeviceSilentError(f"no answer in {time_limit_s:g} s", where=where)

    def _lose(self, process: _Process, pid: int, why: str) -> NoReturn:
        process.state = after(process.state, DeviceEvent.BROKE)
        raise DeviceLostError(why, where=f"process {pid}")
