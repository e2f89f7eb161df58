"""Random lives of replicas on one device: whatever fails in whatever order, the table holds."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nagara.snapshot.device.errors import DeviceError
from nagara.snapshot.device.orders import DeviceLimits, DeviceOrders
from nagara.snapshot.device.simulated import Fault, SimulatedClock, SimulatedDevice
from nagara.snapshot.errors import SnapshotError
from nagara.snapshot.states import HOLDING, DeviceEvent, DeviceState, can

SIZE = 1000
LIMITS = DeviceLimits(order_s=100.0, context_bytes=0)
FAULTS = {
    DeviceEvent.LOCK: [Fault.BUSY, Fault.EXITS, Fault.HANGS, Fault.BROKEN],
    DeviceEvent.CHECKPOINT: [Fault.EMPTY, Fault.EXITS, Fault.HANGS, Fault.BROKEN],
    DeviceEvent.RESTORE: [Fault.OUT_OF_MEMORY, Fault.EXITS, Fault.HANGS, Fault.BROKEN],
    DeviceEvent.UNLOCK: [Fault.FORGOTTEN, Fault.EXITS, Fault.HANGS, Fault.BROKEN],
}
FAULTY = st.sampled_from([(event, fault) for event, all_ in FAULTS.items() for fault in all_])


class DeviceLife(RuleBasedStateMachine):
    """One device, replicas of one to three processes, whole orders and single calls."""

    def __init__(self):
        super().__init__()
        self.clock = SimulatedClock()
        self.device = SimulatedDevice({"sim": SIZE}, clock=self.clock)
        self.orders = DeviceOrders(
            self.device, LIMITS, monotonic_s=self.clock.monotonic_s, sleep=self.clock.spend
        )
        self.replicas = []  # lists of pids
        self.saved = []  # pids, record
        self.next_pid = 10

    @precondition(lambda self: len(self.replicas) < 3)
    @rule(sizes=st.lists(st.integers(1, SIZE // 3), min_size=1, max_size=3))
    def start(self, sizes):
        pids = []
        for size in sizes:
            try:
                self.device.start(self.next_pid, {"sim": size}, host_bytes=5)
            except DeviceError:
                continue
            pids.append(self.next_pid)
            self.next_pid += 1
        if pids:
            self.replicas.append(pids)

    @rule(what=FAULTY, call=st.integers(1, 4))
    def arm(self, what, call):
        self.device.fail(*what, call=call)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), seconds=st.floats(0, 2 * LIMITS.lock_s))
    def compute(self, data, seconds):
        for pid in self.device.holders(data.draw(st.sampled_from(self.replicas))):
            if self.device.state(pid) is DeviceState.RUNNING:
                self.device.submit(pid, seconds)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def capture(self, data):
        pids = data.draw(st.sampled_from(self.replicas))
        began_s = self.clock.now_s
        try:
            record = self.orders.save({pid: at for at, pid in enumerate(pids)})
        except SnapshotError:
            record = None
        assert self.clock.now_s - began_s <= LIMITS.order_s + 3 * LIMITS.unlock_s
        self.replicas.remove(pids)
        if record is None:
            self.end(pids)
        else:
            held = [p for p in pids if self.device.holders([p])]
            assert all(self.device.state(p) is DeviceState.CHECKPOINTED for p in held)
            self.saved.append((pids, record))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), lost=st.booleans())
    def restore(self, data, lost):
        pids, record = data.draw(st.sampled_from(self.saved))
        self.saved.remove((pids, record))
        if lost and self.device.holders(pids[:1]):
            self.device.end(pids[0])
        began_s = self.clock.now_s
        known = dict(enumerate(pids))
        try:
            self.orders.put_back(record, known)
        except SnapshotError:
            self.end(pids)
        else:
            assert all(
                self.device.state(known[process.pid]) is DeviceState.RUNNING
                and self.device.held_bytes(known[process.pid]) == process.held_bytes
                for process in record.processes
            )
            self.replicas.append(pids)
        assert self.clock.now_s - began_s <= LIMITS.order_s + 3 * LIMITS.unlock_s

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def die(self, data):
        pids = data.draw(st.sampled_from(self.replicas))
        pid = data.draw(st.sampled_from(pids))
        if self.device.holders([pid]):
            self.device.end(pid)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), event=st.sampled_from([*FAULTS]))
    def call_alone(self, data, event):
        """A single call: it has a place or changes nothing."""
        pids = data.draw(st.sampled_from(self.replicas))
        pid = data.draw(st.sampled_from(pids))
        if not self.device.holders([pid]):
            return
        before = self.device.state(pid)
        extra = ({},) if event is DeviceEvent.RESTORE else ()
        try:
            getattr(self.device, event.value)(pid, *extra, time_limit_s=1.0)
        except DeviceError:
            if not can(before, event):
                assert self.device.state(pid) is before
        else:
            assert can(before, event)
        self.replicas.remove(pids)
        self.end(pids)

    def end(self, pids):
        for pid in self.device.holders(pids):
            self.device.end(pid)

    @invariant()
    def only_who_may_holds_memory(self):
        held = 0
        for pid in self.device.holders(range(self.next_pid)):
            size = sum(self.device.held_bytes(pid).values())
            state = self.device.state(pid)
            assert size == 0 or state in HOLDING or state is DeviceState.FAILED
            held += size
        assert self.device.free_bytes() == {"sim": SIZE - held}
        assert 0 <= held <= SIZE

    @invariant()
    def nobody_is_left_half_way(self):
        pids = [pid for replica in self.replicas for pid in replica]
        for pid in self.device.holders(pids):
            assert self.device.state(pid) is DeviceState.RUNNING


DeviceLife.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDeviceLife = DeviceLife.TestCase
