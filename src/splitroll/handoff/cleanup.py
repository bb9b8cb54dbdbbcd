"""Work that must happen after a request has already ended, each with a limit and an owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Cleanup:
    """Owns background clean-up tasks; none is lost, none outlives `close`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.failures = 0
        """Clean-ups that failed or exceeded their limit; each is also logged."""

    def spawn(self, what: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` in the background; `what` names it in the log when it fails."""
        task = asyncio.create_task(self._run(what, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait until everything spawned has ended; each task has its own limit."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """End what still runs: the engines that it would tidy are about to end too."""
        for task in self._tasks:
            task.cancel()
        await self.drain()

    async def _run(self, what: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await work
        except asyncio.CancelledError:
            raise
        except Exception as exc:  # a wall: the request that caused this has already been answered
            self.failures += 1
            log.warning("clean-up failed: %s: %s: %s", what, type(exc).__name__, exc)
