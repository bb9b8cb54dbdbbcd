"""The order of a handoff. This is the only place that knows it.

    prefill leg -> handle -> leader pulls -> its first token proves the KV -> siblings join

Siblings are admitted without KV parameters, after the leader's first token: the prompt's full
blocks are then in the decode engine's prefix cache. Admitting them earlier, or with the handle,
returns other requests' KV without an error once prefill has recycled the blocks.

Invariants:
- a handle ends settled: pulled, given back on a decode engine, or gone with its prefill engine;
- a request that does not end by itself is aborted on its engine, also when we are cancelled;
- every wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from splitroll.engines.protocol import (
    DecodeOutput,
    DecodeRequest,
    Engine,
    FirstToken,
    KvParams,
    PrefillOutput,
    PrefillRequest,
    Tokens,
)
from splitroll.errors import (
    LegError,
    LegTimeout,
    SplitrollError,
)
from splitroll.handoff.backend import KvBackend
from splitroll.handoff.cleanup import Cleanup
from splitroll.handoff.handle import KvHandle

_GIVE_BACK_POLL_S = 0.1
_GIVE_BACK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LegLimits:
    """Limits of the legs, in seconds; see `splitroll.config` for their meaning."""

    lease_s: float
    handoff_timeout_s: float
    prefill_timeout_s: float
    sample_timeout_s: float


@dataclass(slots=True)
class DecodeResult:
    """How the decode leg of a group ended on one engine.

    Attributes:
        outputs: by request id, of the requests that completed; of those that a weight update
            ended, with reason "abort" and what they have.
        waited_s: by request id, from the leg's start until the prompt's KV was there.
        errors: of the requests that did not complete; empty when all did.
        handed_off: whether the handle's KV arrived.
        recomputed_tokens: prompt tokens computed here although their KV was offered.
    """

    outputs: dict[str, DecodeOutput] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)
    errors: list[SplitrollError] = field(default_factory=list)
    handed_off: bool = False
    recomputed_tokens: int = 0


class Handoff:
    """Runs the legs of handoffs with one backend.

    Args:
        decoders: returns the engines that run, proven or not, and can give a handle back.
    """

    def __init__(
        self,
        backend: KvBackend,
        limits: LegLimits,
        cleanup: Cleanup,
        decoders: Callable[[], Sequence[Engine]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._cleanup = cleanup
        self._decoders = decoders
        self._clock = clock
        self.cancelled = 0
        """Handles that were given back, not pulled."""

    @property
    def pushes(self) -> bool:
        """See `KvBackend.pushes`."""
        return self._backend.pushes

    async def prefill(
        self,
        engine: Engine,
        request_id: str,
        token_ids: tuple[int, ...],
        cache_salt: str | None = None,
        session: str | None = None,
        data_rank: int | None = None,
    ) -> KvHandle:
        """Run a prefill leg; for the arguments see `PrefillRequest`.

        Raises:
            LegError: it failed, or returned no handle.
            LegTimeout: it exceeded its limit; it is then aborted, and a late handle given back.
            EngineDied: the engine is gone.
        """
        kv = self._backend.prefill_params()
        request = PrefillRequest(request_id, token_ids, kv, cache_salt, session, data_rank)
        begun_s = self._clock()
        leg = asyncio.ensure_future(engine.prefill(request))
        leg.add_done_callback(lambda leg: leg.cancelled() or leg.exception())  # see _end_prefill
        try:
            async with asyncio.timeout(self._limits.prefill_timeout_s):
                output = await asyncio.shield(leg)
        except (TimeoutError, asyncio.CancelledError) as exc:
            self._cleanup.spawn("late prefill", self._end_prefill(engine, request, leg, begun_s))
            if isinstance(exc, TimeoutError):
                limit_s = self._limits.prefill_timeout_s
                raise LegTimeout(engine.info.name, f"no prefill in {limit_s:g} s") from exc
            raise
        return self._handle(engine, output, begun_s)

    async def decode(
        self,
        engine: Engine,
        handle: KvHandle | None,
        requests: Sequence[DecodeRequest],
        *,
        weight_version: int,
        result: DecodeResult | None = None,
        on_end: Callable[[DecodeRequest, DecodeOutput | None], None] = lambda request, output: None,
        on_kv: Callable[[], None] = lambda: None,
        on_tokens: Callable[[DecodeRequest, Tokens], None] = lambda request, tokens: None,
        ending_early: Callable[[], bool] = lambda: False,
    ) -> DecodeResult:
        """Decode samples of one prompt on one engine: the first leads, the others join it.

        Args:
            handle: None decodes without a handoff: all begin at once, and the engine shares the
                prompt's full blocks between them.
            weight_version: of the decode engine's weights.
            result: filled as requests end; a new one if None.
            on_end: called as each request ends, with its output if it completed.
            on_kv: called when the prompt's KV is here, which is when no handle is in flight.
            on_tokens: called as tokens of requests that stream come.
            ending_early: whether samples end as they are; one that has not begun ends with nothing.

        Returns:
            what completed and what did not; only cancellation is raised.
        """
        leg = _DecodeLeg(
            self,
            engine,
            handle,
            tuple(requests),
            weight_version,
            DecodeResult() if result is None else result,
            on_end,
            on_kv,
            on_tokens,
            ending_early,
        )
        return await leg.run()

    def adopt(self, engine: Engine, kv: KvParams, weight_version: int) -> KvHandle:
        """Return the handle that a decode request ended with.

        Raises:
            LegError: it lacks something.
        """
        now_s = self._clock()
        output = PrefillOutput(kv, 0.0, 0, weight_version)
        return self._handle(engine, output, now_s)

    def hand_out_params(self, kv: KvParams | None) -> KvParams:
        """Return a decode request's connector parameters so that it ends with a handle."""
        return self._backend.hand_out_params(kv)

    async def settled(self) -> None:
        """Return when every abort and every handle given back has been told to its engines."""
        await self._cleanup.drain()

    def give_back(self, handle: KvHandle) -> None:
        """Tell the prefill engine of a handle that nobody will pull it; later calls do nothing."""
        if (params := handle.give_back()) is not None:
            self.cancelled += 1
            self._cleanup.spawn(
                f"give a handle back to {handle.prefill_engine}", self._give_back(handle, params)
            )

    def _handle(self, engine: Engine, output: PrefillOutput, begun_s: float) -> KvHandle:
        name = engine.info.name
        if output.kv is None:
            raise LegError(name, "the prefill engine returned no KV handle: is its connector on?")
        try:
            params = self._backend.decode_params(output.kv)
        except ValueError as exc:
            raise LegError(name, f"the prefill engine returned {exc}") from exc
        return KvHandle(
            prefill_engine=name,
            params=params,
            weight_version=output.weight_version,
            # The lease began when the engine finished, which is at the earliest this.
            born_s=begun_s + output.elapsed_s,
            max_age_s=self._limits.lease_s - self._limits.handoff_timeout_s,
            elapsed_s=self._clock() - begun_s,
        )

    async def _end_prefill(
        self,
        engine: Engine,
        request: PrefillRequest,
        leg: asyncio.Future[PrefillOutput],
        begun_s: float,
    ) -> None:
        """Abort a leg that nobody waits for; if it finished all the same, give its handle back."""
        with contextlib.suppress(SplitrollError):
            await engine.abort([request.request_id])
        try:
            output = await leg
        except SplitrollError:
            return  # it ended without a handle, as intended
        self.give_back(self._handle(engine, output, begun_s))

    async def _give_back(self, handle: KvHandle, params: KvParams) -> None:
        try:
            # With all decode engines down, the next that comes back can still do it.
            while self._clock() < handle.born_s + self._limits.lease_s:
                for engine in self._decoders():
                    if engine.info.name == handle.prefill_engine:
                        continue  # a connector tells others, not itself
                    with contextlib.suppress(SplitrollError, TimeoutError):
                        async with asyncio.timeout(_GIVE_BACK_TIMEOUT_S):
                            await engine.release(f"give-back-{os.urandom(8).hex()}", params)
                        return
                await asyncio.sleep(_GIVE_BACK_POLL_S)
        finally:
            handle.settle()


class _DecodeLeg:
    """One run of `Handoff.decode`."""

    def __init__(
        self,
        handoff: Handoff,
        engine: Engine,
        handle: KvHandle | None,
        requests: tuple[DecodeRequest, ...],
        weight_version: int,
        result: DecodeResult,
        on_end: Callable[[DecodeRequest, DecodeOutput | None], None],
        on_kv: Callable[[], None],
        on_tokens: Callable[[DecodeRequest, Tokens], None],
        ending_early: Callable[[], bool],
    ) -> None:
        self._handoff = handoff
        self._engine = engine
        self._handle = handle
        self._requests = requests
        self._weight_version = weight_version
        self._on_end = on_end
        self._on_kv = on_kv
        self._on_tokens = on_tokens
        self._ending_early = ending_early
        self._leader_ended_early = False
        self._result = result
        self._kv_is_here = asyncio.Event()
        if handle is None:
            self._kv_is_here.set()
        self._begun_s = handoff._clock()

    async def run(self) -> DecodeResult:
        leader, *siblings = self._requests
        tasks = [asyncio.create_task(self._join(sibling)) for sibling in siblings]
        tasks.append(asyncio.create_task(self._lead(leader, tasks.copy())))
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            if self._handle is not None and not self._handle.taken:
                self._handoff.give_back(self._handle)  # cancelled before the leader began
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, SplitrollError):
                self._result.errors.append(error)
            elif error is not None:
                raise error  # a fault of ours, not of an engine
        return self._result

    async def _lead(self, request: DecodeRequest, siblings: Sequence[asyncio.Task[None]]) -> None:
        try:
            kv = self._take_handle()
            if kv is not None:
                # The leader may be asked for a handle of its own too.
                kv = kv if request.kv is None else self._handoff.hand_out_params(kv)
                request = replace(request, kv=kv)
            limits = self._handoff._limits
            await self._sample(
                request, limits.sample_timeout_s if kv is None else limits.handoff_timeout_s
            )
            if not self._kv_is_here.is_set():  # it was ended before its first token
                if self._handle is not None:
                    raise LegError(self._engine.info.name, "it aborted a leader before its KV came")
                self._leader_ended_early = True
                self._kv_is_here.set()
        except BaseException as exc:
            if not self._kv_is_here.is_set():
                for task in siblings:
                    task.cancel()  # nobody can join a leader that never arrived
                self._settle_handle(request, exc)
            raise
        finally:
            self._ended(request)

    async def _join(self, request: DecodeRequest) -> None:
        try:
            await self._kv_is_here.wait()  # ends with the leader: see _lead
            if self._leader_ended_early or self._ending_early():
                self._result.outputs[request.request_id] = NOTHING_YET
                self._result.waited_s.setdefault(request.request_id, 0.0)
                return
            await self._sample(request, self._handoff._limits.sample_timeout_s)
        finally:
            self._ended(request)

    def _ended(self, request: DecodeRequest) -> None:
        self._on_end(request, self._result.outputs.get(request.request_id))

    async def _sample(self, request: DecodeRequest, first_token_limit_s: float) -> None:
        """Run one request to its end, or abort it."""
        name = self._engine.info.name
        stream = self._engine.decode(request)
        limit_s, has_begun = first_token_limit_s, False
        try:
            async with asyncio.timeout(limit_s) as limit, contextlib.aclosing(stream):
                async for event in stream:
                    if isinstance(event, Tokens):
                        self._on_tokens(request, event)
                    elif isinstance(event, FirstToken):
                        version = event.weight_version
                        self._note_first_token(request, event.cached_tokens, version)
                    elif event.token_ids:
                        version = event.weight_versions[0].version
                        self._note_first_token(request, event.cached_tokens, version)
                    if isinstance(event, DecodeOutput):
                        self._complete(request, event)
                        return
                    if not has_begun:
                        has_begun, limit_s = True, self._handoff._limits.sample_timeout_s
                        limit.reschedule(asyncio.get_running_loop().time() + limit_s)
            raise LegError(name, "the decode stream ended without an output")
        except TimeoutError as exc:
            self._abort(request)
            raise LegTimeout(name, f"decode made no end in {limit_s:g} s") from exc
        except asyncio.CancelledError:
            self._abort(request)
            raise

    def _take_handle(self) -> KvParams | None:
        if self._handle is None:
            return None
        return self._handle.take(now_s=self._handoff._clock(), weight_version=self._weight_version)

    def _note_first_token(
        self, request: DecodeRequest, cached_tokens: int, weight_version: int
    ) -> None:
        """The request's KV is here: the leader's lets its siblings join.

        Raises:
            LegError: when the leader went on with other weights than its KV was computed with.
        """
        if request.request_id in self._result.waited_s:
            return
        leads = not self._kv_is_here.is_set()
        same = self._handle is None or self._handle.weight_version == weight_version
        if leads and not same:
            raise LegError(
                self._engine.info.name,
                f"it decoded KV of weight version {self._handle and self._handle.weight_version} "
                f"with version {weight_version}",
            )
        self._result.waited_s[request.request_id] = self._handoff._clock() - self._begun_s
        self._kv_is_here.set()
        self._on_kv()
        if self._handle is None or not same:
            return  # after a weight update a sibling has its prompt computed again, as it must
        # The last prompt token is always computed, to sample from it; a sibling computes all that
        # stands in no full block.
        expected = len(request.token_ids) - 1
        if not leads:
            block = self._engine.info.block_size
            expected = expected // block * block
        self._result.recomputed_tokens += max(0, expected - cached_tokens)
        if leads:
            self._result.handed_off = True
            self._handle.settle()

    def _complete(self, request: DecodeRequest, output: DecodeOutput) -> None:
        name = self._engine.info.name
        if output.finish_reason not in ("stop", "length", "abort"):
            raise LegError(name, f"the engine ended the sample with {output.finish_reason!r}")
        versions = output.weight_versions
        covered = [token for span in versions for token in range(span.start, span.end)]
        if covered != list(range(len(output.token_ids))):
            raise LegError(name, f"weight versions {versions} do not cover the sample's tokens")
        self._result.outputs[request.request_id] = output

    def _abort(self, request: DecodeRequest) -> None:
        self._handoff._cleanup.spawn(
            f"abort {request.request_id} on {self._engine.info.name}",
            self._engine.abort([request.request_id]),
        )

    def _settle_handle(self, request: DecodeRequest, why: BaseException) -> None:
        """See that prefill frees the blocks of a handle whose leader failed before its KV came."""
        handle = self._handle
        if handle is None:
            return
        if handle.taken and isinstance(why, LegTimeout | asyncio.CancelledError):
            # We abort the request, and vLLM then tells prefill itself.
            self._handoff._cleanup.spawn(
                f"settle a handle of {handle.prefill_engine}",
                self._settle_by_abort(request, handle),
            )
        else:
            self._handoff.give_back(handle)

    async def _settle_by_abort(self, request: DecodeRequest, handle: KvHandle) -> None:
        try:
            await self._engine.abort([request.request_id])
        except BaseException as exc:  # whatever it was, prefill may have been told nothing
            self._handoff.give_back(handle)
            if not isinstance(exc, SplitrollError):
                raise
        else:
            handle.settle()


NOTHING_YET = DecodeOutput((), (), "", "abort", 0, 0.0, 0.0, 0.0, ())
