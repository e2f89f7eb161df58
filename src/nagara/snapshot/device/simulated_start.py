"""A restored start on simulated hardware: what overlaps, what cannot, and how long it takes.

    storage   weights ─────────────────────────────────────────┐ read ahead into host memory
              pages of the host snapshot ──┐ (share the storage)│
    host      restore, as its pages come ──┘                    │
    device                                   restore, unlock    │
    link                                     (busy with that) ──┴─ weights, as they are read

The device part is carried out by the real orders on the simulated device. Storage is shared
fairly by those who read; the link carries one thing at a time; read-ahead ends where host memory
does. What hardware could not do raises `ImpossibleError`: a copy to a device that the process
does not hold yet, or of more than has been read. Every figure is simulated.
"""

from dataclasses import dataclass

from nagara.snapshot.device.orders import DeviceOrders, DeviceRecord, SavedProcess
from nagara.snapshot.device.simulated import DeviceRates, SimulatedClock, SimulatedDevice
from nagara.snapshot.states import DeviceState

GB = 10**9
_UUID = "sim-0"
_PID_BEFORE, _PID_AFTER, _PID_INSIDE = 10, 20, 1
_FULL_SHARE = 0.999  # of the memory for read-ahead: it is full


class ImpossibleError(Exception):
    """The simulated hardware cannot do this now."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates in bytes a second, sizes in bytes."""

    storage_bytes_s: float = 7.0 * GB
    host_restore_bytes_s: float = 1.5 * GB  # of one process tree by the checkpoint tool
    host_latency_s: float = 0.2  # container, namespaces, hooks
    link_bytes_s: float = 50.0 * GB
    device_bytes: int = 192 * GB
    ahead_bytes: int = 256 * GB  # host memory that weights may wait in
    context_s: float = 0.15
    lock_s: float = 0.005
    unlock_s: float = 0.002


@dataclass(frozen=True, slots=True)
class Replica:
    """What is to be put back."""

    name: str
    weights_bytes: int
    host_bytes: int  # pages of the host snapshot
    held_bytes: int  # on the device without weights and KV cache: context, code, graphs


@dataclass(frozen=True, slots=True)
class SimulatedStart:
    """One start, by its stages, and the bound that the hardware sets."""

    name: str
    weights_bytes: int
    host_s: float
    device_s: float
    weights_s: float  # after the device, what was not hidden
    restore_s: float
    bound_s: float

    @property
    def ratio(self) -> float:
        return self.restore_s / self.bound_s


class Machine:
    """Storage, link and host memory of one machine on one clock."""

    def __init__(self, hardware: Hardware, device: SimulatedDevice, clock: SimulatedClock) -> None:
        self._hardware = hardware
        self._device = device
        self._clock = clock
        self._wanted = 0.0  # weights still to be read ahead
        self._ready = 0.0  # weights in host memory
        self._foreground_bytes_s = 0.0  # of the storage
        self._is_copying = False
        clock.watchers.append(self._pass)

    def begin_reading(self, size: int) -> None:
        """Weights are read ahead from now on, beside everything else."""
        self._wanted += size

    def restore_host(self, size: int) -> None:
        """The checkpoint tool reads its pages in full while it makes the process anew."""
        hardware = self._hardware
        self._clock.spend(hardware.host_latency_s)
        left = float(size)
        while left > 1:
            rate = min(hardware.host_restore_bytes_s, self._share())
            self._foreground_bytes_s = rate
            seconds = left / rate
            if self._is_reading():  # until the other reader has ended, and then again
                others = hardware.storage_bytes_s - rate
                seconds = min(seconds, self._wanted / others if others else seconds)
            self._clock.spend(seconds)
            left -= rate * seconds
        self._foreground_bytes_s = 0.0

    def copy(self, pid: int, size: int) -> None:
        """Weights go to the device as they come.

        Raises:
            ImpossibleError: the process does not hold its device, the link is busy, or nobody
                has begun to read that much.
        """
        if self._is_copying:
            raise ImpossibleError("the link carries one thing at a time")
        if (state := self._device.state(pid)) is not DeviceState.RUNNING:
            raise ImpossibleError(f"a process that is {state} cannot copy to its device")
        if size > self._ready + self._wanted + 1:
            raise ImpossibleError("weights are copied that nobody reads")
        self._is_copying = True
        left = float(size)
        while left > 1:
            moved = min(left, self._ready)
            seconds = moved / self._hardware.link_bytes_s
            if moved <= 1:  # as fast as they are read, and no faster than the link
                rate = min(self._hardware.storage_bytes_s, self._hardware.link_bytes_s)
                seconds = left / rate
                moved = left
            self._ready -= moved
            self._clock.spend(seconds)
            left -= moved
        self._is_copying = False

    def _is_reading(self) -> bool:
        is_full = self._ready >= _FULL_SHARE * self._hardware.ahead_bytes
        # Rounding leaves less than a byte, for which no time would ever pass.
        return self._wanted > 1 and not is_full

    def _share(self) -> float:
        """Of the storage, for one more reader."""
        return self._hardware.storage_bytes_s / (2 if self._is_reading() else 1)

    def _pass(self, seconds: float) -> None:
        """Time passes: what is read ahead meanwhile."""
        rate = self._hardware.storage_bytes_s - self._foreground_bytes_s
        room = self._hardware.ahead_bytes - self._ready
        got = max(0.0, min(self._wanted, rate * seconds, room))
        self._wanted -= got
        self._ready += got


def simulate(replica: Replica, hardware: Hardware) -> SimulatedStart:
    """One restored start, its device part by the real orders.

    Raises:
        SnapshotError: it does not fit the device.
    """
    clock = SimulatedClock()
    rates = DeviceRates(
        hardware.link_bytes_s, hardware.lock_s, hardware.unlock_s, hardware.context_s
    )
    record, saved = _captured(replica, hardware, rates)
    device = SimulatedDevice({_UUID: hardware.device_bytes}, clock=clock, rates=rates)
    orders = DeviceOrders(device, monotonic_s=clock.monotonic_s, sleep=clock.spend)
    machine = Machine(hardware, device, clock)
    machine.begin_reading(replica.weights_bytes)
    machine.restore_host(replica.host_bytes)
    device.carry(saved, {_PID_BEFORE: _PID_AFTER})
    host_s = clock.now_s
    orders.put_back(record, {_PID_INSIDE: _PID_AFTER})
    device_s = clock.now_s - host_s
    machine.copy(_PID_AFTER, replica.weights_bytes)
    host_alone_s = hardware.host_latency_s + replica.host_bytes / min(
        hardware.host_restore_bytes_s, hardware.storage_bytes_s
    )
    bound_s = (
        max(host_alone_s, replica.weights_bytes / hardware.storage_bytes_s)
        + device_s
        + replica.weights_bytes / hardware.link_bytes_s
    )
    return SimulatedStart(
        replica.name,
        replica.weights_bytes,
        host_s,
        device_s,
        clock.now_s - host_s - device_s,
        clock.now_s,
        bound_s,
    )


def _captured(
    replica: Replica, hardware: Hardware, rates: DeviceRates
) -> tuple[DeviceRecord, SimulatedDevice]:
    device = SimulatedDevice({_UUID: hardware.device_bytes}, rates=rates)
    device.start(_PID_BEFORE, {_UUID: replica.held_bytes}, host_bytes=replica.host_bytes)
    clock = device.clock
    orders = DeviceOrders(device, monotonic_s=clock.monotonic_s, sleep=clock.spend)
    record = orders.save({_PID_BEFORE: _PID_INSIDE})
    assert record is not None
    assert record.processes == (SavedProcess(_PID_INSIDE, {_UUID: replica.held_bytes}),)
    return record, device
