"""Real containers with memory on a device that is simulated: saved, put back, and given up."""

import os
import signal
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
    """A container's processes hold memory from their first look on; a restored one is the saved
    one under another pid; one that has ended holds nothing."""

    def __init__(self, *uuids):
        super().__init__(dict.fromkeys(uuids or ("sim-0",), 40 * GB))
        self.each = dict.fromkeys(self._memory_bytes, 8 * GB)
        self.seen = {}  # pid → pid inside
        self.saved = {}  # pid inside → process

    def look(self, pid):
        self.prune()
        inside = pid_inside(pid)
        if pid in self._processes or inside is None:
            return
        self.seen[pid] = inside
        if not self.saved:
            self.start(pid, self.each, host_bytes=GB)
        else:
            saved = self.saved[inside]
            self._processes[pid] = replace(saved, held={}, saved=dict(saved.saved))

    def prune(self):
        for pid in [*self._processes]:
            if not Path(f"/proc/{pid}").exists():
                process = self._processes.pop(pid)
                if process.state is DeviceState.CHECKPOINTED:
                    self.saved[self.seen[pid]] = process

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
    assert device.state([*device.seen][-1]) is DeviceState.RUNNING
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


THREE = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        time.sleep(600)
"""


@pytest.mark.parametrize("fault", [Fault.BROKEN, Fault.HANGS, Fault.EXITS])
async def test_an_error_on_the_second_of_three_processes_ends_in_a_plain_start(
    yard, with_device, fault
):
    """Real processes; the one that is to exit is really ended."""
    device = with_device(AroundContainers())
    spec = yard.spec(env={"FIRST": THREE})
    assert (await yard.capture(spec)).reason is None
    assert len(device.seen) == 3
    restore, calls = device.restore, []

    def ending(pid, *more, **limits):
        calls.append(pid)
        if len(calls) == 2 and fault is Fault.EXITS:
            os.kill(pid, signal.SIGKILL)
        restore(pid, *more, **limits)

    device.restore = ending
    device.fail(DeviceEvent.RESTORE, fault, call=2)
    began_s = device.clock.now_s
    started = await yard.start(spec)
    limits = DeviceLimits()
    assert device.clock.now_s - began_s <= limits.order_s + 3 * limits.unlock_s
    assert started.kind is StartKind.PLAIN
    assert "its device" in started.fallback
    assert len(calls) == 2
    assert (await yard.ask(started.replica)).body == b"ready"
    assert device.free_bytes() == {"sim-0": 40 * GB}
    restored = await yard.start(spec)
    assert restored.kind is StartKind.RESTORED, restored.fallback
    assert device.free_bytes() == {"sim-0": 16 * GB}
