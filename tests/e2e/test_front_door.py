"""The front door over real engines answers as a plain vLLM server does, field by field."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from front import WARNINGS
from splitroll import Rollout
from splitroll.bench.stock_servers import stock_servers
from splitroll.config import load_checked, load_config
from splitroll.serve.door import Keys
from splitroll.serve.service import listen, open_service, serve
from splitroll.types import RouteKind

pytestmark = [
    pytest.mark.engines,
    *WARNINGS,
]

VOLATILE = ("id", "created", "system_fingerprint", "request_id", "metrics")
"""What differs between two answers of one server, or with its KV connector."""


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(10, 4000)}" for _ in range(count))


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 4000), k=count)


def chat(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


COMPLETION, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CORPUS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": "w5 w6 w7"}),
    (COMPLETION, {"prompt": words(200, 1)}),
    (COMPLETION, {"prompt": [words(20, 2), words(70, 3), "w9"]}),
    (COMPLETION, {"prompt": ids(1, 4)}),
    (COMPLETION, {"prompt": ids(31, 5)}),
    (COMPLETION, {"prompt": ids(32, 6)}),
    (COMPLETION, {"prompt": ids(33, 7)}),
    (COMPLETION, {"prompt": ids(600, 8)}),
    (COMPLETION, {"prompt": [ids(40, 9), ids(64, 10)]}),
    (COMPLETION, {"prompt": ids(40, 11), "logprobs": 0}),
    (COMPLETION, {"prompt": ids(40, 12), "logprobs": 1}),
    (COMPLETION, {"prompt": ids(40, 13), "logprobs": 5}),
    (COMPLETION, {"prompt": ids(40, 14), "echo": True}),
    (COMPLETION, {"prompt": ids(70, 15), "echo": True, "logprobs": 2}),
    (COMPLETION, {"prompt": ids(70, 15), "echo": True, "logprobs": 1, "max_tokens": 1}),
    (COMPLETION, {"prompt": ids(40, 16), "prompt_logprobs": 1}),
    (COMPLETION, {"prompt": ids(40, 17), "return_token_ids": True}),
    (COMPLETION, {"prompt": ids(40, 18), "logprobs": 1, "return_tokens_as_token_ids": True}),
    (COMPLETION, {"prompt": ids(40, 19), "max_tokens": 1}),
    (COMPLETION, {"prompt": ids(40, 20), "max_tokens": 40, "stop_token_ids": list(range(2000))}),
    (COMPLETION, {"prompt": ids(40, 21), "max_tokens": 60, "stop": ["w1", "w2"]}),
    (
        COMPLETION,
        {
            "prompt": ids(40, 22),
            "max_tokens": 60,
            "stop": "3",
            "include_stop_str_in_output": True,
        },
    ),
    (COMPLETION, {"prompt": ids(40, 23), "min_tokens": 5, "stop_token_ids": list(range(3000))}),
    (COMPLETION, {"prompt": ids(40, 24), "logit_bias": {"77": 100}}),
    (COMPLETION, {"prompt": ids(40, 25), "allowed_token_ids": [50, 51, 52], "logprobs": 2}),
    (COMPLETION, {"prompt": ids(40, 26), "bad_words": ["w77"]}),
    (COMPLETION, {"prompt": ids(40, 27), "repetition_penalty": 1.5, "max_tokens": 20}),
    (COMPLETION, {"prompt": ids(40, 28), "presence_penalty": 1.0, "frequency_penalty": 0.5}),
    (COMPLETION, {"prompt": ids(40, 29), "ignore_eos": True, "max_tokens": 50}),
    (COMPLETION, {"prompt": ids(40, 30), "skip_special_tokens": False}),
    (COMPLETION, {"prompt": ids(40, 31), "truncate_prompt_tokens": 10, "return_token_ids": True}),
    (COMPLETION, {"prompt": ids(40, 32), "temperature": 1, "seed": 7, "n": 3, "logprobs": 1}),
    (COMPLETION, {"prompt": ids(90, 33), "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 1}),
    (COMPLETION, {"prompt": [ids(40, 34), ids(33, 35)], "temperature": 1, "seed": 3, "n": 2}),
    (CHAT, {"messages": chat("w5 w6")}),
    (CHAT, {"messages": chat("w5", "w6 w7", words(100, 36))}),
    (CHAT, {"messages": chat("w5"), "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": chat("w5"), "logprobs": True, "return_token_ids": True}),
    (CHAT, {"messages": chat("w8"), "stop": ["w3"], "max_tokens": 50}),
    (CHAT, {"messages": chat("w8"), "temperature": 1, "seed": 5, "n": 2}),
    (CHAT, {"messages": chat("w8 w9"), "tools": [_WEATHER], "tool_choice": "none"}),
    (CHAT, {"messages": chat("w8"), "max_completion_tokens": 3}),
    (CHAT, {"messages": chat("w9"), "add_generation_prompt": False, "echo": True}),
    (GENERATE, {"token_ids": ids(45, 37), "sampling_params": {"temperature": 0, "max_tokens": 5}}),
    (
        GENERATE,
        {
            "token_ids": ids(45, 38),
            "sampling_params": {"temperature": 0, "max_tokens": 5, "logprobs": 2},
        },
    ),
    (
        GENERATE,
        {
            "token_ids": ids(45, 39),
            "sampling_params": {"temperature": 1, "seed": 4, "n": 2, "max_tokens": 5},
        },
    ),
    (COMPLETION, {"prompt": ids(3000, 40)}),
    (COMPLETION, {"prompt": [99999]}),
    (COMPLETION, {"prompt": "w5", "temperature": -1}),
    (COMPLETION, {"prompt": "w5", "model": "another"}),
    (CHAT, {"messages": []}),
    ("/tokenize", {"prompt": "w5 w6 w7", "return_token_strs": True}),
    ("/tokenize", {"messages": chat("w5 w6")}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]


@contextlib.asynccontextmanager
async def front_door(rollout: Rollout) -> AsyncIterator[str]:
    stopped = asyncio.Event()
    async with open_service(rollout, Keys()) as app:
        with listen(load_config(overrides=["serve.port=0"])) as sock:
            running = asyncio.create_task(serve(app, sock, stopped))
            try:
                yield f"http://127.0.0.1:{sock.getsockname()[1]}"
            finally:
                stopped.set()
                await asyncio.wait_for(running, 20)


@pytest_asyncio.fixture(scope="module")
async def door(split_rollout: Rollout) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        front_door(split_rollout) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest_asyncio.fixture(scope="module")
async def plain(
    tiny_config: dict[str, Any], chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    """A plain vLLM server with the same arguments."""
    overrides = ["disaggregation.enabled=false", "colocated.replicas=1"]
    config, facts = load_checked({**tiny_config, "model": str(chat_model)}, overrides)
    logs = tmp_path_factory.mktemp("plain")
    async with (
        stock_servers(config, facts, [0], logs, extra=("--enable-scale-out",)) as servers,
        httpx.AsyncClient(base_url=servers[0].url, timeout=60) as client,
    ):
        yield client


async def answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    found = await client.post(path, json=body)
    return found.status_code, without_volatile(found.json())


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """Return a stream's chunks, those of one choice put together: how many tokens are in one is a
    matter of time."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as found:
        if found.status_code != 200:
            return found.status_code, without_volatile(json.loads(await found.aread()))
        lines = [line async for line in found.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    first = json.loads(lines[0].removeprefix("data: "))
    if "error" in first:  # a plain server's status is 200
        return first["error"]["code"], without_volatile(first)
    chunks = [without_volatile(json.loads(line.removeprefix("data: "))) for line in lines[:-1]]
    whole: dict[int, dict[str, Any]] = {}
    rest = []
    for chunk in chunks:
        rest += [{k: v for k, v in chunk.items() if k != "choices"}]
        for choice in chunk["choices"]:
            join(whole.setdefault(choice["index"], {}), choice)
    return 200, whole, rest[0], rest[-1]


def join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add what a chunk says to what those before said."""
    for key, value in piece.items():
        before = whole.get(key)
        if isinstance(value, dict):
            if before is None:
                whole[key] = {}
            join(whole[key], value)
        elif key in ("index", "role") or before is None:
            whole[key] = value
        elif isinstance(value, str | list):
            whole[key] = before + value
        elif value is not None:
            whole[key] = value


def without_volatile(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: without_volatile(v) for k, v in tree.items() if k not in VOLATILE}
    if isinstance(tree, list):
        return [without_volatile(v) for v in tree]
    # Of other batches: float32 agrees to some 1e-6.
    return pytest.approx(tree, abs=1e-4) if isinstance(tree, float) else tree


def named(path: str, body: dict[str, Any]) -> dict[str, Any]:
    sampled = {} if path in (GENERATE, "/tokenize", "/detokenize") else {"temperature": 0}
    limits = {"max_tokens": 8} if path in (COMPLETION, CHAT) else {}
    if "max_completion_tokens" in body:
        limits = {}
    return {"model": "tiny", **sampled, **limits, **body}


@pytest.mark.parametrize("number", range(len(CORPUS)))
async def test_an_answer_equals_a_plain_servers(
    door: httpx.AsyncClient, plain: httpx.AsyncClient, number: int
) -> None:
    path, body = CORPUS[number]
    body = named(path, body)
    ours, theirs = await asyncio.gather(answer(door, path, body), answer(plain, path, body))
    assert ours == theirs


STREAMED = [i for i, (path, _) in enumerate(CORPUS) if path in (COMPLETION, CHAT)]


@pytest.mark.parametrize("number", STREAMED)
async def test_a_stream_equals_a_plain_servers(
    door: httpx.AsyncClient, plain: httpx.AsyncClient, number: int
) -> None:
    path, body = CORPUS[number]
    body = named(path, body)
    ours, theirs = await asyncio.gather(stream(door, path, body), stream(plain, path, body))
    assert ours == theirs


async def test_the_fleet_is_split_all_the_while(
    split_rollout: Rollout, door: httpx.AsyncClient
) -> None:
    stats = split_rollout.dispatcher.stats
    routes, recomputed = Counter(stats.routes), stats.recomputed_tokens
    for path, body in CORPUS:
        await answer(door, path, named(path, body))
    assert (stats.routes - routes)[RouteKind.SPLIT.value] > len(CORPUS) / 2
    assert stats.recomputed_tokens == recomputed


async def test_the_openai_client(door: httpx.AsyncClient) -> None:
    import openai

    client = openai.AsyncOpenAI(base_url=f"{door.base_url}/v1", api_key="none", timeout=60)
    async with client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        said = await client.completions.create(
            model="tiny",
            prompt=["w5 w6", "w7"],
            n=2,
            max_tokens=5,
            temperature=1,
            logprobs=2,
            seed=3,
        )
        assert [choice.index for choice in said.choices] == [0, 1, 2, 3]
        assert said.usage is not None
        assert said.usage.completion_tokens == 20
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "w5"}], max_tokens=5, temperature=0
        )
        text = ""
        pieces = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "w5"}],
            max_tokens=5,
            temperature=0,
            stream=True,
        )
        async for piece in pieces:
            text += piece.choices[0].delta.content or ""
        assert text == chat.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model="tiny", prompt=ids(3000, 1), max_tokens=5)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="another", prompt="w5", max_tokens=5)


async def test_trls_own_client(split_rollout: Rollout, door: httpx.AsyncClient) -> None:
    def use() -> tuple[Any, ...]:
        from trl.generation.vllm_client import VLLMClient

        client = VLLMClient(base_url=str(door.base_url).rstrip("/"), connection_timeout=20)
        asked = [ids(30, 50), ids(45, 51)]
        made = client.generate(asked, n=3, temperature=1.0, max_tokens=6, logprobs=0)
        scored = client.get_sequence_logprobs(
            [asked[0] + made["completion_ids"][0]], [len(asked[0])], top_logprobs=20
        )
        said = client.chat([chat("w5 w6"), chat("w7")], n=2, max_tokens=4)
        return asked, made, scored, said, client.get_world_size(), client.get_server_info()

    asked, made, scored, said, world_size, info = await asyncio.to_thread(use)
    assert made["prompt_ids"] in (asked, [prompt for prompt in asked for _ in range(3)])
    assert [len(tokens) for tokens in made["completion_ids"]] == [6] * 6
    assert all(len(values) == 6 for values in made["logprobs"])
    assert [token for (token,) in scored["actual_token_ids"][0]] == made["completion_ids"][0]
    assert len(said["completion_ids"]) == 4
    assert world_size == len(split_rollout.fleet.ready())
    assert info["weight_transfer_config"] is None, "no GPU transport: TRL says so at once"


async def test_weights_come_over_http(
    split_rollout: Rollout, door: httpx.AsyncClient, chat_model: Path, tmp_path: Path
) -> None:
    own = load_file(chat_model / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    changed = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype)
        for name, tensor in own.items()
    }
    save_file(changed, tmp_path / "model.safetensors")
    body = named(COMPLETION, {"prompt": ids(90, 80), "return_token_ids": True})

    async def push(folder: Path) -> str:
        for path, sent in (
            ("/init_weight_transfer_engine", {"init_info": {}}),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"folder": str(folder)}}),
            ("/finish_weight_update", None),
        ):
            answered = await door.post(path, json=sent)
            assert answered.status_code == 200, answered.text
        return str(answered.json()["weight_version"])

    async def checksums() -> dict[str, str]:
        answered = await door.post("/weight_checker", json={"action": "checksum"})
        return dict(answered.json()["checksums"])

    async def tokens() -> list[int]:
        status, found = await answer(door, COMPLETION, body)
        assert status == 200
        return list(found["choices"][0]["token_ids"])

    before, held = await tokens(), await checksums()
    version = await push(tmp_path)
    assert version == str(split_rollout.weight_version)
    assert await tokens() != before
    newer = await checksums()
    assert newer.keys() == held.keys()
    assert any(newer[name] != held[name] for name in held)
    prefill, *decode = (
        {name.partition("/")[2]: value for name, value in newer.items() if name.startswith(engine)}
        for engine in ("prefill-0", "decode-0", "decode-1")
    )
    assert decode == [prefill, prefill]
    await push(chat_model)
    assert await tokens() == before


async def idle(rollout: Rollout) -> None:
    async with asyncio.timeout(20):
        while rollout.dispatcher.load:
            await asyncio.sleep(0.05)
        for engine in rollout.fleet.ready():
            while (load := await engine.load()).held_blocks or load.pinned or load.running:
                await asyncio.sleep(0.05)


def memory(rollout: Rollout) -> float:
    """Resident MB of this process and of all engines' own, without EngineCore: there oneDNN keeps
    kernels for the last 1,024 shapes of a batch, which takes thousands of requests to fill."""
    gc.collect()
    pids = {os.getpid(), *(engine.info.pids[0] for engine in rollout.fleet.ready())}
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6


@pytest.mark.timeout(400)
async def test_a_thousand_requests_of_which_a_third_go_away_leave_nothing(
    split_rollout: Rollout, door: httpx.AsyncClient
) -> None:
    draw = random.Random(3)
    gone = 0

    async def ask(i: int) -> None:
        nonlocal gone
        body = named(COMPLETION, {"prompt": ids(20 + i % 100, i), "max_tokens": 20})
        body["stream"] = bool(i % 2)
        if i % 3:
            assert (await door.post(COMPLETION, json=body)).status_code == 200
            return
        try:
            async with asyncio.timeout(draw.uniform(0, 1)):
                await door.post(COMPLETION, json=body)
        except (TimeoutError, httpx.TimeoutException):
            gone += 1

    expired = await kv_expired(split_rollout)
    used = []
    for start in range(0, 1000, 50):
        await asyncio.gather(*(ask(i) for i in range(start, start + 50)))
        await idle(split_rollout)
        used.append(memory(split_rollout))
    assert gone > 150
    growth = [after - before for before, after in itertools.pairwise(used[9:])]
    assert used[-1] - used[9] < 40, f"MB more after each of the last 500 requests: {growth}"
    assert await kv_expired(split_rollout) == expired


async def kv_expired(rollout: Rollout) -> int:
    return sum(one.kv_expired for one in (await rollout.fleet.counters()).values())
