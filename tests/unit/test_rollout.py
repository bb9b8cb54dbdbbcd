"""`generate` with an environment on a simulated fleet, async and blocking."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conftest import simulated
from splitroll.blocking import BlockingRollout
from splitroll.config import load_config
from splitroll.environment import Answer, Episode, EpisodeGroup
from splitroll.errors import GroupFailed, InvalidRequest
from splitroll.model import ModelFacts
from splitroll.rollout import Rollout
from splitroll.types import FailedGroup, Group, Prompt, SamplingParams

# One token in six ends a turn.
SAMPLING = SamplingParams(max_tokens=60, stop_token_ids=tuple(range(3, 700)), seed=1)
PROMPTS = [{"id": "a", "prompt": "w5 w6 w7"}, {"id": "b", "prompt": "w8 w9", "answer": 12}]


@contextlib.asynccontextmanager
async def opened(model: Path, *overrides: str) -> AsyncIterator[Rollout]:
    config = load_config({"model": str(model)}, [*overrides])
    facts = ModelFacts("tiny", str(model), 8, 4, 2048, 4096)
    async with simulated() as system:
        yield Rollout(
            config, facts, system.fleet, system.dispatcher, system.updater, system.handoff
        )
        assert system.dispatcher.load == {}


class Echo:
    """Answers with a text until an episode has three turns; the reward is the turn's number."""

    async def observe(self, episode: Episode) -> Answer:
        turns = len(episode.turns)
        return Answer("w100 w101" if turns < 3 else None, reward=turns)


async def generate(rollout: Rollout, **arguments: Any) -> dict[str, Any]:
    arguments = {"n": 3, "sampling": SAMPLING, "environment": Echo(), **arguments}
    return {group.id: group async for group in rollout.generate(PROMPTS, **arguments)}


def assert_whole(group: Any, n: int = 3) -> None:
    assert isinstance(group, EpisodeGroup)
    assert [episode.sample for episode in group.episodes] == list(range(n))
    for episode in group.episodes:
        before = list(episode.prompt.token_ids)
        for turn, observation in zip(episode.turns, (*episode.observations, ()), strict=True):
            assert list(turn.prompt_token_ids) == before
            before += turn.token_ids + observation
        assert set(episode.observations) <= {(100, 101)}
        assert len(episode.token_ids) <= SAMPLING.max_tokens
        assert episode.rewards == tuple(range(1, len(episode.turns) + 1))
        assert episode.ended == ("environment" if len(episode.turns) == 3 else "budget")


async def test_each_sample_of_a_prompt_becomes_an_episode(tiny_model: Path) -> None:
    async with opened(tiny_model) as rollout:
        groups = await generate(rollout)
        again = await generate(rollout)
        plain = await generate(rollout, environment=None)
    assert sorted(groups) == ["a", "b"]
    assert max(len(e.turns) for group in groups.values() for e in group.episodes) == 3
    for name, group in groups.items():
        assert_whole(group)
        tokens = [episode.token_ids for episode in group.episodes]
        assert tokens == [episode.token_ids for episode in again[name].episodes]
        # The first turns are what a call without an environment gives.
        assert isinstance(plain[name], Group)
        firsts = [episode.turns[0].token_ids for episode in group.episodes]
        assert firsts == [sample.token_ids for sample in plain[name].samples]
    assert groups["b"].prompt.metadata == {"answer": 12}


async def test_a_prompt_is_done_while_another_ones_environment_is_stuck(tiny_model: Path) -> None:
    stuck = asyncio.Event()

    class Stuck(Echo):
        async def observe(self, episode: Episode) -> Answer:
            if episode.prompt.id == "a" and len(episode.turns) == 2:
                await stuck.wait()
            return await super().observe(episode)

    async with opened(tiny_model) as rollout:
        groups = rollout.generate(PROMPTS, n=3, sampling=SAMPLING, environment=Stuck())
        assert (await asyncio.wait_for(anext(groups), 10)).id == "b"
        stuck.set()
        assert (await asyncio.wait_for(anext(groups), 10)).id == "a"
        assert await anext(groups, None) is None


async def test_turns_are_limited_by_the_call(tiny_model: Path) -> None:
    async with opened(tiny_model) as rollout:
        groups = await generate(rollout, max_turns=1)
        encoded = await generate(rollout, encode=lambda text: [len(text)])
    assert {e.ended for group in groups.values() for e in group.episodes} == {"max_turns"}
    assert {e.observations[0] for group in encoded.values() for e in group.episodes} == {(9,)}


class Hangs:
    """Has no answer for one prompt."""

    async def observe(self, episode: Episode) -> None:
        if episode.prompt.id == "a":
            await asyncio.sleep(60)


async def test_an_environment_that_takes_too_long_fails_its_prompt_only(tiny_model: Path) -> None:
    async with opened(tiny_model, "limits.environment_timeout_s=0.5") as rollout:
        groups = await generate(rollout, environment=Hangs(), on_error="yield")
        failed = groups.pop("a")
        assert isinstance(failed, FailedGroup)
        assert isinstance(failed.error, GroupFailed)
        assert "turn 0: the environment took longer than 0.5 s" in str(failed.error)
        assert [e.ended for e in groups["b"].episodes] == ["environment"] * 3
        with pytest.raises(GroupFailed, match=r"group a failed: sample \d, turn 0: "):
            await generate(rollout, environment=Hangs())


async def test_errors_that_come_together_are_all_taken(tiny_model: Path) -> None:
    both = asyncio.Barrier(2)
    left: list[dict[str, Any]] = []

    class Broken:
        async def observe(self, episode: Episode) -> None:
            await both.wait()
            raise ValueError("mine")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: left.append(context))
    try:
        async with opened(tiny_model) as rollout:
            with pytest.raises(GroupFailed, match="mine"):
                await generate(rollout, n=1, environment=Broken())
            gc.collect()
    finally:
        loop.set_exception_handler(None)
    assert left == []


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        ({"max_turns": 0}, {"max_turns"}),
        ({"max_turns": True}, {"max_turns"}),
        ({"environment": object()}, {"environment"}),
        ({"environment": Echo}, {"environment"}),
        ({"environment": None, "max_turns": 2, "encode": len}, {"max_turns", "encode"}),
    ],
)
async def test_what_cannot_be_asked_is_refused(
    tiny_model: Path, arguments: dict[str, Any], paths: set[str]
) -> None:
    async with opened(tiny_model) as rollout:
        with pytest.raises(InvalidRequest) as error:
            await generate(rollout, **arguments)
    assert {problem.path for problem in error.value.problems} == paths


async def test_the_budget_of_an_episode_must_fit_the_model(tiny_model: Path) -> None:
    """The budget holds all of an episode, so no later turn can be too long for the model."""
    sampling = SamplingParams(max_tokens=10_000)
    async with opened(tiny_model) as rollout:
        with pytest.raises(InvalidRequest, match="at most max_model_len"):
            await generate(rollout, sampling=sampling)


def test_the_blocking_twin_plays_episodes_too(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_simulated(config: Any, *, overrides: Any) -> Any:
        return opened(tiny_model, *overrides)

    class PlainEcho:
        def observe(self, episode: Episode) -> Answer:
            turns = len(episode.turns)
            return Answer([100, 101] if turns < 3 else None, reward=turns)

    monkeypatch.setattr(Rollout, "open", open_simulated)
    prompts = [Prompt("a", (5, 6, 7)), Prompt("b", (8, 9))]
    with BlockingRollout() as rollout:
        groups = list(
            rollout.generate(prompts, n=2, sampling=SAMPLING, environment=PlainEcho(), max_turns=3)
        )
        assert sorted(group.id for group in groups) == ["a", "b"]
        for group in groups:
            assert_whole(group, n=2)
        with pytest.raises(GroupFailed, match="answered with a object"):
            for _ in rollout.generate(prompts, environment=Nonsense()):
                pass


class Nonsense:
    def observe(self, episode: Episode) -> Any:
        return object()
