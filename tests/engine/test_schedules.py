"""Whatever is submitted, cancelled and preempted when, tokens are those of a request alone."""

from core_cases import VOCAB, alone, new_core, params, prompt_of, run
from hypothesis import given, settings
from hypothesis import strategies as st

from nagara.engine.request import FinishReason
from nagara.engine.simulated import make_sequence
from nagara.engine.streams import ScriptedDevice

REQUEST = st.tuples(
    st.integers(1, 22),  # prompt
    st.integers(1, 14),  # new tokens
    st.integers(0, 3),  # prompts that begin alike
    st.sampled_from([0.0, 1.0]),
    st.booleans(),  # an end token somewhere
)
ACTION = st.one_of(
    st.tuples(st.just("submit"), REQUEST),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("preempt"), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("device"), st.integers(0, 2)),
)


def play(depth, actions, blocks):
    """Run a schedule on a scripted device; returns the sequences."""
    device = ScriptedDevice()
    core = new_core(depth, device.device, blocks=blocks)
    sequences = []
    for action, value in actions:
        if action == "submit":
            length, new, family, temperature, has_end = value
            length = min(length, blocks * 4 - new)
            if length < 1:
                continue
            prompt = prompt_of(30, family)[:length]
            ends = frozenset(range(0, VOCAB, 9)) if has_end else frozenset()
            wanted = params(new, temperature=temperature, seed=family)
            sequences.append(make_sequence(len(sequences), prompt, wanted, ends))
            core.scheduler.add(sequences[-1])
        elif action == "cancel" and sequences:
            core.scheduler.end(sequences[value % len(sequences)], FinishReason.CANCELLED)
        elif action == "preempt" and core.scheduler.running:
            running = core.scheduler.running
            core.scheduler._preempt(running[value % len(running)])
        elif action == "step":
            for _ in range(value):
                core.step()
        elif action == "device":
            stream = (device.inward, device.compute, device.outward)[value]
            stream.run_next()
    run(core)
    return sequences


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTION, max_size=40), st.sampled_from([6, 9, 40]))
def test_any_schedule_gives_each_request_the_tokens_it_gets_alone(actions, blocks):
    for depth in (0, 1):
        for sequence in play(depth, actions, blocks):
            p = sequence.params
            expected = alone(
                sequence.tokens[: sequence.prompt_length],
                p.max_tokens,
                sequence.end_ids,
                temperature=p.temperature,
                seed=p.seed,
            )
            assert sequence.finish_reason is not None
            if sequence.finish_reason is FinishReason.CANCELLED:
                assert sequence.outputs == expected[: len(sequence.outputs)]
            else:
                assert sequence.outputs == expected
