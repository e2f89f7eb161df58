"""A chunk's work keeps to the budget but for its least rows, and prompts always move on."""

from hypothesis import given
from hypothesis import strategies as st

from nagara.engine.chunks import LEAST_ROWS, ChunkBudget


@given(
    st.integers(1, 600),
    st.integers(1, 512),
    st.sampled_from([0.0, 1 / 3000, 1 / 100, 0.5]),
    st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 5000)), max_size=40),
)
def test_all_chunks_of_a_step_together_keep_to_its_rows_and_its_work(rows, work, weight, asked):
    budget = ChunkBudget(rows, work, weight)
    taken, done = 0, 0.0
    for start, left in asked:
        if budget.is_spent:
            break
        count = min(left, budget.rows_at(start))
        assert count >= 1
        budget.take(count, start)
        taken += count
        before, done = done, done + count * (1 + weight * (start + count / 2))
        least = LEAST_ROWS if before == 0 else 1
        assert done <= work + 1e-6 or count <= least
    assert taken <= min(rows, work)


def test_a_spent_budget_gives_no_rows():
    budget = ChunkBudget(8, 8, 0.0)
    budget.take(8, 0)
    assert budget.is_spent
    assert budget.rows_at(0) == 0


def test_without_a_weight_of_the_context_every_chunk_is_whole():
    assert ChunkBudget(300, 256, 0.0).rows_at(100_000) == 256


def test_a_chunk_far_into_a_prompt_is_smaller():
    budget = ChunkBudget(300, 256, 1 / 1536)
    assert [budget.rows_at(start) for start in (0, 256, 768, 4096)] == [237, 207, 164, 69]
