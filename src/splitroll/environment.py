"""Conversations with an environment, token-exact.

An episode is one sample that an environment may continue: the model's turn, what the environment
answers, the model's next turn. Every turn's prompt is the tokens before it, as they were sampled
and as the environment wrote them; nothing is decoded and tokenised again. The budget of tokens
counts for the whole episode, the environment's included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from splitroll.errors import GroupFailed
from splitroll.types import FailedGroup, Group, Prompt, Sample, SamplingParams

Encode = Callable[[str], Sequence[int]]
"""A text to token ids, without special tokens of its own."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What one sample has come to so far.

    Attributes:
        prompt: the first prompt; `prompt.metadata` is what the caller gave with it.
        turns: the model's; the prompt of each holds all tokens before it.
        observations: token ids that the environment wrote after each turn but the last.
    """

    prompt: Prompt
    turns: tuple[Sample, ...]
    observations: tuple[tuple[int, ...], ...] = ()

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


class Environment(Protocol):
    """What answers the model's turns."""

    def observe(self, episode: Episode) -> str | Sequence[int] | None:
        """Return what follows the episode's last turn, or None to end it.

        A text is tokenised on its own, without special tokens: markers of the chat template,
        such as the opening of the next assistant turn, belong into it. A sampled end-of-sequence
        token stays where it was sampled.
        """


class Generate(Protocol):
    """`BlockingRollout.generate`, as far as it is used here."""

    def __call__(
        self, prompts: Sequence[Prompt], *, n: int, sampling: Sequence[SamplingParams]
    ) -> Iterable[Group | FailedGroup]: ...


def play(
    generate: Generate,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    environment: Environment | None = None,
    encode: Encode | None = None,
) -> list[Episode]:
    """Play n episodes of every prompt, prompt by prompt in the order given.

    The first turn of a prompt is one group of n samples; later turns are groups of one, since
    their prompts differ. An observation that leaves no room for a token to be sampled ends its
    episode and is dropped, so an episode always ends with a sampled token.

    Args:
        sampling: `max_tokens` is the budget of an episode, the environment's tokens included.
        encode: needed when the environment answers with texts.

    Raises:
        GroupFailed: when any sample is missing or incomplete; no shorter list is returned.
    """
    groups = collect(generate(prompts, n=n, sampling=[sampling] * len(prompts)), prompts, n)
    episodes = [Episode(prompt, (sample,)) for prompt in prompts for sample in groups[prompt.id]]
    if environment is None:
        return episodes
    going = list(range(len(episodes)))
    while going:
        observed = {i: _observation(episodes[i], environment, encode) for i in going}
        asked = {
            i: turn
            for i, tokens in observed.items()
            if tokens is not None
            and (turn := _next_turn(episodes[i], i % n, tokens, sampling)) is not None
        }
        turns = [prompt for prompt, _ in asked.values()]
        if turns:
            samplings = [one for _, one in asked.values()]
            done = collect(generate(turns, n=1, sampling=samplings), turns, 1)
            for i, (prompt, _) in asked.items():
                episodes[i] = _extended(episodes[i], prompt, done[prompt.id][0])
        going = list(asked)
    return episodes


def collect(
    groups: Iterable[Group | FailedGroup], prompts: Sequence[Prompt], n: int
) -> Mapping[str, tuple[Sample, ...]]:
    """Return the n samples of each prompt, by its id, from groups that come in any order.

    Raises:
        GroupFailed: when one failed, is missing, or is not made of n whole samples of its prompt.
    """
    asked = {prompt.id: prompt for prompt in prompts}
    done: dict[str, tuple[Sample, ...]] = {}
    for group in groups:
        if isinstance(group, FailedGroup):
            raise group.error
        if group.id not in asked or group.id in done:
            raise GroupFailed(group.id, ["it was not asked for, or came twice"])
        if (fault := _fault(group, asked[group.id], n)) is not None:
            raise GroupFailed(group.id, [fault])
        done[group.id] = group.samples
    for prompt_id in asked:
        if prompt_id not in done:
            raise GroupFailed(prompt_id, ["the rollout ended without it"])
    return done


def _fault(group: Group, prompt: Prompt, n: int) -> str | None:
    if [sample.sample for sample in group.samples] != list(range(n)):
        return f"it has {len(group.samples)} samples, and {n} were asked for"
    for sample in group.samples:
        if sample.prompt_token_ids != prompt.token_ids:
            return f"sample {sample.sample} is of another prompt"
        if sample.finish_reason == "abort":
            return f"sample {sample.sample} was ended early, by a weight update"
        if not sample.token_ids:
            return f"sample {sample.sample} has no tokens"
        if len(sample.logprobs) != len(sample.token_ids):
            counts = f"{len(sample.logprobs)} log-probabilities for {len(sample.token_ids)} tokens"
            return f"sample {sample.sample} has {counts}"
    return None


def _observation(
    episode: Episode, environment: Environment, encode: Encode | None
) -> tuple[int, ...] | None:
    given = environment.observe(episode)
    if given is None:
        return None
    if not isinstance(given, str):
        return tuple(given)
    if encode is None:
        raise TypeError("the environment answers with a text: give `encode`, or return token ids")
    return tuple(encode(given))


def _next_turn(
    episode: Episode, index: int, observation: tuple[int, ...], sampling: SamplingParams
) -> tuple[Prompt, SamplingParams] | None:
    """Return the prompt of the next turn with its sampling; None where no room is left."""
    room = sampling.max_tokens - len(episode.token_ids) - len(observation)
    if room < 1:
        return None
    turn = Prompt(
        id=f"{episode.prompt.id}/{index}/{len(episode.turns)}",
        token_ids=episode.prompt.token_ids + episode.token_ids + observation,
        metadata=episode.prompt.metadata,
    )
    limited = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
    return turn, limited


def _extended(episode: Episode, prompt: Prompt, sample: Sample) -> Episode:
    before = len(episode.prompt.token_ids) + len(episode.token_ids)
    observation = prompt.token_ids[before:]
    return Episode(episode.prompt, (*episode.turns, sample), (*episode.observations, observation))
