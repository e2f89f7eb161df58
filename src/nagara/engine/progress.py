"""How far a long `generate` has come. Runs on the caller's thread."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]  # (ended, all)


@contextmanager
def shown_progress(wanted: Progress | bool, total: int) -> Iterator[Progress]:
    """The function to call at each end: the caller's own, one that draws a bar, or one that rests.

    A bar is drawn on standard error, and only if that is a terminal.
    """
    if callable(wanted):
        yield wanted
        return
    if not wanted or not sys.stderr.isatty():
        yield lambda _ended, _all: None
        return
    from tqdm import tqdm  # comes with transformers; needed for the bar alone

    with tqdm(total=total, unit="prompt", file=sys.stderr) as bar:
        yield lambda ended, _all: bar.update(ended - bar.n)
