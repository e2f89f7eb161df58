"""How an app goes over from one version to the next without being away. Pure.

    deployed   the replicas of the version before, `target` of them, go on serving
    then       as many of the new version are started
    each time  one becomes ready, one of the old ones is drained: the idle first
    at last    no old one is left, and the autoscaler decides alone

A version that cannot start leaves the old replicas where they are. When there is no slot for a
new replica, one old replica gives up its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nagara.control.autoscaler import ReplicaView


@dataclass(frozen=True, slots=True)
class Roll:
    """What to do now: start so many of the new version, drain those of the old."""

    start: int = 0
    drain: tuple[str, ...] = ()


def roll(target: int, ready: int, starting: int, old: Sequence[ReplicaView]) -> Roll:
    """The next step.

    Args:
        target: how many ready replicas the change began with.
        ready, starting: replicas of the new version.
        old: the ready replicas of versions before.
    """
    if not old:
        return Roll()
    kept = max(0, target - ready)
    return Roll(max(0, target - ready - starting), _expendable(old)[: max(0, len(old) - kept)])


def give_way(old: Sequence[ReplicaView]) -> tuple[str, ...]:
    """The old replica whose slot a new one gets when there is no other."""
    return _expendable(old)[:1]


def _expendable(old: Sequence[ReplicaView]) -> tuple[str, ...]:
    order = sorted(old, key=lambda one: (one.running, -one.idle_s))
    return tuple(one.replica for one in order)
