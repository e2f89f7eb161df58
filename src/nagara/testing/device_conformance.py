"""What every `Device` that holds memory must do, as tests.

Inherit from `DeviceConformance` in a test module and provide the fixtures `device` and `holder`:
the pid of a running process with some memory on the device, one of its own for each test.
"""

import os
from typing import TYPE_CHECKING

import pytest

from nagara.snapshot.device.errors import DeviceError, DeviceGoneError, DeviceRefusedError
from nagara.snapshot.device.orders import DeviceOrders
from nagara.snapshot.device.protocol import Device
from nagara.snapshot.states import DeviceState

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 60.0
NO_PID = 1 << 22  # above what Linux gives


class DeviceConformance:
    """The tests."""

    def checkpointed(self, device: Device, pid: int) -> int:
        """Takes the process off its device; what it held, in bytes."""
        held = sum(device.held_bytes(pid).values())
        device.lock(pid, time_limit_s=LIMIT_S)
        device.checkpoint(pid, time_limit_s=LIMIT_S)
        return held

    def test_it_says_what_it_is(self, device: Device) -> None:
        facts = device.facts()
        assert facts.kind == device.kind
        assert facts.can_save, facts.why_not
        assert len(set(facts.uuids)) == len(facts.uuids) > 0
        assert set(device.free_bytes()) == set(facts.uuids)
        for uuid, free in device.free_bytes().items():
            assert 0 < free <= facts.memory_bytes[uuid]

    def test_it_knows_who_holds_it(self, device: Device, holder: int) -> None:
        assert device.holders([os.getpid(), holder]) == (holder,)
        assert device.state(holder) is DeviceState.RUNNING
        assert sum(device.held_bytes(holder).values()) > 0

    def test_it_goes_through_the_states_and_back(self, device: Device, holder: int) -> None:
        device.lock(holder, time_limit_s=LIMIT_S)
        assert device.state(holder) is DeviceState.LOCKED
        device.checkpoint(holder, time_limit_s=LIMIT_S)
        assert device.state(holder) is DeviceState.CHECKPOINTED
        device.restore(holder, {}, time_limit_s=LIMIT_S)
        assert device.state(holder) is DeviceState.LOCKED
        device.unlock(holder, time_limit_s=LIMIT_S)
        assert device.state(holder) is DeviceState.RUNNING

    def test_a_locked_process_is_unlocked_without_a_trace(
        self, device: Device, holder: int
    ) -> None:
        before = device.held_bytes(holder)
        device.lock(holder, time_limit_s=LIMIT_S)
        device.unlock(holder, time_limit_s=LIMIT_S)
        assert device.state(holder) is DeviceState.RUNNING
        assert device.held_bytes(holder) == before

    def test_a_checkpoint_frees_the_device_and_is_kept_by_the_host(
        self, device: Device, holder: int
    ) -> None:
        free, kept = sum(device.free_bytes().values()), device.kept_bytes(holder)
        held = self.checkpointed(device, holder)
        assert sum(device.held_bytes(holder).values()) == 0
        assert sum(device.free_bytes().values()) >= free + held // 2
        assert device.kept_bytes(holder) > kept
        assert device.holders([holder]) == (holder,)

    def test_calls_without_a_place_change_nothing(self, device: Device, holder: int) -> None:
        calls: tuple[Callable[[], None], ...] = (
            lambda: device.unlock(holder, time_limit_s=LIMIT_S),
            lambda: device.checkpoint(holder, time_limit_s=LIMIT_S),
            lambda: device.restore(holder, {}, time_limit_s=LIMIT_S),
        )
        for call in calls:
            with pytest.raises(DeviceRefusedError):
                call()
            assert device.state(holder) is DeviceState.RUNNING
        self.checkpointed(device, holder)
        with pytest.raises(DeviceRefusedError):
            device.lock(holder, time_limit_s=LIMIT_S)
        assert device.state(holder) is DeviceState.CHECKPOINTED

    def test_who_has_ended_is_said_to_have_ended(self, device: Device) -> None:
        assert device.holders([NO_PID]) == ()
        with pytest.raises(DeviceGoneError):
            device.state(NO_PID)
        with pytest.raises(DeviceError):
            device.lock(NO_PID, time_limit_s=LIMIT_S)

    def test_the_orders_take_it_out_and_back(self, device: Device, holder: int) -> None:
        orders = DeviceOrders(device)
        held = device.held_bytes(holder)
        record = orders.save({holder: 1})
        assert record is not None
        assert record.processes[0].held_bytes == held
        assert device.state(holder) is DeviceState.CHECKPOINTED
        orders.put_back(record, {1: holder})
        assert device.state(holder) is DeviceState.RUNNING
        assert sum(device.held_bytes(holder).values()) >= sum(held.values()) // 2
