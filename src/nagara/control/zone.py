"""Which machines serve their objects to the others, and telling every machine of them.

A machine says in its facts where its objects are served. Every other one is told all such
addresses when it joins, when they change, and again now and then: its agent may have been replaced
by one that knows nothing. So nobody sets them by hand. Called on the loop.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nagara.base.clock import Clock
from nagara.base.errors import NagaraError
from nagara.contract.node import Node
from nagara.contract.replica import NodeFacts

OWN = ""  # the name of this machine here
MOST_CACHES = 3  # that one machine is told of: each is asked for what it may not have
TICK_S = 1.0
TELL_AGAIN_S = 30.0
_ANSWER_S = 5.0
_AT_ONCE = 32

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Told:
    caches: tuple[str, ...]
    at_s: float
    facts: NodeFacts


class Zone:
    """The caches of one pool's machines.

    Args:
        nodes: all machines whose agents have answered, this one as `OWN`.
    """

    def __init__(self, nodes: Callable[[], Mapping[str, Node]], clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._at: dict[str, str] = {}  # machine: address of its cache

    @property
    def caches(self) -> tuple[str, ...]:
        """The addresses: this machine's first, so that all ask the same ones in the same order."""
        found = [address for _, address in sorted(self._at.items())]  # `OWN` is the smallest name
        return tuple(dict.fromkeys(found))[:MOST_CACHES]

    def host_class(self, machine: str) -> str:
        """What the machine says of the snapshots that fit it; empty where it has not said yet."""
        told = self._told.get(machine)
        return "" if told is None else told.facts.host_class

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.tell_all()
            await self._clock.sleep(TICK_S)

    async def tell_all(self) -> None:
        """Tells those that do not know the present caches, or were told long ago."""
        nodes = self._nodes()
        for gone in self._told.keys() - nodes.keys():
            del self._told[gone]
            self._at.pop(gone, None)
        due = [name for name in nodes if self._is_due(name)]
        for begin in range(0, len(due), _AT_ONCE):
            some = due[begin : begin + _AT_ONCE]
            await asyncio.gather(*(self.tell(name, nodes[name]) for name in some))

    def knows(self, machine: str) -> bool:
        """Whether the machine was told of the present caches."""
        told = self._told.get(machine)
        return told is not None and told.caches == self.caches

    def _is_due(self, machine: str) -> bool:
        if not self.knows(machine):
            return True
        return self._clock.monotonic_s() - self._told[machine].at_s >= TELL_AGAIN_S

    async def tell(self, machine: str, node: Node) -> None:
        """Tells one machine. One that does not answer is told later."""
        caches = self.caches
        try:
            async with asyncio.timeout(_ANSWER_S):
                facts = await node.use_caches(caches)
        except (NagaraError, TimeoutError) as error:
            _log.debug("%s is not told of the caches: %s", machine or "this machine", error)
            return
        self._told[machine] = _Told(caches, self._clock.monotonic_s(), facts)
        self._at.pop(machine, None)
        if facts.cache is not None:
            self._at[machine] = facts.cache
