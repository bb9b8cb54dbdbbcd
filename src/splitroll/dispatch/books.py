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

from splitroll.dispatch.cost import StepCost, mean_cost
from splitroll.types import Role

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NOMINAL = StepCost(1.0, 0.05, 0.0, 0.02, 0.0)
"""Costs, in steps, where no engine has reported any yet: only their ratios to each other count."""
_OVERDUE_TOKENS = 4.0
"""What a sequence that has outlived its estimate is thought to need still, at least."""


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
    open: bool = True


@dataclass(slots=True, eq=False)
class DecodeTicket:
    """A sequence that an engine was given.

    Attributes:
        target: the engine's step at which it is expected to end.
    """

    engine: int
    context: float
    tokens: int
    target: float
    open: bool = True


@dataclass(slots=True)
class _Account:
    """What the arrays cannot hold of one engine."""

    name: str
    role: Role
    seats: int
    steps_done: float = 0.0
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
        self._fitted: dict[int, StepCost] = {}
        self._at = np.zeros(0)
        self._backlog = np.zeros(0)
        self._longest = np.zeros(0)
        self._remaining = np.zeros(0)
        self._sequences = np.zeros(0)
        self._context = np.zeros(0)
        self._tokens = np.zeros(0)
        self._seats = np.zeros(0)
        self._costs = np.zeros((5, 0))
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
        for array in ("at", "backlog", "longest", "remaining", "sequences", "context", "tokens"):
            setattr(self, f"_{array}", np.append(getattr(self, f"_{array}"), 0.0))
        self._seats = np.append(self._seats, float(seats))
        cost = mean_cost(self._fitted.values()) or NOMINAL
        column = np.array([[getattr(cost, k)] for k in StepCost.__slots__])
        self._costs = np.append(self._costs, column, axis=1)
        for mask in ("up", "prefills", "decodes", "prefers_decode"):
            setattr(self, f"_{mask}", np.append(getattr(self, f"_{mask}"), False))
        return number

    def set_up(self, engine: int, up: bool) -> None:
        """Note whether an engine serves. In a strict fleet a role that is not there at all is taken
        by the engines of the other one."""
        if bool(self._up[engine]) == up:
            return
        self._up[engine] = up
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
        self._fitted[engine] = cost
        self._costs[:, engine] = [getattr(cost, k) for k in StepCost.__slots__]
        if len(self._fitted) == len(self):
            return
        common = mean_cost(self._fitted.values())
        for number in range(len(self)):
            if number not in self._fitted:
                self._costs[:, number] = [getattr(common, k) for k in StepCost.__slots__]

    def cost(self, engine: int) -> StepCost:
        return StepCost(*self._costs[:, engine].tolist())

    # Work that is given out, and its ends.

    def begin_prefill(self, engine: int, seconds: float, tokens: int, now: float) -> PrefillTicket:
        self._advance(engine, now)
        self._backlog[engine] += seconds
        self._tokens[engine] += tokens
        self._accounts[engine].prefill_given_s += seconds
        return PrefillTicket(engine, seconds, tokens)

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
        self._tokens[engine] -= ticket.tokens

    def begin_decode(
        self, engine: int, context: int, expected: float, max_tokens: int, now: float
    ) -> DecodeTicket:
        self._advance(engine, now)
        account = self._accounts[engine]
        tokens = context + max_tokens
        ticket = DecodeTicket(engine, float(context), tokens, account.steps_done + expected)
        account.serial += 1
        heapq.heappush(account.targets, (-ticket.target, account.serial, ticket))
        self._sequences[engine] += 1
        self._context[engine] += context
        self._tokens[engine] += tokens
        self._remaining[engine] += expected
        self._longest[engine] = max(self._longest[engine], expected)
        return ticket

    def end_decode(self, ticket: DecodeTicket, now: float) -> None:
        """Take a sequence off, however it ended; later calls do nothing."""
        if not ticket.open:
            return
        ticket.open = False
        engine = ticket.engine
        self._advance(engine, now)
        account = self._accounts[engine]
        left = max(0.0, ticket.target - account.steps_done)
        self._sequences[engine] -= 1
        self._context[engine] -= ticket.context
        self._tokens[engine] -= ticket.tokens
        while account.targets and not account.targets[0][2].open:
            heapq.heappop(account.targets)
        if not account.targets:
            self._remaining[engine] = self._longest[engine] = 0.0
            return
        self._remaining[engine] = max(0.0, self._remaining[engine] - left)
        self._longest[engine] = max(0.0, -account.targets[0][0] - account.steps_done)

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
        elapsed = np.maximum(now - self._at, 0.0)
        backlog = np.maximum(self._backlog - elapsed, 0.0)
        rest = elapsed - (self._backlog - backlog)
        steps = rest / (a + b * self._sequences + c * self._context)
        busy = self._sequences > 0
        longest = np.where(busy, np.maximum(self._longest - steps, _OVERDUE_TOKENS), 0.0)
        remaining = np.maximum(
            self._remaining - steps * self._sequences, _OVERDUE_TOKENS * self._sequences
        )
        each = b + c * (self._context / np.maximum(self._sequences, 1.0))
        drain = backlog + a * longest + each * remaining
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
        elapsed = max(0.0, now - self._at[engine])
        self._at[engine] = max(now, self._at[engine])
        done = min(self._backlog[engine], elapsed)
        self._backlog[engine] -= done
        sequences = self._sequences[engine]
        if not sequences or elapsed <= done:
            return
        step_s = self.cost(engine).decode_step(sequences, float(self._context[engine]))
        steps = (elapsed - done) / step_s
        self._accounts[engine].steps_done += steps
        self._remaining[engine] = max(0.0, self._remaining[engine] - steps * sequences)
        self._longest[engine] = max(0.0, self._longest[engine] - steps)
