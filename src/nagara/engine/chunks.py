"""How many prefill rows fit into a step, so that the others' next tokens come in time.

Pure. A row at position p looks at p tokens, so the chunks of a long prompt would take longer and
longer at a constant number of rows. Here a chunk is measured by its work, in rows at the beginning
of a prompt: a row at position p is `1 + context_weight * p` of them.
"""

import math

LEAST_ROWS = 8  # of a step's first chunk: few rows cost a step little beyond reading the weights


class ChunkBudget:
    """What is left of one step for prefill rows.

    Args:
        rows: rows that the step may still hold.
        work: the work they may make, in rows at the beginning of a prompt.
        context_weight: the work of looking at one token more; 0 where nobody waits for the step.
    """

    def __init__(self, rows: int, work: int, context_weight: float) -> None:
        self._rows = rows
        self._work = float(work)
        self._weight = context_weight
        self._least = LEAST_ROWS

    @property
    def is_spent(self) -> bool:
        return self._rows < 1 or self._work < 1

    def rows_at(self, start: int) -> int:
        """How many rows from position `start` on may be taken; at least one unless spent."""
        if self.is_spent:
            return 0
        count = int(self._work)
        if self._weight:
            # n + weight * (n * start + n^2 / 2) = work, solved for n
            linear = 1 + self._weight * start
            root = math.sqrt(linear * linear + 2 * self._weight * self._work)
            count = max(int((root - linear) / self._weight), min(self._least, count))
        return min(count, self._rows)

    def take(self, count: int, start: int) -> None:
        self._rows -= count
        self._work -= count * (1 + self._weight * (start + count / 2))
        self._least = 1
