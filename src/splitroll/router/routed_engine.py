"""vLLM servers behind a router, as one engine: what it does inside is the router's affair."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import aiohttp

from splitroll.engines.protocol import (
    DecodeEvent,
    DecodeOutput,
    DecodeRequest,
    Engine,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    FirstToken,
    KvParams,
    PrefillOutput,
    PrefillRequest,
    StepStats,
    Tokens,
    TransferStep,
)
from splitroll.errors import EngineDied, LegError, SplitrollError
from splitroll.router.client import Client, metrics_of
from splitroll.router.command_lines import Server
from splitroll.types import Role, VersionSpan
from splitroll.weights.offer import LoadedWeights, WeightOffer

ROUTER = "router"
"""The name of the one engine of a fleet in this mode."""

_DEATH_TOLD_S = 2.0
"""After a connection broke: how long to wait for word that a process has ended."""
_HEALTH_POLL_S = 0.5

DecodeText = Callable[[Sequence[int]], str]


class RoutedEngine(Engine):
    """See the module's docstring.

    Args:
        url: of the router.
        servers: behind it, as far as they are known.
        deaths: each returns when one of its processes has ended, with what.
        on_close: ends what was started for it.
    """

    def __init__(
        self,
        info: EngineInfo,
        url: str,
        servers: Sequence[Server],
        client: Client,
        model: str,
        decode_text: DecodeText,
        deaths: Sequence[Coroutine[Any, Any, str]] = (),
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.url = url
        self.servers = tuple(servers)
        self._info = info
        self._client = client
        self._model = model
        self._decode_text = decode_text
        self._on_close = on_close
        self._weight_version = 0
        self._uncounted = EngineCounters()
        self._aborted: set[str] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._deaths = [asyncio.create_task(death) for death in deaths]

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def prefill(self, request: PrefillRequest) -> PrefillOutput:
        raise LegError(ROUTER, "a router hands out no KV: it moves it itself")

    async def release(self, request_id: str, kv: KvParams) -> None:
        raise LegError(ROUTER, "a router hands out no KV: it moves it itself")

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        if request.native is not None or request.kv is not None:
            raise LegError(ROUTER, "a router takes neither KV nor an engine's own parameters")
        pieces: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request, pieces))
        # Not by the task itself: one that is cancelled before its first step runs no code.
        reading.add_done_callback(lambda _: pieces.put_nowait(None))
        self._reading[request.request_id] = reading
        sample = _Sample(request, self._decode_text)
        try:
            while (piece := await pieces.get()) is not None:
                for event in sample.add(piece):
                    if isinstance(event, DecodeOutput) and event.weight_versions:
                        self._weight_version = event.weight_versions[-1].version
                    yield event
            if reading.cancelled():
                if request.request_id not in self._aborted:
                    self._check_processes()
                    raise EngineDied(ROUTER, "it was closed")
                for event in sample.end_early(self._weight_version):
                    yield event
                return
            reading.result()
            if not sample.ended:
                raise LegError(ROUTER, "the answer ended without a finish reason")
        finally:
            del self._reading[request.request_id]
            self._aborted.discard(request.request_id)
            reading.cancel()

    async def abort(self, request_ids: Sequence[str]) -> None:
        # Closing the connection is all that reaches whichever server has it.
        for request_id in request_ids:
            if (reading := self._reading.get(request_id)) is not None:
                self._aborted.add(request_id)
                reading.cancel()

    async def load(self) -> EngineLoad:
        with self._errors():
            metrics = await metrics_of(self._client, self.servers)
        loads = [one.load() for one in metrics.values()]
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            held_blocks=sum(load.held_blocks for load in loads),
        )

    async def health(self) -> None:
        while True:
            self._check_processes()
            try:
                if await self._client.is_healthy(self.url):
                    return
            except (aiohttp.ClientError, OSError) as exc:
                raise await self._why(exc) from exc
            await asyncio.sleep(_HEALTH_POLL_S)  # no server of its may be well at present

    async def counters(self) -> EngineCounters:
        """Return the sum over all servers; tokens of prefill legs do not count as generated."""
        total = EngineCounters()
        for name, counters in (await self.counters_by_server()).items():
            total += counters
            if self._role(name) is Role.PREFILL:
                total -= EngineCounters(generated_tokens=counters.generated_tokens)
        return total - self._uncounted

    async def count_from_now(self) -> None:
        """Leave out what the servers have done so far: what the start took is nobody's work."""
        self._uncounted += await self.counters()

    async def counters_by_server(self) -> dict[str, EngineCounters]:
        """Return what every server did, by its name."""
        with self._errors():
            metrics = await metrics_of(self._client, self.servers)
        return {name: one.counters() for name, one in metrics.items()}

    async def steps(self) -> Sequence[StepStats]:
        return []

    async def metrics(self) -> str:
        return ""  # every server has its own, under its own address

    async def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        params = {"reset_running_requests": str(preempt).lower()}
        answers = await self._each("/reset_prefix_cache", params=params)
        return all(answer["success"] for answer in answers)

    async def pause(self, *, abort: bool = False) -> None:
        await self._each("/pause", params={"mode": "abort" if abort else "keep"})

    async def resume(self) -> None:
        await self._each("/resume")

    async def load_weights(self, offer: WeightOffer) -> LoadedWeights:
        begun = time.monotonic()
        await self.call_workers("splitroll_load_weights", offer.to_wire())
        return LoadedWeights(time.monotonic() - begun)

    async def set_weight_version(self, version: int) -> None:
        await self._each("/update_weight_version", {"new_version": str(version)})
        self._weight_version = version

    async def transfer_weights(
        self, step: TransferStep, info: Mapping[str, Any] | None = None
    ) -> None:
        raise LegError(ROUTER, "servers behind a router are not told apart by rank")

    async def call_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        body = {"method": method, "args": list(args), "kwargs": kwargs}
        answers = await self._each("/collective_rpc", body)
        return [result for answer in answers for result in answer["results"]]

    async def close(self) -> None:
        for task in [*self._reading.values(), *self._deaths]:
            task.cancel()
        await asyncio.gather(*self._deaths, return_exceptions=True)
        try:
            if self._on_close is not None:
                await self._on_close()
        finally:
            await self._client.close()

    async def _read(
        self, request: DecodeRequest, pieces: asyncio.Queue[Mapping[str, Any] | None]
    ) -> None:
        try:
            async for piece in self._client.generate(self.url, request, self._model):
                pieces.put_nowait(piece)
        except (aiohttp.ClientError, OSError) as exc:
            raise await self._why(exc) from exc
        except LegError as exc:
            await self._note_death(exc)
            raise

    async def _each(
        self, path: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Ask all servers at once for the same; the first error is raised when all have ended."""
        if not self.servers:
            raise LegError(ROUTER, f"{path}: the servers behind {self.url} are not known")
        with self._errors():
            calls = [self._client.post(f"{s.url}{path}", body, params) for s in self.servers]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        for server, answer in zip(self.servers, answers, strict=True):
            if isinstance(answer, aiohttp.ClientError | OSError):
                raise await self._why(answer) from answer
            if isinstance(answer, SplitrollError):
                raise LegError(server.name, f"{path}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise answer
        return answers

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError) as exc:
            self._check_processes()
            raise LegError(ROUTER, _told(exc)) from exc

    def _check_processes(self) -> None:
        """Raise EngineDied when one of its processes has ended."""
        for death in self._deaths:
            if death.done() and not death.cancelled():
                raise EngineDied(ROUTER, death.result())

    async def _why(self, exc: BaseException) -> SplitrollError:
        """Return what a broken connection means."""
        try:
            await self._note_death(exc)
        except EngineDied as died:
            return died
        return LegError(ROUTER, f"no answer from {self.url}: {_told(exc)}")

    async def _note_death(self, exc: BaseException) -> None:
        """Raise EngineDied when an error comes from a process that has ended, or is ending."""
        if self._deaths:
            await asyncio.wait(
                self._deaths, timeout=_DEATH_TOLD_S, return_when=asyncio.FIRST_COMPLETED
            )
        try:
            self._check_processes()
        except EngineDied as died:
            raise died from exc

    def _role(self, name: str) -> Role:
        return next(server.role for server in self.servers if server.name == name)


class _Sample:
    """Puts a sample together from the pieces of its answer."""

    def __init__(self, request: DecodeRequest, decode_text: DecodeText) -> None:
        self.ended = False
        self._request = request
        self._decode_text = decode_text
        self._begun_s = time.monotonic()
        self._first_s = self._last_s = 0.0
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: dict[int, float] = {}
        self._text = ""
        self._sent_text = ""

    def add(self, choice: Mapping[str, Any]) -> Iterator[DecodeEvent]:
        """Yield what a piece brings.

        Raises:
            LegError: it lacks something, or says that there was an error.
        """
        reason = choice.get("finish_reason")
        if reason == "error":
            raise LegError(ROUTER, "the server ended the request with an error")
        token_ids = list(choice.get("token_ids") or ())
        entries = (choice.get("logprobs") or {}).get("content") or []
        if [entry["token_id"] for entry in entries] != token_ids:
            raise LegError(
                ROUTER, f"{len(token_ids)} tokens came with {len(entries)} log-probabilities"
            )
        logprobs = [float(entry["logprob"]) for entry in entries]
        self._last_s = time.monotonic()
        if token_ids and not self._token_ids:
            self._first_s = self._last_s
            top = entries[0].get("top_logprobs") or ()
            self._top = {entry["token_id"]: float(entry["logprob"]) for entry in top}
            if reason is None:
                yield FirstToken(cached_tokens=0, weight_version=0)
        self._token_ids += token_ids
        self._logprobs += logprobs
        stop = choice.get("stop_reason")
        if self._request.stream or reason is not None:
            self._text = self._decode_text(self._token_ids)
            if isinstance(stop, str) and stop in self._text:
                self._text = self._text[: self._text.rindex(stop)]
        if self._request.stream and (token_ids or reason is not None):
            yield self._tokens(token_ids, logprobs, last=reason is not None)
        if reason is not None:
            yield self._output(reason, stop, _spans(choice.get("weight_versions") or ()))

    def end_early(self, version: int) -> Iterator[DecodeEvent]:
        """Yield the end of a sample whose connection was closed: with what has come.

        Args:
            version: of the servers' weights.
        """
        if not self.ended:
            self._text = self._decode_text(self._token_ids)
            if self._request.stream:
                yield self._tokens([], [], last=True)
            end = len(self._token_ids)
            yield self._output("abort", None, (VersionSpan(version, 0, end),) if end else ())

    def _tokens(self, token_ids: Sequence[int], logprobs: Sequence[float], *, last: bool) -> Tokens:
        # A character may lie across a border: it is sent once it is whole.
        whole = self._text if last else self._text.rstrip("\ufffd")
        new = whole[len(self._sent_text) :]
        self._sent_text += new
        return Tokens(tuple(token_ids), tuple(logprobs), new, last=last)

    def _output(
        self, reason: str, stop: int | str | None, versions: tuple[VersionSpan, ...]
    ) -> DecodeOutput:
        self.ended = True
        first_s = self._first_s or self._last_s or time.monotonic()
        return DecodeOutput(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            text=self._text,
            finish_reason=reason,
            cached_tokens=0,
            wait_s=0.0,
            prefill_s=first_s - self._begun_s,
            decode_s=max(0.0, self._last_s - first_s),
            weight_versions=versions,
            first_top_logprobs=self._top,
            stop_reason=stop,
        )


def _spans(told: Sequence[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
    """Return a server's spans of weight versions; it says "default" before any was set."""
    return tuple(
        VersionSpan(0 if s["version"] == "default" else int(s["version"]), s["start"], s["end"])
        for s in told
        if s["end"] > s["start"]
    )


def _told(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
