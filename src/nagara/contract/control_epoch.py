"""Under what right a control process gives orders."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControlEpoch:
    """One process's time as the holder of a control database.

    `number` is larger for each later holder of the same `database`, whose name is drawn once at
    its making. Of two databases the numbers say nothing about each other.
    """

    database: str
    number: int
