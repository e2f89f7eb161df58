"""Runs checks one after another, each with its own limit, and says which did not run.

A check is a function that blocks; it runs on a thread. One that does not come back in time is
left behind (a hanging driver cannot be interrupted) and counts as failed, because a device that
hangs a check hangs an app. A check that breaks in any other way says nothing of the machine: it
did not run.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nagara.contract.machine import CheckKind, CheckResult, HealthReport, Outcome

BOOT_LIMIT_S = 60.0  # for all checks of a boot round together

_log = logging.getLogger(__name__)


class CannotRunError(Exception):
    """The machine lacks what the check needs: nothing is known."""


class UnhealthyError(Exception):
    """The check found a fault."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A detail with a figure that means the same on every machine of a kind."""

    detail: str
    figure: float


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A named check. `run` returns a detail, or raises one of the two errors above."""

    name: str
    run: Callable[[], str | Measured]
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


def result_of(check: HealthCheck) -> CheckResult:
    """Runs the check here and now; a fault of the check itself is not one of the machine."""
    try:
        found = check.run()
    except UnhealthyError as error:
        return CheckResult(check.name, Outcome.FAIL, str(error))
    except (CannotRunError, OSError) as error:
        return CheckResult(check.name, Outcome.DID_NOT_RUN, str(error))
    except Exception as error:  # noqa: BLE001  # the root of a check
        _log.exception("the check %r broke", check.name)
        return CheckResult(check.name, Outcome.DID_NOT_RUN, f"the check itself broke: {error!r}")
    if isinstance(found, Measured):
        return CheckResult(check.name, Outcome.PASS, found.detail, figure=found.figure)
    return CheckResult(check.name, Outcome.PASS, found)


async def _run(check: HealthCheck, limit_s: float) -> CheckResult:
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            result = await _on_thread(check)
    except TimeoutError:
        is_own = limit_s == check.limit_s
        why = f"hung for {limit_s:g} s" if is_own else "not done when the round's time was over"
        result = CheckResult(check.name, Outcome.FAIL, why)
    return replace(result, elapsed_s=time.monotonic() - begun_s)


def _on_thread(check: HealthCheck) -> asyncio.Future[CheckResult]:
    """The check on a thread of its own that neither the next check nor the process waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[CheckResult] = loop.create_future()

    def tell(result: CheckResult) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        result = result_of(check)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=work, name=f"check-{check.name}", daemon=True).start()
    return future
