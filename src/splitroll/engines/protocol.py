"""The seam between the fleet and an engine: a data plane, a control plane, and their values.

Implementations: `splitroll.engines.ray_engine.RayEngine` (vLLM in a Ray actor) and
`splitroll.engines.simulated.SimulatedEngine`. One contract suite (`tests/contract`) runs over both.

Invariants of every implementation:
- a request id is used once; each request ends exactly once, with an output or an exception;
- an exception is `EngineDied` when the engine is gone, `LegError` when only the request failed,
  `InvalidRequest` when the request itself is at fault;
- an aborted request frees what it holds at once; aborting an unknown request does nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from splitroll.types import Role, SamplingParams, VersionSpan
from splitroll.weights.offer import LoadedWeights, WeightOffer

KvParams = Mapping[str, Any]
"""What a KV connector passes between a prefill and a decode request, opaque to everyone else."""

TransferStep = Literal["init", "start", "update", "finish", "shutdown"]
"""Of a weight transfer: a trainer joins once, then each update starts, brings parts and ends."""

Candidates = tuple[tuple[int, float, int], ...]
"""Of one position: (token, natural log-probability, rank from 1) of the token that is there, then
of the most likely ones by rank, as many as were asked for; the first is not repeated among them."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute the KV of a prompt and hold it for a decode engine.

    Attributes:
        kv: the connector's parameters that ask for a handle.
        cache_salt: separates prefix caches; None shares the common one.
        session: what shares KV with it has the same, also as decode request.
        data_rank: which data-parallel rank is to take it; None lets the engine choose.
    """

    request_id: str
    token_ids: tuple[int, ...]
    kv: KvParams
    cache_salt: str | None = None
    session: str | None = None
    data_rank: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """A finished prefill.

    Attributes:
        kv: the handle's parameters, None when the engine returned none.
        elapsed_s: from the request's arrival at the engine to its end.
        computed_tokens: prompt tokens that were not in the prefix cache.
    """

    kv: KvParams | None
    elapsed_s: float
    computed_tokens: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Generate one sample.

    Attributes:
        seed: of this sample; used when the temperature is above 0.
        kv: the connector's parameters: of a handle to load, or that ask for one at the end, or
            both. Without a handle the prompt is computed here, as far as it is not in the prefix
            cache.
        top_logprobs: how many of the most likely tokens to report at the first position; None if
            nobody wants log-probabilities: those of the tokens may then be left out too.
        native: the engine's own sampling parameters, encoded as it does; they take the place of
            `sampling`, but for the lengths and the seed, which are those given here.
        stream: yield `Tokens` when at least this many have come since, fewer than twice as many,
            and what is left at the end; 0 yields none.
        session: the same of samples that have a prefix in common: of a group, or an episode.
        text: whether anybody wants the tokens' text; else it may be empty.
        data_rank: as in `PrefillRequest`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    kv: KvParams | None = None
    cache_salt: str | None = None
    top_logprobs: int | None = 0
    native: bytes | None = None
    stream: int = 0
    session: str = ""
    text: bool = True
    data_rank: int | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token is out: the prompt's KV is complete on this engine.

    Attributes:
        cached_tokens: prompt tokens that were not computed here: pulled, or in the prefix cache.
        weight_version: of the weights that computed it.
    """

    cached_tokens: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next tokens of a sample, of a request that streams.

    Attributes:
        logprobs: one per token, or none at all; see `DecodeRequest.top_logprobs`.
        candidates: one per token, if the request's `native` parameters ask for log-probabilities.
        prompt_candidates: one per prompt token but the first, if they ask for these; with the first
            tokens only.
        weight_version: of the weights that computed the last one.
        last: the output comes next.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str = ""
    candidates: tuple[Candidates, ...] = ()
    prompt_candidates: tuple[Candidates, ...] = ()
    weight_version: int = 0
    last: bool = False


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """A finished sample.

    Attributes:
        logprobs: one per token, or none at all; see `DecodeRequest.top_logprobs`.
        finish_reason: "stop", "length", or "abort" (the tokens so far).
        stop_reason: the stop token or string that ended it; None of EOS, or if none did.
        cached_tokens: as in FirstToken.
        wait_s: from arrival until the prompt's KV was there or could be computed.
        prefill_s: from then to the first token.
        decode_s: from the first token to the last.
        weight_versions: of the weights that computed each token; empty only without tokens.
        first_top_logprobs: token id to log-probability at the first position, if asked for.
        kv: handle to the KV of all but the last token, if the request asked for one and did not
            end early: it is pinned here until pulled or given back.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    cached_tokens: int
    wait_s: float
    prefill_s: float
    decode_s: float
    weight_versions: tuple[VersionSpan, ...]
    first_top_logprobs: Mapping[int, float] = field(default_factory=dict)
    kv: KvParams | None = None
    stop_reason: int | str | None = None


DecodeEvent = FirstToken | Tokens | DecodeOutput


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step of an engine's loop: one forward pass over a batch.

    Attributes:
        seconds: from its scheduling, or the end of the step before, to its end.
        sequences: that decoded one token each.
        context_tokens: of those sequences, together: the KV that was read.
        prefill_tokens: prompt tokens computed.
        prefill_pairs: of those, the sum over tokens of the tokens before each: what attention
            costs beyond the linear layers.
    """

    seconds: float
    sequences: int
    context_tokens: int
    prefill_tokens: int
    prefill_pairs: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change during an engine's life.

    Attributes:
        engine_id: the KV connector's id of this incarnation.
        pids: of all its processes, the actor's first.
        num_blocks: KV blocks that requests can use.
        block_bytes: bytes of one KV block over all layers and ranks.
        log_path: where its processes write, on its node.
        start_s: seconds by phase of the start-up.
        kv_dtype: data type of the KV cache.
        world_size: workers over all kinds of parallelism.
    """

    name: str
    role: Role
    engine_id: str
    pids: tuple[int, ...]
    num_blocks: int
    block_size: int
    block_bytes: int
    max_num_seqs: int
    max_model_len: int
    dtype: str
    kv_dtype: str
    log_path: str
    start_s: Mapping[str, float] = field(default_factory=dict)
    world_size: int = 1
    data_ranks: int = 1
    """Ranks with a KV cache each; all figures above are of all of them."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine holds now.

    Attributes:
        held_blocks: KV blocks in use, by requests or by handles; cached free blocks not counted.
        pinned: prompts whose KV is held for a decode engine to pull.
    """

    running: int
    waiting: int
    held_blocks: int
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine did since its start, from its own metrics.

    Attributes:
        computed_tokens: prompt tokens computed here.
        cache_hit_tokens: prompt tokens found in the local prefix cache.
        pulled_tokens: prompt tokens whose KV came from another engine.
        kv_pulls: KV transfers that this engine pulled; `kv_bytes` is their sum, `kv_pull_s` their
            duration.
        kv_failures: failed transfers, handshakes and notifications.
        kv_expired: handles of this engine whose lease ended before they were pulled.
    """

    computed_tokens: int = 0
    cache_hit_tokens: int = 0
    pulled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    kv_pulls: int = 0
    kv_bytes: int = 0
    kv_pull_s: float = 0.0
    kv_failures: int = 0
    kv_expired: int = 0

    def __add__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(
            *(getattr(self, name) + getattr(other, name) for name in self.__slots__)
        )

    def __sub__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(
            *(getattr(self, name) - getattr(other, name) for name in self.__slots__)
        )


class DataPlane(Protocol):
    """Requests in, tokens out."""

    async def prefill(self, request: PrefillRequest) -> PrefillOutput:
        """Compute a prompt's KV and return the handle to it."""
        ...

    def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        """Generate one sample: yields FirstToken, unless it ends with its first token, then Tokens,
        if it streams, then DecodeOutput, then ends."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests now and free what they hold."""
        ...

    async def release(self, request_id: str, kv: KvParams) -> None:
        """Tell the prefill engine of a handle that it will not be pulled, so that it frees it.

        Called on a decode engine; `request_id` is a fresh one.
        """
        ...

    async def load(self) -> EngineLoad:
        """Return what the engine holds now, asked of the engine itself."""
        ...


class ControlPlane(Protocol):
    """The life of an engine."""

    @property
    def info(self) -> EngineInfo: ...

    async def health(self) -> None:
        """Return when the engine's own loop answers; raise EngineDied when it is gone."""
        ...

    async def counters(self) -> EngineCounters: ...

    async def steps(self) -> Sequence[StepStats]:
        """Return the steps since the last call, oldest first; at most some hundred are kept."""
        ...

    async def metrics(self) -> str:
        """Return the engine's own metrics in Prometheus' text format; empty if it has none."""
        ...

    async def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        """Drop the prefix cache; False when the engine refused since blocks are in use.

        Args:
            preempt: of a paused engine: drop the KV of running requests too; they are computed
                again, from their first token, when it resumes.
        """
        ...

    async def pause(self, *, abort: bool = False) -> None:
        """Return when nothing is computed any more. Requests are kept, new ones queued; with
        `abort`, those that are here end with what they have, reason "abort".

        Call it when no handle is pinned: vLLM waits until handles are pulled or their leases end.
        """
        ...

    async def resume(self) -> None:
        """Go on; does nothing on an engine that is not paused."""
        ...

    async def load_weights(self, offer: WeightOffer) -> LoadedWeights:
        """Load weights into a paused engine. Its caches are not touched, nor its version.

        May be called again after it failed.

        Raises:
            LegError: naming the parameter, if one was at fault; the engine then holds neither
                the old nor the new weights.
        """
        ...

    async def set_weight_version(self, version: int) -> None:
        """Stamp whatever is computed from now on."""
        ...

    async def transfer_weights(
        self, step: TransferStep, info: Mapping[str, Any] | None = None
    ) -> None:
        """Take a step of vLLM's own weight-transfer API, whose other end a trainer drives.

        Args:
            info: vLLM's init_info of "init", its update_info of "update".

        Raises:
            LegError: it failed; between "start" and "finish" the weights may then be anything.
        """
        ...

    async def call_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the engine's workers by name; returns their answers by rank.

        Raises:
            LegError: what a worker raised.
        """
        ...

    async def close(self) -> None:
        """End all processes of the engine. Never raises for an engine that is already dead."""
        ...


class Engine(DataPlane, ControlPlane, Protocol):
    """A running engine."""
