"""Real containers with memory on a device that is simulated: saved, put back, and given up."""

from dataclasses import replace
from pathlib import Path

import pytest

from nagara.contract.replica import SnapshotHooks, StartKind
from nagara.snapshot.device.orders import DeviceLimits, DeviceOrders
from nagara.snapshot.device.replica import NOTE, pid_inside
from nagara.snapshot.device.simulated import Fault, SimulatedDevice
from nagara.snapshot.states import DeviceEvent, DeviceState

pytestmark = pytest.mark.root
GB = 10**9


class AroundContainers(SimulatedDevice):
    """Each container's first process holds memory from its first look on; a restored one is the
    saved one under another pid; one that has ended holds nothing."""

    def __init__(self, *uuids):
        super().__init__(dict.fromkeys(uuids or ("sim-0",), 40 * GB))
        self.each = dict.fromkeys(self._memory_bytes, 8 * GB)
        self.seen = []  # pids
        self.saved = None

    def look(self, pid):
        self.prune()
        if pid in self._processes or pid_inside(pid) != 1:
            return
        self.seen.append(pid)
        if self.saved is None:
            self.start(pid, self.each, host_bytes=GB)
        else:
            self._processes[pid] = replace(self.saved, held={}, saved=dict(self.saved.saved))

    def prune(self):
        for pid in [*self._processes]:
            if not Path(f"/proc/{pid}").exists():
                process = self._processes.pop(pid)
                if process.state is DeviceState.CHECKPOINTED:
                    self.saved = process

    def holders(self, pids):
        for pid in pids:
            self.look(pid)
        return super().holders(pids)

    def state(self, pid):
        self.look(pid)
        return super().state(pid)

    def free_bytes(self):
        self.prune()
        return super().free_bytes()


@pytest.fixture
def with_device(yard):
    """Puts a device into the node."""

    def put(device):
        clock = device.clock
        yard.node._runtime.devices = DeviceOrders(
            device, DeviceLimits(), monotonic_s=clock.monotonic_s, sleep=clock.spend
        )
        return device

    return put


def has_note(yard):
    (root,) = yard.roots("obedient")
    return f"memory/{NOTE}" in yard.places(root)


async def test_device_memory_goes_out_and_comes_back_with_the_replica(yard, with_device):
    device = with_device(AroundContainers())
    report = await yard.capture()
    assert report.reason is None
    assert device.free_bytes() == {"sim-0": 40 * GB}
    assert has_note(yard)
    started = await yard.start()
    assert started.kind is StartKind.RESTORED
    assert device.state(device.seen[-1]) is DeviceState.RUNNING
    assert device.free_bytes() == {"sim-0": 32 * GB}
    assert (await yard.ask(started.replica)).body == b"ready"
    await yard.stop(started.replica)
    assert device.free_bytes() == {"sim-0": 40 * GB}


async def test_a_replica_without_device_memory_asks_no_driver(yard, with_device):
    device = with_device(AroundContainers())
    device.look = lambda _pid: None
    assert (await yard.capture()).reason is None
    assert not has_note(yard)
    device.facts = device.free_bytes = device.state = None
    assert (await yard.start()).kind is StartKind.RESTORED


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (DeviceEvent.RESTORE, Fault.OUT_OF_MEMORY),
        (DeviceEvent.RESTORE, Fault.HANGS),
        (DeviceEvent.UNLOCK, Fault.FORGOTTEN),
    ],
)
async def test_a_device_that_fails_ends_in_a_plain_start_and_is_free(
    yard, with_device, event, fault
):
    device = with_device(AroundContainers())
    assert (await yard.capture()).reason is None
    device.fail(event, fault)
    began_s = device.clock.now_s
    started = await yard.start()
    assert device.clock.now_s - began_s <= DeviceLimits().order_s
    assert started.kind is StartKind.PLAIN
    assert "its device" in started.fallback
    assert (await yard.ask(started.replica)).body == b"ready"
    assert device.free_bytes() == {"sim-0": 40 * GB}
    again = await yard.start()  # the snapshot is tried again
    assert again.kind is StartKind.RESTORED


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.EMPTY])
async def test_a_device_that_cannot_be_saved_makes_no_snapshot(yard, with_device, fault):
    device = with_device(AroundContainers())
    event = DeviceEvent.LOCK if fault is Fault.BUSY else DeviceEvent.CHECKPOINT
    device.fail(event, fault)
    report = await yard.capture()
    assert "what it has on its device cannot be saved" in report.reason
    assert device.free_bytes() == {"sim-0": 40 * GB}
    assert (await yard.start()).kind is StartKind.PLAIN


async def test_several_devices_need_hooks_that_rebuild_communicators(yard, with_device):
    with_device(AroundContainers("sim-0", "sim-1"))
    report = await yard.capture()
    assert "uses 2 devices" in report.reason
    spec = yard.spec(hooks=SnapshotHooks(rebuilds_communicators=True))
    assert (await yard.capture(spec)).reason is None
    assert (await yard.start(spec)).kind is StartKind.RESTORED
