"""The static router mode: its rules, its command lines, and the engine that stands for a router,
over servers that are faked on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splitroll.config import load_config
from splitroll.config.router import router_arguments, router_problems
from splitroll.config.rules import check_config
from splitroll.config.schema import Config, Router
from splitroll.engines.protocol import (
    DecodeOutput,
    DecodeRequest,
    EngineCounters,
    EngineInfo,
    FirstToken,
    Tokens,
)
from splitroll.errors import (
    ConfigError,
    EngineDied,
    EngineStartError,
    InvalidRequest,
    LegError,
    ProofError,
)
from splitroll.model import ModelFacts
from splitroll.placement import Node, place
from splitroll.router.client import Client, Metrics, generate_body
from splitroll.router.command_lines import Server, router_argv
from splitroll.router.guard import Guard
from splitroll.router.launcher import ROUTER_SPEC, RouterLauncher, as_routed, reserved
from splitroll.router.routed_engine import RoutedEngine
from splitroll.serve.service import check_serve
from splitroll.types import Role, SamplingParams, VersionSpan
from splitroll.weights.offer import WeightOffer

FACTS = ModelFacts("m", "/models/m", 8, 4, 2048, 4096)
MODE = "router.mode=vllm-router"


def configured(*overrides: str) -> Config:
    return load_config(overrides=[MODE, *overrides])


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as failed:
        check_config(load_config(overrides=overrides), FACTS)
    return str(failed.value)


# -- rules -----------------------------------------------------------------------------------------


def test_a_router_needs_no_more_than_its_mode() -> None:
    check_config(configured(), FACTS)
    check_config(configured("router.url=http://127.0.0.1:30000"), FACTS)
    urls = (
        'router.prefill_urls=["http://h:1"]',
        'router.decode_urls=["http://h:2","http://[::1]:3"]',
    )
    check_config(configured(*urls), FACTS)
    plain = "disaggregation.enabled=false", 'router.worker_urls=["http://h:1"]'
    check_config(configured(*plain), FACTS)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["router.url=http://h:1"],
            "router.url: found 'http://h:1'; allowed: nothing, in this mode",
        ),
        ([MODE, "router.url=h:1"], "http://HOST:PORT"),
        ([MODE, "router.url=http://h:1/v1"], "http://HOST:PORT"),
        ([MODE, "router.url=http://h:99999"], "http://HOST:PORT"),
        ([MODE, "router.url=http://h:1", 'router.decode_urls=["http://h:2"]'], "with router.url"),
        ([MODE, 'router.worker_urls=["http://h:2"]'], "use router.prefill_urls and decode_urls"),
        (
            [MODE, "disaggregation.enabled=false", 'router.decode_urls=["http://h:2"]'],
            "use router.worker_urls",
        ),
        ([MODE, "weights.in_flight=keep"], "drain or abort, with router.mode"),
        ([MODE, "weights.transport=nccl", "weights.on_failure=fence"], "shm or disk"),
        ([MODE, "weights.verify=full"], "no checksums"),
        ([MODE, "router.arguments.policy=random"], "set router.policy"),
        ([MODE, "router.arguments.cache_treshold=0.1"], "did you mean cache_threshold?"),
        ([MODE, "router.policy=kv_aware"], "cache_aware"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(overrides: list[str], told: str) -> None:
    try:
        found = problems(*overrides)
    except ConfigError as exc:  # of the schema itself
        found = str(exc)
    assert told in found


def test_the_owned_arguments_are_arguments_of_the_router() -> None:
    from splitroll.config.router import _OWNED

    assert set(_OWNED) <= router_arguments()


def test_servers_given_by_url_take_no_devices() -> None:
    nodes = [Node("n", "a", (), (0, 1))]
    names = [spec.name for spec in place(configured(), nodes)]
    assert names == ["prefill-0", "decode-0", "decode-1"]
    outside = configured('router.decode_urls=["http://h:2"]')
    assert [spec.name for spec in place(outside, nodes)] == ["prefill-0"]
    assert place(configured("router.url=http://h:1"), nodes) == ()


def test_the_fleet_sees_one_engine() -> None:
    routed = as_routed(configured("colocated.replicas=3", "limits.max_restarts=4"))
    assert [spec.name for spec in place(routed, [Node("n", "a", (), (0, 1))])] == ["engine-0"]
    assert routed.dispatch.policy == "colocated"
    assert routed.limits.max_restarts == 0
    assert routed.router.mode == "vllm-router"


def test_a_router_is_not_served_a_second_time() -> None:
    with pytest.raises(ConfigError, match="address of its own"):
        check_serve(configured(), {})


def test_a_port_in_use_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"router.port: found {port} \(.*in use"),
            reserved(configured(f"router.port={port}")),
        ):
            pass
    with reserved(configured(f"router.port={port}")) as endpoint:
        assert endpoint is not None
        assert endpoint.port == port
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", endpoint.metrics_port))
    with reserved(configured("router.url=http://h:1")) as endpoint:
        assert endpoint is None


# -- command lines ---------------------------------------------------------------------------------


def options(argv: list[str]) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for word in argv:
        if word.startswith("--"):
            found.setdefault(word, []).append([])
        elif found:
            found[list(found)[-1]][-1].append(word)
    return found


def test_router_in_front_of_equals() -> None:
    servers = [Server(f"engine-{i}", Role.BOTH, f"http://h:{i}") for i in (1, 2)]
    found = options(router_argv(Router(), servers, 10, 11, "nixl"))
    assert found["--worker-urls"] == [["http://h:1", "http://h:2"]]
    assert found["--policy"] == [["cache_aware"]]
    assert (found["--host"], found["--port"]) == ([["127.0.0.1"]], [["10"]])
    assert found["--prometheus-host"] == [["127.0.0.1"]]
    assert found["--prometheus-port"] == [["11"]]
    assert "--vllm-pd-disaggregation" not in found


PD = [
    Server("prefill-0", Role.PREFILL, "http://h:1"),
    Server("decode-0", Role.DECODE, "http://h:2"),
    Server("decode-1", Role.DECODE, "http://h:3"),
]


def test_router_in_front_of_prefill_and_decode() -> None:
    found = options(router_argv(Router(policy="round_robin"), PD, 10, 11, "nixl"))
    assert found["--prefill"] == [["http://h:1"]], "with NIXL there is no bootstrap port"
    assert found["--decode"] == [["http://h:2"], ["http://h:3"]]
    assert found["--kv-connector"] == [["nixl"]]
    assert "--worker-urls" not in found


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("disaggregation.mixed=[{replicas: 1}]", "disaggregation.mixed"),
        ("disaggregation.transfer_backend=connector", "disaggregation.transfer_backend"),
    ],
)
def test_what_the_router_does_not_know_is_told(override: str, where: str) -> None:
    config = load_config(overrides=["router.mode=vllm-router", override])
    assert where in [problem.path for problem in router_problems(config)]


def test_mooncakes_prefill_servers_have_a_bootstrap_port() -> None:
    servers = [replace(PD[0], bootstrap_port=9000), *PD[1:]]
    found = options(router_argv(Router(), servers, 10, 11, "mooncake"))
    assert found["--prefill"] == [["http://h:1", "9000"]]
    assert found["--kv-connector"] == [["mooncake"]]


def test_the_routers_settings_are_passed_on() -> None:
    section = Router(
        prefill_policy="power_of_two",
        decode_policy="consistent_hash",
        health_interval_s=7,
        health_failures=2,
        circuit_breaker_failures=None,
        retries=2,
        arguments={"cache_threshold": 0.7, "log_level": "warning", "enable_igw": False},
    )
    found = options(router_argv(section, PD, 10, 11, "nixl"))
    assert found["--prefill-policy"] == [["power_of_two"]]
    assert found["--decode-policy"] == [["consistent_hash"]]
    assert found["--health-check-interval-secs"] == [["7"]]
    assert found["--health-failure-threshold"] == [["2"]]
    assert found["--disable-circuit-breaker"] == [[]]
    assert found["--retry-max-retries"] == [["3"]], "it counts the first try"
    assert found["--cache-threshold"] == [["0.7"]]
    assert found["--log-level"] == [["warning"]]
    plain = options(router_argv(Router(), PD, 10, 11, "nixl"))
    assert plain["--cb-failure-threshold"] == [["10"]]
    assert plain["--disable-retries"] == [[]]


def test_the_router_itself_takes_these_command_lines() -> None:
    """By its own parser, in this process."""
    launch = pytest.importorskip("vllm_router.launch_router")
    servers = [replace(PD[0], bootstrap_port=9000), *PD[1:]]
    argv = router_argv(Router(retries=1), servers, 10, 11, "mooncake")
    parsed = launch.parse_router_args(argv[3:])
    assert parsed.prefill_urls == [("http://h:1", 9000)]
    assert parsed.decode_urls == ["http://h:2", "http://h:3"]
    assert parsed.kv_connector == "mooncake"
    assert parsed.retry_max_retries == 2


# -- the engine ------------------------------------------------------------------------------------


class FakeServer:
    """A router and a vLLM server in one: counts up from a prompt's last token."""

    def __init__(self, computed: int = 0, pulled: int = 0) -> None:
        self.asked: list[tuple[str, Any, Any]] = []
        self.pieces: list[Any] | None = None
        self.status, self.text = 200, ""
        self.pause_s = 0.0
        self.healthy = True
        self.gone = 0
        self.computed, self.pulled = computed, pulled
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/{path}", self.control)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS.format(computed=self.computed, pulled=self.pulled))

    async def control(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.asked.append((request.path, dict(request.query), json.loads(text) if text else None))
        if self.status != 200:
            return web.Response(status=self.status, text=self.text)
        return web.json_response({"success": True, "results": [[0.1, {}]]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, request.headers, body))
        if self.status != 200:
            return web.Response(status=self.status, text=self.text)
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            for piece in self.pieces or pieces_of(body):
                await answer.write(f"data: {json.dumps(piece)}\n\n".encode())
                await asyncio.sleep(self.pause_s)
            await answer.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):  # the client went away
            self.gone += 1
            raise
        return answer


METRICS = """
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {computed}.0
vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {pulled}.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} 30.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{{engine="0",le="+Inf"}} 3.0
vllm:nixl_bytes_transferred_sum{{engine="0"}} 4096.0
vllm:nixl_bytes_transferred_count{{engine="0"}} 3.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="32",num_gpu_blocks="400",cache_dtype="auto"}} 1.0
"""


def choice(*token_ids: int, **more: Any) -> dict[str, Any]:
    content = [
        {"token_id": t, "logprob": -t / 100, "rank": 1, "top_logprobs": []} for t in token_ids
    ]
    return {
        "choices": [
            {"index": 0, "token_ids": [*token_ids], "logprobs": {"content": content}, **more}
        ]
    }


def pieces_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    first = body["token_ids"][-1] + 1
    sampling = body["sampling_params"]
    token_ids = range(first, first + sampling["max_tokens"])
    every = sampling["stream_interval"]
    parts = [token_ids[:1], *(token_ids[i : i + every] for i in range(1, len(token_ids), every))]
    pieces = [choice(*part) for part in parts]
    versions = [{"version": "default", "start": 0, "end": len(token_ids)}]
    pieces[-1]["choices"][0] |= {"finish_reason": "length", "weight_versions": versions}
    return pieces


def text_of(token_ids: Any) -> str:
    return "".join(chr(97 + (t - 1) % 26) for t in token_ids)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    async with TestServer(fake.app()) as served:
        fake.url = str(served.make_url("")).rstrip("/")
        yield fake


INFO = EngineInfo("router", Role.BOTH, "x", (1,), 400, 32, 0, 256, 2048, "float32", "", "")


@pytest.fixture
async def engine(server: FakeServer) -> AsyncIterator[RoutedEngine]:
    behind = [
        Server("prefill-0", Role.PREFILL, server.url),
        Server("decode-0", Role.DECODE, server.url),
    ]
    engine = RoutedEngine(INFO, server.url, behind, Client("router"), "m", text_of)
    yield engine
    await engine.close()


def asking(request_id: str = "r1", **changes: Any) -> DecodeRequest:
    sampling = SamplingParams(max_tokens=6, temperature=0.5, stop=("z",), ignore_eos=True)
    request = DecodeRequest(request_id, (1, 2, 3), sampling, seed=7, session="g1")
    return replace(request, **changes)


async def events(engine: RoutedEngine, request: DecodeRequest) -> list[Any]:
    return [event async for event in engine.decode(request)]


async def test_a_sample_comes_as_it_was_asked_for(engine: RoutedEngine, server: FakeServer) -> None:
    first, output = await events(engine, asking(cache_salt="s"))
    assert isinstance(first, FirstToken)
    assert isinstance(output, DecodeOutput)
    assert output.token_ids == (4, 5, 6, 7, 8, 9)
    assert output.logprobs == (-0.04, -0.05, -0.06, -0.07, -0.08, -0.09)
    assert output.text == "defghi"
    assert output.finish_reason == "length"
    assert output.weight_versions == (VersionSpan(0, 0, 6),)
    ((_, headers, body),) = server.asked
    assert headers["x-session-id"] == "g1"
    assert headers["x-request-id"] == "r1"
    assert body == generate_body(asking(cache_salt="s"), "m")
    sampling = body["sampling_params"]
    assert (sampling["seed"], sampling["stop"], sampling["max_tokens"]) == (7, ["z"], 6)
    assert body["cache_salt"] == "s"


async def test_a_stream_comes_in_pieces(engine: RoutedEngine) -> None:
    *some, output = await events(engine, asking(stream=2))
    pieces = [event for event in some if isinstance(event, Tokens)]
    assert [piece.token_ids for piece in pieces] == [(4,), (5, 6), (7, 8), (9,)]
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.last for piece in pieces] == [False, False, False, True]


async def test_a_stop_string_is_not_part_of_the_text(
    engine: RoutedEngine, server: FakeServer
) -> None:
    server.pieces = [choice(1, 2, 26, finish_reason="stop", stop_reason="z")]
    (output,) = await events(engine, asking())
    assert output.text == "ab"
    assert output.token_ids == (1, 2, 26)
    assert (output.finish_reason, output.stop_reason) == ("stop", "z")


async def test_an_aborted_sample_keeps_what_has_come(
    engine: RoutedEngine, server: FakeServer
) -> None:
    server.pause_s = 0.1
    await engine.set_weight_version(4)
    sampling = replace(asking().sampling, max_tokens=200)
    stream = engine.decode(asking(sampling=sampling, stream=1))
    got = [await anext(stream) for _ in range(4)]
    await engine.abort(["r1", "unknown"])
    *_, output = got + [event async for event in stream]
    assert output.finish_reason == "abort"
    assert output.token_ids[:3] == (4, 5, 6)
    assert len(output.token_ids) < 10
    assert output.weight_versions == (VersionSpan(4, 0, len(output.token_ids)),)
    async with asyncio.timeout(5):
        while not server.gone:
            await asyncio.sleep(0.01)


async def test_a_sample_that_is_aborted_before_it_began_ends(engine: RoutedEngine) -> None:
    running = asyncio.create_task(events(engine, asking()))
    await asyncio.sleep(0)
    await engine.abort(["r1"])
    (output,) = await asyncio.wait_for(running, 2)
    assert (output.finish_reason, output.token_ids) == ("abort", ())


async def test_a_sample_that_nobody_aborted_does_not_end_as_if(
    engine: RoutedEngine, server: FakeServer
) -> None:
    server.pause_s = 0.1
    sampling = replace(asking().sampling, max_tokens=200)
    running = asyncio.create_task(events(engine, asking(sampling=sampling, stream=1)))
    await asyncio.sleep(0.2)
    await engine.close()
    with pytest.raises(EngineDied, match="closed"):
        await asyncio.wait_for(running, 2)


@pytest.mark.parametrize(
    ("status", "text", "kind", "told"),
    [
        (400, '{"error": {"message": "too long"}}', InvalidRequest, "too long"),
        (422, '{"detail": "no such field"}', InvalidRequest, "no such field"),
        (500, "No available prefill servers", LegError, "HTTP 500: No available"),
        (404, "Not Found", LegError, "--enable-scale-out"),
        (503, "", LegError, r"HTTP 503: \(nothing\)"),
    ],
)
async def test_a_refusal_says_what_the_server_said(
    engine: RoutedEngine, server: FakeServer, status: int, text: str, kind: type, told: str
) -> None:
    server.status, server.text = status, text
    with pytest.raises(kind, match=told):
        await events(engine, asking())


@pytest.mark.parametrize(
    ("piece", "told"),
    [
        ({"error": {"message": "engine dead", "code": 500}}, "HTTP 500: engine dead"),
        (choice(finish_reason="error"), "ended the request with an error"),
        (
            {"choices": [{"token_ids": [1, 2], "logprobs": None, "finish_reason": "stop"}]},
            "2 tokens came with 0 log-probabilities",
        ),
        (choice(1), "without a finish reason"),
    ],
)
async def test_half_an_answer_is_an_error(
    engine: RoutedEngine, server: FakeServer, piece: Any, told: str
) -> None:
    server.pieces = [piece]
    with pytest.raises(LegError, match=told):
        await events(engine, asking())


async def test_a_dead_process_is_told_with_its_last_words(server: FakeServer) -> None:
    died = asyncio.get_running_loop().create_future()

    async def ended() -> str:
        return str(await died)

    engine = RoutedEngine(INFO, server.url, [], Client("router"), "m", text_of, [ended()])
    await engine.health()
    server.pause_s = 0.1
    sampling = replace(asking().sampling, max_tokens=200)
    running = asyncio.create_task(events(engine, asking(sampling=sampling, stream=1)))
    await asyncio.sleep(0.2)
    server.status, server.text = 500, "connection refused"
    other = asyncio.create_task(events(engine, asking("r2")))
    await asyncio.sleep(0.1)
    died.set_result("decode-0 ended with exit code -9; its log ends with: boom")
    with pytest.raises(EngineDied, match="exit code -9; its log ends with: boom"):
        await other
    with pytest.raises(EngineDied, match="boom"):
        await engine.health()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engine.close()


async def test_a_router_that_nobody_started_may_be_gone(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    engine = RoutedEngine(INFO, url, [], Client("router"), "m", text_of)
    with pytest.raises(LegError, match="no answer from http"):
        await events(engine, asking())
    with pytest.raises(LegError, match="no answer from http"):
        await engine.health()
    await engine.close()


async def test_a_router_whose_servers_are_unwell_is_waited_for(
    engine: RoutedEngine, server: FakeServer
) -> None:
    server.healthy = False
    waiting = asyncio.create_task(engine.health())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    server.healthy = True
    await asyncio.wait_for(waiting, 5)


async def test_control_calls_go_to_every_server(engine: RoutedEngine, server: FakeServer) -> None:
    await engine.pause(abort=True)
    await engine.load_weights(WeightOffer(folder="/w", names=("a",)))
    assert await engine.reset_prefix_cache(preempt=True)
    await engine.set_weight_version(3)
    await engine.resume()
    calls = [(path, query, body) for path, query, body in server.asked]
    assert len(calls) == 10, "two servers, five calls"
    assert calls[0] == ("/pause", {"mode": "abort"}, None)
    path, _, body = calls[2]
    assert (path, body["method"]) == ("/collective_rpc", "splitroll_load_weights")
    assert body["args"][0]["folder"] == "/w"
    assert calls[4][:2] == ("/reset_prefix_cache", {"reset_running_requests": "true"})
    assert calls[6] == ("/update_weight_version", {}, {"new_version": "3"})
    server.status, server.text = 500, '{"error": "parameter w0: wrong shape"}'
    with pytest.raises(LegError, match=r"prefill-0.*/collective_rpc.*parameter w0: wrong shape"):
        await engine.load_weights(WeightOffer(folder="/w"))


async def test_what_servers_did_is_their_own_account(
    engine: RoutedEngine, server: FakeServer
) -> None:
    server.computed, server.pulled = 100, 64
    total = await engine.counters()
    assert (total.computed_tokens, total.pulled_tokens) == (200, 128)
    assert total.generated_tokens == 30, "a prefill leg's token is thrown away"
    assert (total.kv_pulls, total.kv_bytes) == (6, 8192)
    assert (await engine.counters_by_server())["decode-0"].computed_tokens == 100
    load = await engine.load()
    assert (load.running, load.held_blocks) == (4, 200)
    metrics = Metrics(METRICS.format(computed=1, pulled=0))
    assert metrics.label("cache_config_info", "block_size") == 32
    assert metrics.label("cache_config_info", "absent") == 0


# -- the launcher, with everything given by URL ----------------------------------------------------


@pytest.fixture
def launcher(tiny_model: Path) -> Callable[..., RouterLauncher]:
    def make(*overrides: str) -> RouterLauncher:
        config = configured("engine.max_model_len=2048", *overrides)
        return RouterLauncher(config, replace(FACTS, path=str(tiny_model)), (), "f1", None)

    return make


async def test_a_router_that_runs_is_joined(
    server: FakeServer, launcher: Callable[..., RouterLauncher]
) -> None:
    joined = launcher(f"router.url={server.url}", "router.max_requests=5")
    engine = await joined.launch(ROUTER_SPEC, 0)
    try:
        assert engine.info.max_num_seqs == 5
        assert engine.info.max_model_len == 2048
        assert len(server.asked) == 1, "one request, to see that it answers"
        assert (await events(engine, asking()))[-1].finish_reason == "length"
        with pytest.raises(LegError, match="are not known"):
            await engine.load_weights(WeightOffer(folder="/w"))
    finally:
        await engine.close()


async def test_a_router_that_does_not_answer_is_told(
    server: FakeServer, unused_tcp_port: int, launcher: Callable[..., RouterLauncher]
) -> None:
    nowhere = f"router.url=http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(EngineStartError, match="no answer from"):
        await launcher(nowhere).launch(ROUTER_SPEC, 0)
    server.status, server.text = 500, "No available decode servers"
    with pytest.raises(EngineStartError, match="No available decode"):
        await launcher(f"router.url={server.url}").launch(ROUTER_SPEC, 0)


async def test_decode_that_computes_prompts_again_is_told(
    server: FakeServer, launcher: Callable[..., RouterLauncher]
) -> None:
    """The router itself says nothing of it."""

    behind = [Server("decode-0", Role.DECODE, server.url)]
    engine = RoutedEngine(INFO, server.url, behind, Client("router"), "m", text_of)
    original = engine.counters_by_server

    async def later() -> Any:
        counters = await original()
        server.computed += 80
        return counters

    engine.counters_by_server = later  # type: ignore[method-assign]
    with pytest.raises(ProofError, match=r"decode-0 computed 80 prompt tokens .* silently off"):
        await launcher("router.url=http://h:1")._prove(engine)
    await engine.close()


async def test_decode_that_tells_of_no_prompt_is_no_proof(
    server: FakeServer, launcher: Callable[..., RouterLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitroll.router.launcher._COUNTERS_LAG_S", 0.1)
    behind = [Server(f"decode-{i}", Role.DECODE, server.url) for i in range(2)]
    engine = RoutedEngine(INFO, server.url, behind, Client("router"), "m", text_of)
    with pytest.raises(ProofError, match="of any of 8 prompts"):
        await launcher("router.url=http://h:1")._prove(engine)
    prompts = [body["token_ids"] for path, _, body in server.asked if "generate" in path]
    assert len({prompt[0] for prompt in prompts}) == 8, "each goes where the router likes"
    await engine.close()


async def test_every_decode_server_is_proven(
    server: FakeServer, launcher: Callable[..., RouterLauncher]
) -> None:
    """Two of three take KV over; the third one's tokens must not be lost in the sum."""
    behind = [Server(f"decode-{i}", Role.DECODE, server.url) for i in range(3)]
    engine = RoutedEngine(INFO, server.url, behind, Client("router"), "m", text_of)
    asked = 0

    async def counters() -> dict[str, EngineCounters]:
        nonlocal asked
        asked += 80
        moved = EngineCounters(pulled_tokens=asked)
        computed = EngineCounters(computed_tokens=asked)
        return {"decode-0": moved, "decode-1": computed, "decode-2": moved}

    engine.counters_by_server = counters  # type: ignore[method-assign]
    with pytest.raises(ProofError, match="decode-1 computed"):
        await launcher("router.url=http://h:1")._prove(engine)
    await engine.close()


# -- the guard in front of servers of ours ---------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/inference/v1/generate", {}, 200),
        ("POST", "/v1/completions", {}, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/metrics", {}, 200),
        ("POST", "/v1/completions", {"origin": "http://evil"}, 403),
        ("POST", "/collective_rpc", {}, 403),
        ("POST", "/pause", {}, 403),
        ("POST", "/inference/v1/abort_requests", {}, 403),
        ("POST", "/update_weights", {"x-splitroll-token": "wrong"}, 403),
        ("POST", "/update_weights", {"x-splitroll-token": "secret"}, 200),
        ("POST", "/pause", {"x-splitroll-token": "secret", "origin": "http://evil"}, 403),
    ],
)
async def test_servers_are_changed_by_their_rollout_alone(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    monkeypatch.setenv("SPLITROLL_SERVER_TOKEN", "secret")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    transport = httpx.ASGITransport(app=Guard(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
        assert (await client.request(method, path, headers=headers)).status_code == status
    monkeypatch.delenv("SPLITROLL_SERVER_TOKEN")
    transport = httpx.ASGITransport(app=Guard(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
        answer = await client.post("/pause", headers={"x-splitroll-token": ""})
        assert answer.status_code == 403, "no token opens nothing"
