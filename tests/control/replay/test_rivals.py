"""The rivals decide as their published rules say: vectors worked out by hand from those rules."""

import pytest

from nagara.control.autoscaler import Decision, ReplicaView
from nagara.control.demand import DemandWindow
from nagara.control.replay.policy import Seen
from nagara.control.replay.rivals import KeepAlive, Knative, Peak, QueueRatio, towards


def ready(count: int, running: int = 1, idle_s: float = 0.0) -> tuple[ReplicaView, ...]:
    return tuple(ReplicaView(f"r{n}", True, running, idle_s) for n in range(count))


@pytest.mark.parametrize(
    ("stable", "panic", "pods", "wanted"),
    [
        (0.0, 0.0, 0, 0),
        (10.0, 10.0, 1, 1),  # exactly its target
        (10.1, 10.1, 1, 2),  # rounded up; twice the ready pods is the panic threshold
        (55.0, 20.0, 5, 6),  # the stable window's
        (0.0, 0.0, 10, 5),  # at most half are taken away
        (0.0, 0.0, 9, 4),  # of an odd number, the smaller half stays
        (20.0, 100.0, 3, 10),  # ten for three ready ones: panic, and its own window counts
        (20.0, 59.0, 3, 6),  # twice three is panic already
        (20.0, 50.0, 3, 2),  # five for three is none: the stable window's two
    ],
)
def test_knative_wants_what_its_two_windows_ask_for(
    stable: float, panic: float, pods: int, wanted: int
) -> None:
    assert Knative(target=10.0).wanted(0.0, stable, panic, pods) == wanted


def test_knative_grows_at_most_by_its_rate() -> None:
    assert Knative(target=1.0, max_up_rate=10.0).wanted(0.0, 1000.0, 1000.0, 2) == 20
    assert Knative(target=1.0, max_up_rate=1.1).wanted(0.0, 3.0, 3.0, 2) == 3  # rounded up


def test_knative_in_panic_never_decreases_until_its_window_has_passed_calmly() -> None:
    rule = Knative(target=10.0)
    assert rule.wanted(0.0, 10.0, 80.0, 1) == 8
    assert rule.wanted(10.0, 10.0, 10.0, 8) == 8
    assert rule.wanted(60.0, 10.0, 10.0, 8) == 8  # not yet past the window
    assert rule.wanted(61.0, 10.0, 10.0, 8) == 4  # over: down by half at most


def test_knative_over_its_threshold_again_prolongs_the_panic() -> None:
    rule = Knative(target=10.0)
    rule.wanted(0.0, 10.0, 80.0, 1)
    assert rule.wanted(50.0, 10.0, 200.0, 8) == 20
    assert rule.wanted(100.0, 10.0, 10.0, 20) == 20
    assert rule.wanted(111.0, 10.0, 10.0, 20) == 10


def test_knative_keeps_its_last_pod_through_the_window_and_then_goes_to_zero() -> None:
    rule, window = Knative(target=10.0, window_s=60.0), DemandWindow(0.0)
    window.enter(0.0)
    window.leave(1.0)
    for now_s, wanted in ((30.0, 1), (60.9, 1), (61.0, 0)):
        assert rule.tick(Seen(now_s, window, 0, ready(1, 0, now_s - 1.0))).desired == wanted


@pytest.mark.parametrize(
    ("present", "value", "recommended"),
    [
        (1, 200.0, 2), (2, 100.0, 1), (2, 50.0, 1),  # present x value / target, rounded up
        (4, 440.0, 4), (4, 360.0, 4),  # within a tenth
        (4, 441.0, 5), (4, 359.0, 4), (4, 290.0, 3),
        (0, 1.0, 1), (0, 0.0, 0),  # activation
        (3, 0.0, 1),  # to zero only by the cool-down
    ],
)  # fmt: skip
def test_a_queue_ratio_is_the_horizontal_autoscalers(
    present: int, value: float, recommended: int
) -> None:
    assert QueueRatio(target=100.0).recommend(present, value) == recommended


def test_a_queue_ratio_holds_the_highest_recommendation_of_its_window() -> None:
    rule = QueueRatio(target=1.0, down_window_s=60.0)
    assert rule.stabilised(0.0, 5) == 5
    assert rule.stabilised(30.0, 2) == 5
    assert rule.stabilised(59.0, 3) == 5
    assert rule.stabilised(60.0, 1) == 3
    assert rule.stabilised(119.0, 1) == 1


def test_keep_alive_opens_one_for_the_held_ones_that_no_start_will_take() -> None:
    rule, window = KeepAlive(slots=2, keep_s=10.0), DemandWindow(0.0)
    starting = (ReplicaView("s", False),)
    assert rule.held(Seen(0.0, window, 1, ())) == 1
    assert rule.held(Seen(0.0, window, 2, starting)) == 0
    assert rule.held(Seen(0.0, window, 3, starting)) == 1


def test_keep_alive_gives_an_instance_up_when_its_time_is_over_and_not_before() -> None:
    rule, window = KeepAlive(slots=2, keep_s=10.0), DemandWindow(0.0)
    assert rule.tick(Seen(0.0, window, 0, ready(2, 0, 9.9))).drain == ()
    assert rule.tick(Seen(0.0, window, 0, ready(2, 0, 10.0))).drain == ("r0", "r1")
    assert rule.tick(Seen(0.0, window, 0, ready(2, 1, 0.0))).drain == ()


def test_the_peak_is_always_on() -> None:
    rule, window = Peak(3), DemandWindow(0.0)
    assert rule.begin() == 3
    assert rule.tick(Seen(0.0, window, 0, ready(3, 0, 1e6))) == Decision(3)


def test_what_is_given_up_first() -> None:
    replicas = (
        ReplicaView("busy", True, 2),
        ReplicaView("idle", True, 0, 5.0),
        ReplicaView("longer", True, 0, 9.0),
        ReplicaView("starting", False),
    )
    assert towards(6, replicas) == Decision(6, start=2)
    assert towards(2, replicas) == Decision(2, cancel=("starting",), drain=("longer",))
    assert towards(0, replicas).drain == ("longer", "idle", "busy")
