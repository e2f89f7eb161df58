"""The judge of chaos runs: a check of each rule that it can fail."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from chaos_check import Call, Fault, judge

KILLED = Fault("replica", 100.0, 100.0, "chaos-1")


def call(kind: str = "read", status: int | None = 200, **more: object) -> Call:
    values = {"begun_s": 99.5, "ended_s": 100.5, **more}
    return Call("x", kind, values.pop("begun_s"), values.pop("ended_s"), status, **values)  # type: ignore[arg-type]


def faults_of(one: Call, *, begun: int = 1, ended: int = 1, faults: tuple[Fault, ...] = (KILLED,),
              settled_s: float = float("inf")) -> list[str]:  # fmt: skip
    return judge([one], {"x": begun}, {"x": ended}, faults, settled_s).wrong


def test_what_was_answered_and_done_is_well() -> None:
    for kind, status in (("read", 200), ("work", 200), ("stream", 200), ("ws", 101)):
        assert faults_of(call(kind, status), faults=()) == []


@pytest.mark.parametrize(
    ("one", "begun", "ended", "said"),
    [
        (call(is_right=False), 1, 1, "a wrong answer"),
        (call("work"), 2, 2, "done 2 times"),
        (call("work", 502, code="replica_failed", replica="chaos-1"), 2, 0, "done 2 times"),
        (call(), 1, 0, "never done"),
        (call(status=500, code=""), 0, 0, "answered 500"),
        (call(status=503, code=""), 0, 0, "answered 503"),
        (call(status=502, code="queue_timeout"), 0, 0, "answered 502"),
        (call(status=503, code="queue_timeout"), 1, 1, "refused with 'queue_timeout', but done"),
    ],
)
def test_what_is_wrong_is_found_whatever_the_faults(
    one: Call, begun: int, ended: int, said: str
) -> None:
    found = faults_of(one, begun=begun, ended=ended)
    assert any(said in line for line in found), found


def test_a_failure_needs_a_fault_that_fits_it() -> None:
    broken = call(status=502, code="replica_failed", replica="chaos-1", is_whole=False)
    other = call(status=502, code="replica_failed", replica="chaos-2", is_whole=False)
    cut = call("stream", is_whole=False, replica="chaos-1")
    assert faults_of(broken) == faults_of(cut) == []
    for one, faults in (
        (broken, ()), (other, (KILLED,)), (broken, (Fault("replica", 70.0, 70.0, "chaos-1"),)),
        (call(status=None, is_whole=False), (Fault("agent", 100.0, 100.0),)),
        (broken, (Fault("replica", 101.0, 101.0, "chaos-1"),)),
    ):  # fmt: skip
        assert any("no fault explains it" in line for line in faults_of(one, faults=faults)), one
    assert (
        faults_of(call(status=None, is_whole=False), faults=(Fault("control", 99.0, 100.0),)) == []
    )


def test_when_everything_is_repaired_nothing_may_fail() -> None:
    broken = call(status=502, code="replica_failed", replica="chaos-1", is_whole=False)
    assert faults_of(broken, settled_s=99.0) != []


def test_a_full_disk_may_lose_the_ledger_and_nothing_else() -> None:
    full = (Fault("disk", 98.0, 101.0),)
    assert faults_of(call(), begun=0, ended=0, faults=full) == []
    assert faults_of(call("work"), begun=2, ended=2, faults=full) != []


def test_shares_are_counted() -> None:
    verdict = judge([call(), call(status=502, code="replica_failed")], {"x": 1}, {"x": 1}, [KILLED])
    assert (verdict.calls, verdict.failed) == (2, 1)
    assert verdict.answers == {"ok": 1, "502 replica_failed": 1}


def test_an_answer_that_nothing_has_held_up_may_not_take_long() -> None:
    def slow(seconds: float) -> Call:
        return dataclasses.replace(call(), ended_s=call().begun_s + seconds)

    assert faults_of(slow(19.0), faults=()) == []
    assert any("took 25.0 s" in line for line in faults_of(slow(25.0), faults=()))
    assert faults_of(slow(25.0)) == []  # a replica was killed meanwhile
    assert judge([slow(3.0)], {"x": 1}, {"x": 1}, []).slowest_s == 3.0
