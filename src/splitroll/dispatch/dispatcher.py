"""Brings groups through the fleet: accepted, let in, tried until they are complete.

How an attempt goes is the courier's.

Invariants:
- every accepted group leaves exactly once: complete, or with an error that names each cause;
- a failed leg is tried again as a whole, new prefill and new handle, on other engines; then
  without a handoff; samples that completed meanwhile are kept, and so are finished segments;
- while a weight update is under way no attempt begins, and one whose KV is still between two
  engines can be interrupted: it is repeated afterwards, and does not count as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Generator

from splitroll.config.schema import Dispatch, Limits
from splitroll.dispatch.allocator import Allocator
from splitroll.dispatch.assembly import GroupWork
from splitroll.dispatch.barrier import Barrier
from splitroll.dispatch.courier import Courier
from splitroll.dispatch.gate import WeightedGate
from splitroll.dispatch.ledger import DispatchStats, Ledger
from splitroll.dispatch.progress import Listener, Progress, ended_early
from splitroll.errors import GroupFailed, InvalidRequest, Problem, SplitrollError
from splitroll.fleet.fleet import Fleet
from splitroll.handoff.legs import Handoff
from splitroll.types import Group, Prompt, Role, Sample

_DECODERS = (Role.DECODE, Role.BOTH)
_DECODE_KV_OVERCOMMIT = 2.0
"""Groups let in, by their longest possible samples, over what decode engines can hold: most samples
end well before max_tokens, and vLLM preempts where they do not."""
_STOP_POLL_S = 0.05
_HEAD_START_S = 60.0
"""By how much at most a group may go before others that came earlier: none starves."""


class Dispatcher:
    """See the module's docstring. Owns no engine and no task beyond its callers'.

    Args:
        moves: whether samples may move between engines, with their KV, after a segment.
    """

    def __init__(
        self,
        fleet: Fleet,
        handoff: Handoff,
        settings: Dispatch,
        limits: Limits,
        *,
        moves: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.barrier = Barrier(limits.recovery_timeout_s)
        self.allocator = Allocator(
            settings.policy,
            elastic=settings.roles == "elastic",
            spread=settings.decode_engines_per_group,
        )
        self._ledger = Ledger(self.allocator)
        self._fleet = fleet
        self._handoff = handoff
        self._courier = Courier(
            fleet,
            handoff,
            self.allocator,
            self.barrier,
            self._ledger,
            segment_tokens=settings.segment_tokens,
            moves=moves and settings.policy == "adaptive" and settings.roles == "elastic",
            clock=clock,
        )
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._seats = WeightedGate(0)
        self._decode_kv = WeightedGate(0)
        self._resize()
        fleet.on_change(self._resize)

    async def run(
        self,
        work: GroupWork,
        stop: asyncio.Event | None = None,
        listener: Listener | None = None,
    ) -> Group:
        """Generate one group.

        Args:
            stop: when it is set, the group is returned as far as it is, samples that have not ended
                with the reason "abort".
            listener: who follows the samples meanwhile, and may drop some, which then end so too.

        Raises:
            GroupFailed: when no route completed it.
            InvalidRequest: when an engine refused the request itself.
            FleetFenced: a weight update failed, and none succeeded in time.
        """
        progress = self._accept(work)
        if listener is not None:
            progress.listener = listener
        try:
            if stop is None:
                await self._complete(progress)
            else:
                await self._complete_or_stop(progress, stop)
        finally:
            self.allocator.withdraw(progress.piece)
        if progress.ending:
            for index in progress.missing:
                progress.finish(index, ended_early(progress, index))
        if progress.missing:
            causes = list(dict.fromkeys(progress.causes)) or ["no engine is up"]
            raise GroupFailed(work.prompt.id, causes)
        return Group(
            prompt=work.prompt,
            samples=tuple(progress.done[i] for i in range(work.n)),
            recomputed_tokens=progress.recomputed_tokens,
        )

    def _accept(self, work: GroupWork) -> Progress:
        """Note what is to be done, so that whatever is placed meanwhile reckons with it."""
        done: dict[int, Sample] = {}
        begun: dict[int, Sample] = {}
        for index, sample in work.begun.items():
            (begun if sample.finish_reason == "abort" else done)[index] = sample
        piece = self._courier.piece(work, work.n - len(done), work.prompt.token_ids)
        version = self._fleet.weight_version
        return Progress(work, piece, self._clock(), version, begun=begun, done=done)

    async def _complete(self, progress: Progress) -> None:
        """Try until all samples are there, or nothing is left to try."""
        await asyncio.sleep(0)  # whatever was asked for together is known together
        work, piece = progress.work, progress.piece
        # A longer group is let in as if it had come earlier by the time that it takes; a turn of an
        # episode, whose KV is on an engine, ahead of what waits to begin.
        head_start_s = _HEAD_START_S
        if work.episode_id is None:
            head_start_s = min(_HEAD_START_S, self.allocator.alone_s(piece))
        key = progress.accepted_s - head_start_s
        missing = len(progress.missing)
        if not missing:
            return
        async with (
            self._seats.hold_parts(missing, missing, key) as seat,
            self._decode_kv.hold_parts(self._decode_blocks(work), missing, key) as blocks,
        ):
            # A sample that has ended makes room, whatever its siblings still do.
            progress.on_sample = lambda: (seat(), blocks())
            for number, attempt in enumerate(self._attempts(progress)):
                self.stats.retries += number > 0
                progress.engine_died = False
                await self._try(attempt, progress)
                if progress.refused is not None:
                    raise _naming(work.prompt, progress.refused)
                if progress.lost is not None:
                    progress.causes.append(progress.lost)
                    break
                if not progress.missing or progress.ending:
                    break

    async def _complete_or_stop(self, progress: Progress, stop: asyncio.Event) -> None:
        completing = asyncio.ensure_future(self._complete(progress))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([completing, stopping], return_when=asyncio.FIRST_COMPLETED)
            while not completing.done():
                progress.ending = True
                running = progress.listener.running
                if not running:
                    completing.cancel()  # it waits, or KV is on its way: nothing has begun
                for engine in {engine for engine, _ in running.values()}:
                    mine = [i for i, (where, _) in running.items() if where is engine]
                    with contextlib.suppress(SplitrollError):  # it is asked again
                        await engine.abort(mine)
                await asyncio.wait([completing], timeout=_STOP_POLL_S)
            if not completing.cancelled():
                completing.result()
        finally:
            completing.cancel()
            stopping.cancel()
            await asyncio.gather(completing, stopping, return_exceptions=True)

    def on_sample(self, note: Callable[[Sample], None]) -> None:
        """Have every sample noted that ends from now on."""
        self._ledger.on_sample(note)

    @property
    def stats(self) -> DispatchStats:
        return self._ledger.stats

    @property
    def cancelled_handles(self) -> int:
        """Handles that were given back, not pulled."""
        return self._handoff.cancelled

    @property
    def load(self) -> dict[str, int]:
        """Tokens in flight by engine; empty when nothing is in flight."""
        return self.allocator.books.load

    async def _try(
        self, attempt: Callable[[Progress], Awaitable[None]], progress: Progress
    ) -> None:
        """Make an attempt, and make it again when a weight update interrupted it, or the engine
        that was chosen left before its turn came."""
        while True:
            progress.interrupted = False
            await self.barrier.let_in()
            with self.barrier.inside(progress):
                await attempt(progress)
            if not (progress.interrupted and progress.missing):
                return

    def _attempts(
        self, progress: Progress
    ) -> Generator[Callable[[Progress], Awaitable[None]], None, None]:
        """Yield what to try next: the policy's route, then local; then, as long as it is engines
        that die, local again within the time that they have to come back."""
        for _ in range(self._settings.split_attempts):
            if self._fleet.ready():
                yield self._routed
        for _ in range(self._settings.local_attempts):
            yield self._local
        end_s = self._clock() + self._limits.recovery_timeout_s
        while progress.engine_died and self._clock() < end_s:
            yield self._local

    async def _routed(self, progress: Progress) -> None:
        """One attempt as the policy has it."""
        await self._courier.carry(progress, local=False)

    async def _local(self, progress: Progress) -> None:
        """One attempt without a handoff."""
        if await self._any_engine(progress):
            await self._courier.carry(progress, local=True)

    async def _any_engine(self, progress: Progress) -> bool:
        """Wait until any engine serves; False, and noted, when none does in time."""
        limit_s = self._limits.recovery_timeout_s
        if self._fleet.ready() or await self._fleet.wait_ready(timeout_s=limit_s):
            return True
        given_up = self._fleet.given_up
        progress.causes.append(given_up or f"no engine came back within {limit_s:g} s")
        return False

    def _resize(self) -> None:
        """Fit what is let in to the engines that serve now."""
        ready = {engine.info.name: engine for engine in self._fleet.ready()}
        books = self.allocator.books
        for name, engine in ready.items():
            if not books.knows(name):
                info = engine.info
                self.allocator.join(
                    name,
                    info.role,
                    seats=info.max_num_seqs,
                    num_blocks=info.num_blocks,
                    block_size=info.block_size,
                    block_bytes=info.block_bytes,
                )
        for number in range(len(books)):
            self.allocator.set_up(number, books.name(number) in ready)
        elastic = self._settings.roles == "elastic"
        engines = list(ready.values()) if elastic else self._fleet.ready(*_DECODERS)
        engines = engines or list(ready.values())
        if engines:  # with none, groups wait for one inside their attempt
            self._seats.set_capacity(sum(engine.info.max_num_seqs for engine in engines))
            blocks = sum(engine.info.num_blocks for engine in engines)
            self._decode_kv.set_capacity(int(blocks * _DECODE_KV_OVERCOMMIT))

    def _decode_blocks(self, work: GroupWork) -> int:
        """Return the KV blocks that a group takes on decode if every sample is as long as it may
        be; its full prompt blocks are shared."""
        sizes = [engine.info.block_size for engine in self._fleet.ready()]
        size = min(sizes, default=1)
        own_tokens = len(work.prompt.token_ids) % size + work.sampling.max_tokens
        return len(work.prompt.token_ids) // size + work.n * math.ceil(own_tokens / size)


def _naming(prompt: Prompt, refused: InvalidRequest) -> InvalidRequest:
    """Return an engine's refusal with the prompt that it concerns."""
    path = f"prompt {prompt.id}"
    return InvalidRequest([Problem(path, p.found, p.allowed, p.hint) for p in refused.problems])
