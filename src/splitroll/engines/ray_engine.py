"""A vLLM engine in a Ray actor: the actor, its launch, and the client that implements Engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from splitroll.engines.arguments import EngineArguments
from splitroll.engines.protocol import (
    DecodeEvent,
    DecodeRequest,
    Engine,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    KvParams,
    PrefillOutput,
    PrefillRequest,
    StepStats,
)
from splitroll.errors import EngineDied, EngineStartError, LegError, SplitrollError
from splitroll.placement import EngineSpec
from splitroll.weights.offer import LoadedWeights, WeightOffer

T = TypeVar("T")

NAMESPACE = "splitroll"
_MAX_CONCURRENCY = 10_000
"""Calls that an actor runs at once; the dispatcher bounds them long before this."""
_CLOSE_TIMEOUT_S = 10.0
_LOG_TAIL_LINES = 30


class EngineActor:
    """The actor's side: delegates to a VllmEngine in its own process."""

    def __init__(self, arguments: EngineArguments, log_path: str) -> None:
        self._arguments = arguments
        self._log_path = log_path
        _keep_files_in(Path(log_path).parent)
        _log_to(Path(log_path))
        if arguments.cores:
            os.sched_setaffinity(0, arguments.cores)

    async def start(self) -> EngineInfo:
        # Imported here, where the environment that vLLM reads at import is set.
        from splitroll.engines.vllm import VllmEngine

        self._engine = VllmEngine(self._arguments, self._log_path)
        try:
            return await self._engine.start()
        except EngineStartError as exc:
            cause = _root_cause(Path(self._log_path)) or exc.cause
            raise EngineStartError(exc.engine, f"{cause} (log: {self._log_path})") from None

    async def prefill(self, request: PrefillRequest) -> PrefillOutput:
        return await self._engine.prefill(request)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        async for event in self._engine.decode(request):
            yield event

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    async def release(self, request_id: str, kv: KvParams) -> None:
        await self._engine.release(request_id, kv)

    async def load(self) -> EngineLoad:
        return await self._engine.load()

    async def health(self) -> None:
        await self._engine.health()

    async def counters(self) -> EngineCounters:
        return await self._engine.counters()

    async def steps(self) -> Sequence[StepStats]:
        return await self._engine.steps()

    async def metrics(self) -> str:
        return await self._engine.metrics()

    async def reset_prefix_cache(self, preempt: bool) -> bool:
        return await self._engine.reset_prefix_cache(preempt=preempt)

    async def pause(self, abort: bool) -> None:
        await self._engine.pause(abort=abort)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load_weights(self, offer: WeightOffer) -> LoadedWeights:
        return await self._engine.load_weights(offer)

    async def set_weight_version(self, version: int) -> None:
        await self._engine.set_weight_version(version)

    async def call_workers(self, method: str, kwargs: Mapping[str, Any]) -> list[Any]:
        return await self._engine.call_workers(method, **kwargs)

    async def close(self) -> None:
        await self._engine.close()


class RayEngine(Engine):
    """The driver's side of an engine in a Ray actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor
        self._info: EngineInfo | None = None

    @classmethod
    async def launch(
        cls, spec: EngineSpec, actor_name: str, arguments: EngineArguments, log_path: Path
    ) -> RayEngine:
        """Start an engine on its node and devices.

        Cancelling this ends the actor. The caller bounds the time.

        Raises:
            EngineStartError: with the engine's own error.
        """
        options = actor_options(spec, actor_name, arguments)
        actor = ray.remote(EngineActor).options(**options).remote(arguments, str(log_path))
        engine = cls(spec.name, actor)
        try:
            engine._info = await actor.start.remote()
        except RayTaskError as exc:
            engine._kill()
            if isinstance(exc.cause, EngineStartError):
                raise exc.cause from None
            raise EngineStartError(spec.name, str(exc.cause)) from exc
        except RayError as exc:
            engine._kill()
            raise EngineStartError(
                spec.name, f"its process ended: {_whole(exc)}; log: {log_path}"
            ) from exc
        except BaseException:
            engine._kill()
            raise
        return engine

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "launch() sets it"
        return self._info

    async def prefill(self, request: PrefillRequest) -> PrefillOutput:
        return await self._call(self._actor.prefill.remote(request))

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        stream = self._actor.decode.options(num_returns="streaming").remote(request)
        with self._errors():
            async for ref in stream:
                yield await ref

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call(self._actor.abort.remote(list(request_ids)))

    async def release(self, request_id: str, kv: KvParams) -> None:
        await self._call(self._actor.release.remote(request_id, kv))

    async def load(self) -> EngineLoad:
        return await self._call(self._actor.load.remote())

    async def health(self) -> None:
        await self._call(self._actor.health.remote())

    async def counters(self) -> EngineCounters:
        return await self._call(self._actor.counters.remote())

    async def steps(self) -> Sequence[StepStats]:
        return await self._call(self._actor.steps.remote())

    async def metrics(self) -> str:
        return await self._call(self._actor.metrics.remote())

    async def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        return await self._call(self._actor.reset_prefix_cache.remote(preempt))

    async def pause(self, *, abort: bool = False) -> None:
        await self._call(self._actor.pause.remote(abort))

    async def resume(self) -> None:
        await self._call(self._actor.resume.remote())

    async def load_weights(self, offer: WeightOffer) -> LoadedWeights:
        return await self._call(self._actor.load_weights.remote(offer))

    async def set_weight_version(self, version: int) -> None:
        await self._call(self._actor.set_weight_version.remote(version))

    async def call_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of vLLM's workers; no part of the engine interface."""
        return await self._call(self._actor.call_workers.remote(method, kwargs))

    async def close(self) -> None:
        try:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor.close.remote(), _CLOSE_TIMEOUT_S)
        finally:
            self._kill()

    def _kill(self) -> None:
        if not ray.is_initialized():
            return  # the cluster is gone, and its actors with it; kill would start a new one
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)

    async def _call(self, ref: Awaitable[T]) -> T:
        with self._errors():
            return await ref

    @contextlib.contextmanager
    def _errors(self) -> Any:
        """Turn Ray's errors into ours."""
        try:
            yield
        except RayTaskError as exc:
            if isinstance(exc.cause, SplitrollError):
                raise exc.cause from None
            # A wall: whatever vLLM raises for a request fails that request only.
            cause = f"{type(exc.cause).__name__}: {exc.cause}"
            raise LegError(self._name, cause) from exc
        except RayActorError as exc:
            raise EngineDied(self._name, _first_line(exc)) from exc
        except RayError as exc:
            raise LegError(self._name, f"{type(exc).__name__}: {_first_line(exc)}") from exc


def actor_options(spec: EngineSpec, actor_name: str, arguments: EngineArguments) -> dict[str, Any]:
    """Return Ray's options that pin an engine's actor to its node and devices."""
    return {
        "name": actor_name,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "num_gpus": len(spec.gpus),
        "max_restarts": 0,
        "max_concurrency": _MAX_CONCURRENCY,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(spec.node_id, soft=False),
        "runtime_env": {"env_vars": dict(arguments.env)},
    }


def _keep_files_in(folder: Path) -> None:
    """Make the fleet's own folder the place for all temporary files and IPC sockets of vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # read TMPDIR again


def _log_to(path: Path) -> None:
    """Send this process's output, and that of its children, to the engine's own file."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _root_cause(log: Path) -> str | None:
    """Return the error that EngineCore logged when it failed to start, None where it did not.

    vLLM's own exception in the parent only says "see root cause above".
    """
    lines = log.read_text(errors="replace").splitlines()
    marks = [i for i, line in enumerate(lines) if "EngineCore failed to start" in line]
    if not marks:
        return None
    found = None
    for line in lines[marks[0] + 1 :]:
        if "ERROR" not in line:
            break  # the record of the exception ends here
        _, _, text = line.partition("] ")
        name, colon, _ = text.partition(":")
        if colon and name.isidentifier() and name.endswith(("Error", "Exception")):
            found = text  # of a chain, the last one raised
    return found


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0] if lines else type(exc).__name__


def _whole(exc: BaseException) -> str:
    """Return an error's first and last line: what Ray saw, and the exception itself."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(exc).__name__
