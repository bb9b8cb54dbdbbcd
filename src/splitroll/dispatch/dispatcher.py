"""Carries groups through the fleet: accepted, routed, prefilled, handed off, decoded, complete.

Invariants:
- every accepted group leaves exactly once: complete, or with an error that names each cause;
- a failed leg is tried again as a whole, new prefill and new handle, on other engines; then
  without a handoff; samples that completed meanwhile are kept, and so are finished segments;
- load counts from the moment work is given to an engine until it truly ends;
- while a weight update is under way no attempt begins, and one whose KV is still between two
  engines can be interrupted: it is repeated afterwards, and does not count as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from splitroll.config.schema import Dispatch, Limits
from splitroll.dispatch.allocator import Allocator, Piece
from splitroll.dispatch.assembly import (
    GroupWork,
    Leg,
    Segment,
    assemble,
    is_cut,
    next_segment,
)
from splitroll.dispatch.barrier import Barrier
from splitroll.dispatch.books import PrefillTicket
from splitroll.dispatch.gate import WeightedGate
from splitroll.dispatch.ledger import DispatchStats, Ledger
from splitroll.dispatch.policy import Part, share
from splitroll.dispatch.progress import (
    Crossing,
    Cut,
    Listener,
    Places,
    Progress,
    Source,
    ended_early,
)
from splitroll.engines.protocol import DecodeOutput, DecodeRequest, Engine, Tokens
from splitroll.errors import (
    EngineDied,
    GroupFailed,
    InvalidRequest,
    LegError,
    Problem,
    SplitrollError,
)
from splitroll.fleet.fleet import Fleet
from splitroll.handoff.handle import KvHandle
from splitroll.handoff.legs import DecodeResult, Handoff
from splitroll.types import Group, Prompt, Role, RouteKind, Sample, SamplingParams

log = logging.getLogger(__name__)

_DECODERS = (Role.DECODE, Role.BOTH)
_DECODE_KV_OVERCOMMIT = 2.0
"""Groups let in, by their longest possible samples, over what decode engines can hold: most samples
end well before max_tokens, and vLLM preempts where they do not."""
_KV_SHARE = 0.9
"""Of a prefill engine's KV that pinned handles may fill; the rest lets prompts be computed."""


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
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._moves = moves and settings.policy == "adaptive" and settings.roles == "elastic"
        self._ids = itertools.count()
        self._id_prefix = os.urandom(4).hex()
        self._kv_budgets: dict[str, WeightedGate] = {}
        self._seats = WeightedGate(0)
        self._decode_kv = WeightedGate(0)
        self._prefixes_of = fleet.weight_version
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
        piece = self._piece(work, work.n - len(done), work.prompt.token_ids)
        version = self._fleet.weight_version
        return Progress(work, piece, self._clock(), version, begun=begun, done=done)

    def _piece(self, work: GroupWork, samples: int, token_ids: Sequence[int]) -> Piece:
        age = len(token_ids) - len(work.prompt.token_ids)
        key = work.episode_id or hash(work.prompt.token_ids)
        max_tokens = work.sampling.max_tokens - age
        is_turn = work.episode_id is not None
        salt = work.cache_salt
        return self.allocator.accept(
            key, token_ids, samples, max_tokens, age=age, is_turn=is_turn, salt=salt
        )

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
                    with contextlib.suppress(EngineDied):
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
            with self.barrier.inside():
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
        await self._generate(progress, local=False)

    async def _local(self, progress: Progress) -> None:
        """One attempt without a handoff."""
        if await self._any_engine(progress):
            await self._generate(progress, local=True)

    async def _generate(self, progress: Progress, *, local: bool) -> None:
        """Place all that is missing, and carry it to its end, or to what stops it."""
        local = local or progress.work.local
        fresh = [i for i in progress.missing if i not in progress.begun]
        async with asyncio.TaskGroup() as tasks:
            for index in progress.missing:
                if index not in fresh:
                    tasks.create_task(self._go_on(index, progress, local=local))
            if not fresh:
                return
            self._track_weights()
            route = self.allocator.decide(
                progress.piece,
                self._clock(),
                samples=len(fresh),
                avoid=self._mask(progress.avoid),
                local=local,
            )
            if route is None:
                progress.causes.append("no engine is up")
                return
            why = self._ledger.explain(route)
            for part, indices in share(fresh, route.parts):
                # All load counts from now, before any task has begun.
                now = self._clock()
                ticket = self.allocator.begin_prefill(
                    part.prefill, progress.piece, now, coming=part.kv_tokens
                )
                self.allocator.note_prompt(part.decode, progress.piece)
                places = self._places(progress.piece, part.decode, indices)
                alone = len(route.parts) == 1
                carried = self._carry(part, ticket, places, progress, why, alone=alone)
                # By a callback: a task that is cancelled before it begins runs no code of its own.
                take_off = functools.partial(self._take_off, ticket, places)
                tasks.create_task(carried).add_done_callback(take_off)

    async def _carry(
        self,
        part: Part,
        ticket: PrefillTicket,
        places: Places,
        progress: Progress,
        why: Mapping[str, Any],
        *,
        alone: bool,
    ) -> None:
        """Take one part of a route to its end."""
        started_s = self._clock()
        if part.kv_from >= 0:
            await self._bring(part, ticket, places, progress, why)
            return
        if part.is_local:
            source = Source(None, RouteKind.LOCAL, started_s, why, ticket=ticket)
            await self._decode(places, source, progress)
            return
        prefill = self._engine(part.prefill)
        if prefill is None:
            progress.interrupted = True
            return
        with self.barrier.crossing(progress) as crossing:
            try:
                handle = await self._prefill(prefill, progress, progress.work.prompt.token_ids)
            finally:
                self.allocator.books.end_prefill(ticket, self._clock())
            if handle is None:
                return
            # No await since it was returned.
            if alone and self.allocator.policy.chooses_late:
                self._choose_again(part, places, progress)
            await self._hand_over(
                handle, places, RouteKind.SPLIT, started_s, why, progress, crossing
            )

    async def _bring(
        self,
        part: Part,
        ticket: PrefillTicket,
        places: Places,
        progress: Progress,
        why: Mapping[str, Any],
    ) -> None:
        """Move the KV of what is cached of a prompt to the engine that decodes, and go on there,
        with it or, if it did not come, without."""
        begun_s = self._clock()
        with self.barrier.crossing(progress) as crossing:
            came = await self._move_prefix(part, progress)
            self.barrier.arrived(crossing)
            moved = None
            if came:
                self.stats.moves += len(places.indices)
                moved = self.allocator.books.name(part.kv_from), self._clock() - begun_s
            else:
                ticket.cached = 0
            kind = RouteKind.MIGRATED if came else RouteKind.LOCAL
            source = Source(None, kind, self._clock(), why, ticket=ticket, moved=moved)
            await self._decode(places, source, progress)

    async def _move_prefix(self, part: Part, progress: Progress) -> bool:
        """Move a prompt's first tokens to another engine's cache; False if they did not come.

        vLLM's pull loads whole prompts. So they are a prompt of their own here, with the next
        token, which makes all blocks before it full ones.
        """
        token_ids = progress.work.prompt.token_ids[: part.kv_tokens + 1]
        holder, engine = self._engine(part.kv_from), self._engine(part.decode)
        if holder is None or engine is None:
            return False
        handle = await self._prefill(holder, progress, token_ids)
        if handle is None:
            return False
        request = DecodeRequest(
            self._new_id(),
            token_ids,
            SamplingParams(max_tokens=1),
            seed=0,
            cache_salt=progress.work.cache_salt,
            session=_session(progress.work),
        )
        version = self._fleet.weight_version
        result = await self._handoff.decode(engine, handle, [request], weight_version=version)
        source = Source(handle, RouteKind.MIGRATED, self._clock(), {})
        self._note_leg(result, source, engine, request, progress)
        return result.handed_off

    def _take_off(self, ticket: PrefillTicket, places: Places, task: object) -> None:
        """Take off all load of a part that it has not taken off itself."""
        self.allocator.books.end_prefill(ticket, self._clock())
        places.close()

    def _choose_again(self, part: Part, places: Places, progress: Progress) -> None:
        """Choose the decode engine now that the KV is there: the fleet has gone on meanwhile."""
        places.close()
        route = self.allocator.decide(
            progress.piece,
            self._clock(),
            samples=len(places.indices),
            held_by=part.prefill,
            avoid=self._mask(progress.avoid),
        )
        chosen = route is not None and len(route.parts) == 1
        places.take(route.parts[0].decode if route is not None and chosen else places.engine)

    async def _hand_over(
        self,
        handle: KvHandle,
        places: Places,
        kind: RouteKind,
        started_s: float,
        why: Mapping[str, Any],
        progress: Progress,
        crossing: Crossing,
    ) -> None:
        """Decode from a handle: where its KV is, without moving it, or elsewhere."""
        try:
            if self.allocator.books.name(places.engine) == handle.prefill_engine:
                self._handoff.give_back(handle)
                self.barrier.arrived(crossing)
                source = Source(None, RouteKind.LOCAL, started_s, why)
            else:
                source = Source(handle, kind, started_s, why, crossing)
            await self._decode(places, source, progress)
        finally:
            self._give_back(handle)  # also when we are cancelled before the decode leg begins

    async def _go_on(
        self, index: int, progress: Progress, *, local: bool = False, at: Cut | None = None
    ) -> None:
        """Go on with a sample of which a part is there.

        Args:
            at: where its last segment has just ended.
        """
        begun = progress.begun[index]
        if index in progress.listener.dropped:
            progress.finish(index, ended_early(progress, index))
            return
        started_s = self._clock()
        piece = self._piece(progress.work, 1, progress.work.prompt.token_ids + begun.token_ids)
        handle = None if at is None else at.handle
        try:
            with self.barrier.crossing(progress) as crossing:
                part = self._next_part(piece, handle, at, progress, local=local)
                if part is None:
                    progress.causes.append("no engine is up")
                    return
                with contextlib.closing(self._places(piece, part.decode, [index])) as places:
                    why = begun.route.why
                    if handle is None:
                        self.barrier.arrived(crossing)
                        source = Source(None, RouteKind.LOCAL, started_s, why)
                        await self._decode(places, source, progress)
                    else:
                        kind = RouteKind.MIGRATED
                        await self._hand_over(
                            handle, places, kind, started_s, why, progress, crossing
                        )
        finally:
            self.allocator.withdraw(piece)

    def _next_part(
        self,
        piece: Piece,
        handle: KvHandle | None,
        at: Cut | None,
        progress: Progress,
        *,
        local: bool,
    ) -> Part | None:
        """Return where a sample goes on; where it is, if samples do not move and it serves."""
        numbers = self.allocator.books.number
        if at is not None and not self._moves:
            engine = numbers(at.engine.info.name)
            if self._engine(engine) is not None:
                return Part(engine, engine, 1)
        route = self.allocator.decide(
            piece,
            self._clock(),
            held_by=-1 if handle is None else numbers(handle.prefill_engine),
            avoid=self._mask(progress.avoid),
            local=local or handle is None,
        )
        if route is None:
            return None
        self._ledger.explain(route)
        return route.parts[0]

    def _give_back(self, handle: KvHandle | None) -> None:
        """Give a handle back unless a decode engine was given it."""
        if handle is not None and not handle.taken:
            self._handoff.give_back(handle)

    def _adopt(self, engine: Engine, output: DecodeOutput, progress: Progress) -> KvHandle | None:
        """Return the handle that a segment ended with; None where there is none to use."""
        if output.kv is None:
            return None
        try:
            return self._handoff.adopt(engine, output.kv, output.weight_versions[-1].version)
        except LegError as exc:
            progress.causes.append(str(exc))  # its blocks are free when their lease ends
            return None

    async def _any_engine(self, progress: Progress) -> bool:
        """Wait until any engine serves; False, and noted, when none does in time."""
        limit_s = self._limits.recovery_timeout_s
        if self._fleet.ready() or await self._fleet.wait_ready(timeout_s=limit_s):
            return True
        given_up = self._fleet.given_up
        progress.causes.append(given_up or f"no engine came back within {limit_s:g} s")
        return False

    async def _prefill(
        self, engine: Engine, progress: Progress, token_ids: tuple[int, ...]
    ) -> KvHandle | None:
        """Run a prefill leg; None when it failed, which is noted."""
        name, blocks = engine.info.name, math.ceil(len(token_ids) / engine.info.block_size)
        budget = self._kv_budget(engine)
        await budget.acquire(blocks)
        try:
            work = progress.work
            handle = await self._handoff.prefill(
                engine, self._new_id(), token_ids, work.cache_salt, _session(work)
            )
        except BaseException as exc:
            budget.release(blocks)
            if not isinstance(exc, SplitrollError):
                raise
            self._note_error(exc, engine, progress)
            return None
        handle.when_settled(lambda: budget.release(blocks))
        self.stats.prefills[name] += 1
        return handle

    async def _decode(self, places: Places, source: Source, progress: Progress) -> None:
        """Run the decode leg of some samples, and go on with those that end at a segment's end."""
        engine = self._engine(places.engine)
        if engine is None:
            progress.interrupted = True
            return
        number, name, piece = places.engine, engine.info.name, places.piece
        self._finish_dropped(places, progress)
        segments = {i: self._segment(progress, i) for i in places.indices if i in progress.missing}
        if not segments:
            return
        work, running = progress.work, progress.listener.running
        requests = {i: self._request(segment, work) for i, segment in segments.items()}
        indices = {request.request_id: i for i, request in requests.items()}
        leader = next(iter(requests.values())).request_id
        result = DecodeResult()
        if source.ticket is None and source.handle is None:
            source = replace(
                source, ticket=self.allocator.begin_prefill(number, piece, self._clock())
            )
        self.allocator.note_prompt(number, piece)
        running |= {request_id: (engine, index) for request_id, index in indices.items()}

        def arrived() -> None:
            if source.ticket is not None:
                self.allocator.books.end_prefill(source.ticket, self._clock())
            if source.crossing is not None:
                self.barrier.arrived(source.crossing)
            progress.listener.on_kv()

        def came(request: DecodeRequest, tokens: Tokens) -> None:
            index = indices[request.request_id]
            progress.sent[index].append(tokens)
            progress.listener.on_tokens(index, tokens)

        async with asyncio.TaskGroup() as tasks:

            def ended(request: DecodeRequest, output: DecodeOutput | None) -> None:
                index = indices[request.request_id]
                places.release(index)
                running.pop(request.request_id, None)
                leg = source.leg(name, request.request_id, leader, result, progress)
                if output is None:
                    progress.keep_sent(index, leg)
                    return
                if index in progress.begun_s:
                    leg = replace(leg, accepted_s=progress.begun_s[index])
                if self._note_output(index, output, segments[index], leg, engine, progress, piece):
                    at = Cut(engine, self._adopt(engine, output, progress))
                    going_on = tasks.create_task(self._go_on(index, progress, at=at))
                    going_on.add_done_callback(lambda _: self._give_back(at.handle))

            try:
                await self._handoff.decode(
                    engine,
                    source.handle,
                    list(requests.values()),
                    weight_version=self._fleet.weight_version,
                    result=result,
                    on_end=ended,
                    on_kv=arrived,
                    on_tokens=came,
                    ending_early=lambda: self.barrier.ending_early or progress.ending,
                )
            finally:
                arrived()
            self._note_leg(result, source, engine, requests[indices[leader]], progress)

    def _note_output(
        self,
        index: int,
        output: DecodeOutput,
        segment: Segment,
        leg: Leg,
        engine: Engine,
        progress: Progress,
        piece: Piece,
    ) -> bool:
        """Keep what an engine returned; True when the sample goes on."""
        early = output.finish_reason == "abort"
        dropped = index in progress.listener.dropped
        if early and not (self.barrier.partial_ok or progress.ending or dropped):
            progress.keep_sent(index, leg)
            self._note_error(LegError(leg.decode, "it aborted a sample"), engine, progress)
            return False
        progress.sent.pop(index, None)
        begun = progress.begun.get(index)
        if begun is not None and leg.kind is RouteKind.MIGRATED:
            self.stats.moves += 1
        sample = assemble(progress.work, index, leg, output, begun)
        if is_cut(segment, output):
            progress.begun[index] = sample
            progress.begun_s[index] = self._clock()
            if not (self.barrier.ending_early or progress.ending):
                return True
            self._give_back(self._adopt(engine, output, progress))
            sample = replace(sample, finish_reason="abort")
        self._ledger.note_sample(sample, leg.decode, progress)
        progress.finish(index, sample, output.stop_reason)
        progress.on_sample()
        return False

    def _note_leg(
        self,
        result: DecodeResult,
        source: Source,
        engine: Engine,
        leader: DecodeRequest,
        progress: Progress,
    ) -> None:
        tokens = len(leader.token_ids)
        name = engine.info.name
        self._ledger.note_leg(result, source, name, leader.request_id, tokens, progress)
        for error in result.errors:
            self._note_error(error, engine, progress)

    def _note_error(self, error: SplitrollError, engine: Engine, progress: Progress) -> None:
        """Remember why an attempt failed; a fault of the request itself ends the group."""
        if isinstance(error, InvalidRequest):
            progress.refused = error
        elif isinstance(error, EngineDied):
            progress.engine_died = True
            self._fleet.report_death(engine, error.cause)
        progress.avoid.add(engine.info.name)
        progress.causes.append(str(error))

    def _segment(self, progress: Progress, index: int) -> Segment:
        return next_segment(
            progress.work,
            index,
            progress.begun.get(index),
            self._settings.segment_tokens,
            self.allocator.block_size,
        )

    def _finish_dropped(self, places: Places, progress: Progress) -> None:
        """Let samples that were dropped before they began end with what they have."""
        for index in progress.listener.dropped.intersection(places.indices, progress.missing):
            places.release(index)
            progress.finish(index, ended_early(progress, index))

    def _request(self, segment: Segment, work: GroupWork) -> DecodeRequest:
        ends_at = len(segment.token_ids) + segment.sampling.max_tokens
        whole = (ends_at - 1) % self.allocator.block_size == 0  # see `next_segment`
        moves = segment.cut and self._moves and not whole
        kv = self._handoff.hand_out_params(None) if moves else None
        return DecodeRequest(
            self._new_id(),
            segment.token_ids,
            segment.sampling,
            segment.seed,
            kv,
            cache_salt=work.cache_salt,
            native=work.native,
            stream=work.stream,
            session=_session(work),
            top_logprobs=0 if work.logprobs else None,
            text=work.text,
        )

    def _places(self, piece: Piece, engine: int, indices: Sequence[int]) -> Places:
        return Places(self.allocator, self._clock, piece, engine, indices)

    def _engine(self, number: int) -> Engine | None:
        """Return the engine of a number, if it serves."""
        name = self.allocator.books.name(number)
        return next((e for e in self._fleet.ready() if e.info.name == name), None)

    def _mask(self, names: set[str]) -> int:
        return sum(1 << self.allocator.books.number(name) for name in names)

    def _track_weights(self) -> None:
        """Forget which prefixes are cached once the weights are others."""
        if self._prefixes_of != self._fleet.weight_version:
            self._prefixes_of = self._fleet.weight_version
            self.allocator.forget_prefixes()

    def _new_id(self) -> str:
        """Return a request id that was never used before, not even by another process."""
        return f"{self._id_prefix}-{next(self._ids)}"

    def _kv_budget(self, engine: Engine) -> WeightedGate:
        """Return the gate that bounds handles by what this incarnation's KV can hold."""
        key = engine.info.engine_id
        if key not in self._kv_budgets:
            self._kv_budgets[key] = WeightedGate(int(engine.info.num_blocks * _KV_SHARE))
        return self._kv_budgets[key]

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


def _session(work: GroupWork) -> str:
    """Return what requests that share KV have in common, and no others."""
    return work.episode_id or f"{work.prompt.id}-{hash(work.prompt.token_ids):x}"


def _naming(prompt: Prompt, refused: InvalidRequest) -> InvalidRequest:
    """Return an engine's refusal with the prompt that it concerns."""
    path = f"prompt {prompt.id}"
    return InvalidRequest([Problem(path, p.found, p.allowed, p.hint) for p in refused.problems])
