"""Fleets of other shapes than one prefill and two decode engines, over NIXL and over Mooncake."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from splitroll import ConfigError, Group, Prompt, Rollout, Sample, SamplingParams
from splitroll.config import load_checked
from splitroll.errors import ProofError
from splitroll.types import RouteKind

pytestmark = pytest.mark.engines

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
STATIC = ("dispatch.policy=static", "dispatch.roles=strict")
IN_TURN = ("dispatch.policy=round_robin", "dispatch.roles=strict")
MOONCAKE = "disaggregation.transfer_backend=mooncake"
TIME_WAIT = "06"
"""The state's number in /proc/net/tcp."""


Answers = dict[str, tuple[Sample, ...]]


def prompts(count: int = 12, seed: int = 3) -> list[Prompt]:
    draw = random.Random(seed)
    return [
        Prompt(str(i), tuple(draw.choices(range(10, 4000), k=draw.choice((5, 32, 33, 200, 700)))))
        for i in range(count)
    ]


async def generated(rollout: Rollout, asked: list[Prompt]) -> Answers:
    found = {}
    async for group in rollout.generate(asked, n=2, sampling=GREEDY):
        assert isinstance(group, Group)
        assert group.recomputed_tokens == 0
        found[group.id] = group.samples
    return found


def assert_same(ours: Answers, expected: Answers) -> None:
    assert ours.keys() == expected.keys()
    for prompt_id, samples in ours.items():
        for mine, theirs in zip(samples, expected[prompt_id], strict=True):
            assert mine.token_ids == theirs.token_ids, prompt_id
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


async def assert_idle(rollout: Rollout) -> None:
    assert rollout.dispatcher.load == {}
    for engine in rollout.fleet.ready():
        async with asyncio.timeout(5):
            while (load := await engine.load()).held_blocks or load.pinned:
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def trained(tiny_model: Path) -> torch.nn.Module:
    """The tiny model after a step of training."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=draw) * 0.02
    return model


@pytest_asyncio.fixture(scope="module")
async def both_expected(
    tiny_config: dict[str, Any], trained: torch.nn.Module
) -> tuple[Answers, Answers]:
    """What one engine gives that hands nothing off, before and after a weight update."""
    overrides = ["disaggregation.enabled=false", "colocated.replicas=1"]
    async with Rollout.open(tiny_config, overrides=overrides) as rollout:
        before = await generated(rollout, prompts())
        await rollout.update_weights(trained)
        return before, await generated(rollout, prompts())


@pytest.fixture
def expected(both_expected: tuple[Answers, Answers]) -> Answers:
    return both_expected[0]


def shape(prefill: int, decode: int, mixed: int) -> list[str]:
    groups = f"disaggregation.mixed={json.dumps([{'replicas': mixed}] if mixed else [])}"
    counts = [
        f"disaggregation.prefill_replicas={prefill}",
        f"disaggregation.decode_replicas={decode}",
    ]
    return [*counts, groups]


async def assert_a_dead_prefill_engine_costs_no_long_wait(
    rollout: Rollout, expected: Answers
) -> None:
    engines = len(rollout.fleet.ready())
    running = asyncio.create_task(generated(rollout, prompts()))
    while not rollout.dispatcher.load:
        await asyncio.sleep(0.01)
    victim = rollout.fleet.members["prefill-0"].engine
    assert victim is not None
    os.kill(victim.info.pids[1], signal.SIGKILL)
    # The connector's own limits are minutes: its lease, and the handoff's.
    assert_same(await asyncio.wait_for(running, 40), expected)
    async with asyncio.timeout(200):
        while len(rollout.fleet.ready()) < engines:
            await asyncio.sleep(0.5)
    assert_same(await asyncio.wait_for(generated(rollout, prompts()), 60), expected)
    await assert_idle(rollout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "counts"),
    [
        pytest.param("nixl", (1, 2, 1), marks=pytest.mark.soak),
        ("mooncake", (2, 1, 1)),
    ],
)
async def test_every_shape_gives_what_a_colocated_engine_gives(
    tiny_config: dict[str, Any],
    expected: Answers,
    backend: str,
    counts: tuple[int, int, int],
) -> None:
    """Also when one of two prefill engines dies in mid-run."""
    overrides = [*IN_TURN, *shape(*counts), f"disaggregation.transfer_backend={backend}"]
    async with Rollout.open(tiny_config, overrides=overrides) as rollout:
        found = await generated(rollout, prompts())
        assert_same(found, expected)
        kinds = {sample.route.kind for samples in found.values() for sample in samples}
        assert RouteKind.SPLIT in kinds
        done = await rollout.activity()
        assert done.kv_bytes > 0
        decoding = {engine.name for engine in done.engines if engine.decodes}
        assert len(decoding) == counts[1] + counts[2], "all took part"
        await assert_idle(rollout)
        if counts[0] > 1:
            await assert_a_dead_prefill_engine_costs_no_long_wait(rollout, expected)


def assert_all_end_with_the_actor(pid: int) -> None:
    """Its ranks, their workers and what keeps the ranks in step."""
    processes = psutil.Process(pid).children(recursive=True)
    assert len(processes) >= 3
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("backend", "prefill", "decode"),
    [
        pytest.param("nixl", {}, {"tensor_parallel_size": 2}, marks=pytest.mark.soak),
        ("nixl", {"tensor_parallel_size": 2}, {"data_parallel_size": 2}),
        ("mooncake", {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
        pytest.param(
            "mooncake",
            {"data_parallel_size": 2},
            {"pipeline_parallel_size": 2},
            marks=pytest.mark.soak,
        ),
    ],
)
async def test_each_role_has_a_parallelism_of_its_own(
    tiny_config: dict[str, Any],
    both_expected: tuple[Answers, Answers],
    trained: torch.nn.Module,
    backend: str,
    prefill: dict[str, int],
    decode: dict[str, int],
) -> None:
    overrides = [
        *STATIC,
        f"disaggregation.transfer_backend={backend}",
        f"disaggregation.prefill={json.dumps([prefill])}",
        f"disaggregation.decode={json.dumps([decode])}",
    ]
    async with Rollout.open(tiny_config, overrides=overrides) as rollout:
        for proof in rollout.fleet.proofs:
            assert proof.kv_bytes >= proof.kv_bytes_needed > 0
        assert_same(await generated(rollout, prompts()), both_expected[0])
        await rollout.update_weights(trained)
        assert_same(await generated(rollout, prompts()), both_expected[1])
        await assert_idle(rollout)
        for engine in rollout.fleet.ready():
            if engine.info.data_ranks > 1:
                await asyncio.to_thread(assert_all_end_with_the_actor, engine.info.pids[0])


def test_pipeline_stages_are_refused_where_the_backend_cannot_move_their_kv(
    tiny_config: dict[str, Any],
) -> None:
    overrides = ["disaggregation.decode.pipeline_parallel_size=2"]
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: found .*mooncake"):
        load_checked(tiny_config, overrides)
    load_checked(tiny_config, [*overrides, MOONCAKE])


@pytest.mark.timeout(400)
async def test_a_chain_with_nixl_hands_off_and_a_connector_without_handles_is_refused(
    tiny_config: dict[str, Any], expected: Answers, tmp_path: Path
) -> None:
    storage = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    chain = {"connectors": [{"kv_connector": "NixlConnector"}, storage]}
    overrides = [
        *STATIC,
        "disaggregation.transfer_backend=connector",
        "disaggregation.decode_replicas=1",
    ]
    named = [
        "disaggregation.connector.name=MultiConnector",
        f"disaggregation.connector.arguments={json.dumps(chain)}",
    ]
    async with Rollout.open(tiny_config, overrides=[*overrides, *named]) as rollout:
        assert_same(await generated(rollout, prompts()), expected)
        assert (await rollout.activity()).kv_bytes > 0
        await assert_idle(rollout)
    alone = [
        "disaggregation.connector.name=ExampleConnector",
        f"disaggregation.connector.arguments={json.dumps(storage['kv_connector_extra_config'])}",
    ]
    with pytest.raises(ProofError, match="no KV handle"):
        async with Rollout.open(tiny_config, overrides=[*overrides, *alone]):
            pytest.fail("the fleet must not open")


def sockets_in_time_wait() -> int:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[3] == TIME_WAIT for line in lines)


@pytest.mark.timeout(600)
@pytest.mark.soak
async def test_thousands_of_handoffs_over_mooncake_leave_no_sockets_behind(
    tiny_config: dict[str, Any],
) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    overrides = [*STATIC, MOONCAKE, "disaggregation.decode_replicas=1"]
    waiting = []
    async with Rollout.open(tiny_config, overrides=overrides) as rollout:
        for start in range(0, 3000, 500):
            asked = [
                Prompt(str(start + i), tuple(10 + (start + i + 7 * j) % 3900 for j in range(40)))
                for i in range(500)
            ]
            async for group in rollout.generate(asked, n=1, sampling=sampling):
                assert isinstance(group, Group)
                assert group.samples[0].route.kind is RouteKind.SPLIT
            waiting.append(sockets_in_time_wait())
        assert rollout.dispatcher.stats.handoffs == 3000
        assert rollout.dispatcher.stats.retries == 0
        await assert_idle(rollout)
    assert max(waiting[1:]) <= waiting[0] + 50, waiting


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["nixl", pytest.param("mooncake", marks=pytest.mark.soak)])
async def test_a_fleet_grows_and_shrinks_under_a_stream_of_groups(
    tiny_config: dict[str, Any], expected: Answers, backend: str
) -> None:
    overrides = [*STATIC, f"disaggregation.transfer_backend={backend}", *shape(1, 1, 0)]
    async with Rollout.open(tiny_config, overrides=overrides) as rollout:
        stopped = asyncio.Event()
        rounds = 0

        async def stream() -> None:
            nonlocal rounds
            while not stopped.is_set():
                assert_same(await generated(rollout, prompts()), expected)
                rounds += 1

        streaming = asyncio.create_task(stream())
        try:
            report = await rollout.scale(prefill=2, decode=2)
            assert {one.name for one in report.joined} == {"prefill-1", "decode-1"}
            for one in report.joined:
                assert {"start", "load", "warm_up", "weights", "proof"} <= set(one.seconds)
            grown = rounds
            while rounds < grown + 2 and not streaming.done():
                await asyncio.sleep(0.1)
            report = await rollout.scale(prefill=1, decode=1)
            assert [(one.name, one.drained) for one in report.left] == [
                ("prefill-1", True),
                ("decode-1", True),
            ]
        finally:
            stopped.set()
            await asyncio.wait_for(streaming, 120)
        done = await rollout.activity()
        assert done.retries == 0
        left = {"prefill-1", "decode-1"}
        assert {e.name for e in done.engines if e.prefills or e.decodes} >= left
        assert {engine.info.name for engine in rollout.fleet.ready()} == {"prefill-0", "decode-0"}
        await assert_idle(rollout)
