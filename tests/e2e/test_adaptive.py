"""Segments, moves between engines, and the adaptive policy on real engines."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace

import pytest

from splitroll import Rollout, SamplingParams
from splitroll.dispatch.assembly import GroupWork
from splitroll.dispatch.books import Snapshot
from splitroll.dispatch.dispatcher import Dispatcher
from splitroll.dispatch.policy import GroupRoute, Part, Why, Work
from splitroll.types import Group, Prompt, RouteKind

pytestmark = pytest.mark.engines

SEGMENT = 32
"""A block, so that samples of a prompt of 75 tokens are cut after 55, 87 and 119."""


class Fixed:
    """Begins on one engine and, after every segment, stays there or goes round all engines."""

    name = "fixed"
    chooses_late = True

    def __init__(self, first: int, *, moves: bool) -> None:
        self.first = first
        self.moves = moves

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute:
        if work.held_by < 0:
            part = Part(self.first, self.first, work.samples)
        else:
            to = (work.held_by + 1) % len(snapshot.names) if self.moves else work.held_by
            part = Part(work.held_by, to, work.samples)
        return GroupRoute((part,), Why(self.name))


def fresh_prompt(tokens: int) -> Prompt:
    draw = random.Random(os.urandom(8))
    return Prompt("p", tuple(draw.choices(range(10, 4000), k=tokens)))


def dispatcher(rollout: Rollout, first: int, *, moves: bool, segment: int = SEGMENT) -> Dispatcher:
    found = rollout.another_dispatcher(
        "dispatch.policy=adaptive", f"dispatch.segment_tokens={segment}"
    )
    found.allocator.policy = Fixed(first, moves=moves)
    return found


async def assert_no_block_is_held(rollout: Rollout) -> None:
    for engine in rollout.fleet.ready():
        async with asyncio.timeout(5):
            while (await engine.load()).held_blocks:
                await asyncio.sleep(0.05)


def tokens_of(group: Group) -> list[tuple[int, ...]]:
    return [sample.token_ids for sample in group.samples]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_where_segments_run_changes_no_token(
    split_rollout: Rollout, temperature: float
) -> None:
    prompt = fresh_prompt(75)
    sampling = SamplingParams(max_tokens=130, temperature=temperature, ignore_eos=True)
    work = GroupWork(prompt, 3, sampling, seed=5)
    groups = [
        await dispatcher(split_rollout, first, moves=moves).run(work)
        for first, moves in ((0, False), (1, False), (1, True), (2, True))
    ]
    for group in groups[1:]:
        assert tokens_of(group) == tokens_of(groups[0])
        for sample, expected in zip(group.samples, groups[0].samples, strict=True):
            assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert sample.text == expected.text
    for group in groups[:2]:
        assert {sample.route.kind for sample in group.samples} == {RouteKind.LOCAL}
        assert all(sample.route.moved_to == () for sample in group.samples)
    for group in groups[2:]:
        assert {sample.route.kind for sample in group.samples} == {RouteKind.MIGRATED}
        assert all(len(sample.route.moved_to) == 3 for sample in group.samples)
    if temperature == 0.0:
        whole = await split_rollout.dispatcher.run(
            replace(work, sampling=replace(sampling, stop=("no such text",)))
        )
        assert tokens_of(whole) == tokens_of(groups[0]), "one that is not segmented"
    await assert_no_block_is_held(split_rollout)


async def test_a_move_brings_all_kv_along(split_rollout: Rollout) -> None:
    before = await split_rollout.fleet.counters()
    work = GroupWork(fresh_prompt(96), 1, SamplingParams(max_tokens=100, ignore_eos=True), seed=1)
    moving = dispatcher(split_rollout, 0, moves=True)
    (sample,) = (await moving.run(work)).samples
    await asyncio.sleep(0.2)
    after = await split_rollout.fleet.counters()
    assert moving.stats.moves == len(sample.route.moved_to) == 3
    done = [after[name] - before[name] for name in after]
    assert sum(one.kv_pulls for one in done) == 3
    # The prompt once, and then what every step computes: its own token.
    assert sum(one.computed_tokens for one in done) <= 96 + 3
    assert moving.load == {}
    await assert_no_block_is_held(split_rollout)


@pytest.mark.timeout(180)
async def test_samples_that_move_to_an_engine_short_of_kv_all_end(split_rollout: Rollout) -> None:
    """All go round together, and one engine holds the KV of half of them: others are preempted."""
    before = await split_rollout.fleet.counters()
    moving = dispatcher(split_rollout, 0, moves=True, segment=128)
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    work = [GroupWork(fresh_prompt(96), 8, sampling, seed=i) for i in range(8)]
    async with asyncio.timeout(120):
        groups = await asyncio.gather(*(moving.run(one) for one in work))
    assert {len(s.token_ids) for group in groups for s in group.samples} == {400}
    await asyncio.sleep(0.2)
    after = await split_rollout.fleet.counters()
    assert sum(after[name].preemptions - before[name].preemptions for name in after) > 0
    assert moving.stats.moves > 0
    assert moving.load == {}
    await assert_no_block_is_held(split_rollout)


class Bringer:
    """Turns of an episode go round all engines; what is cached goes along, if asked to."""

    name = "bringer"
    chooses_late = True

    def __init__(self, *, brings: bool) -> None:
        self.brings = brings
        self.turn = -1

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute:
        self.turn += 1
        if not self.brings:
            return GroupRoute((Part(0, 0, work.samples),), Why(self.name))
        engines = len(snapshot.names)
        part = Part(self.turn % engines, self.turn % engines, work.samples)
        if self.turn:
            tokens = max(tokens for _, tokens in work.cached)
            part = replace(part, kv_from=(self.turn - 1) % engines, kv_tokens=tokens)
        return GroupRoute((part,), Why(self.name))


async def test_a_turn_takes_the_kv_of_those_before_along(split_rollout: Rollout) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    start, found, computed = fresh_prompt(100).token_ids, [], []
    observations = [fresh_prompt(30 + i).token_ids for i in range(4)]
    for brings in (False, True):
        runner = split_rollout.another_dispatcher("dispatch.policy=adaptive")
        runner.allocator.policy = Bringer(brings=brings)
        tokens = start
        for engine in split_rollout.fleet.ready():
            await engine.reset_prefix_cache()
        before = await split_rollout.fleet.counters()
        samples = []
        for turn, observation in enumerate(observations):
            work = GroupWork(Prompt(f"t{turn}", tokens), 1, sampling, seed=1, episode_id="e")
            samples.append((await runner.run(work)).samples[0])
            tokens += samples[-1].token_ids + observation
        await asyncio.sleep(0.2)
        after = await split_rollout.fleet.counters()
        computed.append(sum((after[name] - before[name]).computed_tokens for name in after))
        found.append(samples)
        if brings:
            assert {s.route.kind for s in samples[1:]} == {RouteKind.MIGRATED}
            assert all(s.timing.transfer_s > 0 for s in samples[1:])
            assert runner.stats.moves == runner.stats.handoffs == 3
            assert runner.stats.recomputed_tokens == 0
        assert runner.load == {}
        await assert_no_block_is_held(split_rollout)
    for there, here in zip(*found, strict=True):
        assert there.token_ids == here.token_ids
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)
    # Each move costs its one token, and what a block's remainder takes at most.
    assert computed[1] <= computed[0] + 3 * 33


async def test_samples_say_why_they_went_where(split_rollout: Rollout) -> None:
    adaptive = split_rollout.another_dispatcher("dispatch.policy=adaptive")
    works = [
        GroupWork(fresh_prompt(60 + i), 4, SamplingParams(max_tokens=12, ignore_eos=True), seed=i)
        for i in range(6)
    ]
    groups = await asyncio.gather(*(adaptive.run(work) for work in works))
    for group in groups:
        assert len(group.samples) == 4
        for sample in group.samples:
            assert sample.route.why["policy"] == "adaptive"
            assert sample.route.why["local_ms"] > 0
    assert sum(adaptive.stats.routes.values()) == 24
    assert len({s.route.decode for g in groups for s in g.samples}) == 3, "no engine is left out"
    assert adaptive.load == {}
    await assert_no_block_is_held(split_rollout)


async def test_a_stopped_group_comes_back_as_it_is_and_can_be_continued(
    split_rollout: Rollout,
) -> None:
    adaptive = split_rollout.another_dispatcher("dispatch.policy=adaptive")
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    work = GroupWork(fresh_prompt(40), 3, sampling, seed=3)
    stop = asyncio.Event()
    running = asyncio.create_task(adaptive.run(work, stop))
    await asyncio.sleep(0.5)
    stop.set()
    part = await asyncio.wait_for(running, 10)
    assert not part.is_complete
    assert all(0 < len(s.token_ids) == len(s.logprobs) < 400 for s in part.samples)
    assert adaptive.load == {}
    await assert_no_block_is_held(split_rollout)
    begun = {sample.sample: sample for sample in part.samples}
    whole = await adaptive.run(replace(work, begun=begun))
    for sample, before in zip(whole.samples, part.samples, strict=True):
        assert len(sample.token_ids) == 400
        assert sample.token_ids[: len(before.token_ids)] == before.token_ids
    await assert_no_block_is_held(split_rollout)
