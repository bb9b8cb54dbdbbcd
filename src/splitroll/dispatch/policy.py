"""Which engine: pure functions of a snapshot of the fleet and of the work.

A new policy is one class here and one line in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class EngineView:
    """What a policy sees of one engine that is up.

    Attributes:
        tokens_in_flight: prompt and at most generated tokens of the work given to it and not
            ended; counted when work is given and released when it truly ends.
        free_seats: sequences that it could run at once beyond those given to it; may be negative.
    """

    name: str
    tokens_in_flight: int = 0
    free_seats: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engines that may take a piece of work, in the fleet's order.

    Attributes:
        turn: how many pieces of this kind were given out before.
    """

    engines: tuple[EngineView, ...]
    turn: int


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work to place.

    Attributes:
        max_tokens: that each of its `num_samples` may generate; 0 for a prefill.
    """

    prompt_tokens: int
    max_tokens: int
    num_samples: int


class Policy(Protocol):
    """Chooses engines."""

    def choose(self, snapshot: Snapshot, work: Work, count: int) -> tuple[str, ...]:
        """Return `count` different engines, or as many as there are, best first."""
        ...


class RoundRobin:
    """Every engine in its turn, whatever its load."""

    def choose(self, snapshot: Snapshot, work: Work, count: int) -> tuple[str, ...]:
        names = [engine.name for engine in snapshot.engines]
        first = snapshot.turn % len(names) if names else 0
        return tuple((names[first:] + names[:first])[:count])


class LeastLoaded:
    """The engines with the fewest tokens in flight; those with a free seat before all others."""

    def choose(self, snapshot: Snapshot, work: Work, count: int) -> tuple[str, ...]:
        order = sorted(snapshot.engines, key=lambda e: (e.free_seats <= 0, e.tokens_in_flight))
        return tuple(engine.name for engine in order[:count])


POLICIES: dict[str, type[Policy]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded}


def share(indices: Sequence[int], engines: Sequence[E]) -> list[tuple[E, tuple[int, ...]]]:
    """Deal a group's samples out over engines as evenly as they go; no engine gets none."""
    used = engines[: len(indices)]
    return [(engine, tuple(indices[i :: len(used)])) for i, engine in enumerate(used)]
