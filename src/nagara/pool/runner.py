"""Has plans made without being held up by the solver.

A plan is made by a child process with a wall-clock limit: a solver that hangs, ignores its own
limit or takes the process down costs one plan. Then the last good plan's orders are used if the
problem still allows them, else a greedy one. Called from one task at a time.
"""

import asyncio
import logging
import pickle
import sys
from collections.abc import Sequence

from nagara.base.errors import NagaraError
from nagara.pool.errors import PlanError
from nagara.pool.greedy import greedy_plan
from nagara.pool.problem import Plan, Problem

LIMIT_S = 20.0
CHILD = (sys.executable, "-m", "nagara.pool.planning_process")
RELEASE_VERDICTS = 3  # solves in a row that must want a release

_log = logging.getLogger(__name__)


class Runner:
    """Plans, one after another.

    Args:
        limit_s: wall-clock time for one plan, the child's start included.
        child: the command that reads a problem and writes a plan.
    """

    def __init__(self, limit_s: float = LIMIT_S, child: Sequence[str] = CHILD) -> None:
        self._limit_s = limit_s
        self._child = tuple(child)
        self._last: Plan | None = None

    async def plan(self, problem: Problem) -> Plan:
        """A plan for the problem, always."""
        try:
            plan = await self._ask(problem)
        except PlanError as error:
            _log.warning("no optimal plan: %s", error)
            return fallback(problem, self._last, error.what)
        self._last = plan
        return plan

    async def _ask(self, problem: Problem) -> Plan:
        try:
            child = await asyncio.create_subprocess_exec(
                *self._child,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise PlanError(f"the planning process does not start: {error}") from error
        try:
            async with asyncio.timeout(self._limit_s):
                out, said = await child.communicate(pickle.dumps(problem))
        except TimeoutError as error:
            raise PlanError(f"the solver took longer than {self._limit_s:g} s") from error
        finally:
            if child.returncode is None:
                child.kill()
                await asyncio.shield(child.wait())
        if child.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines()
            raise PlanError(
                f"the planning process ended: {lines[-1] if lines else child.returncode}"
            )
        # Written by our own child: as trustworthy as this process.
        answer = pickle.loads(out)  # noqa: S301
        if isinstance(answer, Plan):
            return answer
        raise PlanError(str(answer))


def fallback(problem: Problem, last: Plan | None, note: str) -> Plan:
    """The last plan's launches where they are still possible and enough, else the greedy plan."""
    greedy = greedy_plan(problem, note)
    if last is None or not _still_allowed(problem, last):
        return greedy
    wanted = sum(count for _, count in greedy.launches)
    if wanted == 0 or sum(count for _, count in last.launches) < wanted:
        return greedy
    return Plan(launches=last.launches, shortages=last.shortages, source="last", note=note)


def _still_allowed(problem: Problem, plan: Plan) -> bool:
    offers = {offer.id: offer for offer in problem.offers}
    together: dict[str, int] = {}
    for name, count in plan.launches:
        if name not in offers or count > offers[name].supply:
            return False
        provider = offers[name].provider
        together[provider] = together.get(provider, 0) + count
    return all(together.get(provider, 0) <= ramp for provider, ramp in problem.rules.ramps)


class Steadiness:
    """Keeps releases back until several plans in a row wanted them. Pure."""

    def __init__(self, verdicts: int = RELEASE_VERDICTS) -> None:
        self._verdicts = verdicts
        self._recent: list[dict[str, int]] = []

    def releases(self, plan: Plan) -> tuple[tuple[str, int], ...]:
        """What may be given back now: what each of the last plans would have given back."""
        if plan.source != "optimal":
            self._recent.clear()
            return ()
        self._recent = [*self._recent, dict(plan.releases)][-self._verdicts :]
        if len(self._recent) < self._verdicts:
            return ()
        agreed = {name: min(one.get(name, 0) for one in self._recent) for name, _ in plan.releases}
        # What is given back now was wanted once; the next verdict starts from the new state.
        self._recent = [
            {name: count - agreed.get(name, 0) for name, count in one.items()}
            for one in self._recent
        ]
        return tuple((name, count) for name, count in agreed.items() if count > 0)


def said(error: NagaraError) -> str:
    """One line for the parent."""
    return error.what if error.hint is None else f"{error.what} ({error.hint})"
