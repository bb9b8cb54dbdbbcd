"""Which data-parallel rank of an engine takes a request. Pure.

Every rank has a KV cache of its own, so that what shares a prompt, or goes on from a turn before,
must be where its KV is; the rest goes where the least is in flight, in turn where it is equal.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator

_REMEMBERED = 100_000


class DataRanks:
    """The ranks of one engine."""

    def __init__(self, size: int) -> None:
        self._in_flight = [0] * size
        self._last = size - 1
        self._of: OrderedDict[Hashable, int] = OrderedDict()

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests of each rank."""
        return tuple(self._in_flight)

    def choose(self, key: Hashable) -> int | None:
        """Return the rank for a request, which is to be `running` at once; None if there is but
        one."""
        if len(self._in_flight) == 1:
            return None
        rank = self._of.get(key)
        if rank is None:
            size = len(self._in_flight)
            turns = ((self._last + turn) % size for turn in range(1, size + 1))
            rank = min(turns, key=self._in_flight.__getitem__)
            self._last = rank
        self._of[key] = rank
        self._of.move_to_end(key)
        while len(self._of) > _REMEMBERED:
            self._of.popitem(last=False)
        return rank

    @contextlib.contextmanager
    def running(self, rank: int | None) -> Iterator[None]:
        """Count a request on its rank."""
        self._in_flight[rank or 0] += 1
        try:
            yield
        finally:
            self._in_flight[rank or 0] -= 1
