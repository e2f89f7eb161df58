"""Prompts and parameters of the engine's tests, and a step thread that is held."""

import random
import threading
from contextlib import contextmanager

from nagara.engine.request import SamplingParams


def prompts(count, low=1, high=60, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, 400) for _ in range(draw.randint(low, high))] for _ in range(count)]


def greedy(new, **more):
    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, **more)


@contextmanager
def held_step(engine):
    """While this is open the step thread takes no command and computes nothing."""
    entered, released = threading.Event(), threading.Event()

    def hold():
        entered.set()
        released.wait(30)

    engine._command(hold)
    assert entered.wait(30)
    try:
        yield
    finally:
        released.set()
