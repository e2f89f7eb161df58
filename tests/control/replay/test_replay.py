"""Replays: what is counted, that nothing is lost, and that the real decision is asked."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from nagara.base.errors import UsageError
from nagara.cli.main import main
from nagara.control.replay.arrivals import GENERATORS, HOUR_S, generated
from nagara.control.replay.comparison import RIVALS, Figures, Replay, compare, figures
from nagara.control.replay.policy import MAX_REPLICAS, Nagara, Policy
from nagara.control.replay.rivals import KeepAlive, Peak
from nagara.control.replay.world import World


def run(policy: Policy, requests: list[tuple[float, float]], *, slots: int = 2) -> Figures:
    return figures(World(policy, slots=slots, cold_start_s=10.0).run(requests))


def test_one_request_from_zero_waits_for_the_start_and_pays_until_the_replica_goes() -> None:
    found = run(KeepAlive(2, keep_s=20.0), [(5.0, 3.0)])
    assert (found.wait_p50_s, found.starts, found.unserved) == (10.0, 1, 0)
    # From the claim at 5 s: 10 s of start, 3 s of work, 20 s kept; the tick at 38 s ends it.
    assert found.device_seconds == 33.0
    assert found.idle == {"starting": 10.0, "keep_alive": 20.0}
    assert found.allocation_utilisation == round(3 / 33, 4)


def test_a_replica_takes_as_many_requests_as_it_has_slots_and_the_next_one_waits() -> None:
    requests = [(0.5, 4.0), (0.6, 4.0), (0.7, 4.0)]
    world = World(Peak(1), slots=2, cold_start_s=10.0, linger_s=0.0)
    outcome = world.run(requests)
    assert outcome.waits_s == pytest.approx((0.0, 0.0, 3.8))
    assert outcome.busy_s == pytest.approx(8.0)
    assert outcome.device_s == pytest.approx(9.0)  # until the tick that finds nothing to do


def test_a_pool_without_slots_leaves_requests_unserved() -> None:
    outcome = World(Nagara(1, 1.0), slots=1, cold_start_s=1.0, machines=0).run([(0.0, 1.0)])
    assert (outcome.unserved, outcome.starts, outcome.waits_s) == (1, 0, ())


def test_slots_of_the_pool_bound_the_number_of_replicas() -> None:
    requests = [(0.0, 10.0)] * 6
    outcome = World(Nagara(1, 1.0), slots=1, cold_start_s=1.0, machines=3).run(requests)
    assert outcome.starts == 3
    assert sorted(outcome.waits_s) == pytest.approx([1.0] * 3 + [11.0] * 3)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 300), st.floats(0.1, 60)), min_size=1, max_size=60),
    st.floats(0.5, 100),
    st.integers(1, 8),
)
def test_every_request_is_answered_once_and_the_seconds_add_up(
    requests: list[tuple[float, float]], cold_start_s: float, slots: int
) -> None:
    requests.sort()
    for policy in (Nagara(slots, cold_start_s), KeepAlive(slots)):
        outcome = World(policy, slots=slots, cold_start_s=cold_start_s).run(requests)
        assert len(outcome.waits_s) == len(requests)
        assert outcome.unserved == 0
        assert min(outcome.waits_s) >= 0
        worked_s = sum(takes_s for _, takes_s in requests)
        assert worked_s / slots - 1e-6 <= outcome.busy_s <= worked_s + 1e-6
        assert outcome.busy_s + outcome.starting_s <= outcome.device_s + 1e-6
        assert outcome.starts <= MAX_REPLICAS


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_traces_are_an_hour_in_order_and_always_the_same(name: str) -> None:
    requests = generated(name)
    assert requests == generated(name) == sorted(requests)
    assert requests
    assert all(0 <= at_s < HOUR_S + 2 and takes_s >= 1 for at_s, takes_s in requests)


def test_an_unknown_generated_trace_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="steady"):
        generated("stedy")


@pytest.mark.parametrize("name", ["steps", "bursts"])
def test_no_rival_is_better_in_both(name: str) -> None:
    replay = Replay(generated(name)[:1500], 8, 5.0)
    found = compare(replay, lambda _: None, grids=False)
    own = found["nagara"]
    assert own.unserved == 0
    for rival in RIVALS:
        assert not found[rival].usual.is_better(own), rival


def test_regular_pauses_are_learned_and_the_replica_is_back_before_the_request() -> None:
    requests = generated("regular")
    outcome = World(Nagara(8, 5.0), slots=8, cold_start_s=5.0).run(requests)
    waits_s = outcome.waits_s
    assert max(waits_s[:5]) == pytest.approx(5.0)
    assert max(waits_s[-20:]) == 0.0
    folded = figures(outcome)
    assert folded.device_seconds < HOUR_S / 2  # and yet it was folded between them


def test_the_command_prints_the_agreed_names(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "\n".join(f"2024-01-01 00:00:{second:02}.5,100,20" for second in range(40))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n")
    arguments = ["bench", "autoscale", "--trace", str(trace), "--cold-start", "2", "--json"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    document = json.loads(result.stdout)
    assert (document["trace"], document["cold_start_s"]) == (str(trace), 2.0)
    names = {
        "wait_p50_s", "wait_p95_s", "wait_p99_s", "device_seconds", "starts", "unserved",
        "allocation_utilisation",
    }  # fmt: skip
    assert set(document["policies"]) == {"nagara", *RIVALS}
    for policy in document["policies"].values():
        assert names <= set(policy)
        assert policy["unserved"] == 0
    assert document["policies"]["knative"]["grid"]["tried"] > 50


def test_a_trace_that_is_none_is_refused(tmp_path: Path) -> None:
    for trace in (str(tmp_path / "absent.csv"), "gen:nothing"):
        arguments = ["bench", "autoscale", "--trace", trace, "--cold-start", "2"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert "error:" in result.stderr
