"""The front door over simulated engines: vLLM's own front end, and what we put around it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from front import WARNINGS, front, over_http
from splitroll.config import load_config
from splitroll.engines.protocol import DecodeRequest
from splitroll.engines.simulated import LatencyModel, SimulatedEngine
from splitroll.errors import ConfigError
from splitroll.serve.door import Door, Keys
from splitroll.serve.routes import ROUTES
from splitroll.serve.service import ADMIN_KEY, API_KEY, check_serve, listen

pytestmark = WARNINGS

SLOW = LatencyModel(step_s=0.004)


def ids(count: int) -> list[int]:
    return [5 + 7 * i % 3000 for i in range(count)]


async def test_an_answer_has_the_samples_in_the_order_of_the_request(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        prompts = [[5, 6, 7], [9, 10], [11] * 50]
        answer = await door.complete(
            prompt=prompts, n=2, temperature=1, seed=3, return_token_ids=True, logprobs=0
        )
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        asked = [choice["prompt_token_ids"] for choice in answer["choices"]]
        assert asked == [prompt for prompt in prompts for _ in range(2)]
        tokens = [tuple(choice["token_ids"]) for choice in answer["choices"]]
        assert len(set(tokens)) == 6
        assert all(len(choice["logprobs"]["token_logprobs"]) == 6 for choice in answer["choices"])
        again = await door.complete(
            prompt=prompts, n=2, temperature=1, seed=3, return_token_ids=True
        )
        assert [tuple(choice["token_ids"]) for choice in again["choices"]] == tokens
        await door.assert_idle()


async def test_engines_are_asked_for_what_the_client_wants(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DecodeRequest] = []
    decode = SimulatedEngine.decode

    def noting(self: SimulatedEngine, request: DecodeRequest) -> Any:
        asked.append(request)
        return decode(self, request)

    async with front(tiny_model) as door:
        monkeypatch.setattr(SimulatedEngine, "decode", noting)
        await door.complete()
        await door.complete(logprobs=0)
        await door.complete(logprobs=2)
    assert [request.top_logprobs for request in asked] == [None, 0, 0]
    assert not any(request.text for request in asked), "vLLM's front end makes it"


async def test_n_samples_are_one_group(tiny_model: Path) -> None:
    async with front(tiny_model, "dispatch.decode_engines_per_group=1") as door:
        await door.complete(n=4, temperature=1)
        stats = door.system.dispatcher.stats
        counters = await door.system.fleet.counters()
        # 40 tokens once, and what fills no block three times.
        assert sum(c.computed_tokens for c in counters.values()) == 40 + 3 * 8
        assert stats.routes.total() == 4


async def test_one_by_one_samples_of_a_prompt_are_siblings(tiny_model: Path) -> None:
    async with front(tiny_model, latency=SLOW) as door:
        answers = await asyncio.gather(
            *(door.complete(temperature=1, seed=i, return_token_ids=True) for i in range(6))
        )
        assert len({tuple(a["choices"][0]["token_ids"]) for a in answers}) == 6
        counters = await door.system.fleet.counters()
        # Once on every engine at most, and what fills no block.
        assert sum(c.computed_tokens for c in counters.values()) <= 3 * 40 + 3 * 8


async def test_a_sibling_waits_for_kv_and_not_for_an_end(tiny_model: Path) -> None:
    async with front(tiny_model, latency=SLOW) as door:
        long = asyncio.create_task(door.complete(max_tokens=500))
        await asyncio.sleep(0)
        short = await asyncio.wait_for(door.complete(max_tokens=2), 5)
        assert short["usage"]["completion_tokens"] == 2
        assert not long.done()
        await long


async def test_a_session_stays_with_its_kv(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        prompt, engines = ids(64), set()
        door.system.dispatcher.on_sample(lambda sample: engines.add(sample.route.decode))
        for _ in range(4):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "return_token_ids": True}
            headers = {"x-session-id": "s1"}
            answer = await door.client.post("/v1/completions", json=body, headers=headers)
            prompt = prompt + answer.json()["choices"][0]["token_ids"] + ids(20)
        assert len(engines) == 1
        counters = await door.system.fleet.counters()
        assert sum(c.cache_hit_tokens for c in counters.values()) >= 64 + 64 + 96


async def test_a_client_may_ask_for_a_weight_version(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        body = {"model": "tiny", "prompt": [5], "max_tokens": 1}
        for asked, status in (("0", 200), ("1", 409), ("new", 400), ("9" * 5000, 400)):
            headers = {"x-weight-version": asked}
            answer = await door.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status
        door.system.fleet.weight_version = 1
        headers = {"x-weight-version": "1"}
        answer = await door.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200


async def test_a_stream_is_the_answer_in_pieces(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        prompt = list(range(20, 60))
        whole = await door.complete(prompt=prompt, max_tokens=7, logprobs=2)
        pieces = await door.stream(
            prompt=prompt, max_tokens=7, logprobs=2, stream_options={"include_usage": True}
        )
        assert "".join(p["choices"][0]["text"] for p in pieces[:-1]) == whole["choices"][0]["text"]
        reasons = [piece["choices"][0]["finish_reason"] for piece in pieces[:-1]]
        assert reasons == [None] * 6 + ["length"]
        values = [v for p in pieces[:-1] for v in p["choices"][0]["logprobs"]["token_logprobs"]]
        assert values == whole["choices"][0]["logprobs"]["token_logprobs"]
        assert pieces[-1]["usage"]["completion_tokens"] == 7


async def test_chat_tokens_and_texts(chat_model: Path) -> None:
    async with front(chat_model) as door:
        messages = [{"role": "user", "content": "w5 w6"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 5, "temperature": 0}
        answer = (await door.post("/v1/chat/completions", **body)).json()
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert answer["usage"]["completion_tokens"] == 5
        pieces = await door.stream("/v1/chat/completions", messages=messages, max_tokens=5)
        said = "".join(p["choices"][0]["delta"].get("content") or "" for p in pieces)
        assert said == answer["choices"][0]["message"]["content"]
        tokens = (await door.post("/tokenize", model="tiny", prompt="w5 w6")).json()["tokens"]
        text = (await door.post("/detokenize", model="tiny", tokens=tokens)).json()["prompt"]
        assert text == "w5w6"


async def test_a_stop_string_ends_a_sample_on_its_engine(tiny_model: Path) -> None:
    async with front(tiny_model, latency=SLOW) as door:
        whole = await door.complete(max_tokens=40)
        stop = f"w{whole['choices'][0]['text'].split('w')[4]}w"
        answer = await door.complete(max_tokens=1500, stop=[stop])
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == stop
        assert stop not in choice["text"]
        pieces = await door.stream(prompt=list(range(5, 45)), max_tokens=1500, stop=[stop])
        assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
        await door.assert_idle()
        counters = await door.system.fleet.counters()
        # The simulated engine knows no stop strings: of the streams, it was aborted.
        assert sum(c.generated_tokens for c in counters.values()) < 40 + 1500 + 100


async def test_a_stream_goes_on_where_its_engine_died(tiny_model: Path) -> None:
    options = {"latency": SLOW}
    async with front(tiny_model, **options) as door:
        prompt = list(range(7, 50))
        expected = await door.complete(prompt=prompt, max_tokens=60, return_token_ids=True)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 60, "temperature": 0}
        tokens: list[int] = []
        killed = False
        request = {**body, "stream": True, "return_token_ids": True}
        # ASGITransport gathers a whole answer: the service is asked over a socket of its own.
        async with (
            over_http(door) as client,
            client.stream("POST", "/v1/completions", json=request) as answer,
        ):
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                if len(tokens) > 20 and not killed:
                    killed = True
                    busy = max(door.system.dispatcher.load, key=door.system.dispatcher.load.get)
                    door.system.launcher.engines[busy].kill()
        assert killed
        assert tokens == expected["choices"][0]["token_ids"]
        await door.assert_idle()


async def test_clients_that_go_away_leave_nothing(tiny_model: Path) -> None:
    async with front(tiny_model, latency=SLOW) as door, over_http(door) as client:

        async def ask(i: int) -> None:
            body = {
                "model": "tiny",
                "prompt": [5 + i % 7] * (1 + 13 * (i % 9)),
                "n": 1 + i % 3,
                "max_tokens": 300,
                "seed": i,
                "stream": i % 2 == 0,
            }
            limit_s = 0.002 * (i % 40)
            with contextlib.suppress(httpx.TimeoutException, TimeoutError):
                async with asyncio.timeout(limit_s):
                    await client.post("/v1/completions", json=body)

        await asyncio.gather(*(ask(i) for i in range(120)))
        async with asyncio.timeout(10):
            while door.system.dispatcher.load:
                await asyncio.sleep(0.02)
        await door.assert_idle()
        whole = await door.complete()
        assert whole["usage"]["completion_tokens"] == 6


async def test_one_of_two_clients_with_the_same_prompt_goes_away(tiny_model: Path) -> None:
    async with front(tiny_model, latency=SLOW) as door:
        prompt = list(range(5, 45))
        stays = asyncio.create_task(door.complete(prompt=prompt, max_tokens=50))
        goes = asyncio.create_task(door.complete(prompt=prompt, max_tokens=1900))
        await door.running(2)
        goes.cancel()
        assert (await stays)["usage"]["completion_tokens"] == 50
        async with asyncio.timeout(3):
            while door.system.dispatcher.load:
                await asyncio.sleep(0.02)
        await door.assert_idle()


async def test_what_a_client_may_not_set_is_refused(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        for body, name in (
            ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
            ({"vllm_xargs": {"kv_transfer_params": {"a": 1}}}, "vllm_xargs.kv_transfer_params"),
            ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ):
            answer = await door.post("/v1/completions", model="tiny", prompt=[5], **body)
            assert answer.status_code == 400
            assert name in answer.json()["error"]["message"]
        hidden = b'{"model": "tiny", "prompt": [5], "kv_\\u0074ransfer_params": {"a": 1}}'
        answer = await door.client.post("/v1/completions", content=hidden)
        assert answer.status_code == 400
        assert "kv_transfer_params" in answer.json()["error"]["message"]
        wide = '{"model": "tiny", "prompt": [5], "kv_transfer_params": {}}'.encode("utf-16")
        answer = await door.client.post("/v1/completions", content=wide)
        assert answer.status_code == 400
        assert "UTF-8" in answer.json()["error"]["message"]
        deep = b'{"prompt": "\\u0041", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        assert (await door.client.post("/v1/completions", content=deep)).status_code == 400
        said = await door.complete(prompt="what are kv_transfer_params")
        assert said["choices"], "a text may say it"
        assert door.system.dispatcher.stats.routes.total() == 1


async def test_too_much_is_told_so(tiny_model: Path) -> None:
    small = ("serve.max_queued=4", "serve.max_body_bytes=2000")
    async with front(tiny_model, *small, latency=SLOW) as door:
        answer = await door.post("/v1/completions", model="tiny", prompt=[5], n=5)
        assert answer.status_code == 400, "it would never be taken"
        long = asyncio.create_task(door.complete(n=4, temperature=1, max_tokens=100))
        await door.running()
        answer = await door.post("/v1/completions", model="tiny", prompt=[5])
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == 429
        stream = await door.post("/v1/completions", model="tiny", prompt=[[5]] * 4, stream=True)
        assert stream.status_code == 429
        assert len((await long)["choices"]) == 4
        assert (await door.post("/v1/completions", prompt=[5] * 2000)).status_code == 413
        assert (await door.complete())["choices"]


async def test_two_thousand_requests_wait_in_little_memory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tiny_model) as door:
        await asyncio.gather(*(door.complete() for _ in range(20)))
        await door.client.post("/pause?mode=wait")
        asked, run = 0, door.system.dispatcher.run

        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            asked += 1
            return await run(*args, **kwargs)

        monkeypatch.setattr(door.system.dispatcher, "run", counted)
        gc.collect()
        before = psutil.Process().memory_info().rss
        prompts = [[5 + i % 4000, *range(5, 505)] for i in range(2000)]
        waiting = [
            asyncio.create_task(door.complete(prompt=prompt, temperature=1)) for prompt in prompts
        ]
        async with asyncio.timeout(60):
            while asked < 2000:
                await asyncio.sleep(0.05)
        held = psutil.Process().memory_info().rss - before
        assert held < 200e6, f"{held / 1e6:.0f} MB for 2,000 requests, their client's part included"
        await door.client.post("/resume")
        answers = await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert all(answer["choices"][0]["finish_reason"] for answer in answers)
        await door.assert_idle()


async def test_keys_open_what_they_are_for(tiny_model: Path) -> None:
    async with front(tiny_model, keys=Keys("api", "admin")) as door:
        for route, methods in ROUTES.items():
            path = f"{route}1" if route.endswith("/") else route
            params = {"once": True} if route == "/dashboard/events" else None
            for method, access in methods.items():
                statuses = {}
                for key in ("", "api", "admin", "other"):
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    content = b"{}" if method == "POST" else None
                    answer = await door.client.request(
                        method, path, headers=headers, content=content, params=params
                    )
                    statuses[key] = answer.status_code != 401
                expected = {
                    "open": {"": True, "api": True, "admin": True, "other": True},
                    "admin": {"": False, "api": False, "admin": True, "other": False},
                }.get(access.value, {"": False, "api": True, "admin": False, "other": False})
                assert statuses == expected, f"{method} {path}"
        assert (await door.client.get("/sleep")).status_code == 404
        assert (await door.client.get("/pause")).status_code == 405


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_a_paused_fleet_generates_nothing_until_it_resumes(
    tiny_model: Path, mode: str
) -> None:
    async with front(tiny_model, latency=SLOW) as door:
        begun = asyncio.create_task(door.complete(max_tokens=100))
        await door.running()
        assert (await door.client.post("/pause", params={"mode": mode})).status_code == 200
        reason = (await asyncio.wait_for(begun, 1))["choices"][0]["finish_reason"]
        assert reason == ("length" if mode == "wait" else "abort")
        assert (await door.client.get("/is_paused")).json() == {"is_paused": True}
        waits = asyncio.create_task(door.complete())
        await asyncio.sleep(0.1)
        assert not waits.done()
        assert (await door.client.post("/resume")).status_code == 200
        assert (await asyncio.wait_for(waits, 2))["choices"][0]["finish_reason"] == "length"
        assert (await door.client.get("/is_paused")).json() == {"is_paused": False}


async def test_what_a_pause_keeps_stands_still_and_goes_on(tiny_model: Path) -> None:
    async with front(tiny_model, latency=SLOW) as door:
        body = {"n": 3, "max_tokens": 60, "temperature": 1, "seed": 3, "ignore_eos": True}
        undisturbed = await door.complete(**body, return_token_ids=True)
        await door.client.post("/reset_prefix_cache")
        begun = asyncio.create_task(door.complete(**body, return_token_ids=True))
        await door.running()
        answer = await door.client.post("/pause?mode=keep")
        assert answer.json() == {"status": "paused", "cache_cleared": False}
        waits = asyncio.create_task(door.complete())
        before = await door.system.fleet.counters()
        await asyncio.sleep(0.4)
        assert await door.system.fleet.counters() == before
        assert not begun.done()
        assert not waits.done()
        assert (await door.client.post("/resume")).status_code == 200
        kept = await asyncio.wait_for(begun, 5)
        for ours, theirs in zip(kept["choices"], undisturbed["choices"], strict=True):
            assert ours["token_ids"] == theirs["token_ids"]
            assert ours["finish_reason"] == "length"
        assert (await asyncio.wait_for(waits, 5))["choices"]
        await door.assert_idle()


async def test_requests_are_ended_by_name_or_all(tiny_model: Path) -> None:
    async with front(tiny_model, latency=SLOW) as door:
        long = [
            asyncio.create_task(door.complete(request_id=f"r{i}", max_tokens=400)) for i in range(3)
        ]
        await door.running(3)
        path = "/abort_requests"
        for body in (b"{", b"[]", b'{"request_id": ["r1"]}', b'{"request_ids": "r1"}'):
            assert (await door.client.post(path, content=body)).status_code == 400
        assert not any(task.done() for task in long), "what is not understood ends nothing"
        named = b'{"request_ids": ["cmpl-r1-0"]}'
        headers = {"content-type": "application/x-www-form-urlencoded"}
        assert (await door.client.post(path, content=named, headers=headers)).status_code == 200
        ended = await asyncio.wait_for(long[1], 2)
        assert ended["choices"][0]["finish_reason"] == "abort"
        assert not long[0].done()
        assert (await door.client.post(path)).json()["aborted"] == 2
        for task in (long[0], long[2]):
            ended = await asyncio.wait_for(task, 2)
            assert ended["choices"][0]["finish_reason"] == "abort"
        await door.assert_idle()


async def test_pages_of_other_sites_change_nothing(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        for origin, status in (("http://evil.example", 403), ("null", 403), ("http://front", 200)):
            answer = await door.client.post("/resume", headers={"Origin": origin})
            assert answer.status_code == status
        body = {"model": "tiny", "prompt": [5], "max_tokens": 1}
        headers = {"Origin": "http://evil.example"}
        answer = await door.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 403


async def test_an_engine_that_hangs_hides_no_metrics(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        await door.complete()
        door.system.fleet._limits = door.system.fleet._limits.model_copy(
            update={"health_timeout_s": 60.0}
        )
        door.system.launcher.faults["decode-0"].hang = True
        for path in ("/metrics", "/server_info", "/dashboard/events?once=true"):
            answer = await asyncio.wait_for(door.client.get(path), 20)
            assert answer.status_code == 200, path
        door.system.launcher.faults["decode-0"].hang = False


async def test_whoever_waits_when_the_service_ends_has_an_answer(tiny_model: Path) -> None:
    async with front(tiny_model, latency=SLOW) as door:
        waits = asyncio.create_task(
            door.post("/v1/completions", model="tiny", prompt=[5] * 40, max_tokens=1500)
        )
        await door.running()
    answer = await asyncio.wait_for(waits, 5)
    assert answer.status_code == 500


async def test_an_open_dashboard_does_not_hold_the_service_up(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        async with over_http(door) as client:
            asked = client.stream("GET", "/dashboard/events")
            answer = await asked.__aenter__()
            await anext(answer.aiter_lines())
            begun = time.monotonic()
        assert time.monotonic() - begun < 5
        with contextlib.suppress(httpx.HTTPError):
            await asked.__aexit__(None, None, None)


async def test_a_fleet_that_fails_answers_with_an_error(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        for faults in door.system.launcher.faults.values():
            faults.fail_decodes = 100
        body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
        answer = await door.post("/v1/completions", **body)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == 500
        for faults in door.system.launcher.faults.values():
            faults.fail_decodes = 0
        assert (await door.complete())["choices"]
        await door.assert_idle()


async def test_the_dashboards_events_tell_engines_and_samples(chat_model: Path) -> None:
    async with front(chat_model, "dispatch.policy=static") as door:
        page = await door.client.get("/dashboard")
        assert page.headers["content-type"].startswith("text/html")
        assert "http://" not in page.text
        assert "https://" not in page.text, "it works without a network"
        await door.complete(prompt="w5 w6", n=2, temperature=1, ignore_eos=True)
        answer = await door.client.get("/dashboard/events", params={"once": True})
        event = json.loads(answer.text.removeprefix("data: "))
        assert [engine["name"] for engine in event["engines"]] == [
            "prefill-0",
            "decode-0",
            "decode-1",
        ]
        assert event["routes"] == {"split": 1, "shared": 1}
        assert [one["number"] for one in event["samples"]] == [1, 2]
        led = next(one for one in event["samples"] if one["route"] == "split")
        assert [span[:2] for span in led["spans"]] == [
            ["prefill-0", "prefill"],
            [led["decode"], "transfer"],
            [led["decode"], "decode"],
        ]
        for span in led["spans"]:
            assert span[2] <= span[3] <= event["now"]
        whole = (await door.client.get("/dashboard/samples/2")).json()
        assert whole["prompt"] == "w5w6"
        assert whole["text"].count("w") == 6
        assert whole["why"] == {"policy": "static"}
        assert (await door.client.get("/dashboard/samples/3")).status_code == 404


async def test_metrics_tell_what_was_done_and_by_whom(tiny_model: Path) -> None:
    async with front(tiny_model, "dispatch.policy=static") as door:
        await door.complete(n=4, temperature=1, max_tokens=6, ignore_eos=True)
        await door.system.fleet.counters()  # of one that dies, what was read last counts
        door.system.launcher.engines["decode-1"].kill()
        async with asyncio.timeout(10):
            while not door.system.fleet.members["decode-1"].restarts:
                await asyncio.sleep(0.02)
            while len(door.system.fleet.ready()) < 3:
                await asyncio.sleep(0.02)
        answer = await door.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        values = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
        assert values["splitroll_samples_total", "length", "split"] == 1
        assert values["splitroll_samples_total", "length", "shared"] == 3
        assert values["splitroll_tokens_total", "generated"] == 24
        assert values["splitroll_handoffs_total",] == 1
        assert values["splitroll_handles_cancelled_total",] == 0
        assert values["splitroll_sample_seconds_count", "decode"] == 4
        assert values["splitroll_prompt_tokens_total", "computed", "prefill", "prefill-0"] == 40
        moved = [
            v for k, v in values.items() if k[0].endswith("prompt_tokens_total") and "moved" in k
        ]
        assert sum(moved) == 40
        assert values["splitroll_engine_restarts_total", "decode-1"] == 1
        assert values["splitroll_engine_state", "decode-1", "ready"] == 1
        assert values["splitroll_weight_version",] == 0
        assert values["splitroll_engine_open_handles", "prefill", "prefill-0"] == 0
        grafana = (Path(__file__).parents[2] / "docs/grafana.json").read_text()
        names = {key[0] for key in values} | {"splitroll_weight_update_seconds"}
        assert set(re.findall(r"splitroll_\w+", grafana)) <= names
        own = ("vllm:num_requests_running", "decode", "decode-0", "simulated")
        assert values[own] == 0, "vLLM's own series have their engine and its role"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [5], "max_tokens": 3000}, 400),
        ({"prompt": [99999]}, 400),
        ({"prompt": [5], "temperature": -1}, 400),
        ({"prompt": [5], "model": "other"}, 404),
        ({}, 400),
    ],
)
async def test_a_users_error_is_a_users_error(
    tiny_model: Path, body: dict[str, Any], status: int
) -> None:
    async with front(tiny_model) as door:
        answer = await door.post("/v1/completions", **{"model": "tiny", **body})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
        assert door.system.dispatcher.stats.routes.total() == 0
        assert (await door.client.get("/health")).status_code == 200


async def test_a_stream_never_begins_with_an_error(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        body = {"model": "tiny", "prompt": [99999], "stream": True}
        answer = await door.post("/v1/completions", **body)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        assert "vocabulary" in answer.json()["error"]["message"]


def test_no_address_beyond_this_machine_without_both_keys() -> None:
    config = load_config(overrides=["serve.host=0.0.0.0"])
    both = {API_KEY: "a", ADMIN_KEY: "b"}
    assert check_serve(config, both) == Keys("a", "b")
    for name in both:
        with pytest.raises(ConfigError, match=name):
            check_serve(config, {k: v for k, v in both.items() if k != name})
    assert check_serve(load_config(), {}) == Keys()
    assert check_serve(load_config(), {API_KEY: "schlüssel"}).api == "schlüssel"
    with pytest.raises(ConfigError, match="another key"):
        check_serve(load_config(), {API_KEY: "a", ADMIN_KEY: "a"})


def test_a_port_that_is_taken_is_told_before_anything_starts() -> None:
    with listen(load_config(overrides=["serve.port=0"])) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            listen(load_config(overrides=[f"serve.port={port}"]))


@pytest.mark.parametrize("begun", ["nothing", "a stream", "a whole answer"])
async def test_what_is_under_way_when_the_service_ends_is_told_so(begun: str) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kind = b"text/event-stream" if begun == "a stream" else b"application/json"
        if begun != "nothing":
            headers = [(b"content-type", kind)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: {}", "more_body": True})
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    door = Door(app, Keys(), max_body_bytes=1024)
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    answering = asyncio.create_task(door(scope, receive, send))
    await asyncio.sleep(0.01)
    door.end()
    await asyncio.wait_for(answering, 1)
    if begun == "nothing":
        assert sent[0]["status"] == 503
        assert json.loads(sent[1]["body"])["error"]["message"] == "the service is ending"
    elif begun == "a stream":
        event = json.loads(sent[-1]["body"].removeprefix(b"data: "))
        assert event["error"]["code"] == 503
        assert sent[-1]["more_body"] is False
    else:
        assert len(sent) == 2, "half an answer cannot be told to be wrong: its connection is closed"


async def test_who_gives_up_a_request_itself_is_not_answered() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def silent(*_: Any) -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    door = Door(app, Keys(), max_body_bytes=1024)
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    answering = asyncio.create_task(door(scope, silent, silent))
    await asyncio.sleep(0.01)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering


async def test_a_rank_cannot_be_chosen_by_a_header(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        body = {"model": "tiny", "prompt": [5], "max_tokens": 1}
        headers = {"x-data-parallel-rank": "0"}
        answer = await door.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 400
        assert "x-data-parallel-rank" in answer.json()["error"]["message"]
