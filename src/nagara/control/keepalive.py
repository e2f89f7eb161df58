"""How long an app keeps a replica without requests, learned from its own pauses. Pure.

A pause is the time between an app's last answer and its next request. Keeping a replica through a
pause costs its seconds; folding too early costs a start. A second of a person's waiting counts
like `WAIT_WORTH` seconds of a reserved slot, so over the pauses p seen, with starts of c seconds:

    cost(k) = sum(p if p <= k else k + WAIT_WORTH * c)

and the keep-alive k is the cheapest of the pauses themselves and the least one. Where pauses are
nearly equal (an hourly job), a replica is brought back shortly before the next one is due.
"""

from collections.abc import Sequence
from dataclasses import dataclass

WAIT_WORTH = 10.0
UNLEARNED_S = 60.0  # the least keep-alive while little is known
HOLD_STARTS = 6.0
LEAST_S = 15.0
MOST_S = 900.0
LEARNED_FROM = 8  # pauses
STRONG_FROM = 6
STRONG_SPREAD = 0.1  # of the median, between the shortest and longest of the recent pauses
WARM_MARGIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Warm:
    """A replica shall be there while the app has been idle for `from_s` to `until_s` seconds."""

    from_s: float
    until_s: float


def auto_idle_s(cold_start_s: float | None, pauses_s: Sequence[float] = ()) -> float:
    """The keep-alive for `idle = "auto"`.

    Until `LEARNED_FROM` pauses are known: ten starts, 60 s at least. Never more than 15 min.
    """
    start_s = cold_start_s or 0.0
    if len(pauses_s) < LEARNED_FROM:
        return min(MOST_S, max(UNLEARNED_S, WAIT_WORTH * start_s))
    least_s = min(MOST_S, max(LEAST_S, start_s))
    candidates = [least_s, *(pause_s for pause_s in pauses_s if least_s < pause_s <= MOST_S)]
    return min(candidates, key=lambda keep_s: (_cost(keep_s, start_s, pauses_s), keep_s))


def hold_s(cold_start_s: float | None) -> float:
    """How long replicas that were wanted are kept beyond need: the dearer a start, the longer."""
    return min(MOST_S, HOLD_STARTS * (cold_start_s or 0.0))


def _cost(keep_s: float, start_s: float, pauses_s: Sequence[float]) -> float:
    lost = WAIT_WORTH * start_s
    return sum(pause_s if pause_s <= keep_s else keep_s + lost for pause_s in pauses_s)


def pre_warm(
    cold_start_s: float | None, pauses_s: Sequence[float], keep_alive_s: float
) -> Warm | None:
    """When to bring a folded app back before anybody calls, if its pauses are that regular."""
    recent = sorted(pauses_s[-STRONG_FROM:])
    if len(recent) < STRONG_FROM or cold_start_s is None:
        return None
    shortest_s, longest_s = recent[0], recent[-1]
    spread_s = longest_s - shortest_s
    if spread_s > STRONG_SPREAD * recent[len(recent) // 2]:
        return None
    from_s = shortest_s - spread_s - cold_start_s - WARM_MARGIN_S
    if from_s <= keep_alive_s:
        return None
    return Warm(from_s, longest_s + spread_s + WARM_MARGIN_S)
