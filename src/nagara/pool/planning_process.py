"""The process that makes one plan: a pickled problem in, a pickled plan or sentence out.

Started by `runner` for every plan, ended by it when its time is over.
"""

import os
import pickle
import sys

from nagara.pool.errors import PlanError
from nagara.pool.planner import make_plan
from nagara.pool.runner import said
from nagara.pool.solver import solve


def main() -> None:
    """Reads, plans, writes."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not come between
    # Written by our own parent: as trustworthy as this process.
    problem = pickle.load(sys.stdin.buffer)  # noqa: S301
    try:
        answer: object = make_plan(problem, solve)
    except PlanError as error:
        answer = said(error)
    pickle.dump(answer, out)
    out.flush()


if __name__ == "__main__":
    main()
