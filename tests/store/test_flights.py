"""Who waits for another one's work: what it gets, and when it works itself."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nagara.store.errors import CorruptError, StoreError, UnavailableError
from nagara.store.flights import Flights, range_claimed


class Work:
    """Calls that end as they are told to, in the order they began."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.ends: list[Future[None]] = [Future(), Future()]
        self.count = 0

    def __call__(self) -> None:
        end = self.ends[self.count]
        self.count += 1
        self.begun.release()
        end.result(60)


@pytest.fixture
def work() -> Work:
    return Work()


def soon() -> float:
    return time.monotonic() + 60


class Watched(dict[Any, Any]):
    """Tells when somebody finds another one at work."""

    def __init__(self) -> None:
        super().__init__()
        self.found = threading.Semaphore(0)

    def get(self, key: Any, default: Any = None) -> Any:
        flight = super().get(key, default)
        if flight is not None:
            self.found.release()
        return flight


@pytest.fixture
def company() -> Watched:
    return Watched()


@pytest.fixture
def flights(company: Watched) -> Flights:
    made = Flights()
    made._flying = company
    return made


@pytest.mark.parametrize(
    "error", [CorruptError("wrong", where="there"), UnavailableError("broken"), OSError(5, "x")]
)
def test_who_waits_gets_the_error_of_who_works(
    flights: Flights, company: Watched, work: Work, error: Exception
) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(flights.run, "key", work, soon())
        assert work.begun.acquire(timeout=60)
        second = pool.submit(flights.run, "key", work, soon())
        assert company.found.acquire(timeout=60)
        work.ends[0].set_exception(error)
        for each in (first, second):
            assert each.exception(60) is error
    assert work.count == 1


def test_who_waits_is_told_when_its_own_time_is_over(flights: Flights, work: Work) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(flights.run, "key", work, soon())
        assert work.begun.acquire(timeout=60)
        with pytest.raises(UnavailableError, match="not fetched in time"):
            flights.run("key", work, time.monotonic())
        work.ends[0].set_result(None)
        assert first.result(60)


def test_who_has_more_time_than_who_worked_works_itself(
    flights: Flights, company: Watched, work: Work
) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(flights.run, "key", work, time.monotonic())
        assert work.begun.acquire(timeout=60)
        second = pool.submit(flights.run, "key", work, soon())
        assert company.found.acquire(timeout=60)
        work.ends[0].set_exception(UnavailableError("did not finish in time"))
        with pytest.raises(StoreError, match="in time"):
            first.result(60)
        assert work.begun.acquire(timeout=60)
        work.ends[1].set_result(None)
        assert second.result(60)
    assert work.count == 2


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[int]:
    """A file that two open: the descriptor of the one who was first."""
    with (tmp_path / "object").open("w+b") as file:
        yield file.fileno()


def test_a_range_that_another_one_holds_for_too_long_is_held_by_both(
    shared: int, tmp_path: Path
) -> None:
    with (
        (tmp_path / "object").open("r+b") as other,
        range_claimed(shared, 0, 10, soon()),
        range_claimed(other.fileno(), 10, 10, time.monotonic()),
    ):
        begun_s = time.monotonic()
        with range_claimed(other.fileno(), 0, 10, begun_s + 0.4):
            assert 0.1 <= time.monotonic() - begun_s < 0.4, "nothing is left to do it in"
