"""A vLLM engine in a Ray actor: the actor, its launch, and the client that implements Engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from splitroll.engines import tracker
from splitroll.engines.arguments import EngineArguments
from splitroll.engines.process import ACTOR_ENV
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
    TransferStep,
)
from splitroll.engines.ray_place import Place
from splitroll.errors import EngineDied, EngineStartError, LegError, SplitrollError
from splitroll.placement import EngineSpec
from splitroll.weights.offer import LoadedWeights, WeightOffer

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 10.0
_TICKS = 3
"""Turns of the loop that an event waits for others of its step."""
_LOG_TAIL_LINES = 30


_Told = DecodeEvent | SplitrollError | None
"""An event of a sample, why it failed, or None at its end."""


class EngineActor:
    """The actor's side: delegates to a VllmEngine in its own process."""

    def __init__(self, arguments: EngineArguments, log_path: str) -> None:
        tracker.start_apart()
        self._arguments = arguments
        self._log_path = log_path
        _keep_files_in(Path(log_path).parent)
        _log_to(Path(log_path))
        self._untold: list[tuple[str, _Told]] = []
        self._news = asyncio.Event()
        self._decoding: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        # Imported here, where the environment that vLLM reads at import is set. What that makes
        # stays: collections would look through it again and again, for a sixth of the time.
        gc.disable()
        try:
            from splitroll.engines.vllm import VllmEngine
        finally:
            gc.enable()

        self._engine = VllmEngine(self._arguments, self._log_path)
        os.environ.update(self._arguments.own_env, **{ACTOR_ENV: str(os.getpid())})
        own = os.sched_getaffinity(0)
        try:
            # What computes stays on the engine's cores; what only passes on may be elsewhere.
            os.sched_setaffinity(0, self._arguments.cores or own)
            return await self._engine.start()
        except EngineStartError as exc:
            cause = _root_cause(Path(self._log_path)) or exc.cause
            raise EngineStartError(exc.engine, f"{cause} (log: {self._log_path})") from None
        finally:
            os.sched_setaffinity(0, own)

    async def prefill(self, request: PrefillRequest) -> PrefillOutput:
        return await self._engine.prefill(request)

    async def decode(self, requests: Sequence[DecodeRequest]) -> None:
        """Begin to generate samples; what happens is told by `events`."""
        for request in requests:
            task = asyncio.create_task(self._decode(request))
            self._decoding.add(task)
            task.add_done_callback(self._decoding.discard)

    async def _decode(self, request: DecodeRequest) -> None:
        name = request.request_id
        try:
            async for event in self._engine.decode(request):
                self._tell(name, event)
        except SplitrollError as exc:
            self._tell(name, exc)
        except Exception as exc:  # a wall: whatever vLLM raises fails that request only
            cause = f"{type(exc).__name__}: {exc}"
            self._tell(name, LegError(self._arguments.name, cause))
        finally:
            self._tell(name, None)

    def _tell(self, request_id: str, event: _Told) -> None:
        self._untold.append((request_id, event))
        self._news.set()

    async def events(self) -> AsyncGenerator[list[tuple[str, _Told]], None]:
        """Yield what happens to all samples, as long as the actor lives; None is the end of one.

        One stream, since an object of Ray's costs this process, on the engine's core, a millisecond
        however much is in it: a step's tokens of all sequences go together.
        """
        while True:
            await self._news.wait()
            for _ in range(_TICKS):
                await asyncio.sleep(0)
            self._news.clear()
            told, self._untold = self._untold, []
            yield told

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

    async def transfer_weights(self, step: TransferStep, info: Mapping[str, Any] | None) -> None:
        await self._engine.transfer_weights(step, info)

    async def call_workers(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        return await self._engine.call_workers(method, *args, **kwargs)

    async def close(self) -> None:
        await self._engine.close()


class RayEngine(Engine):
    """The driver's side of an engine in a Ray actor."""

    def __init__(self, name: str, actor: Any, place: Place) -> None:
        self._name = name
        self._actor = actor
        self._place = place
        self._info: EngineInfo | None = None
        self._unsent: list[DecodeRequest] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._samples: dict[str, asyncio.Queue[_Told]] = {}
        self._following: asyncio.Task[None] | None = None
        self._gone: EngineDied | None = None

    @classmethod
    async def launch(
        cls, spec: EngineSpec, place: Place, arguments: EngineArguments, log_path: Path
    ) -> RayEngine:
        """Start an engine in its place, which is released with it.

        Cancelling this ends the actor. The caller bounds the time.

        Raises:
            EngineStartError: with the engine's own error.
        """
        try:
            actor_class = ray.remote(EngineActor).options(**place.options(arguments))
            actor = actor_class.remote(arguments, str(log_path))
        except BaseException:
            place.release()
            raise
        engine = cls(spec.name, actor, place)
        try:
            engine._info = await engine._actor.start.remote()
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
        engine._following = asyncio.create_task(engine._follow())
        return engine

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "launch() sets it"
        return self._info

    async def prefill(self, request: PrefillRequest) -> PrefillOutput:
        return await self._call(self._actor.prefill.remote(request))

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        if self._gone is not None:
            raise self._gone
        events: asyncio.Queue[_Told] = asyncio.Queue()
        self._samples[request.request_id] = events
        try:
            self._send_soon(request)
            while (event := await events.get()) is not None:
                if isinstance(event, SplitrollError):
                    raise event
                yield event
        finally:
            del self._samples[request.request_id]

    def _send_soon(self, request: DecodeRequest) -> None:
        """Send a request with the others of this turn of the loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(request)

    def _send(self) -> None:
        if self._unsent:
            requests, self._unsent = self._unsent, []
            try:
                taken = self._actor.decode.remote(requests)
            except Exception as exc:  # a wall: whoever waits must be answered
                self._fail(requests, LegError(self._name, str(exc)))
                return
            sending = asyncio.create_task(self._see_taken(requests, taken))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def _see_taken(self, requests: Sequence[DecodeRequest], taken: Awaitable[None]) -> None:
        """See that requests reach the actor; what does not fails just these."""
        try:
            await self._call(taken)
        except SplitrollError as exc:
            self._fail(requests, exc)

    def _fail(self, requests: Sequence[DecodeRequest], error: SplitrollError) -> None:
        for request in requests:
            if (events := self._samples.get(request.request_id)) is not None:
                events.put_nowait(error)

    async def _follow(self) -> None:
        """Hand what the actor tells to whoever waits for it, until it ends."""
        stream = self._actor.events.options(num_returns="streaming").remote()
        try:
            with self._errors():
                async for ref in stream:
                    for request_id, event in await ref:
                        if (events := self._samples.get(request_id)) is not None:
                            events.put_nowait(event)
        except EngineDied as exc:
            self._gone = exc
        except Exception as exc:  # a wall: whoever waits must be answered
            self._gone = EngineDied(self._name, f"it tells nothing any more: {exc}")
        finally:  # also when it is closed, with samples in flight
            self._gone = self._gone or EngineDied(self._name, "it was closed")
            for events in self._samples.values():
                events.put_nowait(self._gone)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._send()  # what is aborted must not come after its abort
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

    async def transfer_weights(
        self, step: TransferStep, info: Mapping[str, Any] | None = None
    ) -> None:
        await self._call(self._actor.transfer_weights.remote(step, info))

    async def call_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return await self._call(self._actor.call_workers.remote(method, args, kwargs))

    async def close(self) -> None:
        for task in [self._following, *self._sending]:
            if task is not None:
                task.cancel()
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
        self._place.release()

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
