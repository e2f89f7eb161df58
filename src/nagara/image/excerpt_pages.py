"""Excerpts in a lazy data layer: their pages are in the kernel's cache when a file is opened.

Nothing of such a file is fetched then. What is read beyond its excerpt is asked for like anything
else that is not here. Called from any thread.
"""

import logging
import threading
from collections.abc import Callable

from nagara.image.excerpts import Excerpts, Run, runs_of
from nagara.store.errors import StoreError
from nagara.store.flights import Flights
from nagara.store.names import ObjectName
from nagara.store.store import Store

_log = logging.getLogger(__name__)
Give = Callable[[ObjectName, int, memoryview], None]  # a file's bytes from a page on, to the kernel


class ExcerptPages:
    """The excerpts that a layer's files may be opened with.

    Args:
        store: has the excerpts' objects, or fetches them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._give: Give | None = None
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Excerpts, dict[ObjectName, list[Run]]]] = {}  # by holder
        self._given: set[ObjectName] = set()
        self._giving = Flights()

    def begin(self, give: Give) -> None:
        """From now on excerpts count. Only for a layer whose files nobody has open: to give pages
        waits for reads of the same ones."""
        self._give = give

    def add(self, holder: str, excerpts: Excerpts) -> None:
        """Files are going to be opened for a holder that these are of."""
        with self._lock:
            self._known = {**self._known, holder: (excerpts, runs_of(excerpts.members))}

    def forget(self, holder: str) -> None:
        """The holder is gone."""
        with self._lock:
            self._known = {key: known for key, known in self._known.items() if key != holder}

    def is_given(self, name: ObjectName) -> bool:
        """What a start reads of the file was given to the kernel."""
        return name in self._given

    def has(self, name: ObjectName) -> bool:
        """There is an excerpt to be given."""
        return self._give is not None and self._find(name) is not None

    def give(self, name: ObjectName, deadline_s: float) -> bool:
        """Gives the kernel the excerpt of a file that it is about to open, once; False if it cannot
        be had."""
        try:
            self._giving.run(name, lambda: self._give_once(name, deadline_s), deadline_s)
        except (StoreError, OSError) as error:
            _log.warning("the excerpt of %s is not used: %s", name, error)
            return False
        return True

    def _give_once(self, name: ObjectName, deadline_s: float) -> None:
        if name in self._given:
            return
        found = self._find(name)
        if found is None or self._give is None:  # forgotten meanwhile
            return
        excerpts, runs = found
        room = memoryview(bytearray(max(run.length for run in runs)))
        for start, length, place, offset in runs:
            reader = self._store.open(excerpts.objects[place], deadline_s)
            reader.read_into(room[:length], offset, deadline_s)
            self._give(name, start, room[:length])
        self._given.add(name)

    def _find(self, name: ObjectName) -> tuple[Excerpts, list[Run]] | None:
        known = self._known.values()
        return next(((excerpts, runs[name]) for excerpts, runs in known if name in runs), None)
