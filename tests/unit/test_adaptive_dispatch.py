"""The adaptive policy, segments, moves and stops on a simulated fleet, whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import SimulatedSystem, simulated
from splitroll.dispatch.assembly import GroupWork
from splitroll.dispatch.books import Snapshot
from splitroll.dispatch.policy import GroupRoute, Part, Why, Work
from splitroll.engines.simulated import LatencyModel, SimulatedLauncher
from splitroll.errors import GroupFailed
from splitroll.types import Group, Prompt, RouteKind, SamplingParams

ADAPTIVE = ("dispatch.policy=adaptive", "dispatch.roles=elastic", "dispatch.segment_tokens=32")
SLOW = LatencyModel(step_s=0.002)
TOKENS = 100


class Mover:
    """After every segment to the next engine, or nowhere."""

    name = "mover"
    chooses_late = True

    def __init__(self, *, moves: bool = True) -> None:
        self.moves = moves

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute:
        engine = max(work.held_by, 0)
        moves = self.moves and work.held_by >= 0
        to = (engine + 1) % len(snapshot.names) if moves else engine
        return GroupRoute((Part(engine, to, work.samples),), Why(self.name))


def work(i: int = 0, n: int = 4, temperature: float = 1.0, stop: str = "") -> GroupWork:
    sampling = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, temperature=temperature, stop=(stop,) if stop else ()
    )
    return GroupWork(Prompt(f"g{i}", tuple(range(100 + i, 170 + i))), n, sampling, seed=i)


async def assert_idle(system: SimulatedSystem) -> None:
    assert system.dispatcher.load == {}
    await system.handoff.settled()
    for _ in range(60):
        await asyncio.sleep(0.05)
        if set((held := await system.held_blocks()).values()) <= {0}:
            return
    raise AssertionError(f"held blocks: {held}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_moving_changes_no_token(temperature: float) -> None:
    found = []
    for moves in (False, True):
        async with simulated(*ADAPTIVE) as system:
            system.dispatcher.allocator.policy = Mover(moves=moves)
            group = await system.dispatcher.run(work(temperature=temperature))
            found.append([sample.token_ids for sample in group.samples])
            kinds = {sample.route.kind for sample in group.samples}
            assert kinds == ({RouteKind.MIGRATED} if moves else {RouteKind.LOCAL})
            # Cut two tokens after a block is full: after 60 and 92 tokens, of a prompt of 70.
            assert system.dispatcher.stats.moves == (8 if moves else 0)
            await assert_idle(system)
    assert found[0] == found[1]
    if temperature == 0.0:
        async with simulated(*ADAPTIVE) as system:
            whole = await system.dispatcher.run(work(temperature=0.0, stop="never said"))
            assert system.dispatcher.stats.decodes.total() == 4
        assert [sample.token_ids for sample in whole.samples] == found[0]


async def test_a_sample_whose_engine_dies_goes_on_from_its_last_segment() -> None:
    async with simulated(*ADAPTIVE, "limits.max_restarts=20", latency=SLOW) as system:
        running = [asyncio.create_task(system.dispatcher.run(work(i))) for i in range(6)]
        await asyncio.sleep(0.15)  # each is in its third segment, or so
        victim = "decode-0"
        system.launcher.engines[victim].kill()
        groups = await asyncio.wait_for(asyncio.gather(*running), 20)
        assert all(len(s.token_ids) == TOKENS for group in groups for s in group.samples)
        counters = await system.fleet.counters()
        total = sum(one.generated_tokens for one in counters.values())
        # At most a segment of each sample of that engine is generated twice.
        assert total <= 24 * TOKENS + 16 * 33 + 200
        await assert_idle(system)


async def test_a_failed_move_costs_no_sample() -> None:
    async with simulated(*ADAPTIVE) as system:
        system.dispatcher.allocator.policy = Mover()
        for faults in system.launcher.faults.values():
            faults.fail_kv_loads = 2
        group = await system.dispatcher.run(work(temperature=0.0))
    async with simulated(*ADAPTIVE) as system:
        expected = await system.dispatcher.run(work(temperature=0.0))
    tokens = [[sample.token_ids for sample in one.samples] for one in (group, expected)]
    assert tokens[0] == tokens[1]


async def test_work_is_spread_over_all_engines_and_says_why() -> None:
    async with simulated(*ADAPTIVE, latency=SLOW) as system:
        groups = await asyncio.gather(*(system.dispatcher.run(work(i)) for i in range(9)))
        used = {sample.route.decode for group in groups for sample in group.samples}
        assert used == {"prefill-0", "decode-0", "decode-1"}
        for group in groups:
            for sample in group.samples:
                assert sample.route.why["policy"] == "adaptive"
                assert sample.route.why["local_ms"] > 0
        assert system.dispatcher.stats.routes.total() == 36
        await assert_idle(system)


@pytest.mark.parametrize("pause_s", [0.0, 0.005, 0.05, 0.15])
async def test_a_stopped_group_comes_back_as_it_is(pause_s: float) -> None:
    async with simulated(*ADAPTIVE, latency=SLOW) as system:
        stop = asyncio.Event()
        running = [asyncio.create_task(system.dispatcher.run(work(i), stop)) for i in range(4)]
        await asyncio.sleep(pause_s)
        stop.set()
        parts = await asyncio.wait_for(asyncio.gather(*running), 5)
        await assert_idle(system)
        for part in parts:
            assert [sample.sample for sample in part.samples] == [0, 1, 2, 3]
            for sample in part.samples:
                assert len(sample.token_ids) == len(sample.logprobs) < TOKENS
                assert sample.finish_reason == "abort"
        again = [
            replace(work(i), begun={s.sample: s for s in part.samples})
            for i, part in enumerate(parts)
        ]
        wholes = await asyncio.gather(*(system.dispatcher.run(one) for one in again))
        for whole, part in zip(wholes, parts, strict=True):
            assert whole.is_complete
            for sample, before in zip(whole.samples, part.samples, strict=True):
                assert len(sample.token_ids) == TOKENS
                assert sample.token_ids[: len(before.token_ids)] == before.token_ids
        await assert_idle(system)


async def test_a_turn_of_an_episode_goes_before_groups_that_wait() -> None:
    options = (*ADAPTIVE, "disaggregation.decode_replicas=1")
    async with simulated(*options, latency=SLOW, max_num_seqs=2) as system:
        ends: list[str] = []

        async def run(one: GroupWork) -> None:
            await system.dispatcher.run(one)
            ends.append(one.prompt.id)

        waiting = [asyncio.create_task(run(work(i, n=2))) for i in range(6)]
        await asyncio.sleep(0.05)
        turn = replace(work(9, n=1), episode_id="e")
        await asyncio.gather(run(turn), *waiting)
        assert ends.index("g9") <= 3


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["kill", "cancel", "kv", "prefill", "stop"]),
            st.sampled_from(["prefill-0", "decode-0", "decode-1"]),
            st.floats(0, 0.02),
        ),
        max_size=8,
    ),
    moving=st.booleans(),
    seats=st.integers(1, 8),
    blocks=st.integers(24, 64),
)
def test_nothing_is_lost_or_invented_whatever_happens_to_segments(
    events: list[tuple[str, str, float]], moving: bool, seats: int, blocks: int
) -> None:
    async def scenario() -> None:
        launcher = SimulatedLauncher(LatencyModel(), num_blocks=blocks, max_num_seqs=seats)
        options = (*ADAPTIVE, "limits.max_restarts=20")
        async with simulated(*options, launcher=launcher) as system:
            if moving:
                system.dispatcher.allocator.policy = Mover()
            stops = [asyncio.Event() for _ in range(12)]
            jobs = [
                asyncio.create_task(system.dispatcher.run(work(i, n=1 + i % 5), stops[i]))
                for i in range(12)
            ]
            cancelled, stopped = set(), set()
            for index, (event, name, pause_s) in enumerate(events):
                await asyncio.sleep(pause_s)
                if event == "kill":
                    launcher.engines[name].kill()
                elif event == "kv":
                    launcher.faults[name].fail_kv_loads += 1
                elif event == "prefill":
                    launcher.faults[name].fail_prefills += 1
                elif event == "cancel":
                    jobs[index].cancel()
                    cancelled.add(index)
                elif event == "stop":
                    stops[index].set()
                    stopped.add(index)
            results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
            for index, result in enumerate(results):
                if index in cancelled and isinstance(result, asyncio.CancelledError):
                    continue
                assert isinstance(result, Group | GroupFailed), result
                if isinstance(result, Group):
                    assert [s.sample for s in result.samples] == list(range(1 + index % 5))
                    for sample in result.samples:
                        assert len(sample.logprobs) == len(sample.token_ids)
                        whole = sample.finish_reason == "length"
                        assert whole or index in stopped
                        assert not whole or len(sample.token_ids) == TOKENS
            await assert_idle(system)

    asyncio.run(scenario())


class Bringer:
    """Turns of an episode go round all engines, and what is cached goes along."""

    name = "bringer"
    chooses_late = True

    def __init__(self, *, brings: bool = True) -> None:
        self.brings = brings
        self.on_bring: Callable[[], None] = lambda: None
        self.at = -1

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute:
        before, self.at = self.at, (self.at + 1) % len(snapshot.names)
        part = Part(self.at, self.at, work.samples)
        if self.brings and work.cached:
            most = min(max(tokens for _, tokens in work.cached), work.prompt_tokens - 1)
            whole = most // work.block_size * work.block_size
            part = replace(part, kv_from=before, kv_tokens=whole)
            self.on_bring()
        return GroupRoute((part,), Why(self.name))


async def converse(system: SimulatedSystem, turns: int = 4) -> list[Group]:
    """Run an episode whose observations are 20 tokens long."""
    groups, tokens = [], tuple(range(100, 170))
    for turn in range(turns):
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        one = GroupWork(Prompt(f"t{turn}", tokens), 2, sampling, seed=turn, episode_id="e")
        groups.append(await system.dispatcher.run(one))
        tokens += groups[-1].samples[0].token_ids + tuple(range(300 + turn, 320 + turn))
    return groups


async def test_a_turn_takes_what_is_cached_along() -> None:
    found, computed = [], []
    for brings in (False, True):
        async with simulated(*ADAPTIVE) as system:
            system.dispatcher.allocator.policy = Bringer(brings=brings)
            before = await system.fleet.counters()
            groups = await converse(system)
            after = await system.fleet.counters()
            computed.append(sum((after[n] - before[n]).computed_tokens for n in after))
            found.append([[s.token_ids for s in group.samples] for group in groups])
            kinds = {s.route.kind for group in groups[1:] for s in group.samples}
            assert kinds == ({RouteKind.MIGRATED} if brings else {RouteKind.LOCAL})
            assert system.dispatcher.stats.moves == (6 if brings else 0)
            assert system.dispatcher.stats.recomputed_tokens == 0
            if brings:
                last = groups[-1].samples[0]
                assert (last.route.prefill, last.route.decode) == ("decode-1", "prefill-0")
                assert last.timing.transfer_s > 0
            await assert_idle(system)
    assert found[0] == found[1]
    # Without, the second and third turn compute again what others have. A move takes a token.
    assert computed[1] <= computed[0] - (96 + 128) + 3


@pytest.mark.parametrize("fault", ["fail_prefills", "fail_kv_loads", "kill"])
async def test_a_turn_goes_on_without_the_kv_that_did_not_come(fault: str) -> None:
    async with simulated(*ADAPTIVE) as system:
        system.dispatcher.allocator.policy = Bringer(brings=False)
        expected = [[s.token_ids for s in group.samples] for group in await converse(system)]
    async with simulated(*ADAPTIVE, "limits.max_restarts=20") as system:
        policy = system.dispatcher.allocator.policy = Bringer()

        def break_engines() -> None:
            if policy.at != 1:
                return
            if fault == "kill":
                system.launcher.engines["prefill-0"].kill()
                return
            for faults in system.launcher.faults.values():
                setattr(faults, fault, 1)

        policy.on_bring = break_engines
        groups = await asyncio.wait_for(converse(system), 20)
        assert [[s.token_ids for s in group.samples] for group in groups] == expected
        assert {s.route.kind for s in groups[1].samples} == {RouteKind.LOCAL}
        await assert_idle(system)
