"""What the front door adds to a request, against a plain vLLM server with the same arguments:

    python -m splitroll.bench.front --rounds 5

Both have one engine on the same core, and are asked in turn, one request at a time and 32 at once,
by a client in a process of its own. The report has what each process computed for a request too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from splitroll.bench.stock_servers import stock_servers
from splitroll.config import load_checked
from splitroll.rollout import Rollout
from splitroll.serve.door import Keys
from splitroll.serve.loop import run
from splitroll.serve.service import listen, open_service, serve

CONCURRENCIES = (1, 32)
_REQUESTS = {1: 24, 32: 160}
_PROMPT_TOKENS, _TOKENS = 64, 16
_OVERRIDES = ("disaggregation.enabled=false", "colocated.replicas=1", "serve.port=0")


async def measure(
    source: str | None, overrides: Sequence[str], rounds: int
) -> dict[str, dict[str, Any]]:
    """Return, by concurrency, milliseconds per request of both, what the front door adds, and what
    the processes of both computed."""
    config, facts = load_checked(source, [*_OVERRIDES, *overrides])
    core = sorted(os.sched_getaffinity(0))[:1]
    taken: dict[tuple[str, int], list[list[float]]] = {}
    spent: dict[tuple[str, int], list[dict[str, float]]] = {}
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    with (
        tempfile.TemporaryDirectory(prefix="splitroll-front-") as logs,
        listen(config) as sock,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as clients,
    ):
        async with (
            stock_servers(config, facts, core, Path(logs)) as (plain,),
            Rollout.open(config) as rollout,
            open_service(rollout, Keys()) as app,
        ):
            serving = asyncio.create_task(serve(app, sock, stopped))
            try:
                urls = {
                    "front": f"http://127.0.0.1:{sock.getsockname()[1]}",
                    "plain": plain.url,
                }
                for index in range(rounds + 1):
                    for concurrency in CONCURRENCIES:
                        for name in sorted(urls, reverse=bool(index % 2)):
                            asking = (urls[name], facts.name, concurrency, _seed(index, name))
                            parts = _parts(rollout, plain.pid, name)
                            before = _computed(parts)
                            seconds, client_s = await loop.run_in_executor(clients, _asked, *asking)
                            after = _computed(parts)
                            if index:  # the first round warms up
                                taken.setdefault((name, concurrency), []).append(seconds)
                                used = {part: after[part] - before[part] for part in parts}
                                used["client"] = client_s
                                spent.setdefault((name, concurrency), []).append(used)
            finally:
                stopped.set()
                await serving
    return {
        str(c): {
            **_compare(taken["front", c], taken["plain", c]),
            "computed_ms": {
                name: _per_request(spent[name, c], _REQUESTS[c]) for name in ("front", "plain")
            },
        }
        for c in CONCURRENCIES
    }


def _seed(index: int, name: str) -> int:
    return 2 * index + (name == "front")


def _parts(rollout: Rollout, plain: int, name: str) -> dict[str, list[int]]:
    """Return the processes of one side by what they do."""
    if name == "plain":
        return {"server": [plain], "engine": _below(plain)}
    (engine,) = rollout.fleet.ready()
    actor, *core = engine.info.pids
    clients = [child.pid for child in multiprocessing.active_children()]
    named = {os.getpid(), actor, *core, plain, *_below(plain), *clients}
    rest = [pid for pid in _below(os.getpid()) if pid not in named]
    return {"front door": [os.getpid()], "actor": [actor], "engine": core, "Ray": rest}


def _below(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _computed(parts: dict[str, list[int]]) -> dict[str, float]:
    """Return the CPU seconds that each part has used."""
    found = dict.fromkeys(parts, 0.0)
    for part, pids in parts.items():
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                times = psutil.Process(pid).cpu_times()
                found[part] += times.user + times.system
    return found


def _per_request(rounds: Sequence[dict[str, float]], requests: int) -> dict[str, float]:
    """Return medians over rounds, in milliseconds per request."""
    return {
        part: round(1e3 * statistics.median(one[part] for one in rounds) / requests, 2)
        for part in rounds[0]
    }


def _asked(url: str, model: str, concurrency: int, seed: int) -> tuple[list[float], float]:
    """Runs in a process of its own: who asks takes as much time as who answers.

    Returns:
        Seconds of each request, and CPU seconds of all of them here.
    """
    begun = time.process_time()
    return asyncio.run(_ask(url, model, concurrency, seed)), time.process_time() - begun


async def _ask(url: str, model: str, concurrency: int, seed: int) -> list[float]:
    """Return how long each of some requests took, with prompts that nobody has seen."""
    taken: list[float] = []
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        seats = asyncio.Semaphore(concurrency)

        async def one(i: int) -> None:
            start = 10_007 * seed + 131 * i + 17 * concurrency
            body = {
                "model": model,
                "prompt": [100 + (start + 7 * j) % 3900 for j in range(_PROMPT_TOKENS)],
                "max_tokens": _TOKENS,
                "ignore_eos": True,
                "temperature": 0,
            }
            async with seats:
                begun = time.perf_counter()
                answer = await client.post("/v1/completions", json=body)
                taken.append(time.perf_counter() - begun)
            answer.raise_for_status()

        await asyncio.gather(*(one(i) for i in range(_REQUESTS[concurrency])))
    return taken


def _compare(front: list[list[float]], plain: list[list[float]]) -> dict[str, Any]:
    """Return medians over rounds of each round's median and 99th percentile, in milliseconds."""
    found: dict[str, Any] = {}
    for name, share in (("median", 0.5), ("p99", 0.99)):
        ours = [_quantile(one, share) for one in front]
        theirs = [_quantile(one, share) for one in plain]
        added = [a - b for a, b in zip(ours, theirs, strict=True)]
        found[name] = {
            "front_ms": round(1e3 * statistics.median(ours), 1),
            "plain_ms": round(1e3 * statistics.median(theirs), 1),
            "added_ms": round(1e3 * statistics.median(added), 1),
            "added_ms_of_rounds": [round(1e3 * value, 1) for value in added],
        }
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="PATH=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found = run(measure(args.config, args.overrides, args.rounds))
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
