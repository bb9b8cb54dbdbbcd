"""An engine that computes no model: a latency model, a KV pool, a prefix cache, and faults.

It obeys the same contract as a real engine (`tests/contract`), down to the failure that matters
most: pulling a handle whose blocks were freed gives wrong tokens and no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitroll.engines.protocol import (
    DecodeOutput,
    DecodeRequest,
    Engine,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    FirstToken,
    KvParams,
    PrefillOutput,
    PrefillRequest,
)
from splitroll.errors import (
    EngineDied,
    EngineStartError,
    InvalidRequest,
    KvLoadFailed,
    LegError,
    Problem,
)
from splitroll.placement import EngineSpec
from splitroll.types import Role, derive_seed

VOCAB_SIZE = 4096
EOS_TOKEN_ID = 2
_FREED_POLL_S = 0.02
_EOS_ONE_IN = 997
"""How rarely the simulated model ends by itself."""


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Seconds that work takes; the defaults are 1/100 of SmolLM2-135M on one CPU core."""

    prefill_token_s: float = 5e-6
    step_s: float = 4e-4
    step_sequence_s: float = 1e-5
    pull_s: float = 4e-5
    start_s: float = 0.0


@dataclass(slots=True)
class Faults:
    """What goes wrong next; counters count down to 0."""

    fail_start: int = 0
    fail_prefills: int = 0
    fail_decodes: int = 0
    fail_kv_loads: int = 0
    lose_handles: bool = False
    """Prefill answers without a handle: PD is silently off."""
    ignore_kv: bool = False
    """Decode ignores handles and computes prompts itself: PD is silently off."""
    corrupt_kv: bool = False
    forget_prefixes: bool = False
    """The prefix cache holds nothing: siblings find no KV to share."""
    hang: bool = False
    """Nothing answers any more, though the engine seems to live."""


@dataclass(slots=True)
class Fabric:
    """What joins simulated engines: by connector id, the engines that KV can be pulled from."""

    engines: dict[str, SimulatedEngine] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Running:
    """A request that holds blocks."""

    blocks: int
    aborted: bool = False


class SimulatedEngine(Engine):
    """See the module's docstring.

    Args:
        engine_id: of this incarnation; handles name it.
        num_blocks: KV blocks in all.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        fabric: Fabric,
        *,
        engine_id: str,
        latency: LatencyModel | None = None,
        faults: Faults | None = None,
        num_blocks: int = 256,
        block_size: int = 32,
        max_num_seqs: int = 64,
        max_model_len: int = 8192,
        weight_version: int = 0,
        lease_s: float = 30.0,
    ) -> None:
        self._info = EngineInfo(
            name=name,
            role=role,
            engine_id=engine_id,
            pids=(os.getpid(),),
            num_blocks=num_blocks,
            block_size=block_size,
            block_bytes=block_size * 1024,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            dtype="float32",
            kv_dtype="float32",
            log_path="",
        )
        self._fabric = fabric
        self._latency = latency or LatencyModel()
        self.faults = faults or Faults()
        self._weight_version = weight_version
        self._lease_s = lease_s
        self._counters = EngineCounters()
        self._running: dict[str, _Running] = {}
        self._pinned: dict[str, tuple[float, tuple[int, ...]]] = {}
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._freed = asyncio.Condition()
        self._dead = asyncio.Event()

    async def start(self) -> EngineInfo:
        """Come up.

        Raises:
            EngineStartError: by `faults.fail_start`.
        """
        await asyncio.sleep(self._latency.start_s)
        if self.faults.fail_start:
            self.faults.fail_start -= 1
            raise EngineStartError(self._info.name, "simulated fault at start")
        self._fabric.engines[self._info.engine_id] = self
        return self._info

    @property
    def info(self) -> EngineInfo:
        return self._info

    def kill(self) -> None:
        """Die as by `kill -9`: everything in flight fails, all KV is gone."""
        self._dead.set()
        self._fabric.engines.pop(self._info.engine_id, None)
        self._running.clear()
        self._pinned.clear()

    async def prefill(self, request: PrefillRequest) -> PrefillOutput:
        begun = asyncio.get_running_loop().time()
        state = await self._admit(request, len(request.token_ids) + 1)
        try:
            if self.faults.fail_prefills:
                self.faults.fail_prefills -= 1
                raise LegError(self._info.name, "simulated fault in prefill")
            cached = self._lookup(request)
            computed = len(request.token_ids) - cached
            await self._spend(computed * self._latency.prefill_token_s)
            if state.aborted:
                raise LegError(self._info.name, "prefill ended with abort")
            self._store(request)
            self._count(computed_tokens=computed, cache_hit_tokens=cached, generated_tokens=1)
            handle = None if self.faults.lose_handles else self._pin(request)
        finally:
            await self._free(request.request_id)
        return PrefillOutput(
            kv=handle,
            elapsed_s=asyncio.get_running_loop().time() - begun,
            computed_tokens=computed,
            weight_version=self._weight_version,
        )

    async def decode(
        self, request: DecodeRequest
    ) -> AsyncGenerator[FirstToken | DecodeOutput, None]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            state = await self._admit(request, len(request.token_ids) + request.sampling.max_tokens)
        except asyncio.CancelledError:
            if request.kv is not None:
                await self.release(request.request_id, request.kv)
            raise
        try:
            if self.faults.fail_decodes:
                self.faults.fail_decodes -= 1
                raise LegError(self._info.name, "simulated fault in decode")
            cached = self._lookup(request)
            prompt, pulled = await self._pull(request, cached)
            scheduled = loop.time()
            computed = len(request.token_ids) - cached - pulled
            await self._spend((computed + 1) * self._latency.prefill_token_s)
            self._count(computed_tokens=computed, cache_hit_tokens=cached, pulled_tokens=pulled)
            self._store(request)
            token_ids: list[int] = []
            logprobs: list[float] = []
            reason = "abort" if state.aborted else None
            first = last = loop.time()
            while reason is None:
                token, logprob = _next_token(prompt, token_ids, request)
                token_ids.append(token)
                logprobs.append(logprob)
                self._count(generated_tokens=1)
                reason = _finish_reason(request, token_ids)
                if reason is None and len(token_ids) == 1:
                    yield FirstToken(cached_tokens=cached + pulled)
                if reason is None:
                    await self._step()
                    reason = "abort" if state.aborted else None
                last = loop.time()
            yield DecodeOutput(
                token_ids=tuple(token_ids),
                logprobs=tuple(logprobs),
                text=" ".join(map(str, token_ids)),
                finish_reason=reason,
                cached_tokens=cached + pulled,
                wait_s=scheduled - begun,
                prefill_s=first - scheduled,
                decode_s=last - first,
                weight_version=self._weight_version,
                first_top_logprobs=_top(prompt, request),
            )
        finally:
            await self._free(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._answer()
        for request_id in request_ids:
            if (state := self._running.get(request_id)) is not None:
                state.aborted = True
                state.blocks = 0
        async with self._freed:
            self._freed.notify_all()

    async def release(self, request_id: str, kv: KvParams) -> None:
        await self._answer()
        if (owner := self._fabric.engines.get(kv["remote_engine_id"])) is not None:
            await owner._unpin(kv["remote_request_id"])

    async def load(self) -> EngineLoad:
        await self._answer()
        return EngineLoad(running=len(self._running), waiting=0, held_blocks=self._held())

    async def health(self) -> None:
        await self._answer()

    async def counters(self) -> EngineCounters:
        await self._answer()
        return self._counters

    async def reset_prefix_cache(self) -> bool:
        await self._answer()
        if self._held():
            return False
        self._cache.clear()
        return True

    async def close(self) -> None:
        self.kill()

    async def _admit(self, request: PrefillRequest | DecodeRequest, tokens: int) -> _Running:
        await self._answer()
        if request.request_id in self._running:
            raise InvalidRequest(
                [Problem("request_id", request.request_id, "one not in use", "use a fresh one")]
            )
        if tokens > self._info.max_model_len:
            allowed = f"at most {self._info.max_model_len} tokens"
            raise InvalidRequest([Problem("request", f"{tokens} tokens", allowed, "shorten it")])
        state = _Running(blocks=0)
        self._running[request.request_id] = state
        blocks = math.ceil(tokens / self._info.block_size)
        try:
            async with self._freed:
                while not state.aborted and self._held() + blocks > self._info.num_blocks:
                    # By time as well: a lease may end, or the engine die, without a notice.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_FREED_POLL_S):
                            await self._freed.wait()
                    self._check_alive()
        except BaseException:
            await self._free(request.request_id)
            raise
        state.blocks = 0 if state.aborted else blocks
        return state

    async def _free(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        async with self._freed:
            self._freed.notify_all()

    def _held(self) -> int:
        self._expire()
        size = self._info.block_size
        pinned = sum(math.ceil(len(tokens) / size) for _, tokens in self._pinned.values())
        return pinned + sum(state.blocks for state in self._running.values())

    def _pin(self, request: PrefillRequest) -> KvParams:
        expires = asyncio.get_running_loop().time() + self._lease_s
        self._pinned[request.request_id] = (expires, request.token_ids)
        blocks = math.ceil(len(request.token_ids) / self._info.block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._info.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_host": "simulated",
            "remote_port": 1,
            "tp_size": 1,
        }

    async def _unpin(self, request_id: str) -> tuple[int, ...] | None:
        self._expire()
        _, token_ids = self._pinned.pop(request_id, (0.0, None))
        async with self._freed:
            self._freed.notify_all()
        return token_ids

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for request_id in [key for key, (end, _) in self._pinned.items() if end < now]:
            del self._pinned[request_id]
            self._count(kv_expired=1)

    async def _pull(self, request: DecodeRequest, cached: int) -> tuple[tuple[int, ...], int]:
        """Return the prompt that the loaded KV stands for, and how many tokens were pulled."""
        if request.kv is None or self.faults.ignore_kv:
            return request.token_ids, 0
        if self.faults.fail_kv_loads:
            self.faults.fail_kv_loads -= 1
            raise KvLoadFailed(self._info.name, "simulated fault while loading KV")
        owner = self._fabric.engines.get(request.kv["remote_engine_id"])
        if owner is None:
            raise KvLoadFailed(self._info.name, "the prefill engine is gone")
        try:
            await self._spend(self._latency.pull_s)
        finally:  # an aborted request, too, tells the prefill engine that it is done
            prompt = await owner._unpin(request.kv["remote_request_id"])
        blocks = math.ceil((len(request.token_ids) - cached) / self._info.block_size)
        self._count(kv_pulls=1, kv_bytes=blocks * self._info.block_bytes)
        if prompt is None or self.faults.corrupt_kv:
            prompt = (0, *request.token_ids[1:])  # somebody else's KV, and no error
        return prompt, len(request.token_ids) - cached

    def _lookup(self, request: PrefillRequest | DecodeRequest) -> int:
        """Return how many prompt tokens the prefix cache holds; never the whole prompt."""
        cached = 0
        if self.faults.forget_prefixes:
            return 0
        for block in self._block_hashes(request):
            if block not in self._cache:
                break
            self._cache.move_to_end(block)
            cached += self._info.block_size
        return min(
            cached, (len(request.token_ids) - 1) // self._info.block_size * self._info.block_size
        )

    def _store(self, request: PrefillRequest | DecodeRequest) -> None:
        for block in self._block_hashes(request):
            self._cache[block] = None
        while len(self._cache) > self._info.num_blocks:
            self._cache.popitem(last=False)

    def _block_hashes(self, request: PrefillRequest | DecodeRequest) -> list[int]:
        size = self._info.block_size
        ends = range(size, len(request.token_ids) + 1, size)
        return [hash((request.cache_salt, request.token_ids[:end])) for end in ends]

    def _count(self, **counts: int) -> None:
        self._counters = self._counters + EngineCounters(**counts)

    async def _step(self) -> None:
        batch = len(self._running)
        await self._spend(self._latency.step_s + batch * self._latency.step_sequence_s)

    async def _spend(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._answer()

    async def _answer(self) -> None:
        """Return when the engine reacts: at once, never while it hangs; raise when it is dead."""
        if self.faults.hang:
            await self._dead.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._dead.is_set():
            raise EngineDied(self._info.name, "killed")


class SimulatedLauncher:
    """Launches simulated engines for a fleet, all on one fabric.

    Attributes:
        faults: by engine name; they stay with the name over restarts.
        engines: the present incarnation of each engine.
        launched: how many incarnations there were.
        lease_s: of the handles of engines launched from now on, as the configuration has it.
    """

    def __init__(self, latency: LatencyModel | None = None, **engine_arguments: Any) -> None:
        self.faults: dict[str, Faults] = {}
        self.engines: dict[str, SimulatedEngine] = {}
        self.launched = 0
        self.lease_s = 30.0
        self._fabric = Fabric()
        self._latency = latency
        self._engine_arguments = engine_arguments

    async def launch(self, spec: EngineSpec, generation: int) -> Engine:
        self.launched += 1
        engine = SimulatedEngine(
            spec.name,
            spec.role,
            self._fabric,
            engine_id=f"{spec.name}-{generation}",
            latency=self._latency,
            faults=self.faults.setdefault(spec.name, Faults()),
            lease_s=self.lease_s,
            **self._engine_arguments,
        )
        await engine.start()
        self.engines[spec.name] = engine
        return engine


def _next_token(
    prompt: tuple[int, ...], generated: Sequence[int], request: DecodeRequest
) -> tuple[int, float]:
    seed = request.seed if request.sampling.temperature > 0 else 0
    draw = derive_seed(hash(prompt), *generated[-4:], len(generated), seed)
    token = EOS_TOKEN_ID if draw % _EOS_ONE_IN == 0 else 3 + draw % (VOCAB_SIZE - 3)
    if request.sampling.ignore_eos and token == EOS_TOKEN_ID:
        token += 1
    return token, -(1 + draw % 1000) / 500


def _finish_reason(request: DecodeRequest, token_ids: Sequence[int]) -> str | None:
    sampling = request.sampling
    enough = len(token_ids) >= sampling.min_tokens
    if enough and token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    if enough and token_ids[-1] == EOS_TOKEN_ID and not sampling.ignore_eos:
        return "stop"
    return "length" if len(token_ids) >= sampling.max_tokens else None


def _top(prompt: tuple[int, ...], request: DecodeRequest) -> dict[int, float]:
    if not request.top_logprobs:
        return {}
    token, logprob = _next_token(prompt, (), request)
    others = {(token + i) % VOCAB_SIZE: logprob - i for i in range(1, request.top_logprobs)}
    return {token: logprob, **others}
