"""One helper that times the stages of a start and shows what no stage accounts for.

A `Waterfall` belongs to one start and to one task at a time. Stages are named as in the
documentation (`acquire`, `files`, `host`, `device`, `canary`); the same stage may be entered
several times and adds up. Stages may be measured in another process and added with `add`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

Stage = Literal["acquire", "files", "host", "device", "canary"]
STAGES: tuple[Stage, ...] = get_args(Stage)

_log = logging.getLogger(__name__)


class Waterfall:
    """Timed stages of one start.

    Args:
        monotonic_s: the clock to read; started at construction.
        name: what is started, for the log.
    """

    def __init__(self, monotonic_s: Callable[[], float], name: str) -> None:
        self._monotonic_s = monotonic_s
        self._name = name
        self._started_s = monotonic_s()
        self._stages: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, stage: Stage, what: str = "") -> Iterator[None]:
        """Adds the time inside the `with` block to `stage`, also when it raises."""
        begun_s = self._monotonic_s()
        try:
            yield
        finally:
            seconds = self._monotonic_s() - begun_s
            self._stages[stage] += seconds
            _log.debug("%s: %s %s took %.1f ms", self._name, stage, what, seconds * 1000)

    def add(self, stages: Mapping[str, float]) -> None:
        """Adds stages measured elsewhere; names that are no stages are refused."""
        for stage, seconds in stages.items():
            if stage not in STAGES:
                raise ValueError(f"{stage!r} is not a stage; stages are {', '.join(STAGES)}")
            self._stages[stage] += seconds

    def elapsed_s(self) -> float:
        """Seconds since construction."""
        return self._monotonic_s() - self._started_s

    def stages(self) -> dict[str, float]:
        """Seconds by stage, without the remainder."""
        return dict(self._stages.items())


def with_unaccounted(stages: Mapping[str, float], total_s: float) -> dict[str, float]:
    """The stages in their order plus `unaccounted`, the part of `total_s` none of them covers.

    Stages of one start do not overlap, so a sum above the total is a clock's rounding: the
    remainder is then zero.
    """
    full: dict[str, float] = {stage: stages.get(stage, 0.0) for stage in STAGES}
    full["unaccounted"] = max(0.0, total_s - sum(full.values()))
    return full
