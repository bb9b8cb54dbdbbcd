"""From a group's work to engines' requests, and from what engines answer to samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from splitroll.engines.protocol import DecodeOutput
from splitroll.types import (
    Prompt,
    Route,
    RouteKind,
    Sample,
    SamplingParams,
    Timing,
    VersionSpan,
    derive_seed,
)


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One group to generate: `seed` is the group's, each sample's is derived from it."""

    prompt: Prompt
    n: int
    sampling: SamplingParams
    seed: int
    begun: Mapping[int, Sample] = field(default_factory=dict)
    """Samples by index that ended early, to be continued; or complete."""
    episode_id: str | None = None
    """Of a turn after the first: those with equal ids continue each other."""
    forced_lengths: tuple[int, ...] | None = None
    """For benchmarks: how many tokens each sample has. No policy is told."""
    seeds: tuple[int, ...] | None = None
    """Of each sample, in place of those derived from `seed`."""
    native: bytes | None = None
    """The engine's own sampling parameters; see `DecodeRequest`."""
    stream: int = 0
    """Tokens between two calls of whoever listens; 0 for none. See `DecodeRequest`."""
    local: bool = False
    """Never hand off: something is asked for that only the engine of the prompt can tell."""
    goes_on: bool = True
    """Whether samples may go on in another request, as far as `native` is concerned."""
    cache_salt: str | None = None
    logprobs: bool = True
    text: bool = True
    """Whether anybody wants log-probabilities, and the text, of the samples: both take time."""

    def sample_seed(self, index: int) -> int:
        return derive_seed(self.seed, index) if self.seeds is None else self.seeds[index]

    def max_tokens(self, index: int) -> int:
        """Return where a sample ends at the latest."""
        if self.forced_lengths is None:
            return self.sampling.max_tokens
        return min(self.forced_lengths[index], self.sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class Segment:
    """What is asked of an engine for one sample: the whole of it, or a part.

    Attributes:
        token_ids: the prompt and all tokens so far.
        cut: the sample may go on after it; a handle is worth asking for.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    cut: bool


@dataclass(frozen=True, slots=True)
class Leg:
    """How a sample came to be on an engine.

    Attributes:
        kind: how its prompt's KV came there; None goes on where the last segment ended.
        prefill: engine that computed the KV; `prefill_s`: what that leg took.
        started_s: when the work for it began, `accepted_s` when the group was accepted.
        leader_waited_s: of a sibling, how long its leader waited for the KV.
        moved_s: what moving the cached part of its prompt took, before the rest was computed where
            it decodes; None if nothing was.
    """

    kind: RouteKind
    prefill: str
    decode: str
    prefill_s: float
    started_s: float
    accepted_s: float
    leader_waited_s: float
    weight_version: int
    why: Mapping[str, Any]
    moved_s: float | None = None


_AFTER_BLOCK = 2


def can_segment(sampling: SamplingParams) -> bool:
    """Return whether a sample may be generated in segments with the same outcome.

    A stop string may lie across a border, and vLLM counts presence and frequency over a request's
    own output only, so samples with these are generated in one go.
    """
    return not (sampling.stop or sampling.presence_penalty or sampling.frequency_penalty)


def next_segment(
    work: GroupWork,
    index: int,
    begun: Sample | None,
    segment_tokens: int | None,
    block_size: int = 1,
) -> Segment:
    """Return what to ask for next of a sample of which `begun` is there.

    Segments end two tokens after a block of KV is full: going on there finds all full blocks in
    the prefix cache, and computes no more than these two. One token after it, whose KV is not there
    yet, the block that it belongs to is not either, and an engine that loads the KV of what was
    generated so far dies (vLLM 0.32 asserts as many blocks there as here).
    """
    seed = work.sample_seed(index) if begun is None else begun.seed
    done = 0 if begun is None else len(begun.token_ids)
    sampling = work.sampling
    left = work.max_tokens(index) - done
    whole = work.local or not (work.goes_on and can_segment(sampling))
    if segment_tokens is None or whole:
        tokens = left
    else:
        beyond = (_AFTER_BLOCK - len(work.prompt.token_ids)) % block_size
        size = -(-segment_tokens // block_size) * block_size
        tokens = min(left, _next_border(done, size, beyond) - done)
    token_ids = work.prompt.token_ids
    if done:
        assert begun is not None
        token_ids += begun.token_ids
        # A generator begins anew in every segment.
        seed = derive_seed(seed, "segment", done)
    sampling = replace(
        sampling, max_tokens=tokens, min_tokens=min(tokens, max(0, sampling.min_tokens - done))
    )
    return Segment(token_ids, sampling, seed, cut=tokens < left)


def _next_border(done: int, size: int, beyond: int) -> int:
    """Return the least size * j + beyond, of j from 1, that is above `done`."""
    return size * max(1, (done - beyond) // size + 1) + beyond


def is_cut(segment: Segment, output: DecodeOutput) -> bool:
    """Return whether a segment ended where the sample goes on."""
    return segment.cut and output.finish_reason == "length"


def assemble(
    work: GroupWork, index: int, leg: Leg, output: DecodeOutput, begun: Sample | None
) -> Sample:
    """Return a sample as it is after an engine's output, `begun` included."""
    waited_s = output.wait_s + leg.leader_waited_s
    queued_s = leg.started_s - leg.accepted_s
    if leg.kind is RouteKind.LOCAL or leg.moved_s is not None:
        moved_s = leg.moved_s or 0.0
        queued_s += waited_s - moved_s
        timing = Timing(queued_s, output.prefill_s, moved_s, output.decode_s)
    else:
        decode_s = output.prefill_s + output.decode_s
        timing = Timing(queued_s, leg.prefill_s, waited_s, decode_s)
    spans = output.weight_versions
    # A sibling's prompt is of the weights that its first token is of: an update drops all KV.
    prefilled = spans[0].version if spans else leg.weight_version
    sample = Sample(
        id=work.prompt.id,
        sample=index,
        prompt_token_ids=work.prompt.token_ids,
        token_ids=output.token_ids,
        text=output.text,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        seed=work.sample_seed(index),
        weight_version=spans[-1].version if spans else prefilled,
        prefill_version=prefilled,
        weight_versions=spans,
        route=Route(leg.kind, leg.prefill, leg.decode, why=leg.why),
        timing=timing,
    )
    return sample if begun is None else continued(begun, sample)


def continued(begun: Sample, rest: Sample) -> Sample:
    """Return a sample and its continuation as one."""
    at = len(begun.token_ids)
    spans = list(begun.weight_versions)
    for span in rest.weight_versions:
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end + at)
        else:
            spans.append(VersionSpan(span.version, span.start + at, span.end + at))
    times = [a + b for a, b in zip(astuple(begun.timing), astuple(rest.timing), strict=True)]
    return replace(
        rest,
        seed=begun.seed,
        token_ids=begun.token_ids + rest.token_ids,
        text=begun.text + rest.text,
        logprobs=begun.logprobs + rest.logprobs,
        prefill_version=begun.prefill_version if at else rest.prefill_version,
        weight_versions=tuple(spans),
        timing=Timing(*times),
        route=_joined(begun.route, rest.route) if at else rest.route,
    )


def _joined(begun: Route, rest: Route) -> Route:
    """Return the route of a sample that began on one and went on by another."""
    engines = (*begun.moved_to, rest.decode) if rest.decode != begun.last else begun.moved_to
    kind = RouteKind.MIGRATED if rest.kind is RouteKind.MIGRATED else begun.kind
    return replace(begun, kind=kind, moved_to=engines)
