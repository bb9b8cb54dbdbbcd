"""Weight updates of a simulated fleet that is busy: all engines or none, and no version mixed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from conftest import SimulatedSystem, simulated
from splitroll.dispatch.assembly import GroupWork
from splitroll.engines.simulated import LatencyModel
from splitroll.errors import ConfigError, FleetFenced, GroupFailed, WeightUpdateFailed
from splitroll.types import Group, Prompt, Role, Sample, SamplingParams
from splitroll.weights.source import Source

SLOW = LatencyModel(step_s=0.002, prefill_token_s=2e-5)
LONG = LatencyModel(step_s=0.02)
"""Of 60 tokens more than a second, in which the threads that read weights are not kept waiting."""
MODES = ("drain", "abort", "keep")
POINTS = ("pause", "load", "reset", "publish", "resume")
Weights = dict[str, torch.Tensor]


class LostShard(torch.Tensor):
    """A sharded parameter that cannot be gathered."""

    def full_tensor(self) -> torch.Tensor:
        raise RuntimeError("the trainer lost a rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file(weights(0), folder / "model.safetensors")
    return folder


def weights(value: float) -> Weights:
    return {f"w{i}": torch.full((40, 30), float(value + i)) for i in range(6)}


@contextlib.asynccontextmanager
async def updating(
    checkpoint: Path, *overrides: str, latency: LatencyModel = SLOW
) -> AsyncIterator[SimulatedSystem]:
    options = ("weights.timeout_s=2.0", "weights.bucket_bytes=10000", "limits.max_restarts=20")
    async with simulated(
        *options, *overrides, latency=latency, checkpoint=checkpoint, num_blocks=400
    ) as system:
        yield system


def work(i: int = 0, n: int = 4, max_tokens: int = 30, tokens: int = 70) -> GroupWork:
    prompt = Prompt(f"g{i}", tuple(range(100 + i, 100 + i + tokens)))
    return GroupWork(prompt, n, SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=i)


def start(system: SimulatedSystem, count: int, **shape: int) -> list[asyncio.Task[Group]]:
    return [asyncio.create_task(system.dispatcher.run(work(i, **shape))) for i in range(count)]


async def collect(jobs: list[asyncio.Task[Group]]) -> list[Group]:
    return list(await asyncio.wait_for(asyncio.gather(*jobs), 30))


async def oracle(checkpoint: Path, value: float | None, count: int, **shape: int) -> list[Group]:
    """What a fleet answers that has never had other weights."""
    async with updating(checkpoint, latency=LatencyModel()) as system:
        if value is not None:
            await system.updater.update(weights(value))
        return await collect(start(system, count, **shape))


def tokens(groups: list[Group]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in group.samples] for group in groups]


def samples(groups: list[Group]) -> Iterator[Sample]:
    return (sample for group in groups for sample in group.samples)


def assert_versions(sample: Sample, allowed: set[int]) -> None:
    """Every token has a version, and none was decoded on the KV of another without a word."""
    spans = sample.weight_versions
    covered = [i for span in spans for i in range(span.start, span.end)]
    assert covered == list(range(len(sample.token_ids)))
    versions = [span.version for span in spans]
    assert versions == sorted(set(versions))
    assert {*versions, sample.prefill_version} <= allowed
    if spans:
        assert spans[0].version == sample.prefill_version
        assert spans[-1].version == sample.weight_version


async def test_new_weights_give_what_a_fresh_fleet_with_them_gives(checkpoint: Path) -> None:
    async with updating(checkpoint) as system:
        before = await collect(start(system, 4))
        report = await system.updater.update(weights(7))
        after = await collect(start(system, 4))
        assert report.version == system.fleet.weight_version == 1
        assert report.engines == ("decode-0", "decode-1", "prefill-0")
        assert report.nbytes == 6 * 40 * 30 * 4
        assert set(report.seconds) == {
            "gate", "settle", "pause", "load", "verify", "clear", "publish", "resume"
        }  # fmt: skip
    assert tokens(before) == tokens(await oracle(checkpoint, None, 4))
    assert tokens(after) == tokens(await oracle(checkpoint, 7, 4))
    assert tokens(after) != tokens(before)
    for sample in samples(after):
        assert_versions(sample, {1})


async def test_no_cache_outlives_fifty_updates(checkpoint: Path) -> None:
    """The same prompts, so that every stale block would be hit; a stale one gives other tokens."""
    async with updating(checkpoint, latency=LatencyModel()) as system:
        for update in range(1, 51):
            await collect(start(system, 2, max_tokens=4))
            await system.updater.update(weights(update))
        after = await collect(start(system, 2, max_tokens=4))
    assert tokens(after) == tokens(await oracle(checkpoint, 50, 2, max_tokens=4))


@pytest.mark.parametrize("mode", MODES)
async def test_updates_of_a_busy_fleet_lose_and_mix_nothing(checkpoint: Path, mode: str) -> None:
    async with updating(checkpoint, f"weights.in_flight={mode}", latency=LONG) as system:
        jobs = start(system, 16, max_tokens=60)
        await decoding(system)
        for value in range(1, 6):
            await system.updater.update(weights(value))
            await asyncio.sleep(0.02)
        groups = await collect(jobs)
        for group in groups:
            assert [sample.sample for sample in group.samples] == [0, 1, 2, 3]
            for sample in group.samples:
                assert_versions(sample, set(range(6)))
                ended = sample.finish_reason
                assert ended == "length" or (ended == "abort" and mode == "abort")
                assert len(sample.logprobs) == len(sample.token_ids)
                if mode == "drain":
                    assert len(sample.weight_versions) == 1
        # Whether the updates came while it was busy.
        assert any(len(s.weight_versions) > 1 for s in samples(groups)) is (mode == "keep")
        aborted = any(sample.finish_reason == "abort" for sample in samples(groups))
        assert aborted is (mode == "abort")
        await idle(system)
        again = await collect(start(system, 3))
    assert tokens(again) == tokens(await oracle(checkpoint, 5, 3))


async def decoding(system: SimulatedSystem) -> None:
    """Return when a decode engine has something to decode."""
    while not any([(await e.load()).running for e in system.fleet.ready(Role.DECODE)]):
        await asyncio.sleep(0.001)


async def idle(system: SimulatedSystem) -> None:
    await system.handoff.settled()
    assert system.dispatcher.load == {}
    for _ in range(40):
        await asyncio.sleep(0.05)
        if set((held := await system.held_blocks()).values()) <= {0}:
            return
    raise AssertionError(f"held blocks: {held}")


async def test_drain_ends_what_was_begun_and_holds_back_what_was_not(checkpoint: Path) -> None:
    async with updating(checkpoint) as system:
        begun = start(system, 2)
        await asyncio.sleep(0.03)
        update = asyncio.create_task(system.updater.update(weights(3)))
        while system.dispatcher.barrier._turnstile.is_open:
            await asyncio.sleep(0.001)
        waiting = start(system, 2)
        await update
        assert all(job.done() for job in begun)
        assert {s.weight_version for s in samples(await collect(begun))} == {0}
        assert {s.weight_version for s in samples(await collect(waiting))} == {1}


async def test_keep_goes_on_with_kv_computed_again(checkpoint: Path) -> None:
    """The second part of a kept sample is what the new weights say after the first part; KV of
    the old ones would give other tokens."""
    async with updating(checkpoint, "weights.in_flight=keep", latency=LONG) as system:
        (job,) = start(system, 1, n=2, max_tokens=60)
        await decoding(system)
        await asyncio.sleep(0.02)
        await system.updater.update(weights(3))
        (kept,) = await collect([job])
        assert [span.version for span in kept.samples[0].weight_versions] == [0, 1]
    async with updating(checkpoint) as system:
        await system.updater.update(weights(3))
        for sample in kept.samples:
            old = sample.weight_versions[0].end
            begun = Sample(**{**fields(sample), **cut(sample, old)})
            rest = GroupWork(kept.prompt, 1, work(max_tokens=60).sampling, 0, {0: begun})
            continued = (await system.dispatcher.run(rest)).samples[0]
            # Not seeded alike: what matters is that both used KV of the new weights only.
            assert continued.token_ids[:old] == sample.token_ids[:old]
            assert len(continued.token_ids) == len(sample.token_ids) == 60


def fields(sample: Sample) -> dict[str, object]:
    return {name: getattr(sample, name) for name in sample.__slots__}


def cut(sample: Sample, at: int) -> dict[str, object]:
    return {
        "sample": 0,
        "token_ids": sample.token_ids[:at],
        "logprobs": sample.logprobs[:at],
        "weight_versions": sample.weight_versions[:1],
        "finish_reason": "abort",
    }


async def test_abort_returns_what_there_is_and_a_group_can_be_continued(checkpoint: Path) -> None:
    async with updating(checkpoint, "weights.in_flight=abort", latency=LONG) as system:
        (job,) = start(system, 1, max_tokens=60)
        await decoding(system)
        await asyncio.sleep(0.02)
        await system.updater.update(weights(3))
        (partial,) = await collect([job])
        assert not partial.is_complete
        lengths = [len(sample.token_ids) for sample in partial.samples]
        assert all(0 < length < 60 for length in lengths)
        begun = {sample.sample: sample for sample in partial.samples}
        whole = await system.dispatcher.run(
            GroupWork(partial.prompt, 4, work(max_tokens=60).sampling, 0, begun)
        )
        assert whole.is_complete
        for sample, part in zip(whole.samples, partial.samples, strict=True):
            at = len(part.token_ids)
            assert sample.token_ids[:at] == part.token_ids
            assert sample.logprobs[:at] == part.logprobs
            assert len(sample.token_ids) == len(sample.logprobs) == 60
            assert [(s.version, s.start, s.end) for s in sample.weight_versions] == [
                (0, 0, at),
                (1, at, 60),
            ]
            assert sample.seed == part.seed
        await idle(system)


@pytest.mark.parametrize("mode", MODES)
async def test_a_handle_in_flight_never_crosses_an_update(checkpoint: Path, mode: str) -> None:
    """Prefills that take long and pulls that take long: updates find handles everywhere."""
    latency = LatencyModel(prefill_token_s=4e-4, pull_s=0.02, step_s=0.001)
    async with updating(checkpoint, f"weights.in_flight={mode}", latency=latency) as system:
        jobs = start(system, 12, max_tokens=6)
        for value in range(1, 5):
            await asyncio.sleep(0.03)
            await system.updater.update(weights(value))
        for sample in samples(await collect(jobs)):
            assert_versions(sample, set(range(5)))
        counters = await system.fleet.counters()
        assert sum(done.kv_expired for done in counters.values()) == 0
        await idle(system)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_an_engine_that_dies_in_an_update_comes_back_with_the_current_weights(
    checkpoint: Path, point: str, victim: str
) -> None:
    async with updating(checkpoint) as system:
        jobs = start(system, 6)
        await asyncio.sleep(0.02)
        system.launcher.faults[victim].die_at = point
        report = await system.updater.update(weights(9))
        assert victim not in report.engines
        await collect(jobs)
        assert await all_ready(system)
        groups = await collect(start(system, 4))
        assert {sample.weight_version for sample in samples(groups)} == {1}
    assert tokens(groups) == tokens(await oracle(checkpoint, 9, 4))


async def all_ready(system: SimulatedSystem) -> bool:
    for _ in range(100):
        if len(system.fleet.ready()) == len(system.fleet.members):
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.parametrize("point", POINTS)
async def test_an_engine_that_hangs_in_an_update_is_replaced(checkpoint: Path, point: str) -> None:
    async with updating(checkpoint, "weights.timeout_s=0.3") as system:
        system.launcher.faults["decode-1"].hang_at = point
        report = await asyncio.wait_for(system.updater.update(weights(9)), 5)
        assert report.engines == ("decode-0", "prefill-0")
        system.launcher.faults["decode-1"].hang_at = ""
        assert await all_ready(system)
        groups = await collect(start(system, 4))
    assert tokens(groups) == tokens(await oracle(checkpoint, 9, 4))


async def test_weights_that_kill_every_engine_are_not_served(checkpoint: Path) -> None:
    async with updating(checkpoint) as system:
        await system.updater.update(weights(8))
        for faults in system.launcher.faults.values():
            faults.die_at = "load"
        with pytest.raises(WeightUpdateFailed, match="no engine is left"):
            await system.updater.update(weights(9))
        assert await all_ready(system)
        groups = await collect(start(system, 4))
    assert tokens(groups) == tokens(await oracle(checkpoint, 8, 4))


@pytest.mark.parametrize("value", [None, 5])
@pytest.mark.parametrize("fault", ["load", "reset"])
async def test_a_failure_rolls_every_engine_back(
    checkpoint: Path, fault: str, value: float | None
) -> None:
    async with updating(checkpoint) as system:
        if value is not None:
            await system.updater.update(weights(value))
        serving = system.fleet.weight_version
        jobs = start(system, 6)
        await asyncio.sleep(0.02)
        faults = system.launcher.faults["decode-1"]
        faults.fail_loads, faults.refuse_resets = (1, 0) if fault == "load" else (0, 1)
        with pytest.raises(WeightUpdateFailed) as failed:
            await system.updater.update(weights(9))
        assert failed.value.serving == serving == system.fleet.weight_version
        assert "decode-1" in str(failed.value)
        named = "parameter w0" if fault == "load" else "refused to drop its KV caches"
        assert named in str(failed.value)
        assert {s.weight_version for s in samples(await collect(jobs))} == {serving}
        groups = await collect(start(system, 4))
    assert tokens(groups) == tokens(await oracle(checkpoint, value, 4))


async def test_an_engine_that_cannot_go_back_is_replaced(checkpoint: Path) -> None:
    async with updating(checkpoint) as system:
        system.launcher.faults["decode-1"].fail_loads = 2
        with pytest.raises(WeightUpdateFailed):
            await system.updater.update(weights(9))
        assert await all_ready(system)
        assert system.fleet.members["decode-1"].restarts == 1
        groups = await collect(start(system, 4))
    assert tokens(groups) == tokens(await oracle(checkpoint, None, 4))


async def test_a_fenced_fleet_says_so_and_serves_again_after_the_next_update(
    checkpoint: Path,
) -> None:
    fenced = ("weights.on_failure=fence", "limits.recovery_timeout_s=0.5")
    async with updating(checkpoint, *fenced) as system:
        system.launcher.faults["decode-1"].fail_loads = 1
        with pytest.raises(WeightUpdateFailed) as failed:
            await system.updater.update(weights(9))
        assert failed.value.serving is None
        with pytest.raises(FleetFenced, match="decode-1, load: parameter w0"):
            await asyncio.wait_for(system.dispatcher.run(work()), 3)
        waiting = start(system, 2)
        await asyncio.sleep(0.05)
        await system.updater.update(weights(8))
        groups = await collect(waiting)
    assert tokens(groups) == tokens(await oracle(checkpoint, 8, 2))


async def test_a_fenced_fleet_stays_so_when_the_next_update_fails_before_it_loads(
    checkpoint: Path,
) -> None:
    """Its engines hold no version that could be served."""
    fenced = ("weights.on_failure=fence", "limits.recovery_timeout_s=0.3")
    async with updating(checkpoint, *fenced) as system:
        system.launcher.faults["decode-1"].fail_loads = 1
        with pytest.raises(WeightUpdateFailed):
            await system.updater.update(weights(9))
        broken = {**weights(8), "w0": torch.zeros(40, 30).as_subclass(LostShard)}
        with pytest.raises(WeightUpdateFailed) as failed:
            await system.updater.update(broken)
        assert failed.value.serving is None
        with pytest.raises(FleetFenced):
            await asyncio.wait_for(system.dispatcher.run(work()), 3)
        await system.updater.update(weights(8))
        groups = await collect(start(system, 2))
    assert tokens(groups) == tokens(await oracle(checkpoint, 8, 2))


async def test_all_differences_are_told_and_nothing_moves(checkpoint: Path) -> None:
    wrong = weights(1)
    wrong["w1"] = wrong["w1"][:3]
    wrong["w2"] = wrong["w2"].to(torch.int64)
    wrong["stranger"] = torch.zeros(3)
    del wrong["w0"]
    async with updating(checkpoint) as system:
        with pytest.raises(ConfigError) as refused:
            await system.updater.update(wrong)
        told = str(refused.value)
        for name in ("weights.w0", "weights.w1", "weights.w2", "weights.stranger"):
            assert name in told
        assert system.fleet.weight_version == 0
        await collect(start(system, 1))


async def test_some_parameters_can_be_sent_and_the_others_stay(checkpoint: Path) -> None:
    async with updating(checkpoint) as system:
        await system.updater.update({"w1": weights(5)["w1"]}, partial=True)
        first = await collect(start(system, 2))
        await system.updater.update({"w2": weights(6)["w2"]}, partial=True)
        second = await collect(start(system, 2))
    expected = {**weights(0), "w1": weights(5)["w1"]}
    async with updating(checkpoint) as system:
        await system.updater.update(expected)
        assert tokens(first) == tokens(await collect(start(system, 2)))
        await system.updater.update({**expected, "w2": weights(6)["w2"]})
        assert tokens(second) == tokens(await collect(start(system, 2)))


@pytest.mark.parametrize("version", [0, -1, 1.5, True, "2"])
async def test_a_version_counts_upwards(checkpoint: Path, version: object) -> None:
    async with updating(checkpoint) as system:
        with pytest.raises(ConfigError, match="above 0"):
            await system.updater.update(weights(1), version)  # type: ignore[arg-type]
        await system.updater.update(weights(1), 40)
        assert (await system.updater.update(weights(1))).version == 41


async def test_one_update_at_a_time(checkpoint: Path) -> None:
    async with updating(checkpoint) as system:
        jobs = start(system, 4)
        await asyncio.sleep(0.02)
        first = asyncio.create_task(system.updater.update(weights(1)))
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="version 1 is being pushed"):
            await system.updater.update(weights(2))
        await first
        await collect(jobs)
        assert system.fleet.weight_version == 1


async def test_an_update_meets_an_engine_that_is_restarting(checkpoint: Path) -> None:
    async with updating(checkpoint, latency=LatencyModel(start_s=0.2)) as system:
        engine = system.launcher.engines["decode-0"]
        engine.kill()
        system.fleet.report_death(engine, "killed by a test")
        await system.updater.update(weights(4))
        assert await all_ready(system)
        groups = await collect(start(system, 8))
        assert {s.route.decode for s in samples(groups)} == {"decode-0", "decode-1"}
    assert tokens(groups) == tokens(await oracle(checkpoint, 4, 8))


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
async def test_a_cancelled_update_leaves_the_fleet_consistent(
    checkpoint: Path, after_s: float
) -> None:
    async with updating(checkpoint, "weights.in_flight=keep") as system:
        jobs = start(system, 4)
        await asyncio.sleep(0.02)
        update = asyncio.create_task(system.updater.update(weights(4)))
        await asyncio.sleep(after_s)
        update.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await update
        await collect(jobs)
        serving = system.fleet.weight_version
        groups = await collect(start(system, 4))
        assert {s.weight_version for s in samples(groups)} == {serving}
    assert tokens(groups) == tokens(await oracle(checkpoint, 4 if serving else None, 4))


async def test_a_trainer_whose_tensors_fail_half_way_changes_nothing(checkpoint: Path) -> None:
    broken = weights(4)
    broken["w4"] = broken["w4"].as_subclass(LostShard)
    async with updating(checkpoint) as system:
        with pytest.raises(WeightUpdateFailed, match="the trainer lost a rank"):
            await system.updater.update(broken)
        groups = await collect(start(system, 4))
    assert tokens(groups) == tokens(await oracle(checkpoint, None, 4))


@pytest.mark.parametrize("verify", ["sample", "full"])
async def test_checksums_are_compared(
    checkpoint: Path, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with updating(checkpoint, f"weights.verify={verify}") as system:
        report = await system.updater.update(weights(4))
        assert report.verified == 6
        read = system.launcher.engines["decode-0"]._read

        def corrupted(offer: object) -> tuple[dict[str, str], str]:
            checksums, digest = read(offer)  # type: ignore[arg-type]
            return {**checksums, "w3": "0" * 64} if checksums else {}, digest

        monkeypatch.setattr(system.launcher.engines["decode-0"], "_read", corrupted)
        with pytest.raises(WeightUpdateFailed, match="decode-0, verify: parameter w3"):
            await system.updater.update(weights(5))
        assert system.fleet.weight_version == 1


async def test_disk_serves_as_well(checkpoint: Path, tmp_path: Path) -> None:
    disk = ("weights.transport=disk", f"weights.path={tmp_path}", "weights.verify=full")
    async with updating(checkpoint, *disk) as system:
        for value in (3, 4):
            await system.updater.update(weights(value))
        assert [path.name for path in (tmp_path / "splitroll-simulated").iterdir()] == ["version-2"]
        system.launcher.faults["prefill-0"].die_at = "load"
        await system.updater.update(weights(5))
        assert await all_ready(system)
        groups = await collect(start(system, 4))
    assert tokens(groups) == tokens(await oracle(checkpoint, 5, 4))
    assert not os.listdir(tmp_path)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    mode=st.sampled_from(MODES),
    on_failure=st.sampled_from(["rollback", "fence"]),
    events=st.lists(
        st.tuples(
            st.sampled_from(["die", "fail", "refuse", "kill", "nothing"]),
            st.sampled_from(["prefill-0", "decode-0", "decode-1"]),
            st.sampled_from(POINTS),
            st.floats(0, 0.03),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_whatever_happens_no_sample_mixes_versions_and_the_fleet_ends_consistent(
    checkpoint: Path, mode: str, on_failure: str, events: list[tuple[str, str, str, float]]
) -> None:
    async def scenario() -> None:
        options = (f"weights.in_flight={mode}", f"weights.on_failure={on_failure}")
        async with updating(checkpoint, *options) as system:
            jobs = start(system, 10, max_tokens=12)
            for value, (event, name, point, pause_s) in enumerate(events, start=1):
                await asyncio.sleep(pause_s)
                faults = system.launcher.faults[name]
                match event:
                    case "die":
                        faults.die_at = point
                    case "fail":
                        faults.fail_loads = 1
                    case "refuse":
                        faults.refuse_resets = 1
                    case "kill":
                        system.launcher.engines[name].kill()
                with contextlib.suppress(WeightUpdateFailed):
                    await asyncio.wait_for(system.updater.update(weights(value)), 20)
            for faults in system.launcher.faults.values():
                faults.die_at, faults.fail_loads, faults.refuse_resets = "", 0, 0
            last = len(events) + 1
            await asyncio.wait_for(system.updater.update(weights(last)), 20)
            results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)
            versions = set(range(system.fleet.weight_version + 1))
            for result in results:
                fenced = isinstance(result, FleetFenced) and on_failure == "fence"
                assert fenced or isinstance(result, Group | GroupFailed), result
                for sample in result.samples if isinstance(result, Group) else ():
                    assert_versions(sample, versions)
            assert await all_ready(system)
            groups = await collect(start(system, 3, max_tokens=6))
            await idle(system)
        assert tokens(groups) == tokens(await oracle(checkpoint, last, 3, max_tokens=6))

    asyncio.run(scenario())


async def test_a_role_that_died_out_meanwhile_is_no_obstacle(checkpoint: Path) -> None:
    async with updating(checkpoint) as system:
        for name in ("decode-0", "decode-1"):
            system.launcher.faults[name].fail_start = 1
            engine = system.launcher.engines[name]
            engine.kill()
            system.fleet.report_death(engine, "killed by a test")
        await system.updater.update(weights(4))
        assert await system.fleet.wait_ready(Role.DECODE, timeout_s=10)
        groups = await collect(start(system, 4))
    assert tokens(groups) == tokens(await oracle(checkpoint, 4, 4))


async def test_a_group_whose_leader_has_no_token_yet_ends_early_too(checkpoint: Path) -> None:
    """Colocated engines compute prompts themselves: nobody may wait for such a leader."""
    latency = LatencyModel(prefill_token_s=2e-3, step_s=0.002)
    options = ("weights.in_flight=abort", "disaggregation.enabled=false", "colocated.replicas=2")
    async with updating(checkpoint, *options, latency=latency) as system:
        jobs = start(system, 4)
        await asyncio.sleep(0.05)  # all prompts take 0.14 s
        await asyncio.wait_for(system.updater.update(weights(3)), 5)
        groups = await asyncio.wait_for(asyncio.gather(*jobs), 5)
        assert all(not group.is_complete for group in groups)
        assert {len(sample.token_ids) for sample in samples(groups)} == {0}
        for group in groups:
            begun = {sample.sample: sample for sample in group.samples}
            again = GroupWork(group.prompt, 4, work().sampling, 0, begun)
            whole = await asyncio.wait_for(system.dispatcher.run(again), 5)
            assert whole.is_complete
            for sample in whole.samples:
                assert_versions(sample, {1})
        await idle(system)


async def test_an_update_that_is_cancelled_again_and_again_still_ends_consistent(
    checkpoint: Path,
) -> None:
    async with updating(checkpoint, latency=LatencyModel()) as system:
        for faults in system.launcher.faults.values():
            faults.hang_at = "load"
        update = asyncio.create_task(system.updater.update(weights(4)))
        await asyncio.sleep(0.1)
        for _ in range(5):
            update.cancel()
            await asyncio.sleep(0.02)
        for faults in system.launcher.faults.values():
            faults.hang_at = ""
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(update, 10)
        assert await all_ready(system)
        assert system.fleet.weight_version == 0
        groups = await collect(start(system, 3))
        await system.updater.update(weights(5))
    assert tokens(groups) == tokens(await oracle(checkpoint, None, 3))


async def test_a_trainer_that_fails_while_the_fleet_drains_does_not_wait_for_it(
    checkpoint: Path,
) -> None:
    broken = {**weights(4), "w0": torch.zeros(40, 30).as_subclass(LostShard)}
    async with updating(checkpoint, latency=LONG) as system:
        jobs = start(system, 2, max_tokens=100)
        await decoding(system)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(WeightUpdateFailed, match="the trainer lost a rank"):
            await system.updater.update(broken)
        assert asyncio.get_running_loop().time() - begun < 1
        assert {s.weight_version for s in samples(await collect(jobs))} == {0}


async def test_an_adapter_is_taken_out_again_when_the_update_is_cancelled_while_it_is_merged(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def slow(given: Weights, wanted: object) -> Iterator[Source]:
        events.append("merging")
        time.sleep(0.2)
        events.append("merged")
        yield Source(given)
        events.append("unmerged")

    monkeypatch.setattr("splitroll.weights.source.reading", slow)
    async with updating(checkpoint) as system:
        update = asyncio.create_task(system.updater.update(weights(4)))
        while not events:
            await asyncio.sleep(0.01)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert events == ["merging", "merged", "unmerged"]
        assert system.fleet.weight_version == 0


async def test_closing_ends_an_update_that_is_under_way(checkpoint: Path) -> None:
    async with updating(checkpoint, latency=LONG) as system:
        jobs = start(system, 2, max_tokens=100)
        await decoding(system)
        update = asyncio.create_task(system.updater.update(weights(4)))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(system.updater.close(), 5)
        with pytest.raises(WeightUpdateFailed, match="gave the update up"):
            await update
        await collect(jobs)
