"""Where each piece of work goes: books, costs, prefixes, lengths, and the policy that reads them.
Pure: time is an argument, so that a real dispatcher and a simulation drive the same object.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from splitroll.dispatch.books import Books, DecodeTicket, PrefillTicket
from splitroll.dispatch.cost import CostFit, StepCost, TransferFit
from splitroll.dispatch.lengths import LengthModel
from splitroll.dispatch.policy import POLICIES, Colocated, GroupRoute, Policy, Work
from splitroll.dispatch.prefix import BlockHash, PrefixIndex, block_hashes
from splitroll.engines.protocol import StepStats
from splitroll.types import Role

_PAIRS_KEPT = 4096


@dataclass(slots=True, eq=False)
class Piece:
    """A piece of work as the allocator knows it: the samples of one prompt.

    Attributes:
        prompt: tells prompts apart, for expected lengths.
        blocks: hashes of the prompt's full blocks.
        age: tokens that its samples have generated before; part of `prompt_tokens`.
        is_turn: it is a turn of an episode, whose KV is nobody else's.
    """

    prompt: Hashable
    blocks: tuple[BlockHash, ...]
    prompt_tokens: int
    samples: int
    max_tokens: int
    age: int = 0
    is_turn: bool = False
    waits: bool = False
    waiting_prefill_s: float = 0.0
    waiting_decode_s: float = 0.0
    expected: float = 1.0


@dataclass(slots=True)
class _Waiting:
    """Sums over the pieces that wait."""

    samples: int = 0
    tokens: float = 0.0
    context: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Allocator:
    """Answers where a piece of work should go, and is told what becomes of it."""

    def __init__(self, policy: str, *, elastic: bool, spread: int | None = None) -> None:
        self.books = Books(elastic=elastic)
        self.lengths = LengthModel()
        self.policy: Policy = POLICIES[policy]()
        self._fallback = Colocated()
        self._spread = spread
        self._prefixes = PrefixIndex()
        self._fits: list[CostFit] = []
        self._transfer = TransferFit()
        self._pairs: dict[tuple[int, int], TransferFit] = {}
        self._pair_costs: dict[tuple[int, int], tuple[float, float]] = {}
        self._blocks: list[tuple[int, int]] = []
        self._waiting = _Waiting()

    # The fleet.

    def join(
        self,
        name: str,
        role: Role,
        *,
        seats: int,
        num_blocks: int,
        block_size: int,
        block_bytes: int,
        cost: StepCost | None = None,
    ) -> int:
        """Note an engine, not yet up; returns its number."""
        number = self.books.join(name, role, seats)
        self._prefixes.join(number, num_blocks)
        self._fits.append(CostFit(cost))
        self._blocks.append((block_size, block_bytes))
        if cost is not None:
            self.books.set_cost(number, cost)
        return number

    def set_up(self, engine: int, up: bool) -> None:
        """Note whether an engine serves; one that comes back has an empty cache."""
        self.books.set_up(engine, up)
        if not up:
            self._prefixes.forget(engine)

    @property
    def block_size(self) -> int:
        """Tokens in a block of KV, the same on all engines; 1 before any is known."""
        return self._blocks[0][0] if self._blocks else 1

    def forget_prefixes(self) -> None:
        """Note that the weights changed: no cached KV is worth anything."""
        for engine in range(len(self.books)):
            self._prefixes.forget(engine)

    def observe_steps(self, engine: int, steps: Sequence[StepStats]) -> None:
        """Learn an engine's costs from its own report."""
        fit = self._fits[engine]
        fit.observe(steps)
        if fit.cost is not None:
            self.books.set_cost(engine, fit.cost)

    def observe_transfer(self, prefill: int, decode: int, tokens: int, seconds: float) -> None:
        """Learn what moving the KV of so many tokens between two engines takes."""
        size, block_bytes = self._blocks[decode]
        num_bytes = -(-tokens // size) * block_bytes
        self._transfer.observe(num_bytes, seconds)
        key = prefill, decode
        pair = self._pairs.setdefault(key, TransferFit())
        pair.observe(num_bytes, seconds)
        if pair.known:
            self._pair_costs[key] = pair.coefficients
        while len(self._pairs) > _PAIRS_KEPT:
            oldest = next(iter(self._pairs))
            del self._pairs[oldest]
            self._pair_costs.pop(oldest, None)

    # Work.

    def accept(
        self,
        prompt: Hashable,
        token_ids: Sequence[int],
        samples: int,
        max_tokens: int,
        *,
        age: int = 0,
        is_turn: bool = False,
        salt: str | None = None,
        blocks: tuple[BlockHash, ...] | None = None,
    ) -> Piece:
        """Note a piece of work that waits to be given out."""
        if blocks is None:
            blocks = block_hashes(token_ids, self.block_size, salt) if self._blocks else ()
        piece = Piece(prompt, blocks, len(token_ids), samples, max_tokens, age, is_turn)
        piece.expected = self.lengths.expected(prompt, max_tokens + age, age)
        self._wait(piece)
        return piece

    def withdraw(self, piece: Piece) -> None:
        """Note that a piece no longer waits: it was given out, or given up."""
        if not piece.waits:
            return
        piece.waits = False
        waiting = self._waiting
        waiting.samples -= piece.samples
        waiting.tokens -= piece.samples * piece.expected
        waiting.context -= piece.samples * piece.prompt_tokens
        waiting.prefill_s -= piece.waiting_prefill_s
        waiting.decode_s -= piece.waiting_decode_s
        if not waiting.samples:
            self._waiting = _Waiting()

    def decide(
        self,
        piece: Piece,
        now: float,
        *,
        samples: int | None = None,
        held_by: int = -1,
        avoid: int = 0,
        local: bool = False,
    ) -> GroupRoute | None:
        """Return where the samples of a piece should go; None when no engine may take them.

        Args:
            samples: how many are still to be generated; all if None.
            held_by: an engine with a handle to the prompt's whole KV.
            avoid: mask of engines that failed it before.
            local: never hand off.
        """
        self.withdraw(piece)
        if not self._blocks:
            return None
        piece.expected = self.lengths.expected(
            piece.prompt, piece.max_tokens + piece.age, piece.age
        )
        size, num_bytes = self._blocks[0]
        cached = [(m, depth * size) for m, depth in self._prefixes.depths(piece.blocks)]
        work = Work(
            prompt_tokens=piece.prompt_tokens,
            samples=piece.samples if samples is None else samples,
            expected=piece.expected,
            max_tokens=piece.max_tokens,
            cached=cached,
            room=self._prefixes.room if piece.is_turn else None,
            held_by=held_by,
            avoid=avoid,
            block_size=size,
            block_bytes=num_bytes,
            transfer=self._transfer.coefficients,
            pairs=self._pair_costs,
            spread=self._spread,
        )
        snapshot = self.books.snapshot(now, self._waiting.prefill_s + self._waiting.decode_s)
        policy = self._fallback if local else self.policy
        route = policy.decide(snapshot, work)
        self.books.turn += 1
        return route

    def alone_s(self, piece: Piece) -> float:
        """Return how long a piece takes on an idle engine, about."""
        if not self._blocks:
            return 0.0
        cost = self.books.typical_cost()
        step = cost.decode_step(piece.samples, piece.samples * piece.prompt_tokens)
        return piece.expected * step + cost.prefill(piece.prompt_tokens)

    def begin_prefill(
        self, engine: int, piece: Piece, now: float, coming: int = 0
    ) -> PrefillTicket:
        """Give a prefill to an engine.

        Args:
            coming: of its prompt, leading tokens whose KV will have been moved there.
        """
        cost, cached = self.books.cost(engine), max(coming, self._cached(engine, piece))
        seconds = cost.prefill(piece.prompt_tokens - cached, cached)
        self._prefixes.add(engine, piece.blocks)
        return self.books.begin_prefill(engine, seconds, piece.prompt_tokens, now, cached)

    def begin_decode(self, engine: int, piece: Piece, now: float) -> DecodeTicket:
        """Give a sample of a piece to an engine, or reserve it a place there."""
        return self.books.begin_decode(
            engine, piece.prompt_tokens, piece.expected, piece.max_tokens, now
        )

    def note_cached(self, ticket: PrefillTicket, tokens: int) -> None:
        """Learn how many tokens of a prompt an engine really had in its cache."""
        size = self.block_size
        self._prefixes.observe(ticket.engine, ticket.cached // size, tokens // size)

    def note_prompt(self, engine: int, piece: Piece) -> None:
        """Note that a piece's prompt is in an engine's cache, or about to be."""
        self._prefixes.add(engine, piece.blocks)

    def end_decode(self, ticket: DecodeTicket, piece: Piece, now: float) -> None:
        """Take a sample off, however it ended."""
        self.books.end_decode(ticket, now)

    def note_sample(
        self, engine: int, piece: Piece, tokens: int, blocks: Sequence[BlockHash] | None = None
    ) -> None:
        """Learn from a sample that ended by itself.

        Args:
            tokens: that it generated over its whole life.
            blocks: of its prompt and tokens, which are now in the engine's cache.
        """
        self.lengths.observe(piece.prompt, piece.max_tokens + piece.age, tokens)
        if blocks:
            self._prefixes.add(engine, blocks)

    def _cached(self, engine: int, piece: Piece) -> int:
        size = self._blocks[0][0]
        most = (piece.prompt_tokens - 1) // size * size
        for mask, depth in self._prefixes.depths(piece.blocks):
            if mask >> engine & 1:
                return min(depth * size, most)
        return 0

    def _wait(self, piece: Piece) -> None:
        if not self._blocks:
            return
        piece.waits = True
        cost = self.books.typical_cost()
        best = max((depth for _, depth in self._prefixes.depths(piece.blocks)), default=0)
        cached = min(best * self._blocks[0][0], piece.prompt_tokens - 1)
        piece.waiting_prefill_s = cost.prefill(piece.prompt_tokens - cached, cached)
        each = cost.sequence + cost.context * piece.prompt_tokens
        piece.waiting_decode_s = piece.samples * piece.expected * each
        waiting = self._waiting
        waiting.samples += piece.samples
        waiting.tokens += piece.samples * piece.expected
        waiting.context += piece.samples * piece.prompt_tokens
        waiting.prefill_s += piece.waiting_prefill_s
        waiting.decode_s += piece.waiting_decode_s
