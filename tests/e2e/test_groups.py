"""Groups on real engines: one prefill and one transfer for n samples, shown by the engines."""

from __future__ import annotations

import asyncio
import math
import os
import random
from typing import Any

import pytest

from splitroll import Rollout, SamplingParams
from splitroll.dispatch.assembly import GroupWork
from splitroll.errors import InvalidRequest
from splitroll.types import Group, Prompt

pytestmark = pytest.mark.engines

N = 8


def fresh_prompts(count: int, tokens: int) -> list[Prompt]:
    draw = random.Random(os.urandom(8))
    return [Prompt(str(i), tuple(draw.choices(range(10, 4000), k=tokens))) for i in range(count)]


async def generate(rollout: Rollout, prompts: list[Any], **kwargs: Any) -> list[Group]:
    groups = []
    async for group in rollout.generate(prompts, **kwargs):
        assert isinstance(group, Group)
        groups.append(group)
    return groups


async def assert_no_block_is_held(rollout: Rollout) -> None:
    for engine in rollout.fleet.ready():
        async with asyncio.timeout(5):
            while (await engine.load()).held_blocks:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("tokens", [20, 128, 300])
async def test_a_group_is_computed_once_and_moved_once(split_rollout: Rollout, tokens: int) -> None:
    before = await split_rollout.fleet.counters()
    handoffs = (await split_rollout.activity()).handoffs
    sampling = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    groups = await generate(split_rollout, fresh_prompts(4, tokens), n=N, sampling=sampling)
    await asyncio.sleep(0.2)
    after = await split_rollout.fleet.counters()
    done = {name: after[name] - before[name] for name in after}

    for group in groups:
        assert [sample.sample for sample in group.samples] == list(range(N))
        assert len({sample.token_ids for sample in group.samples}) == N
        assert len({sample.seed for sample in group.samples}) == N
        kinds = [sample.route.kind.value for sample in group.samples]
        assert kinds.count("split") == 1
        assert kinds.count("shared") == N - 1
        assert len({sample.route.decode for sample in group.samples}) == 1
        assert group.recomputed_tokens == 0
    assert (await split_rollout.activity()).handoffs - handoffs == 4
    decoders = [done["decode-0"], done["decode-1"]]
    assert sum(one.kv_pulls for one in decoders) == 4
    info = split_rollout.fleet.ready()[0].info
    one_transfer = math.ceil(tokens / info.block_size) * info.block_bytes
    assert sum(one.kv_bytes for one in decoders) == 4 * one_transfer
    assert done["prefill-0"].computed_tokens == 4 * tokens
    # A sibling computes what stands in no full block, and always the last token.
    per_sibling = tokens - (tokens - 1) // info.block_size * info.block_size
    assert sum(one.computed_tokens for one in decoders) <= 4 * (N - 1) * per_sibling
    await assert_no_block_is_held(split_rollout)


async def test_the_same_seed_repeats_a_whole_rollout(split_rollout: Rollout) -> None:
    prompts = fresh_prompts(3, 40)
    sampling = SamplingParams(max_tokens=10, seed=11, ignore_eos=True)

    async def tokens() -> dict[str, list[tuple[int, ...]]]:
        groups = await generate(split_rollout, prompts, n=3, sampling=sampling)
        return {group.id: [sample.token_ids for sample in group.samples] for group in groups}

    assert await tokens() == await tokens()


async def test_many_mixed_groups_complete_and_leave_nothing_behind(
    split_rollout: Rollout,
) -> None:
    prompts = [p for n in (1, 32, 100, 500) for p in fresh_prompts(6, n)]
    prompts = [Prompt(str(i), prompt.token_ids) for i, prompt in enumerate(prompts)]
    groups = await generate(
        split_rollout, prompts, n=5, sampling=SamplingParams(max_tokens=20, ignore_eos=True)
    )
    assert sorted(int(group.id) for group in groups) == list(range(24))
    assert all(len(group.samples) == 5 for group in groups)
    await assert_no_block_is_held(split_rollout)


async def test_completed_aborted_and_failed_requests_leave_nothing_behind(
    split_rollout: Rollout,
) -> None:
    """Cancel rollouts at many moments, so that every arrow of a group's life is hit."""
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    draw = random.Random(1)
    for _ in range(25):
        job = asyncio.create_task(
            generate(split_rollout, fresh_prompts(6, 400), n=4, sampling=sampling)
        )
        await asyncio.sleep(draw.uniform(0, 0.6))
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
    too_long = Prompt("x", (5,) * 5000)
    with pytest.raises(Exception, match="max_model_len"):
        await generate(split_rollout, [too_long])
    await assert_no_block_is_held(split_rollout)
    assert split_rollout.dispatcher.load == {}
    assert len(split_rollout.fleet.ready()) == 3
    groups = await generate(split_rollout, fresh_prompts(2, 50), n=2)
    assert [len(group.samples) for group in groups] == [2, 2]


async def test_requests_that_decode_refuses_leave_nothing_behind(split_rollout: Rollout) -> None:
    sampling = SamplingParams(max_tokens=4, stop_token_ids=(10**6,))  # beyond the vocabulary
    begun = asyncio.get_running_loop().time()
    works = [GroupWork(prompt, 2, sampling, 0) for prompt in fresh_prompts(20, 200)]
    runs = (split_rollout.dispatcher.run(work) for work in works)
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert {type(result) for result in results} == {InvalidRequest}
    await assert_no_block_is_held(split_rollout)
    assert asyncio.get_running_loop().time() - begun < 20


async def test_stop_strings_min_tokens_and_penalties_reach_decode_only(
    split_rollout: Rollout,
) -> None:
    """Nothing of the caller's sampling may disturb the prefill leg."""
    (prompt,) = fresh_prompts(1, 70)
    whole = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    ((sample,),) = [g.samples for g in await generate(split_rollout, [prompt], sampling=whole)]
    words = sample.text.replace("w", " w").split()
    assert len(set(words)) > 4, "the tiny model should not repeat itself"
    word = list(dict.fromkeys(words))[4]
    stop = SamplingParams(
        max_tokens=12, temperature=0.0, stop=(word,), min_tokens=2, ignore_eos=True
    )
    ((stopped,),) = [g.samples for g in await generate(split_rollout, [prompt], sampling=stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < 12
    assert stopped.text == sample.text[: sample.text.index(word)]
    assert stopped.route.kind.value == "split"
    penalised = SamplingParams(
        max_tokens=12, temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0,
        frequency_penalty=0.5, ignore_eos=True,
    )  # fmt: skip
    ((other,),) = [g.samples for g in await generate(split_rollout, [prompt], sampling=penalised)]
    assert len(set(other.token_ids)) == 12
    assert other.route.kind.value == "split"


async def test_a_prompt_computed_in_chunks_keeps_its_seeds(
    split_rollout: Rollout, tiny_config: dict[str, Any]
) -> None:
    """vLLM's CPU engine dies at this without our repair; chunks must not change the samples."""
    sampling = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    prompts = [Prompt(str(i), p.token_ids) for i, p in enumerate(fresh_prompts(4, 700))]

    async def tokens(rollout: Rollout, asked: list[Prompt]) -> dict[str, list[tuple[int, ...]]]:
        groups = await generate(rollout, asked, n=3, sampling=sampling)
        assert all(member.restarts == 0 for member in rollout.fleet.members.values())
        return {group.id: [sample.token_ids for sample in group.samples] for group in groups}

    whole = {}
    for prompt in prompts:
        whole |= await tokens(split_rollout, [prompt])
    for shape in (
        ("disaggregation.enabled=false", "colocated.replicas=1"),
        ("disaggregation.decode_replicas=1",),
    ):
        chunked = [*shape, "engine.max_num_batched_tokens=64"]
        async with Rollout.open(tiny_config, overrides=chunked) as rollout:
            assert await tokens(rollout, prompts) == whole
