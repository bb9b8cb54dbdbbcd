"""`generate(over_sample=k)` on a simulated fleet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conftest import simulated
from splitroll.config import load_config
from splitroll.engines.simulated import LatencyModel
from splitroll.errors import InvalidRequest
from splitroll.model import ModelFacts
from splitroll.rollout import Rollout
from splitroll.types import Group, SamplingParams

SHORT, LONG = (SamplingParams(max_tokens=n, seed=1, ignore_eos=True) for n in (10, 300))


@contextlib.asynccontextmanager
async def opened(model: Path) -> AsyncIterator[Rollout]:
    config = load_config({"model": str(model)})
    facts = ModelFacts("tiny", str(model), 8, 4, 2048, 4096)
    async with simulated(latency=LatencyModel(step_s=0.002)) as system:
        yield Rollout(
            config, facts, system.fleet, system.dispatcher, system.updater, system.handoff
        )
        assert system.dispatcher.load == {}


async def groups(
    rollout: Rollout,
    prompts: list[object],
    sampling: list[SamplingParams] | SamplingParams = LONG,
    over_sample: int = 0,
) -> list[Group]:
    found = []
    async for group in rollout.generate(
        prompts,  # type: ignore[arg-type]
        n=4,
        sampling=sampling,
        over_sample=over_sample,
    ):
        assert isinstance(group, Group)
        found.append(group)
    return found


async def test_the_rest_comes_as_it_is_and_goes_on_in_a_later_call(tiny_model: Path) -> None:
    prompts: list[object] = [{"id": f"p{i}", "prompt_token_ids": [50 + i] * 40} for i in range(12)]
    async with opened(tiny_model) as rollout:
        found = await groups(rollout, prompts, [SHORT] * 7 + [LONG] * 5, over_sample=5)
        assert sorted(group.id for group in found) == sorted(f"p{i}" for i in range(12))
        whole = [group for group in found if group.is_complete]
        part = [group for group in found if not group.is_complete]
        assert sorted(group.id for group in whole) == sorted(f"p{i}" for i in range(7))
        assert len(part) == 5
        assert all(len(group.samples) == 4 for group in found)
        again = await groups(rollout, list(part))
        assert sorted(group.id for group in again) == sorted(group.id for group in part)
        before = {(s.id, s.sample): s.token_ids for group in part for s in group.samples}
        for group in again:
            assert group.is_complete
            for sample in group.samples:
                assert len(sample.token_ids) == 300
                kept = before[sample.id, sample.sample]
                assert sample.token_ids[: len(kept)] == kept


@pytest.mark.parametrize("over_sample", [-1, 3, 4, 1.5, True])
async def test_one_that_leaves_nothing_to_wait_for_is_refused(
    tiny_model: Path, over_sample: int
) -> None:
    async with opened(tiny_model) as rollout:
        with pytest.raises(InvalidRequest, match="over_sample"):
            await groups(rollout, ["a", "b", "c"], over_sample=over_sample)
