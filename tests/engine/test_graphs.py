"""Steps that are replayed from a capture, padded to its shape, give the tokens of plain steps.

The graphs here are recorded on the CPU: a replay runs the recorded operations on the recorded
memory and none of the Python code around them, as on a GPU.
"""

import logging
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nagara.engine.graph_shapes import GraphShape, GraphShapes
from nagara.engine.graphs import RecordedGraphs
from nagara.engine.loading import load_model
from nagara.engine.request import FinishReason, SamplingParams
from nagara.engine.sequence import Run, StepPlan
from nagara.engine.settings import EngineSettings
from nagara.engine.simulated import SimulatedModel, build_core, make_sequence, simulated_config
from nagara.engine.streams import ScriptedDevice, inline_device

SLOTS, BLOCK = 11, 16


def params(new, **more):
    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, **more)


def prompt_of(length, seed, vocab):
    draw = random.Random(seed)
    return [draw.randrange(3, vocab) for _ in range(length)]


def flat_core(folder, depth, graphs, blocks=200):
    settings = EngineSettings(dtype="float32", kernel="torch", cache_tokens=16 * blocks)
    return build_core(
        load_model(folder, settings).model,
        ScriptedDevice().device,
        depth,
        slots=SLOTS,
        blocks=blocks,
        chunk_rows=64,
        context=512,
        graphs=graphs,
        is_checking=True,
    )


def work(core, vocab):
    """Requests of many lengths that come and go, so that steps have every number of rows."""
    sequences = [
        make_sequence(i, prompt_of(3 + 9 * i, i, vocab), params(4 + 3 * i)) for i in range(SLOTS)
    ]
    for i, sequence in enumerate(sequences):
        core.scheduler.add(sequence)
        for _ in range(i % 3):
            core.step()
    while core.has_work:
        core.step()
    core.scheduler.audit()
    return [sequence.outputs for sequence in sequences]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_replayed_steps_give_the_tokens_and_the_cache_of_plain_ones(family, make_model, depth):
    folder = make_model(family)
    plain, graphed = flat_core(folder, depth, None), flat_core(folder, depth, RecordedGraphs())
    assert work(graphed, 400) == work(plain, 400)
    assert graphed.graphs.replayed > 10
    ours, spare = graphed._runner._model._cache.split([200 * BLOCK, BLOCK], dim=2)
    theirs = plain._runner._model._cache
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert spare[:, :, 0].any(), "padded rows went somewhere else"
    assert not spare[:, :, 1:].any()


def test_a_padded_step_has_the_logits_of_a_plain_one(tiny, depth):
    seen = {}
    for name, graphs in (("plain", None), ("graphed", RecordedGraphs())):
        core = flat_core(tiny, depth, graphs)
        model = core._runner._model
        forward = model.forward

        def record(inputs, forward=forward, name=name):
            logits = forward(inputs)
            seen.setdefault(name, []).append(logits.clone())
            return logits

        model.forward = record
        for i in range(3):
            core.scheduler.add(make_sequence(i, prompt_of(5 + i, i, 400), params(2)))
        while core.has_work:
            core.step()
    assert seen["graphed"][1].shape[0] == 4
    torch.testing.assert_close(seen["graphed"][1][:3], seen["plain"][1], rtol=1e-4, atol=1e-4)


def test_graphs_captured_ahead_are_replayed_from_the_first_step_on(tiny, depth):
    core, plain = flat_core(tiny, depth, RecordedGraphs()), flat_core(tiny, depth, None)
    core.capture(3)
    captured = len(core.graphs)
    assert captured == 2 * len(GraphShapes(SLOTS, 33, 200).of_rows(3))
    assert not core._runner._model._cache[:, :, : 200 * BLOCK].any()
    outputs = []
    for one in (core, plain):
        sequences = [make_sequence(i, prompt_of(5 + i, i, 400), params(9)) for i in range(3)]
        for sequence in sequences:
            one.scheduler.add(sequence)
        while one.has_work:
            one.step()
        outputs.append([sequence.outputs for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert core.graphs.replayed == 8
    assert len(core.graphs) == captured


def test_each_buffer_set_has_a_graph_of_its_own(tiny, depth):
    core = flat_core(tiny, depth, RecordedGraphs())
    core.scheduler.add(make_sequence(0, prompt_of(4, 0, 400), params(20)))
    while core.has_work:
        core.step()
    assert len(core.graphs) == 2
    assert core.graphs.replayed == 17  # 19 steps of generating, one of each set captured


@pytest.mark.parametrize("blocks", [14, 80])
def test_graphs_change_no_token_when_requests_are_sent_back_cancelled_and_sampled(depth, blocks):
    def play(graphs):
        core = build_core(
            SimulatedModel(simulated_config(211)),
            ScriptedDevice().device,
            depth,
            slots=4,
            blocks=blocks,
            block_size=4,
            chunk_rows=8,
            context=256,
            graphs=graphs,
            is_checking=True,
        )
        sequences = [
            make_sequence(
                i, prompt_of(7 + i, i, 211), SamplingParams(25, temperature=i % 2, seed=i)
            )
            for i in range(7)
        ]
        for sequence in sequences:
            core.scheduler.add(sequence)
        for _ in range(12):
            core.step()
        core.scheduler.end(sequences[1], FinishReason.CANCELLED)
        while core.has_work:
            core.step()
        core.scheduler.audit()
        return core, [s.outputs for i, s in enumerate(sequences) if i != 1]

    graphed, tokens = play(RecordedGraphs())
    plain, expected = play(None)
    assert tokens == expected
    assert graphed.graphs.replayed > 5
    assert (plain.scheduler.preemptions > 0) == (blocks == 14)


def test_where_a_step_cannot_be_captured_it_runs_as_usual(tiny, depth, caplog):
    class Refuses:
        def capture(self, work):
            raise RuntimeError("operation not permitted when stream is capturing")

    caplog.set_level(logging.WARNING, "nagara.engine")
    core = flat_core(tiny, depth, Refuses())
    assert work(core, 400) == work(flat_core(tiny, depth, None), 400)
    assert not core.graphs.is_usable
    assert [record.getMessage() for record in caplog.records] == [
        "steps are not captured as graphs: operation not permitted when stream is capturing"
    ]


def plan_of(rows, blocks, samples=True):
    sequences = [make_sequence(i, [1], params(3)) for i in range(len(rows))]
    for sequence in sequences:
        sequence.blocks = list(range(blocks))
    runs = (
        Run(sequence, 0, i, 5, count, samples, carries=False, is_first=False)
        for i, (sequence, count) in enumerate(zip(sequences, rows, strict=True))
    )
    return StepPlan(0, tuple(runs))


@given(st.integers(1, 300), st.integers(1, 600), st.integers(1, 300), st.integers(1, 600))
def test_the_chosen_shape_is_the_smallest_that_holds_the_step(most_rows, most_blocks, rows, blocks):
    shapes = GraphShapes(most_rows, most_blocks, 7)
    found = shapes.choose(plan_of([1] * rows, blocks))
    if rows > most_rows or blocks > most_blocks:
        assert found is None
    else:
        assert found == GraphShape(
            min(r for r in shapes.rows if r >= rows), min(b for b in shapes.blocks if b >= blocks)
        )
        assert found.rows <= max(rows + 7, 4)
        assert found.blocks < max(2 * blocks, 5)
    assert list(shapes.rows) == sorted(set(shapes.rows))
    assert list(shapes.blocks) == sorted(set(shapes.blocks))


def test_a_step_that_takes_in_a_prompt_is_no_graph():
    shapes = GraphShapes(8, 32, 99)
    assert shapes.choose(plan_of([1, 1, 5], 2)) is None
    assert shapes.choose(plan_of([1, 1], 2, samples=False)) is None
    assert shapes.choose(plan_of([1, 1], 2)) == GraphShape(2, 4)


def test_an_engine_without_cuda_captures_nothing(tiny, start_engine, ask):
    engine = start_engine(tiny, kernel="torch")
    assert ask(engine, [5], params(3)).all()
    assert engine._core.graphs is None


def test_forgetting_graphs_captures_them_anew(tiny):
    core = build_core(
        load_model(tiny, EngineSettings(dtype="float32", kernel="torch", cache_tokens=512)).model,
        inline_device(),
        0,
        slots=2,
        blocks=32,
        context=256,
        graphs=RecordedGraphs(),
    )
    outputs = []
    for i in range(2):
        sequence = make_sequence(i, [5, 6, 7], params(9))
        core.scheduler.add(sequence)
        while core.has_work:
            core.step()
        outputs.append(sequence.outputs)
        assert len(core.graphs) == 2
        core.graphs.forget()
        assert len(core.graphs) == 0
    assert outputs[0] == outputs[1]
