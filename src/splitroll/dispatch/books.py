"""What each engine has been given and has not ended, as numbers that a policy can reckon with.
Pure: time is an argument.

Load counts from the moment that work is given out and is taken off at its true end. In between, the
books estimate how far an engine has come: prefills first, then decode steps, at the fitted costs.
The estimate is made right at every end, and never decides whether anything has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from splitroll.dispatch.cost import StepCost
from splitroll.types import Role

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_ARRAYS = (
    "at",
    "backlog",
    "at_decodes",
    "longest",
    "steps",
    "begun",
    "expected",
    "sequences",
    "context",
    "tokens",
    "step_s",
    "each_s",
)
_MASKS = ("up", "prefills", "decodes", "prefers_decode")

NOMINAL = StepCost(1.0, 0.05, 0.0, 0.02, 0.0)
"""Costs, in steps, where no engine has reported any yet: only their ratios to each other count."""
_OVERDUE_TOKENS = 4.0
"""What a sequence that has outlived its estimate is thought to need still, at least."""
_LEAST_REST = 0.5
"""Of what sequences were expected to need, what they need still at least while they are open: of
lengths that vary much, those that go on are as long as ever."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at one moment; arrays have one entry per engine. Nobody writes to them.

    Attributes:
        up: it serves; all further masks are within this one.
        prefills, decodes: its role lets it do that; in an elastic fleet both are all.
        prefers_decode: it is a decode engine, or one for both.
        backlog_s: seconds of prefill given and not done.
        longest: decode steps until its last sequence is expected to end.
        drain_s: seconds until all that it was given is expected to be done.
        sequences, context: decoding, and their tokens of context.
        tokens: prompt and at most generated tokens in flight.
        free_seats: sequences that it could run beyond those given to it; may be negative.
        waiting_s: engine-seconds of accepted work that no engine was given yet.
        turn: pieces of work that were given out before.
    """

    names: Sequence[str]
    up: Bools
    prefills: Bools
    decodes: Bools
    prefers_decode: Bools
    backlog_s: Floats
    longest: Floats
    drain_s: Floats
    sequences: Floats
    context: Floats
    tokens: Floats
    free_seats: Floats
    step: Floats
    sequence: Floats
    context_cost: Floats
    token: Floats
    pair: Floats
    waiting_s: float
    turn: int

    def cost(self, engine: int) -> StepCost:
        """Return one engine's costs."""
        return StepCost(
            float(self.step[engine]),
            float(self.sequence[engine]),
            float(self.context_cost[engine]),
            float(self.token[engine]),
            float(self.pair[engine]),
        )


@dataclass(slots=True, eq=False)
class PrefillTicket:
    """A prefill that an engine was given."""

    engine: int
    seconds: float
    tokens: int
    cached: int = 0
    """Of the tokens, those that were expected to be in the engine's cache."""
    open: bool = True


@dataclass(slots=True, eq=False)
class DecodeTicket:
    """A sequence that an engine was given.

    Attributes:
        begun: the engine's step at which it was given; `expected`: the steps that it takes.
    """

    engine: int
    context: float
    tokens: int
    begun: float
    expected: float
    open: bool = True

    @property
    def target(self) -> float:
        """The engine's step at which it is expected to end."""
        return self.begun + self.expected


@dataclass(slots=True)
class _Account:
    """What the arrays cannot hold of one engine."""

    name: str
    role: Role
    seats: int
    prefill_given_s: float = 0.0
    """Seconds of its open prefill tickets, whole."""
    targets: list[tuple[float, int, DecodeTicket]] = field(default_factory=list)
    """Open sequences, the last to end first; ended ones are dropped when they come up."""
    serial: int = 0


class Books:
    """The accounts of all engines, by number."""

    def __init__(self, *, elastic: bool) -> None:
        self._elastic = elastic
        self._accounts: list[_Account] = []
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._is_fitted = np.zeros(0, dtype=bool)
        self._at = np.zeros(0)
        self._backlog = np.zeros(0)
        self._at_decodes = np.zeros(0)
        """When the backlog is done: `at` and `backlog` in one."""
        self._longest = np.zeros(0)
        self._steps = np.zeros(0)
        self._begun = np.zeros(0)
        self._expected = np.zeros(0)
        self._sequences = np.zeros(0)
        self._context = np.zeros(0)
        self._tokens = np.zeros(0)
        self._seats = np.zeros(0)
        self._costs = np.zeros((5, 0))
        self._typical: StepCost | None = None
        self._step_s = np.zeros(0)
        """Seconds of a step with what decodes there; `each`: what one sequence adds to it."""
        self._each_s = np.zeros(0)
        self._up = np.zeros(0, dtype=bool)
        self._prefills = np.zeros(0, dtype=bool)
        self._decodes = np.zeros(0, dtype=bool)
        self._prefers_decode = np.zeros(0, dtype=bool)
        self.turn = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def knows(self, name: str) -> bool:
        return name in self._numbers

    def number(self, name: str) -> int:
        return self._numbers[name]

    def name(self, engine: int) -> str:
        return self._names[engine]

    def join(self, name: str, role: Role, seats: int) -> int:
        """Open an engine's account; returns its number."""
        number = len(self._accounts)
        self._accounts.append(_Account(name, role, seats))
        self._numbers[name] = number
        self._names.append(name)
        for array in _ARRAYS:
            setattr(self, f"_{array}", np.append(getattr(self, f"_{array}"), 0.0))
        self._seats = np.append(self._seats, float(seats))
        self._costs = np.append(self._costs, np.zeros((5, 1)), axis=1)
        for mask in _MASKS:
            setattr(self, f"_{mask}", np.append(getattr(self, f"_{mask}"), False))
        self._is_fitted = np.append(self._is_fitted, False)
        self._guess_costs()
        return number

    def set_up(self, engine: int, up: bool) -> None:
        """Note whether an engine serves. In a strict fleet a role that is not there at all is taken
        by the engines of the other one."""
        if bool(self._up[engine]) == up:
            return
        self._up[engine] = up
        self._typical = None
        roles = [a.role for a in self._accounts]
        prefills = np.array([role is not Role.DECODE for role in roles]) & self._up
        decodes = np.array([role is not Role.PREFILL for role in roles]) & self._up
        self._prefers_decode = decodes
        if self._elastic or not decodes.any():
            decodes = self._up.copy()
        if self._elastic:
            prefills = self._up.copy()
        self._prefills, self._decodes = prefills, decodes

    def set_cost(self, engine: int, cost: StepCost) -> None:
        """Note an engine's fitted costs; those that reported none get the median of the others."""
        self._is_fitted[engine] = True
        self._put_cost(engine, cost)
        if not self._is_fitted.all():
            self._guess_costs()

    def _guess_costs(self) -> None:
        fitted = self._costs[:, self._is_fitted]
        cost = StepCost(*np.median(fitted, axis=1).tolist()) if fitted.size else NOMINAL
        for engine in np.flatnonzero(~self._is_fitted):
            self._put_cost(int(engine), cost)

    def _put_cost(self, engine: int, cost: StepCost) -> None:
        self._costs[:, engine] = cost.step, cost.sequence, cost.context, cost.token, cost.pair
        self._typical = None
        self._put_step(engine)

    def _put_step(self, engine: int) -> None:
        """Reckon an engine's step anew, with the sequences that it has now."""
        sequences, context = self._sequences.item(engine), self._context.item(engine)
        a, b, c, _, _ = self._costs[:, engine].tolist()
        each_s = b + c * (context / max(sequences, 1.0))
        self._step_s[engine] = a + each_s * min(sequences, self._seats.item(engine))
        self._each_s[engine] = each_s

    def cost(self, engine: int) -> StepCost:
        return StepCost(*self._costs[:, engine].tolist())

    def typical_cost(self) -> StepCost:
        """Return the costs of work that no engine was given yet: the mean over those that serve,
        over all while none does."""
        if self._typical is None:
            costs = self._costs[:, self._up] if self._up.any() else self._costs
            self._typical = StepCost(*costs.mean(axis=1).tolist())
        return self._typical

    # Work that is given out, and its ends.

    def begin_prefill(
        self, engine: int, seconds: float, tokens: int, now: float, cached: int = 0
    ) -> PrefillTicket:
        self._advance(engine, now)
        self._backlog[engine] += seconds
        self._at_decodes[engine] += seconds
        self._tokens[engine] += tokens
        self._accounts[engine].prefill_given_s += seconds
        return PrefillTicket(engine, seconds, tokens, cached)

    def end_prefill(self, ticket: PrefillTicket, now: float) -> None:
        """Take a prefill off, however it ended; later calls do nothing."""
        if not ticket.open:
            return
        ticket.open = False
        engine = ticket.engine
        self._advance(engine, now)
        account = self._accounts[engine]
        account.prefill_given_s = max(0.0, account.prefill_given_s - ticket.seconds)
        self._backlog[engine] = min(self._backlog[engine], account.prefill_given_s)
        self._at_decodes[engine] = self._at[engine] + self._backlog[engine]
        self._tokens[engine] -= ticket.tokens

    def begin_decode(
        self, engine: int, context: int, expected: float, max_tokens: int, now: float
    ) -> DecodeTicket:
        self._advance(engine, now)
        account = self._accounts[engine]
        tokens = context + max_tokens
        begun = self._steps.item(engine)
        ticket = DecodeTicket(engine, float(context), tokens, begun, expected)
        account.serial += 1
        heapq.heappush(account.targets, (-ticket.target, account.serial, ticket))
        self._sequences[engine] += 1
        self._context[engine] += context
        self._tokens[engine] += tokens
        self._begun[engine] += begun
        self._expected[engine] += expected
        self._longest[engine] = max(self._longest[engine], expected)
        self._put_step(engine)
        return ticket

    def end_decode(self, ticket: DecodeTicket, now: float) -> None:
        """Take a sequence off, however it ended; later calls do nothing."""
        if not ticket.open:
            return
        ticket.open = False
        engine = ticket.engine
        self._advance(engine, now)
        account = self._accounts[engine]
        self._sequences[engine] -= 1
        self._context[engine] -= ticket.context
        self._tokens[engine] -= ticket.tokens
        self._put_step(engine)
        while account.targets and not account.targets[0][2].open:
            heapq.heappop(account.targets)
        if not account.targets:
            # No rounding stays.
            self._begun[engine] = self._expected[engine] = self._longest[engine] = 0.0
            return
        self._begun[engine] -= ticket.begun
        self._expected[engine] -= ticket.expected
        self._longest[engine] = max(0.0, -account.targets[0][0] - self._steps.item(engine))

    @property
    def load(self) -> dict[str, int]:
        """Tokens in flight by engine; empty when nothing is."""
        return {name: int(t) for name, t in zip(self._names, self._tokens, strict=True) if t}

    def is_up(self, engine: int) -> bool:
        return bool(self._up[engine])

    def sequences(self, engine: int) -> int:
        return int(self._sequences[engine])

    def snapshot(self, now: float, waiting_s: float = 0.0) -> Snapshot:
        """Return the fleet as it is expected to stand now."""
        a, b, c, d, e = self._costs
        to_come = self._at_decodes - now
        backlog = np.maximum(to_come, 0.0)
        steps = (backlog - to_come) / self._step_s
        longest = np.maximum(self._longest - steps, _OVERDUE_TOKENS)
        longest *= self._sequences > 0
        # Of all that are open; what those have had that outlive their estimate is not the others'.
        steps += self._steps
        steps *= self._sequences
        remaining = self._expected + self._begun
        remaining -= steps
        np.maximum(remaining, _LEAST_REST * self._expected, out=remaining)
        np.maximum(remaining, _OVERDUE_TOKENS * self._sequences, out=remaining)
        drain = a * np.maximum(longest, remaining / self._seats)
        drain += backlog
        remaining *= self._each_s
        drain += remaining
        return Snapshot(
            names=self._names,
            up=self._up,
            prefills=self._prefills,
            decodes=self._decodes,
            prefers_decode=self._prefers_decode,
            backlog_s=backlog,
            longest=longest,
            drain_s=drain,
            sequences=self._sequences,
            context=self._context,
            tokens=self._tokens,
            free_seats=self._seats - self._sequences,
            step=a,
            sequence=b,
            context_cost=c,
            token=d,
            pair=e,
            waiting_s=waiting_s,
            turn=self.turn,
        )

    def _advance(self, engine: int, now: float) -> None:
        """Bring one account up to now."""
        elapsed = now - self._at.item(engine)
        if elapsed <= 0.0:
            return
        self._at[engine] = now
        backlog = self._backlog.item(engine)
        done = min(backlog, elapsed)
        self._backlog[engine] = backlog - done
        self._at_decodes[engine] = now + backlog - done
        sequences = self._sequences.item(engine)
        if not sequences or elapsed <= done:
            return
        steps = (elapsed - done) / self._step_s.item(engine)
        self._steps[engine] += steps
        self._longest[engine] = max(0.0, self._longest.item(engine) - steps)
