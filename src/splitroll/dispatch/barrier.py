"""What a weight update holds up: attempts that are to begin, and KV between two engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

from splitroll.dispatch.gate import Turnstile
from splitroll.dispatch.progress import Crossing, Progress
from splitroll.errors import FleetFenced

_POLL_S = 0.005
_FENCE_POLL_S = 1.0


class Barrier:
    """Lets attempts begin, or not, and interrupts what may not go on; see `splitroll.updater`.

    Attributes:
        ending_early: samples are being ended as they are.
        paused: nothing is let in, updates or not; whoever unsets it reopens, see `Rest.thaw`.
    """

    def __init__(self, recovery_timeout_s: float) -> None:
        self.ending_early = False
        self.paused = False
        self._recovery_timeout_s = recovery_timeout_s
        self._turnstile = Turnstile()
        self._inside: set[Progress] = set()
        self._crossings: set[Crossing] = set()
        self._fence: str | None = None

    @contextlib.contextmanager
    def inside(self, progress: Progress) -> Generator[None, None, None]:
        """Count as an attempt that is under way."""
        progress.may_end_early = False
        self._inside.add(progress)
        try:
            with self._turnstile.inside():
                yield
        finally:
            self._inside.discard(progress)

    def arrived(self, crossing: Crossing) -> None:
        """Note that KV is where it is used: an update need not interrupt it any more."""
        self._crossings.discard(crossing)

    async def let_in(self) -> None:
        """Wait until attempts may begin; a weight update that is under way has its own limits."""
        while not self._turnstile.is_open:
            fence = self._fence
            limit_s = self._recovery_timeout_s if fence else _FENCE_POLL_S
            try:
                async with asyncio.timeout(limit_s):
                    await self._turnstile.opened()
            except TimeoutError:
                if fence is not None and self._fence is not None:
                    raise FleetFenced(self._fence) from None

    @contextlib.contextmanager
    def crossing(self, progress: Progress) -> Generator[Crossing, None, None]:
        """Let a weight update interrupt what is inside, until `_decode` takes the crossing off."""
        task = asyncio.current_task()
        assert task is not None, "attempts run in tasks"
        crossing = Crossing(task)
        self._crossings.add(crossing)
        try:
            yield crossing
        except asyncio.CancelledError:
            if not crossing.interrupted or task.uncancel() > 0:
                raise
            progress.interrupted = True
        finally:
            self._crossings.discard(crossing)

    @property
    def is_fenced(self) -> bool:
        return self._fence is not None

    def shut(self, *, partial: bool) -> None:
        """Let no attempt begin.

        Args:
            partial: samples that engines end early are returned as they are, also those of
                attempts that are under way now and come in when all is open again.
        """
        if partial:
            for progress in self._inside:
                progress.may_end_early = True
        self.ending_early = partial
        self._fence = None  # who waits for it, waits for the update
        self._turnstile.shut()

    async def drained(self) -> None:
        """Return when no attempt is under way."""
        await self._turnstile.empty()

    async def interrupt_crossings(self) -> None:
        """Cancel every attempt whose KV is between two engines, on both sides, and return when all
        have ended; they are repeated when work is let in again."""
        while self._crossings:
            for crossing in self._crossings:
                if not crossing.interrupted:
                    crossing.interrupted = True
                    crossing.task.cancel()
            await asyncio.sleep(_POLL_S)

    def reopen(self) -> None:
        """Let attempts begin again, unless all is paused."""
        self.ending_early = False
        self._fence = None
        if not self.paused:
            self._turnstile.open()

    def pause(self, *, partial: bool) -> None:
        """Let nothing begin while `paused`; see `shut`. Not while there is a fence."""
        self.paused = True
        self.shut(partial=partial)

    def check_fence(self) -> None:
        """
        Raises:
            FleetFenced: a weight update failed, and none has succeeded since.
        """
        if self._fence is not None:
            raise FleetFenced(self._fence)

    def fence(self, cause: str) -> None:
        """Stay shut after a failed update: what is accepted waits for another one to succeed, and
        fails with the cause when none does within `limits.recovery_timeout_s`."""
        self.ending_early = False
        self._fence = cause
