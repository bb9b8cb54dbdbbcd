"""The stock vllm-router in static PD mode over real vLLM servers and real NIXL, under a Rollout."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file

from splitroll import Rollout, SamplingParams
from splitroll.errors import EngineStartError, GroupFailed
from splitroll.router.client import Client
from splitroll.router.routed_engine import RoutedEngine
from splitroll.types import Group, Prompt, Role

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

MODE = (
    "router.mode=vllm-router",
    "router.policy=round_robin",
    "disaggregation.decode_replicas=1",
    "limits.health_interval_s=0.5",
)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def routed(rollout: Rollout) -> RoutedEngine:
    (engine,) = rollout.fleet.ready()
    assert isinstance(engine, RoutedEngine)
    return engine


def prompts(count: int, tokens: int, seed: int) -> list[Prompt]:
    draw = random.Random(seed)
    return [Prompt(str(i), tuple(draw.choices(range(10, 4000), k=tokens))) for i in range(count)]


async def generate(rollout: Rollout, asked: Sequence[Any], **options: Any) -> dict[str, Group]:
    groups = {}
    async for group in rollout.generate(asked, **options):
        assert isinstance(group, Group)
        groups[group.id] = group
    return groups


@pytest_asyncio.fixture(scope="module")
async def rollout(tiny_config: dict[str, Any]) -> AsyncIterator[Rollout]:
    async with Rollout.open(tiny_config, overrides=MODE) as one:
        yield one


async def asked_of_one_server(rollout: Rollout, prompt: Prompt) -> tuple[int, ...]:
    """Have a decode server compute a whole prompt itself, past the router."""
    engine = routed(rollout)
    server = next(server for server in engine.servers if server.role is Role.DECODE)
    client = Client("decode-0")
    alone = RoutedEngine(
        engine.info, server.url, [], client, rollout.facts.name, rollout.tokenizer.decode
    )
    work = rollout.plan([prompt], n=1, sampling=GREEDY)[0]
    request = rollout.dispatcher._courier._request(
        rollout.dispatcher._courier._segment(rollout.dispatcher._accept(work), 0), work
    )
    try:
        events = [event async for event in alone.decode(replace(request, cache_salt="alone"))]
    finally:
        await alone.close()
    return tuple(events[-1].token_ids)


async def test_the_same_rollout_goes_through_the_stock_router(rollout: Rollout) -> None:
    asked = prompts(6, 200, seed=1)
    before = await routed(rollout).counters_by_server()
    groups = await generate(rollout, asked, n=2, sampling=GREEDY)
    await asyncio.sleep(0.5)
    after = await routed(rollout).counters_by_server()
    done = {name: after[name] - before[name] for name in after}
    for group in groups.values():
        for sample in group.samples:
            assert len(sample.token_ids) == len(sample.logprobs) == 24
            assert sample.text == rollout.tokenizer.decode(sample.token_ids)
            assert sample.weight_version == 0
            assert sample.finish_reason == "length"
    # The prefill server computed the prompts, and decode no more than what is in no full block.
    assert done["prefill-0"].computed_tokens >= 6 * 200
    assert done["decode-0"].pulled_tokens >= 6 * 190
    assert done["decode-0"].computed_tokens <= 6 * 2 * 32
    assert done["decode-0"].kv_bytes > 0
    for prompt in asked[:2]:
        expected = await asked_of_one_server(rollout, prompt)
        assert {sample.token_ids for sample in groups[prompt.id].samples} == {expected}
    seeded = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    first = await generate(rollout, asked[:2], n=3, sampling=seeded)
    again = await generate(rollout, asked[:2], n=3, sampling=seeded)
    for name, group in first.items():
        tokens = [sample.token_ids for sample in group.samples]
        assert len(set(tokens)) == 3
        assert tokens == [sample.token_ids for sample in again[name].samples]


async def test_a_router_that_runs_is_joined(rollout: Rollout, tiny_config: dict[str, Any]) -> None:
    url = routed(rollout).url
    joined = ("router.mode=vllm-router", f"router.url={url}")
    async with Rollout.open(tiny_config, overrides=joined) as second:
        asked = prompts(2, 60, seed=2)
        groups = await generate(second, asked, sampling=GREEDY)
        ours = await generate(rollout, asked, sampling=GREEDY)
        for name, group in groups.items():
            assert group.samples[0].token_ids == ours[name].samples[0].token_ids
    # It is still there for whoever started it.
    assert await generate(rollout, prompts(1, 40, seed=3), sampling=GREEDY)


@pytest.mark.soak
async def test_mooncake_goes_through_the_stock_router_too(
    rollout: Rollout, tiny_config: dict[str, Any]
) -> None:
    asked = prompts(4, 80, seed=9)
    overrides = [*MODE, "disaggregation.transfer_backend=mooncake"]
    async with Rollout.open(tiny_config, overrides=overrides) as over_mooncake:
        before = await routed(over_mooncake).counters_by_server()
        ours = await generate(over_mooncake, asked, n=1, sampling=GREEDY)
        after = await routed(over_mooncake).counters_by_server()
        async with asyncio.timeout(10):  # metrics lag behind
            while (done := after["decode-0"] - before["decode-0"]).pulled_tokens < 4 * 79:
                await asyncio.sleep(0.1)
                after = await routed(over_mooncake).counters_by_server()
        assert done.computed_tokens <= 4
    theirs = await generate(rollout, asked, n=1, sampling=GREEDY)
    for name, group in ours.items():
        assert group.samples[0].token_ids == theirs[name].samples[0].token_ids


async def test_weights_reach_the_servers(rollout: Rollout, tiny_model: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    asked = prompts(2, 100, seed=4)
    before = await generate(rollout, asked, sampling=GREEDY)
    noise = torch.Generator().manual_seed(0)
    changed = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype)
        for name, tensor in weights.items()
    }
    report = await rollout.update_weights(changed)
    assert report.version == 1
    after = await generate(rollout, asked, sampling=GREEDY)
    for name, group in after.items():
        assert group.samples[0].weight_version == 1
        assert group.samples[0].token_ids != before[name].samples[0].token_ids
        expected = await asked_of_one_server(rollout, group.prompt)
        assert group.samples[0].token_ids == expected
    await rollout.update_weights(weights)
    back = await generate(rollout, asked, sampling=GREEDY)
    for name, group in back.items():
        assert group.samples[0].weight_version == 2
        assert group.samples[0].token_ids == before[name].samples[0].token_ids


async def test_a_port_in_use_is_told_at_once(rollout: Rollout, tiny_config: dict[str, Any]) -> None:
    port = routed(rollout).url.rpartition(":")[2]
    begun = time.monotonic()
    with pytest.raises(Exception, match="in use"):
        async with Rollout.open(tiny_config, overrides=[*MODE, f"router.port={port}"]):
            pass
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("victim", ["router", pytest.param("decode-0", marks=pytest.mark.soak)])
async def test_who_died_is_told_within_seconds(tiny_config: dict[str, Any], victim: str) -> None:
    async with Rollout.open(tiny_config, overrides=MODE) as one:
        engine = routed(one)
        _, router, *servers = engine.info.pids
        names = [server.name for server in engine.servers]
        pids = {"router": router, **dict(zip(names, servers, strict=True))}
        sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
        running = asyncio.create_task(generate(one, prompts(4, 60, seed=5), sampling=sampling))
        await asyncio.sleep(1)
        os.kill(pids[victim], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(GroupFailed, match=f"{victim} ended with exit code -9"):
            await running
        assert time.monotonic() - begun < 15
        with pytest.raises(GroupFailed, match=f"{victim} ended with exit code -9"):
            await generate(one, prompts(1, 30, seed=6), sampling=GREEDY)
        everything = [*pids.values()]
    async with asyncio.timeout(20):
        while any(map(_runs, everything)):
            await asyncio.sleep(0.2)


async def test_servers_and_routers_that_never_answer_are_told(tiny_config: dict[str, Any]) -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="")  # and no /health: the router waits for that

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as served:
        unwell = str(served.make_url("")).rstrip("/")

        def given(url: str) -> list[str]:
            urls = [f'router.{role}_urls=["{url}"]' for role in ("prefill", "decode")]
            return ["router.mode=vllm-router", "router.start_timeout_s=4", *urls]

        told = r"prefill-url-0.*127.0.0.1:9/metrics does not answer"
        with pytest.raises(EngineStartError, match=told):
            async with Rollout.open(tiny_config, overrides=given("http://127.0.0.1:9")):
                pass
        told = r"(?s)router did not start: it was not ready in 4 s; its log ends with:.*\w+"
        with pytest.raises(EngineStartError, match=told):
            async with Rollout.open(tiny_config, overrides=given(unwell)):
                pass


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_the_servers_speak_openai_past_a_rollout(rollout: Rollout) -> None:
    body = {"model": rollout.facts.name, "prompt": [5, 6, 7] * 30, "max_tokens": 4}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{routed(rollout).url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert (await answer.json())["usage"]["completion_tokens"] == 4
