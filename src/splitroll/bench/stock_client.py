"""A load driven over HTTP, as rollouts are generated with stock servers: one request a sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from splitroll.bench.workloads import EpisodeJob, GroupJob, Load
from splitroll.errors import GroupFailed
from splitroll.router.processes import all_of
from splitroll.types import derive_seed

_SESSION_HEADER = "x-session-id"
"""Where vllm-router's consistent_hash looks for a session; cache_aware reads the tokens."""

_TOLD_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Served:
    """One request, in seconds since the load began.

    Attributes:
        id: of the group or episode, and which sample or turn it was: "g3/0".
        tokens: that it generated.
    """

    id: str
    start_s: float
    end_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Driven:
    """How long a load took, and its requests in the order in which they ended."""

    makespan_s: float
    timeline: tuple[Served, ...]


async def drive(
    url: str,
    load: Load,
    model: str,
    *,
    concurrency: int,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> Driven:
    """Send a load to an OpenAI-compatible server and wait for all of it.

    All samples of all groups and all first turns are asked for at once. A sample is a request of
    its own, with its group as its session, since n > 1 is not safe with a KV handoff. An episode
    is a session too, and asks for its next turn when the last one has ended.

    Args:
        concurrency: requests under way at most.
        seed: each request's own is derived from it. It is also part of the sessions' names, which
            otherwise would be the same in every round.
        timeout_s: longest time that any request may take.

    Raises:
        GroupFailed: when a request fails, or generates other than the length asked for.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    # No connection is used twice: a server may close an idle one just when it is.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        client = _Client(session, model, concurrency, seed)
        samples = [client.sample(g, i) for g in load.groups for i in range(len(g.lengths))]
        await all_of([*samples, *(client.episode(episode) for episode in load.episodes)])
        return Driven(client.elapsed_s(), tuple(client.timeline))


def completion_body(model: str, prompt: Sequence[int], length: int, seed: int) -> dict[str, Any]:
    """Return the request for `length` sampled tokens, each with its log-probability."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": length,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
    }


class _Client:
    """Sends the requests of one load."""

    def __init__(
        self, session: aiohttp.ClientSession, model: str, concurrency: int, seed: int
    ) -> None:
        self._session = session
        self._model = model
        self._seats = asyncio.Semaphore(concurrency)
        self._seed = seed
        self._begun = time.monotonic()
        self.timeline: list[Served] = []

    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    async def sample(self, group: GroupJob, index: int) -> None:
        await self._complete(group.id, index, group.prompt, group.lengths[index])

    async def episode(self, episode: EpisodeJob) -> None:
        tokens: list[int] = []
        for index, turn in enumerate(episode.turns):
            tokens += turn.observation
            tokens += await self._complete(episode.id, index, tokens, turn.length)

    async def _complete(
        self, job: str, index: int, prompt: Sequence[int], length: int
    ) -> list[int]:
        """Return the sampled tokens of one request."""
        body = completion_body(self._model, prompt, length, derive_seed(self._seed, job, index))
        async with self._seats:
            start_s = self.elapsed_s()
            try:
                answer = await self._post(body, session_id=f"{self._seed}/{job}")
                token_ids = _sampled(answer, length)
            except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
                cause = str(exc) or type(exc).__name__
                raise GroupFailed(job, [f"request {index}: {cause}"]) from exc
            self.timeline.append(Served(f"{job}/{index}", start_s, self.elapsed_s(), length))
        return token_ids

    async def _post(self, body: dict[str, Any], session_id: str) -> Any:
        headers = {_SESSION_HEADER: session_id}
        async with self._session.post("/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                text = (await answer.text())[:_TOLD_CHARACTERS]
                raise ValueError(f"HTTP {answer.status}: {text}")
            return await answer.json()


def _sampled(answer: Any, length: int) -> list[int]:
    """Return the sampled tokens of an answer; ValueError when it is not what was asked for."""
    try:
        (choice,) = answer["choices"]
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        counts = len(token_ids), sum(value is not None for value in logprobs)
    except (KeyError, TypeError) as exc:
        raise ValueError(f"not a completion: {exc!r}") from exc
    if counts != (length, length):
        raise ValueError(f"{counts[0]} tokens and {counts[1]} log-probabilities for {length}")
    return list(token_ids)
