"""Carries what is missing of a group to its end: placed, prefilled, handed off, decoded.

One attempt at it. Whether there is another, and when a group's turn comes, is the dispatcher's.
Load counts from the moment work is given to an engine until it truly ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from splitroll.dispatch.ledger import Ledger
from splitroll.dispatch.policy import Part, share
from splitroll.dispatch.progress import (
    Crossing,
    Cut,
    Places,
    Progress,
    Source,
    ended_early,
)
from splitroll.engines.protocol import DecodeOutput, DecodeRequest, Engine, Tokens
from splitroll.errors import (
    EngineDied,
    InvalidRequest,
    LegError,
    SplitrollError,
)
from splitroll.fleet.fleet import Fleet
from splitroll.handoff.handle import KvHandle
from splitroll.handoff.legs import DecodeResult, Handoff
from splitroll.types import RouteKind, SamplingParams

_KV_SHARE = 0.9
"""Of a prefill engine's KV that pinned handles may fill; the rest lets prompts be computed."""


class Courier:
    """See the module's docstring. Owns no engine and no task beyond its callers'.

    Args:
        moves: whether samples may move between engines, with their KV, after a segment.
        segment_tokens: see `config.schema.Dispatch`.
    """

    def __init__(
        self,
        fleet: Fleet,
        handoff: Handoff,
        allocator: Allocator,
        barrier: Barrier,
        ledger: Ledger,
        *,
        segment_tokens: int | None,
        moves: bool,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._handoff = handoff
        self._allocator = allocator
        self._barrier = barrier
        self._ledger = ledger
        self._segment_tokens = segment_tokens
        self._moves = moves
        self._clock = clock
        self._ids = itertools.count()
        self._id_prefix = os.urandom(4).hex()
        self._kv_budgets: dict[str, WeightedGate] = {}
        self._prefixes_of = fleet.weight_version

    def piece(self, work: GroupWork, samples: int, token_ids: Sequence[int]) -> Piece:
        """Note what is to be done of a group, for whatever is placed meanwhile, until it is
        withdrawn."""
        age = len(token_ids) - len(work.prompt.token_ids)
        key = work.episode_id or hash(work.prompt.token_ids)
        max_tokens = work.sampling.max_tokens - age
        is_turn = work.episode_id is not None
        salt = work.cache_salt
        return self._allocator.accept(
            key, token_ids, samples, max_tokens, age=age, is_turn=is_turn, salt=salt
        )

    async def carry(self, progress: Progress, *, local: bool) -> None:
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
            route = self._allocator.decide(
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
                ticket = self._allocator.begin_prefill(
                    part.prefill, progress.piece, now, coming=part.kv_tokens
                )
                self._allocator.note_prompt(part.decode, progress.piece)
                places = self._places(progress.piece, part.decode, indices)
                alone = len(route.parts) == 1
                carried = self._carry_part(part, ticket, places, progress, why, alone=alone)
                # By a callback: a task that is cancelled before it begins runs no code of its own.
                take_off = functools.partial(self._take_off, ticket, places)
                tasks.create_task(carried).add_done_callback(take_off)

    async def _carry_part(
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
        with self._barrier.crossing(progress) as crossing:
            try:
                handle = await self._prefill(prefill, progress, progress.work.prompt.token_ids)
            finally:
                self._allocator.books.end_prefill(ticket, self._clock())
            if handle is None:
                return
            # No await since it was returned.
            if alone and self._allocator.policy.chooses_late:
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
        with self._barrier.crossing(progress) as crossing:
            came = await self._move_prefix(part, progress)
            self._barrier.arrived(crossing)
            moved = None
            if came:
                self._ledger.stats.moves += len(places.indices)
                moved = self._allocator.books.name(part.kv_from), self._clock() - begun_s
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
        self._allocator.books.end_prefill(ticket, self._clock())
        places.close()

    def _choose_again(self, part: Part, places: Places, progress: Progress) -> None:
        """Choose the decode engine now that the KV is there: the fleet has gone on meanwhile."""
        places.close()
        route = self._allocator.decide(
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
            if self._allocator.books.name(places.engine) == handle.prefill_engine:
                self._handoff.give_back(handle)
                self._barrier.arrived(crossing)
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
        piece = self.piece(progress.work, 1, progress.work.prompt.token_ids + begun.token_ids)
        handle = None if at is None else at.handle
        try:
            with self._barrier.crossing(progress) as crossing:
                part = self._next_part(piece, handle, at, progress, local=local)
                if part is None:
                    progress.causes.append("no engine is up")
                    return
                with contextlib.closing(self._places(piece, part.decode, [index])) as places:
                    why = begun.route.why
                    if handle is None:
                        self._barrier.arrived(crossing)
                        source = Source(None, RouteKind.LOCAL, started_s, why)
                        await self._decode(places, source, progress)
                    else:
                        kind = RouteKind.MIGRATED
                        await self._hand_over(
                            handle, places, kind, started_s, why, progress, crossing
                        )
        finally:
            self._allocator.withdraw(piece)

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
        numbers = self._allocator.books.number
        if at is not None and not self._moves:
            engine = numbers(at.engine.info.name)
            if self._engine(engine) is not None:
                return Part(engine, engine, 1)
        route = self._allocator.decide(
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
        self._ledger.stats.prefills[name] += 1
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
                source, ticket=self._allocator.begin_prefill(number, piece, self._clock())
            )
        self._allocator.note_prompt(number, piece)
        running |= {request_id: (engine, index) for request_id, index in indices.items()}

        def arrived() -> None:
            if source.ticket is not None:
                self._allocator.books.end_prefill(source.ticket, self._clock())
            if source.crossing is not None:
                self._barrier.arrived(source.crossing)
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
                    ending_early=lambda: self._barrier.ending_early or progress.ending,
                )
            finally:
                arrived()
                for request_id in indices:  # also of those that were cancelled before they began
                    running.pop(request_id, None)
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
        if early and not (progress.may_end_early or progress.ending or dropped):
            progress.keep_sent(index, leg)
            self._note_error(LegError(leg.decode, "it aborted a sample"), engine, progress)
            return False
        progress.sent.pop(index, None)
        begun = progress.begun.get(index)
        if begun is not None and leg.kind is RouteKind.MIGRATED:
            self._ledger.stats.moves += 1
        sample = assemble(progress.work, index, leg, output, begun)
        if is_cut(segment, output):
            progress.begun[index] = sample
            progress.begun_s[index] = self._clock()
            if not (self._barrier.ending_early or progress.ending):
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
            self._segment_tokens,
            self._allocator.block_size,
        )

    def _finish_dropped(self, places: Places, progress: Progress) -> None:
        """Let samples that were dropped before they began end with what they have."""
        for index in progress.listener.dropped.intersection(places.indices, progress.missing):
            places.release(index)
            progress.finish(index, ended_early(progress, index))

    def _request(self, segment: Segment, work: GroupWork) -> DecodeRequest:
        ends_at = len(segment.token_ids) + segment.sampling.max_tokens
        whole = (ends_at - 1) % self._allocator.block_size == 0  # see `next_segment`
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
        return Places(self._allocator, self._clock, piece, engine, indices)

    def _engine(self, number: int) -> Engine | None:
        """Return the engine of a number, if it serves."""
        name = self._allocator.books.name(number)
        return next((e for e in self._fleet.ready() if e.info.name == name), None)

    def _mask(self, names: set[str]) -> int:
        return sum(1 << self._allocator.books.number(name) for name in names)

    def _track_weights(self) -> None:
        """Forget which prefixes are cached once the weights are others."""
        if self._prefixes_of != self._fleet.weight_version:
            self._prefixes_of = self._fleet.weight_version
            self._allocator.forget_prefixes()

    def _new_id(self) -> str:
        """Return a request id that was never used before, not even by another process."""
        return f"{self._id_prefix}-{next(self._ids)}"

    def _kv_budget(self, engine: Engine) -> WeightedGate:
        """Return the gate that bounds handles by what this incarnation's KV can hold."""
        key = engine.info.engine_id
        if key not in self._kv_budgets:
            self._kv_budgets[key] = WeightedGate(int(engine.info.num_blocks * _KV_SHARE))
        return self._kv_budgets[key]


def _session(work: GroupWork) -> str:
    """Return what requests that share KV have in common, and no others."""
    return work.episode_id or f"{work.prompt.id}-{hash(work.prompt.token_ids):x}"
