"""Progress on standard error while something takes long; nothing where no terminal is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from nagara.base.units import format_bytes

_EVERY_S = 0.2


@contextmanager
def working(what: str) -> Iterator[None]:
    """A bar without an end for something that does not say how far it is."""
    with _progress() as progress:
        progress.add_task(what, total=None, said="")
        yield


@contextmanager
def counting(what: str) -> Iterator[Callable[[Callable[[], tuple[int, int]]], None]]:
    """Yields a function to be given another one, which tells how many files and bytes are done."""
    with _progress() as progress:
        task = progress.add_task(what, total=None, said="")
        asked: list[Callable[[], tuple[int, int]]] = []
        ended = threading.Event()

        def show() -> None:
            while not ended.wait(_EVERY_S):
                for ask in asked:
                    files, size = ask()
                    progress.update(task, said=f"{files} files, {format_bytes(size)}")

        shower = threading.Thread(target=show, daemon=True)
        shower.start()
        try:
            yield asked.append
        finally:
            ended.set()
            shower.join()


@contextmanager
def arriving(what: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to be told the size of each object that has come, from any thread."""
    lock = threading.Lock()
    come = [0, 0]
    with _progress() as progress:
        task = progress.add_task(what, total=None, said="")

        def arrived(size_bytes: int) -> None:
            with lock:
                come[0] += 1
                come[1] += size_bytes
                progress.update(task, said=f"{come[0]} objects, {format_bytes(come[1])}")

        yield arrived


@contextmanager
def steps(what: str, count: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to be called after each of so many steps, with what came of it.

    Where no terminal is, each is a line.
    """
    with _progress() as progress:
        task = progress.add_task(what, total=count, said="")
        done = 0

        def advance(said: str) -> None:
            nonlocal done
            done += 1
            if progress.disable:
                progress.console.print(f"{what} {done}/{count}: {said}", markup=False)
            progress.update(task, advance=1, said=f"{done}/{count}: {said}")

        yield advance


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[said]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
