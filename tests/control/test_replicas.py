"""The state machine: the table is all there is."""

import itertools

import pytest

from nagara.contract.replica import Canary, Lease
from nagara.control.app import App
from nagara.control.replicas import (
    LIVE,
    TRANSITIONS,
    IllegalEventError,
    Replica,
    ReplicaEvent,
    ReplicaState,
)

APP = App("a", "host", ("x",), 80, "/", Canary("/"))


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(ReplicaState, ReplicaEvent)), ids=str
)
def test_an_event_leads_where_the_table_says_or_raises_and_changes_nothing(
    state: ReplicaState, event: ReplicaEvent
) -> None:
    replica = Replica("r", APP, Lease("s", 1), state)
    if (state, event) in TRANSITIONS:
        assert replica.on(event) is TRANSITIONS[state, event] is replica.state
    else:
        with pytest.raises(IllegalEventError):
            replica.on(event)
        assert replica.state is state


def test_every_live_state_can_end_and_no_other_goes_on() -> None:
    sources = {state for state, _ in TRANSITIONS}
    assert sources == LIVE
