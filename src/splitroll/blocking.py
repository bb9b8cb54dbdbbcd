"""The blocking twin of Rollout: the same calls without async, for ordinary training loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from splitroll.config import Config
from splitroll.environment import AnyEnvironment, Encode, EpisodeGroup
from splitroll.prompts import PromptLike
from splitroll.rest import PauseMode
from splitroll.rollout import Activity, OnError, Rollout
from splitroll.scaling import ScaleReport
from splitroll.types import FailedGroup, Group, SamplingParams
from splitroll.updater import UpdateReport

if TYPE_CHECKING:
    from splitroll.weights.ranks import TrainerRanks

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 60.0
"""How long an interrupted call may take to end on its loop: closing engines takes seconds."""


class BlockingRollout:
    """See `Rollout`; an event loop in a thread of its own does the work.

    `with BlockingRollout(config) as rollout: ...`
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        overrides: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._overrides = overrides
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="splitroll", daemon=True
        )
        self._context: AbstractAsyncContextManager[Rollout] | None = None
        self._rollout: Rollout | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._context = Rollout.open(self._config, overrides=self._overrides)
            self._rollout = self._wait(self._context.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._context is not None, "entered before"
        try:
            self._wait(self._context.__aexit__(None, None, None))
        finally:
            self._stop()

    @overload
    def generate(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 1,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_error: OnError = "raise",
        over_sample: int = 0,
        environment: None = None,
    ) -> Iterator[Group | FailedGroup]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 1,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_error: OnError = "raise",
        over_sample: int = 0,
        environment: AnyEnvironment,
        max_turns: int | None = None,
        encode: Encode | None = None,
    ) -> Iterator[EpisodeGroup | FailedGroup]: ...

    def generate(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 1,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_error: OnError = "raise",
        over_sample: int = 0,
        environment: AnyEnvironment | None = None,
        max_turns: int | None = None,
        encode: Encode | None = None,
    ) -> Iterator[Group | EpisodeGroup | FailedGroup]:
        """Yield groups as they complete; see `Rollout.generate`."""
        asked: Any = environment  # of either overload
        stream = self._open().generate(
            prompts,
            n=n,
            sampling=sampling,
            on_error=on_error,
            over_sample=over_sample,
            environment=asked,
            max_turns=max_turns,
            encode=encode,
        )
        try:
            while (group := self._wait(_next(stream))) is not None:
                yield group
        finally:
            self._wait(_close(stream))

    @property
    def weight_version(self) -> int:
        """See `Rollout.weight_version`."""
        return self._open().weight_version

    def update_weights(
        self,
        weights: Any,
        version: int | None = None,
        *,
        partial: bool = False,
        ranks: TrainerRanks | None = None,
    ) -> UpdateReport:
        """See `Rollout.update_weights`."""
        rollout = self._open()
        return self._wait(rollout.update_weights(weights, version, partial=partial, ranks=ranks))

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `Rollout.pause`."""
        self._wait(self._open().pause(mode))

    def resume(self) -> None:
        """See `Rollout.resume`."""
        self._wait(self._open().resume())

    @property
    def is_paused(self) -> bool:
        """See `Rollout.is_paused`."""
        return self._open().is_paused

    def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        mixed: int | None = None,
        timeout_s: float = 600.0,
    ) -> ScaleReport:
        """See `Rollout.scale`."""
        scaling = self._open().scale(
            prefill=prefill, decode=decode, mixed=mixed, timeout_s=timeout_s
        )
        return self._wait(scaling)

    def prove(self) -> None:
        """See `Rollout.prove`."""
        self._wait(self._open().prove())

    def activity(self) -> Activity:
        """Return what the fleet has done so far."""
        return self._wait(self._open().activity())

    def _open(self) -> Rollout:
        if self._rollout is None:
            raise RuntimeError("use it in a with statement: the engines are not up")
        return self._rollout

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the loop and wait for it; interrupted, end it there before going on."""
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        started: concurrent.futures.Future[asyncio.Task[T]] = concurrent.futures.Future()

        def start() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(lambda task: _hand_over(task, outcome))
            started.set_result(task)

        self._loop.call_soon_threadsafe(start)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():
                self._loop.call_soon_threadsafe(started.result().cancel)
                concurrent.futures.wait([outcome], timeout=_CANCEL_TIMEOUT_S)
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        self._rollout = None


def _hand_over(task: asyncio.Task[T], outcome: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(concurrent.futures.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


async def _next(stream: AsyncIterator[T]) -> T | None:
    return await anext(stream, None)


async def _close(stream: AsyncIterator[Any]) -> None:
    await stream.aclose()  # type: ignore[attr-defined]
