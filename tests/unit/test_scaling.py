"""Engines join and leave a running fleet of simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from conftest import SimulatedSystem, simulated
from splitroll.config.pools import Pool
from splitroll.dispatch.assembly import GroupWork
from splitroll.engines.protocol import Engine
from splitroll.engines.simulated import Faults, LatencyModel, SimulatedLauncher
from splitroll.errors import ConfigError, Conflict, EngineStartError, ProofError
from splitroll.fleet.fleet import MemberState
from splitroll.placement import EngineSpec
from splitroll.types import Group, Prompt, Role, SamplingParams

SLOW = LatencyModel(step_s=0.004)
ELASTIC = ("dispatch.policy=adaptive", "dispatch.roles=elastic", "dispatch.segment_tokens=32")


class SlowLauncher(SimulatedLauncher):
    """Takes its time."""

    delay_s = 0.0

    async def launch(self, spec: EngineSpec, generation: int) -> Engine:
        await asyncio.sleep(self.delay_s)
        return await super().launch(spec, generation)


def work(i: int, max_tokens: int = 60) -> GroupWork:
    prompt = Prompt(f"g{i}", tuple(range(100 + i, 170 + i)))
    return GroupWork(prompt, 4, SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=i)


def names(system: SimulatedSystem) -> set[str]:
    return {engine.info.name for engine in system.fleet.ready()}


async def scale(system: SimulatedSystem, timeout_s: float = 20.0, **wanted: int):  # type: ignore[no-untyped-def]
    roles = {"prefill": Role.PREFILL, "decode": Role.DECODE, "mixed": Role.BOTH}
    asked = {roles[name]: count for name, count in wanted.items()}
    return await asyncio.wait_for(system.scaler.scale(asked, timeout_s), 30)


async def assert_idle(system: SimulatedSystem) -> None:
    assert system.dispatcher.load == {}
    await system.handoff._cleanup.drain()
    for _ in range(40):
        if set((held := await system.held_blocks()).values()) <= {0}:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"held blocks: {held}")


async def test_engines_that_join_are_proven_with_all_and_take_work() -> None:
    async with simulated("disaggregation.decode_replicas=1") as system:
        report = await scale(system, prefill=2, decode=3)
        assert {joined.name for joined in report.joined} == {"prefill-1", "decode-1", "decode-2"}
        for joined in report.joined:
            assert {"start", "weights", "proof"} <= set(joined.seconds)
            assert all(seconds >= 0 for seconds in joined.seconds.values())
        proven = [(p.prefill, p.decode) for p in system.fleet.proofs if p.problem is None]
        assert sorted(proven) == [
            (f"prefill-{i}", f"decode-{j}") for i in range(2) for j in range(3)
        ]
        jobs = [system.dispatcher.run(work(i)) for i in range(12)]
        groups = await asyncio.gather(*jobs)
        assert {s.route.decode for g in groups for s in g.samples} == {
            "decode-0",
            "decode-1",
            "decode-2",
        }
        assert set(system.dispatcher.stats.prefills) == {"prefill-0", "prefill-1"}
        await assert_idle(system)


async def test_an_engine_that_leaves_ends_what_it_has_first() -> None:
    async with simulated(latency=SLOW) as system:
        jobs = [asyncio.create_task(system.dispatcher.run(work(i))) for i in range(6)]
        while not (await system.launcher.engines["decode-1"].load()).running:
            await asyncio.sleep(0.005)
        report = await scale(system, decode=1)
        (left,) = report.left
        assert (left.name, left.drained) == ("decode-1", True)
        assert left.drain_s > 0.02
        assert names(system) == {"prefill-0", "decode-0"}
        assert system.launcher.engines["decode-1"]._dead.is_set()
        groups = await asyncio.gather(*jobs)
        assert all(s.finish_reason == "length" for g in groups for s in g.samples)
        assert system.dispatcher.stats.retries == 0
        assert "decode-1" in {s.route.decode for g in groups for s in g.samples}
        await assert_idle(system)


async def test_a_fleet_that_shrinks_step_by_step_loses_nothing() -> None:
    """Samples that do not move end their segments on engines that leave."""
    latency = LatencyModel(step_s=0.005)
    overrides = ("dispatch.segment_tokens=16", "disaggregation.decode_replicas=6")
    async with simulated(*overrides, "limits.sample_timeout_s=60.0", latency=latency) as system:
        jobs = [asyncio.create_task(system.dispatcher.run(work(i, 400))) for i in range(24)]
        await asyncio.sleep(0.3)
        for count in range(5, 0, -1):
            assert (await scale(system, decode=count)).left[0].drained
        groups = await asyncio.wait_for(asyncio.gather(*jobs), 60)
        assert all(len(s.token_ids) == 400 for g in groups for s in g.samples)
        assert system.dispatcher.stats.retries == 0
        await assert_idle(system)


async def test_what_an_engine_does_not_end_in_time_goes_on_elsewhere() -> None:
    latency = LatencyModel(step_s=0.02)
    async with simulated("limits.sample_timeout_s=20.0", latency=latency) as system:
        jobs = [asyncio.create_task(system.dispatcher.run(work(i))) for i in range(4)]
        while not (await system.launcher.engines["decode-1"].load()).running:
            await asyncio.sleep(0.005)
        report = await scale(system, decode=1, timeout_s=0.1)
        assert not report.left[0].drained
        groups = await asyncio.wait_for(asyncio.gather(*jobs), 20)
        assert all(len(s.token_ids) == 60 for g in groups for s in g.samples)
        await assert_idle(system)


@pytest.mark.parametrize("overrides", [(), ELASTIC])
async def test_a_stream_of_groups_loses_nothing_while_the_fleet_grows_and_shrinks(
    overrides: tuple[str, ...],
) -> None:
    async with simulated("disaggregation.decode_replicas=1", *overrides, latency=SLOW) as system:
        done: list[Group] = []

        async def stream(lane: int) -> None:
            for i in range(12):
                done.append(await system.dispatcher.run(work(100 * lane + i)))

        lanes = [asyncio.create_task(stream(lane)) for lane in range(4)]
        await asyncio.sleep(0.1)
        await scale(system, prefill=2, decode=2)
        await asyncio.sleep(0.2)
        await scale(system, prefill=1, decode=1)
        await asyncio.wait_for(asyncio.gather(*lanes), 60)
        assert len({g.prompt.id for g in done}) == 48
        assert all(len(s.token_ids) == 60 for g in done for s in g.samples)
        assert names(system) == {"prefill-0", "decode-0"}
        await assert_idle(system)
        # The same as a fleet that never changed would give.
        async with simulated("disaggregation.decode_replicas=1", *overrides) as still:
            for group in done[:6]:
                index = int(group.prompt.id[1:])
                again = await still.dispatcher.run(work(index))
                assert [s.token_ids for s in again.samples] == [s.token_ids for s in group.samples]


async def test_who_joins_has_the_weights_of_the_others(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(8, 8)}
    save_file(weights, tmp_path / "model.safetensors")
    async with simulated("disaggregation.decode_replicas=1", checkpoint=tmp_path) as system:
        await system.updater.update({"w": torch.ones(8, 8)})
        await scale(system, decode=2)
        joined = system.launcher.engines["decode-1"]
        assert joined._weight_version == system.fleet.weight_version == 1
        groups = await asyncio.gather(*(system.dispatcher.run(work(i)) for i in range(4)))
        assert {v.version for g in groups for s in g.samples for v in s.weight_versions} == {1}


async def test_counters_of_who_left_still_count_and_no_name_is_used_twice() -> None:
    async with simulated() as system:
        await asyncio.gather(*(system.dispatcher.run(work(i)) for i in range(6)))
        before = (await system.fleet.counters())["decode-1"]
        assert before.generated_tokens > 0
        await scale(system, decode=1)
        assert (await system.fleet.counters())["decode-1"] == before
        await scale(system, decode=2)
        assert names(system) == {"prefill-0", "decode-0", "decode-2"}
        counters = await system.fleet.counters()
        assert counters["decode-1"] == before
        assert counters["decode-2"].generated_tokens == 0, "its proofs do not count"
        await asyncio.gather(*(system.dispatcher.run(work(i)) for i in range(6, 12)))
        assert (await system.fleet.counters())["decode-2"].generated_tokens > 0
        await assert_idle(system)


@pytest.mark.parametrize(
    ("fault", "error"), [({"fail_start": 1}, EngineStartError), ({"corrupt_kv": True}, ProofError)]
)
async def test_an_engine_that_cannot_join_is_gone_and_the_others_serve(
    fault: dict[str, int], error: type[Exception]
) -> None:
    launcher = SimulatedLauncher()
    launcher.faults["decode-2"] = Faults(**fault)  # type: ignore[arg-type]
    async with simulated(launcher=launcher) as system:
        with pytest.raises(error, match="decode-2"):
            await scale(system, decode=4)
        assert names(system) == {"prefill-0", "decode-0", "decode-1", "decode-3"}
        assert "decode-2" not in system.fleet.members
        await system.dispatcher.run(work(1))
        await scale(system, decode=4)
        assert len(names(system)) == 5


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"decode": -1}, "0 or more"),
        ({"decode": True}, "0 or more"),
        ({"mixed": 1}, "no such engines"),
        ({"decode": 0}, "of each role"),
        ({"prefill": 0, "decode": 0}, "of each role"),
        ({"decode": 500}, "cores"),
    ],
)
async def test_what_cannot_be_is_told_and_changes_nothing(
    wanted: dict[str, int], says: str
) -> None:
    async with simulated("devices.share_cores=true") as system:
        if "decode" in wanted and wanted["decode"] > 100:
            system.launcher.config = system.launcher.config.model_copy(
                update={
                    "devices": system.launcher.config.devices.model_copy(
                        update={"share_cores": False}
                    )
                }
            )
        with pytest.raises(ConfigError, match=says):
            await scale(system, **wanted)
        assert names(system) == {"prefill-0", "decode-0", "decode-1"}


async def test_an_elastic_fleet_may_lose_a_role_and_get_it_back() -> None:
    async with simulated(*ELASTIC) as system:
        await scale(system, prefill=0)
        groups = await asyncio.gather(*(system.dispatcher.run(work(i)) for i in range(4)))
        assert {s.route.decode for g in groups for s in g.samples} <= {"decode-0", "decode-1"}
        await scale(system, prefill=1)
        assert "prefill-1" in names(system)
        await assert_idle(system)


async def test_an_engine_whose_node_died_comes_back_on_another_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("splitroll.fleet.fleet._PLACE_POLL_S", 0.05)
    async with simulated() as system:
        launcher, fleet = system.launcher, system.fleet
        member = fleet.members["decode-1"]
        launcher.gone.add(member.spec.node_id)
        engine = launcher.engines["decode-1"]
        engine.kill()
        fleet.report_death(engine, "its node died")
        await asyncio.sleep(0.3)
        assert member.state is MemberState.RESTARTING
        assert "no other has room" in str(member.last_error)
        assert member.restarts == 0, "waiting for a place uses up no attempt"
        await system.dispatcher.run(work(1))  # the others serve meanwhile
        launcher.homes.append("another")  # a node appears
        async with asyncio.timeout(10):
            while member.state is not MemberState.READY:
                await asyncio.sleep(0.02)
        assert member.spec.node_id == "another"


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("scale"), st.integers(1, 3), st.integers(1, 3)),
            st.tuples(st.just("kill"), st.integers(0, 5), st.just(0)),
            st.tuples(st.just("work"), st.integers(1, 6), st.just(0)),
        ),
        min_size=1,
        max_size=8,
    ),
    elastic=st.booleans(),
)
async def test_whatever_joins_leaves_or_dies_every_group_leaves_once(
    steps: list[tuple[str, int, int]], elastic: bool
) -> None:
    overrides = ELASTIC if elastic else ()
    async with simulated("limits.recovery_timeout_s=20.0", *overrides, latency=SLOW) as system:
        jobs: list[asyncio.Task[Group]] = []
        for kind, first, second in steps:
            if kind == "scale":
                await scale(system, prefill=first, decode=second)
                ready = [m.spec.role for m in system.fleet.members.values()]
                assert ready.count(Role.PREFILL) == first
                assert ready.count(Role.DECODE) == second
            elif kind == "kill":
                alive = sorted(names(system))
                if len(alive) > 2:
                    system.launcher.engines[alive[first % len(alive)]].kill()
            else:
                base = len(jobs)
                jobs += [
                    asyncio.create_task(system.dispatcher.run(work(base + i, max_tokens=20)))
                    for i in range(first)
                ]
                await asyncio.sleep(0.02)
        groups = await asyncio.wait_for(asyncio.gather(*jobs), 60)
        assert [g.prompt.id for g in groups] == [f"g{i}" for i in range(len(jobs))]
        assert all(len(s.token_ids) == 20 for g in groups for s in g.samples)
        assert system.dispatcher.load == {}


async def test_an_engine_that_is_still_starting_when_the_fleet_closes_is_ended() -> None:
    class Slow(SimulatedLauncher):
        async def launch(self, spec: EngineSpec, generation: int) -> Engine:
            if spec.name == "decode-2":
                await asyncio.sleep(0.3)
            return await super().launch(spec, generation)

    launcher = Slow()
    async with simulated(launcher=launcher) as system:
        growing = asyncio.create_task(scale(system, decode=3))
        await asyncio.sleep(0.05)
    with pytest.raises(EngineStartError, match="closed"):
        await growing
    assert launcher.engines["decode-2"]._dead.is_set()


async def test_one_that_leaves_while_it_is_started_again_does_not_come_back() -> None:
    class Slow(SimulatedLauncher):
        async def launch(self, spec: EngineSpec, generation: int) -> Engine:
            if generation:
                await asyncio.sleep(0.3)
            return await super().launch(spec, generation)

    launcher = Slow()
    async with simulated(launcher=launcher) as system:
        engine = launcher.engines["decode-1"]
        engine.kill()
        system.fleet.report_death(engine, "killed by a test")
        await asyncio.sleep(0.05)
        await scale(system, decode=1)
        await asyncio.sleep(0.6)
        assert names(system) == {"prefill-0", "decode-0"}
        assert "decode-1" not in system.fleet.members
        assert launcher.engines["decode-1"]._dead.is_set()
        await scale(system, decode=2)
        assert "decode-2" in names(system)
        await system.dispatcher.run(work(1))


async def test_an_engine_dies_while_it_leaves() -> None:
    async with simulated(latency=SLOW) as system:
        jobs = [asyncio.create_task(system.dispatcher.run(work(i))) for i in range(6)]
        engine = system.launcher.engines["decode-1"]
        while not (await engine.load()).running:
            await asyncio.sleep(0.005)
        leaving = asyncio.create_task(scale(system, decode=1))
        await asyncio.sleep(0.01)
        engine.kill()
        await leaving
        groups = await asyncio.wait_for(asyncio.gather(*jobs), 20)
        assert all(len(s.token_ids) == 60 for g in groups for s in g.samples)
        system.fleet.report_death(engine, "told late")  # it is no member any more
        assert names(system) == {"prefill-0", "decode-0"}


async def test_a_scale_that_is_given_up_leaves_the_engine_serving() -> None:
    latency = LatencyModel(step_s=0.02)
    async with simulated("limits.sample_timeout_s=20.0", latency=latency) as system:
        jobs = [asyncio.create_task(system.dispatcher.run(work(i))) for i in range(4)]
        while not (await system.launcher.engines["decode-1"].load()).running:
            await asyncio.sleep(0.005)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scale(system, decode=1), 0.1)
        assert names(system) == {"prefill-0", "decode-0", "decode-1"}
        await asyncio.wait_for(asyncio.gather(*jobs), 20)
        assert len((await scale(system, decode=1)).left) == 1


async def test_weights_wait_for_who_joins_and_who_joins_for_weights(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(8, 8)}
    save_file(weights, tmp_path / "model.safetensors")
    async with simulated(checkpoint=tmp_path) as system:
        for version in (1, 2, 3):
            value = {"w": torch.full((8, 8), float(version))}
            await asyncio.gather(
                system.updater.update(value), scale(system, decode=2 + version % 2)
            )
            assert system.fleet.weight_version == version
            for name in names(system):
                assert system.launcher.engines[name]._weight_version == version
            await system.dispatcher.run(work(version))
        await assert_idle(system)


async def test_a_fenced_fleet_is_not_scaled() -> None:
    async with simulated() as system:
        system.dispatcher.barrier.fence("a test")
        with pytest.raises(ConfigError, match="fenced"):
            await scale(system, decode=3)


async def test_an_engine_that_was_given_up_is_replaced() -> None:
    launcher = SimulatedLauncher()
    async with simulated("limits.max_restarts=1", launcher=launcher) as system:
        launcher.faults["decode-1"].fail_start = 9
        launcher.engines["decode-1"].kill()
        system.fleet.report_death(launcher.engines["decode-1"], "killed by a test")
        async with asyncio.timeout(10):
            while system.fleet.members["decode-1"].state is not MemberState.FAILED:
                await asyncio.sleep(0.02)
        place_more, beside = system.scaler._place_more, []

        async def note(pool: Pool, count: int, present: Sequence[EngineSpec], taken: Any) -> Any:
            beside.extend(spec.name for spec in present)
            return await place_more(pool, count, present, taken)

        system.scaler._place_more = note
        report = await scale(system, decode=2)
        assert [joined.name for joined in report.joined] == ["decode-2"]
        assert [left.name for left in report.left] == ["decode-1"]
        assert beside == ["prefill-0", "decode-0"], "what was given up takes no room"
        assert names(system) == {"prefill-0", "decode-0", "decode-2"}


async def test_a_fleet_that_stands_still_or_is_closed_is_not_scaled() -> None:
    async with simulated("weights.in_flight=keep", latency=SLOW) as system:
        job = asyncio.create_task(system.dispatcher.run(work(1)))
        await asyncio.sleep(0.05)
        await system.updater.rest.pause("keep")
        with pytest.raises(Conflict, match="resume first"):
            await scale(system, decode=3)
        await system.updater.rest.resume()
        await asyncio.wait_for(job, 10)
        assert len((await scale(system, decode=3)).joined) == 1
    with pytest.raises(Conflict, match="a closed fleet"):
        await scale(system, decode=1)


async def test_a_pause_that_keeps_what_is_under_way_waits_for_who_joins() -> None:
    launcher = SlowLauncher(latency=SLOW)
    async with simulated("weights.in_flight=keep", launcher=launcher) as system:
        launcher.delay_s = 0.3
        scaling = asyncio.create_task(scale(system, decode=3))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(system.updater.rest.pause("keep"), 5)
        assert scaling.done()
        assert len(system.fleet.ready()) == 4
        await system.updater.rest.resume()


async def test_who_cannot_wait_for_the_other_is_told_for_whom() -> None:
    launcher = SlowLauncher(latency=SLOW)
    async with simulated("weights.timeout_s=0.2", launcher=launcher) as system:
        launcher.delay_s = 0.8
        scaling = asyncio.create_task(scale(system, decode=3))
        await asyncio.sleep(0.1)
        with pytest.raises(Conflict, match="engines that join or leave"):
            await system.updater.hold()
        await scaling
        system.updater.rest.updating = 7
        with pytest.raises(Conflict, match="a weight update that has not ended"):
            await scale(system, timeout_s=0.1, decode=2)
        system.updater.rest.updating = None


@pytest.mark.parametrize("timeout_s", ["x", float("nan"), -1, float("inf")])
async def test_a_limit_must_be_one(timeout_s: Any) -> None:
    async with simulated() as system:
        with pytest.raises(ConfigError, match="timeout_s="):
            await scale(system, timeout_s=timeout_s, decode=1)
        assert len(system.fleet.ready()) == 3


async def test_a_scale_that_is_given_up_while_an_engine_restarts_leaves_it_restarting() -> None:
    launcher = SlowLauncher(latency=SLOW)
    async with simulated(launcher=launcher) as system:
        launcher.delay_s = 0.5
        launcher.engines["decode-1"].kill()
        while system.fleet.members["decode-1"].state is not MemberState.RESTARTING:
            await asyncio.sleep(0.01)
        member = system.fleet.members["decode-1"]
        scaling = asyncio.create_task(scale(system, decode=1))
        while not member.is_leaving:
            await asyncio.sleep(0)
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)
        async with asyncio.timeout(10):
            while len(system.fleet.ready()) < 3:
                await asyncio.sleep(0.02)
        assert not member.is_leaving


async def test_who_gives_up_twice_leaves_no_member_behind() -> None:
    launcher = SlowLauncher(latency=SLOW)
    async with simulated(launcher=launcher) as system:
        launcher.delay_s = 0.5
        scaling = asyncio.create_task(scale(system, decode=3))
        while "decode-2" not in system.fleet.members:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        scaling.cancel()
        await asyncio.sleep(0)
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)
        launcher.delay_s = 0.0
        assert [one.name for one in (await scale(system, decode=3)).joined] == ["decode-3"]


async def test_an_engine_is_added_to_the_group_that_lacks_one() -> None:
    groups = "[{replicas: 1, tensor_parallel_size: 2}, {replicas: 1}]"
    async with simulated(f"disaggregation.decode={groups}") as system:
        shapes = {m.spec.name: m.spec.tensor_parallel_size for m in system.fleet.members.values()}
        assert (shapes["decode-0"], shapes["decode-1"]) == (2, 1)
        await system.fleet.take_out("decode-0")
        await system.fleet.part("decode-0")
        await scale(system, decode=3)
        found = {m.spec.name: m.spec.tensor_parallel_size for m in system.fleet.members.values()}
        assert found == {"prefill-0": 1, "decode-1": 1, "decode-2": 2, "decode-3": 1}


async def test_a_pause_that_aborts_lets_a_proof_end_first() -> None:
    for delay_s in (0.0, 0.01, 0.03):
        latency = LatencyModel(step_s=0.01)
        async with simulated("disaggregation.decode_replicas=1", latency=latency) as system:
            scaling = asyncio.create_task(scale(system, decode=2))
            while "decode-1" not in system.launcher.engines:
                await asyncio.sleep(0)
            await asyncio.sleep(delay_s)
            await system.updater.rest.pause("abort")
            await system.updater.rest.resume()
            assert [one.name for one in (await scaling).joined] == ["decode-1"]


async def test_a_scale_cancelled_before_it_launches_leaves_no_member_behind() -> None:
    async with simulated() as system:
        scaling = asyncio.create_task(scale(system, decode=3))
        while "decode-2" not in system.fleet.members:
            await asyncio.sleep(0)
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)
        assert set(system.fleet.members) == {"prefill-0", "decode-0", "decode-1"}


async def test_who_is_put_back_is_proven_with_those_that_joined_meanwhile() -> None:
    latency = LatencyModel(step_s=0.02)
    async with simulated("limits.sample_timeout_s=20.0", latency=latency) as system:
        jobs = [asyncio.create_task(system.dispatcher.run(work(i, 200))) for i in range(4)]
        while not (await system.launcher.engines["decode-1"].load()).running:
            await asyncio.sleep(0.005)
        scaling = asyncio.create_task(scale(system, decode=1))
        while system.fleet.members["decode-1"].state is not MemberState.LEAVING:
            await asyncio.sleep(0)
        prefill = system.launcher.engines["prefill-0"]
        prefill.kill()
        system.fleet.report_death(prefill, "killed by a test")
        async with asyncio.timeout(10):
            while system.fleet.members["prefill-0"].state is not MemberState.READY:
                await asyncio.sleep(0.01)
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)
        assert "decode-1" not in names(system)
        async with asyncio.timeout(10):
            while "decode-1" not in names(system):
                await asyncio.sleep(0.01)
        pairs = [(proof.prefill, proof.decode) for proof in system.fleet.proofs]
        assert ("prefill-0", "decode-1") in pairs
        await asyncio.wait_for(asyncio.gather(*jobs), 20)


async def test_who_could_not_be_brought_to_the_weights_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"w": torch.zeros(8, 8)}
    save_file(weights, tmp_path / "model.safetensors")
    async with simulated("weights.timeout_s=0.5", checkpoint=tmp_path) as system:
        await system.updater.update({"w": torch.ones(8, 8)})
        system.launcher.faults["decode-2"] = Faults(hang_at="load")
        with pytest.raises(EngineStartError, match="did not load weight version 1"):
            await scale(system, decode=3)
        transport = system.updater._transport
        assert transport is not None
        monkeypatch.setattr(transport, "current", lambda: None)  # as nccl without weights.path
        launched = set(system.launcher.engines)
        with pytest.raises(Conflict, match=r"keeps no copy of version 1.*weights\.path"):
            await scale(system, decode=3)
        assert set(system.launcher.engines) == launched
        assert (await scale(system, decode=1)).joined == ()
