"""What splitroll is compared with: plain vLLM servers behind vllm-router, on CPU.

The servers get the model, arguments, environment, cores and in-process cures (`engines.process`)
of the engines that splitroll would start with the same configuration; only splitroll is missing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from splitroll.config import Config
from splitroll.config.schema import Policy, Router
from splitroll.engines.arguments import EngineArguments, engine_arguments
from splitroll.handoff.backend import make_backend
from splitroll.model import ModelFacts
from splitroll.placement import LOOPBACK, Node, engine_id, place
from splitroll.ports import held_ports
from splitroll.router.command_lines import Server, router_argv, server_argv
from splitroll.router.processes import Command, running
from splitroll.types import Role

_NOT_SERVED = ("weight_transfer_config",)
"""Engine arguments that a server is not given: its weights stay as they are."""


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
        async with running(commands, timeout_s=config.limits.start_timeout_s) as children:
            yield tuple(
                StockServer(plan.name, plan.role, url, child.pid)
                for plan, url, child in zip(plans, urls, children, strict=True)
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
    behind = [Server(server.name, server.role, server.url) for server in servers]
    # A request that fails must show, not count as a slow one.
    section = Router(mode="vllm-router", policy=policy, retries=0)
    with held_ports(2) as (port, metrics_port):
        url = f"http://{LOOPBACK}:{port}"
        command = Command(
            name=name,
            argv=router_argv(section, behind, port, metrics_port, "nixl"),
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
    backend = make_backend(section) if section.enabled else None
    fleet_id = secrets.token_hex(4)
    found = []
    for spec in place(config, [Node("local", LOOPBACK, (), tuple(cores))]):
        transfer = None
        if backend is not None:
            own_id = engine_id(fleet_id, spec.name, 0)
            transfer = backend.transfer(
                spec, engine_id=own_id, lease_s=section.kv_lease_s, elastic=False
            )
        arguments = engine_arguments(config, facts, spec, transfer)
        vllm = {name: v for name, v in arguments.vllm.items() if name not in _NOT_SERVED}
        found.append(replace(arguments, vllm=vllm))
    return tuple(found)
