"""Out and back over all processes of a replica, and every fault of the driver on the way.

A start is carried out as a node does it: what fails is ended, and begun again plainly.
"""

import dataclasses
import json

import pytest

from nagara.snapshot.device.orders import DeviceLimits, DeviceOrders, DeviceRecord
from nagara.snapshot.device.simulated import DeviceRates, Fault, SimulatedClock, SimulatedDevice
from nagara.snapshot.errors import (
    BadSnapshotError,
    CaptureError,
    HostMisfitError,
    RestoreError,
    SnapshotError,
)
from nagara.snapshot.states import DeviceEvent as Event
from nagara.snapshot.states import DeviceState as State

GB = 10**9
LIMITS = DeviceLimits()
BEFORE = {101: 1, 102: 7, 103: 8}  # here → as the replica knows them
AFTER = {1: 201, 7: 202, 8: 203}


class Host:
    """A machine with one simulated device, and replicas of three processes on it."""

    def __init__(self, uuids=("sim-0",), size=80 * GB, *, clock=None, can_map=True):
        self.clock = clock or SimulatedClock()
        self.device = SimulatedDevice(
            dict.fromkeys(uuids, size), clock=self.clock, rates=DeviceRates(), can_map=can_map
        )
        self.orders = DeviceOrders(
            self.device, LIMITS, monotonic_s=self.clock.monotonic_s, sleep=self.clock.spend
        )

    def begin(self, pids=BEFORE, uuid="sim-0"):
        for number, pid in enumerate(pids):
            self.device.start(pid, {uuid: (4 + number) * GB}, host_bytes=GB)

    def states(self, pids=BEFORE):
        return [self.device.state(pid) for pid in pids if self.device.holders([pid])]

    def end_all(self):
        for pid in (*BEFORE, *AFTER.values()):
            if self.device.holders([pid]):
                self.device.end(pid)

    def is_free(self):
        return self.device.free_bytes() == self.device.facts().memory_bytes

    def start(self, record, saved_on):
        """How a start came about, with the reason why it was plain, and what it took."""
        began_s = self.clock.now_s
        try:
            self.device.carry(saved_on.device, {101: 201, 102: 202, 103: 203})
            self.orders.put_back(record, AFTER)
        except SnapshotError as error:
            failed_s = self.clock.now_s - began_s
            self.end_all()
            assert not any(
                self.device.held_bytes(pid) for pid in self.device.holders(AFTER.values())
            )
            self.begin(uuid=next(iter(self.device.facts().uuids)))  # a plain start
            return error, failed_s
        return None, self.clock.now_s - began_s


@pytest.fixture
def host():
    host = Host()
    host.begin()
    return host


@pytest.fixture
def saved(host):
    """A host with a replica off its device, and the record."""
    record = host.orders.save(BEFORE)
    assert host.states() == [State.CHECKPOINTED] * 3
    return host, record


def test_out_and_back(saved):
    host, record = saved
    other = Host(clock=host.clock)
    failure, _ = other.start(record, host)
    assert failure is None
    assert other.states(AFTER.values()) == [State.RUNNING] * 3
    assert other.device.held_bytes(203) == {"sim-0": 6 * GB}
    for pid in AFTER.values():
        other.device.submit(pid, 0.001)


def test_all_are_locked_before_any_is_saved(host):
    seen = []
    for name in ("lock", "checkpoint"):
        call = getattr(host.device, name)

        def noted(pid, *, time_limit_s, name=name, call=call):
            seen.append((name, pid))
            call(pid, time_limit_s=time_limit_s)

        setattr(host.device, name, noted)
    host.orders.save(BEFORE)
    assert seen == [(name, pid) for name in ("lock", "checkpoint") for pid in BEFORE]


def test_the_record_outlives_the_process_that_made_it(saved):
    _, record = saved
    assert DeviceRecord.from_json(record.to_json()) == record
    for text in (b"[]", b"{}", b'{"format": 2}', b"x"):
        with pytest.raises((ValueError, KeyError, TypeError)):
            DeviceRecord.from_json(text)


def _crafted():
    good = {"pid": 1, "held_bytes": {"sim-0": 5}}
    yield from ({"kind": 5}, {"driver": None}, {"uuids": "sim-0"}, {"uuids": [["sim-0"]]})
    yield from ({"uuids": ["sim-0", "sim-0"]}, {"uuids": []}, {"uuids": None}, {"more": 1})
    yield from ({"processes": each} for each in (None, 5, [5], [{}], [good, good]))
    for change in (
        {"pid": "1"}, {"pid": 0}, {"pid": True}, {"more": 1}, {"held_bytes": []},
        {"held_bytes": None}, {"held_bytes": {"sim-0": "5"}}, {"held_bytes": {"sim-0": -5}},
        {"held_bytes": {"sim-0": 5.5}}, {"held_bytes": {"another": 5}},
    ):  # fmt: skip
        yield {"processes": [{**good, **change}]}


@pytest.mark.parametrize("change", list(_crafted()), ids=str)
def test_a_crafted_record_is_refused(saved, change):
    _, record = saved
    text = json.dumps({**json.loads(record.to_json()), **change})
    with pytest.raises((ValueError, KeyError, TypeError)):
        DeviceRecord.from_json(text.encode())


def test_a_record_that_is_nested_deeply_is_refused():
    with pytest.raises(ValueError, match="nested"):
        DeviceRecord.from_json(b"[" * 100_000)


def test_a_driver_that_hangs_keeps_a_start_no_longer_the_more_processes_there_are():
    pids = {100 + number: number for number in range(1, 33)}
    host = Host()
    for pid in pids:
        host.device.start(pid, {"sim-0": GB}, host_bytes=GB)
    host.device.fail(Event.LOCK, Fault.BUSY, call=len(pids))
    for call in range(1, len(pids) + 1):
        host.device.fail(Event.UNLOCK, Fault.HANGS, call=call)
    with pytest.raises(CaptureError):
        host.orders.save(pids)
    assert host.clock.now_s <= LIMITS.order_s + 2 * LIMITS.unlock_s


def test_processes_without_a_device_are_left_alone(host):
    assert host.orders.save({4711: 3}) is None
    host.orders.save({**BEFORE, 4711: 3})
    assert host.states() == [State.CHECKPOINTED] * 3


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_lock_time_out_leaves_the_replica_as_it_was(host, call):
    host.device.fail(Event.LOCK, Fault.BUSY, call=call)
    with pytest.raises(CaptureError, match="could not be locked"):
        host.orders.save(BEFORE)
    assert host.states() == [State.RUNNING] * 3
    for pid in BEFORE:
        host.device.submit(pid, 0.001)


def test_a_lock_waits_for_submitted_work_and_no_longer(host):
    host.device.submit(102, LIMITS.lock_s / 2)
    host.orders.save(BEFORE)
    other = Host()
    other.begin()
    other.device.submit(102, 10 * LIMITS.lock_s)
    with pytest.raises(CaptureError, match="could not be locked"):
        other.orders.save(BEFORE)
    assert other.clock.now_s <= LIMITS.order_s
    assert other.states() == [State.RUNNING] * 3


CAPTURE_FAULTS = [
    (event, fault, call)
    for event, faults in (
        (Event.LOCK, (Fault.EXITS, Fault.HANGS, Fault.BROKEN)),
        (Event.CHECKPOINT, (Fault.EXITS, Fault.HANGS, Fault.BROKEN, Fault.EMPTY)),
    )
    for fault in faults
    for call in (1, 2, 3)
]


@pytest.mark.parametrize(("event", "fault", "call"), CAPTURE_FAULTS)
def test_a_capture_that_fails_locks_nobody_and_frees_the_device(host, event, fault, call):
    host.device.fail(event, fault, call=call)
    with pytest.raises(CaptureError):
        host.orders.save(BEFORE)
    assert host.clock.now_s <= LIMITS.order_s + len(BEFORE) * LIMITS.unlock_s
    assert State.LOCKED not in host.states()
    host.end_all()
    assert host.is_free()
    host.begin()  # the app goes on starting plainly


@pytest.mark.parametrize("victim", [101, 102, 103])
@pytest.mark.parametrize("state", [State.RUNNING, State.LOCKED, State.CHECKPOINTED])
def test_a_process_that_exits_in_a_state_makes_no_snapshot(host, victim, state):
    """The victim ends as soon as it is in that state; the others are left as they may be."""
    ends_after(host.device, victim, state)
    with pytest.raises(CaptureError):
        host.orders.save(BEFORE)
    assert State.LOCKED not in host.states()
    host.end_all()
    assert host.is_free()


@pytest.mark.parametrize("victim", [201, 202, 203])
@pytest.mark.parametrize("state", [State.CHECKPOINTED, State.LOCKED, State.RUNNING])
def test_a_process_that_exits_in_a_state_ends_the_restore(saved, victim, state):
    host, record = saved
    other = Host(clock=host.clock)
    ends_after(other.device, victim, state)
    failure, _ = other.start(record, host)
    assert type(failure) is BadSnapshotError
    assert other.states() == [State.RUNNING] * 3  # the plain start


def ends_after(device, victim, state):
    """Lets a process end the moment after a look at its state, or a call, has found it so."""
    for name in ("held_bytes", "lock", "checkpoint", "restore", "unlock"):
        call = getattr(device, name)

        def ending(pid, *more, call=call, **limits):
            result = call(pid, *more, **limits)
            if pid == victim and device.holders([pid]) and device.state(pid) is state:
                device.end(pid)
            return result

        setattr(device, name, ending)
    carry = device.carry

    def carried(other, pids):
        carry(other, pids)
        if state is State.CHECKPOINTED:
            device.end(victim)

    device.carry = carried


def test_a_checkpoint_without_memory_is_not_believed(host):
    host.device.fail(Event.CHECKPOINT, Fault.EMPTY, call=3)
    with pytest.raises(CaptureError, match="only 0 bytes came along of 6000000000"):
        host.orders.save(BEFORE)


RESTORE_FAULTS = [
    (Event.RESTORE, Fault.OUT_OF_MEMORY, HostMisfitError),
    (Event.RESTORE, Fault.BROKEN, BadSnapshotError),
    (Event.RESTORE, Fault.EXITS, BadSnapshotError),
    (Event.RESTORE, Fault.HANGS, RestoreError),
    (Event.UNLOCK, Fault.BROKEN, BadSnapshotError),
    (Event.UNLOCK, Fault.EXITS, BadSnapshotError),
    (Event.UNLOCK, Fault.HANGS, RestoreError),
    (Event.UNLOCK, Fault.FORGOTTEN, BadSnapshotError),
]


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize(("event", "fault", "kind"), RESTORE_FAULTS)
def test_a_restore_that_fails_ends_as_a_plain_start(saved, event, fault, kind, call):
    host, record = saved
    other = Host(clock=host.clock)
    other.device.fail(event, fault, call=call)
    failure, failed_s = other.start(record, host)
    assert type(failure) is kind
    assert failed_s <= LIMITS.order_s + len(BEFORE) * LIMITS.unlock_s
    assert other.states() == [State.RUNNING] * 3


def test_nobody_stays_locked_when_a_restore_fails(saved):
    host, record = saved
    other = Host(clock=host.clock)
    other.device.carry(host.device, {101: 201, 102: 202, 103: 203})
    other.device.fail(Event.RESTORE, Fault.BROKEN, call=3)
    with pytest.raises(BadSnapshotError):
        other.orders.put_back(record, AFTER)
    assert other.states(AFTER.values()) == [State.RUNNING, State.RUNNING, State.FAILED]


def test_an_unlock_that_is_forgotten_is_seen(saved):
    host, record = saved
    other = Host(clock=host.clock)
    other.device.fail(Event.UNLOCK, Fault.FORGOTTEN, call=2)
    failure, _ = other.start(record, host)
    assert "locked after its unlock" in failure.what


def test_a_full_device_is_waited_for_and_then_refused(saved):
    host, record = saved
    other = Host(clock=host.clock)
    other.device.start(9, {"sim-0": 70 * GB})
    other.device.carry(host.device, {101: 201, 102: 202, 103: 203})
    began_s = host.clock.now_s
    with pytest.raises(HostMisfitError, match="5000000000 bytes more are needed"):
        other.orders.put_back(record, AFTER)
    assert LIMITS.free_memory_s <= host.clock.now_s - began_s <= LIMITS.order_s
    assert other.states(AFTER.values()) == [State.CHECKPOINTED] * 3  # nothing was tried


def test_memory_that_becomes_free_meanwhile_is_used(saved):
    host, record = saved
    other = Host(clock=host.clock)
    other.device.start(9, {"sim-0": 70 * GB})

    def end_soon(_seconds):
        if other.device.holders([9]):
            other.device.end(9)

    host.clock.watchers.append(end_soon)
    failure, _ = other.start(record, host)
    assert failure is None


def test_two_restores_at_once_are_not_promised_the_same_memory(saved):
    """The second begins while the first has been promised its memory and has taken none."""
    host, record = saved
    other = Host(size=20 * GB, clock=host.clock)  # room for one of 15 GB
    other.device.carry(host.device, {101: 201, 102: 202, 103: 203})
    other.device.carry(host.device, {101: 301, 102: 302, 103: 303})
    refused = []
    restore = other.device.restore

    def meanwhile(pid, *more, **limits):
        if not refused:
            with pytest.raises(HostMisfitError, match="more are needed") as caught:
                other.orders.put_back(record, {1: 301, 7: 302, 8: 303})
            refused.append(caught.value)
        restore(pid, *more, **limits)

    other.device.restore = meanwhile
    other.orders.put_back(record, AFTER)
    assert len(refused) == 1
    assert other.states(AFTER.values()) == [State.RUNNING] * 3
    assert not any(other.orders._promised.values())


def test_a_process_that_did_not_come_back_is_missed(saved):
    host, record = saved
    other = Host(clock=host.clock)
    other.device.carry(host.device, {101: 201, 102: 202, 103: 203})
    with pytest.raises(BadSnapshotError, match="process 7"):
        other.orders.put_back(record, {1: 201, 8: 203})
    other.device.end(202)
    with pytest.raises(BadSnapshotError, match="process 202"):
        other.orders.put_back(record, AFTER)


def test_a_process_that_came_back_without_its_device_is_noticed(saved):
    host, record = saved
    other = Host(clock=host.clock)
    for pid in AFTER.values():
        other.device.start(pid, {"sim-0": 1})
    with pytest.raises(BadSnapshotError, match="came back running"):
        other.orders.put_back(record, AFTER)


def test_another_device_takes_its_place_where_the_driver_can(saved):
    host, record = saved
    other = Host(("sim-9",), clock=host.clock)
    failure, _ = other.start(record, host)
    assert failure is None
    assert other.device.held_bytes(201) == {"sim-9": 4 * GB}
    older = Host(("sim-9",), clock=host.clock, can_map=False)
    failure, _ = older.start(record, host)
    assert isinstance(failure, HostMisfitError)
    assert "cannot restore to a different one" in failure.what


def test_the_emptiest_device_is_taken_and_every_device_mapped(saved):
    host, record = saved
    two = dataclasses.replace(record, uuids=("sim-0", "sim-1"))
    other = Host(("sim-8", "sim-9"), clock=host.clock)
    other.device.start(9, {"sim-8": 70 * GB})
    failure, _ = other.start(two, host)
    assert failure is None
    assert other.device.held_bytes(201) == {"sim-9": 4 * GB}


def test_another_number_of_devices_is_no_place(saved):
    host, record = saved
    other = Host(("sim-8", "sim-9"), clock=host.clock)
    failure, _ = other.start(record, host)
    assert isinstance(failure, HostMisfitError)
    assert "1 devices, this one has 2" in failure.what


def test_a_wrong_map_loses_the_process(saved):
    host, _ = saved
    other = Host(("sim-9",), clock=host.clock)
    other.device.carry(host.device, {101: 201})
    with pytest.raises(SnapshotError, match="no device sim-3"):
        other.device.restore(201, {"sim-0": "sim-3"}, time_limit_s=9)
    assert other.device.state(201) is State.FAILED


def test_several_devices_are_refused_unless_communicators_are_rebuilt():
    host = Host(("sim-0", "sim-1"))
    host.device.start(101, {"sim-0": GB})
    host.device.start(102, {"sim-1": GB})
    with pytest.raises(CaptureError, match=r"uses 2 devices.*NCCL"):
        host.orders.save({101: 1, 102: 7})
    assert host.states((101, 102)) == [State.RUNNING] * 2
    record = host.orders.save({101: 1, 102: 7}, rebuilds_communicators=True)
    assert [p.held_bytes for p in record.processes] == [{"sim-0": GB}, {"sim-1": GB}]


def test_a_snapshot_of_another_kind_of_device_does_not_fit(saved):
    host, record = saved
    with pytest.raises(HostMisfitError, match="its device is cuda"):
        host.orders.put_back(dataclasses.replace(record, kind="cuda"), AFTER)
