import itertools

import pytest

from nagara.pool.errors import IllegalEventError, StaleEpochError, UnknownMachineError
from nagara.pool.machines import Machine, MachineTable
from nagara.pool.states import DEADLINES_S, TRANSITIONS, MachineEvent, MachineState, after
from nagara.testing.pools import an_offering

ILLEGAL = sorted(set(itertools.product(MachineState, MachineEvent)) - set(TRANSITIONS))


def a_table(state: MachineState) -> MachineTable:
    table = MachineTable()
    table.add(Machine("m", an_offering(), state, epoch=3, since_s=0.0), is_known=True)
    return table


@pytest.mark.parametrize(("state", "event"), TRANSITIONS)
def test_a_legal_event_moves_the_machine_and_raises_its_epoch(
    state: MachineState, event: MachineEvent
) -> None:
    table = a_table(state)
    machine = table.move("m", 3, event, now_s=5.0, reason="why")
    assert (machine.state, machine.epoch, machine.since_s) == (TRANSITIONS[state, event], 4, 5.0)
    assert table.take_writes()
    assert not table.take_writes()


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_illegal_event_raises_and_changes_nothing(
    state: MachineState, event: MachineEvent
) -> None:
    table = a_table(state)
    with pytest.raises(IllegalEventError):
        table.move("m", 3, event, now_s=5.0)
    machine = table.named("m")
    assert (machine.state, machine.epoch, machine.since_s) == (state, 3, 0.0)
    assert not table.take_writes()


def test_a_change_on_an_old_epoch_is_refused() -> None:
    table = a_table(MachineState.BOOTING)
    table.move("m", 3, MachineEvent.UP, 1.0)
    with pytest.raises(StaleEpochError):
        table.move("m", 3, MachineEvent.PASSED, 2.0)
    assert table.named("m").state is MachineState.CHECKING


def test_every_state_but_ready_and_gone_has_a_deadline_that_leads_on() -> None:
    assert set(MachineState) - set(DEADLINES_S) == {MachineState.READY, MachineState.GONE}
    for state in DEADLINES_S:
        assert after(state, MachineEvent.OVERDUE)


def test_the_end_is_reached_from_every_state() -> None:
    ways = {state: {t for (s, _), t in TRANSITIONS.items() if s is state} for state in MachineState}
    for state in set(MachineState) - {MachineState.GONE}:
        reached = {state}
        for _ in MachineState:
            reached |= {target for one in reached for target in ways[one]}
        assert MachineState.GONE in reached


def test_a_machine_that_is_gone_is_forgotten() -> None:
    table = a_table(MachineState.RELEASING)
    table.move("m", 3, MachineEvent.ABSENT, 1.0)
    assert table.take_writes().gone == ("m",)
    assert "m" not in table
    with pytest.raises(UnknownMachineError):
        table.move("m", 4, MachineEvent.ABSENT, 1.0)
