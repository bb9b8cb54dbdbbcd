"""Which engine holds which prefix blocks in its cache, as far as can be known from outside. Pure.

Fed by what was dispatched and bounded like the engines' caches: the least recently used block goes
first. What an engine turns out to have lacked, it has computed by the time that it says so; but how
much it keeps is learnt from it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

BlockHash = int

_SHRINK, _GROW = 0.9, 1.02
_LEAST_KEPT = 1.0


def block_hashes(
    token_ids: Sequence[int], block_size: int, salt: str | None = None
) -> tuple[BlockHash, ...]:
    """Return one hash per full block, each of it and all before it."""
    hashes = []
    last = hash(salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        last = hash((last, tuple(token_ids[end - block_size : end])))
        hashes.append(last)
    return tuple(hashes)


class PrefixIndex:
    """Engines are numbered from 0; sets of them are bit masks.

    Attributes:
        room: blocks that each engine can take before it drops any that it is believed to keep.
    """

    def __init__(self) -> None:
        self.room: list[int] = []
        self._holders: defaultdict[BlockHash, int] = defaultdict(int)
        self._held: dict[int, OrderedDict[BlockHash, None]] = {}
        self._capacity: dict[int, int] = {}
        self._kept: dict[int, float] = {}
        """Blocks that each engine is believed to keep, of its capacity at most."""

    def join(self, engine: int, capacity_blocks: int) -> None:
        """Note an engine with an empty cache; they join in the order of their numbers."""
        self.room.append(0)
        self._capacity[engine] = capacity_blocks
        self._kept[engine] = float(capacity_blocks)
        self.forget(engine)

    def forget(self, engine: int) -> None:
        """Note that an engine's cache is empty: it restarted, or its weights changed."""
        for block in self._held.pop(engine, ()):
            self._drop_holder(block, engine)
        self._held[engine] = OrderedDict()
        self._evict(engine)

    def add(self, engine: int, blocks: Sequence[BlockHash]) -> None:
        """Note that an engine holds these blocks, or is about to."""
        held, bit = self._held[engine], 1 << engine
        for block in blocks:
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                self._holders[block] |= bit
        self._evict(engine)

    def observe(self, engine: int, expected: int, found: int) -> None:
        """Learn from a prompt of which an engine was expected to hold so many leading blocks, and
        held so many: where it held fewer, it keeps less than was believed, since what it generates
        takes room too, and older blocks are gone as well."""
        if found < expected:
            self._kept[engine] = max(_LEAST_KEPT, _SHRINK * len(self._held[engine]))
            self._evict(engine)
        elif expected:
            self._kept[engine] = min(self._capacity[engine], _GROW * self._kept[engine])
            self._evict(engine)

    def _evict(self, engine: int) -> None:
        held, kept = self._held[engine], self._kept[engine]
        while len(held) > kept:
            block, _ = held.popitem(last=False)
            self._drop_holder(block, engine)
        self.room[engine] = int(kept) - len(held)

    def depths(self, blocks: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """Return (mask of engines, leading blocks that exactly these hold), deepest last; engines
        that hold none are left out."""
        found: list[tuple[int, int]] = []
        mask = 0
        for depth, block in enumerate(blocks):
            holders = self._holders.get(block, 0)
            if depth == 0:
                mask = holders
            elif (gone := mask & ~holders) != 0:
                found.append((gone, depth))
                mask &= holders
            if not mask:
                return found
        if mask:
            found.append((mask, len(blocks)))
        return found

    def _drop_holder(self, block: BlockHash, engine: int) -> None:
        rest = self._holders[block] & ~(1 << engine)
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]
