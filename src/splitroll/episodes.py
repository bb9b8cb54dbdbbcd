"""Plays episodes: the first turn of a prompt is one group of n, then each goes on by itself.

Invariants:
- no episode waits for another: a turn is sent as soon as its observation is there;
- a turn's prompt is exactly the tokens before it, and an episode keeps within its budget;
- n episodes come back or none do: what fails in one is the prompt's failure, and ends the others;
- a turn's seed follows from the group's seed, the sample's index and the turn's, nothing else;
- an environment that was made is closed, after its last call has ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitroll.dispatch.assembly import GroupWork
from splitroll.environment import (
    Answer,
    AnyEnvironment,
    Encode,
    Ended,
    EnvironmentFactory,
    Episode,
    EpisodeGroup,
    turn_fault,
)
from splitroll.errors import GroupFailed
from splitroll.types import Group, Prompt, Sample, derive_seed

log = logging.getLogger(__name__)

Run = Callable[[GroupWork], Awaitable[Group]]
"""`Dispatcher.run`."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What bounds an episode besides its budget of tokens.

    Attributes:
        timeout_s: longest time that one answer of the environment may take.
        vocab_size: token ids that the environment writes are below it.
        max_turns: None allows as many as the budget does.
    """

    timeout_s: float
    vocab_size: int
    max_turns: int | None = None


async def run_episodes(
    run: Run,
    work: GroupWork,
    environment: AnyEnvironment,
    encode: Encode,
    limits: EpisodeLimits,
) -> EpisodeGroup:
    """Generate one prompt's episodes.

    Args:
        work: the first turns; `sampling.max_tokens` is the budget of an episode, the
            environment's tokens included.
        encode: for observations that are texts.

    Raises:
        GroupFailed: naming prompt, sample and turn, when an environment fails, takes too long or
            answers with what is no observation; or when no route completed a turn.
        Exception: what else `run` raises.
    """
    first = await run(work)
    _check(first, work)
    call_id = secrets.token_hex(8)
    players = [
        _Player(run, work, environment, encode, limits, index, f"{call_id}/{index}")
        for index in range(work.n)
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(player.play(sample))
                for player, sample in zip(players, first.samples, strict=True)
            ]
    except ExceptionGroup as failed:
        earliest = failed.exceptions[0]
        raise earliest from earliest.__cause__
    return EpisodeGroup(work.prompt, tuple(task.result() for task in playing))


@dataclass(frozen=True, slots=True)
class _Player:
    """Plays one episode."""

    run: Run
    work: GroupWork
    environment: AnyEnvironment
    encode: Encode
    limits: EpisodeLimits
    index: int
    episode_id: str

    async def play(self, first: Sample) -> Episode:
        """Return the episode that begins with this turn, when it has ended."""
        episode = Episode(self.work.prompt, (first,), sample=self.index)
        session = _Session(self.environment, self.work.prompt, self.index)
        try:
            while episode.ended is None:
                episode = await self._go_on(episode, session)
        except BaseException:
            await self._close_failed(session)
            raise
        await self._ask(episode, "closing the environment", session.close())
        return episode

    async def _go_on(self, episode: Episode, session: _Session) -> Episode:
        """Return the episode with one turn more, or ended."""
        if episode.turns[-1].finish_reason == "abort":
            return replace(episode, ended="abort")
        begun_s = time.perf_counter()
        given = await self._ask(episode, "the environment", session.observe(episode))
        seconds = time.perf_counter() - begun_s
        answer = given if isinstance(given, Answer) else Answer(given)
        episode = replace(
            episode,
            rewards=(*episode.rewards, self._reward(episode, answer)),
            environment_s=(*episode.environment_s, seconds),
        )
        following = await self._following(episode, answer.observation)
        if isinstance(following, str):
            return replace(episode, ended=following)
        observation, work = following
        return replace(
            episode,
            turns=(*episode.turns, await self._turn(work, len(episode.turns))),
            observations=(*episode.observations, observation),
        )

    async def _following(
        self, episode: Episode, given: str | Sequence[int] | None
    ) -> tuple[tuple[int, ...], GroupWork] | Ended:
        """Return the observation and the next turn's work, or why there is none."""
        turn, sampling = len(episode.turns), self.work.sampling
        if given is None:
            return "environment"
        if turn == self.limits.max_turns:
            return "max_turns"
        observation = await self._tokens(episode, given)
        room = sampling.max_tokens - len(episode.token_ids) - len(observation)
        if room < 1:
            return "budget"
        prompt = Prompt(
            id=f"{episode.prompt.id}/{self.index}/{turn}",
            token_ids=episode.prompt.token_ids + episode.token_ids + observation,
            metadata=episode.prompt.metadata,
        )
        limited = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        seed = derive_seed(self.work.seed, self.index, turn)
        return observation, GroupWork(prompt, 1, limited, seed, episode_id=self.episode_id)

    async def _turn(self, work: GroupWork, turn: int) -> Sample:
        try:
            group = await self.run(work)
            _check(group, work)
        except GroupFailed as exc:
            raise self._failed(turn, *exc.causes) from exc
        return group.samples[0]

    def _reward(self, episode: Episode, answer: Answer) -> float:
        try:
            return float(answer.reward)
        except (TypeError, ValueError) as exc:
            fault = f"the environment gave {answer.reward!r}, which is no reward"
            raise self._failed(len(episode.turns) - 1, fault) from exc

    async def _tokens(self, episode: Episode, given: str | Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of an observation.

        Raises:
            GroupFailed: when it is none.
        """
        if isinstance(given, str):
            # In a thread: a long text must not keep the engines' answers waiting.
            encoding = asyncio.to_thread(self.encode, given)
            token_ids = await self._ask(episode, "encoding the observation", encoding)
        else:
            token_ids = given
        turn = len(episode.turns) - 1
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
            found = type(token_ids).__name__
            raise self._failed(turn, f"the environment answered with a {found}, no observation")
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self.limits.vocab_size:
                allowed = f"0 to {self.limits.vocab_size - 1}"
                fault = f"the environment wrote {token!r}, which is no token id from {allowed}"
                raise self._failed(turn, fault)
        return tuple(token_ids)

    async def _ask(self, episode: Episode, what: str, call: Awaitable[Any]) -> Any:
        """Wait for a call of the environment, for a limited time.

        Raises:
            GroupFailed: when it fails or takes too long.
        """
        turn, limit_s = len(episode.turns) - 1, self.limits.timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await call
        except Exception as exc:
            told = f"failed: {type(exc).__name__}: {exc}"
            if limit.expired():
                told = f"took longer than {limit_s:g} s (limits.environment_timeout_s)"
            raise self._failed(turn, f"{what} {told}") from exc

    async def _close_failed(self, session: _Session) -> None:
        """Close the environment of an episode that failed or was cancelled."""
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                await session.close()
        except Exception:  # a wall: the episode has ended for another reason, which is told
            log.exception("prompt %s, sample %d: closing failed", self.work.prompt.id, self.index)

    def _failed(self, turn: int, *causes: str) -> GroupFailed:
        where = f"sample {self.index}, turn {turn}"
        return GroupFailed(self.work.prompt.id, [f"{where}: {cause}" for cause in causes])


def _check(group: Group, work: GroupWork) -> None:
    """
    Raises:
        GroupFailed: when these are not the n samples of the work's prompt.
    """
    if [sample.sample for sample in group.samples] != list(range(work.n)):
        found = f"it has {len(group.samples)} samples, and {work.n} were asked for"
        raise GroupFailed(work.prompt.id, [found])
    for sample in group.samples:
        if (fault := turn_fault(sample, work.prompt.token_ids)) is not None:
            raise GroupFailed(work.prompt.id, [f"sample {sample.sample} {fault}"])


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a call in a thread ended."""

    result: Any = None
    error: Exception | None = None


class _Session:
    """The environment of one episode: made when it is first asked, and closed if it was made.

    A plain method runs in a thread, which a time-out or a cancellation leaves behind: it cannot be
    ended. What was made is then closed when that thread has come back.
    """

    def __init__(self, source: AnyEnvironment, prompt: Prompt, sample: int) -> None:
        self._source = source
        self._prompt = prompt
        self._sample = sample
        self._environment: Any = None
        self._last: concurrent.futures.Future[_Outcome] | None = None

    async def observe(self, episode: Episode) -> Any:
        """Ask the environment for its answer."""
        if not isinstance(self._source, EnvironmentFactory):
            return await self._call(self._source.observe, episode)
        if self._environment is None:
            await self._call(self._make, self._source)
        return await self._call(self._environment.observe, episode)

    async def close(self) -> None:
        """Close what was made; without waiting while a call that was left behind still runs."""
        if not isinstance(self._source, EnvironmentFactory):
            return
        if self._last is not None and not self._last.done():
            _start(self._close_late, self._last, asyncio.get_running_loop())
        elif self._environment is not None:
            await self._call(self._environment.close)

    def _make(self, factory: EnvironmentFactory) -> None:
        """In a thread, which notes what it made also when nobody waits for it any more."""
        self._environment = factory.make(self._prompt, self._sample)

    def _close_late(
        self, last: concurrent.futures.Future[_Outcome], loop: asyncio.AbstractEventLoop
    ) -> None:
        last.result()
        if self._environment is None:
            return
        try:
            closing = self._environment.close()
            if inspect.isawaitable(closing):
                asyncio.run_coroutine_threadsafe(_waited(closing), loop).result()
        except Exception:  # a wall: nobody waits for it
            log.exception("prompt %s, sample %d: closing failed", self._prompt.id, self._sample)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            self._last = _start(function, *args)
            outcome = await asyncio.wrap_future(self._last)
            if outcome.error is not None:
                raise outcome.error
            return await _waited(outcome.result)
        except (asyncio.CancelledError, SystemExit) as exc:
            task = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # The environment's own: it must end neither this task unseen nor the event loop.
            raise RuntimeError(f"it raised {type(exc).__name__}") from exc


def _start(function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[_Outcome]:
    """Call a function in a daemon thread of its own: one that hangs must keep neither the threads
    of a pool nor the end of the process waiting."""
    done: concurrent.futures.Future[_Outcome] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome = _Outcome(function(*args))
        except Exception as exc:
            outcome = _Outcome(error=exc)
        except BaseException as exc:  # a wall: the caller must hear of the end, and no loop end
            outcome = _Outcome(error=RuntimeError(f"it raised {type(exc).__name__}"))
        done.set_result(outcome)

    context = contextvars.copy_context()
    name = "splitroll-environment"
    threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()
    return done


async def _waited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
