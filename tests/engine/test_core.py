"""The loop is right at both depths, on the slowest device that is still correct, near every limit.

The model here has no weights: each token depends on its position and on what the sequence's own
blocks hold, so a row that reads a wrong block, a stale token or an early buffer changes the answer.
"""

from dataclasses import replace

import pytest
import torch
from core_cases import alone, new_core, params, prompt_of, run

from nagara.engine.chunks import LEAST_ROWS
from nagara.engine.errors import ContextLengthError, EngineError
from nagara.engine.request import FinishReason
from nagara.engine.simulated import make_sequence
from nagara.engine.streams import Device, ScriptedDevice, WorkerStream, inline_device


@pytest.fixture(params=["inline", "scripted", "worker"])
def device(request):
    if request.param == "scripted":
        yield ScriptedDevice().device
    elif request.param == "inline":
        yield inline_device()
    else:
        streams = [WorkerStream() for _ in range(3)]
        made = Device(torch.device("cpu"), *streams)
        yield made
        made.close()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17, 33])
def test_tokens_equal_the_oracle_for_every_prompt_length(depth, device, length):
    core = new_core(depth, device)
    sequence = make_sequence(0, prompt_of(length), params(13))
    core.scheduler.add(sequence)
    run(core)
    assert sequence.outputs == alone(prompt_of(length), 13)


def test_many_requests_through_few_slots_equal_the_oracle(depth, device):
    core = new_core(depth, device)
    sequences = [make_sequence(i, prompt_of(3 + i * 2, i), params(5 + i % 7)) for i in range(20)]
    for sequence in sequences:
        core.scheduler.add(sequence)
    run(core)
    for i, sequence in enumerate(sequences):
        assert sequence.outputs == alone(prompt_of(3 + i * 2, i), 5 + i % 7)


def test_long_chunked_prompts_beside_many_requests_equal_the_oracle(depth, device):
    core = new_core(depth, device, slots=64, blocks=4000, context=512)
    lengths = [200, 3, 90, 1, 170, 4] * 16
    sequences = [make_sequence(i, prompt_of(n, i), params(40)) for i, n in enumerate(lengths)]
    for sequence in sequences:
        core.scheduler.add(sequence)
    run(core)
    for i, sequence in enumerate(sequences):
        assert sequence.outputs == alone(prompt_of(lengths[i], i), 40)


def test_late_chunks_of_a_long_prompt_are_smaller_while_others_generate(depth):
    """Work is rows and what they look at; each step's may not exceed that of the first chunk."""
    weight, chunk = 1 / 64, 32
    core = new_core(
        depth, slots=4, blocks=400, context=1024, chunk_rows=chunk, context_weight=weight
    )
    first = make_sequence(0, prompt_of(4), params(90))
    core.scheduler.add(first)
    core.step()
    long = make_sequence(1, prompt_of(240), params(2))
    core.scheduler.add(long)
    core.model.rows_seen.clear()
    run(core)
    chunks = [rows - 1 for rows in core.model.rows_seen if rows > LEAST_ROWS]
    start = 0
    for rows in chunks:
        assert rows * (1 + weight * (start + rows / 2)) <= chunk or rows == LEAST_ROWS
        start += rows
    assert 220 < start <= 240
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] >= 2 * chunks[-1]
    assert first.outputs == alone(prompt_of(4), 90)
    assert long.outputs == alone(prompt_of(240), 2)


def test_a_prompt_that_nobody_waits_for_is_computed_in_whole_chunks(depth):
    core = new_core(depth, blocks=400, context=1024, chunk_rows=32, context_weight=1 / 64)
    core.scheduler.add(make_sequence(0, prompt_of(320), params(1)))
    run(core)
    assert core.model.rows_seen == [32] * 10


@pytest.mark.parametrize("new", [1, 2, 3])
def test_no_step_is_computed_beyond_the_last_token(depth, new):
    core = new_core(depth)
    core.scheduler.add(make_sequence(0, [5, 6], params(new)))
    run(core)
    assert core.model.rows_seen == [2] + [1] * (new - 1)


def test_an_end_token_found_late_costs_at_most_one_row(depth):
    outputs = alone(prompt_of(5), 30)
    end = outputs[6]
    core = new_core(depth)
    sequence = make_sequence(0, prompt_of(5), params(30), frozenset([end]))
    core.scheduler.add(sequence)
    run(core)
    assert sequence.outputs == outputs[: outputs.index(end) + 1]
    assert sequence.finish_reason is FinishReason.STOP
    assert sum(core.model.rows_seen) <= 5 + len(sequence.outputs) - 1 + depth


def test_a_slot_is_given_on_only_when_the_step_in_flight_has_ended(depth):
    outputs = alone([1, 2, 3], 20)
    core = new_core(depth, ScriptedDevice().device, slots=1)
    first = make_sequence(0, [1, 2, 3], params(20), frozenset([outputs[4]]))
    second = make_sequence(1, [9, 8], params(9))
    core.scheduler.add(first)
    core.scheduler.add(second)
    run(core)
    assert first.outputs == outputs[: outputs.index(outputs[4]) + 1]
    assert second.outputs == alone([9, 8], 9)


def test_two_equal_prompts_at_once_leave_the_pool_whole(depth, device):
    core = new_core(depth, device)
    prompt = prompt_of(24)
    sequences = [make_sequence(i, prompt, params(40)) for i in range(4)]
    for sequence in sequences:
        core.scheduler.add(sequence)
    run(core)
    assert all(s.outputs == alone(prompt, 40) for s in sequences)


def test_a_cached_prompt_still_computes_its_last_token(depth):
    for length in (8, 9, 12, 15, 16):
        core = new_core(depth)
        first, again = (make_sequence(i, prompt_of(length), params(6)) for i in range(2))
        core.scheduler.add(first)
        run(core)
        core.model.rows_seen.clear()
        core.scheduler.add(again)
        run(core)
        assert again.outputs == first.outputs
        assert again.cached_tokens == (length - 1) // 4 * 4
        assert core.model.rows_seen[0] == length - again.cached_tokens


def test_a_longer_prompt_shares_the_answer_of_a_shorter_one(depth):
    core = new_core(depth)
    first = make_sequence(0, prompt_of(6), params(11))
    core.scheduler.add(first)
    run(core)
    longer = [*prompt_of(6), *first.outputs, 3]
    second = make_sequence(1, longer, params(5))
    core.scheduler.add(second)
    run(core)
    assert second.cached_tokens == 16  # the last output was never computed
    assert second.outputs == alone(longer, 5)


def test_a_sequence_runs_ahead_of_its_commits_by_at_most_the_depth(depth):
    core = new_core(depth, ScriptedDevice().device)
    for i in range(4):
        core.scheduler.add(make_sequence(i, prompt_of(3 + 9 * i, i), params(20)))
    while core.has_work:
        core.step()
        assert len(core._in_flight) <= depth
        assert all(s.outputs_planned - s.outputs_known <= depth for s in core.scheduler.running)


def test_a_token_left_in_a_slot_by_its_last_owner_is_noticed(depth):
    core = new_core(depth, slots=1)
    core.scheduler.add(make_sequence(0, [1, 2], params(3)))
    run(core)
    core.scheduler.add(make_sequence(1, [1, 2], params(3)))
    plan = core.scheduler.plan()
    wrong = plan.runs[0]._replace(carries=True)  # as if its token were on the device already
    with pytest.raises(EngineError, match="before it was drawn"):
        core._runner.read(core._runner.launch(replace(plan, runs=(wrong,))))


def test_preempted_requests_compute_the_same_tokens_again(depth, device):
    core = new_core(depth, device, blocks=14)
    sequences = [make_sequence(i, prompt_of(7 + i, i), params(25)) for i in range(4)]
    for sequence in sequences:
        core.scheduler.add(sequence)
    run(core)
    assert core.scheduler.preemptions > 0
    for i, sequence in enumerate(sequences):
        assert sequence.outputs == alone(prompt_of(7 + i, i), 25)


def test_what_a_preempted_request_had_computed_is_found_again(depth):
    core = new_core(depth)
    sequence = make_sequence(0, prompt_of(16), params(20))
    core.scheduler.add(sequence)
    while sequence.outputs_known < 10:
        core.step()
    core.scheduler._preempt(sequence)
    before = sum(core.model.rows_seen)
    while sequence.outputs_known < 12:
        core.step()
    assert sum(core.model.rows_seen) - before < 16, "it computed its prompt again"


@pytest.mark.parametrize("steps", range(8))
def test_a_cancel_at_any_chunk_border_frees_everything(depth, device, steps):
    core = new_core(depth, device)
    other = make_sequence(0, prompt_of(5, 1), params(30))
    long = make_sequence(1, prompt_of(40), params(5))
    core.scheduler.add(other)
    core.scheduler.add(long)
    for _ in range(steps):
        core.step()
    core.scheduler.end(long, FinishReason.CANCELLED)
    core.scheduler.end(long, FinishReason.CANCELLED)
    run(core)
    assert long.finish_reason is FinishReason.CANCELLED
    assert other.outputs == alone(prompt_of(5, 1), 30)


def test_cancelling_one_of_eight_that_share_a_prefix_leaves_the_others_alone(depth, device):
    core = new_core(depth, device, slots=8, blocks=200)
    shared = prompt_of(30)
    prompts = [[*shared, i, i + 1] for i in range(8)]
    warm = make_sequence(99, shared, params(1))
    core.scheduler.add(warm)
    run(core)
    sequences = [make_sequence(i, p, params(12)) for i, p in enumerate(prompts)]
    for sequence in sequences:
        core.scheduler.add(sequence)
    core.step()
    core.scheduler.end(sequences[3], FinishReason.CANCELLED)
    run(core)
    for i, sequence in enumerate(sequences):
        if i != 3:
            assert sequence.outputs == alone(prompts[i], 12)


def test_a_cancel_before_the_first_step_leaves_nothing(depth):
    core = new_core(depth)
    sequence = make_sequence(0, [1], params(5))
    core.scheduler.add(sequence)
    core.scheduler.end(sequence, FinishReason.CANCELLED)
    assert not core.has_work
    run(core)


def test_a_lone_request_is_committed_without_waiting_for_another(depth):
    device = ScriptedDevice()
    core = new_core(depth, device.device)
    sequence = make_sequence(0, [1, 2], params(1))
    core.scheduler.add(sequence)
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
    assert sequence.outputs
    assert steps <= 1 + depth


def test_stepping_an_idle_core_does_nothing(depth):
    core = new_core(depth)
    assert core.step() == []
    assert not core.has_work


def test_a_request_larger_than_the_pool_is_refused(depth):
    core = new_core(depth, blocks=4)
    with pytest.raises(ContextLengthError):
        core.scheduler.check_fits(17)
    core.scheduler.check_fits(16)
    sequence = make_sequence(0, prompt_of(10), params(6))
    core.scheduler.add(sequence)
    run(core)
    assert sequence.outputs == alone(prompt_of(10), 6)


def test_host_buffers_are_copied_before_the_host_writes_them_again(depth):
    """All transfers are held as long as can be: what is written later must not be what arrives."""
    device = ScriptedDevice()
    core = new_core(depth, device.device)
    sequence = make_sequence(0, prompt_of(40), params(3))
    core.scheduler.add(sequence)
    plans = [core.scheduler.plan() for _ in range(3)]  # of 8 rows each; two sets of buffers
    launched = [core._runner.launch(plan) for plan in plans]
    assert not launched[2].out.is_done()
    assert launched[0].out.is_done(), "its set was filled again before its reader had ended"
    for plan, step in zip(plans, launched, strict=True):
        core.scheduler.commit(plan, core._runner.read(step).tokens)
    run(core)
    assert sequence.outputs == alone(prompt_of(40), 3)


def test_device_buffers_do_not_alias_host_buffers(depth):
    core = new_core(depth)
    buffers = core._runner._sets[0]
    buffers.rows.fill_(1)
    buffers.row_count = 4
    buffers.copy_in()
    buffers.rows.fill_(2)
    assert buffers.device_rows[0, 0] == 1


def test_a_result_that_was_never_written_is_noticed(depth):
    device = ScriptedDevice()
    core = new_core(depth, device.device)
    core.scheduler.add(make_sequence(0, [1], params(1)))
    launched = core._runner.launch(core.scheduler.plan())
    for event in (*device.inward.held, *device.compute.held, *device.outward.held):
        event.has_run = True  # as if an event had happened too early
    with pytest.raises(EngineError, match="before it was written"):
        core._runner.read(launched)


def test_draining_waits_for_what_is_in_flight_and_commits_it(depth):
    device = ScriptedDevice()
    core = new_core(depth, device.device)
    sequence = make_sequence(0, prompt_of(3), params(9))
    core.scheduler.add(sequence)
    known = [item for _ in range(3) for item in core.step()]
    in_flight = len(device.outward.held)
    assert in_flight == depth
    known += core.drain()
    assert not device.outward.held
    assert core.drain() == []
    assert [item.outcome.token_id for item in known] == alone(prompt_of(3), 9)[:3]
    core.scheduler.end(sequence, FinishReason.CANCELLED)
    run(core)


def test_steps_are_committed_in_order(depth):
    core = new_core(depth)
    core.scheduler.add(make_sequence(0, prompt_of(20), params(3)))
    core.scheduler.plan()
    second = core.scheduler.plan()
    with pytest.raises(EngineError, match="before step"):
        core.scheduler.commit(second, [1])


def test_a_request_that_needs_the_host_makes_only_its_own_rows_wait(depth):
    saw = []

    def bans_last(seen, logits):
        saw.append(seen)
        logits[seen[-1]] = float("-inf")
        return logits

    plain = make_sequence(0, prompt_of(4), params(12))
    own = make_sequence(1, prompt_of(4, 5), params(12, logits_processors=(bans_last,)))
    core = new_core(depth)
    core.scheduler.add(plain)
    core.scheduler.add(own)
    while plain.finish_reason is None:
        core.step()
    assert core.times.steps <= 12 + 2 * depth, "the batch has waited for one request"
    run(core)
    assert plain.outputs == alone(prompt_of(4), 12)
    assert own.outputs == alone(prompt_of(4, 5), 12, logits_processors=(bans_last,))
    first = saw[: len(own.outputs)]
    assert first == [tuple(own.tokens[: 4 + i]) for i in range(12)]


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 5.0},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"repetition_penalty": 1.7, "temperature": 1.3, "seed": 4},
    ],
)
def test_penalties_count_the_token_that_only_the_device_knows(depth, more):
    """Three tokens are likely at every place, so each penalty changes which one wins."""
    more = {**more, "logit_bias": ((5, 10.8), (6, 10.6), (7, 10.4))}
    core = new_core(depth, ScriptedDevice().device)
    sequences = [make_sequence(i, [3, 4, 3], params(20, **more)) for i in range(3)]
    for sequence in sequences:
        core.scheduler.add(sequence)
    run(core)
    expected = alone([3, 4, 3], 20, **more)
    assert all(s.outputs == expected for s in sequences)
    assert expected != alone([3, 4, 3], 20, logit_bias=more["logit_bias"])


def test_penalties_survive_a_preemption(depth):
    core = new_core(depth, blocks=14)
    bias = ((5, 10.8), (6, 10.6), (7, 10.4))
    more = {"frequency_penalty": 1.5, "repetition_penalty": 1.4, "logit_bias": bias}
    sequences = [make_sequence(i, prompt_of(7, i), params(25, **more)) for i in range(4)]
    for sequence in sequences:
        core.scheduler.add(sequence)
    run(core)
    assert core.scheduler.preemptions > 0
    for i, sequence in enumerate(sequences):
        assert sequence.outputs == alone(prompt_of(7, i), 25, **more)


def test_blocks_and_slot_are_released_by_the_commit_of_the_last_step_that_uses_them():
    core = new_core(1, ScriptedDevice().device, slots=1)
    sequence = make_sequence(0, prompt_of(5), params(10))
    core.scheduler.add(sequence)
    core.step()
    core.step()  # one step committed, one in flight
    held = core.scheduler.pool.held
    assert held
    core.scheduler.end(sequence, FinishReason.CANCELLED)
    assert core.scheduler.pool.held == held
    assert core.has_work
    later = make_sequence(1, prompt_of(5, 2), params(2))
    core.scheduler.add(later)
    assert core.scheduler._free_slots == [], "the step in flight still writes to the slot"
    core.step()  # commits that step
    assert core.scheduler._free_slots == [0]
    assert core.scheduler.pool.held == 0
    core.step()
    assert later.slot == 0
    run(core)
    assert later.outputs == alone(prompt_of(5, 2), 2)


def test_only_blocks_of_committed_tokens_get_a_name():
    core = new_core(1, ScriptedDevice().device)
    sequence = make_sequence(0, prompt_of(8), params(3))
    core.scheduler.add(sequence)
    core.scheduler.plan()
    assert sequence.planned == 8
    assert sequence.names == []
    twin = make_sequence(1, prompt_of(8), params(1))
    core.scheduler.add(twin)
    core.scheduler.plan()
    assert twin.cached_tokens == 0
