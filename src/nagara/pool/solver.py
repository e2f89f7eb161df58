"""HiGHS, the solver of linear programmes. The only module that imports it.

Blocks for as long as the solver takes: `runner` calls it in a process of its own, because a
solver can hang where no time limit of its own is looked at.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from nagara.pool.errors import PlanError
from nagara.pool.linear import LinearProgramme, Solution

if TYPE_CHECKING:
    from highspy import HighsLp

T = TypeVar("T")


def solve(programme: LinearProgramme, time_limit_s: float = 30.0) -> Solution:
    """The optimum.

    Raises:
        PlanError: HiGHS is not installed, or found no optimum in time.
    """
    try:
        import highspy  # the pool claims and refills without it
    except ImportError as error:
        raise PlanError(
            "the solver HiGHS is not installed", hint="pip install 'nagara[pool]'"
        ) from error
    if not programme.cost:
        return Solution([], [0.0] * len(programme.limits), 0.0)
    highs = _quietly(highspy.Highs)
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("time_limit", time_limit_s)
    if highs.passModel(_to_highs(programme)) == highspy.HighsStatus.kError:
        raise PlanError("HiGHS does not take the programme")
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise PlanError(f"HiGHS found no optimum: {highs.modelStatusToString(status)}")
    solution = highs.getSolution()
    return Solution(
        x=[float(value) for value in solution.col_value],
        row_worth=[-float(value) for value in solution.row_dual],
        objective=float(highs.getInfo().objective_function_value),
    )


def _quietly(make: Callable[[], T]) -> T:
    """HiGHS greets on the process's standard output, where only data belongs."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        return make()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _to_highs(programme: LinearProgramme) -> "HighsLp":
    import highspy

    count, rows = len(programme.cost), len(programme.limits)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count, rows
    model.col_cost_ = programme.cost
    model.col_lower_ = [0.0] * count
    model.col_upper_ = programme.upper
    model.row_lower_ = [-highspy.kHighsInf] * rows
    model.row_upper_ = programme.limits
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.num_col_, model.a_matrix_.num_row_ = count, rows
    model.a_matrix_.start_ = programme.starts
    model.a_matrix_.index_ = programme.columns
    model.a_matrix_.value_ = programme.values
    return model
