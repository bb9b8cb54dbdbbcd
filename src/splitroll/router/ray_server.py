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
from splitroll.engines.mooncake_process import BOOTSTRAP_PORT
from splitroll.engines.ray_place import Place
from splitroll.errors import EngineStartError
from splitroll.placement import EngineSpec
from splitroll.ports import held_ports
from splitroll.router.command_lines import Server, server_argv
from splitroll.router.guard import TOKEN_ENV, Guard
from splitroll.router.processes import Command, running

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


@dataclass(frozen=True, slots=True)
class Started:
    """A server that serves.

    Attributes:
        pid: of its HTTP process, on its node.
        bootstrap_port: of Mooncake; None with another connector.
    """

    url: str
    pid: int
    bootstrap_port: int | None


class ServerActor:
    """The actor's side."""

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> Started:
        """Return once it serves."""
        plan = self._plan
        folder = Path(plan.log).parent
        folder.mkdir(parents=True, exist_ok=True)
        shown = f"[{plan.host}]" if ":" in plan.host else plan.host
        env = {**plan.arguments.env, **plan.arguments.own_env}
        with held_ports(2, plan.host) as (port, bootstrap):
            if env.get(BOOTSTRAP_PORT) == "0":
                env[BOOTSTRAP_PORT] = str(bootstrap)
            url = f"http://{shown}:{port}"
            argv = server_argv(plan.arguments, plan.model, port, plan.host)
            command = Command(
                name=plan.arguments.name,
                # For /inference/v1/generate; and so that nobody else changes it.
                argv=[*argv, "--enable-scale-out", "--middleware", _GUARD],
                ready_url=f"{url}/health",
                log=Path(plan.log),
                env={
                    **env,
                    "VLLM_SERVER_DEV_MODE": "1",  # else it takes no weights, and cannot be paused
                    TOKEN_ENV: plan.token,
                    "TMPDIR": str(folder),
                },
                cores=plan.arguments.cores,
            )
            serving = running([command], timeout_s=plan.timeout_s)
            (self._child,) = await self._stack.enter_async_context(serving)
        port_of_kv = bootstrap if BOOTSTRAP_PORT in env else None
        return Started(url, self._child.pid, port_of_kv)

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

    def __init__(self, actor: Any, place: Place, server: Server, pid: int) -> None:
        self.server = server
        self.pid = pid
        self._actor = actor
        self._place = place

    @classmethod
    async def launch(cls, spec: EngineSpec, actor_name: str, plan: ServerPlan) -> RayServer:
        """Start a server on its node and devices; cancelling this ends it.

        Raises:
            EngineStartError: with the last lines of its log.
        """
        place = await Place.reserve(spec, actor_name)
        actor = ray.remote(ServerActor).options(**place.options(plan.arguments)).remote(plan)
        try:
            started = await actor.start.remote()
        except RayTaskError as exc:
            _kill(actor, place)
            raise EngineStartError(spec.name, str(exc.cause)) from exc
        except RayError as exc:
            _kill(actor, place)
            raise EngineStartError(spec.name, f"its actor ended: {exc}") from exc
        except BaseException:
            _kill(actor, place)  # and with it the server, which is tied to it
            raise
        server = Server(spec.name, spec.role, started.url, started.bootstrap_port)
        return cls(actor, place, server, started.pid)

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
            _kill(self._actor, self._place)


def _kill(actor: Any, place: Place) -> None:
    if ray.is_initialized():
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
    place.release()
