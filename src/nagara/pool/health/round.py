"""Runs checks one after another, each with its own limit, and says which did not run.

A check is a function that blocks; it runs on a thread. One that does not come back in time is
left behind (a hanging driver cannot be interrupted) and counts as failed, because a device that
hangs a check hangs an app. A check that breaks in any other way says nothing of the machine: it
did not run.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nagara.contract.machine import CheckKind, CheckResult, HealthReport, Outcome

BOOT_LIMIT_S = 60.0  # for all checks of a boot round together

_log = logging.getLogger(__name__)


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


async def run_round(
    kind: CheckKind, checks: Sequence[HealthCheck], limit_s: float | None = None
) -> HealthReport:
    """All checks in their order.

    Args:
        limit_s: for all of them together; those it leaves no time for did not run. None: a boot
            round has `BOOT_LIMIT_S`, others as long as their checks may take.
    """
    if limit_s is None and kind is CheckKind.BOOT:
        limit_s = BOOT_LIMIT_S
    end_s = math.inf if limit_s is None else time.monotonic() + limit_s
    results = []
    for check in checks:
        left_s = end_s - time.monotonic()
        if left_s > 0:
            results.append(await _run(check, min(check.limit_s, left_s)))
        else:
            late = f"the checks before it took the round's {limit_s:g} s"
            results.append(CheckResult(check.name, Outcome.DID_NOT_RUN, late))
    return HealthReport(kind, tuple(results))


def outcome_of(check: HealthCheck) -> tuple[Outcome, str]:
    """Runs the check here and now; a fault of the check itself is not one of the machine."""
    try:
        return Outcome.PASS, check.run()
    except UnhealthyError as error:
        return Outcome.FAIL, str(error)
    except (CannotRunError, OSError) as error:
        return Outcome.DID_NOT_RUN, str(error)
    except Exception as error:  # noqa: BLE001  # the root of a check
        _log.exception("the check %r broke", check.name)
        return Outcome.DID_NOT_RUN, f"the check itself broke: {error!r}"


async def _run(check: HealthCheck, limit_s: float) -> CheckResult:
    begun_s = time.monotonic()
    # A thread of its own: one that hangs must not take the next check's place.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"check-{check.name}")
    try:
        async with asyncio.timeout(limit_s):
            outcome, detail = await asyncio.get_running_loop().run_in_executor(
                thread, outcome_of, check
            )
    except TimeoutError:
        is_own = limit_s == check.limit_s
        why = f"hung for {limit_s:g} s" if is_own else "not done when the round's time was over"
        outcome, detail = Outcome.FAIL, why
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
    return CheckResult(check.name, outcome, detail, time.monotonic() - begun_s)
