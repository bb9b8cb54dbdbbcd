"""Brings a fleet to rest, and lets it go on: pauses, and the rest that a weight update needs.

Invariants:
- what a pause keeps still stands still until the pause is over, whatever updates come and go;
- at rest, no KV is in flight between engines, and no engine joins;
- where neither a pause, nor an update, nor a fence holds the fleet up, it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Literal

from splitroll.config.schema import Weights
from splitroll.dispatch.barrier import Barrier
from splitroll.engines.protocol import Engine
from splitroll.errors import Conflict, EngineDied, LegError, Problem
from splitroll.fleet.fleet import Fleet
from splitroll.handoff.legs import Handoff

log = logging.getLogger(__name__)

PauseMode = Literal["wait", "abort", "keep"]
"""What a pause does to samples under way: waits for them, ends them as they are, or lets them stand
still until the fleet goes on."""

_KEEP, _UPDATE = "keep", "update"
_POLL_S = 0.002
_IDLE_POLL_S = 0.05
_ABORTED_TIMEOUT_S = 2.0
_ABORT_AGAIN_S = 0.1


class Rest:
    """What stands still in a fleet, and why.

    Attributes:
        updating: the weight version that is being pushed; None if none is.
    """

    def __init__(self, fleet: Fleet, barrier: Barrier, handoff: Handoff, settings: Weights) -> None:
        self.updating: int | None = None
        self._fleet = fleet
        self._barrier = barrier
        self._handoff = handoff
        self._settings = settings
        self._closed_for: set[object] = set()
        """Why no engine joins."""
        self._closing = asyncio.Lock()
        self._keeps = False
        self._stilling = asyncio.Lock()
        self._frozen: dict[str, Engine] = {}
        """Engines by name that a pause keeps still, with what they have."""
        fleet.on_change(self._let_back_in)

    async def pause(self, mode: PauseMode) -> None:
        """See `Rollout.pause`."""
        if mode == "keep":  # who joins must be proven, and who leaves must end what it has
            await self.scaled("pause")
        if self.updating is not None:
            found = f"version {self.updating} is being pushed"
            raise Conflict([Problem("pause", found, "no update under way", "wait for it")])
        if self._barrier.is_fenced:
            allowed, hint = "a fleet that serves", "push weights: it serves nothing until then"
            raise Conflict([Problem("pause", "a failed update's fence", allowed, hint)])
        self._barrier.pause(partial=mode == "abort")
        self._keeps |= mode == "keep"
        async with asyncio.timeout(self._settings.timeout_s):
            if mode == "keep":
                await self._freeze()
            else:
                async with self._stilling:
                    await self._unfreeze()  # what an earlier pause kept
                if mode == "abort":
                    await self._end_all_work()
                await self._barrier.drained()
        if not self._barrier.paused:
            raise Conflict([Problem("pause", "resumed meanwhile", "one at a time", "ask again")])

    async def resume(self) -> None:
        """See `Rollout.resume`."""
        self._barrier.paused = False  # first, so that a pause that is still under way sees it
        await self.thaw()

    @property
    def keeps_still(self) -> bool:
        """Whether a pause keeps engines still with what they have, or is about to."""
        return self._keeps

    async def idle(self) -> None:
        """Wait until no update is under way."""
        while True:
            if self.updating is None:
                return
            await asyncio.sleep(_IDLE_POLL_S)

    async def scaled(self, what: str = "update_weights") -> None:
        """Wait until no engine is told to join or leave: who takes part must be known.

        Raises:
            Conflict: engines still are, after the time that an update has.
        """
        limit_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._fleet.scaled()
        except TimeoutError:
            found = f"engines that join or leave, for {limit_s:g} s (weights.timeout_s)"
            hint = "wait for `scale`, or raise weights.timeout_s"
            problem = Problem(what, found, "a fleet that stays as it is", hint)
            raise Conflict([problem]) from None

    async def _freeze(self) -> None:
        """Let all engines stand still with what they have; KV between two is not waited for. No
        engine joins meanwhile: nothing can be proven with one that stands still."""
        try:
            await self._close_membership(_KEEP)
            await self._barrier.interrupt_crossings()
            await self._handoff.settled()
            for engine in self._fleet.working():
                await self._unpinned(engine)
                async with self._stilling:
                    if not self._barrier.paused:  # it was taken back meanwhile
                        break
                    self._frozen[engine.info.name] = engine
                    with contextlib.suppress(EngineDied):  # the health check sees to it
                        await engine.pause()
        finally:
            await self.thaw()

    async def _end_all_work(self) -> None:
        """End what all engines generate; a proof under way, which would end too, goes first."""
        why = object()
        await self._close_membership(why)
        try:
            await asyncio.gather(*(self._end_work(e) for e in self._fleet.working()))
        finally:
            self._open_membership(why)

    async def _end_work(self, engine: Engine) -> None:
        """End what an engine generates, and leave it able to go on; one that dies ends it too."""
        try:
            try:
                await self._abort(engine)
            finally:
                await self.go_on(engine)
        except EngineDied as exc:
            self._fleet.report_death(engine, exc.cause)
        except LegError as exc:
            log.warning("%s did not end its work: %s", engine.info.name, exc)

    async def thaw(self) -> None:
        """Let the fleet go on once neither a pause, nor an update, nor a fence holds it up; the end
        of each asks for this."""
        async with self._stilling:
            if not self._is_held_up:
                await self._unfreeze()
        if not self._is_held_up:
            self._barrier.reopen()

    @property
    def _is_held_up(self) -> bool:
        return self._barrier.paused or self._barrier.is_fenced or self.updating is not None

    async def _unfreeze(self) -> None:
        """Let the engines go on that a pause keeps still; only while `_stilling` is held."""
        frozen, self._frozen, self._keeps = self._frozen, {}, False
        self._open_membership(_KEEP)
        await asyncio.gather(*(self.go_on(engine) for engine in frozen.values()))

    def stays_still(self, engine: Engine) -> bool:
        """Return whether a pause keeps an engine still."""
        return self._barrier.paused and self._frozen.get(engine.info.name) is engine

    async def come_to_rest(self, held: contextlib.ExitStack) -> list[Engine]:
        """See that no KV is in flight, and that no engine joins; returns those that serve."""
        if self._settings.in_flight != "drain":
            await self._barrier.interrupt_crossings()
        if not self._fleet.ready():
            await self._fleet.wait_ready(timeout_s=self._settings.timeout_s)
        await self._close_membership(_UPDATE)
        engines = self._fleet.ready()
        held.enter_context(self._fleet.unwatched(engines))
        await self._handoff.settled()
        await asyncio.gather(*(self._unpinned(engine) for engine in engines))
        return engines

    async def _unpinned(self, engine: Engine) -> None:
        """Return when no KV of this engine waits for another, or it died."""
        with contextlib.suppress(EngineDied):
            while True:
                if not (await engine.load()).pinned:
                    return
                await asyncio.sleep(_POLL_S)

    async def stop(self, engine: Engine) -> None:
        """Have an engine compute nothing until it is to `go_on`."""
        if self._settings.in_flight == "abort":
            await self._abort(engine)
        else:
            await engine.pause()

    async def _abort(self, engine: Engine) -> None:
        """End what an engine generates, also what reaches it only now, and see it collected."""
        end_s = time.monotonic() + _ABORTED_TIMEOUT_S
        while time.monotonic() < end_s:
            await engine.pause(abort=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_AGAIN_S):
                    await self._barrier.drained()
                    return

    async def go_on(self, engine: Engine) -> None:
        """Let an engine go on; one that does not is replaced."""
        limit_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.resume()
        except Exception as exc:  # a wall: whatever it was, it computes nothing
            cause = str(exc) or f"it did not go on in {limit_s:g} s (weights.timeout_s)"
            self._fleet.report_death(engine, cause)

    def open_membership(self) -> None:
        """Let engines join again after an update."""
        self._open_membership(_UPDATE)

    async def _close_membership(self, why: object) -> None:
        """Return when no engine is joining; none joins until all reasons are taken back."""
        async with self._closing:
            if not self._closed_for:
                await self._fleet.close_membership()
            self._closed_for.add(why)

    def _open_membership(self, why: object) -> None:
        if why in self._closed_for:
            self._closed_for.remove(why)
            if not self._closed_for:
                self._fleet.open_membership()

    def _let_back_in(self) -> None:
        """When all engines have died, let in those that come back: nobody is left that stands
        still, or with half of an update."""
        if not self._fleet.working():
            self._open_membership(_KEEP)
        if self._barrier.is_fenced and not self._fleet.ready():
            self.open_membership()
