"""The allocator: what waits, what is cached where, and what it tells the policy."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.dispatch.allocator import Allocator, Piece
from splitroll.dispatch.books import Snapshot
from splitroll.dispatch.cost import StepCost
from splitroll.dispatch.policy import Adaptive, GroupRoute, Work
from splitroll.engines.protocol import StepStats
from splitroll.types import Role

COST = StepCost(step=0.02, sequence=0.001, context=1e-6, token=2e-4, pair=1e-8)
BLOCK_BYTES = 700_000


class Watching(Adaptive):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.work: Work | None = None

    def decide(self, snapshot: Snapshot, work: Work) -> GroupRoute | None:
        self.snapshot, self.work = snapshot, work
        return super().decide(snapshot, work)


def allocator(engines: int = 3, cost: StepCost | None = COST, num_blocks: int = 64) -> Allocator:
    made = Allocator("adaptive", elastic=True)
    for i in range(engines):
        made.join(
            f"e{i}",
            Role.BOTH,
            seats=16,
            num_blocks=num_blocks,
            block_size=32,
            block_bytes=BLOCK_BYTES,
            cost=cost,
        )
        made.set_up(i, True)
    made.policy = Watching()
    return made


def accept(made: Allocator, i: int = 0, tokens: int = 200, samples: int = 4) -> Piece:
    return made.accept(f"p{i}", range(1000 * i, 1000 * i + tokens), samples, 256)


def asked(made: Allocator, piece: Piece) -> tuple[Snapshot, Work]:
    """Let the policy decide about a piece, and return what it was shown."""
    made.decide(piece, 0.0)
    policy = made.policy
    assert isinstance(policy, Watching)
    assert policy.snapshot is not None
    assert policy.work is not None
    return policy.snapshot, policy.work


def cached(made: Allocator, i: int = 0, tokens: int = 200) -> dict[int, int]:
    """Return the tokens of a prompt that are thought to be cached, by engine."""
    _, work = asked(made, accept(made, i, tokens))
    return {e: n for mask, n in work.cached for e in range(3) if mask >> e & 1}


PIECES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300), st.integers(1, 8)), max_size=12)


@settings(max_examples=80, deadline=None)
@given(PIECES, st.randoms(use_true_random=False), st.booleans())
def test_what_waits_is_counted_once_and_withdrawn_exactly(
    shapes: list[tuple[int, int, int]], draw: object, free: bool
) -> None:
    nothing = StepCost(0.02, 0.0, 0.0, 0.0, 0.0)
    made = allocator(cost=nothing if free else COST)
    pieces = []
    for i, tokens, samples in shapes:
        piece = accept(made, i, tokens, samples)
        made.note_prompt(i % 3, piece)  # from now on the same work counts less
        made.note_sample(i % 3, piece, 17)  # and its like is expected to be shorter
        pieces.append(piece)
    draw.shuffle(pieces)  # type: ignore[attr-defined]
    waiting = made._waiting
    assert waiting.samples == sum(piece.samples for piece in pieces)
    for index, piece in enumerate(pieces):
        left = pieces[index:]
        assert waiting.prefill_s == pytest.approx(sum(p.waiting_prefill_s for p in left), abs=1e-9)
        assert waiting.decode_s == pytest.approx(sum(p.waiting_decode_s for p in left), abs=1e-9)
        for _ in range(2):
            made.withdraw(piece)
        waiting = made._waiting
    assert dataclasses.astuple(made._waiting) == (0, 0.0, 0.0, 0.0, 0.0)


def test_the_policy_is_told_of_all_that_waits_but_the_piece_itself() -> None:
    made = allocator()
    first, second = accept(made, 0), accept(made, 1)
    snapshot, _ = asked(made, first)
    assert snapshot.waiting_s == pytest.approx(second.waiting_prefill_s + second.waiting_decode_s)
    snapshot, _ = asked(made, second)
    assert snapshot.waiting_s == 0
    # Asked again, after a retry, it waits no more.
    assert asked(made, first)[0].waiting_s == 0


def test_work_accepted_before_any_engine_joined_may_be_withdrawn() -> None:
    made = Allocator("adaptive", elastic=True)
    early = accept(made)
    assert made.decide(early, 0.0) is None
    assert made.alone_s(early) == 0
    again = accept(made)
    made.join("e0", Role.BOTH, seats=4, num_blocks=8, block_size=32, block_bytes=1)
    made.withdraw(again)
    assert made._waiting.samples == 0
    assert made.decide(accept(made), 0.0) is None, "it is not up"
    made.set_up(0, True)
    assert made.decide(accept(made), 0.0) is not None


def test_a_prompt_is_known_where_it_was_given() -> None:
    made = allocator()
    piece = accept(made)
    assert cached(made) == {}
    made.begin_prefill(1, piece, 0.0)
    assert cached(made) == {1: 192}
    assert cached(made, tokens=100) == {1: 96}
    assert cached(made, i=1) == {}


def test_a_prefill_of_what_is_cached_takes_less() -> None:
    made = allocator()
    piece = accept(made)
    first = made.begin_prefill(0, piece, 0.0)
    again = made.begin_prefill(0, piece, 0.0)
    assert first.seconds == pytest.approx(COST.prefill(200))
    assert again.seconds == pytest.approx(COST.prefill(8, 192))


def test_a_wholly_cached_prompt_still_costs_its_last_block() -> None:
    made = allocator()
    piece = accept(made, tokens=192)
    made.note_prompt(0, piece)
    assert made.begin_prefill(0, piece, 0.0).seconds == pytest.approx(COST.prefill(32, 160))


def test_new_weights_leave_no_prefix_anywhere() -> None:
    made = allocator()
    for engine in range(3):
        made.note_prompt(engine, accept(made))
    assert cached(made) == {0: 192, 1: 192, 2: 192}
    made.forget_prefixes()
    assert cached(made) == {}


def test_an_engine_that_comes_back_has_no_prefix() -> None:
    made = allocator()
    made.note_prompt(0, accept(made))
    made.note_prompt(1, accept(made))
    made.set_up(0, False)
    made.set_up(0, True)
    assert cached(made) == {1: 192}


def test_a_turn_is_known_whole_where_the_one_before_it_ended() -> None:
    made = allocator()
    piece = accept(made, tokens=128)
    longer = accept(made, tokens=224)
    made.note_prompt(2, piece)
    made.note_sample(2, piece, 96, longer.blocks)
    assert cached(made, tokens=230) == {2: 224}


def test_no_engine_is_thought_to_hold_more_than_it_can() -> None:
    made = allocator(num_blocks=6)
    made.note_prompt(0, accept(made, 0))
    assert cached(made, 0) == {0: 192}
    made.note_prompt(0, accept(made, 1, tokens=64))
    assert cached(made, 0) == {}  # its first block went first
    assert cached(made, 1, tokens=64) == {0: 64}


def test_transfers_are_fitted_for_each_pair() -> None:
    made = allocator()
    for tokens in (32, 320, 640, 3200) * 20:
        num_bytes = tokens // 32 * BLOCK_BYTES
        made.observe_transfer(0, 1, tokens, 0.01 + 1e-9 * num_bytes)
        made.observe_transfer(0, 2, tokens, 0.04 + 8e-9 * num_bytes)
    _, work = asked(made, accept(made))

    def seconds(coefficients: tuple[float, float]) -> float:
        return coefficients[0] + coefficients[1] * 1e7

    assert seconds(work.pairs[0, 1]) == pytest.approx(0.02, rel=0.1)
    assert seconds(work.pairs[0, 2]) == pytest.approx(0.12, rel=0.1)
    assert (1, 2) not in work.pairs, "that pair is unknown"
    assert 0.02 < seconds(work.transfer) < 0.12, "of all"


def test_pairs_that_are_no_longer_used_are_forgotten() -> None:
    made = allocator(engines=70)
    for prefill in range(70):
        for decode in range(70):
            made.observe_transfer(prefill, decode, 320, 0.01)
    _, work = asked(made, accept(made))
    assert len(work.pairs) == 4096
    assert (0, 0) not in work.pairs
    assert (69, 69) in work.pairs


def test_waiting_work_is_priced_as_on_the_engines_that_serve() -> None:
    made = allocator(engines=2)
    made.books.set_cost(0, COST.scaled(9))
    slow, _ = asked(made, accept(made, 1))
    assert slow.waiting_s == 0.0
    waits = accept(made, 2)
    both, _ = asked(made, accept(made, 3))
    made.withdraw(waits)
    made.set_up(0, False)
    waits = accept(made, 2)
    one, _ = asked(made, accept(made, 3))
    assert both.waiting_s == pytest.approx(5 * one.waiting_s, rel=0.01)


def test_the_policy_is_told_the_constant_and_the_rate_of_a_transfer() -> None:
    made = allocator()
    for tokens in (32, 320, 640, 3200) * 40:
        num_bytes = tokens // 32 * BLOCK_BYTES
        made.observe_transfer(0, 1, tokens, 0.02 + 1e-9 * num_bytes)
    _, work = asked(made, accept(made))
    constant, per_byte = work.transfer
    assert constant == pytest.approx(0.02, rel=0.1)
    assert per_byte == pytest.approx(1e-9, rel=0.1)


def test_lengths_of_finished_siblings_reach_the_policy() -> None:
    made = allocator()
    piece = accept(made)
    _, work = asked(made, piece)
    assert work.expected == 128
    for _ in range(8):
        made.note_sample(0, piece, 20)
    _, work = asked(made, accept(made))
    assert work.expected == pytest.approx(20)


def test_the_rest_of_a_sample_is_known_by_its_age() -> None:
    made = allocator()
    piece = accept(made)
    for tokens in (20, 20, 200, 200) * 8:
        made.note_sample(0, piece, tokens)
    rest = made.accept("p0", range(300), 1, 156, age=100)
    assert rest.expected == pytest.approx(100, rel=0.05)


def test_steps_that_an_engine_reports_become_its_costs() -> None:
    made = allocator(cost=None)
    steps = [StepStats(0.1 + 0.01 * n, n, 300 * n, 0, 0) for n in (1, 2, 4, 8)]
    steps += [StepStats(0.1 + 0.001 * t, 0, 0, t, t * t // 2) for t in (64, 256)]
    made.observe_steps(1, steps)
    for engine in range(3):  # the others get what is known of any
        assert made.books.cost(engine).decode_step(4, 1200) == pytest.approx(0.14, rel=0.1)
        assert made.books.cost(engine).prefill(256) == pytest.approx(0.256, rel=0.2)


def test_every_piece_ends_with_an_empty_ledger() -> None:
    made = allocator()
    for i in range(12):
        piece = accept(made, i)
        route = made.decide(piece, float(i))
        assert route is not None
        for part in route.parts:
            ticket = made.begin_prefill(part.prefill, piece, float(i))
            tickets = [made.begin_decode(part.decode, piece, i) for _ in range(part.samples)]
            made.books.end_prefill(ticket, i + 0.5)
            for one in tickets:
                made.end_decode(one, piece, i + 0.9)
    assert made.books.load == {}
    assert made._waiting.samples == 0
