"""The front door over a simulated fleet, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import SimulatedSystem, simulated
from splitroll.config import load_checked, load_config
from splitroll.rollout import Rollout
from splitroll.serve.door import Door, Keys
from splitroll.serve.service import listen, open_service, serve

WARNINGS = [
    # vLLM, and what it imports, warn about themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

ADAPTIVE = ("dispatch.policy=adaptive", "dispatch.roles=elastic")


@dataclass
class Front:
    """A service over a simulated fleet, and a client of it."""

    system: SimulatedSystem
    rollout: Rollout
    client: httpx.AsyncClient
    app: Door

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        body = {"prompt": list(range(5, 45)), "max_tokens": 6, "temperature": 0, **body}
        answer = await self.post("/v1/completions", model="tiny", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        body = {"model": "tiny", "temperature": 0, "stream": True, **body}
        async with self.client.stream("POST", path, json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    async def running(self, samples: int = 1) -> None:
        """Return when engines run so many samples."""
        async with asyncio.timeout(20):
            while samples > sum([(await one.load()).running for one in self.system.fleet.ready()]):
                await asyncio.sleep(0.001)

    async def assert_idle(self) -> None:
        assert self.system.dispatcher.load == {}
        await self.system.handoff.settled()
        async with asyncio.timeout(5):
            while set((await self.system.held_blocks()).values()) != {0}:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def front(
    model: Path, *overrides: str, keys: Keys | None = None, **options: Any
) -> AsyncIterator[Front]:
    tree = {
        "model": str(model),
        "engine": {"dtype": "float32", "max_model_len": 2048},
    }
    config, facts = load_checked(tree, [*ADAPTIVE, *overrides])
    fleets = [one for one in overrides if one.startswith(("dispatch.", "weights.", "limits."))]
    async with simulated(*ADAPTIVE, *fleets, **options) as system:
        rollout = Rollout(
            config, facts, system.fleet, system.dispatcher, system.updater, system.handoff
        )
        async with open_service(rollout, keys or Keys()) as app:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
                yield Front(system, rollout, client, app)


@contextlib.asynccontextmanager
async def over_http(door: Front) -> AsyncIterator[httpx.AsyncClient]:
    """Serve on a loopback socket."""
    config = load_config(overrides=["serve.port=0"])
    stopped = asyncio.Event()
    with listen(config) as sock:
        running = asyncio.create_task(serve(door.app, sock, stopped))
        port = sock.getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                yield client
        finally:
            stopped.set()
            await asyncio.wait_for(running, 15)
