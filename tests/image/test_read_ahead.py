import threading

import pytest

from nagara.image.read_ahead import CHUNKS_AHEAD, WAITS, ReadAhead, Sequence
from nagara.store.errors import UnavailableError
from nagara.store.names import CHUNK_BYTES, ObjectName

_COUNT = 100
_LARGE = ObjectName(b"\1" * 32, _COUNT * CHUNK_BYTES)


def read_in_order(sequence: Sequence, chunks: range) -> list[range]:
    """What is to be got ready at each chunk; chunks that were got ready need no wait."""
    asked: set[int] = set()
    found = []
    for chunk in chunks:
        found.append(sequence.read(chunk, is_ready=chunk in asked))
        asked |= set(found[-1])
    return found


def test_a_reader_in_sequence_is_got_ahead_of_and_each_chunk_is_asked_for_once() -> None:
    wanted = read_in_order(Sequence(_COUNT), range(_COUNT))
    assert not any(wanted[: WAITS - 1])
    assert wanted[WAITS - 1] == range(WAITS, WAITS + 1)
    asked = [chunk for each in wanted for chunk in each]
    assert asked == list(range(WAITS, _COUNT))
    ahead = [each.stop - 1 - chunk for chunk, each in enumerate(wanted) if each]
    assert max(ahead) == CHUNKS_AHEAD


def test_what_was_ready_all_the_time_needs_nothing_ahead() -> None:
    sequence = Sequence(_COUNT)
    assert not any(sequence.read(chunk, is_ready=True) for chunk in range(_COUNT))


def test_a_reader_that_jumps_is_not_got_ahead_of() -> None:
    sequence = Sequence(_COUNT)
    assert not any(sequence.read(chunk * 7 % _COUNT, is_ready=False) for chunk in range(_COUNT))
    read_in_order(sequence, range(20, 30))
    assert not sequence.read(70, is_ready=False)
    assert not sequence.read(71, is_ready=False)
    assert sequence.read(72, is_ready=False) == range(73, 74)


def test_requests_that_overtake_each_other_are_one_sequence() -> None:
    sequence = Sequence(_COUNT)
    order = [0, 0, 1, 0, 1, 2, 1, 2, 2, 3]
    wanted = [sequence.read(chunk, is_ready=False) for chunk in order]
    assert [chunk for each in wanted for chunk in each] == [3, 4, 5]


@pytest.mark.parametrize("error", [UnavailableError("not now"), OSError(5, "broken"), None])
def test_chunks_are_got_ready_whatever_became_of_others(error: Exception | None) -> None:
    reached = threading.Semaphore(0)
    places: list[int] = []

    def prepare(name: ObjectName, start: int, deadline_s: float) -> None:
        assert name == _LARGE
        places.append(start)
        reached.release()
        if error is not None:
            raise error

    ahead = ReadAhead(prepare)
    for chunk in range(6):
        ahead.read(_LARGE, chunk * CHUNK_BYTES + 5, is_ready=False)
    for _ in range(10):
        assert reached.acquire(timeout=60)
    assert set(places) == {chunk * CHUNK_BYTES for chunk in range(3, 13)}
