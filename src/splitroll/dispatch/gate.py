"""A semaphore with weights, first come first served, whose capacity may change."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncGenerator, Callable, Generator


class WeightedGate:
    """Lets holders in while the sum of their weights fits the capacity, least key first.

    A weight above the capacity is let in alone, and nobody is let in past one who waits with a
    lesser key, so that nothing waits for ever as long as keys grow with time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []
        self._serial = itertools.count()

    @property
    def held(self) -> int:
        """Sum of the weights of those inside."""
        return self._held

    def set_capacity(self, capacity: int) -> None:
        """Change the capacity; those inside stay."""
        self._capacity = capacity
        self._admit()

    async def acquire(self, weight: int, key: float = 0.0) -> None:
        """Wait until there is room; those with equal keys in order of arrival."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (key, next(self._serial), weight, future))
        self._admit()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(weight)
            else:
                self._admit()
            raise

    def release(self, weight: int) -> None:
        """Leave; each `acquire` is released once."""
        self._held -= weight
        self._admit()

    @contextlib.asynccontextmanager
    async def hold(self, weight: int, key: float = 0.0) -> AsyncGenerator[None, None]:
        await self.acquire(weight, key)
        try:
            yield
        finally:
            self.release(weight)

    @contextlib.asynccontextmanager
    async def hold_parts(
        self, weight: int, parts: int, key: float = 0.0
    ) -> AsyncGenerator[Callable[[], None], None]:
        """Hold a weight of which a part may be given back early: yields what gives one back."""
        await self.acquire(weight, key)
        part = weight // parts
        held = weight

        def give_back() -> None:
            nonlocal held
            freed = min(part, held)
            held -= freed
            self.release(freed)

        try:
            yield give_back
        finally:
            self.release(held)

    def _admit(self) -> None:
        while self._waiting:
            _, _, weight, future = self._waiting[0]
            if future.cancelled():
                heapq.heappop(self._waiting)
                continue
            if self._held and self._held + weight > self._capacity:
                return
            heapq.heappop(self._waiting)
            self._held += weight
            future.set_result(None)


class Turnstile:
    """Lets work in while it is open, and tells when all that was inside has left."""

    def __init__(self) -> None:
        self._inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def opened(self) -> None:
        """Return when it is open."""
        await self._open.wait()

    @contextlib.contextmanager
    def inside(self) -> Generator[None, None, None]:
        """Count as inside; enter only while it is open."""
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    def shut(self) -> None:
        """Let nobody in; those inside go on."""
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def empty(self) -> None:
        """Return when nobody is inside."""
        await self._empty.wait()
