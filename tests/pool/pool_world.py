"""What really exists around a pool: machines, what runs on them, messages on their way."""

import dataclasses
import random
from typing import Any

import hypothesis.strategies as st

from nagara.contract.machine import Offering, Renewal
from nagara.sandbox.fence import Fence


@dataclasses.dataclass
class RealMachine:
    """One that exists and costs money."""

    offering: Offering
    clock_offset_s: float
    fence: Fence = dataclasses.field(default_factory=Fence)
    running: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    is_up: bool = False
    is_cut_off: bool = False


@dataclasses.dataclass
class Message:
    """A start on its way to a machine; it may arrive at any time, or never."""

    machine: str
    order: Renewal
    app: str


def pick(source: Any, options: Any) -> Any:
    """One of them, drawn by hypothesis or by a plain random generator."""
    if isinstance(source, random.Random):
        return source.choice(list(options))
    return source.draw(st.sampled_from(options))
