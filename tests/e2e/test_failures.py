"""Engines that are killed in the middle of a run: every sample arrives, none twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from splitroll import Rollout, SamplingParams
from splitroll.engines.protocol import Engine
from splitroll.fleet.fleet import MemberState
from splitroll.types import Group, Prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

SAMPLING = SamplingParams(max_tokens=150, seed=1, ignore_eos=True)


@pytest_asyncio.fixture(scope="module")
async def rollout(tiny_config: dict[str, Any]) -> AsyncIterator[Rollout]:
    async with Rollout.open(tiny_config, overrides=["limits.health_interval_s=0.5"]) as one:
        yield one


def prompts() -> list[Prompt]:
    draw = random.Random(3)
    return [Prompt(str(i), tuple(draw.choices(range(10, 4000), k=200))) for i in range(16)]


async def run_64(rollout: Rollout) -> dict[tuple[str, int], tuple[int, ...]]:
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    async for group in rollout.generate(prompts(), n=4, sampling=SAMPLING):
        assert isinstance(group, Group)
        for sample in group.samples:
            assert (sample.id, sample.sample) not in found
            assert len(sample.token_ids) == len(sample.logprobs) == 150
            assert sample.finish_reason == "length"
            found[sample.id, sample.sample] = sample.token_ids
    return found


async def wait_until_all_are_ready(rollout: Rollout) -> None:
    async with asyncio.timeout(120):
        while any(m.state is not MemberState.READY for m in rollout.fleet.members.values()):
            await asyncio.sleep(0.2)


async def assert_no_block_is_held(rollout: Rollout) -> None:
    for engine in rollout.fleet.ready():
        async with asyncio.timeout(5):
            while (await engine.load()).held_blocks:
                await asyncio.sleep(0.05)


def engine_of(rollout: Rollout, name: str) -> Engine:
    engine = rollout.fleet.members[name].engine
    assert engine is not None
    return engine


# Index 0 is the actor, 1 its EngineCore: either may be the one that is killed.
@pytest.mark.parametrize(
    ("victim", "process"), [("decode-0", 1), pytest.param("prefill-0", 0, marks=pytest.mark.soak)]
)
async def test_kill_9_in_the_middle_of_a_64_sample_run(
    rollout: Rollout, victim: str, process: int
) -> None:
    expected = await run_64(rollout)
    engine = engine_of(rollout, victim)
    restarts = rollout.fleet.members[victim].restarts
    job = asyncio.create_task(run_64(rollout))
    await asyncio.sleep(0.7)
    assert not job.done()
    os.kill(engine.info.pids[process], signal.SIGKILL)
    found = await asyncio.wait_for(job, 200)
    assert set(found) == {(str(i), j) for i in range(16) for j in range(4)}
    # A retry repeats the same sample: all are those of the undisturbed run, up to rounding.
    same = sum(found[key] == expected[key] for key in expected)
    assert same >= 0.95 * len(expected)
    await wait_until_all_are_ready(rollout)
    assert rollout.fleet.members[victim].restarts == restarts + 1
    assert engine_of(rollout, victim).info.engine_id != engine.info.engine_id
    await assert_no_block_is_held(rollout)
    assert len(await run_64(rollout)) == 64
    for pid in engine.info.pids:
        assert not _is_alive(pid), "a process of the killed engine lives on"


async def test_a_frozen_engine_is_replaced(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the process is there, and answers nothing."""
    limits = rollout.config.limits.model_copy(update={"health_timeout_s": 3.0})
    monkeypatch.setattr(rollout.fleet, "_limits", limits)
    engine = engine_of(rollout, "decode-0")
    restarts = rollout.fleet.members["decode-0"].restarts
    job = asyncio.create_task(run_64(rollout))
    await asyncio.sleep(0.5)
    os.kill(engine.info.pids[1], signal.SIGSTOP)
    assert len(await asyncio.wait_for(job, 200)) == 64
    await wait_until_all_are_ready(rollout)
    assert rollout.fleet.members["decode-0"].restarts == restarts + 1
    assert not _is_alive(engine.info.pids[1])


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
