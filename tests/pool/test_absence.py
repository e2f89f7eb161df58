"""Lists that lack machines, and what is believed of them."""

import pytest

from nagara.pool.absence import ABSENT_S, DOUBTED_S, doubt, is_believed
from nagara.pool.machines import Machine
from nagara.pool.states import MachineState
from nagara.testing.pools import an_offering


def a_machine(name: str = "m", state: MachineState = MachineState.READY) -> Machine:
    return Machine(name, an_offering(), state, 1, 0.0)


def first_believed_s(
    machine: Machine, every_s: float, *, is_doubted: bool = False, is_replaced: bool = False
) -> float:
    """When the machine is taken for gone, with lists asked for so often from 0 on."""
    for number in range(1000):
        begun_s = number * every_s
        if is_believed(machine, begun_s, is_doubted=is_doubted, is_replaced=is_replaced):
            return begun_s
    raise AssertionError("never")


@pytest.mark.parametrize("every_s", [5.0, 30.0])
def test_an_absence_is_believed_after_the_same_time_however_often_is_asked(every_s: float) -> None:
    assert ABSENT_S <= first_believed_s(a_machine(), every_s) <= ABSENT_S + every_s
    doubted = first_believed_s(a_machine(), every_s, is_doubted=True)
    assert DOUBTED_S <= doubted <= DOUBTED_S + every_s


def test_an_end_that_was_asked_for_needs_two_lists_and_no_more() -> None:
    assert first_believed_s(a_machine(state=MachineState.RELEASING), 1.0, is_doubted=True) == 1.0


def test_an_answer_begins_the_time_anew_unless_the_address_is_anothers() -> None:
    for is_replaced, expected_s in ((False, 60.0), (True, 30.0)):
        machine = a_machine()
        assert not is_believed(machine, 0.0, is_doubted=False, is_replaced=is_replaced)
        machine.heard_s = 10.0
        believed = is_believed(machine, 30.0, is_doubted=False, is_replaced=is_replaced)
        assert believed == (expected_s == 30.0)
        if not believed:
            assert is_believed(machine, 60.0, is_doubted=False, is_replaced=is_replaced)


def test_a_list_is_doubted_that_lacks_more_than_a_share_and_a_number() -> None:
    ten = [a_machine(f"m{number}") for number in range(10)]
    names = [one.name for one in ten]
    assert doubt("p", ten, names[2:]) is None
    assert "lacks 3 of 10" in str(doubt("p", ten, names[3:]))
    for machine in ten[:3]:
        machine.state = MachineState.RELEASING
    assert doubt("p", ten, names[3:]) is None
    assert doubt("p", ten[:5], []) is None
