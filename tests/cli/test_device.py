"""`nagara device` says what is there, and that what is simulated is."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nagara.cli.main import main
from nagara.snapshot.device.errors import DeviceLostError
from nagara.snapshot.device.self_test import DeviceTestError, _holder, self_test
from nagara.snapshot.device.simulated import Fault, SimulatedDevice
from nagara.snapshot.errors import SnapshotError
from nagara.snapshot.states import DeviceEvent

HAS_DRIVER = Path("/dev/nvidiactl").exists()


def ask(*arguments):
    return CliRunner().invoke(main, ["device", *arguments])


def test_the_simulated_device_is_shown_as_such():
    found = json.loads(ask("status", "--sim", "--json").stdout)
    assert found["simulated"] is True
    assert found["can_save"] is True
    assert found["devices"][0]["uuid"] == "sim-0"
    assert "80 GB free of 80 GB" in ask("status", "--sim").stdout


def test_a_simulated_process_goes_out_and_back():
    found = json.loads(ask("selftest", "--sim", "--json").stdout)
    assert found["simulated"] is True
    assert found["held_bytes"] == 1 << 30
    assert found["restored_in_s"] > 0
    assert ask("selftest", "--sim").stdout.startswith("simulated: ")


@pytest.mark.skipif(HAS_DRIVER, reason="there is a driver")
def test_without_a_device_the_cpu_is_named_and_nothing_is_tested():
    assert "no device" in ask("status").stdout
    assert json.loads(ask("status", "--json").stdout)["devices"] == []
    refused = ask("selftest")
    assert refused.exit_code == 1
    assert "--sim" in refused.stderr


@pytest.mark.gpu
def test_a_real_process_goes_out_and_back():
    found = json.loads(ask("selftest", "--json").stdout)
    assert found["kind"] == "cuda"
    assert found["held_bytes"] >= 1 << 30


@pytest.mark.parametrize("fault", [Fault.BROKEN, Fault.HANGS, Fault.OUT_OF_MEMORY])
def test_a_device_that_fails_fails_the_test_and_is_left_free(fault):
    device = SimulatedDevice({"sim-0": 80 * 10**9})
    device.fail(DeviceEvent.RESTORE, fault)
    with pytest.raises(SnapshotError):
        self_test(device)
    assert device.free_bytes() == {"sim-0": 80 * 10**9}


def test_a_device_that_is_too_small_is_named():
    with pytest.raises(DeviceLostError, match="out of memory"):
        self_test(SimulatedDevice({"sim-0": 1000}))


@pytest.mark.skipif(HAS_DRIVER, reason="there is a driver")
def test_a_process_that_cannot_use_the_device_says_why():
    with pytest.raises(DeviceTestError, match="libcuda"), _holder(1 << 20):
        pass
