"""Which steps replay a captured graph, and how they are padded to its shape.

Pure. A graph repeats the same operations on the same memory, so it has a fixed number of rows and a
fixed length of the block table. Only steps in which every request generates fit one: each run has
one row and each row is sampled.

    rows     1 2 4 8 16 24 32 ...        padded rows read and write a block that nobody owns
    blocks   4 8 16 32 ... all           padded places of the table are hidden by the positions
"""

from bisect import bisect_left
from typing import NamedTuple

from nagara.engine.sequence import StepPlan

SPARE_BLOCKS = 1  # of the cache, for the padded rows of graphs; untouched it takes no memory
SMALLEST_WIDTH = 4  # blocks
ROW_STEP = 8  # between sizes beyond this


class GraphShape(NamedTuple):
    """The fixed shape of a graph: rows, and blocks of each row's table."""

    rows: int
    blocks: int


class GraphShapes:
    """The shapes there are, and the choice among them.

    Args:
        most_rows: rows of the largest graph; larger steps are launched one operation at a time.
        most_blocks: blocks of the longest table.
        spare_block: the number of a block of the cache that no request is ever given.
    """

    def __init__(self, most_rows: int, most_blocks: int, spare_block: int) -> None:
        small = [size for size in (1, 2, 4) if size < most_rows]
        self.rows = (*small, *range(ROW_STEP, most_rows, ROW_STEP), most_rows)
        widths = []
        width = SMALLEST_WIDTH
        while width < most_blocks:
            widths.append(width)
            width *= 2
        self.blocks = (*widths, most_blocks)
        self.spare_block = spare_block

    def of_rows(self, rows: int) -> list[GraphShape]:
        """The shapes that steps of so many rows take, by growing width."""
        padded = self.rows[bisect_left(self.rows, rows)]
        return [GraphShape(padded, blocks) for blocks in self.blocks]

    def choose(self, plan: StepPlan) -> GraphShape | None:
        """The smallest shape that holds the plan; None if it is to be launched as it is."""
        if any(run.rows != 1 or not run.samples for run in plan.runs):
            return None
        widest = max(len(run.sequence.blocks) for run in plan.runs)
        if len(plan.runs) > self.rows[-1] or widest > self.blocks[-1]:
            return None
        rows = self.rows[bisect_left(self.rows, len(plan.runs))]
        return GraphShape(rows, self.blocks[bisect_left(self.blocks, widest)])
