"""Every block is in one place; named contents can be found until they are overwritten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.engine.blocks import BlockPool, chain_hash
from nagara.engine.errors import EngineError


def test_taken_blocks_are_distinct_and_come_back():
    pool = BlockPool(4, 16)
    blocks = [pool.take() for _ in range(4)]
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.available == 0
    with pytest.raises(IndexError):
        pool.take()
    pool.release(blocks)
    assert pool.available == 4
    pool.audit([])


def test_a_named_block_is_found_after_its_release_until_it_is_overwritten():
    pool = BlockPool(2, 16)
    block = pool.take()
    name = chain_hash(b"", [1] * 16)
    pool.publish(block, name)
    pool.release([block])
    assert pool.find(name) == block
    pool.take()
    assert pool.find(name) == block  # the free block goes first
    pool.take()
    assert pool.find(name) is None


def test_the_end_of_a_prefix_is_overwritten_before_its_start():
    pool = BlockPool(3, 2)
    blocks = [pool.take() for _ in range(3)]
    names, parent = [], b""
    for i, block in enumerate(blocks):
        parent = chain_hash(parent, [i, i])
        names.append(parent)
        pool.publish(block, parent)
    pool.release(blocks)
    pool.take()
    assert [pool.find(name) for name in names] == [blocks[0], blocks[1], None]


def test_a_shared_block_stays_until_its_last_holder_leaves():
    pool = BlockPool(1, 16)
    block = pool.take()
    pool.publish(block, b"n")
    pool.share(block)
    pool.release([block])
    assert pool.held == 1
    pool.release([block])
    assert pool.held == 0


def test_a_twin_of_a_named_block_stays_nameless_and_is_freed():
    pool = BlockPool(2, 16)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.release([second])
    assert pool.find(b"same") == first
    assert pool.take() == second
    pool.audit([[first], [second]])


def test_a_name_depends_on_everything_before_it():
    assert chain_hash(chain_hash(b"", [1]), [2]) != chain_hash(chain_hash(b"", [3]), [2])
    assert chain_hash(b"", [1, 2]) != chain_hash(b"", [12])


def test_releasing_twice_and_a_lost_block_are_noticed():
    pool = BlockPool(2, 16)
    block = pool.take()
    with pytest.raises(EngineError):
        pool.audit([])
    pool.release([block])
    with pytest.raises(EngineError):
        pool.release([block])


def test_without_caching_nothing_is_named():
    pool = BlockPool(1, 16, is_caching=False)
    pool.publish(pool.take(), b"n")
    assert pool.find(b"n") is None


@given(st.lists(st.tuples(st.sampled_from("trps"), st.integers(0, 5)), max_size=60))
def test_the_pool_stays_whole_under_any_sequence_of_calls(actions):
    pool = BlockPool(5, 2)
    tables: list[list[int]] = []
    for action, number in actions:
        if action == "t" and pool.available:
            tables.append([pool.take()])
        elif action == "r" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif action == "p" and tables:
            pool.publish(tables[number % len(tables)][0], bytes([number]))
        elif action == "s":
            block = pool.find(bytes([number]))
            if block is not None:
                pool.share(block)
                tables.append([block])
        pool.audit(tables)
    for table in tables:
        pool.release(table)
    pool.audit([])
    assert pool.available == 5
