"""Simulated, CPU and, where there is one, CUDA devices: what they must do alike."""

import os
import subprocess
import sys

import pytest

from nagara.snapshot.device.cpu import CpuDevice, resident_bytes
from nagara.snapshot.device.errors import DeviceGoneError, DeviceRefusedError
from nagara.snapshot.device.orders import DeviceOrders
from nagara.snapshot.device.simulated import SimulatedDevice
from nagara.snapshot.states import TRANSITIONS, DeviceEvent, DeviceState, after
from nagara.snapshot.states import IllegalDeviceEventError as Illegal
from nagara.testing.device_conformance import NO_PID, DeviceConformance

GB = 10**9


class TestSimulated(DeviceConformance):
    @pytest.fixture
    def device(self):
        return SimulatedDevice({"sim-0": 80 * GB})

    @pytest.fixture
    def holder(self, device):
        device.start(77, {"sim-0": 8 * GB}, host_bytes=GB)
        return 77


def test_the_table_of_states_and_nothing_else():
    for state in DeviceState:
        for event in DeviceEvent:
            if (state, event) in TRANSITIONS:
                assert after(state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(Illegal, match=str(state)):
                    after(state, event)


def test_nothing_leads_back_from_a_failure_but_the_end():
    ways = {event for (state, event) in TRANSITIONS if state is DeviceState.FAILED}
    assert ways == {DeviceEvent.ENDED}


def test_a_replica_on_the_cpu_has_nothing_on_a_device():
    device = CpuDevice()
    assert DeviceOrders(device).save({os.getpid(): 1}) is None
    assert device.state(os.getpid()) is DeviceState.RUNNING
    with pytest.raises(DeviceRefusedError):
        device.lock(os.getpid(), time_limit_s=1)
    with pytest.raises(DeviceGoneError):
        device.state(NO_PID)


def test_memory_of_a_process_is_counted_as_its_own():
    program = "kept = b'x' * (64 << 20); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert resident_bytes(process.pid) > 64 << 20
        process.stdin.close()
    with pytest.raises(DeviceGoneError):
        resident_bytes(NO_PID)
