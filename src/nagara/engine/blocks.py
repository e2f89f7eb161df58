"""The pool of KV blocks: who holds which block, and which ended prefixes can be used again.

Pure: block numbers and hashes only, no tensors. Owned by the step thread.

A block is in exactly one place:

    free      never used, or its content has no name
    idle      nobody holds it, but its content has a name (a prefix hash) and may be taken up again;
              the least recently used one is overwritten first
    held      by one sequence, or by several that share a prefix
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from nagara.engine.errors import EngineError


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block: its tokens and, through the parent's name, all before them."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16, key=parent).digest()


class BlockPool:
    """Hands out blocks `0 ... count - 1` of `size` tokens each."""

    def __init__(self, count: int, size: int, *, is_caching: bool = True) -> None:
        self.count = count
        self.size = size
        self._is_caching = is_caching
        self._free: deque[int] = deque(range(count))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * count
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self) -> int:
        """An empty block for one holder; an idle prefix is forgotten if there is no free one.

        Raises:
            IndexError: nothing is available.
        """
        if self._free:
            block = self._free.popleft()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._name_of.pop(block)]
        else:
            raise IndexError("no block is available")
        self._holders[block] = 1
        return block

    def find(self, name: bytes) -> int | None:
        """The block with that content, if it is still there."""
        return self._block_of.get(name)

    def share(self, block: int) -> None:
        """One holder more for a named block."""
        if self._holders[block] == 0:
            del self._idle[block]
        self._holders[block] += 1

    def is_idle(self, block: int) -> bool:
        return self._holders[block] == 0

    def publish(self, block: int, name: bytes) -> None:
        """Name a held block's content. The first of a name keeps it: a twin stays nameless."""
        if self._is_caching and name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each; the end of a prefix becomes overwritable before its start."""
        for block in reversed(blocks):
            if self._holders[block] <= 0:
                raise EngineError(f"block {block} is released but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._name_of:
                    self._idle[block] = None
                else:
                    self._free.appendleft(block)  # touched memory is used again first

    def forget(self) -> None:
        """Drop every idle prefix: the contents are gone."""
        for block in self._idle:
            del self._block_of[self._name_of.pop(block)]
            self._free.append(block)
        self._idle.clear()

    def resize(self, count: int) -> None:
        """Another number of blocks, all of them free. Raises EngineError while one is held."""
        if self.held:
            raise EngineError("the pool cannot change its size while blocks are held")
        self.count = count
        self._free, self._holders = deque(range(count)), [0] * count
        self._idle.clear()
        self._name_of.clear()
        self._block_of.clear()

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Check the pool against the block tables that exist.

        Raises:
            EngineError: a block is lost, held twice over, or in two places.
        """
        counted = [0] * self.count
        for table in tables:
            for block in table:
                counted[block] += 1
        places = [*self._free, *self._idle, *(b for b in range(self.count) if self._holders[b])]
        if sorted(places) != list(range(self.count)):
            raise EngineError("a block is lost or in two places")
        if counted != self._holders:
            raise EngineError("blocks are held by nobody's table, or tables name freed blocks")
        if any(self._block_of.get(name) != block for block, name in self._name_of.items()):
            raise EngineError("the names of blocks contradict each other")
