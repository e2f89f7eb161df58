"""Simulated starts overlap what hardware can overlap, and nothing else."""

import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from nagara.cli.bench_device import REPLICAS
from nagara.cli.main import main
from nagara.snapshot.device.simulated import SimulatedClock, SimulatedDevice
from nagara.snapshot.device.simulated_start import (
    GB,
    Hardware,
    ImpossibleError,
    Machine,
    Replica,
    simulate,
)
from nagara.snapshot.errors import CaptureError, SnapshotError

RATES = st.floats(0.2 * GB, 100 * GB)


@given(storage=RATES, host=RATES, link=RATES, weights=st.integers(GB, 150 * GB))
@settings(max_examples=200, deadline=None)
def test_no_start_is_faster_than_its_parts_allow(storage, host, link, weights):
    hardware = Hardware(storage_bytes_s=storage, host_restore_bytes_s=host, link_bytes_s=link)
    hardware = replace(hardware, context_s=0.1)
    start = simulate(Replica("x", weights, 4 * GB, 2 * GB), hardware)
    total = start.restore_s
    assert total >= (weights + 4 * GB) / storage * 0.999  # both come from one storage
    assert total >= start.host_s + start.device_s + weights / link * 0.999 - 1e-6
    assert total == pytest.approx(start.host_s + start.device_s + start.weights_s)


@pytest.mark.parametrize("replica", REPLICAS, ids=lambda replica: replica.name)
@pytest.mark.parametrize("storage", [6.0, 7.0, 14.0, 25.0])
@pytest.mark.parametrize("link", [25.0, 50.0, 100.0])
def test_the_restore_path_stays_within_its_bound(replica, storage, link):
    hardware = Hardware(storage_bytes_s=storage * GB, link_bytes_s=link * GB)
    assert simulate(replica, hardware).ratio <= 1.10


@pytest.fixture
def machine():
    clock = SimulatedClock()
    device = SimulatedDevice({"sim": 100 * GB}, clock=clock)
    return Machine(Hardware(ahead_bytes=8 * GB), device, clock), device, clock


def test_what_rounding_leaves_of_a_byte_keeps_nobody_waiting():
    hardware = Hardware(
        storage_bytes_s=63_063_298_505.0, host_restore_bytes_s=0.2 * GB, link_bytes_s=100 * GB
    )
    start = simulate(Replica("x", 76_449_150_691, 4 * GB, 2 * GB), hardware)
    assert start.host_s == pytest.approx(4 * GB / (0.2 * GB), rel=0.05)


def test_nothing_is_copied_to_a_device_that_the_process_does_not_hold(machine):
    machine, device, _ = machine
    device.start(1, {"sim": GB})
    machine.begin_reading(GB)
    device.lock(1, time_limit_s=1)
    with pytest.raises(ImpossibleError, match="locked cannot copy"):
        machine.copy(1, GB)
    device.unlock(1, time_limit_s=1)
    machine.copy(1, GB)


def test_nothing_is_copied_that_nobody_reads(machine):
    machine, device, _ = machine
    device.start(1, {"sim": GB})
    machine.begin_reading(GB)
    with pytest.raises(ImpossibleError, match="nobody reads"):
        machine.copy(1, 2 * GB)


def test_the_link_carries_one_thing_at_a_time(machine):
    machine, device, clock = machine
    device.start(1, {"sim": GB})
    machine.begin_reading(4 * GB)

    def again(_seconds):
        clock.watchers.remove(again)
        with pytest.raises(ImpossibleError, match="one thing"):
            machine.copy(1, GB)

    clock.watchers.append(again)
    machine.copy(1, 2 * GB)
    assert again not in clock.watchers


def test_reading_ahead_ends_where_host_memory_does(machine):
    machine, _, clock = machine
    machine.begin_reading(100 * GB)
    clock.spend(1000)
    assert machine._ready == 8 * GB


def test_two_readers_share_the_storage():
    slow = Hardware(storage_bytes_s=1 * GB, host_restore_bytes_s=1 * GB, host_latency_s=0)
    start = simulate(Replica("x", 10 * GB, 4 * GB, 2 * GB), slow)
    assert start.host_s == pytest.approx(8.0)  # half of it each
    assert start.restore_s == pytest.approx(14.0, rel=0.01)


def test_a_replica_that_does_not_fit_the_device_is_refused():
    with pytest.raises((CaptureError, SnapshotError)):
        simulate(Replica("x", GB, GB, 200 * GB), Hardware())


def test_the_benchmark_says_that_it_is_simulated():
    done = CliRunner().invoke(main, ["bench", "device", "--device", "sim", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["simulated"] is True
    assert [case["name"] for case in result["cases"]] == ["8B", "70B"]
    for case in result["cases"]:
        assert case["simulated"] is True
        assert case["ratio"] == pytest.approx(case["restore_s"] / case["bound_s"], abs=1e-3)
    table = CliRunner().invoke(main, ["bench", "device"])
    assert table.stdout.count("simulated") == 2
    real = CliRunner().invoke(main, ["bench", "device", "--device", "cuda"])
    assert real.exit_code == 1
    assert "gpu_coldstart.py" in real.stderr
