"""A linear programme: minimise cost · x, with rows · x <= limits and lower <= x <= upper.

Rows are kept one after another, as the solver takes them. `worst_violation` holds a solution
against the programme itself, whatever the solver said of it. Pure.
"""

import math
from dataclasses import dataclass, field

TOLERANCE = 1e-6


@dataclass(slots=True)
class LinearProgramme:
    """Columns and rows, in the order of their making."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)  # lower bounds are all zero
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def column(self, cost: float, upper: float = math.inf) -> int:
        """A variable from 0 to `upper`; returns its number."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, columns: list[int], values: list[float], limit: float) -> int:
        """Σ values · columns <= limit; returns its number."""
        self.columns += columns
        self.values += values
        self.starts.append(len(self.columns))
        self.limits.append(limit)
        return len(self.limits) - 1

    def objective(self, x: list[float]) -> float:
        """cost · x."""
        return math.fsum(cost * value for cost, value in zip(self.cost, x, strict=True))

    def slack(self, row: int, x: list[float]) -> float:
        """What the row leaves unused; negative where it is broken."""
        begin, end = self.starts[row], self.starts[row + 1]
        used = sum(self.values[at] * x[self.columns[at]] for at in range(begin, end))
        return self.limits[row] - used

    def worst_violation(self, x: list[float]) -> float:
        """The largest excess over any row or bound, relative to the size of its limit.

        NaN and wrong lengths count as infinite.
        """
        if len(x) != len(self.cost) or any(math.isnan(value) for value in x):
            return math.inf
        worst = 0.0
        for value, upper in zip(x, self.upper, strict=True):
            if value < -worst or value - upper > worst:
                scale = 1.0 if math.isinf(upper) else 1.0 + abs(upper)
                worst = max(worst, -value, (value - upper) / scale)
        for row, limit in enumerate(self.limits):
            slack = self.slack(row, x)
            if slack < 0:
                worst = max(worst, -slack / (1.0 + abs(limit)))
        return worst


@dataclass(frozen=True, slots=True)
class Solution:
    """A solver's answer. `row_worth`: how much one more unit of a row's limit would save."""

    x: list[float]
    row_worth: list[float]
    objective: float
