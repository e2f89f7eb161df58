"""A loop over a model without weights, and the oracle it is compared with."""

import random

from nagara.engine.request import SamplingParams
from nagara.engine.simulated import SimulatedModel, build_core, make_sequence, simulated_config
from nagara.engine.streams import inline_device

VOCAB = 211


def params(new, **more):
    return SamplingParams(**{"max_tokens": new, "temperature": 0, **more})


def new_core(depth, device=None, **more):
    options = {
        "slots": 4,
        "blocks": 64,
        "block_size": 4,
        "chunk_rows": 8,
        "context": 256,
        "is_checking": True,
    }
    model = SimulatedModel(simulated_config(VOCAB))
    core = build_core(model, device or inline_device(), depth, **{**options, **more})
    core.model = model
    return core


def alone(prompt, new, ends=frozenset(), **more):
    """What a request gets on an engine of its own, one step at a time: the oracle."""
    core = new_core(0, blocks=256, is_caching=False)
    sequence = make_sequence(0, prompt, params(new, **more), ends)
    core.scheduler.add(sequence)
    while core.has_work:
        core.step()
    return sequence.outputs


def run(core, limit=5000):
    for _ in range(limit):
        if not core.has_work:
            break
        core.step()
    assert not core.has_work, "the loop does not come to an end"
    core.scheduler.audit()
    assert core.scheduler.pool.held == 0


def prompt_of(length, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]
