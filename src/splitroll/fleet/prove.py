"""The proof that a prefill/decode pair hands off KV, and hands off the right KV.

One handoff of a fresh prompt is compared with generation on the decode engine alone, in separate
prefix caches (`cache_salt`): tokens, log-probabilities, prompt tokens that decode had to compute
again, and bytes moved against what the prompt needs.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from splitroll.engines.protocol import (
    DecodeOutput,
    DecodeRequest,
    Engine,
    EngineCounters,
    EngineInfo,
)
from splitroll.errors import EngineDied, LegTimeout, ProofError, SplitrollError
from splitroll.handoff.legs import Handoff
from splitroll.types import SamplingParams

_NUM_TOKENS = 8
_TOP_LOGPROBS = 5
_COUNTERS_TIMEOUT_S = 10.0
_COUNTERS_POLL_S = 0.05


def tolerance(dtype: str) -> float:
    """Return how far log-probabilities of equal work may differ in a data type."""
    return _TOLERANCE.get(dtype, _TOLERANCE_16_BIT)


_TOLERANCE = {"float32": 1e-3}
_TOLERANCE_16_BIT = 0.25
"""Log-probabilities of a handoff against local generation, natural logarithm: decode recomputes
the last prompt token in a batch of one, which rounds differently (measured: 2e-5 in float32, 0.09
in bfloat16). Wrong KV differs by several units."""


@dataclass(frozen=True, slots=True)
class PairProof:
    """What one pair's proof saw.

    Attributes:
        max_logprob_gap: between handoff and local generation, over the compared tokens.
        kv_bytes: moved; `kv_bytes_needed`: blocks of the prompt times bytes per block.
        recomputed_tokens: prompt tokens that decode computed although their KV was offered.
        problem: None when the pair passed.
        inconclusive: a leg had no time, or its engine died: nothing is known of the pair.
        pushed: the prefill engine moved the KV, and counts it, not the decode engine.
    """

    prefill: str
    decode: str
    prompt_tokens: int
    compared_tokens: int
    max_logprob_gap: float
    kv_bytes: int
    kv_bytes_needed: int
    recomputed_tokens: int
    handoff_s: float
    problem: str | None
    inconclusive: bool = False
    pushed: bool = False

    def counters(self) -> tuple[EngineCounters, EngineCounters]:
        """Return what the proof itself adds to the counters of (prefill, decode)."""
        moved = EngineCounters(kv_pulls=1, kv_bytes=self.kv_bytes_needed)
        nothing = EngineCounters()
        prefilled = EngineCounters(computed_tokens=self.prompt_tokens, generated_tokens=1)
        decoded = EngineCounters(
            computed_tokens=self.prompt_tokens,
            pulled_tokens=self.prompt_tokens,
            generated_tokens=2 * _NUM_TOKENS,  # with the KV, and locally
        )
        return (
            prefilled + (moved if self.pushed else nothing),
            decoded + (nothing if self.pushed else moved),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.problem is None}


def proof_prompt(vocab_size: int, block_size: int, max_model_len: int) -> tuple[int, ...]:
    """Return a fixed prompt of two blocks and a half, or what the model's length leaves."""
    length = min(2 * block_size + block_size // 2, max_model_len - _NUM_TOKENS)
    low, span = min(100, vocab_size // 4), max(1, vocab_size // 2)
    return tuple(low + (i * 7919) % span for i in range(length))


async def prove_pairs(
    handoff: Handoff,
    prefills: Sequence[Engine],
    decodes: Sequence[Engine],
    prompt: tuple[int, ...],
    weight_version: int = 0,
) -> list[PairProof]:
    """Prove every pair, one pair of engines at a time.

    Raises:
        ProofError: when a pair fails; it names every pair and its problem.
    """
    proofs = []
    for prefill in prefills:
        for decode in decodes:
            # So many proofs see every data-parallel rank of both.
            for turn in range(max(prefill.info.data_ranks, decode.info.data_ranks)):
                proof = _prove_pair(handoff, prefill, decode, prompt, weight_version, turn)
                proofs.append(await proof)
    failed = [proof for proof in proofs if proof.problem is not None]
    if failed:
        lines = [f"{proof.prefill} -> {proof.decode}: {proof.problem}" for proof in failed]
        raise ProofError("KV handoff is not working:\n  " + "\n  ".join(lines), proofs)
    return proofs


def compare_engines(prefill: EngineInfo, decode: EngineInfo) -> str | None:
    """Return why KV of one engine means nothing to the other, None when it does."""
    for name in ("block_size", "dtype", "kv_dtype"):
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            return f"{name} differs: prefill has {ours}, decode has {theirs}"
    return None


async def _prove_pair(
    handoff: Handoff,
    prefill: Engine,
    decode: Engine,
    prompt: tuple[int, ...],
    weight_version: int,
    turn: int,
) -> PairProof:
    if (mismatch := compare_engines(prefill.info, decode.info)) is not None:
        return _failed(prefill, decode, prompt, mismatch)
    needed = math.ceil(len(prompt) / decode.info.block_size) * decode.info.block_bytes
    salt = os.urandom(8).hex()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        before = await _counters(prefill if handoff.pushes else decode)
        handle = await handoff.prefill(
            prefill, f"prove-{salt}-p", prompt, salt, data_rank=turn % prefill.info.data_ranks
        )
        rank = turn % decode.info.data_ranks
        request = _request(f"prove-{salt}-d", prompt, salt, rank)
        result = await handoff.decode(decode, handle, [request], weight_version=weight_version)
        handoff_s = loop.time() - begun
        request = _request(f"prove-{salt}-l", prompt, f"{salt}-l", rank)
        reference = await handoff.decode(decode, None, [request], weight_version=weight_version)
        if errors := result.errors + reference.errors:
            raise errors[0]
        mover = prefill if handoff.pushes else decode
        kv_bytes = await _moved(mover, before, needed)
    except SplitrollError as exc:
        return _failed(prefill, decode, prompt, str(exc), exc)
    (moved,) = result.outputs.values()
    (local,) = reference.outputs.values()
    compared, gap = _compare(moved, local)
    return PairProof(
        prefill=prefill.info.name,
        decode=decode.info.name,
        prompt_tokens=len(prompt),
        compared_tokens=compared,
        max_logprob_gap=gap,
        kv_bytes=kv_bytes,
        kv_bytes_needed=needed,
        recomputed_tokens=result.recomputed_tokens,
        handoff_s=handoff_s,
        problem=_verdict(
            result.recomputed_tokens, gap, tolerance(decode.info.dtype), kv_bytes, needed
        ),
        pushed=handoff.pushes,
    )


def _verdict(recomputed: int, gap: float, allowed: float, kv_bytes: int, needed: int) -> str | None:
    if recomputed or kv_bytes == 0:
        return (
            f"decode computed {recomputed or 'all'} prompt tokens again although their KV was "
            f"offered, and pulled {kv_bytes} of {needed} bytes: PD is silently off"
        )
    if kv_bytes < needed:
        return f"decode pulled {kv_bytes} bytes, but the prompt's KV is {needed}"
    if gap > allowed:
        return (
            f"log-probabilities differ by {gap:.3g} from local generation (allowed {allowed:g}):"
            " the KV that arrived is not this prompt's"
        )
    return None


def _compare(moved: DecodeOutput, local: DecodeOutput) -> tuple[int, float]:
    """Return (tokens compared, largest gap), up to the first token that differs.

    Tokens may differ where two are equally likely within the gap that rounding makes; at the first
    position the moved token's log-probability in the local run is known, so it is compared there.
    """
    gap = 0.0
    for i, (ours, theirs) in enumerate(zip(moved.token_ids, local.token_ids, strict=False)):
        if ours != theirs:
            if i == 0:
                expected = local.first_top_logprobs.get(ours, -math.inf)
                gap = abs(moved.logprobs[0] - expected)
            else:
                gap = max(gap, abs(moved.logprobs[i] - local.logprobs[i]))
            return i + 1, gap
        gap = max(gap, abs(moved.logprobs[i] - local.logprobs[i]))
    return min(len(moved.token_ids), len(local.token_ids)), gap


async def _moved(engine: Engine, before: EngineCounters, kv_bytes: int) -> int:
    """Return the bytes that an engine moved, once they are as many as they should be: counters lag
    the tokens by an engine step."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _COUNTERS_TIMEOUT_S
    while True:
        moved = (await _counters(engine)).kv_bytes - before.kv_bytes
        if moved >= kv_bytes or loop.time() > end:
            return moved
        await asyncio.sleep(_COUNTERS_POLL_S)


async def _counters(engine: Engine) -> EngineCounters:
    try:
        async with asyncio.timeout(_COUNTERS_TIMEOUT_S):
            return await engine.counters()
    except TimeoutError as exc:
        raise EngineDied(engine.info.name, "it does not answer") from exc


def _request(request_id: str, prompt: tuple[int, ...], salt: str, rank: int) -> DecodeRequest:
    return DecodeRequest(
        request_id=request_id,
        token_ids=prompt,
        sampling=SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True),
        seed=0,
        cache_salt=salt,
        top_logprobs=_TOP_LOGPROBS,
        data_rank=rank,
    )


def _failed(
    prefill: Engine,
    decode: Engine,
    prompt: tuple[int, ...],
    problem: str,
    cause: SplitrollError | None = None,
) -> PairProof:
    return PairProof(
        prefill=prefill.info.name,
        decode=decode.info.name,
        prompt_tokens=len(prompt),
        compared_tokens=0,
        max_logprob_gap=math.nan,
        kv_bytes=0,
        kv_bytes_needed=0,
        recomputed_tokens=0,
        handoff_s=0.0,
        problem=problem,
        inconclusive=isinstance(cause, EngineDied | LegTimeout),
    )
