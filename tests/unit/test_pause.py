"""Pausing a fleet, beside updates, fences and engines that die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import SimulatedSystem, simulated
from splitroll.dispatch.assembly import GroupWork
from splitroll.engines.protocol import EngineLoad
from splitroll.engines.simulated import LatencyModel
from splitroll.errors import ConfigError, Conflict, LegError, WeightUpdateFailed
from splitroll.fleet.fleet import MemberState
from splitroll.rest import PauseMode
from splitroll.types import Group, Prompt, SamplingParams

SLOW = LatencyModel(step_s=0.004)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((40, 30), float(value + i)) for i in range(6)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(weights(0), tmp_path / "model.safetensors")
    return tmp_path


def work(i: int = 0, tokens: int = 100) -> GroupWork:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return GroupWork(Prompt(f"g{i}", tuple(range(100 + i, 160 + i))), 2, sampling, seed=i)


def asked(system: SimulatedSystem, i: int = 0) -> asyncio.Task[Group]:
    return asyncio.create_task(system.dispatcher.run(work(i)))


def running(system: SimulatedSystem) -> set[bool]:
    return {engine._running_on.is_set() for engine in system.launcher.engines.values()}


async def test_an_engine_that_dies_in_a_pause_leaves_no_other_paused() -> None:
    async with simulated("limits.max_restarts=20", latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.1)
        system.launcher.faults["decode-0"].die_at = "pause"
        await asyncio.wait_for(system.updater.rest.pause("abort"), 5)
        assert running(system) == {True}
        await system.updater.rest.resume()
        assert (await asyncio.wait_for(begun, 5)).id == "g0"
        assert (await asyncio.wait_for(asked(system, 1), 5)).is_complete


async def test_a_pause_that_is_taken_back_says_so() -> None:
    async with simulated(latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        pausing = asyncio.create_task(system.updater.rest.pause("wait"))
        await asyncio.sleep(0.05)
        await system.updater.rest.resume()
        assert (await begun).is_complete
        with pytest.raises(ConfigError, match="resumed meanwhile"):
            await pausing


async def test_resuming_what_is_not_paused_opens_nothing_in_an_update(checkpoint: Path) -> None:
    async with simulated(checkpoint=checkpoint) as system:
        barrier = system.dispatcher.barrier
        for pauses in (False, True):
            if pauses:
                await system.updater.rest.pause("wait")
            update = asyncio.create_task(system.updater.update(weights(3 + pauses)))
            while system.updater.rest.updating is None:
                await asyncio.sleep(0)
            barrier.shut(partial=False)  # as its first phase does
            await system.updater.rest.resume()
            assert not barrier._turnstile.is_open
            await update
            assert barrier._turnstile.is_open


async def test_weights_can_be_pushed_in_a_pause_which_lasts(checkpoint: Path) -> None:
    async with simulated(checkpoint=checkpoint) as system:
        await system.updater.rest.pause("wait")
        waits = asked(system)
        report = await system.updater.update(weights(3))
        await asyncio.sleep(0.05)
        assert report.version == 1
        assert not waits.done()
        await system.updater.rest.resume()
        group = await asyncio.wait_for(waits, 5)
        assert {sample.weight_version for sample in group.samples} == {1}


async def test_a_pause_lifts_no_fence(checkpoint: Path) -> None:
    options = ("weights.on_failure=fence", "limits.recovery_timeout_s=0.3")
    async with simulated(*options, checkpoint=checkpoint) as system:
        system.launcher.faults["decode-0"].fail_loads = 5
        with pytest.raises(WeightUpdateFailed):
            await system.updater.update(weights(3))
        assert system.dispatcher.barrier.is_fenced
        with pytest.raises(ConfigError, match="fence"):
            await system.updater.rest.pause("abort")
        await system.updater.rest.resume()
        assert system.dispatcher.barrier.is_fenced
        assert not system.dispatcher.barrier._turnstile.is_open


async def test_a_fenced_fleet_is_not_set_going_by_resuming(checkpoint: Path) -> None:
    options = (
        "weights.on_failure=fence",
        "weights.in_flight=keep",
        "limits.recovery_timeout_s=0.3",
    )
    async with simulated(*options, checkpoint=checkpoint, latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        await system.updater.rest.pause("keep")
        assert running(system) == {False}
        system.launcher.faults["decode-0"].fail_loads = 5
        with pytest.raises(WeightUpdateFailed):
            await system.updater.update(weights(3))
        await system.updater.rest.resume()
        assert True not in running(system), "they have half of the weights"
        system.launcher.faults["decode-0"].fail_loads = 0
        await system.updater.update(weights(4))
        assert running(system) == {True}
        assert (await asyncio.wait_for(begun, 5)).is_complete


async def test_an_engine_that_does_not_go_on_is_replaced() -> None:
    async with simulated("weights.timeout_s=0.3", latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        await system.updater.rest.pause("keep")
        system.launcher.faults["decode-0"].hang_at = "resume"
        await asyncio.wait_for(system.updater.rest.resume(), 2)
        system.launcher.faults["decode-0"].hang_at = ""
        assert (await asyncio.wait_for(begun, 5)).is_complete
        assert running(system) == {True}


async def test_a_pause_that_is_taken_back_leaves_no_engine_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with simulated(latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        engine = system.launcher.engines["decode-0"]
        load = engine.load

        async def slow_load() -> EngineLoad:
            await asyncio.sleep(0.05)
            return await load()

        monkeypatch.setattr(engine, "load", slow_load)
        pausing = asyncio.create_task(system.updater.rest.pause("keep"))
        await asyncio.sleep(0.02)
        await system.updater.rest.resume()
        with pytest.raises(ConfigError, match="resumed meanwhile"):
            await pausing
        assert running(system) == {True}
        assert (await asyncio.wait_for(begun, 5)).is_complete


async def test_weights_wait_for_no_sample_that_stands_still(checkpoint: Path) -> None:
    async with simulated(checkpoint=checkpoint, latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        await system.updater.rest.pause("keep")
        with pytest.raises(Conflict, match="half-way"):
            await system.updater.update(weights(3))
        await system.updater.rest.resume()
        assert (await asyncio.wait_for(begun, 5)).is_complete


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.08, 0.12])
async def test_resuming_at_any_moment_leaves_no_engine_still(
    monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    async with simulated(latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        for engine in system.launcher.engines.values():
            for name in ("load", "pause", "resume"):
                monkeypatch.setattr(engine, name, slowly(getattr(engine, name)))
        pausing = asyncio.create_task(system.updater.rest.pause("keep"))
        await asyncio.sleep(delay_s)
        await system.updater.rest.resume()
        await asyncio.gather(pausing, return_exceptions=True)
        assert running(system) == {True}
        assert system.updater.rest._frozen == {}
        assert (await asyncio.wait_for(begun, 5)).is_complete


async def test_resuming_while_an_update_ends_leaves_no_engine_still(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(8):
        async with simulated(
            "weights.in_flight=keep", checkpoint=checkpoint, latency=SLOW
        ) as system:
            begun = asked(system)
            await asyncio.sleep(0.05)
            await system.updater.rest.pause("keep")
            for engine in system.launcher.engines.values():
                monkeypatch.setattr(engine, "resume", slowly(engine.resume))
                name = "set_weight_version"
                monkeypatch.setattr(engine, name, slowly(engine.set_weight_version))
            updating = asyncio.create_task(system.updater.update(weights(3)))
            await asyncio.sleep(0.02 * step)
            await system.updater.rest.resume()
            await updating
            assert running(system) == {True}
            assert (await asyncio.wait_for(begun, 5)).is_complete


def slowly(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def slow(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(0.03)
        return await call(*args, **options)

    return slow


async def test_resuming_at_any_moment_of_an_update_leaves_the_fleet_open(checkpoint: Path) -> None:
    def slow_and_wrong() -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(0.3)
        yield "w0", torch.zeros(3)

    async with simulated(checkpoint=checkpoint) as system:
        await system.updater.rest.pause("wait")
        updating = asyncio.create_task(system.updater.update(slow_and_wrong()))
        await asyncio.sleep(0.1)
        await system.updater.rest.resume()
        with pytest.raises(ConfigError):
            await updating
        assert (await asyncio.wait_for(asked(system), 5)).is_complete

        await system.updater.rest.pause("wait")
        updating = asyncio.create_task(system.updater.update(weights(3)))
        while system.fleet.weight_version == 0:
            await asyncio.sleep(0)
        assert system.updater.rest.updating is not None
        await system.updater.rest.resume()
        await updating
        assert (await asyncio.wait_for(asked(system, 1), 5)).is_complete


@pytest.mark.parametrize("fault", [LegError("decode-0", "a call of Ray's failed"), 2.5])
async def test_an_engine_that_does_not_go_on_after_a_pause_is_waited_for_or_replaced(
    fault: LegError | float,
) -> None:
    overrides = ("disaggregation.decode_replicas=1", "limits.health_timeout_s=30.0")
    async with simulated(*overrides, latency=SLOW) as system:
        engine = system.launcher.engines["decode-0"]
        resume = engine.resume

        async def resume_badly() -> None:
            engine.resume = resume  # type: ignore[method-assign]
            if isinstance(fault, LegError):
                raise fault
            await asyncio.sleep(fault)
            await resume()

        engine.resume = resume_badly  # type: ignore[method-assign]
        begun = asked(system)
        await asyncio.sleep(0.1)
        await system.updater.rest.pause("abort")
        await asyncio.wait_for(begun, 5)
        await system.updater.rest.resume()
        assert (await asyncio.wait_for(asked(system, 1), 5)).is_complete


async def test_an_engine_that_dies_while_others_stand_still_is_not_given_up() -> None:
    overrides = ("limits.max_restarts=1", "limits.start_timeout_s=0.5")
    async with simulated(*overrides, latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.1)
        await system.updater.rest.pause("keep")
        engine = system.launcher.engines["decode-1"]
        engine.kill()
        system.fleet.report_death(engine, "killed by a test")
        await asyncio.sleep(2)  # as long as several proofs would have
        assert system.fleet.members["decode-1"].state is MemberState.RESTARTING
        await system.updater.rest.resume()
        assert (await asyncio.wait_for(begun, 5)).is_complete
        assert await system.fleet.wait_ready(timeout_s=5)
        async with asyncio.timeout(5):
            while len(system.fleet.ready()) < 3:
                await asyncio.sleep(0.02)


async def test_engines_that_all_die_while_they_stand_still_come_back() -> None:
    async with simulated("limits.max_restarts=9", latency=SLOW) as system:
        await system.updater.rest.pause("keep")
        for engine in list(system.launcher.engines.values()):
            engine.kill()
            system.fleet.report_death(engine, "killed by a test")
        async with asyncio.timeout(10):
            while len(system.fleet.ready()) < 3:
                await asyncio.sleep(0.02)
        await system.updater.rest.resume()
        assert (await asyncio.wait_for(asked(system), 5)).is_complete


async def test_what_is_about_to_stand_still_takes_no_update_that_would_drain_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with simulated(checkpoint=checkpoint, latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        monkeypatch.setattr(system.handoff, "settled", slowly(system.handoff.settled))
        pausing = asyncio.create_task(system.updater.rest.pause("keep"))
        await asyncio.sleep(0.01)
        with pytest.raises(Conflict, match="resume first"):
            await system.updater.update(weights(2))
        await pausing
        await system.updater.rest.resume()
        assert (await asyncio.wait_for(begun, 5)).is_complete


@pytest.mark.parametrize("second", ["abort", "wait"])
async def test_a_second_pause_of_another_kind_takes_over(second: PauseMode) -> None:
    async with simulated(latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        await system.updater.rest.pause("keep")
        await asyncio.wait_for(system.updater.rest.pause(second), 5)
        samples = (await asyncio.wait_for(begun, 1)).samples
        assert ({s.finish_reason for s in samples} == {"abort"}) is (second == "abort")
        assert not system.updater.rest.keeps_still
        await system.updater.rest.resume()
        assert (await asyncio.wait_for(asked(system, 1), 5)).is_complete


async def test_a_hold_that_is_cancelled_twice_lets_the_fleet_go_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with simulated("weights.in_flight=keep", checkpoint=checkpoint, latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        for engine in system.launcher.engines.values():
            monkeypatch.setattr(engine, "resume", slowly(engine.resume))
            monkeypatch.setattr(engine, "pause", slowly(engine.pause))
        holding = asyncio.create_task(system.updater.hold())
        await asyncio.sleep(0.02)
        holding.cancel()
        await asyncio.sleep(0.01)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        assert (await asyncio.wait_for(begun, 5)).is_complete
        assert (await system.updater.update(weights(2))).version == 1


async def test_a_pause_right_after_a_resume_keeps_all_engines_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with simulated(latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.05)
        rest = system.updater.rest
        for engine in system.launcher.engines.values():
            monkeypatch.setattr(engine, "resume", slowly(engine.resume))
            monkeypatch.setattr(engine, "pause", slowly(engine.pause))
        for delay_s in (0.0, 0.01, 0.04, 0.08):
            await rest.pause("keep")
            resuming = [asyncio.create_task(rest.resume()) for _ in range(2)]
            await asyncio.sleep(delay_s)
            await rest.pause("keep")
            await asyncio.gather(*resuming)
            assert running(system) == {False}, f"after {delay_s} s"
            assert rest.keeps_still
            await rest.resume()
            assert running(system) == {True}
        assert (await asyncio.wait_for(begun, 5)).is_complete


async def test_what_an_engine_ends_by_itself_after_a_pause_that_aborted_is_tried_again() -> None:
    async with simulated("disaggregation.decode_replicas=1", latency=SLOW) as system:
        begun = asked(system)
        await asyncio.sleep(0.1)
        await system.updater.rest.pause("abort")
        assert {s.finish_reason for s in (await begun).samples} == {"abort"}
        await system.updater.rest.resume()
        later = asked(system, 1)
        await asyncio.sleep(0.1)
        engine = system.launcher.engines["decode-0"]
        await engine.abort(list(engine._running))
        group = await asyncio.wait_for(later, 5)
        assert {(s.finish_reason, len(s.token_ids)) for s in group.samples} == {("length", 100)}
