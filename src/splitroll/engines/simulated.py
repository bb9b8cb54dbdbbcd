"""An engine that computes no model: a latency model, a KV pool, a prefix cache, and faults.

It obeys the same contract as a real engine (`tests/contract`), down to the failure that matters
most: pulling a handle whose blocks were freed gives wrong tokens and no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import math
import os
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from splitroll.config.pools import Pool
from splitroll.config.schema import Config
from splitroll.engines.process import STEPS_KEPT
from splitroll.engines.protocol import (
    Candidates,
    DecodeEvent,
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
    StepStats,
    Tokens,
    TransferStep,
)
from splitroll.errors import (
    EngineDied,
    EngineStartError,
    InvalidRequest,
    KvLoadFailed,
    LegError,
    NoPlace,
    Problem,
)
from splitroll.placement import LOOPBACK, EngineSpec, Node, place_more
from splitroll.types import Role, derive_seed, version_spans
from splitroll.weights.offer import LoadedWeights, WeightOffer
from splitroll.weights.segment import Segment

VOCAB_SIZE = 4096
EOS_TOKEN_ID = 2
_FREED_POLL_S = 0.02
_SOON_S = 1e-9
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
    fail_loads: int = 0
    """Weight updates that fail at `fail_parameter`, half-way."""
    fail_parameter: str = "w0"
    refuse_resets: int = 0
    die_at: str = ""
    """Control call at which it dies: pause, load, reset, publish or resume."""
    hang_at: str = ""
    fail_transfer: str = ""
    """Step of a weight transfer that fails."""
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
    weights: str = ""
    """Digest of the weights that computed its KV."""
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    shares: list[asyncio.Event] = field(default_factory=list)
    """Of requests that compute blocks which this one found in the cache."""


@dataclass(frozen=True, slots=True)
class _Kv:
    """What computed KV stands for: a prompt, and the digest of the weights."""

    token_ids: tuple[int, ...]
    weights: str


class SimulatedEngine(Engine):
    """See the module's docstring.

    Args:
        engine_id: of this incarnation; handles name it.
        num_blocks: KV blocks in all.
        checkpoint: folder of the weights that it starts with; it has none of its own if None.
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
        checkpoint: Path | None = None,
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
        self._steps: deque[StepStats] = deque(maxlen=STEPS_KEPT)
        self._running: dict[str, _Running] = {}
        self._pinned: dict[str, tuple[float, _Kv]] = {}
        self._cache: OrderedDict[int, tuple[str, asyncio.Event]] = OrderedDict()
        """Block hash to the digest of the weights that computed the block, and whether it is."""
        self._weights = "" if checkpoint is None else _digest_of(checkpoint)
        """Digest of the weights; every token depends on it."""
        self.transfers: list[tuple[str, dict[str, Any]]] = []
        """Steps of weight transfers that it was asked for."""
        self._running_on = asyncio.Event()
        self._running_on.set()
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
            cached = self._lookup(request, state)
            computed = len(request.token_ids) - cached
            self._store(request, state)  # as vLLM does, for those that come with it
            await self._compute(computed, cached, state)
            if state.aborted:
                raise LegError(self._info.name, "prefill ended with abort")
            self._count(computed_tokens=computed, cache_hit_tokens=cached, generated_tokens=1)
            handle = (
                None
                if self.faults.lose_handles
                else self._pin(request.request_id, request.token_ids, state)
            )
        finally:
            await self._free(request.request_id)
        return PrefillOutput(
            kv=handle,
            elapsed_s=asyncio.get_running_loop().time() - begun,
            computed_tokens=computed,
            weight_version=self._weight_version,
        )

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            state = await self._admit(request, len(request.token_ids) + request.sampling.max_tokens)
        except asyncio.CancelledError:
            if request.kv is not None and request.kv.get("do_remote_prefill"):
                await self.release(request.request_id, request.kv)
            raise
        try:
            if self.faults.fail_decodes:
                self.faults.fail_decodes -= 1
                raise LegError(self._info.name, "simulated fault in decode")
            cached = self._lookup(request, state)
            prompt, pulled = await self._pull(request, cached, state)
            scheduled = loop.time()
            computed = len(request.token_ids) - cached - pulled
            self._store(request, state)
            await self._compute(computed + 1, cached + pulled, state)
            self._count(computed_tokens=computed, cache_hit_tokens=cached, pulled_tokens=pulled)
            token_ids: list[int] = []
            logprobs: list[float] = []
            versions: list[int] = []
            reason = "abort" if state.aborted else None
            first = last = loop.time()
            sent = 0
            while reason is None:
                # KV of other weights than the engine's gives other tokens, and no error.
                model = (self._weights, "" if state.weights == self._weights else state.weights)
                token, logprob = _next_token(model, prompt, token_ids, request)
                token_ids.append(token)
                logprobs.append(logprob)
                versions.append(self._weight_version)
                self._count(generated_tokens=1)
                reason = _finish_reason(request, token_ids)
                if reason is None and len(token_ids) == 1:
                    yield FirstToken(cached + pulled, self._weight_version)
                if request.stream and len(token_ids) - sent >= request.stream:
                    yield self._tokens(
                        request, token_ids[sent:], logprobs[sent:], last=reason is not None
                    )
                    sent = len(token_ids)
                if reason is None:
                    await self._step(len(prompt) + len(token_ids))
                    reason = "abort" if state.aborted else None
                last = loop.time()
            if request.stream and sent < len(token_ids):
                yield self._tokens(request, token_ids[sent:], logprobs[sent:], last=True)
            yield DecodeOutput(
                token_ids=tuple(token_ids),
                logprobs=tuple(logprobs),
                text="".join(f" {token}" for token in token_ids),
                finish_reason=reason,
                cached_tokens=cached + pulled,
                wait_s=scheduled - begun,
                prefill_s=first - scheduled,
                decode_s=last - first,
                weight_versions=version_spans(versions),
                first_top_logprobs=_top((self._weights, ""), prompt, request),
                stop_reason=_stop_reason(request, token_ids, reason),
                kv=self._hand_out(request, prompt + tuple(token_ids), reason, state),
            )
        finally:
            await self._free(request.request_id)

    def _tokens(
        self,
        request: DecodeRequest,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        last: bool,
    ) -> Tokens:
        return Tokens(
            tuple(token_ids),
            tuple(logprobs),
            "".join(f" {token}" for token in token_ids),
            candidates=_candidates(request, token_ids, logprobs),
            weight_version=self._weight_version,
            last=last,
        )

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
        return EngineLoad(len(self._running), 0, self._held(), pinned=len(self._pinned))

    async def health(self) -> None:
        await self._answer()

    async def counters(self) -> EngineCounters:
        await self._answer()
        return self._counters

    async def steps(self) -> Sequence[StepStats]:
        await self._answer()
        steps = list(self._steps)
        self._steps.clear()
        return steps

    async def metrics(self) -> str:
        await self._answer()
        return (
            "# HELP vllm:num_requests_running Requests that run.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{model_name="simulated"}} {len(self._running)}\n'
        )

    async def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        await self._control("reset")
        if self.faults.refuse_resets:
            self.faults.refuse_resets -= 1
            return False
        if self._pinned or (self._held() and not preempt):
            return False
        for state in self._running.values():
            state.weights = self._weights  # computed again when it resumes
        self._cache.clear()
        return True

    async def pause(self, *, abort: bool = False) -> None:
        await self._control("pause")
        if abort:
            ending = dict(self._running)
            await self.abort(list(ending))
            while any(self._running.get(name) is state for name, state in ending.items()):
                await self._spend(_FREED_POLL_S)
        self._running_on.clear()

    async def resume(self) -> None:
        await self._control("resume")
        self._running_on.set()

    async def load_weights(self, offer: WeightOffer) -> LoadedWeights:
        begun = asyncio.get_running_loop().time()
        await self._control("load")
        try:
            checksums, self._weights = await asyncio.to_thread(self._read, offer)
        except RuntimeError as exc:
            self._weights = f"broken by {offer}"
            raise LegError(self._info.name, str(exc)) from exc
        await self._answer()
        return LoadedWeights(asyncio.get_running_loop().time() - begun, (checksums,))

    async def transfer_weights(
        self, step: TransferStep, info: Mapping[str, Any] | None = None
    ) -> None:
        """An update's weights are what its parts say."""
        self.transfers.append((step, dict(info or {})))
        await self._control(f"transfer {step}")
        if self.faults.fail_transfer == step:
            self.faults.fail_transfer = ""
            raise LegError(self._info.name, f"simulated fault at {step}")
        if step == "start":
            self._weights = "begun"
        if step == "update":
            self._weights = _digest({self._weights: repr(info)})

    async def call_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        await self._answer()
        if method == "compute_weight_checksums":
            return [{"all": self._weights}]
        if method != "echo":
            raise LegError(self._info.name, f"no method {method}")
        return [[list(args), kwargs]]

    async def set_weight_version(self, version: int) -> None:
        await self._control("publish")
        self._weight_version = version

    def _read(self, offer: WeightOffer) -> tuple[dict[str, str], str]:
        """Read an offer to its end; returns the checksums asked for and a digest of all of it."""
        whole = {}
        for name, data in _named_bytes(offer):
            if self.faults.fail_loads and name == self.faults.fail_parameter:
                self.faults.fail_loads -= 1
                raise RuntimeError(f"parameter {name}: simulated fault while loading")
            whole[name] = hashlib.sha256(data).hexdigest()
        if missing := [name for name in offer.names if name not in whole]:
            raise RuntimeError(f"parameter {missing[0]}: not in {offer.folder}")
        return {name: whole[name] for name in offer.checksum}, _digest(whole)

    async def _control(self, call: str) -> None:
        if self.faults.die_at == call:
            self.faults.die_at = ""
            self.kill()
        if self.faults.hang_at == call:
            await self._dead.wait()
        await self._answer()

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
        state = _Running(blocks=0, weights=self._weights)
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
        if (state := self._running.pop(request_id, None)) is not None:
            state.computed.set()
        async with self._freed:
            self._freed.notify_all()

    def _held(self) -> int:
        self._expire()
        size = self._info.block_size
        pinned = sum(math.ceil(len(kv.token_ids) / size) for _, kv in self._pinned.values())
        return pinned + sum(state.blocks for state in self._running.values())

    def _hand_out(
        self, request: DecodeRequest, token_ids: tuple[int, ...], reason: str, state: _Running
    ) -> KvParams | None:
        """Return a handle to all but the last token, if the request asks for one and was cut."""
        if request.kv is None or not request.kv.get("do_remote_decode") or reason != "length":
            return None
        return self._pin(request.request_id, token_ids[:-1], state)

    def _pin(self, request_id: str, token_ids: tuple[int, ...], state: _Running) -> KvParams:
        expires = asyncio.get_running_loop().time() + self._lease_s
        self._pinned[request_id] = (expires, _Kv(token_ids, state.weights))
        blocks = math.ceil(len(token_ids) / self._info.block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._info.engine_id,
            "remote_request_id": request_id,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_host": "simulated",
            "remote_port": 1,
            "tp_size": 1,
        }

    async def _unpin(self, request_id: str) -> _Kv | None:
        self._expire()
        _, kv = self._pinned.pop(request_id, (0.0, None))
        async with self._freed:
            self._freed.notify_all()
        return kv

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for request_id in [key for key, (end, _) in self._pinned.items() if end < now]:
            del self._pinned[request_id]
            self._count(kv_expired=1)

    async def _pull(
        self, request: DecodeRequest, cached: int, state: _Running
    ) -> tuple[tuple[int, ...], int]:
        """Return the prompt that the loaded KV stands for, and how many tokens were pulled."""
        if request.kv is None or not request.kv.get("do_remote_prefill") or self.faults.ignore_kv:
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
            kv = await owner._unpin(request.kv["remote_request_id"])
        blocks = math.ceil((len(request.token_ids) - cached) / self._info.block_size)
        self._count(kv_pulls=1, kv_bytes=blocks * self._info.block_bytes)
        if kv is None or self.faults.corrupt_kv:
            kv = _Kv((0, *request.token_ids[1:]), state.weights)  # somebody else's, and no error
        if kv.weights != self._weights:
            state.weights = kv.weights
        # A handle to generated tokens lacks the last one's KV, which is computed here.
        loaded = kv.token_ids + request.token_ids[len(kv.token_ids) :]
        return loaded, len(request.token_ids) - cached

    def _lookup(self, request: PrefillRequest | DecodeRequest, state: _Running) -> int:
        """Return how many prompt tokens the prefix cache holds; never the whole prompt."""
        cached = 0
        if self.faults.forget_prefixes:
            return 0
        for block in self._block_hashes(request):
            if (found := self._cache.get(block)) is None:
                break
            weights, computed = found
            if weights != self._weights:
                state.weights = weights
            if not computed.is_set():
                state.shares.append(computed)
            self._cache.move_to_end(block)
            cached += self._info.block_size
        return min(
            cached, (len(request.token_ids) - 1) // self._info.block_size * self._info.block_size
        )

    def _store(self, request: PrefillRequest | DecodeRequest, state: _Running) -> None:
        for block in self._block_hashes(request):
            if block not in self._cache:
                self._cache[block] = (state.weights, state.computed)
        while len(self._cache) > self._info.num_blocks:
            self._cache.popitem(last=False)

    def _block_hashes(self, request: PrefillRequest | DecodeRequest) -> list[int]:
        size = self._info.block_size
        ends = range(size, len(request.token_ids) + 1, size)
        return [hash((request.cache_salt, request.token_ids[:end])) for end in ends]

    def _count(self, **counts: int) -> None:
        self._counters = self._counters + EngineCounters(**counts)

    async def _step(self, context: int) -> None:
        batch = len(self._running)
        seconds = self._latency.step_s + batch * self._latency.step_sequence_s
        self._steps.append(StepStats(max(seconds, _SOON_S), batch, batch * context, 0, 0))
        await self._spend(seconds)

    async def _compute(self, tokens: int, offset: int, state: _Running) -> None:
        seconds = tokens * self._latency.prefill_token_s
        pairs = tokens * offset + tokens * tokens // 2
        self._steps.append(StepStats(max(seconds, _SOON_S), 0, 0, tokens, pairs))
        await self._spend(seconds)
        state.computed.set()
        for shared in state.shares:
            while not shared.is_set():
                await self._spend(_FREED_POLL_S / 10)

    async def _spend(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not self._running_on.is_set():
            dead, on = (asyncio.ensure_future(e.wait()) for e in (self._dead, self._running_on))
            try:
                await asyncio.wait([dead, on], return_when=asyncio.FIRST_COMPLETED)
            finally:
                dead.cancel()
                on.cancel()
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
        lease_s, checkpoint: of engines launched from now on, as the configuration has them.
        config: of the fleet.
        gone: nodes that are no more; `homes`: those where there is room for their engines.
    """

    def __init__(self, latency: LatencyModel | None = None, **engine_arguments: Any) -> None:
        self.faults: dict[str, Faults] = {}
        self.engines: dict[str, SimulatedEngine] = {}
        self.launched = 0
        self.lease_s = 30.0
        self.checkpoint: Path | None = None
        self.config = Config()
        self.gone: set[str] = set()
        self.homes: list[str] = []
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
            checkpoint=self.checkpoint,
            **self._engine_arguments,
        )
        await engine.start()
        self.engines[spec.name] = engine
        return engine

    async def relocate(self, spec: EngineSpec, others: Sequence[EngineSpec]) -> EngineSpec:
        if spec.node_id not in self.gone:
            return spec
        if not self.homes:
            raise NoPlace(spec.name, "its node is gone, and no other has room")
        return replace(spec, node_id=self.homes[0])

    async def place_more(
        self, pool: Pool, count: int, present: Sequence[EngineSpec], taken: Iterable[str]
    ) -> tuple[EngineSpec, ...]:
        node = Node("node", LOOPBACK, (), tuple(range(64)))
        return place_more(self.config, [node], present, pool, count, on_gpu=False, taken=taken)


def _digest(checksums: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()


@functools.cache
def _digest_of(folder: Path) -> str:
    named = _named_bytes(WeightOffer(folder=str(folder)))
    return _digest({name: hashlib.sha256(data).hexdigest() for name, data in named})


def _named_bytes(offer: WeightOffer) -> Iterator[tuple[str, bytes]]:
    if offer.segment is None:
        from splitroll.weights.disk import read_files
        from splitroll.weights.source import raw_bytes

        for name, tensor in read_files(Path(offer.folder or "")):
            yield name, raw_bytes(tensor)
        return
    segment = Segment.attach(offer.segment)
    for index in segment.follow([bucket.owner for bucket in offer.buckets], offer.timeout_s):
        for spec, at in offer.buckets[index].specs:
            start = offer.segment.data_at + at
            yield spec.name, segment.memory[start : start + spec.nbytes]
    segment.close()


def _next_token(
    model: tuple[str, str],
    prompt: tuple[int, ...],
    generated: Sequence[int],
    request: DecodeRequest,
) -> tuple[int, float]:
    seed = request.seed if request.sampling.temperature > 0 else 0
    # Of all tokens before it, wherever the prompt ends: a sample may go on in another request.
    draw = derive_seed(*model, hash((*prompt, *generated)), seed)
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


def _candidates(
    request: DecodeRequest, token_ids: Sequence[int], logprobs: Sequence[float]
) -> tuple[Candidates, ...]:
    """Return what native parameters ask for: the token is the most likely one here."""
    if request.native is None:
        return ()
    others = (msgspec.msgpack.decode(request.native).get("logprobs") or 1) - 1
    return tuple(
        (
            (token, logprob, 1),
            *(((token + i) % VOCAB_SIZE, logprob - i, i + 1) for i in range(1, others + 1)),
        )
        for token, logprob in zip(token_ids, logprobs, strict=True)
    )


def _stop_reason(request: DecodeRequest, token_ids: Sequence[int], reason: str) -> int | None:
    ended = reason == "stop" and token_ids[-1] in request.sampling.stop_token_ids
    return token_ids[-1] if ended else None


def _top(
    model: tuple[str, str], prompt: tuple[int, ...], request: DecodeRequest
) -> dict[int, float]:
    if not request.top_logprobs:
        return {}
    token, logprob = _next_token(model, prompt, (), request)
    others = {(token + i) % VOCAB_SIZE: logprob - i for i in range(1, request.top_logprobs)}
    return {token: logprob, **others}
