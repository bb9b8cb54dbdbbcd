"""Carries groups through the fleet: accepted, prefilled, handed off, decoded, complete.

Invariants:
- every accepted group leaves exactly once: complete, or with an error that names each cause;
- a failed leg is tried again as a whole, new prefill and new handle, on other engines; then
  without a handoff; samples that completed meanwhile are kept, since a retry would repeat them;
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
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from splitroll.config.schema import Dispatch, Limits
from splitroll.dispatch.gate import Turnstile, WeightedGate
from splitroll.dispatch.policy import POLICIES, EngineView, Snapshot, Work, share
from splitroll.engines.protocol import DecodeOutput, DecodeRequest, Engine
from splitroll.errors import (
    EngineDied,
    FleetFenced,
    GroupFailed,
    InvalidRequest,
    LegError,
    Problem,
    SplitrollError,
)
from splitroll.fleet.fleet import Fleet
from splitroll.handoff.handle import KvHandle
from splitroll.handoff.legs import DecodeResult, Handoff
from splitroll.types import (
    Group,
    Prompt,
    Role,
    Route,
    RouteKind,
    Sample,
    SamplingParams,
    Timing,
    VersionSpan,
    derive_seed,
)

log = logging.getLogger(__name__)

_DECODERS = (Role.DECODE, Role.BOTH)
_DECODE_KV_OVERCOMMIT = 2.0
"""Groups let in, by their longest possible samples, over what decode engines can hold: most samples
end well before max_tokens, and vLLM preempts where they do not."""
_KV_SHARE = 0.9
"""Of a prefill engine's KV that pinned handles may fill; the rest lets prompts be computed."""


_POLL_S = 0.005
_FENCE_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One group to generate: `seed` is the group's, each sample's is derived from it."""

    prompt: Prompt
    n: int
    sampling: SamplingParams
    seed: int
    begun: Mapping[int, Sample] = field(default_factory=dict)
    """Samples by index that a weight update ended early, to be continued; or complete."""
    episode_id: str | None = None
    """Turns with equal ids continue each other."""


@dataclass(slots=True)
class DispatchStats:
    """What was dispatched, by engine name where it is a Counter."""

    prefills: Counter[str] = field(default_factory=Counter)
    decodes: Counter[str] = field(default_factory=Counter)
    handoffs: int = 0
    retries: int = 0
    recomputed_tokens: int = 0


@dataclass(slots=True)
class _Progress:
    """What one group has so far."""

    work: GroupWork
    accepted_s: float
    weight_version: int
    done: dict[int, Sample] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    refused: InvalidRequest | None = None
    engine_died: bool = False
    interrupted: bool = False
    recomputed_tokens: int = 0

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self.work.n) if i not in self.done]


@dataclass(frozen=True, slots=True)
class _Part:
    """The samples of a group that one decode engine serves in one attempt.

    Attributes:
        release: by sample index; takes the sample's load off the engine, once.
    """

    engine: Engine
    release: Mapping[int, Callable[[], None]]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(self.release)


@dataclass(frozen=True, slots=True)
class _Leg:
    """How the decode leg of a part ended; `requests` by sample index, the leader's first."""

    engine: Engine
    handle: KvHandle | None
    started_s: float
    requests: Mapping[int, DecodeRequest]
    result: DecodeResult


@dataclass(eq=False, slots=True)
class _Crossing:
    """KV on its way from one engine to another: from asking for a prefill until it is decoded."""

    task: asyncio.Task[Any]
    interrupted: bool = False


class Dispatcher:
    """See the module's docstring. Owns no engine and no task beyond its callers'."""

    def __init__(
        self,
        fleet: Fleet,
        handoff: Handoff,
        settings: Dispatch,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = DispatchStats()
        self._fleet = fleet
        self._handoff = handoff
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._policy = POLICIES[settings.policy]()
        self._tokens: Counter[str] = Counter()
        self._sequences: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._ids = itertools.count()
        self._id_prefix = os.urandom(4).hex()
        self._kv_budgets: dict[str, WeightedGate] = {}
        self._seats = WeightedGate(0)
        self._decode_kv = WeightedGate(0)
        self._turnstile = Turnstile()
        self._crossings: set[_Crossing] = set()
        self._partial_ok = False
        """An update has ended samples early; such may still come in when it is over."""
        self._ending_early = False
        self._fence: str | None = None
        self._resize()
        fleet.on_change(self._resize)

    # What a weight update asks for: see `splitroll.updater`.

    @property
    def is_fenced(self) -> bool:
        return self._fence is not None

    def shut(self, *, partial: bool) -> None:
        """Let no attempt begin.

        Args:
            partial: samples that engines end early are returned as they are.
        """
        self._partial_ok |= partial
        self._ending_early = partial
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
        """Let attempts begin again."""
        self._ending_early = False
        self._fence = None
        self._turnstile.open()

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
        self._ending_early = False
        self._fence = cause

    async def run(self, work: GroupWork) -> Group:
        """Generate one group.

        Raises:
            GroupFailed: when no route completed it.
            InvalidRequest: when an engine refused the request itself.
            FleetFenced: a weight update failed, and none succeeded in time.
        """
        version = self._fleet.weight_version
        progress = _Progress(work, self._clock(), version, done=_complete_ones(work))
        async with self._seats.hold(work.n), self._decode_kv.hold(self._decode_blocks(work)):
            for number, attempt in enumerate(self._attempts(progress)):
                self.stats.retries += number > 0
                progress.engine_died = False
                await self._try(attempt, progress)
                if progress.refused is not None:
                    raise _naming(work.prompt, progress.refused)
                if not progress.missing:
                    break
        if progress.missing:
            raise GroupFailed(work.prompt.id, progress.causes or ["no engine is up"])
        return Group(
            prompt=work.prompt,
            samples=tuple(progress.done[i] for i in range(work.n)),
            recomputed_tokens=progress.recomputed_tokens,
        )

    @property
    def load(self) -> dict[str, int]:
        """Tokens in flight by engine; empty when nothing is in flight."""
        return {name: tokens for name, tokens in self._tokens.items() if tokens}

    async def _try(
        self, attempt: Callable[[_Progress], Awaitable[None]], progress: _Progress
    ) -> None:
        """Make an attempt, and make it again when a weight update interrupted it."""
        while True:
            progress.interrupted = False
            await self._let_in()
            with self._turnstile.inside():
                await attempt(progress)
            if not (progress.interrupted and progress.missing):
                return

    async def _let_in(self) -> None:
        """Wait until attempts may begin; a weight update that is under way has its own limits."""
        while not self._turnstile.is_open:
            fence = self._fence
            limit_s = self._limits.recovery_timeout_s if fence else _FENCE_POLL_S
            try:
                async with asyncio.timeout(limit_s):
                    await self._turnstile.opened()
            except TimeoutError:
                if fence is not None and self._fence is not None:
                    raise FleetFenced(self._fence) from None

    def _attempts(
        self, progress: _Progress
    ) -> Generator[Callable[[_Progress], Awaitable[None]], None, None]:
        """Yield what to try next: split, then local; then, as long as it is engines that die, local
        again within the time that they have to come back."""
        if progress.work.begun:
            yield self._continue  # each sample has a prompt of its own by now
        for _ in range(0 if progress.work.begun else self._settings.split_attempts):
            if self._fleet.ready(Role.PREFILL) and self._fleet.ready(*_DECODERS):
                yield self._split
        for _ in range(self._settings.local_attempts):
            yield self._local
        end_s = self._clock() + self._limits.recovery_timeout_s
        while progress.engine_died and self._clock() < end_s:
            yield self._local

    async def _split(self, progress: _Progress) -> None:
        """One attempt with handoffs: a prefill leg and a handle for each decode engine."""
        prefill = self._choose_prefill(progress)
        if prefill is None:
            progress.causes.append("no prefill engine is up")
            return
        with self._crossing(progress) as crossing:
            started_s = self._clock()
            handle = await self._prefill(prefill, progress)
            if handle is None:
                return
            # The decode engines are chosen now, not before the prefill.
            try:
                with self._choose_decodes(progress) as parts:
                    if not parts:
                        progress.causes.append("no decode engine is up")
                        return
                    async with asyncio.TaskGroup() as tasks:
                        for part in parts[1:]:
                            tasks.create_task(self._split_part(prefill, part, progress))
                        await self._decode(parts[0], handle, started_s, progress, crossing)
            finally:
                if not handle.taken:  # also when we are cancelled before the decode leg begins
                    self._handoff.give_back(handle)

    async def _split_part(self, prefill: Engine, part: _Part, progress: _Progress) -> None:
        """A further decode engine of the same group: its own prefill leg, a prefix hit."""
        with self._crossing(progress) as crossing:
            started_s = self._clock()
            handle = await self._prefill(prefill, progress)
            if handle is None:
                return
            # No await since it was returned.
            await self._decode(part, handle, started_s, progress, crossing)

    @contextlib.contextmanager
    def _crossing(self, progress: _Progress) -> Generator[_Crossing, None, None]:
        """Let a weight update interrupt what is inside, until `_decode` takes the crossing off."""
        task = asyncio.current_task()
        assert task is not None, "attempts run in tasks"
        crossing = _Crossing(task)
        self._crossings.add(crossing)
        try:
            yield crossing
        except asyncio.CancelledError:
            if not crossing.interrupted or task.uncancel() > 0:
                raise
            progress.interrupted = True
        finally:
            self._crossings.discard(crossing)

    async def _local(self, progress: _Progress) -> None:
        """One attempt without a handoff; on a prefill engine only when no decode engine is up."""
        if progress.work.begun:
            await self._continue(progress)
            return
        if not await self._any_engine(progress):
            return
        with self._choose_decodes(progress, any_role=True) as parts:
            async with asyncio.TaskGroup() as tasks:
                for part in parts:
                    tasks.create_task(self._decode(part, None, self._clock(), progress))

    async def _continue(self, progress: _Progress) -> None:
        """Continue samples that were ended early, each from its own prompt and tokens."""
        if not await self._any_engine(progress):
            return
        with self._choose_decodes(progress, any_role=True, count=len(progress.missing)) as parts:
            async with asyncio.TaskGroup() as tasks:
                for part in parts:
                    for index in part.indices:
                        own = _Part(part.engine, {index: part.release[index]})
                        tasks.create_task(self._decode(own, None, self._clock(), progress))

    async def _any_engine(self, progress: _Progress) -> bool:
        """Wait until any engine serves; False, and noted, when none does in time."""
        limit_s = self._limits.recovery_timeout_s
        if self._fleet.ready() or await self._fleet.wait_ready(timeout_s=limit_s):
            return True
        progress.causes.append(f"no engine came back within {limit_s:g} s")
        return False

    async def _prefill(self, engine: Engine, progress: _Progress) -> KvHandle | None:
        """Run a prefill leg; None when it failed, which is noted."""
        token_ids = progress.work.prompt.token_ids
        name, blocks = engine.info.name, math.ceil(len(token_ids) / engine.info.block_size)
        budget = self._kv_budget(engine)
        with contextlib.ExitStack() as held:
            held.callback(self._load(name, len(token_ids), sequences=0))
            await budget.acquire(blocks)
            try:
                handle = await self._handoff.prefill(engine, self._new_id(), token_ids)
            except BaseException as exc:
                budget.release(blocks)
                if not isinstance(exc, SplitrollError):
                    raise
                self._note_error(exc, engine, progress)
                return None
        handle.when_settled(lambda: budget.release(blocks))
        self.stats.prefills[name] += 1
        return handle

    async def _decode(
        self,
        part: _Part,
        handle: KvHandle | None,
        started_s: float,
        progress: _Progress,
        crossing: _Crossing | None = None,
    ) -> None:
        requests = {i: self._request(progress.work, i) for i in part.indices}
        release = {request.request_id: part.release[i] for i, request in requests.items()}
        result = await self._handoff.decode(
            part.engine,
            handle,
            list(requests.values()),
            weight_version=self._fleet.weight_version,
            on_end=lambda request: release[request.request_id](),
            on_kv=lambda: self._crossings.discard(crossing) if crossing else None,
            ending_early=lambda: self._ending_early,
        )
        self._collect(_Leg(part.engine, handle, started_s, requests, result), progress)

    def _collect(self, leg: _Leg, progress: _Progress) -> None:
        name, result = leg.engine.info.name, leg.result
        self.stats.handoffs += result.handed_off
        progress.recomputed_tokens += result.recomputed_tokens
        self.stats.recomputed_tokens += result.recomputed_tokens
        if result.recomputed_tokens:
            log.warning(
                "%s computed %d prompt tokens again that %s had handed off",
                name,
                result.recomputed_tokens,
                leg.handle and leg.handle.prefill_engine,
            )
        for index, request in leg.requests.items():
            output = result.outputs.get(request.request_id)
            if output is None:
                continue
            if output.finish_reason == "abort" and not self._partial_ok:
                self._note_error(LegError(name, "it aborted a sample"), leg.engine, progress)
                continue
            progress.done[index] = _sample(leg, index, output, progress)
            self.stats.decodes[name] += 1
        for error in result.errors:
            self._note_error(error, leg.engine, progress)

    def _note_error(self, error: SplitrollError, engine: Engine, progress: _Progress) -> None:
        """Remember why an attempt failed; a fault of the request itself ends the group."""
        if isinstance(error, InvalidRequest):
            progress.refused = error
        elif isinstance(error, EngineDied):
            progress.engine_died = True
            self._fleet.report_death(engine, error.cause)
        progress.avoid.add(engine.info.name)
        progress.causes.append(str(error))

    def _choose_prefill(self, progress: _Progress) -> Engine | None:
        work = Work(len(progress.work.prompt.token_ids), 0, 1)
        chosen = self._choose("prefill", self._fleet.ready(Role.PREFILL), work, 1, progress)
        return chosen[0] if chosen else None

    @contextlib.contextmanager
    def _choose_decodes(
        self, progress: _Progress, *, any_role: bool = False, count: int | None = None
    ) -> Generator[list[_Part], None, None]:
        """Choose engines for the missing samples. Their load counts from this moment, so that
        groups that choose at the same time do not all choose the same engine."""
        engines = self._fleet.ready(*_DECODERS)
        if not engines and any_role:
            engines = self._fleet.ready()
        missing = progress.missing
        asked = progress.work
        prompt_tokens, max_tokens = len(asked.prompt.token_ids), asked.sampling.max_tokens
        work = Work(prompt_tokens, max_tokens, len(missing))
        count = count or self._settings.decode_engines_per_group
        chosen = self._choose("decode", engines, work, count, progress)
        with contextlib.ExitStack() as held:
            parts = []
            for engine, indices in share(missing, chosen):
                load = functools.partial(self._load, engine.info.name, prompt_tokens + max_tokens)
                part = _Part(engine, {index: load(sequences=1) for index in indices})
                for release in part.release.values():
                    held.callback(release)
                parts.append(part)
            yield parts

    def _choose(
        self, kind: str, engines: Sequence[Engine], work: Work, count: int, progress: _Progress
    ) -> list[Engine]:
        fresh = [engine for engine in engines if engine.info.name not in progress.avoid]
        candidates = {engine.info.name: engine for engine in fresh or engines}
        views = tuple(self._view(engine) for engine in candidates.values())
        turn = self._turns[kind]
        self._turns[kind] += 1
        names = self._policy.choose(Snapshot(views, turn), work, count)
        return [candidates[name] for name in names]

    def _view(self, engine: Engine) -> EngineView:
        name = engine.info.name
        return EngineView(
            name=name,
            tokens_in_flight=self._tokens[name],
            free_seats=engine.info.max_num_seqs - self._sequences[name],
        )

    def _request(self, work: GroupWork, index: int) -> DecodeRequest:
        begun = work.begun.get(index)
        seed = derive_seed(work.seed, index) if begun is None else begun.seed
        token_ids, sampling = work.prompt.token_ids, work.sampling
        if begun is not None and begun.token_ids:
            done = len(begun.token_ids)
            token_ids += begun.token_ids
            sampling = replace(
                sampling,
                max_tokens=sampling.max_tokens - done,
                min_tokens=max(0, sampling.min_tokens - done),
            )
            # A generator begins anew in every segment.
            seed = derive_seed(seed, "segment", done)
        return DecodeRequest(self._new_id(), token_ids, sampling, seed)

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
        """Fit what is let in to the engines that decode now."""
        engines = self._fleet.ready(*_DECODERS) or self._fleet.ready()
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

    def _load(self, engine: str, tokens: int, *, sequences: int) -> Callable[[], None]:
        """Count load on an engine; returns what takes it off again, once."""
        self._tokens[engine] += tokens
        self._sequences[engine] += sequences
        counted = True

        def release() -> None:
            nonlocal counted
            if counted:
                counted = False
                self._tokens[engine] -= tokens
                self._sequences[engine] -= sequences

        return release


def _complete_ones(work: GroupWork) -> dict[int, Sample]:
    return {i: sample for i, sample in work.begun.items() if sample.finish_reason != "abort"}


def _naming(prompt: Prompt, refused: InvalidRequest) -> InvalidRequest:
    """Return an engine's refusal with the prompt that it concerns."""
    path = f"prompt {prompt.id}"
    return InvalidRequest([Problem(path, p.found, p.allowed, p.hint) for p in refused.problems])


def _sample(leg: _Leg, index: int, output: DecodeOutput, progress: _Progress) -> Sample:
    work, name = progress.work, leg.engine.info.name
    leader, request = next(iter(leg.requests.values())), leg.requests[index]
    waited_s = output.wait_s
    if request is not leader:
        waited_s += leg.result.waited_s.get(leader.request_id, 0.0)
    queued_s = leg.started_s - progress.accepted_s
    if leg.handle is None:
        route = Route(RouteKind.LOCAL, prefill=name, decode=name)
        timing = Timing(queued_s + waited_s, output.prefill_s, 0.0, output.decode_s)
    else:
        kind = RouteKind.SPLIT if request is leader else RouteKind.SHARED
        route = Route(kind, prefill=leg.handle.prefill_engine, decode=name)
        decode_s = output.prefill_s + output.decode_s
        timing = Timing(queued_s, leg.handle.elapsed_s, waited_s, decode_s)
    spans = output.weight_versions
    # A sibling's prompt is of the weights that its first token is of: an update drops all KV.
    prefilled = spans[0].version if spans else progress.weight_version
    sample = Sample(
        id=work.prompt.id,
        sample=index,
        prompt_token_ids=work.prompt.token_ids,
        token_ids=output.token_ids,
        text=output.text,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        seed=derive_seed(work.seed, index),
        weight_version=spans[-1].version if spans else prefilled,
        prefill_version=prefilled,
        weight_versions=spans,
        route=route,
        timing=timing,
    )
    begun = work.begun.get(index)
    return sample if begun is None else continued(begun, sample)


def continued(begun: Sample, rest: Sample) -> Sample:
    """Return a sample and its continuation as one. Pure."""
    at = len(begun.token_ids)
    spans = list(begun.weight_versions)
    for span in rest.weight_versions:
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end + at)
        else:
            spans.append(VersionSpan(span.version, span.start + at, span.end + at))
    times = zip(astuple(begun.timing), astuple(rest.timing), strict=True)
    return replace(
        rest,
        seed=begun.seed,
        token_ids=begun.token_ids + rest.token_ids,
        text=begun.text + rest.text,
        logprobs=begun.logprobs + rest.logprobs,
        prefill_version=begun.prefill_version if at else rest.prefill_version,
        weight_versions=tuple(spans),
        timing=Timing(*(a + b for a, b in times)),
    )
