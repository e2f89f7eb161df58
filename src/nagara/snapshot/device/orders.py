"""The orders in which a replica's device memory is saved and put back, over all its processes.

    out    lock all → checkpoint all → (the host's checkpoint)
    back   (the host's restore) → map → free memory → restore all → unlock all

All are locked before any is saved, so that none waits for another that is already gone. A lock
that is not had in time unlocks those before it and leaves the replica as it was. Whatever fails
later is terminal: the replica is to be ended, which frees its device, and the start goes on as a
plain one. Every process that is left locked is unlocked on the way out: the device calls of one
that is forgotten hang while it looks alive, and one that hangs in the driver may not even be
killed. Success is not believed: sizes and states are looked at.

Blocking: worker threads only. Each order keeps its deadline, as long as the device keeps its
time limits.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nagara.snapshot.device.errors import (
    DeviceError,
    DeviceFullError,
    DeviceGoneError,
    DeviceMissingError,
    DeviceSilentError,
)
from nagara.snapshot.device.mapping import device_map, moved
from nagara.snapshot.device.protocol import Device, DeviceFacts
from nagara.snapshot.errors import BadSnapshotError, CaptureError, HostMisfitError, RestoreError
from nagara.snapshot.states import DeviceState

LEAST_KEPT_SHARE = 0.5
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """How long each call, and an order as a whole, may take."""

    lock_s: float = 10.0
    checkpoint_s: float = 120.0
    restore_s: float = 60.0
    unlock_s: float = 10.0
    order_s: float = 180.0
    free_memory_s: float = 5.0  # for another replica's memory to become free
    pause_s: float = 0.05
    context_bytes: int = 1 << 30  # of the driver's own: held on a device, made anew, not kept


@dataclass(frozen=True, slots=True)
class SavedProcess:
    """One process's device memory: where it was, and how much. `pid` as the replica knows it."""

    pid: int
    held_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What of a replica was on devices at its capture. `uuids`: all that the driver saw."""

    kind: str
    driver: str
    uuids: tuple[str, ...]
    processes: tuple[SavedProcess, ...]

    def to_json(self) -> bytes:
        """The record with its format number."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "DeviceRecord":
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        try:
            plain: Any = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(plain, dict) or plain.pop("format") != _FORMAT:
            raise ValueError("another format of device record")
        processes = tuple(SavedProcess(**one) for one in plain.pop("processes"))
        uuids = tuple(plain.pop("uuids"))
        record = cls(uuids=uuids, processes=processes, **plain)
        if not _is_sound(record):
            raise ValueError("a device record that no capture makes")
        return record


class _Deadline:
    """The time left to one order."""

    def __init__(self, seconds: float, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._end_s = monotonic_s() + seconds

    def at_most(self, seconds: float) -> float:
        """Raises `DeviceSilentError` when nothing is left."""
        left_s = self._end_s - self._monotonic_s()
        if left_s <= 0:
            raise DeviceSilentError("the time for all processes is over")
        return min(seconds, left_s)


class DeviceOrders:
    """Saves and puts back what replicas have on the devices of this machine.

    Args:
        monotonic_s, sleep: the clock; the simulated device has its own.
    """

    def __init__(
        self,
        device: Device,
        limits: DeviceLimits | None = None,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device = device
        self._limits = limits or DeviceLimits()
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._promised: Counter[str] = Counter()  # bytes, to restores that have not taken them yet

    def save(
        self, pids: Mapping[int, int], *, rebuilds_communicators: bool = False
    ) -> DeviceRecord | None:
        """Takes a quiet replica's memory off its devices; None when it has none there.

        Args:
            pids: pid on this machine → pid as the replica knows it.
            rebuilds_communicators: the app's hooks have torn down what connects its processes.

        Raises:
            CaptureError: with the reason. The replica is to be ended, unless it is RUNNING.
        """
        deadline = _Deadline(self._limits.order_s, self._monotonic_s)
        try:
            holders = self._device.holders(pids)
            if not holders:
                return None
            facts = self._device.facts()
            held = {pid: dict(self._device.held_bytes(pid)) for pid in holders}
            _refuse(facts, held, rebuilds_communicators=rebuilds_communicators)
            with self._unlocked_on_failure(holders):
                for pid in holders:
                    limit_s = deadline.at_most(self._limits.lock_s)
                    self._device.lock(pid, time_limit_s=limit_s)
                for pid in holders:
                    self._checkpoint(pid, held[pid], deadline)
        except DeviceError as error:
            raise CaptureError(
                f"what it has on its device cannot be saved: {error.what}", where=error.where
            ) from error
        processes = tuple(SavedProcess(pids[pid], held[pid]) for pid in holders)
        return DeviceRecord(facts.kind, facts.driver, facts.uuids, processes)

    def _checkpoint(self, pid: int, held: Mapping[str, int], deadline: _Deadline) -> None:
        before = self._device.kept_bytes(pid)
        self._device.checkpoint(pid, time_limit_s=deadline.at_most(self._limits.checkpoint_s))
        state = self._device.state(pid)
        if state is not DeviceState.CHECKPOINTED:
            raise DeviceError(f"is {state} after its checkpoint", where=f"process {pid}")
        if left := sum(self._device.held_bytes(pid).values()):
            raise DeviceError(f"still holds {left} bytes of its device", where=f"process {pid}")
        kept = self._device.kept_bytes(pid) - before
        wanted = sum(held.values()) - self._limits.context_bytes * len(held)
        if kept < LEAST_KEPT_SHARE * wanted:
            raise DeviceError(
                f"only {max(0, kept)} bytes came along of {sum(held.values())} on the device",
                where=f"process {pid}",
            )

    def put_back(self, record: DeviceRecord, pids: Mapping[int, int]) -> None:
        """Puts the memory of a replica, restored on the host, back on devices; it then runs.

        Args:
            pids: pid as the replica knows it → pid on this machine.

        Raises:
            HostMisfitError: these devices are not the right ones, or too full.
            BadSnapshotError: it is the snapshot's fault.
            RestoreError: anything else. In every case the replica is to be ended.
        """
        deadline = _Deadline(self._limits.order_s, self._monotonic_s)
        try:
            facts = self._device.facts()
        except DeviceError as error:
            raise HostMisfitError(error.what, where=error.where) from error
        if facts.kind != record.kind or not facts.can_save:
            why = facts.why_not or f"its device is {record.kind}, this machine's {facts.kind}"
            raise HostMisfitError(why)
        here = self._found(record, pids)
        try:
            chosen = device_map(record.uuids, facts, _demand(record), self._device.free_bytes())
            with (
                self._room(moved(_demand(record), chosen), deadline),
                self._unlocked_on_failure(here),
            ):
                for pid in here:
                    limit_s = deadline.at_most(self._limits.restore_s)
                    self._device.restore(pid, chosen, time_limit_s=limit_s)
                for pid in here:
                    limit_s = deadline.at_most(self._limits.unlock_s)
                    self._device.unlock(pid, time_limit_s=limit_s)
                self._all_run(here)
        except DeviceFullError as error:
            raise HostMisfitError(f"its device: {error.what}", where=error.where) from error
        except (DeviceSilentError, DeviceMissingError) as error:
            raise RestoreError(f"its device: {error.what}", where=error.where) from error
        except DeviceError as error:
            raise BadSnapshotError(f"its device: {error.what}", where=error.where) from error

    def _found(self, record: DeviceRecord, pids: Mapping[int, int]) -> tuple[int, ...]:
        here = []
        for saved in record.processes:
            pid = pids.get(saved.pid)
            try:
                if pid is None:
                    raise DeviceGoneError("has not come back", where=f"process {saved.pid}")
                state = self._device.state(pid)
            except DeviceError as error:
                raise BadSnapshotError(error.what, where=error.where) from error
            if state is not DeviceState.CHECKPOINTED:
                raise BadSnapshotError(
                    f"its process {saved.pid} came back {state}, without what it had on its device"
                )
            here.append(pid)
        return tuple(here)

    @contextlib.contextmanager
    def _room(self, wanted: Mapping[str, int], deadline: _Deadline) -> Iterator[None]:
        """The block has room for that much, also beside other restores that begin meanwhile.

        Waits a while for memory to become free: a restore without room does not fail, it is lost.
        """
        end_s = self._monotonic_s() + deadline.at_most(self._limits.free_memory_s)
        while lack := self._lack(wanted):
            if self._monotonic_s() >= end_s:
                uuid, size = next(iter(lack.items()))
                raise HostMisfitError(
                    f"{size} bytes more are needed on the device than are free", where=uuid
                )
            self._sleep(self._limits.pause_s)
        try:
            yield
        finally:
            with self._lock:
                self._promised.subtract(wanted)

    def _lack(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """What is missing; if nothing is, it is promised. What a restore has taken already counts
        twice until it is over, which errs on the safe side."""
        with self._lock:
            free = self._device.free_bytes()
            lack = {
                uuid: short
                for uuid, size in wanted.items()
                if (short := size - free.get(uuid, 0) + self._promised[uuid]) > 0
            }
            if not lack:
                self._promised.update(wanted)
        return lack

    def _all_run(self, pids: Sequence[int]) -> None:
        for pid in pids:
            state = self._device.state(pid)
            if state is not DeviceState.RUNNING:
                raise DeviceError(
                    f"is {state} after its unlock: its device calls would hang",
                    where=f"process {pid}",
                )

    @contextlib.contextmanager
    def _unlocked_on_failure(self, pids: Sequence[int]) -> Iterator[None]:
        """Unlocks what is locked when the block fails; says nothing of what resists.

        The first one that does not answer has the whole time limit, all others together as much
        again: a driver that hangs shall not keep a plain start waiting for each process.
        """
        try:
            yield
        except BaseException:
            deadline = _Deadline(2 * self._limits.unlock_s, self._monotonic_s)
            for pid in reversed(pids):
                with contextlib.suppress(DeviceError):
                    if self._device.state(pid) is DeviceState.LOCKED:
                        limit_s = deadline.at_most(self._limits.unlock_s)
                        self._device.unlock(pid, time_limit_s=limit_s)
            raise


def _is_sound(record: DeviceRecord) -> bool:
    """It comes from a file: every value is of its kind, nothing is there twice or negative."""
    words = (record.kind, record.driver, *record.uuids)
    pids = [process.pid for process in record.processes]
    held = [process.held_bytes for process in record.processes]
    return (
        all(isinstance(word, str) for word in words)
        and len(set(record.uuids)) == len(record.uuids)
        and all(type(pid) is int and pid > 0 for pid in pids)
        and len(set(pids)) == len(pids)
        and all(isinstance(each, dict) and each.keys() <= set(record.uuids) for each in held)
        and all(type(size) is int and size >= 0 for each in held for size in each.values())
    )


def _refuse(
    facts: DeviceFacts, held: Mapping[int, Mapping[str, int]], *, rebuilds_communicators: bool
) -> None:
    if not facts.can_save:
        raise DeviceMissingError(facts.why_not or "the driver cannot save", where=facts.kind)
    used = {uuid for memory in held.values() for uuid, size in memory.items() if size}
    if len(used) > 1 and not rebuilds_communicators:
        raise DeviceMissingError(
            f"it uses {len(used)} devices, and what connects them (NCCL) does not survive being "
            "saved; hooks that tear it down and build it anew make it possible: say so with "
            'snapshot.communicators = "rebuilt"',
            where=", ".join(sorted(used)),
        )


def _demand(record: DeviceRecord) -> dict[str, int]:
    """Bytes by the uuids of the capture."""
    demand: dict[str, int] = {}
    for process in record.processes:
        for uuid, size in process.held_bytes.items():
            demand[uuid] = demand.get(uuid, 0) + size
    return demand
