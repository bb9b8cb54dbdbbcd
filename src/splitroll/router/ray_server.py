"""A vLLM HTTP server on a node of the cluster: a Ray actor starts it there, and watches it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from splitroll.engines.arguments import EngineArguments
from splitroll.engines.ray_engine import actor_options
from splitroll.errors import EngineStartError
from splitroll.placement import EngineSpec
from splitroll.router.command_lines import Server, server_argv
from splitroll.router.guard import TOKEN_ENV, Guard
from splitroll.router.processes import Command, held_ports, running

_CLOSE_TIMEOUT_S = 30.0
_GUARD = f"{Guard.__module__}.{Guard.__name__}"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How to start a server, on its node.

    Attributes:
        host: the address that it listens on.
        log: the file that its output goes to; its folder takes all its temporary files.
        token: that it asks for before it changes anything.
    """

    arguments: EngineArguments
    model: str
    host: str
    log: str
    timeout_s: float
    token: str


class ServerActor:
    """The actor's side."""

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> tuple[str, int]:
        """Return the server's URL and process id, once it serves."""
        plan = self._plan
        folder = Path(plan.log).parent
        folder.mkdir(parents=True, exist_ok=True)
        shown = f"[{plan.host}]" if ":" in plan.host else plan.host
        with held_ports(1, plan.host) as (port,):
            url = f"http://{shown}:{port}"
            argv = server_argv(plan.arguments, plan.model, port, plan.host)
            command = Command(
                name=plan.arguments.name,
                # For /inference/v1/generate; and so that nobody else changes it.
                argv=[*argv, "--enable-scale-out", "--middleware", _GUARD],
                ready_url=f"{url}/health",
                log=Path(plan.log),
                env={
                    **plan.arguments.env,
                    "VLLM_SERVER_DEV_MODE": "1",  # else it takes no weights, and cannot be paused
                    TOKEN_ENV: plan.token,
                    "TMPDIR": str(folder),
                },
                cores=plan.arguments.cores,
            )
            serving = running([command], timeout_s=plan.timeout_s)
            (self._child,) = await self._stack.enter_async_context(serving)
        return url, self._child.pid

    async def ended(self) -> str:
        """Return, when the server has ended, with what."""
        return await self._child.ended()

    async def close(self) -> None:
        await self._stack.aclose()


class RayServer:
    """The driver's side of a server.

    Attributes:
        pid: of its HTTP process, on its node.
    """

    def __init__(self, actor: Any, server: Server, pid: int) -> None:
        self.server = server
        self.pid = pid
        self._actor = actor

    @classmethod
    async def launch(cls, spec: EngineSpec, actor_name: str, plan: ServerPlan) -> RayServer:
        """Start a server on its node and devices; cancelling this ends it.

        Raises:
            EngineStartError: with the last lines of its log.
        """
        options = actor_options(spec, actor_name, plan.arguments)
        actor = ray.remote(ServerActor).options(**options).remote(plan)
        try:
            url, pid = await actor.start.remote()
        except RayTaskError as exc:
            _kill(actor)
            raise EngineStartError(spec.name, str(exc.cause)) from exc
        except RayError as exc:
            _kill(actor)
            raise EngineStartError(spec.name, f"its actor ended: {exc}") from exc
        except BaseException:
            _kill(actor)  # and with it the server, which is tied to it
            raise
        return cls(actor, Server(spec.name, spec.role, url), pid)

    async def ended(self) -> str:
        """Return, when the server has ended, with what."""
        try:
            return str(await self._actor.ended.remote())
        except RayActorError:
            return f"{self.server.name}: the actor that runs it is gone"

    async def close(self) -> None:
        try:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor.close.remote(), _CLOSE_TIMEOUT_S)
        finally:
            _kill(self._actor)


def _kill(actor: Any) -> None:
    if ray.is_initialized():
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
