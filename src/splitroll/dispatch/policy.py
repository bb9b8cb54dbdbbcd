"""Which engine gets which work: pure functions of a snapshot of the fleet and of the work.

`decide(snapshot, work) -> GroupRoute` says which engine prefills, if any, which decodes, and how
many of a group's samples go there. A new policy is one class here and one line in `POLICIES`.

The adaptive policy takes the route after which all known work is estimated to be done soonest:

    max(the drain times of the engines touched, (all drain times + work that waits) / engines)

Under the first term work moves away from the engine that would finish last; while the second one is
larger, there is enough work for all, and what counts is to add little of it: siblings together,
prefixes where they are, no transfer for its own sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from splitroll.dispatch.books import Bools, Floats, Snapshot

Numbers = npt.NDArray[np.intp]
"""Engines, by number."""

E = TypeVar("E")

_WORK_WEIGHT = 0.1
_DRAIN_WEIGHT = 0.02
"""What a second of added work, and of drain time, weigh against a second of the estimated finish:
they decide between routes that finish alike."""
_SPREADS = (2, 4, 8)
_SPREAD_MARGIN = 0.02
_HANDOFF_MARGIN = 0.05
"""By how much a handoff between engines that both decode must be better than none."""
_LEAST_LOADED = 1e9


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work to place: the samples of a group, or the rest of one sample.

    Attributes:
        prompt_tokens: to have KV of before the first token; what was generated so far included.
        samples: how many share that prompt.
        expected: tokens that each is expected to generate; `max_tokens`: at most.
        cached: (mask of engines, tokens) of prompt prefixes that engines hold.
        held_by: engine with a handle to the whole prompt's KV; -1 for none.
        avoid: mask of engines to take only if there is no other.
        block_size, block_bytes: of the engines' KV.
        transfer: (seconds, seconds per byte) of a handoff in this fleet.
        spread: how many decode engines may share the samples; None lets the policy choose.
    """

    prompt_tokens: int
    samples: int
    expected: float
    max_tokens: int
    cached: Sequence[tuple[int, int]] = ()
    held_by: int = -1
    avoid: int = 0
    block_size: int = 32
    block_bytes: int = 0
    transfer: tuple[float, float] = (0.0, 0.0)
    spread: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The samples that one engine decodes.

    Attributes:
        prefill: the engine that computes the prompt's KV; `decode` itself without a handoff.
    """

    prefill: int
    decode: int
    samples: int

    @property
    def is_local(self) -> bool:
        return self.prefill == self.decode


@dataclass(frozen=True, slots=True)
class Why:
    """Estimates behind a route, in seconds from now until all known work is done.

    Attributes:
        local: the best route without a handoff; `handoff`: the best with one; None where there is
            none, or where the policy does not estimate.
        added: engine-seconds that the route adds; `added_local`: that the best local one would.
            The steps that a decode engine makes anyhow are in neither.
    """

    policy: str
    local: float | None = None
    handoff: float | None = None
    added: float = 0.0
    added_local: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """Where a piece of work goes."""

    parts: tuple[Part, ...]
    why: Why


class Policy(Protocol):
    """Chooses routes.

    Attributes:
        chooses_late: after a prefill, the decode engine may be chosen anew.
    """

    name: str
    chooses_late: bool

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute | None:
        """Return the route; None when no engine that may take the work is up."""
        ...


class RoundRobin:
    """Every engine in its turn, whatever its load; the pair is chosen before the prefill."""

    name = "round_robin"
    chooses_late = False

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute | None:
        prefills, decodes = _split_roles(snapshot, work)
        if not decodes.size:
            return None
        turn = snapshot.turn
        chosen = np.roll(decodes, -(turn % decodes.size))[: work.spread or 1]
        prefill = prefills[turn % prefills.size] if prefills.size else -1
        return _split(int(prefill), chosen, work, Why(self.name))


class LeastLoaded:
    """The engines with the fewest tokens in flight; those with a free seat before all others."""

    name = "least_loaded"
    chooses_late = True

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute | None:
        prefills, decodes = _split_roles(snapshot, work)
        if not decodes.size:
            return None
        keys = snapshot.tokens + _LEAST_LOADED * (snapshot.free_seats <= 0)
        chosen = decodes[np.argsort(keys[decodes], kind="stable")][: work.spread or 1]
        prefill = prefills[np.argmin(snapshot.tokens[prefills])] if prefills.size else -1
        return _split(int(prefill), chosen, work, Why(self.name))


class Static:
    """Always split, each leg on the engine of its role that would be done with it first."""

    name = "static"
    chooses_late = True

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute | None:
        prefills, decodes = _split_roles(snapshot, work)
        if not decodes.size:
            return None
        costs = _Costs(snapshot, work)
        decode = costs.steps() + costs.tokens(work.samples)
        order = np.argsort((snapshot.drain_s + decode)[decodes], kind="stable")
        prefill = -1
        if prefills.size:
            prefill = int(prefills[np.argmin((snapshot.drain_s + costs.prefill)[prefills])])
        return _split(prefill, decodes[order][: work.spread or 1], work, Why(self.name))


class Colocated:
    """Never hand off: each engine computes the prompts of what it decodes."""

    name = "colocated"
    chooses_late = True

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute | None:
        candidates = _numbers(snapshot.decodes, work.avoid)
        if not candidates.size:
            return None
        chooser = _Chooser(snapshot, work, candidates, candidates)
        return chooser.route(self.name, chooser.local(), None)


class Adaptive:
    """See the module's docstring."""

    name = "adaptive"
    chooses_late = True

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute | None:
        decodes = _numbers(snapshot.decodes, work.avoid)
        if not decodes.size:
            return None
        prefills = _numbers(snapshot.prefills, work.avoid)
        chooser = _Chooser(snapshot, work, prefills, decodes)
        return chooser.route(self.name, chooser.local(), chooser.handoff())


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Adaptive, Static, Colocated, LeastLoaded, RoundRobin)
}


@dataclass(frozen=True, slots=True)
class _Option:
    """A route with its estimates, in seconds; see `Why`."""

    parts: tuple[Part, ...]
    finish: float
    touched: float
    added: float

    @property
    def score(self) -> float:
        return self.finish + _WORK_WEIGHT * self.added + _DRAIN_WEIGHT * self.touched


@dataclass(slots=True)
class _Costs:
    """What a piece of work takes on every engine."""

    snapshot: Snapshot
    work: Work
    prefill: Floats = field(init=False)
    """Seconds of computing what is not there, on every engine."""
    cached: Floats = field(init=False)

    def __post_init__(self) -> None:
        snapshot, work = self.snapshot, self.work
        tokens = work.prompt_tokens
        self.cached = _cached_tokens(work, len(snapshot.names))
        new = tokens - self.cached
        pairs = new * (tokens + self.cached) / 2
        self.prefill = snapshot.token * new + snapshot.pair * pairs
        if work.held_by >= 0:
            self.prefill[work.held_by] = 0.0

    def steps(self) -> Floats:
        """Return the seconds of the steps that each engine would not make without the work."""
        longer = np.maximum(self.work.expected - self.snapshot.longest, 0.0)
        seconds: Floats = self.snapshot.step * longer
        return seconds

    def tokens(self, samples: int) -> Floats:
        """Return the seconds that so many samples add to the steps of each engine."""
        snapshot, work = self.snapshot, self.work
        context = work.prompt_tokens + work.expected / 2
        each: Floats = snapshot.sequence + snapshot.context_cost * context
        return (work.expected * samples) * each

    def joining(self, engine: int, samples: int) -> float:
        """Return the seconds of what each sibling computes itself: what fills no block."""
        rest = (self.work.prompt_tokens - 1) % self.work.block_size + 1
        return float(self.snapshot.token[engine]) * rest * max(0, samples - 1)

    def alone(self, engine: int, samples: int) -> float:
        """Return how long the work decodes on an engine if nothing there ends meanwhile."""
        snapshot, work = self.snapshot, self.work
        context = work.prompt_tokens + work.expected / 2
        step = snapshot.step[engine] + snapshot.sequence[engine] * (
            snapshot.sequences[engine] + samples
        )
        step += snapshot.context_cost[engine] * (snapshot.context[engine] + samples * context)
        return float(step) * work.expected

    def transfer(self, decode: int) -> float:
        """Return the seconds of moving the prompt's KV to an engine, as far as it lacks it."""
        constant, per_byte = self.work.transfer
        size = self.work.block_size
        blocks = -(-(self.work.prompt_tokens - float(self.cached[decode])) // size)
        return constant + per_byte * blocks * self.work.block_bytes


class _Chooser:
    """Finds the best local route and the best one with a handoff."""

    def __init__(self, snapshot: Snapshot, work: Work, prefills: Numbers, decodes: Numbers) -> None:
        self._snapshot = snapshot
        self._work = work
        self._costs = _Costs(snapshot, work)
        self._decodes = decodes
        self._prefills = prefills
        self._total = float(snapshot.drain_s @ snapshot.up)
        self._engines = max(1, int(np.count_nonzero(snapshot.up)))
        self._steps = self._costs.steps()
        self._decode_all = self._steps + self._costs.tokens(work.samples)
        self._crowded = _crowding(snapshot, work.samples)

    def local(self) -> _Option | None:
        """Return the best route on one engine, or with the samples spread over several."""
        if not self._decodes.size:
            return None
        keys = (self._snapshot.drain_s + self._costs.prefill + self._decode_all + self._crowded)[
            self._decodes
        ]
        best = self._local_on((int(self._decodes[np.argmin(keys)]),))
        return self._spread(best, keys)

    def handoff(self) -> _Option | None:
        """Return the best route with a prefill engine that is not the decode engine."""
        if not self._decodes.size or not self._prefills.size:
            return None
        snapshot, costs = self._snapshot, self._costs
        keys = snapshot.drain_s + self._decode_all + self._crowded
        decodes = _least(keys, self._decodes)
        if self._work.held_by >= 0:
            prefills = [self._work.held_by]
        else:
            # The two best for either part: one engine may be the best for both.
            prefills = _least(snapshot.backlog_s + costs.prefill, self._prefills)
            prefills += _least(snapshot.drain_s + costs.prefill, self._prefills)
        pairs = {(p, d) for p in prefills for d in decodes if p != d}
        options = [self._moved(p, d) for p, d in sorted(pairs)]
        return min(options, key=lambda option: option.score, default=None)

    def route(
        self, policy: str, local: _Option | None, handoff: _Option | None
    ) -> GroupRoute | None:
        chosen = local or handoff
        if chosen is None:
            return None
        if local is not None and handoff is not None:
            both = self._snapshot.decodes[handoff.parts[0].prefill]
            margin = _HANDOFF_MARGIN if both else 0.0
            if handoff.score < (1 - margin) * local.score:
                chosen = handoff
        why = Why(
            policy,
            local=local.finish if local else None,
            handoff=handoff.finish if handoff else None,
            added=chosen.added,
            added_local=local.added if local else chosen.added,
        )
        return GroupRoute(chosen.parts, why)

    def _local_on(self, engines: Sequence[int]) -> _Option:
        added, touched = 0.0, 0.0
        parts = []
        shares = _shares(self._work.samples, len(engines))
        tokens = {samples: self._costs.tokens(samples) for samples in set(shares)}
        for engine, samples in zip(engines, shares, strict=True):
            prefill = float(self._costs.prefill[engine])
            more = prefill + self._costs.joining(engine, samples) + float(tokens[samples][engine])
            drain = float(self._snapshot.drain_s[engine] + self._crowded[engine]) + more
            drain += float(self._steps[engine])
            own = float(self._snapshot.backlog_s[engine]) + prefill
            touched = max(touched, drain, own + self._costs.alone(engine, samples))
            added += more
            parts.append(Part(engine, engine, samples))
        return self._option(tuple(parts), touched, added)

    def _moved(self, prefill: int, decode: int) -> _Option:
        snapshot, costs, work = self._snapshot, self._costs, self._work
        compute = float(costs.prefill[prefill])
        transfer = costs.transfer(decode)
        joining = costs.joining(decode, work.samples)
        more = joining + float(self._decode_all[decode] - self._steps[decode])
        there = compute + transfer
        if work.held_by < 0:
            there += float(snapshot.backlog_s[prefill])
        drain = float(snapshot.drain_s[decode] + self._crowded[decode] + self._steps[decode]) + more
        touched = max(drain, there + joining + costs.alone(decode, work.samples))
        if compute:
            touched = max(touched, float(snapshot.drain_s[prefill]) + compute)
        parts = (Part(prefill, decode, work.samples),)
        return self._option(parts, touched, compute + transfer + more)

    def _spread(self, best: _Option, keys: Floats) -> _Option:
        """Return the best number of engines for a group's samples: more of them cost a prefill
        each, and pay where one engine would otherwise finish late."""
        asked, samples = self._work.spread, self._work.samples
        if samples == 1 or self._decodes.size == 1 or asked == 1:
            return best
        counts = [c for c in (*_SPREADS, self._decodes.size) if c <= self._decodes.size]
        if asked is not None:
            counts = [min(asked, samples, int(self._decodes.size))]
        waits = (self._total + self._snapshot.waiting_s) / self._engines
        if asked is None and best.touched <= waits:
            return best  # there is enough to do for the others
        order = self._decodes[np.argsort(keys, kind="stable")]
        for count in dict.fromkeys(counts):
            if count > samples:
                break
            option = self._local_on([int(e) for e in order[:count]])
            if asked is not None or option.score < best.score * (1 - _SPREAD_MARGIN):
                best = option
        return best

    def _option(self, parts: tuple[Part, ...], touched: float, added: float) -> _Option:
        mean = (self._total + self._snapshot.waiting_s + added) / self._engines
        return _Option(parts, max(touched, mean), touched, added)


def share(indices: Sequence[int], engines: Sequence[E]) -> list[tuple[E, tuple[int, ...]]]:
    """Deal a group's samples out over engines as evenly as they go; no engine gets none."""
    used = engines[: len(indices)]
    return [(engine, tuple(indices[i :: len(used)])) for i, engine in enumerate(used)]


def _shares(samples: int, engines: int) -> list[int]:
    return [len(range(i, samples, engines)) for i in range(engines)]


def _split_roles(snapshot: Snapshot, work: Work) -> tuple[Numbers, Numbers]:
    """Return the engines of a static split: those that do not decode by preference prefill."""
    decodes = _numbers(snapshot.prefers_decode, work.avoid)
    prefills = _numbers(snapshot.prefills & ~snapshot.prefers_decode, work.avoid)
    if not decodes.size:
        decodes = _numbers(snapshot.decodes, work.avoid)
    if work.held_by >= 0:
        prefills = np.array([work.held_by])
    return prefills, decodes


def _split(prefill: int, decodes: Numbers, work: Work, why: Why) -> GroupRoute:
    counts = _shares(work.samples, min(len(decodes), work.samples))
    parts = tuple(
        Part(prefill if prefill >= 0 else int(decode), int(decode), samples)
        for decode, samples in zip(decodes, counts, strict=False)
    )
    return GroupRoute(parts, why)


def _numbers(mask: Bools, avoid: int) -> Numbers:
    """Return the engines of a mask, without those to avoid unless there are no others."""
    numbers = np.flatnonzero(mask)
    if not avoid:
        return numbers
    fresh = np.array([n for n in numbers if not avoid >> int(n) & 1], dtype=numbers.dtype)
    return fresh if fresh.size else numbers


def _least(keys: Floats, numbers: Numbers) -> list[int]:
    """Return the two of these engines with the least keys, least first."""
    mine = keys[numbers]
    first = int(np.argmin(mine))
    if mine.size == 1:
        return [int(numbers[first])]
    mine[first] = np.inf
    return [int(numbers[first]), int(numbers[np.argmin(mine)])]


def _crowding(snapshot: Snapshot, samples: int) -> Floats:
    """Return the seconds that work would wait for seats, about: a wave of what runs there."""
    over: Floats = np.maximum(samples - snapshot.free_seats, 0.0)
    if not over.any():
        return over
    waits: Floats = over / np.maximum(snapshot.sequences + over, 1.0) * snapshot.drain_s
    return waits


def _cached_tokens(work: Work, engines: int) -> Floats:
    cached = np.zeros(engines)
    most = (work.prompt_tokens - 1) // work.block_size * work.block_size
    for mask, tokens in work.cached:
        value = float(min(tokens, most))
        if mask.bit_count() > 16:
            bits = np.frombuffer(mask.to_bytes((engines + 7) // 8, "little"), dtype=np.uint8)
            cached[np.unpackbits(bits, bitorder="little")[:engines].astype(bool)] = value
        else:
            while mask:
                low = mask & -mask
                cached[low.bit_length() - 1] = value
                mask ^= low
    return cached
