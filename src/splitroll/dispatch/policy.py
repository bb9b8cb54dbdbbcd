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

from collections.abc import Mapping, Sequence
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
_HANDOFF_MARGIN = 0.5
_NOISE = 0.05
"""By how much a handoff between engines that both decode must be better: half of the work that the
local route adds, and more than the estimate of what the other engine has to do is wrong."""
_AS_FAST = 1.25
_LEAST_LOADED = 1e9


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work to place: the samples of a group, or the rest of one sample.

    Attributes:
        prompt_tokens: to have KV of before the first token; what was generated so far included.
        samples: how many share that prompt.
        expected: tokens that each is expected to generate; `max_tokens`: at most.
        cached: (mask of engines, tokens) of prompt prefixes that engines hold.
        room: by engine, blocks of KV that its cache can take before it drops others; None if what
            is cached is not to be moved: others may count on it, or come for it too.
        held_by: engine with a handle to the whole prompt's KV; -1 for none.
        avoid: mask of engines to take only if there is no other.
        block_size, block_bytes: of the engines' KV.
        transfer: (seconds, seconds per byte) of a handoff in this fleet; `pairs`: of one from an
            engine to another, where any was seen.
        spread: how many decode engines may share the samples; None lets the policy choose.
    """

    prompt_tokens: int
    samples: int
    expected: float
    max_tokens: int
    cached: Sequence[tuple[int, int]] = ()
    room: Sequence[int] | None = None
    held_by: int = -1
    avoid: int = 0
    block_size: int = 32
    block_bytes: int = 0
    transfer: tuple[float, float] = (0.0, 0.0)
    pairs: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    spread: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The samples that one engine decodes.

    Attributes:
        prefill: the engine that computes the prompt's KV; `decode` itself without a handoff.
        kv_from: engine whose KV of the prompt's first `kv_tokens` tokens, all in full blocks, is
            moved to `decode` before that computes the rest; -1 for none.
    """

    prefill: int
    decode: int
    samples: int
    kv_from: int = -1
    kv_tokens: int = 0

    @property
    def is_local(self) -> bool:
        return self.prefill == self.decode


@dataclass(frozen=True, slots=True)
class Why:
    """Estimates behind a route, in seconds from now until all known work is done.

    Attributes:
        finish: the route taken; `local`: the best one without moving KV; `handoff`: the best with
            a prefill elsewhere; `moved`: the best that moves what is cached and computes the rest;
            None where there is none, or where the policy does not estimate.
        added: engine-seconds that the route adds; `added_local`: that the best local one would.
            The steps that a decode engine makes anyhow are in neither.
    """

    policy: str
    finish: float | None = None
    local: float | None = None
    handoff: float | None = None
    moved: float | None = None
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
        return chooser.route(self.name, chooser.local())


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
        return chooser.route(self.name, chooser.local(), chooser.handoff(), chooser.moved())


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Adaptive, Static, Colocated, LeastLoaded, RoundRobin)
}


@dataclass(slots=True, eq=False)
class _Option:
    """A route with its estimates, in seconds; see `Why` and `Part`. `prefill` is -1 without a
    handoff."""

    prefill: int
    decodes: tuple[int, ...]
    finish: float
    touched: float
    added: float
    score: float
    kv_from: int = -1
    kv_tokens: int = 0

    def parts(self, samples: int) -> tuple[Part, ...]:
        return tuple(
            Part(
                decode if self.prefill < 0 else self.prefill,
                decode,
                share,
                self.kv_from,
                self.kv_tokens,
            )
            for decode, share in zip(self.decodes, _shares(samples, len(self.decodes)), strict=True)
        )


@dataclass(slots=True)
class _Costs:
    """What a piece of work takes on every engine."""

    snapshot: Snapshot
    work: Work
    prefill: Floats = field(init=False)
    """Seconds of computing what is not there, on every engine."""
    cached: Floats = field(init=False)
    context: float = field(init=False)
    """Tokens of a sequence's context in the mean over its life."""
    rest: int = field(init=False)
    """Prompt tokens that fill no block."""
    each: Floats = field(init=False)
    """Seconds that one more sequence adds to a step."""

    def __post_init__(self) -> None:
        snapshot, work = self.snapshot, self.work
        tokens = work.prompt_tokens
        self.cached = _cached_tokens(work, len(snapshot.names))
        if work.cached:
            new = tokens - self.cached
            self.prefill = snapshot.token * new
            new *= tokens + self.cached
            new *= 0.5
            self.prefill += snapshot.pair * new
        else:
            self.prefill = snapshot.token * tokens + snapshot.pair * (tokens * tokens / 2)
        if work.held_by >= 0:
            self.prefill[work.held_by] = 0.0
        self.context = tokens + work.expected / 2
        self.rest = (tokens - 1) % work.block_size + 1
        self.each = snapshot.context_cost * self.context
        self.each += snapshot.sequence

    def steps(self) -> Floats:
        """Return the seconds of the steps that each engine would not make without the work."""
        longer = np.maximum(self.work.expected - self.snapshot.longest, 0.0)
        seconds: Floats = self.snapshot.step * longer
        return seconds

    def tokens(self, samples: int) -> Floats:
        """Return the seconds that so many samples add to the steps of each engine."""
        return (self.work.expected * samples) * self.each

    def on(self, engine: int, samples: int) -> tuple[float, float, float]:
        """Return the seconds of samples on one engine: of what each sibling computes itself, which
        is what fills no block; that they add to its steps; of all their steps if nothing that runs
        there ends meanwhile."""
        snapshot, expected = self.snapshot, self.work.expected
        joining = snapshot.token.item(engine) * self.rest * (samples - 1)
        tokens = expected * samples * self.each.item(engine)
        step = snapshot.step.item(engine) + snapshot.sequence.item(engine) * (
            snapshot.sequences.item(engine) + samples
        )
        context = snapshot.context.item(engine) + samples * self.context
        step += snapshot.context_cost.item(engine) * context
        return joining, tokens, step * expected

    def transfer(self, prefill: int, decode: int, tokens: int) -> float:
        """Return the seconds of moving the KV of the prompt's first tokens from one engine to
        another, as far as that one lacks it."""
        constant, per_byte = self.work.pairs.get((prefill, decode), self.work.transfer)
        blocks = -(-(tokens - self.cached.item(decode)) // self.work.block_size)
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
        self._crowded = _crowding(snapshot, work.samples)
        self._busy = snapshot.drain_s + self._steps
        self._busy += self._crowded
        """Seconds that an engine needs for all that it has, in the steps that the work needs."""
        self._done = self._busy + self._costs.tokens(work.samples)

    def local(self) -> _Option | None:
        """Return the best route on one engine, or with the samples spread over several."""
        if not self._decodes.size:
            return None
        if (self._decodes == self._work.held_by).any():
            # Elsewhere the KV would be moved to, not computed again.
            return self._local_on((self._work.held_by,))
        keys = (self._done + self._costs.prefill).take(self._decodes)
        at = int(keys.argmin())
        if self._snapshot.waiting_s > 0.0:
            at = self._with_room(at, keys)
        best = self._local_on((self._decodes.item(at),))
        return self._spread(best, keys)

    def _margin(self, local: _Option, other: _Option) -> float:
        """Return by how much a route that moves KV must be better than one that does not."""
        if other.kv_from >= 0 or not self._snapshot.decodes[other.prefill]:
            return 0.0  # nothing more is computed; it is what that engine is for
        busy = max(self._snapshot.drain_s.item(decode) for decode in other.decodes)
        return max(_HANDOFF_MARGIN * local.added, _NOISE * busy)

    def _with_room(self, best: int, keys: Floats) -> int:
        """Return the best engine with free seats that is about as fast, where the best one has
        none: while work waits for seats, those that are free are worth more than short queues."""
        free = self._snapshot.free_seats.take(self._decodes) >= self._work.samples
        if free[best]:
            return best
        steps = self._snapshot.step.take(self._decodes)
        free &= steps <= _AS_FAST * steps[best]
        return int(np.where(free, keys, np.inf).argmin()) if free.any() else best

    def handoff(self) -> _Option | None:
        """Return the best route with a prefill engine that is not the decode engine."""
        if not self._decodes.size or not self._prefills.size:
            return None
        snapshot, costs, work = self._snapshot, self._costs, self._work
        decodes = _least(self._done, self._decodes)
        if work.held_by >= 0:
            prefills = [work.held_by]
        else:
            # The two best for either part: one engine may be the best for both.
            prefills = _least(snapshot.backlog_s + costs.prefill, self._prefills)
            prefills += _least(snapshot.drain_s + costs.prefill, self._prefills)
        there = [self._arriving(decode) for decode in sorted(decodes)]
        best: _Option | None = None
        for prefill in sorted(set(prefills)):
            compute = costs.prefill.item(prefill)
            begins = compute
            if work.held_by < 0:
                begins += snapshot.backlog_s.item(prefill)
            ends = snapshot.drain_s.item(prefill) + compute if compute else 0.0
            for decode, drain, alone, more in there:
                if decode == prefill:
                    continue
                transfer = costs.transfer(prefill, decode, work.prompt_tokens)
                touched = max(drain, begins + transfer + alone, ends)
                added = compute + transfer + more
                finish, score = self._score(touched, added)
                if best is None or score < best.score:
                    best = _Option(prefill, (decode,), finish, touched, added, score)
        return best

    def moved(self) -> _Option | None:
        """Return the best route that moves the KV of what is cached from the engine that has most
        of it, and computes the rest where it decodes."""
        snapshot, costs, work = self._snapshot, self._costs, self._work
        if work.room is None or not work.cached or work.held_by >= 0:
            return None
        if not self._decodes.size or not self._prefills.size:
            return None
        holders = costs.cached.take(self._prefills)
        tokens = int(holders.max())
        if tokens < work.block_size:
            return None
        holders = self._prefills[holders == tokens]
        holder = holders.item(int(snapshot.drain_s.take(holders).argmin()))
        # It computes one token more, and so hands out all of the blocks.
        step = snapshot.step.item(holder)
        step += snapshot.sequence.item(holder) * snapshot.sequences.item(holder)
        begins = snapshot.backlog_s.item(holder) + step
        best: _Option | None = None
        for decode in sorted(_least(self._done, self._decodes)):
            if decode == holder or costs.cached.item(decode) >= tokens:
                continue
            if work.room[decode] * work.block_size < work.prompt_tokens:
                continue  # it would drop what others need
            transfer = costs.transfer(holder, decode, tokens + 1)
            new = work.prompt_tokens - tokens
            rest = snapshot.token.item(decode) * new
            rest += snapshot.pair.item(decode) * new * (tokens + new / 2)
            joining, own, alone = costs.on(decode, work.samples)
            own += rest + joining
            arrives = max(begins + transfer, snapshot.backlog_s.item(decode))
            touched = max(self._busy.item(decode) + own, arrives + rest + joining + alone)
            added = transfer + own
            finish, score = self._score(touched, added)
            if best is None or score < best.score:
                best = _Option(-1, (decode,), finish, touched, added, score, holder, tokens)
        return best

    def route(
        self, policy: str, local: _Option | None, *others: _Option | None
    ) -> GroupRoute | None:
        """Return the best of the options, of those that move KV only what is better by a margin."""
        chosen = local
        for other in others:
            if other is None:
                continue
            if local is not None and other.score >= local.score - self._margin(local, other):
                continue
            if chosen is None or other.score < chosen.score:
                chosen = other
        if chosen is None:
            return None
        handoff, moved = (*others, None, None)[:2]
        why = Why(
            policy,
            finish=chosen.finish,
            local=local.finish if local else None,
            handoff=handoff.finish if handoff else None,
            moved=moved.finish if moved else None,
            added=chosen.added,
            added_local=local.added if local else chosen.added,
        )
        return GroupRoute(chosen.parts(self._work.samples), why)

    def _local_on(self, engines: Sequence[int]) -> _Option:
        costs, added, touched = self._costs, 0.0, 0.0
        shares = _shares(self._work.samples, len(engines))
        for engine, samples in zip(engines, shares, strict=True):
            prefill = costs.prefill.item(engine)
            joining, tokens, alone = costs.on(engine, samples)
            more = prefill + joining + tokens
            drain = self._busy.item(engine) + more
            own = self._snapshot.backlog_s.item(engine) + prefill
            touched = max(touched, drain, own + alone)
            added += more
        finish, score = self._score(touched, added)
        return _Option(-1, tuple(engines), finish, touched, added, score)

    def _arriving(self, decode: int) -> tuple[int, float, float, float]:
        """Return an engine, with the seconds until it has done all that it has once the KV is
        there, of the samples from their arrival on, and that they add."""
        joining, tokens, alone = self._costs.on(decode, self._work.samples)
        more = joining + tokens
        return decode, self._busy.item(decode) + more, joining + alone, more

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
        order = self._decodes[_first(keys, samples)].tolist()
        for count in dict.fromkeys(counts):
            if count > samples:
                break
            option = self._local_on(order[:count])
            if asked is not None or option.score < best.score * (1 - _SPREAD_MARGIN):
                best = option
        return best

    def _score(self, touched: float, added: float) -> tuple[float, float]:
        """Return when all known work is done, and what routes are compared by."""
        finish = max(touched, (self._total + self._snapshot.waiting_s + added) / self._engines)
        return finish, finish + _WORK_WEIGHT * added + _DRAIN_WEIGHT * touched


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
    numbers = mask.nonzero()[0]
    if not avoid:
        return numbers
    fresh = np.array([n for n in numbers if not avoid >> int(n) & 1], dtype=numbers.dtype)
    return fresh if fresh.size else numbers


def _least(keys: Floats, numbers: Numbers) -> list[int]:
    """Return the two of these engines with the least keys, least first."""
    mine = keys.take(numbers)
    first = int(mine.argmin())
    if mine.size == 1:
        return [numbers.item(first)]
    mine[first] = np.inf
    return [numbers.item(first), numbers.item(int(mine.argmin()))]


def _first(keys: Floats, count: int) -> Numbers:
    """Return the places of so many least keys, least first; of equal ones in their order."""
    if count >= keys.size:
        return np.argsort(keys, kind="stable")
    least: Numbers = (keys <= np.partition(keys, count - 1)[count - 1]).nonzero()[0]
    return least[np.argsort(keys[least], kind="stable")[:count]]


def _crowding(snapshot: Snapshot, samples: int) -> Floats:
    """Return the seconds that work would wait for seats, about: a wave of what runs there."""
    over: Floats = samples - snapshot.free_seats
    np.maximum(over, 0.0, out=over)
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
