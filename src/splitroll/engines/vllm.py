"""One vLLM engine in this process: an in-process AsyncLLM behind the engine interface.

Runs inside the engine's own actor; the environment that vLLM reads at import is set by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from prometheus_client import generate_latest
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.prometheus import get_prometheus_registry

from splitroll.engines.arguments import EngineArguments
from splitroll.engines.data_ranks import DataRanks
from splitroll.engines.forks import fork_from_actor
from splitroll.engines.mooncake_process import BOOTSTRAP_PORT, own_handle
from splitroll.engines.process import WEIGHT_TRANSFER
from splitroll.engines.protocol import (
    Candidates,
    DecodeEvent,
    DecodeOutput,
    DecodeRequest,
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
    Problem,
)
from splitroll.model import checkpoint_folder
from splitroll.ports import held_ports
from splitroll.types import SamplingParams, VersionSpan
from splitroll.weights.offer import LoadedWeights, NativeOffer, WeightOffer

T = TypeVar("T")

_REMEMBERED_ABORTS = 10_000
_DEATH_POLL_S = 0.2
_NEVER = 2**31
"""Tokens between two outputs of vLLM's, after the first token: each costs about a millisecond."""
_WARM_UP = SamplingParams(max_tokens=2, temperature=0.0)
_WARM_UP_TOKENS = 40
"""More than a block on CPU, so that the first forward of each kind is behind us."""


class VllmEngine:
    """An engine on vLLM's AsyncLLM."""

    def __init__(self, arguments: EngineArguments, log_path: str) -> None:
        self._arguments = arguments
        self._log_path = log_path
        self._counters = EngineCounters()
        self._weight_version = 0
        self._rendezvous = ""
        self._bootstrap: str | None = None
        self._ranks = DataRanks(arguments.vllm.get("data_parallel_size", 1))
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._prefilling: set[str] = set()

    async def start(self) -> EngineInfo:
        """Start the engine, generate once, and return what it is.

        Raises:
            EngineStartError: with vLLM's own error.
        """
        begun = time.monotonic()
        if self._arguments.forks:
            fork_from_actor()
        arguments = dict(self._arguments.vllm)
        if (transfer := arguments.get("kv_transfer_config")) is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        try:
            with self._bootstrap_port():
                self._llm = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(**arguments), stat_loggers=[self._make_logger]
                )
            loaded = time.monotonic()
            await self._warm_up()
        except Exception as exc:  # whatever vLLM raises here is the engine's own error
            raise EngineStartError(self._arguments.name, f"{type(exc).__name__}: {exc}") from exc
        warm = time.monotonic()
        self._info = await self._describe({"load": loaded - begun, "warm_up": warm - loaded})
        freeze_gc_heap()  # else a collection now and then looks through all that vLLM has imported
        return self._info

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def prefill(self, request: PrefillRequest) -> PrefillOutput:
        begun = time.monotonic()
        # An allow-list: nothing of the caller's sampling may prolong or end this leg. The token
        # is discarded, so it must neither be EOS nor stop.
        sampling = VllmSamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": dict(request.kv)},
        )
        rank = self._rank_for(request)
        self._prefilling.add(request.request_id)
        try:
            outputs = [output async for output in self._generate(request, sampling, rank)]
        finally:
            self._prefilling.discard(request.request_id)
        if not outputs or outputs[-1].outputs[0].finish_reason != "length":
            reason = outputs[-1].outputs[0].finish_reason if outputs else "nothing"
            raise LegError(self._arguments.name, f"prefill ended with {reason}")
        output = outputs[-1]
        return PrefillOutput(
            kv=output.kv_transfer_params or self._own_handle(request.kv, rank),
            elapsed_s=time.monotonic() - begun,
            computed_tokens=len(request.token_ids) - (output.num_cached_tokens or 0),
            weight_version=_version_spans(output.outputs[0], 1)[0].version,
        )

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        with self._engine_errors():
            sampling = _vllm_sampling(request)
        wants_logprobs = request.top_logprobs is not None
        wants_candidates = request.native is not None and wants_logprobs
        rank = self._rank_for(request)
        stream = _Stream(request.stream, wants_candidates=wants_candidates)
        token_ids: list[int] = []
        logprobs: list[float] = []
        text: list[str] = []
        top: dict[int, float] = {}
        async for output in self._generate(request, sampling, rank):
            piece = output.outputs[0]
            if piece.finish_reason == "error":
                raise KvLoadFailed(self._arguments.name, "vLLM ended the request with an error")
            cached = output.num_cached_tokens or 0
            if piece.token_ids and not token_ids and piece.finish_reason is None:
                yield FirstToken(cached_tokens=cached, weight_version=self._weight_version)
            if not token_ids and request.top_logprobs and piece.logprobs:
                top = {token: entry.logprob for token, entry in piece.logprobs[0].items()}
            token_ids += piece.token_ids
            chosen = _chosen_logprobs(piece, self._arguments.name) if wants_logprobs else []
            logprobs += chosen
            text.append(piece.text)
            if request.stream:
                stream.add(piece, chosen, output.prompt_logprobs, self._weight_version)
                if (tokens := stream.take(ended=piece.finish_reason is not None)) is not None:
                    yield tokens
            if piece.finish_reason is not None:
                if piece.finish_reason != "abort" and not token_ids:
                    raise LegError(self._arguments.name, "a finished sample without tokens")
                wait_s, prefill_s, decode_s = _phases(output.metrics)
                yield DecodeOutput(
                    token_ids=tuple(token_ids),
                    logprobs=tuple(logprobs),
                    text="".join(text),
                    finish_reason=piece.finish_reason,
                    cached_tokens=cached,
                    wait_s=wait_s,
                    prefill_s=prefill_s,
                    decode_s=decode_s,
                    weight_versions=_version_spans(piece, len(token_ids)),
                    first_top_logprobs=top,
                    stop_reason=piece.stop_reason,
                    kv=output.kv_transfer_params
                    or (
                        self._own_handle(request.kv, rank)
                        if piece.finish_reason == "length"
                        else None
                    ),
                )
                return
        raise LegError(self._arguments.name, "the stream ended without a finish reason")

    async def abort(self, request_ids: Sequence[str]) -> None:
        # vLLM forgets an abort that overtakes its request; we do not: see _generate.
        self._aborted.update(dict.fromkeys(request_ids))
        while len(self._aborted) > _REMEMBERED_ABORTS:
            self._aborted.popitem(last=False)
        prefills = [name for name in request_ids if name in self._prefilling]
        with self._engine_errors():
            await self._llm.abort([name for name in request_ids if name not in self._prefilling])
            for name in prefills:
                await self._abort_prefill(name)

    async def _abort_prefill(self, request_id: str) -> None:
        """Abort a prefill, unless it has just finished: vLLM's abort would then drop the output
        with the handle, and the blocks would stay pinned until their lease ends."""
        inner = list(self._llm.output_processor.external_req_ids.get(request_id, ()))
        if any(await self._ask("splitroll_abort", inner)):
            await self._llm.abort(request_id)

    async def release(self, request_id: str, kv: KvParams) -> None:
        with self._engine_errors():
            await self._llm.notify_kv_transfer_request_rejected(request_id, dict(kv))

    async def load(self) -> EngineLoad:
        with self._engine_errors():
            found = await self._ask("splitroll_load")
        running, waiting, held, pinned = map(sum, zip(*found, strict=True))
        return EngineLoad(running=running, waiting=waiting, held_blocks=held, pinned=pinned)

    async def health(self) -> None:
        with self._engine_errors():
            await self._llm.check_health()
        await self.load()

    async def counters(self) -> EngineCounters:
        return self._counters

    async def steps(self) -> Sequence[StepStats]:
        with self._engine_errors():
            found = await self._ask("splitroll_steps")
        # Ranks step side by side: as of one engine, each stands for what all do meanwhile.
        times = len(found)
        return [
            StepStats(seconds, *(times * count for count in counts))
            for rows in found
            for seconds, *counts in rows
        ]

    async def metrics(self) -> str:
        return str(generate_latest(get_prometheus_registry()), "utf-8")

    async def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        with self._engine_errors():
            await self._answer(self._llm.reset_encoder_cache())
            reset = self._llm.reset_prefix_cache(reset_running_requests=preempt)
            return bool(await self._answer(reset))

    async def pause(self, *, abort: bool = False) -> None:
        mode = "abort" if abort else "keep"
        with self._engine_errors():
            # Not AsyncLLM.pause_generation, which goes on to sleep for 20 ms.
            core = self._llm.engine_core
            await self._answer(core.pause_scheduler_async(mode=mode, clear_cache=False))

    async def resume(self) -> None:
        with self._engine_errors():
            await self._answer(self._llm.resume_generation())

    async def load_weights(self, offer: WeightOffer) -> LoadedWeights:
        with self._worker_errors():
            if offer.native is not None:
                return await self._answer(self._load_natively(offer.native))
            if self._arguments.vllm["weight_transfer_config"]["backend"] != WEIGHT_TRANSFER:
                return await self._answer(self._reload(offer))
            loaded = await self._on_workers("splitroll_load_weights", (offer.to_wire(),))
        return LoadedWeights(
            seconds=max(seconds for seconds, _ in loaded),
            checksums=tuple(checksums for _, checksums in loaded),
        )

    async def _load_natively(self, offer: NativeOffer) -> LoadedWeights:
        """Take part in one of vLLM's own transports, whose trainer's end sends meanwhile."""
        begun = time.monotonic()
        if offer.rendezvous != self._rendezvous:
            init = dict(offer.init[self._arguments.name])
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))
            self._rendezvous = offer.rendezvous
        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=offer.update))
            await self._llm.finish_weight_update()
        except Exception as exc:  # vLLM's engine would go on from what this try left in layers
            raise EngineDied(self._arguments.name, _worker_error(exc)) from exc
        return LoadedWeights(seconds=time.monotonic() - begun)

    async def _reload(self, offer: WeightOffer) -> LoadedWeights:
        """Load files with vLLM's own reload: its transports take none."""
        begun = time.monotonic()
        folder = str(checkpoint_folder(offer.folder or ""))
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        return LoadedWeights(seconds=time.monotonic() - begun)

    async def set_weight_version(self, version: int) -> None:
        with self._engine_errors():
            await self._answer(self._llm.update_weight_version(str(version)))
        self._weight_version = version

    async def transfer_weights(
        self, step: TransferStep, info: Mapping[str, Any] | None = None
    ) -> None:
        self._rendezvous = ""  # whatever group our own transport had, this is another one
        llm, given = self._llm, dict(info or {})
        call: Coroutine[Any, Any, Any]
        with self._worker_errors():
            match step:
                case "init":
                    call = llm.init_weight_transfer_engine(
                        WeightTransferInitRequest(init_info=given)
                    )
                case "start":
                    call = llm.start_weight_update()
                case "update":
                    call = llm.update_weights(WeightTransferUpdateRequest(update_info=given))
                case "finish":
                    call = llm.finish_weight_update()
                case "shutdown":
                    call = llm.shutdown_weight_transfer_engine()
            await self._answer(call)

    async def call_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        with self._worker_errors():
            return await self._on_workers(method, args, kwargs)

    async def close(self) -> None:
        if hasattr(self, "_llm"):
            await asyncio.to_thread(self._llm.shutdown)

    def _rank_for(self, request: PrefillRequest | DecodeRequest) -> int | None:
        if request.data_rank is not None:
            return request.data_rank if self._info.data_ranks > 1 else None
        return self._ranks.choose((request.cache_salt, request.session or request.token_ids))

    async def _generate(
        self,
        request: PrefillRequest | DecodeRequest,
        sampling: VllmSamplingParams,
        rank: int | None,
    ) -> AsyncGenerator[Any, None]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        with self._engine_errors(), self._ranks.running(rank):
            generated = self._llm.generate(
                prompt, sampling, request.request_id, data_parallel_rank=rank
            )
            async for output in generated:
                if request.request_id in self._aborted and not output.finished:
                    await self._llm.abort(request.request_id)
                yield output

    async def _ask(self, utility: str, *args: Any) -> list[Any]:
        """Return what the EngineCore of every data-parallel rank answers."""
        call = self._llm.engine_core.call_utility_all_async(utility, *args)
        return list(await self._answer(call))

    async def _on_workers(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Return what every worker of every data-parallel rank answers; AsyncLLM returns those of
        the first rank."""
        answers = await self._ask("collective_rpc", method, None, tuple(args), dict(kwargs or {}))
        return [answer for of_rank in answers for answer in of_rank]

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """Return EngineCore's answer to a call. vLLM lets calls wait for ever whose core died."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_DEATH_POLL_S)
                if not task.done() and self._llm.errored:
                    raise EngineDeadError
            return task.result()
        finally:
            task.cancel()

    @contextlib.contextmanager
    def _engine_errors(self) -> Any:
        try:
            yield
        except EngineDeadError as exc:
            raise EngineDied(self._arguments.name, str(exc)) from exc
        except (VLLMClientError, ValueError, TypeError) as exc:
            problem = Problem("request", str(exc), "what vLLM accepts", "change the request")
            raise InvalidRequest([problem]) from exc

    @contextlib.contextmanager
    def _worker_errors(self) -> Any:
        """Turn whatever a worker raises into a LegError that says what was wrong."""
        try:
            yield
        except EngineDeadError as exc:
            raise EngineDied(self._arguments.name, str(exc)) from exc
        except EngineDied:
            raise
        except Exception as exc:  # a wall: see above
            raise LegError(self._arguments.name, _worker_error(exc)) from exc

    @contextlib.contextmanager
    def _bootstrap_port(self) -> Iterator[None]:
        """Choose Mooncake's bootstrap port, if the connector is to have one, and hold it until the
        worker has bound it; all workers read it from the environment."""
        if os.environ.get(BOOTSTRAP_PORT) != "0":
            yield
            return
        host = os.environ["VLLM_HOST_IP"]
        with held_ports(1, host) as (port,):
            os.environ[BOOTSTRAP_PORT] = str(port)
            shown = f"[{host}]" if ":" in host else host
            self._bootstrap = f"http://{shown}:{port}"
            yield

    def _own_handle(self, asked: KvParams | None, rank: int | None) -> KvParams | None:
        """Return the handle to what a request left here, where the connector returns none."""
        if asked is None or self._bootstrap is None:
            return None
        of_rank = "" if rank is None else f"_dp{rank}"  # vLLM names ranks so
        return own_handle(asked, self._info.engine_id + of_rank, self._bootstrap)

    async def _warm_up(self) -> None:
        request = DecodeRequest(
            request_id=f"{self._arguments.name}-warm-up",
            token_ids=tuple(range(1, _WARM_UP_TOKENS + 1)),
            sampling=_WARM_UP,
            seed=0,
            cache_salt="warm-up",
        )
        async for _ in self.decode(request):
            pass
        await self._llm.reset_prefix_cache()
        self._counters = EngineCounters()

    async def _describe(self, start_s: Mapping[str, float]) -> EngineInfo:
        config = self._llm.vllm_config
        cache, parallel = config.cache_config, config.parallel_config
        found = await self._ask("splitroll_describe")
        _, block_size, block_bytes, kv_dtype, _ = found[0]
        num_blocks = sum(one[0] for one in found)
        pids = [pid for one in found for pid in one[4]]
        return EngineInfo(
            name=self._arguments.name,
            role=self._arguments.role,
            engine_id=getattr(config.kv_transfer_config, "engine_id", None) or "",
            pids=(os.getpid(), *pids),
            num_blocks=num_blocks,
            block_size=block_size or cache.block_size,
            block_bytes=block_bytes,
            max_num_seqs=config.scheduler_config.max_num_seqs * len(found),
            max_model_len=config.model_config.max_model_len,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            kv_dtype=kv_dtype,
            log_path=self._log_path,
            start_s=start_s,
            world_size=parallel.world_size * parallel.data_parallel_size,
            data_ranks=len(found),
        )

    def _make_logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        return _Counting(self)

    def count(self, step: EngineCounters) -> None:
        """Add what one engine step did."""
        self._counters = self._counters + step


class _Stream:
    """Gathers tokens until there are enough of them to be sent."""

    def __init__(self, every: int, *, wants_candidates: bool) -> None:
        self._every = every
        self._wants_candidates = wants_candidates
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._text = ""
        self._candidates: list[Candidates] = []
        self._prompt: tuple[Candidates, ...] = ()
        self._version = 0

    def add(self, piece: Any, logprobs: Sequence[float], prompt: Any, version: int) -> None:
        self._token_ids += piece.token_ids
        self._logprobs += logprobs
        self._text += piece.text
        if self._wants_candidates:
            entries = zip(piece.token_ids, piece.logprobs, strict=True)
            self._candidates += [_candidates(token, entry) for token, entry in entries]
        if prompt:
            self._prompt = tuple(_candidates(next(iter(e)), e) for e in prompt if e is not None)
        self._version = version

    def take(self, *, ended: bool) -> Tokens | None:
        if not self._token_ids or (len(self._token_ids) < self._every and not ended):
            return None
        tokens = Tokens(
            tuple(self._token_ids),
            tuple(self._logprobs),
            self._text,
            tuple(self._candidates),
            self._prompt,
            self._version,
            ended,
        )
        self._token_ids, self._logprobs, self._text = [], [], ""
        self._candidates, self._prompt = [], ()
        return tokens


class _Counting(StatLoggerBase):  # type: ignore[misc]
    """Adds up vLLM's per-step statistics."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        step = EngineCounters()
        if iteration_stats is not None:
            tokens = iteration_stats.prompt_token_stats
            step += EngineCounters(
                computed_tokens=tokens.computed,
                cache_hit_tokens=tokens.local_cache_hit,
                pulled_tokens=tokens.external_kv_transfer,
                generated_tokens=iteration_stats.num_generation_tokens,
                preemptions=iteration_stats.num_preempted_reqs,
            )
        if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
            step += _connector_counters(scheduler_stats.kv_connector_stats)
        self._engine.count(step)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _connector_counters(stats: Any) -> EngineCounters:
    data = stats.get("data", stats) if isinstance(stats, Mapping) else stats.data
    parts = [part for part in data.values() if isinstance(part, Mapping) or hasattr(part, "data")]
    if parts:  # of a chain of connectors
        return sum(map(_connector_counters, parts), EngineCounters())
    failures = (
        "num_failed_transfers",
        "num_failed_notifications",
        "num_failed_handshakes",
        "num_failed_recvs",
    )
    return EngineCounters(
        kv_pulls=len(data.get("bytes_transferred", ())),
        kv_bytes=int(sum(data.get("bytes_transferred", ()))),
        kv_pull_s=float(sum(data.get("transfer_duration", ()))),
        kv_failures=sum(len(data.get(name, ())) for name in failures),
        kv_expired=len(data.get("num_kv_expired_reqs", ())),
    )


def _candidates(token: int, entry: Mapping[int, Any]) -> Candidates:
    """Return a position's log-probabilities, the token that is there first."""
    others = [(t, float(e.logprob), int(e.rank)) for t, e in entry.items() if t != token]
    return ((token, float(entry[token].logprob), int(entry[token].rank)), *others)


def _vllm_sampling(request: DecodeRequest) -> VllmSamplingParams:
    sampling = request.sampling
    extra = None if request.kv is None else {"kv_transfer_params": dict(request.kv)}
    if request.native is not None:
        native = msgspec.msgpack.decode(request.native, type=VllmSamplingParams)
        native.max_tokens, native.min_tokens = sampling.max_tokens, sampling.min_tokens
        native.n, native.seed = 1, request.seed
        native.logprobs = None if request.top_logprobs is None else native.logprobs or 0
        native.output_kind = RequestOutputKind.DELTA
        native.detokenize = request.text or bool(native.stop)
        native.stream_interval = request.stream or _NEVER
        native.extra_args = {**(native.extra_args or {}), **(extra or {})} or None
        return native
    return VllmSamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=request.seed,
        logprobs=request.top_logprobs,
        detokenize=request.text or bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA,
        stream_interval=request.stream or _NEVER,
        extra_args=extra,
    )


def _chosen_logprobs(piece: Any, engine: str) -> list[float]:
    """Return the log-probability of each token of a piece; one that is missing is an error."""
    entries = piece.logprobs or []
    if len(entries) != len(piece.token_ids):
        raise LegError(
            engine, f"{len(piece.token_ids)} tokens came with {len(entries)} log-probabilities"
        )
    return [
        float(entry[token].logprob) for token, entry in zip(piece.token_ids, entries, strict=True)
    ]


def _version_spans(piece: Any, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the versions of a finished output; vLLM says "default" before any was set."""
    if not num_tokens:
        return ()
    spans = piece.weight_versions or ()
    return tuple(
        VersionSpan(0 if s.version == "default" else int(s.version), s.start, s.end)
        for s in spans
        if s.end > s.start
    )


def _worker_error(exc: Exception) -> str:
    """Return what a worker raised, without vLLM's account of where."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    text = lines[-1] if lines else type(exc).__name__
    for mark in ("failed: ", "error: ", "due to: "):
        _, found, rest = text.partition(mark)
        text = rest if found else text
    return text


def _phases(metrics: Any) -> tuple[float, float, float]:
    """Return (wait, prefill, decode) seconds; zeros where a request ended before the phase."""
    if metrics is None or not metrics.first_token_ts:
        return 0.0, 0.0, 0.0
    return (
        max(0.0, metrics.scheduled_ts - metrics.queued_ts),
        max(0.0, metrics.first_token_ts - metrics.scheduled_ts),
        max(0.0, metrics.last_token_ts - metrics.first_token_ts),
    )
