"""The stock servers' command lines, and the client that drives them; no vLLM is started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splitroll.bench.stock_client import completion_body, drive
from splitroll.bench.stock_servers import server_arguments
from splitroll.bench.workloads import EpisodeJob, GroupJob, Load, Turn
from splitroll.config import load_config
from splitroll.engines.arguments import EngineArguments
from splitroll.errors import FleetError, GroupFailed
from splitroll.model import ModelFacts
from splitroll.ports import held_ports
from splitroll.router.command_lines import server_argv
from splitroll.router.processes import Command, running
from splitroll.router.tied import tied

FACTS = ModelFacts("m", "/models/m", 8, 4, 2048, 4096)
SPLIT = ("disaggregation.prefill_replicas=1", "disaggregation.decode_replicas=1")
COLOCATED = ("disaggregation.enabled=false", "colocated.replicas=2")


def planned(*overrides: str) -> dict[str, EngineArguments]:
    found = server_arguments(load_config(overrides=overrides), FACTS, (4, 5))
    return {one.name: one for one in found}


def options(argv: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            found[word] = []
        elif found:
            found[list(found)[-1]].append(word)
    return found


# -- command lines ---------------------------------------------------------------------------------


def test_servers_get_our_engines_arguments() -> None:
    one = planned(*COLOCATED, "engine.dtype=bfloat16", "engine.max_model_len=4096")["engine-1"]
    argv = server_argv(one, "m", 8123)
    assert argv[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    found = options(argv)
    expected = {
        "--host": "127.0.0.1",
        "--port": "8123",
        "--served-model-name": "m",
        "--model": "/models/m",
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--block-size": "32",
        "--kv-cache-memory-bytes": str(512 * 1024**2),
        "--max-num-seqs": "64",
        "--distributed-executor-backend": "uni",
        "--logprobs-mode": "processed_logprobs",
    }
    assert {name: found[name] for name in expected} == {k: [v] for k, v in expected.items()}
    assert found["--enforce-eager"] == found["--enable-prefix-caching"] == []
    assert not {"--weight-transfer-config", "--kv-transfer-config"} & set(found)
    assert not any("disable-log-stats" in name for name in found)


def test_servers_get_our_engines_environment_and_a_core_each() -> None:
    for fleet in (SPLIT, COLOCATED):
        found = planned(*fleet)
        assert [one.cores for one in found.values()] == [(4,), (5,)]
        for name, one in found.items():
            assert one.env["SPLITROLL_ENGINE"] == name
            assert one.env["OMP_NUM_THREADS"] == "1"
            assert one.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_split_servers_are_connected_by_nixl() -> None:
    found = planned(*SPLIT)
    configs = {
        name: json.loads(options(server_argv(one, "m", 1))["--kv-transfer-config"][0])
        for name, one in found.items()
    }
    assert {name: one["kv_role"] for name, one in configs.items()} == {
        "prefill-0": "kv_producer",
        "decode-0": "kv_consumer",
    }
    assert {one["kv_connector"] for one in configs.values()} == {"NixlConnector"}
    assert len({one["engine_id"] for one in configs.values()}) == 2
    assert all(one.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1" for one in found.values())


def test_arguments_of_every_kind_become_options() -> None:
    overrides = ("engine.enable_prefix_caching=false", "engine.max_model_len=null")
    one = planned(*COLOCATED, *overrides, "engine.disable_log_stats=true")["engine-0"]
    found = options(server_argv(one, "m", 1))
    assert found["--no-enable-prefix-caching"] == found["--disable-log-stats"] == []
    assert "--max-model-len" not in found


# -- processes -------------------------------------------------------------------------------------


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def file_server(port: int, folder: Path, name: str = "files") -> Command:
    argv = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    return Command(name, [*argv, "-d", str(folder)], f"http://127.0.0.1:{port}", folder / name)


def python(code: str, folder: Path) -> Command:
    return Command("dummy", [sys.executable, "-c", code], "http://127.0.0.1:9", folder / "log")


async def test_who_ended_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with held_ports(1) as (port,):
        async with running([file_server(port, tmp_path)], timeout_s=20) as (child,):
            ended = asyncio.create_task(child.ended())
            os.kill(child.pid, signal.SIGKILL)
            told = await asyncio.wait_for(ended, 5)
    assert told.startswith("files ended with exit code -9; its log ends with:\n")
    assert "/ HTTP" in told


def test_a_port_of_ones_choice_is_held_or_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"), held_ports(1, first=port):
            pass
    with held_ports(1, first=port) as (again,):
        assert again == port


def test_a_held_port_can_be_bound_by_its_owner_alone() -> None:
    with held_ports(2) as (port, other):
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):  # sets SO_REUSEADDR
            socket.create_connection(("127.0.0.1", port)).close()


async def test_servers_run_until_the_end_of_the_block(tmp_path: Path) -> None:
    with held_ports(2) as ports:
        commands = [file_server(port, tmp_path, f"files-{port}") for port in ports]
        async with running(commands, timeout_s=20) as children:
            pids = [child.pid for child in children]
            assert not any(map(gone, pids))
        assert all(map(gone, pids))


async def test_a_process_stays_on_its_core(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os; print(os.sched_getaffinity(0)); raise SystemExit(1)"
    argv = [sys.executable, "-c", code]
    command = Command("dummy", argv, "http://127.0.0.1:9", tmp_path / "log", cores=(core,))
    with pytest.raises(FleetError, match=rf"\{{{core}\}}"):
        async with running([command], timeout_s=20):
            pass


async def test_a_process_that_ends_at_start_tells_its_last_lines_and_ends_the_others(
    tmp_path: Path,
) -> None:
    code = "import time; print(*range(100), sep='\\n', flush=True); time.sleep(1); exit(3)"
    with held_ports(1) as (port,):
        commands = [file_server(port, tmp_path), python(code, tmp_path)]
        with pytest.raises(FleetError) as failed:
            async with running(commands, timeout_s=20):
                pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    head, *told = str(failed.value).splitlines()
    assert head == "dummy did not start: it ended with exit code 3; its log ends with:"
    assert told == [str(i) for i in range(80, 100)]


async def test_a_process_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(FleetError, match=r"not ready in 1 s"):
        async with running([python(code, tmp_path)], timeout_s=1):
            pass
    assert gone(int((tmp_path / "log").read_text()))


async def test_a_process_that_ignores_the_signal_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitroll.router.processes._END_TIMEOUT_S", 0.2)
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork();"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    with pytest.raises(FleetError, match="not ready"):
        async with running([python(code, tmp_path)], timeout_s=1):
            pass
    pids = [int(pid) for pid in (tmp_path / "log").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: all(map(gone, pids)))


def test_no_process_outlives_a_parent_that_dies_hard() -> None:
    code = (
        "import os, subprocess, sys; from splitroll.router.tied import tied;"
        "child = subprocess.Popen(tied(['sleep', '60'], ()));"
        "print(child.pid, flush=True); sys.stdin.read(); os._exit(1)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until(lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    assert not gone(pid)
    parent.stdin.close()
    parent.wait(20)
    parent.stdout.close()
    wait_until(lambda: gone(pid))


def test_a_process_whose_parent_is_gone_does_not_begin() -> None:
    argv = tied(["echo", "begun"], ())
    argv[argv.index(str(os.getpid()))] = "1"
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (1, "")


# -- the client ------------------------------------------------------------------------------------


class FakeServer:
    """Answers completions with a running count of tokens, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.running = self.most_running = 0
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.headers["x-session-id"], body))
        first = 1000 * len(self.asked)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.02)
        self.running -= 1
        length = body["max_tokens"]
        choice = {
            "token_ids": list(range(first, first + length)),
            "logprobs": {"token_logprobs": [-1.0] * length},
        }
        changed = self.change({"choices": [choice]})
        return changed if isinstance(changed, web.Response) else web.json_response(changed)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.answer)
    async with TestServer(app) as served:
        fake.url = str(served.make_url("/"))
        yield fake


GROUPS = Load((GroupJob("g0", (1, 2, 3), (4, 5)), GroupJob("g1", (7,), (6,))))
EPISODE = Load(episodes=(EpisodeJob("e0", (Turn((1, 2), 3), Turn((8, 9), 2), Turn((5,), 1))),))


def test_a_request_asks_for_exactly_so_many_tokens() -> None:
    assert completion_body("m", (1, 2), 5, 99) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 99,
        "logprobs": 0,
        "return_token_ids": True,
    }


async def test_every_sample_is_a_request_of_its_own(server: FakeServer) -> None:
    driven = await drive(server.url, GROUPS, "m", concurrency=8, seed=9)
    asked = [(session, body["prompt"], body["max_tokens"]) for session, body in server.asked]
    assert sorted(asked) == [("9/g0", [1, 2, 3], 4), ("9/g0", [1, 2, 3], 5), ("9/g1", [7], 6)]
    assert server.most_running == 3
    assert len({body["seed"] for _, body in server.asked}) == 3
    served = {one.id: one for one in driven.timeline}
    assert {name: one.tokens for name, one in served.items()} == {"g0/0": 4, "g0/1": 5, "g1/0": 6}
    for one in driven.timeline:
        assert 0 <= one.start_s < one.end_s <= driven.makespan_s


async def test_seeds_are_the_same_every_time(server: FakeServer) -> None:
    for _ in range(2):
        await drive(server.url, GROUPS, "m", concurrency=1, seed=3)
    seeds = [body["seed"] for _, body in server.asked]
    assert seeds[:3] == seeds[3:]


async def test_an_episode_goes_on_from_all_tokens_before(server: FakeServer) -> None:
    driven = await drive(server.url, EPISODE, "m", concurrency=8)
    assert [body["prompt"] for _, body in server.asked] == [
        [1, 2],
        [1, 2, 1000, 1001, 1002, 8, 9],
        [1, 2, 1000, 1001, 1002, 8, 9, 2000, 2001, 5],
    ]
    assert {session for session, _ in server.asked} == {"0/e0"}
    assert [one.id for one in driven.timeline] == ["e0/0", "e0/1", "e0/2"]
    assert server.most_running == 1


async def test_no_more_requests_at_once_than_asked_for(server: FakeServer) -> None:
    load = Load((GroupJob("g", (1,), (2,) * 9),))
    await drive(server.url, load, "m", concurrency=4)
    assert len(server.asked) == 9
    assert server.most_running == 4


def _drop(key: str) -> Callable[[dict[str, Any]], Any]:
    def change(answer: dict[str, Any]) -> Any:
        answer["choices"][0][key] = answer["choices"][0][key][:-1]
        return answer

    return change


def _without_logprobs(answer: dict[str, Any]) -> Any:
    answer["choices"][0]["logprobs"] = None
    return answer


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_drop("token_ids"), "3 tokens and 4 log-probabilities for 4"),
        (_without_logprobs, "not a completion"),
        (lambda answer: {"choices": []}, "not enough values"),
        (lambda answer: web.Response(status=503, text="no worker"), "HTTP 503: no worker"),
        (lambda answer: web.Response(text="hello"), "unexpected mimetype"),
    ],
)
async def test_a_wrong_answer_is_an_error(
    server: FakeServer, change: Callable[[dict[str, Any]], Any], told: str
) -> None:
    server.change = change
    load = Load((GroupJob("g0", (1,), (4,)),))
    with pytest.raises(GroupFailed, match=f"g0 failed: request 0: .*{told}"):
        await drive(server.url, load, "m", concurrency=8)


async def test_a_server_that_is_not_there_is_an_error() -> None:
    with held_ports(1) as (port,), pytest.raises(GroupFailed, match="Cannot connect"):
        await drive(f"http://127.0.0.1:{port}", GROUPS, "m", concurrency=8)


async def test_an_answer_that_takes_too_long_is_an_error(server: FakeServer) -> None:
    with pytest.raises(GroupFailed, match="g"):
        await drive(server.url, GROUPS, "m", concurrency=8, timeout_s=0.005)


async def test_the_first_error_ends_the_load(server: FakeServer) -> None:
    server.change = lambda answer: web.Response(status=500)
    load = Load((GroupJob("g", (1,), (2,) * 50),))
    with contextlib.suppress(GroupFailed):
        await drive(server.url, load, "m", concurrency=1)
    assert len(server.asked) <= 2
