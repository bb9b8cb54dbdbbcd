"""Conversations with an environment, token-exact: the values, and what an environment is.

An episode is one sample that an environment may continue: the model's turn, what the environment
answers, the model's next turn. Every turn's prompt is the tokens before it, as they were sampled
and as the environment wrote them; nothing is decoded and tokenised again. The budget of tokens
counts for the whole episode, the environment's included. `splitroll.episodes` plays them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from splitroll.errors import GroupFailed
from splitroll.types import FailedGroup, Group, Prompt, Sample

Encode = Callable[[str], Sequence[int]]
"""A text to token ids, without special tokens of its own."""

Ended = Literal["environment", "max_turns", "budget", "abort"]
"""Why an episode ended. environment: it said so. max_turns: the call allows no more turns. budget:
no token can be sampled after the observation. abort: a weight update ended its last turn early."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What one sample has come to so far.

    Attributes:
        prompt: the first prompt; `prompt.metadata` is what the caller gave with it.
        turns: the model's; the prompt of each holds all tokens before it.
        observations: token ids that the environment wrote after each turn but the last.
        sample: index among the prompt's episodes, from 0.
        rewards: what the environment gave for each turn that it answered: for every turn, once
            the episode has ended, except one that was ended early.
        environment_s: seconds that each of these answers took.
        ended: None while it goes on, and where no environment was asked.
    """

    prompt: Prompt
    turns: tuple[Sample, ...]
    observations: tuple[tuple[int, ...], ...] = ()
    sample: int = 0
    rewards: tuple[float, ...] = ()
    environment_s: tuple[float, ...] = ()
    ended: Ended | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt, those of the environment included."""
        return tuple(token for part in self._parts() for token in part)

    @property
    def env_mask(self) -> tuple[int, ...]:
        """One per token of `token_ids`: 1 if it was sampled, 0 if the environment wrote it."""
        return tuple(int(i % 2 == 0) for i, part in enumerate(self._parts()) for _ in part)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """One per token of `token_ids`; 0.0 for those of the environment."""
        values = list(self.turns[0].logprobs)
        for observation, turn in zip(self.observations, self.turns[1:], strict=True):
            values += [0.0] * len(observation) + list(turn.logprobs)
        return tuple(values)

    def _parts(self) -> list[tuple[int, ...]]:
        """Return turns and observations in order; turns are at even positions."""
        parts = [self.turns[0].token_ids]
        for observation, turn in zip(self.observations, self.turns[1:], strict=True):
            parts += [observation, turn.token_ids]
        return parts


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """All n episodes of one prompt, in order of their index."""

    prompt: Prompt
    episodes: tuple[Episode, ...]

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def is_complete(self) -> bool:
        """Whether no episode was ended early by a weight update."""
        return all(episode.ended != "abort" for episode in self.episodes)


@dataclass(frozen=True, slots=True)
class Answer:
    """An environment's answer to a turn, where it has more to say than what follows it.

    Attributes:
        observation: what follows the turn, as a text or token ids; None ends the episode.
        reward: for the turn.
    """

    observation: str | Sequence[int] | None
    reward: float = 0.0


Answered: TypeAlias = Answer | str | Sequence[int] | None
"""An `Answer`, or its observation alone."""


class Environment(Protocol):
    """What answers the model's turns; episodes ask it side by side."""

    def observe(self, episode: Episode) -> Answered | Awaitable[Answered]:
        """Return what follows the episode's last turn, or None to end it.

        It is asked after every whole turn, also where no room is left for another one: the last
        turn is rewarded, too. A plain method runs in a thread of its own, `async def` on the event
        loop, either for at most `limits.environment_timeout_s`.

        A text is tokenised on its own, without special tokens: markers of the chat template,
        such as the opening of the next assistant turn, belong into it. A sampled end-of-sequence
        token stays where it was sampled.
        """


class ClosableEnvironment(Environment, Protocol):
    """The environment of one episode."""

    def close(self) -> Awaitable[None] | None:
        """Release what it holds: called once, however the episode ended, after the last answer."""


@runtime_checkable
class EnvironmentFactory(Protocol):
    """Makes an environment for each episode: for environments that keep a state."""

    def make(self, prompt: Prompt, sample: int) -> ClosableEnvironment:
        """Return a fresh environment for an episode whose first turn is there; runs in a thread.

        Args:
            sample: index among the prompt's episodes.
        """


AnyEnvironment: TypeAlias = Environment | EnvironmentFactory


def collect(
    groups: Iterable[Group | EpisodeGroup | FailedGroup], prompts: Sequence[Prompt], n: int
) -> list[Episode]:
    """Return n episodes of every prompt, prompt by prompt in the order given.

    Args:
        groups: in any order; a sample of a `Group` is an episode of one turn.

    Raises:
        GroupFailed: when one failed, is missing, or is not made of n whole episodes of its prompt;
            no shorter list is returned.
    """
    asked = {prompt.id: prompt for prompt in prompts}
    done: dict[str, tuple[Episode, ...]] = {}
    for group in groups:
        if isinstance(group, FailedGroup):
            raise group.error
        if group.id not in asked or group.id in done:
            raise GroupFailed(group.id, ["it was not asked for, or came twice"])
        episodes = _episodes(group)
        if (fault := _fault(episodes, asked[group.id], n)) is not None:
            raise GroupFailed(group.id, [fault])
        done[group.id] = episodes
    for prompt_id in asked:
        if prompt_id not in done:
            raise GroupFailed(prompt_id, ["the rollout ended without it"])
    return [episode for prompt in prompts for episode in done[prompt.id]]


def turn_fault(turn: Sample, prompt_token_ids: Sequence[int]) -> str | None:
    """Return what is wrong with a turn that was generated from these tokens; None if nothing."""
    if turn.prompt_token_ids != prompt_token_ids:
        return "is of another prompt"
    if len(turn.logprobs) != len(turn.token_ids):
        return f"has {len(turn.logprobs)} log-probabilities for {len(turn.token_ids)} tokens"
    if not turn.token_ids and turn.finish_reason != "abort":
        return "has no tokens"
    return None


def _episodes(group: Group | EpisodeGroup) -> tuple[Episode, ...]:
    if isinstance(group, EpisodeGroup):
        return group.episodes
    return tuple(Episode(group.prompt, (one,), sample=one.sample) for one in group.samples)


def _fault(episodes: Sequence[Episode], prompt: Prompt, n: int) -> str | None:
    if [episode.sample for episode in episodes] != list(range(n)):
        return f"it has {len(episodes)} samples, and {n} were asked for"
    for episode in episodes:
        before = prompt.token_ids
        for turn, observation in zip(episode.turns, (*episode.observations, ()), strict=True):
            fault = turn_fault(turn, before)
            if turn.finish_reason == "abort":
                fault = "was ended early, by a weight update"
            if fault is not None:
                return f"sample {episode.sample} {fault}"
            before += turn.token_ids + observation
    return None
