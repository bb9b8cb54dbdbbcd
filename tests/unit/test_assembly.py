"""From work to segments, and from outputs to samples: nothing is lost or counted twice."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.dispatch.assembly import (
    GroupWork,
    Leg,
    assemble,
    can_segment,
    continued,
    is_cut,
    next_segment,
)
from splitroll.engines.protocol import DecodeOutput
from splitroll.types import Prompt, RouteKind, Sample, SamplingParams, VersionSpan, derive_seed

PROMPT = Prompt("p", tuple(range(100, 140)))


def work(max_tokens: int = 100, **sampling: object) -> GroupWork:
    return GroupWork(PROMPT, 4, SamplingParams(max_tokens=max_tokens, **sampling), seed=7)  # type: ignore[arg-type]


def leg(kind: RouteKind = RouteKind.LOCAL, decode: str = "b", **changes: object) -> Leg:
    usual = Leg(kind, "a", decode, 0.5, 11.0, 10.0, 0.25, 1, {})
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


def output(
    tokens: int, start: int = 0, reason: str = "length", versions: tuple[int, ...] = (1,)
) -> DecodeOutput:
    """Return an output whose tokens are the numbers from `start`, the last of each version."""
    bounds = [tokens * i // max(1, len(versions)) for i in range(len(versions) + 1)]
    return DecodeOutput(
        token_ids=tuple(range(start, start + tokens)),
        text="".join(f"{i} " for i in range(start, start + tokens)),
        logprobs=tuple(-float(i) for i in range(start, start + tokens)),
        finish_reason=reason,  # type: ignore[arg-type]
        weight_versions=tuple(
            VersionSpan(v, a, b)
            for v, a, b in zip(versions, bounds[:-1], bounds[1:], strict=True)
            if b > a
        ),
        cached_tokens=0,
        wait_s=1.0,
        prefill_s=2.0,
        decode_s=4.0,
    )


def begun(tokens: int, index: int = 0) -> Sample:
    return assemble(work(), index, leg(), output(tokens), None)


def test_without_segments_all_is_asked_for_at_once() -> None:
    segment = next_segment(work(), 2, None, None)
    assert segment.token_ids == PROMPT.token_ids
    assert segment.sampling.max_tokens == 100
    assert segment.seed == derive_seed(7, 2)
    assert not segment.cut


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(1, 80), st.integers(0, 299), st.integers(0, 300))
def test_segments_end_at_their_borders_and_add_up(
    max_tokens: int, segment_tokens: int, early: int, min_tokens: int
) -> None:
    job, done = work(max_tokens, min_tokens=min(min_tokens, max_tokens)), None
    borders, required = [], 0
    if early and early < max_tokens:  # something else ended it first: an abort
        done = assemble(job, 0, leg(), output(early), None)
    while done is None or len(done.token_ids) < max_tokens:
        at = 0 if done is None else len(done.token_ids)
        segment = next_segment(job, 0, done, segment_tokens)
        asked = segment.sampling.max_tokens
        assert segment.token_ids == PROMPT.token_ids + tuple(range(at))
        assert 0 < asked <= segment_tokens
        assert 0 <= segment.sampling.min_tokens <= asked
        required = max(required, at + segment.sampling.min_tokens)
        assert segment.cut == (at + asked < max_tokens)
        answer = output(asked, start=at)
        assert is_cut(segment, answer) == segment.cut
        assert not is_cut(segment, output(asked, start=at, reason="stop"))
        done = assemble(job, 0, leg(), answer, done)
        borders.append(at + asked)
    assert borders[-1] == max_tokens
    assert all(border % segment_tokens == 0 for border in borders[:-1])
    assert done.token_ids == tuple(range(max_tokens))
    assert done.logprobs == tuple(-float(i) for i in range(max_tokens))
    assert done.text == "".join(f"{i} " for i in range(max_tokens))
    if not early:
        assert required >= job.sampling.min_tokens


def test_every_segment_has_a_seed_of_its_own_and_the_sample_keeps_its_own() -> None:
    job = work()
    seeds = [next_segment(job, 0, None, 32).seed]
    for tokens in (32, 64, 96):
        seeds.append(next_segment(job, 0, begun(tokens), 32).seed)
        assert begun(tokens).seed == derive_seed(7, 0)
    assert len(set(seeds)) == 4
    assert seeds == [
        next_segment(job, 0, begun(n) if n else None, 32).seed for n in range(0, 97, 32)
    ]


@pytest.mark.parametrize(
    "sampling", [{"stop": ("x",)}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}]
)
def test_what_a_border_would_change_is_generated_in_one_go(sampling: dict[str, object]) -> None:
    job = work(**sampling)
    assert not can_segment(job.sampling)
    segment = next_segment(job, 0, None, 32)
    assert segment.sampling.max_tokens == 100
    assert not segment.cut


def test_forced_lengths_are_never_above_max_tokens() -> None:
    job = dataclasses.replace(work(50), forced_lengths=(10, 50, 70, 1))
    assert [job.max_tokens(i) for i in range(4)] == [10, 50, 50, 1]
    assert next_segment(job, 0, None, None).sampling.max_tokens == 10
    assert [work(50).max_tokens(i) for i in range(2)] == [50, 50]


def test_the_times_of_a_local_sample_add_up() -> None:
    sample = assemble(work(), 0, leg(), output(5), None)
    timing = sample.timing
    assert (timing.queued_s, timing.prefill_s, timing.transfer_s, timing.decode_s) == (
        1.0 + 1.0 + 0.25,
        2.0,
        0.0,
        4.0,
    )


def test_the_times_of_a_sample_whose_kv_was_moved_add_up() -> None:
    timing = assemble(work(), 0, leg(RouteKind.SPLIT), output(5), None).timing
    assert (timing.queued_s, timing.prefill_s, timing.transfer_s, timing.decode_s) == (
        1.0,
        0.5,
        1.0 + 0.25,
        2.0 + 4.0,
    )


def test_versions_are_those_of_the_first_and_of_the_last_token() -> None:
    sample = assemble(work(), 0, leg(), output(6, versions=(3, 4)), None)
    assert (sample.prefill_version, sample.weight_version) == (3, 4)
    empty = assemble(work(), 0, leg(weight_version=9), output(0, versions=()), None)
    assert (empty.prefill_version, empty.weight_version) == (9, 9)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_spans_of_a_continued_sample_cover_its_tokens(
    parts: list[tuple[int, list[int]]],
) -> None:
    sample: Sample | None = None
    expected: list[int] = []
    for tokens, versions in parts:
        answer = output(tokens, len(expected), versions=tuple(sorted(versions)))
        for span in answer.weight_versions:
            expected += [span.version] * (span.end - span.start)
        sample = assemble(work(), 0, leg(), answer, sample)
    assert sample is not None
    found = [s.version for s in sample.weight_versions for _ in range(s.end - s.start)]
    assert found == expected
    spans = sample.weight_versions
    assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])][: len(spans)]
    assert all(a.version != b.version for a, b in itertools.pairwise(spans))
    assert sample.timing.decode_s == 4.0 * len(parts)


def test_the_route_names_every_engine_that_a_sample_was_on() -> None:
    sample = assemble(work(), 0, leg(RouteKind.SPLIT, "b"), output(8), None)
    for i, decode in enumerate(("b", "c", "c", "b")):
        kind = RouteKind.MIGRATED if decode != sample.route.last else RouteKind.LOCAL
        rest = assemble(work(), 0, leg(kind, decode), output(8, 8 * (i + 1)), None)
        sample = continued(sample, rest)
    assert sample.route.kind is RouteKind.MIGRATED
    assert (sample.route.prefill, sample.route.decode) == ("a", "b")
    assert sample.route.moved_to == ("c", "b")


def test_a_sample_that_stayed_keeps_its_route() -> None:
    first = assemble(work(), 0, leg(RouteKind.SPLIT), output(8), None)
    rest = assemble(work(), 0, leg(RouteKind.LOCAL), output(8, 8), None)
    assert continued(first, rest).route == first.route


def test_nothing_begun_leaves_nothing_but_the_time_it_took() -> None:
    nothing = assemble(work(), 0, leg(RouteKind.SPLIT, "b"), output(0, versions=()), None)
    rest = assemble(work(), 0, leg(RouteKind.LOCAL, "c"), output(8, versions=(5,)), None)
    whole = continued(nothing, rest)
    assert whole.route == rest.route
    assert whole.prefill_version == 5
    assert whole.token_ids == rest.token_ids
    assert whole.timing.decode_s == nothing.timing.decode_s + rest.timing.decode_s


@given(
    prompt_tokens=st.integers(1, 200),
    segment_tokens=st.integers(16, 300),
    block_size=st.sampled_from([1, 16, 32, 128]),
)
def test_segments_end_two_tokens_after_a_block_is_full(
    prompt_tokens: int, segment_tokens: int, block_size: int
) -> None:
    """One token after it, an engine that loads what was generated would die."""
    prompt = Prompt("p", tuple(range(prompt_tokens)))
    job = GroupWork(prompt, 1, SamplingParams(max_tokens=2000), seed=0)
    at, sample = 0, None
    while at < 2000:
        segment = next_segment(job, 0, sample, segment_tokens, block_size)
        assert segment.sampling.max_tokens <= segment_tokens + 2 * block_size
        at += segment.sampling.max_tokens
        sample = begun(at)
        if segment.cut:
            assert (prompt_tokens + at) % block_size == 2 % block_size
    assert at == 2000
