"""The work that alternatives are compared on: prompts and forced output lengths, by seed. Pure.

Output lengths are drawn here, so that every alternative generates the same number of tokens. No
policy is told them: all that it knows of a sample is `max_tokens`, and what has finished before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

_LOW_TOKEN, _HIGH_TOKEN = 100, 4000
"""Prompts are random ids of this range, which every model here has."""


@dataclass(frozen=True, slots=True)
class GroupJob:
    """n samples of one prompt, all asked for at the start.

    Attributes:
        lengths: tokens that each sample generates.
    """

    id: str
    prompt: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of an episode: tokens that are appended to all before them, then sampled ones."""

    observation: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """Turns of one sample; each is asked for when the one before it has ended."""

    id: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What one round of a workload asks for, all at once.

    Attributes:
        max_tokens: of every sample and turn, which is all that a policy knows of their lengths.
    """

    groups: tuple[GroupJob, ...] = ()
    episodes: tuple[EpisodeJob, ...] = ()
    max_tokens: int = 64

    def shifted(self, by: int) -> Load:
        """Return the same shapes and lengths with other tokens, another set for each number."""
        groups = tuple(replace(group, prompt=_shift(group.prompt, by)) for group in self.groups)
        episodes = tuple(
            replace(
                episode,
                turns=tuple(
                    replace(t, observation=_shift(t.observation, by)) for t in episode.turns
                ),
            )
            for episode in self.episodes
        )
        return replace(self, groups=groups, episodes=episodes)

    @property
    def samples(self) -> int:
        """Sequences to decode, each turn of an episode counted."""
        return sum(len(g.lengths) for g in self.groups) + sum(len(e.turns) for e in self.episodes)

    @property
    def completion_tokens(self) -> int:
        return sum(sum(group.lengths) for group in self.groups) + sum(
            turn.length for episode in self.episodes for turn in episode.turns
        )


def burst(draw: random.Random, scale: float = 1) -> Load:
    """16 groups x 8, prompts of about 200 tokens, lognormal outputs of 64 tokens in the mean."""
    lengths = _lognormal(mean=64, sigma=0.5, low=8, high=256)
    return _groups(draw, round(16 * scale), 8, (180, 220), lengths, 256)


def long_prompt(draw: random.Random, scale: float = 1) -> Load:
    """8 groups x 8, prompts of about 1,500 tokens, outputs of 48 tokens."""
    return _groups(draw, round(8 * scale), 8, (1450, 1550), lambda _: 48, 48)


def agentic(draw: random.Random, scale: float = 1) -> Load:
    """8 episodes x 6 turns: a first prompt of 800 tokens, observations of 500, outputs of 32."""
    return _episodes(draw, round(8 * scale))


def agentic_wide(draw: random.Random, scale: float = 1) -> Load:
    """24 episodes like those of `agentic`."""
    return _episodes(draw, round(24 * scale))


def long_tail(draw: random.Random, scale: float = 1) -> Load:
    """8 groups x 8, prompts of about 300 tokens, heavy-tailed outputs of 16 to 768 tokens."""
    lengths = _pareto(exponent=1.1, low=16, high=768)
    return _groups(draw, round(8 * scale), 8, (280, 320), lengths, 768)


def shared_system_prompt(draw: random.Random, scale: float = 1) -> Load:
    """24 groups x 4 whose prompts of 1,150 tokens begin with the same 1,024; outputs of 32."""
    system = _tokens(draw, 1024)
    groups = tuple(
        GroupJob(f"g{i}", system + _tokens(draw, 126), (32,) * 4) for i in range(round(24 * scale))
    )
    return Load(groups, max_tokens=32)


def mixed(draw: random.Random, scale: float = 1) -> Load:
    """`agentic` and `burst` at once."""
    one, other = agentic(draw, scale), burst(draw, scale)
    return Load(other.groups, one.episodes, max(one.max_tokens, other.max_tokens))


WORKLOADS: Mapping[str, Callable[[random.Random, float], Load]] = {
    "burst": burst,
    "long-prompt": long_prompt,
    "agentic": agentic,
    "agentic-wide": agentic_wide,
    "long-tail": long_tail,
    "shared-system-prompt": shared_system_prompt,
    "mixed": mixed,
}


def make_load(workload: str, seed: int, scale: float = 1) -> Load:
    """Return one round of a workload; equal arguments give equal loads, other seeds fresh ones."""
    return WORKLOADS[workload](random.Random(f"{workload}-{seed}"), scale)


def _groups(
    draw: random.Random,
    count: int,
    n: int,
    prompt_range: tuple[int, int],
    length: Callable[[random.Random], int],
    max_tokens: int,
) -> Load:
    groups = tuple(
        GroupJob(
            f"g{i}",
            _tokens(draw, draw.randint(*prompt_range)),
            tuple(length(draw) for _ in range(n)),
        )
        for i in range(count)
    )
    return Load(groups, max_tokens=max_tokens)


def _episodes(draw: random.Random, count: int) -> Load:
    episodes = tuple(
        EpisodeJob(
            f"e{i}", tuple(Turn(_tokens(draw, 500 if turn else 800), 32) for turn in range(6))
        )
        for i in range(count)
    )
    return Load(episodes=episodes, max_tokens=32)


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(_LOW_TOKEN, _HIGH_TOKEN), k=count))


def _shift(tokens: tuple[int, ...], by: int) -> tuple[int, ...]:
    span = _HIGH_TOKEN - _LOW_TOKEN
    return tuple(_LOW_TOKEN + (token - _LOW_TOKEN + 7 * by) % span for token in tokens)


def _lognormal(mean: float, sigma: float, low: int, high: int) -> Callable[[random.Random], int]:
    mu = math.log(mean) - sigma**2 / 2

    def length(draw: random.Random) -> int:
        return min(high, max(low, round(draw.lognormvariate(mu, sigma))))

    return length


def _pareto(exponent: float, low: int, high: int) -> Callable[[random.Random], int]:
    def length(draw: random.Random) -> int:
        return min(high, int(low * draw.paretovariate(exponent)))

    return length
