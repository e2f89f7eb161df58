"""How many replicas an app should have. Pure: no I/O, no clock, no tasks.

    D        requests in the system, held plus running
    c        requests one replica takes at a time (`scale.concurrency`)
    desired  max(ceil(mean60(D) / (0.7 c)), ceil(mean2(D) / c)), within min..max
    present  ready plus starting replicas; draining ones are on their way out

- While a request is held, desired is at least ceil(D / c): it found no place, and the means would
  say so only seconds later. The same number is started at the moment the request comes.
- While there are requests and replicas near what they may use (`strain`), one is kept that is not,
  whatever the concurrency says: one more beside them, and one more again once that is as full.
- Beside the replicas with work, `buffer` idle ones are kept while the app is in use.
- A replica is brought back before a request that is due (`keepalive.pre_warm`).
- Without a request in the system nothing else grows above `min`: past demand keeps replicas, it
  does not bring any back.
- Panic: mean2(D) >= 2 x ready capacity (one replica's when none is ready). No decrease for 60 s.
  A restarted control process begins in panic at the present count.
- Keep-alive: the app keeps one replica until it had no request for `idle_s`.
- Down: to the most that was wanted within the last `hold_s`, at most half per 30 s, starting
  ones first, then the longest idle; never one with work.
- Without a demand figure nothing changes.
"""

import math
from dataclasses import dataclass, replace

from nagara.control.keepalive import Warm

TARGET = 0.7
PANIC_FACTOR = 2.0
PANIC_S = 60.0
DECREASE_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Rules:
    """The app's own bounds and what was learned of it. `concurrency` is c."""

    min: int
    max: int
    concurrency: int
    idle_s: float
    buffer: int = 0
    hold_s: float = 0.0
    warm: Warm | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests in the system: now, its means over 60 s and 2 s, and how many are held."""

    now: int
    held: int
    mean60: float
    mean2: float
    idle_s: float  # since the last request ended; 0 while there is one


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica that is ready or starting. `idle_s` is 0 while it has work."""

    replica: str
    is_ready: bool
    running: int = 0
    idle_s: float = 0.0
    is_strained: bool = False  # near what it may use of CPU, memory, disk or device, for long


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision leaves to the next. Monotonic seconds."""

    panic_until_s: float = float("-inf")
    decreased_s: float = float("-inf")
    peaks: tuple[tuple[float, int], ...] = ()  # (when, desired) of the last `hold_s`, falling


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do: start so many, cancel these starts, drain those replicas."""

    desired: int
    start: int = 0
    cancel: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    reason: str = ""


def after_restart(now_s: float) -> Memory:
    """The memory of a control process that has just taken over running replicas."""
    return Memory(panic_until_s=now_s + PANIC_S)


def missing_now(rules: Rules, demand: int, present: int) -> int:
    """Replicas to start at the moment a request has to be held; `demand` counts it."""
    return max(0, min(rules.max, _ceil(demand / rules.concurrency)) - present)


def decide(
    now_s: float,
    rules: Rules,
    memory: Memory,
    demand: Demand | None,
    replicas: tuple[ReplicaView, ...],
) -> tuple[Decision, Memory]:
    """One decision for one app. The caller carries it out and keeps the memory."""
    present = len(replicas)
    if demand is None:
        return Decision(present, reason="no demand figure: hold"), memory
    ready = sum(replica.is_ready for replica in replicas)
    capacity = max(1, ready) * rules.concurrency
    if demand.mean2 >= PANIC_FACTOR * capacity:
        memory = replace(memory, panic_until_s=now_s + PANIC_S)
    desired, reason = _desired(rules, demand, replicas)
    memory = replace(memory, peaks=_peaks(memory.peaks, now_s - rules.hold_s, now_s, desired))
    if desired > present:
        return Decision(desired, start=desired - present, reason=reason), memory
    if desired == present:
        return Decision(desired, reason=reason), memory
    if now_s < memory.panic_until_s:
        return Decision(present, reason="panic: no decrease"), memory
    if now_s < memory.decreased_s + DECREASE_EVERY_S:
        return Decision(present, reason="decreased less than 30 s ago"), memory
    floor = max(memory.peaks[0][1], present // 2)
    if floor >= present:
        return Decision(present, reason=f"as many were wanted within {rules.hold_s:g} s"), memory
    cancel, drain = _spare(replicas, present - floor)
    if not cancel and not drain:
        return Decision(present, reason="every replica has work"), memory
    decision = Decision(floor, cancel=cancel, drain=drain, reason=reason)
    return decision, replace(memory, decreased_s=now_s)


def _peaks(
    peaks: tuple[tuple[float, int], ...], from_s: float, now_s: float, desired: int
) -> tuple[tuple[float, int], ...]:
    """The values since `from_s` that no later one has reached; the first is the highest."""
    kept = tuple(peak for peak in peaks if peak[0] > from_s and peak[1] > desired)
    return (*kept, (now_s, desired))


def _desired(rules: Rules, demand: Demand, replicas: tuple[ReplicaView, ...]) -> tuple[int, str]:
    present = len(replicas)
    if demand.now == 0 and demand.idle_s >= rules.idle_s:
        warm = rules.warm
        if warm is not None and warm.from_s <= demand.idle_s < warm.until_s:
            return max(1, rules.min), "a request is due"
        return rules.min, f"no request for {rules.idle_s:g} s"
    long = _ceil(demand.mean60 / (TARGET * rules.concurrency))
    short = _ceil(demand.mean2 / rules.concurrency)
    held = _ceil(demand.now / rules.concurrency) if demand.held else 0
    # Within the keep-alive time the app keeps one replica if it has one: the means reach zero
    # only after a minute of silence, and a longer keep-alive must outlast that.
    kept = 1 if present or demand.now else 0
    wanted = max(long, short, held, kept)
    if demand.now == 0:
        wanted = min(wanted, present)
    if rules.buffer:
        busy = sum(replica.running > 0 for replica in replicas)
        wanted = max(wanted, max(busy, held) + rules.buffer)
    reason = f"mean60 wants {long}, mean2 {short}, held requests {held}"
    strained = sum(replica.is_strained for replica in replicas)
    if strained and (demand.now or demand.mean60) and strained >= wanted:
        wanted, reason = strained + 1, f"{strained} near what they may use"
    return min(rules.max, max(rules.min, wanted)), reason


def _ceil(value: float) -> int:
    """Rounds up, but takes a remainder of rounding errors for zero."""
    return math.ceil(value - 1e-9)


def _spare(
    replicas: tuple[ReplicaView, ...], count: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Up to `count` replicas to give up: starting ones first, then the longest idle."""
    starting = [replica.replica for replica in replicas if not replica.is_ready]
    cancel = starting[-count:] if count else []
    idle = sorted(
        (replica for replica in replicas if replica.is_ready and replica.running == 0),
        key=lambda replica: replica.idle_s,
        reverse=True,
    )
    drain = [replica.replica for replica in idle[: count - len(cancel)]]
    return tuple(cancel), tuple(drain)
