"""Runs checks one after another, each with its own limit, and says which did not run.

A check is a function that blocks; it runs on a thread. One that does not come back in time is
left behind (a hanging driver cannot be interrupted) and counts as failed, because a device that
hangs a check hangs an app.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nagara.contract.machine import CheckKind, CheckResult, HealthReport, Outcome


class CannotRunError(Exception):
    """The machine lacks what the check needs: nothing is known."""


class UnhealthyError(Exception):
    """The check found a fault."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A named check. `run` returns a detail, or raises one of the two errors above."""

    name: str
    run: Callable[[], str]
    limit_s: float = 60.0


async def run_round(kind: CheckKind, checks: Sequence[HealthCheck]) -> HealthReport:
    """All checks in their order."""
    return HealthReport(kind, tuple([await _run(check) for check in checks]))


async def _run(check: HealthCheck) -> CheckResult:
    begun_s = time.monotonic()
    # A thread of its own: one that hangs must not take the next check's place.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"check-{check.name}")
    try:
        async with asyncio.timeout(check.limit_s):
            detail = await asyncio.get_running_loop().run_in_executor(thread, check.run)
        outcome = Outcome.PASS
    except CannotRunError as error:
        outcome, detail = Outcome.DID_NOT_RUN, str(error)
    except UnhealthyError as error:
        outcome, detail = Outcome.FAIL, str(error)
    except TimeoutError:
        outcome, detail = Outcome.FAIL, f"hung for {check.limit_s:g} s"
    except OSError as error:
        outcome, detail = Outcome.DID_NOT_RUN, str(error)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
    return CheckResult(check.name, outcome, detail, time.monotonic() - begun_s)
