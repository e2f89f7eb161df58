"""When many machines seem to fall ill at once, it is the check that is suspect. Pure."""

from dataclasses import dataclass, field

SHARE, LEAST = 0.20, 3  # more than this share of a group, and at least so many
WINDOW_S = 600.0


def is_too_many(found: int, group_size: int) -> bool:
    """Whether so many of a group at once are more than chance."""
    return found >= LEAST and found > SHARE * group_size


@dataclass(slots=True)
class Brake:
    """Remembers which machines of each group were found unhealthy lately."""

    _found: dict[str, dict[str, float]] = field(default_factory=dict)

    def may_remove(self, group: str, machine: str, group_size: int, now_s: float) -> bool:
        """Whether a machine just found unhealthy may be taken out. False: alert instead.

        The machines found before it count with it; they are not brought back by themselves.
        """
        found = self._found.setdefault(group, {})
        found[machine] = now_s
        for name in [name for name, at_s in found.items() if now_s - at_s > WINDOW_S]:
            del found[name]
        return not is_too_many(len(found), group_size)

    def is_on(self, group: str, group_size: int, now_s: float) -> bool:
        """Whether removals of this group are stopped at present."""
        recent = {n: at for n, at in self._found.get(group, {}).items() if now_s - at <= WINDOW_S}
        return is_too_many(len(recent), group_size)

    def healthy(self, machine: str) -> None:
        """A machine was found healthy again."""
        for found in self._found.values():
            found.pop(machine, None)
