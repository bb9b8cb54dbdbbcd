"""Where the wall time of a generation went, from what its samples say of their own time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from splitroll.types import Group, Timing

_WAITING = (0, 4)
_COMPUTING = (1, 2, 3)
"""Places of the phases of `Phases`."""


@dataclass(frozen=True, slots=True)
class Phases:
    """The wall time of a generation by phase, in seconds."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float
    environment_s: float = 0.0


def attribute(groups: Iterable[Group], wall_s: float) -> Phases:
    """Split the wall time of a generation into phases that add up to it.

    The phases of different samples overlap, so their sums say nothing of the wall. Instead each
    instant is shared out: a sample's phases follow each other from its acceptance (queue, prefill,
    transfer, decode), and an instant belongs to prefill, transfer and decode in proportion to the
    samples that are in each. It belongs to the queue only when no sample is in any of them: as
    long as one computes, another's waiting costs no time of its own.

    `Timing` has no clock times. All samples are therefore placed as if accepted at once, which is
    so for up to `dispatch.max_queued_groups` groups, and this timeline, from acceptance to the
    last sample's end, is scaled to `wall_s`: what is found are shares of the wall. With more groups
    than that, the shares are those of groups accepted together. Time before acceptance and after
    the last sample, such as encoding prompts, is spread in proportion. What a sample spent on
    attempts that failed counts as queueing, as it does in `Timing`.

    Args:
        groups: complete groups of one call of `generate`.
        wall_s: wall time of that call, in seconds.

    Returns:
        Phases, each at least 0, whose sum is `wall_s`; all of it in the queue without samples.
    """
    turns = [(sample.timing, 0.0) for group in groups for sample in group.samples]
    return attribute_turns(([turn] for turn in turns), wall_s)


def attribute_turns(episodes: Iterable[Sequence[tuple[Timing, float]]], wall_s: float) -> Phases:
    """Split the wall time of a generation of episodes, as `attribute` does.

    An instant belongs to the environment, as to the queue, only when no turn computes.

    Args:
        episodes: of each its turns in order, with the seconds that the environment took after it.
    """
    changes = [change for turns in episodes for change in _changes(turns)]
    spent_s = [0.0] * 5
    active = [0] * 5
    before_s = 0.0
    for at_s, phase, delta in sorted(changes):
        busy = _COMPUTING if any(active[i] for i in _COMPUTING) else _WAITING
        count = sum(active[i] for i in busy)
        for i in busy:
            spent_s[i] += (at_s - before_s) * active[i] / max(1, count)
        active[phase] += delta
        before_s = at_s
    whole_s = sum(spent_s)
    if whole_s <= 0:
        return Phases(wall_s, 0.0, 0.0, 0.0)
    return Phases(*(wall_s * (s / whole_s) for s in spent_s))


def _changes(turns: Sequence[tuple[Timing, float]]) -> Iterable[tuple[float, int, int]]:
    """Yield when a sample enters and leaves each phase: (seconds from acceptance, phase, +-1)."""
    at_s = 0.0
    for timing, environment_s in turns:
        for phase, seconds in enumerate((*astuple(timing), environment_s)):
            yield at_s, phase, 1
            at_s += max(0.0, seconds)
            yield at_s, phase, -1
