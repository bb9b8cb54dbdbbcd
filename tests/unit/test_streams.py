"""Who follows samples while they are generated hears every token once, whatever happens."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace

import pytest

from conftest import SimulatedSystem, simulated
from splitroll.dispatch.assembly import GroupWork
from splitroll.dispatch.progress import Listener
from splitroll.engines.protocol import DecodeOutput, Tokens
from splitroll.engines.simulated import LatencyModel, SimulatedEngine
from splitroll.errors import EngineDied, GroupFailed
from splitroll.types import Group, Prompt, Sample, SamplingParams

ADAPTIVE = (
    "dispatch.policy=adaptive",
    "dispatch.roles=elastic",
    "dispatch.segment_tokens=32",
    "limits.max_restarts=20",
)
SLOW = LatencyModel(step_s=0.003)
WORK = GroupWork(
    Prompt("g", tuple(range(100, 160))),
    3,
    SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True),
    seed=1,
    stream=1,
)


class Heard(Listener):
    """Keeps what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.held: dict[int, Tokens] = {}
        self.ends: dict[int, Sample] = {}
        self.legs = 0
        self.on_tokens = self._hear
        self.on_end = lambda index, sample, reason: self.ends.update({index: sample})
        self.on_again = lambda index: self.held.pop(index, None)

    def _hear(self, index: int, tokens: Tokens) -> None:
        if (before := self.held.pop(index, None)) is not None:
            self.tokens[index] += before.token_ids
        self.held[index] = tokens
        self.legs += tokens.last

    def all(self, index: int) -> tuple[int, ...]:
        last = self.held[index].token_ids if index in self.held else ()
        return (*self.tokens[index], *last)


async def expected() -> list[tuple[int, ...]]:
    async with simulated(*ADAPTIVE) as system:
        group = await system.dispatcher.run(replace(WORK, stream=0))
        return [sample.token_ids for sample in group.samples]


async def follow(system: SimulatedSystem, work: GroupWork = WORK) -> tuple[Group, Heard]:
    heard = Heard()
    group = await asyncio.wait_for(system.dispatcher.run(work, listener=heard), 20)
    return group, heard


async def test_engines_that_die_repeat_and_lose_no_token() -> None:
    whole = await expected()
    async with simulated(*ADAPTIVE, latency=SLOW) as system:
        following = asyncio.create_task(follow(system))
        for _ in range(4):
            await asyncio.sleep(0.06)
            if busy := system.dispatcher.load:
                system.launcher.engines[max(busy, key=lambda name: busy[name])].kill()
        group, heard = await following
    assert [sample.token_ids for sample in group.samples] == whole
    assert [heard.all(i) for i in range(3)] == whole
    assert set(heard.ends) == {0, 1, 2}


async def test_an_abort_that_nobody_asked_for_repeats_no_token() -> None:
    whole = await expected()
    async with simulated(*ADAPTIVE, latency=SLOW) as system:
        following = asyncio.create_task(follow(system))
        await asyncio.sleep(0.1)
        for engine in system.launcher.engines.values():
            await engine.abort(list(engine._running))
        group, heard = await following
    assert [sample.token_ids for sample in group.samples] == whole
    assert [heard.all(i) for i in range(3)] == whole


async def test_a_sample_whose_end_was_not_said_ends_as_it_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = await expected()
    decode, failed = SimulatedEngine.decode, []

    async def dies_at_the_end(self: SimulatedEngine, request):  # type: ignore[no-untyped-def]
        async for event in decode(self, request):
            if request.stream and isinstance(event, DecodeOutput) and not failed:
                failed.append(self)
                raise EngineDied(self.info.name, "killed between tokens and output")
            yield event

    monkeypatch.setattr(SimulatedEngine, "decode", dies_at_the_end)
    async with simulated(*ADAPTIVE) as system:
        group, heard = await follow(system)
    assert failed
    assert [sample.token_ids for sample in group.samples] == whole
    assert [heard.all(i) for i in range(3)] == whole


@pytest.mark.parametrize("goes_on", [True, False])
async def test_what_looks_at_its_own_output_is_generated_in_one_go(goes_on: bool) -> None:
    # What the simulated engine reads of it: an empty mapping.
    work = replace(WORK, native=b"\x80", goes_on=goes_on)
    async with simulated(*ADAPTIVE, latency=SLOW) as system:
        _, heard = await follow(system, work)
        assert heard.legs == (9 if goes_on else 3)
        following = asyncio.create_task(follow(system, replace(work, seed=2)))
        await asyncio.sleep(0.08)
        for engine in list(system.launcher.engines.values()):
            engine.kill()
        if goes_on:
            assert (await following)[0].is_complete
        else:
            with pytest.raises(GroupFailed, match="cannot go on"):
                await following


async def test_a_dropped_sample_ends_and_its_siblings_go_on() -> None:
    async with simulated(*ADAPTIVE, latency=SLOW) as system:
        heard = Heard()
        running = asyncio.create_task(system.dispatcher.run(WORK, listener=heard))
        await asyncio.sleep(0.1)
        await heard.drop(1)
        group = await asyncio.wait_for(running, 10)
        reasons = [sample.finish_reason for sample in group.samples]
        assert reasons == ["length", "abort", "length"]
        assert system.dispatcher.load == {}
