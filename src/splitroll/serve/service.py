"""The service: vLLM's own HTTP layer over a fleet, with the fleet's control endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from splitroll.config.schema import Config
from splitroll.driven import DrivenUpdates
from splitroll.engines.arguments import front_end_arguments
from splitroll.errors import ConfigError, Problem, SplitrollError
from splitroll.rollout import Rollout
from splitroll.serve.control import control_router
from splitroll.serve.dashboard import dashboard_router
from splitroll.serve.door import Door, Keys
from splitroll.serve.refused import Refused, refusal_of
from splitroll.serve.routes import ROUTES
from splitroll.serve.weights import weights_router

API_KEY, ADMIN_KEY = "SPLITROLL_API_KEY", "SPLITROLL_ADMIN_KEY"
"""Environment variables: secrets are in no configuration."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE_S = 10
_CLOSE_TIMEOUT_S = 5


def check_serve(config: Config, environment: Mapping[str, str]) -> Keys:
    """Return the keys that the environment holds.

    Raises:
        ConfigError: when the service would listen beyond this machine without both.
    """
    keys = Keys(environment.get(API_KEY) or None, environment.get(ADMIN_KEY) or None)
    section = config.serve
    if config.router.mode != "splitroll":
        hint = "the router has an address of its own: generate with a Rollout, or ask it directly"
        found = repr(config.router.mode)
        raise ConfigError([Problem("router.mode", found, "'splitroll', to serve", hint)])
    if section.host not in _LOOPBACK and (keys.api is None or keys.admin is None):
        missing = API_KEY if keys.api is None else ADMIN_KEY
        hint = "set both, or listen on 127.0.0.1"
        allowed = f"beyond this machine: {API_KEY} and {ADMIN_KEY} in the environment"
        problem = Problem("serve.host", f"{section.host} without {missing}", allowed, hint)
        raise ConfigError([problem])
    if keys.api is not None and keys.api == keys.admin:
        hint = "take two: whoever generates need not be able to change weights"
        raise ConfigError([Problem(ADMIN_KEY, "the API key", "another key", hint)])
    return keys


def listen(config: Config) -> socket.socket:
    """Bind the service's address, and hold it.

    Raises:
        ConfigError: when it cannot be had.
    """
    section = config.serve
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    # With the protocol's number asyncio sets TCP_NODELAY; without, answers wait 40 ms for an ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((section.host, section.port))
    except OSError as exc:
        sock.close()
        found = f"{section.host}:{section.port} ({exc.strerror})"
        hint = "stop who has it, or choose another: --set serve.port=8001"
        raise ConfigError([Problem("serve.port", found, "a free port", hint)]) from exc
    return sock


@contextlib.asynccontextmanager
async def open_service(rollout: Rollout, keys: Keys) -> AsyncGenerator[Door, None]:
    """Make the service of a running rollout: an ASGI app, closed at the end with its requests."""
    section = rollout.config.serve
    on_cpu = not any(member.spec.gpus for member in rollout.fleet.members.values())
    arguments = front_end_arguments(rollout.config, rollout.facts, on_cpu=on_cpu)
    for name, value in arguments.env.items():  # vLLM reads it when it is imported
        os.environ.setdefault(name, value)
    from vllm.utils.gc_utils import freeze_gc_heap

    from splitroll.serve.core import FleetCore, FrontEnd
    from splitroll.serve.vllm_app import vllm_app

    core = FleetCore(rollout)
    config, app = await asyncio.to_thread(vllm_app, arguments.vllm, rollout.facts.name)
    client = FrontEnd(core, config, section.max_queued)
    fleet = rollout.fleet
    driven = DrivenUpdates(
        rollout.updater,
        rollout.update_weights,
        rollout.config.weights,
        fleet.ready,
        lambda: fleet.weight_version,
    )
    try:
        await app.attach(client)
        service = FastAPI(title="splitroll", docs_url=None, redoc_url=None)
        service.include_router(control_router(rollout, core, client))
        service.include_router(weights_router(rollout, driven))
        service.include_router(dashboard_router(rollout))
        for kind in (Refused, SplitrollError, TimeoutError, RequestValidationError):
            service.add_exception_handler(kind, _refuse)
        service.mount("/", app.app)  # the door lets in what the routes name
        service.openapi = functools.partial(_description, service, app.app)  # type: ignore[method-assign]
        freeze_gc_heap()  # as vLLM's own server does
        yield Door(
            service,
            keys,
            on_closing=lambda: setattr(service.state, "closing", True),
            max_body_bytes=section.max_body_bytes,
            is_full=lambda: client.is_full,
            version=lambda: fleet.weight_version,
        )
    finally:
        gc.unfreeze()  # else some libraries tell of leaks at the end
        await driven.close()
        await core.closed()
        core.end_all(client)
        client.shutdown()


async def _refuse(request: Request, exc: Exception) -> JSONResponse:
    if isinstance(exc, RequestValidationError):
        refused = Refused(400, "BadRequestError", _what_is_wrong(exc))
    else:
        refused = refusal_of(exc)
    return JSONResponse(refused.body(), refused.status, refused.headers)


def _what_is_wrong(exc: RequestValidationError) -> str:
    wrong = [(".".join(map(str, error["loc"])), error["msg"]) for error in exc.errors()]
    return "; ".join(f"{where}: {what}" for where, what in wrong)


async def serve(app: Door, sock: socket.socket, stopped: asyncio.Event) -> None:
    """Answer requests until `stopped` is set; those under way then have some seconds to end, after
    which they end with an error that says so."""
    options: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "timeout_graceful_shutdown": _GRACE_S + _CLOSE_TIMEOUT_S,
        "lifespan": "off",
    }
    server = _Server(uvicorn.Config(app, **options))
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    stopping = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        app.close()
        server.should_exit = True
        stopping.cancel()
        await asyncio.wait([running], timeout=_GRACE_S)
        app.end()
        await running


def _description(service: FastAPI, inner: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of what is reachable, vLLM's own parts included."""
    if service.openapi_schema is None:
        whole, theirs = FastAPI.openapi(service), inner.openapi()
        for path, methods in theirs["paths"].items():
            if path in ROUTES and path not in whole["paths"]:
                whole["paths"][path] = {
                    method: one for method, one in methods.items() if method.upper() in ROUTES[path]
                }
        schemas = whole.setdefault("components", {}).setdefault("schemas", {})
        for name, schema in theirs.get("components", {}).get("schemas", {}).items():
            schemas.setdefault(name, schema)
        service.openapi_schema = whole
    return service.openapi_schema


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield
