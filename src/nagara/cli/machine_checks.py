"""What an agent has its machine looked at with: rounds of checks, and a monitor that runs on.

The monitor has a thread of its own that the process does not wait for: a driver that hangs it
must hang nothing else, and the pool finds out because its rounds stand still.
"""

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nagara.contract.machine import CheckKind, CheckResult, HealthReport, Outcome
from nagara.contract.node import Node
from nagara.pool.health.machine import check_machine, monitor_of
from nagara.pool.health.monitor import Monitor

MONITOR_EVERY_S = 10.0


@contextmanager
def running_monitor(state: Path) -> Iterator[Monitor]:
    """The monitor of this machine, at work until the context ends."""
    monitor = monitor_of(state)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(MONITOR_EVERY_S):
            monitor.round()

    threading.Thread(target=watch, name="nagara-monitor", daemon=True).start()
    try:
        yield monitor
    finally:
        is_over.set()


def checks_of_machine(node: Node, state: Path) -> Callable[[CheckKind], Awaitable[HealthReport]]:
    """Runs a round of checks of the machine below a state folder, starts included."""

    async def check(kind: CheckKind) -> HealthReport:
        report = await check_machine(kind, state)
        return replace(report, results=(*report.results, await _capabilities(node)))

    return check


async def _capabilities(node: Node) -> CheckResult:
    """What `nagara doctor` would say of starts here; what is missing makes none unhealthy."""
    facts = await node.facts()
    way = f"{facts.isolation}, {'with' if facts.can_snapshot else 'without'} snapshots"
    without = f"; without {'; '.join(facts.missing)}" if facts.missing else ""
    return CheckResult("capabilities", Outcome.PASS, way + without)
