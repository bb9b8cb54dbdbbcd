"""Starts what a static router needs, in vime's order: the router's endpoint is reserved first, then
all servers start at once, and the router last, with their addresses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from splitroll.config.rules import max_model_len
from splitroll.config.schema import Config
from splitroll.engines.arguments import engine_arguments
from splitroll.engines.protocol import DecodeOutput, DecodeRequest, EngineCounters, EngineInfo
from splitroll.errors import (
    ConfigError,
    EngineStartError,
    FleetError,
    LegError,
    Problem,
    ProofError,
    SplitrollError,
)
from splitroll.fleet.prove import proof_prompt
from splitroll.handoff.backend import make_backend
from splitroll.model import ModelFacts
from splitroll.placement import LOOPBACK, EngineSpec, actor_name, engine_id
from splitroll.ports import held_ports
from splitroll.prompts import Tokenizer
from splitroll.router.client import Client, Metrics, metrics_of
from splitroll.router.command_lines import Server, router_argv
from splitroll.router.processes import Child, Command, all_of, running
from splitroll.router.ray_server import RayServer, ServerPlan
from splitroll.router.routed_engine import ROUTER, RoutedEngine
from splitroll.types import Role, SamplingParams

log = logging.getLogger(__name__)

ROUTER_SPEC = EngineSpec(ROUTER, Role.BOTH, "local", LOOPBACK, 1, (), (), 1)
"""The one engine that the fleet sees."""

_VOCAB_FOR_PROOF = 4096
_PROOF_TOKENS = 4
_PROOF_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 10.0
_PROOFS = 4
"""Prompts per decode server that are sent at most, until each was given one."""
_FIRST_TOKEN = 100
_COUNTERS_LAG_S = 5.0
_COUNTERS_POLL_S = 0.1
_BLOCK_SIZE = 16
"""Where no server tells its own."""


def is_routed(config: Config) -> bool:
    return config.router.mode == "vllm-router"


def as_routed(config: Config) -> Config:
    """Return the configuration of the fleet that has the router for its only engine."""
    sections = {
        "disaggregation": config.disaggregation.model_copy(update={"enabled": False}),
        "colocated": config.colocated.model_copy(update={"replicas": 1}),
        "dispatch": config.dispatch.model_copy(
            update={
                "policy": "colocated",
                "segment_tokens": None,
                "decode_engines_per_group": None,
            }
        ),
        # Nothing here is restarted: the router knows its servers once and for all.
        "limits": config.limits.model_copy(update={"max_restarts": 0}),
    }
    return config.model_copy(update=sections)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the router is to listen, held until it does."""

    port: int
    metrics_port: int


@contextlib.contextmanager
def reserved(config: Config) -> Iterator[Endpoint | None]:
    """Hold the router's ports; None where none is to be started.

    Raises:
        ConfigError: when somebody else has its port.
    """
    section = config.router
    if not is_routed(config) or section.url is not None:
        yield None
        return
    holding = held_ports(2, first=section.port)
    try:
        port, metrics_port = holding.__enter__()
    except OSError as exc:
        found = f"{section.port} ({exc.strerror})"
        hint = "stop who has it, choose another, or 0 for any"
        raise ConfigError([Problem("router.port", found, "a free port", hint)]) from exc
    try:
        yield Endpoint(port, metrics_port)
    finally:
        holding.__exit__(None, None, None)


class RouterLauncher:
    """Launches the one engine of a routed fleet: servers and router, or what is given by URL.

    Args:
        config: as the user wrote it.
        specs: of the servers to start.

    Attributes:
        folder: where they keep their files, logs included; removed by `tidy`.
    """

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        specs: Sequence[EngineSpec],
        fleet_id: str,
        endpoint: Endpoint | None,
    ) -> None:
        self.fleet_id = fleet_id
        self.folder = Path(tempfile.gettempdir()) / f"splitroll-{fleet_id}"
        self._config = config
        self._facts = facts
        self._specs = tuple(specs)
        self._endpoint = endpoint
        self._token = secrets.token_hex(16)

    def tidy(self) -> None:
        """Remove the files on this machine, after an uneventful life."""
        shutil.rmtree(self.folder, ignore_errors=True)

    async def relocate(self, spec: EngineSpec, others: Sequence[EngineSpec]) -> EngineSpec:
        """See `fleet.Launcher`. The router is on this machine, and is never started again."""
        return spec

    async def launch(self, spec: EngineSpec, generation: int) -> RoutedEngine:
        """Start all, wait until the router answers, and see KV move.

        Raises:
            EngineStartError: naming the server, or the router, with its last lines.
            ProofError: decode computes prompts again that prefill has computed.
        """
        stack = contextlib.AsyncExitStack()
        try:
            engine = await self._assemble(stack, generation)
        except BaseException:
            await stack.aclose()
            raise
        try:
            await self._prove(engine)
            await engine.count_from_now()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _assemble(self, stack: contextlib.AsyncExitStack, generation: int) -> RoutedEngine:
        begun = time.monotonic()
        client = Client(ROUTER, self._token)
        stack.push_async_callback(client.close)
        started: list[RayServer] = []
        stack.push_async_callback(_close_all, started)
        await all_of(self._start_server(spec, generation, started) for spec in self._specs)
        started.sort(key=lambda one: [spec.name for spec in self._specs].index(one.server.name))
        servers = [*(one.server for one in started), *self._outside()]
        metrics = await self._metrics(client, servers)  # who does not answer is told by name
        ready = time.monotonic()
        url, router = await self._start_router(stack, servers)
        deaths = [one.ended() for one in started]
        pids = [one.pid for one in started]
        if router is not None:
            deaths.append(router.ended())
            pids.insert(0, router.pid)
        start_s = {"servers": ready - begun, "router": time.monotonic() - ready}
        return RoutedEngine(
            self._info(pids, metrics, start_s),
            url,
            servers,
            client,
            self._facts.name,
            Tokenizer(self._facts.path).decode,
            deaths,
            on_close=stack.aclose,
        )

    async def _start_server(
        self, spec: EngineSpec, generation: int, started: list[RayServer]
    ) -> None:
        section = self._config.disaggregation
        transfer = None
        if section.enabled:
            transfer = make_backend(section).transfer(
                spec,
                engine_id=engine_id(self.fleet_id, spec.name, generation),
                lease_s=section.kv_lease_s,
                elastic=False,
            )
        plan = ServerPlan(
            engine_arguments(self._config, self._facts, spec, transfer),
            self._facts.name,
            spec.host,
            str(self.folder / f"{spec.name}-{generation}.log"),
            self._config.limits.start_timeout_s,
            self._token,
        )
        name = actor_name(self.fleet_id, spec.name, generation)
        started.append(await RayServer.launch(spec, name, plan))

    def _outside(self) -> list[Server]:
        """Return the servers that were given by URL."""
        section = self._config.router
        given = (
            ("prefill", Role.PREFILL, section.prefill_urls),
            ("decode", Role.DECODE, section.decode_urls),
            ("engine", Role.BOTH, section.worker_urls),
        )
        return [
            Server(f"{name}-url-{index}", role, url.rstrip("/"))
            for name, role, urls in given
            for index, url in enumerate(urls)
        ]

    async def _start_router(
        self, stack: contextlib.AsyncExitStack, servers: Sequence[Server]
    ) -> tuple[str, Child | None]:
        """Return the router's URL, and its process unless it ran before.

        Raises:
            EngineStartError: with its last lines.
        """
        section = self._config.router
        if section.url is not None:
            return section.url.rstrip("/"), None
        assert self._endpoint is not None, "`reserved` holds it wherever a router is started"
        port, metrics_port = self._endpoint.port, self._endpoint.metrics_port
        connector = self._config.disaggregation.transfer_backend
        command = Command(
            name=ROUTER,
            argv=router_argv(section, servers, port, metrics_port, connector),
            ready_url=f"http://{LOOPBACK}:{port}/health",
            log=self.folder / f"{ROUTER}.log",
            env={"NO_PROXY": "*"},
        )
        try:
            serving = running([command], timeout_s=section.start_timeout_s)
            (child,) = await stack.enter_async_context(serving)
        except FleetError as exc:
            raise EngineStartError(ROUTER, str(exc)) from exc
        return f"http://{LOOPBACK}:{port}", child

    async def _metrics(self, client: Client, servers: Sequence[Server]) -> dict[str, Metrics]:
        """Return what servers tell of themselves.

        Raises:
            EngineStartError: one that was given by URL does not answer.
        """
        found: dict[str, Metrics] = {}
        for server in servers:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    found |= await metrics_of(client, [server])
            except (aiohttp.ClientError, OSError, TimeoutError, SplitrollError) as exc:
                cause = f"{server.url}/metrics does not answer: {exc}"
                raise EngineStartError(server.name, cause) from exc
        return found

    def _info(
        self, pids: Sequence[int], metrics: Mapping[str, Metrics], start_s: Mapping[str, float]
    ) -> EngineInfo:
        sizes = [one.label("cache_config_info", "block_size") for one in metrics.values()]
        block_size = max([size for size in sizes if size], default=_BLOCK_SIZE)
        blocks = sum(one.label("cache_config_info", "num_gpu_blocks") for one in metrics.values())
        longest = max_model_len(self._config, self._facts)
        most = self._config.router.max_requests
        return EngineInfo(
            name=ROUTER,
            role=Role.BOTH,
            engine_id=f"{self.fleet_id}-{ROUTER}",
            pids=(os.getpid(), *pids),
            # Of a router that was joined nothing is known: it queues what its servers cannot take.
            num_blocks=blocks or most * math.ceil(longest / block_size),
            block_size=block_size,
            block_bytes=0,
            max_num_seqs=most,
            max_model_len=longest,
            dtype=str(self._config.engine.get("dtype", "auto")),
            kv_dtype="",
            log_path=str(self.folder / f"{ROUTER}.log"),
            start_s=start_s,
            world_size=max(1, sum(spec.world_size for spec in self._specs)),
        )

    async def _prove(self, engine: RoutedEngine) -> None:
        """Ask for a few tokens, and see on every decode server that it took KV over: the router
        says nothing when decode computes prompts that prefill has computed.

        Raises:
            EngineStartError: nothing comes.
            ProofError: a decode server computed them, or tells of none.
        """
        decoders = {server.name for server in engine.servers if server.role is Role.DECODE}
        block_size, longest = engine.info.block_size, engine.info.max_model_len
        prompt = proof_prompt(_VOCAB_FOR_PROOF, block_size, longest)
        before = await engine.counters_by_server()
        reached: dict[str, EngineCounters] = {}
        asked = 0
        try:
            async with asyncio.timeout(_PROOF_TIMEOUT_S):
                # Which server a prompt goes to is the router's choice: some more may be needed.
                while not asked or (decoders - set(reached) and asked < _PROOFS * len(decoders)):
                    for _ in range(max(1, len(decoders))):
                        # Prompts that begin alike would go where the first one went.
                        await _ask(engine, (_FIRST_TOKEN + asked, *prompt[1:]), asked)
                        asked += 1
                    enough = asked * len(prompt) - len(prompt) // 2  # all, but for a few tokens
                    reached = await self._reached(engine, decoders, before, enough)
        except (SplitrollError, TimeoutError) as exc:
            cause = str(exc) or f"no answer in {_PROOF_TIMEOUT_S:g} s"
            raise EngineStartError(ROUTER, f"a first request failed: {cause}") from exc
        for name, done in reached.items():
            if done.computed_tokens > done.pulled_tokens:
                raise ProofError(
                    f"behind the router {name} computed {done.computed_tokens} prompt tokens "
                    f"itself and took over {done.pulled_tokens}: PD is silently off (are all "
                    "servers' KV connectors on, and of one kind?)"
                )
        if decoders and not reached:
            raise ProofError(
                f"no decode server behind {engine.url} tells of any of {asked} prompts: their KV "
                "may not have moved at all"
            )
        for name in sorted(decoders - set(reached)):
            log.warning("%s: of %d prompts the router gave it none: not proven", name, asked)

    async def _reached(
        self,
        engine: RoutedEngine,
        decoders: Collection[str],
        before: Mapping[str, EngineCounters],
        tokens: int,
    ) -> dict[str, EngineCounters]:
        """Return what decode servers did since `before`, of those that did anything, once it is
        all told: metrics lag behind."""
        end_s = time.monotonic() + _COUNTERS_LAG_S
        while decoders:
            now = await engine.counters_by_server()
            done = {name: now[name] - before[name] for name in decoders}
            told = sum(one.computed_tokens + one.pulled_tokens for one in done.values())
            if told >= tokens or time.monotonic() > end_s:
                return {n: d for n, d in done.items() if d.computed_tokens + d.pulled_tokens}
            await asyncio.sleep(_COUNTERS_POLL_S)
        return {}


async def _close_all(servers: Sequence[RayServer]) -> None:
    await asyncio.gather(*(server.close() for server in servers))


async def _ask(engine: RoutedEngine, prompt: tuple[int, ...], index: int) -> DecodeOutput:
    request = DecodeRequest(
        request_id=f"prove-{os.urandom(8).hex()}",
        token_ids=prompt,
        sampling=SamplingParams(max_tokens=_PROOF_TOKENS, temperature=0.0, ignore_eos=True),
        seed=0,
        cache_salt=os.urandom(8).hex(),
        session=str(index),
    )
    async for event in engine.decode(request):
        if isinstance(event, DecodeOutput):
            return event
    raise LegError(ROUTER, "no output")
