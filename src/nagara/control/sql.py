"""The SQL that both databases understand, and the shapes of what they give back.

Statements are written once: `?` for a value, `INSERT ... ON CONFLICT`, the types TEXT, INTEGER (64
bits) and REAL (64 bits), and `rowid` for the order in which rows came.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from nagara.contract.control_epoch import ControlEpoch

T = TypeVar("T")


class Row(Protocol):
    """One row: by number, by name, and as `dict(row)`."""

    def __getitem__(self, key: Any, /) -> Any: ...
    def keys(self) -> Any: ...


class Rows(Protocol):
    """What a statement gave."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Sql(Protocol):
    """A connection within one transaction."""

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Rows:
        """Runs one statement."""
        ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object:
        """Runs one statement for each set of values."""
        ...


class Database(Protocol):
    """The state's database, owned by this process while it is open.

    Attributes:
        epoch: of this process as its owner, from `open` on; larger than any owner's before.
        on_lost: called on the loop when another process has taken it over.
    """

    epoch: ControlEpoch
    on_lost: Callable[[], None]

    def is_held(self) -> bool:
        """Whether no other process can have taken it over yet. Does not ask the database."""
        ...

    async def open(self) -> None:
        """Connects and brings the schema up to date; may wait until it is this one's turn."""
        ...

    async def run(self, action: Callable[[Sql], T]) -> T:
        """Runs `action` as one transaction on the writer thread; its exception rolls back.

        Raises:
            ControlError: the database cannot be read or written.
            StateLostError: another process is the writer now.
        """
        ...

    async def close(self) -> None:
        """Waits for what was handed over, then leaves it to others."""
        ...


def put(table: str, key: Sequence[str], columns: Sequence[str]) -> str:
    """A statement that adds a row with these columns, or replaces the one of the same key."""
    places = ", ".join("?" for _ in columns)
    changed = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    # Names are written in the source, never taken from a request.
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"  # noqa: S608
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changed}"
    )
