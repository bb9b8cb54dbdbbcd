"""Groups through a simulated fleet: each accepted group leaves exactly once, whatever dies."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import SimulatedSystem, simulated
from splitroll.dispatch.assembly import GroupWork
from splitroll.dispatch.prefix import block_hashes
from splitroll.engines.simulated import LatencyModel, SimulatedLauncher
from splitroll.errors import GroupFailed, InvalidRequest, LegError
from splitroll.types import Group, Prompt, Role, RouteKind, SamplingParams

SLOW = LatencyModel(step_s=0.004)


def work(i: int = 0, n: int = 4, tokens: int = 70, max_tokens: int = 8) -> GroupWork:
    prompt = Prompt(f"g{i}", tuple(range(100 + i, 100 + i + tokens)))
    return GroupWork(prompt, n, SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=i)


def kill_and_notice(system: SimulatedSystem, name: str) -> None:
    engine = system.launcher.engines[name]
    engine.kill()
    system.fleet.report_death(engine, "killed by a test")


async def run_all(system: SimulatedSystem, count: int, **shape: int) -> list[Group]:
    jobs = [system.dispatcher.run(work(i, **shape)) for i in range(count)]
    return list(await asyncio.wait_for(asyncio.gather(*jobs), 30))


async def assert_idle(system: SimulatedSystem) -> None:
    """All load is released and soon, well before a lease ends, no engine holds a block.

    Not at once: a restarted engine may be proven just now, which takes blocks too.
    """
    assert system.dispatcher.load == {}
    await system.handoff._cleanup.drain()
    for _ in range(40):
        await asyncio.sleep(0.05)
        if set((held := await system.held_blocks()).values()) <= {0}:
            return
    raise AssertionError(f"held blocks: {held}")


async def test_a_group_is_one_prefill_one_transfer_and_n_samples() -> None:
    async with simulated() as system:
        groups = await run_all(system, 6)
        for group in groups:
            kinds = [sample.route.kind for sample in group.samples]
            assert kinds.count(RouteKind.SPLIT) == 1
            assert kinds.count(RouteKind.SHARED) == 3
            assert len({sample.token_ids for sample in group.samples}) == 4
            assert len({sample.seed for sample in group.samples}) == 4
            assert {sample.route.decode for sample in group.samples} <= {"decode-0", "decode-1"}
        assert system.dispatcher.stats.handoffs == 6
        assert system.dispatcher.stats.prefills == {"prefill-0": 6}
        await assert_idle(system)


async def test_a_group_over_two_decode_engines_is_two_transfers() -> None:
    async with simulated("dispatch.decode_engines_per_group=2") as system:
        groups = await run_all(system, 3)
        for group in groups:
            assert {sample.route.decode for sample in group.samples} == {"decode-0", "decode-1"}
            assert [s.route.kind for s in group.samples].count(RouteKind.SPLIT) == 2
        assert system.dispatcher.stats.handoffs == 6
        counters = await system.fleet.counters()
        # The second handle of a group finds the prompt's full blocks in prefill's cache.
        assert counters["prefill-0"].computed_tokens < 2 * 3 * 70
        await assert_idle(system)


async def test_a_colocated_fleet_has_local_samples_only() -> None:
    async with simulated("disaggregation.enabled=false") as system:
        groups = await run_all(system, 4)
        assert {s.route.kind for group in groups for s in group.samples} == {RouteKind.LOCAL}
        await assert_idle(system)


@pytest.mark.parametrize("overrides", [(), ("disaggregation.enabled=false",)])
async def test_groups_that_arrive_together_spread_over_the_engines(
    overrides: tuple[str, ...],
) -> None:
    async with simulated(*overrides) as system:
        await run_all(system, 8)
        decodes = system.dispatcher.stats.decodes
        assert sorted(decodes.values()) == [16, 16]


async def test_round_robin_gives_every_engine_its_turn() -> None:
    async with simulated("dispatch.policy=round_robin") as system:
        await run_all(system, 8)
        assert set(system.dispatcher.stats.decodes.values()) == {16}


async def test_a_retry_repeats_the_same_samples() -> None:
    async with simulated() as system:
        (expected,) = await run_all(system, 1)
    async with simulated() as system:
        system.launcher.faults["decode-0"].fail_kv_loads = 1
        system.launcher.faults["prefill-0"].fail_prefills = 0
        system.launcher.faults["decode-1"].fail_kv_loads = 1
        (again,) = await run_all(system, 1)
        assert system.dispatcher.stats.retries >= 1
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in expected.samples]
    assert [s.seed for s in again.samples] == [s.seed for s in expected.samples]


async def test_no_request_id_is_used_twice_over_retries_and_turns() -> None:
    async with simulated() as system:
        used: list[str] = []
        for name, engine in system.launcher.engines.items():
            system.launcher.faults[name].fail_kv_loads = 2
            decode, prefill = engine.decode, engine.prefill

            def recording(call):  # type: ignore[no-untyped-def]
                def record(request):  # type: ignore[no-untyped-def]
                    used.append(request.request_id)
                    return call(request)

                return record

            engine.decode, engine.prefill = recording(decode), recording(prefill)  # type: ignore[method-assign]
        await run_all(system, 4)
        await run_all(system, 4)
        assert system.dispatcher.stats.retries >= 1
        assert len(used) == len(set(used)) >= 40


async def test_after_its_split_attempts_a_group_is_done_locally() -> None:
    async with simulated() as system:
        system.launcher.faults["prefill-0"].fail_prefills = 10
        (group,) = await run_all(system, 1)
        assert {sample.route.kind for sample in group.samples} == {RouteKind.LOCAL}
        await assert_idle(system)


async def test_a_group_that_no_route_completes_names_every_cause() -> None:
    async with simulated("dispatch.split_attempts=1", "dispatch.local_attempts=1") as system:
        system.launcher.faults["prefill-0"].fail_prefills = 10
        for name in ("decode-0", "decode-1"):
            system.launcher.faults[name].fail_decodes = 10
        with pytest.raises(GroupFailed) as caught:
            await system.dispatcher.run(work())
        first, *others = caught.value.causes
        assert "simulated fault in prefill" in first
        assert {"decode-0", "decode-1"} >= {cause.split(":")[0] for cause in others}
        assert others
        assert all("simulated fault in decode" in cause for cause in others)
        assert system.dispatcher.load == {}


async def test_a_request_at_fault_is_refused_and_trips_no_engine() -> None:
    async with simulated(max_model_len=100) as system:
        with pytest.raises(InvalidRequest, match="prompt g0"):
            await system.dispatcher.run(work(tokens=120))
        assert len(system.fleet.ready()) == 3
        assert system.dispatcher.stats.retries == 0
        await assert_idle(system)


@pytest.mark.parametrize("overrides", [(), ("disaggregation.enabled=false",)])
async def test_a_fleet_that_is_only_slow_fails_no_group(overrides: tuple[str, ...]) -> None:
    """Decode KV for about one group at a time: the others wait longer than a handoff may take."""
    slow = LatencyModel(step_s=0.03)
    options = ("disaggregation.decode_replicas=1", "colocated.replicas=1", *overrides)
    async with simulated(*options, latency=slow, num_blocks=24) as system:
        groups = await run_all(system, 6, max_tokens=30)
        assert [len(group.samples) for group in groups] == [4] * 6
        await assert_idle(system)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_killed_engine_costs_no_sample_and_comes_back(victim: str) -> None:
    async with simulated(latency=SLOW) as system:
        jobs = [asyncio.create_task(system.dispatcher.run(work(i))) for i in range(16)]
        await asyncio.sleep(0.02)
        system.launcher.engines[victim].kill()
        groups = await asyncio.wait_for(asyncio.gather(*jobs), 30)
        assert [len(group.samples) for group in groups] == [4] * 16
        assert len({(s.id, s.sample) for group in groups for s in group.samples}) == 64
        async with asyncio.timeout(10):
            while not system.fleet.members[victim].restarts or len(system.fleet.ready()) < 3:
                await asyncio.sleep(0.01)
        assert system.fleet.members[victim].restarts == 1
        await assert_idle(system)


async def test_a_hung_engine_is_killed_and_its_work_done_elsewhere() -> None:
    async with simulated(latency=SLOW) as system:
        system.launcher.faults["decode-0"].hang = True
        jobs = asyncio.create_task(run_all(system, 8))
        await asyncio.sleep(1.0)
        system.launcher.faults["decode-0"].hang = False
        groups = await jobs
        assert [len(group.samples) for group in groups] == [4] * 8
        assert system.fleet.members["decode-0"].restarts >= 1
        await assert_idle(system)


async def test_with_no_decode_engine_left_prefill_engines_do_the_work() -> None:
    async with simulated("limits.max_restarts=0", latency=SLOW) as system:
        for name in ("decode-0", "decode-1"):
            system.launcher.engines[name].kill()
        groups = await run_all(system, 2)
        assert {s.route.decode for group in groups for s in group.samples} == {"prefill-0"}


async def test_with_no_engine_left_groups_fail_with_the_reason_in_time() -> None:
    async with simulated("limits.max_restarts=0", "limits.recovery_timeout_s=0.3") as system:
        for engine in list(system.launcher.engines.values()):
            engine.kill()
        with pytest.raises(GroupFailed):
            await asyncio.wait_for(system.dispatcher.run(work()), 5)


async def test_work_waits_for_a_fleet_that_died_unnoticed_and_comes_back() -> None:
    async with simulated("limits.health_interval_s=60.0") as system:
        for engine in list(system.launcher.engines.values()):
            engine.kill()
        (group,) = await run_all(system, 1)
        assert len(group.samples) == 4


async def test_handles_in_flight_never_exceed_what_prefill_can_hold() -> None:
    async with simulated(num_blocks=16, latency=LatencyModel(pull_s=0.01)) as system:
        prefill = system.launcher.engines["prefill-0"]
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, (await prefill.load()).held_blocks)
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        groups = await run_all(system, 20, tokens=90)
        watcher.cancel()
        assert len(groups) == 20
        assert 3 <= most <= 16
        await assert_idle(system)


async def test_a_cancelled_group_frees_everything_at_once() -> None:
    async with simulated(latency=SLOW) as system:
        jobs = [
            asyncio.create_task(system.dispatcher.run(work(i, max_tokens=200))) for i in range(6)
        ]
        await asyncio.sleep(0.1)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await assert_idle(system)


async def test_no_prompt_is_prefilled_for_decode_engines_that_are_down() -> None:
    async with simulated("limits.max_restarts=20") as system:
        for name in ("decode-0", "decode-1"):
            system.launcher.faults[name].fail_start = 1  # so that they come back only after 1 s
            kill_and_notice(system, name)
        groups = await run_all(system, 6)
        assert {s.route.kind for group in groups for s in group.samples} == {RouteKind.LOCAL}
        assert {s.route.decode for group in groups for s in group.samples} == {"prefill-0"}
        assert not system.dispatcher.stats.prefills
        assert await system.fleet.wait_ready(Role.DECODE, timeout_s=10)
        await assert_idle(system)


async def test_handles_that_fill_prefill_are_given_back_by_decode_engines_to_be_proven() -> None:
    async with simulated("limits.max_restarts=20", num_blocks=12) as system:
        (prefill,) = system.fleet.ready(Role.PREFILL)
        handles = [
            await system.handoff.prefill(prefill, f"orphan-{i}", tuple(range(i, 70 + i)))
            for i in range(4)
        ]
        for name in ("decode-0", "decode-1"):
            kill_and_notice(system, name)
        for handle in handles:
            system.handoff.give_back(handle)
        # Sooner than the handles' lease ends.
        assert await system.fleet.wait_ready(Role.DECODE, timeout_s=2)
        await assert_idle(system)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["kill", "cancel", "kv", "prefill", "nothing"]),
            st.sampled_from(["prefill-0", "decode-0", "decode-1"]),
            st.floats(0, 0.01),
        ),
        max_size=8,
    ),
    spread=st.integers(1, 2),
    seats=st.integers(1, 8),
    blocks=st.integers(24, 64),
)
def test_nothing_is_lost_or_invented_whatever_happens(
    events: list[tuple[str, str, float]], spread: int, seats: int, blocks: int
) -> None:
    async def scenario() -> None:
        launcher = SimulatedLauncher(LatencyModel(), num_blocks=blocks, max_num_seqs=seats)
        options = (f"dispatch.decode_engines_per_group={spread}", "limits.max_restarts=20")
        async with simulated(*options, launcher=launcher) as system:
            jobs = [
                asyncio.create_task(system.dispatcher.run(work(i, n=1 + i % 5))) for i in range(12)
            ]
            cancelled = set()
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
            results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)
            for index, result in enumerate(results):
                if index in cancelled and isinstance(result, asyncio.CancelledError):
                    continue
                assert isinstance(result, Group | GroupFailed), result
                if isinstance(result, Group):
                    assert [s.sample for s in result.samples] == list(range(1 + index % 5))
                    for sample in result.samples:
                        assert len(sample.logprobs) == len(sample.token_ids) == 8
            await assert_idle(system)

    asyncio.run(scenario())


async def test_a_prompt_computed_in_place_is_known_there_afterwards() -> None:
    async with simulated("disaggregation.enabled=false") as system:
        (group,) = await run_all(system, 1, n=1)
        allocator, (sample,) = system.dispatcher.allocator, group.samples
        blocks = block_hashes(sample.prompt_token_ids, 32)
        mask = 1 << allocator.books.number(sample.route.decode)
        assert allocator._prefixes.depths(blocks) == [(mask, 2)]


async def test_the_times_of_a_sample_in_segments_are_not_longer_than_it_took() -> None:
    async with simulated(
        "dispatch.segment_tokens=16", "disaggregation.enabled=false", latency=SLOW
    ) as system:
        begun = time.monotonic()
        (group,) = await run_all(system, 1, n=1, max_tokens=96)
        took = time.monotonic() - begun
        (sample,) = group.samples
        assert 0.5 * took < sum(dataclasses.astuple(sample.timing)) <= took


async def test_a_stopped_group_comes_back_though_an_abort_fails() -> None:
    async with simulated(latency=LatencyModel(step_s=0.01)) as system:
        stop, failures = asyncio.Event(), []
        for engine in system.launcher.engines.values():

            async def abort(ids: Sequence[str], abort: Callable[..., Any] = engine.abort) -> None:
                if not failures:
                    failures.append(ids)
                    raise LegError("x", "a call of Ray's failed")
                await abort(ids)

            engine.abort = abort  # type: ignore[method-assign]
        running = asyncio.create_task(system.dispatcher.run(work(max_tokens=400), stop))
        await asyncio.sleep(0.3)
        stop.set()
        group = await asyncio.wait_for(running, 5)
        assert failures
        assert {sample.finish_reason for sample in group.samples} == {"abort"}
