"""The parts of the host stage of a replica that is put back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nagara.node.runtime import Running
from nagara.snapshot.restore_times import RestoreTimes, restore_times


class Stopwatch:
    """Adds up what passes inside its `running` blocks, in seconds."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.passed_s += time.monotonic() - begun_s


def tool_times(log: Path) -> RestoreTimes:
    """What the checkpoint tool's log tells; zeros where there is none. Blocking."""
    try:
        return restore_times(log.read_bytes())
    except OSError:
        return RestoreTimes(0.0, 0.0, 0.0)


def host_parts(tool: RestoreTimes, launch_s: float, hooks_s: float) -> dict[str, float]:
    """The parts by name, without the rest.

    Args:
        launch_s: from before the container's making until its processes run.
        hooks_s: from then on until it is asked its canary.
    """
    return {
        "tool": max(0.0, tool.total_s - tool.read_s - tool.map_s),
        "read": tool.read_s,
        "map": tool.map_s,
        "runtime": max(0.0, launch_s - tool.total_s),
        "hooks": hooks_s,
    }


def with_rest(running: Running | None, host_s: float) -> dict[str, float] | None:
    """A replica's parts with `unaccounted`, what of the whole stage none of them covers."""
    if running is None or running.host_parts is None:
        return None
    parts = running.host_parts
    return {**parts, "unaccounted": max(0.0, host_s - sum(parts.values()))}
