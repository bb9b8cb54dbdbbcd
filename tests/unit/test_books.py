"""Accounts of engines: load from begin to end, and estimates that behave between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.dispatch.books import NOMINAL, Books, DecodeTicket, PrefillTicket, Snapshot
from splitroll.dispatch.cost import StepCost
from splitroll.types import Role

COST = StepCost(step=0.02, sequence=0.001, context=1e-6, token=2e-4, pair=1e-8)
BOTH = (Role.BOTH, Role.BOTH)


def fleet(roles: Sequence[Role] = BOTH, *, elastic: bool = True, seats: int = 8) -> Books:
    books = Books(elastic=elastic)
    for i, role in enumerate(roles):
        engine = books.join(f"e{i}", role, seats)
        books.set_cost(engine, COST)
        books.set_up(engine, True)
    return books


def masks(snapshot: Snapshot) -> tuple[list[bool], list[bool], list[bool]]:
    return snapshot.prefills.tolist(), snapshot.decodes.tolist(), snapshot.prefers_decode.tolist()


def test_load_counts_from_begin_to_end() -> None:
    books = fleet()
    assert books.load == {}
    prefill = books.begin_prefill(0, 1.0, 200, 10.0)
    decode = books.begin_decode(1, 200, 50, 100, 10.0)
    assert books.load == {"e0": 200, "e1": 300}
    assert books.sequences(1) == 1
    assert books.snapshot(10.0).free_seats.tolist() == [8, 7]
    books.end_prefill(prefill, 11.0)
    assert books.load == {"e1": 300}
    books.end_decode(decode, 12.0)
    assert books.load == {}


def test_each_end_works_once() -> None:
    books = fleet()
    prefill = [books.begin_prefill(0, 1.0, 200, 0.0) for _ in range(2)]
    decode = [books.begin_decode(0, 200, 50, 100, 0.0) for _ in range(2)]
    for _ in range(3):
        books.end_prefill(prefill[0], 0.1)
        books.end_decode(decode[0], 0.1)
    assert books.load == {"e0": 500}
    assert books.sequences(0) == 1


def test_an_estimate_never_ends_work() -> None:
    books = fleet()
    books.begin_prefill(0, 1.0, 200, 0.0)
    books.begin_decode(0, 200, 50, 100, 0.0)
    snapshot = books.snapshot(1e6)
    assert books.load == {"e0": 500}
    assert snapshot.sequences[0] == 1
    assert snapshot.drain_s[0] > 0, "what is overdue is thought to need some steps still"


# (engine, is it a prefill, its size, when it begins, when it ends)
JOBS = st.lists(
    st.tuples(
        st.integers(0, 1), st.booleans(), st.integers(0, 500), st.floats(0, 9), st.floats(0, 9)
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(JOBS, st.randoms(use_true_random=False))
def test_load_returns_to_zero_whatever_the_order_of_times(
    jobs: list[tuple[int, bool, int, float, float]], draw: object
) -> None:
    books = fleet()
    tickets: list[tuple[PrefillTicket | DecodeTicket, float]] = []
    for engine, is_prefill, size, begin, end in jobs:
        if is_prefill:
            tickets.append((books.begin_prefill(engine, size / 100, size, begin), end))
        else:
            tickets.append((books.begin_decode(engine, 100, float(size), size, begin), end))
        assert_sane(books.snapshot(begin))
    draw.shuffle(tickets)  # type: ignore[attr-defined]
    for ticket, end in tickets:
        if isinstance(ticket, PrefillTicket):
            books.end_prefill(ticket, end)
        else:
            books.end_decode(ticket, end)
        assert_sane(books.snapshot(end))
    snapshot = books.snapshot(10.0)
    assert books.load == {}
    assert snapshot.sequences.tolist() == [0, 0]
    assert snapshot.drain_s.tolist() == [0, 0]
    assert snapshot.longest.tolist() == [0, 0]


def assert_sane(snapshot: Snapshot) -> None:
    for values in (snapshot.backlog_s, snapshot.longest, snapshot.drain_s, snapshot.sequences):
        assert np.isfinite(values).all()
        assert (values >= 0).all()
    assert (snapshot.drain_s >= snapshot.backlog_s).all()


@settings(max_examples=100, deadline=None)
@given(JOBS, st.lists(st.floats(0, 60), min_size=2, max_size=8))
def test_what_is_left_falls_with_time_and_rises_with_work(
    jobs: list[tuple[int, bool, int, float, float]], times: list[float]
) -> None:
    books = fleet()
    for engine, is_prefill, size, _, _ in jobs:
        before = books.snapshot(0.0).drain_s
        if is_prefill:
            books.begin_prefill(engine, size / 100, size, 0.0)
        else:
            books.begin_decode(engine, 100, float(size), size, 0.0)
        after = books.snapshot(0.0).drain_s
        assert (after >= before - 1e-9).all()
        assert after[1 - engine] == before[1 - engine]
    drains = [books.snapshot(now).drain_s for now in sorted(times)]
    for earlier, later in itertools.pairwise(drains):
        assert (later <= earlier + 1e-9).all()


def test_an_estimate_does_not_depend_on_when_one_looked() -> None:
    books, other = fleet(), fleet()
    for one in (books, other):
        one.begin_prefill(0, 1.0, 200, 0.0)
        for expected in (50, 80):
            one.begin_decode(0, 200, expected, 100, 0.0)
    for now in (0.3, 0.7, 1.2, 1.9):
        ticket = books.begin_prefill(0, 0.0, 0, now)  # brings the account up to date
        books.end_prefill(ticket, now)
    assert books.snapshot(2.5).drain_s[0] == pytest.approx(other.snapshot(2.5).drain_s[0])


def test_prefills_go_first_and_then_the_steps_of_all_sequences() -> None:
    books = fleet()
    books.begin_prefill(0, 1.0, 200, 0.0)
    for expected in (20, 100):
        books.begin_decode(0, 200, expected, 100, 0.0)
    at_once = books.snapshot(0.0)
    each = COST.sequence + COST.context * 200
    assert at_once.drain_s[0] == pytest.approx(1.0 + 100 * COST.step + 120 * each)
    assert at_once.longest[0] == 100
    assert books.snapshot(0.9).longest[0] == 100
    later = books.snapshot(1.0 + 10 * COST.decode_step(2, 400))
    assert later.backlog_s[0] == 0
    assert later.longest[0] == pytest.approx(90)


def test_the_end_of_the_longest_leaves_the_next_one() -> None:
    books = fleet()
    tickets = [books.begin_decode(0, 200, expected, 100, 0.0) for expected in (20, 100, 60)]
    books.end_decode(tickets[1], 0.0)
    assert books.snapshot(0.0).longest[0] == 60
    books.end_decode(tickets[0], 0.0)
    assert books.snapshot(0.0).longest[0] == 60
    books.end_decode(tickets[2], 0.0)
    assert books.snapshot(0.0).longest[0] == 0


def test_an_engine_goes_down_and_comes_back() -> None:
    books = fleet()
    ticket = books.begin_decode(0, 200, 50, 100, 0.0)
    books.set_up(0, False)
    assert not books.is_up(0)
    assert masks(books.snapshot(1.0)) == ([False, True],) * 3
    books.end_decode(ticket, 2.0)
    books.set_up(0, True)
    assert masks(books.snapshot(3.0)) == ([True, True],) * 3
    assert books.load == {}
    assert books.snapshot(3.0).drain_s.tolist() == [0, 0]


def test_in_an_elastic_fleet_all_do_both() -> None:
    books = fleet([Role.PREFILL, Role.DECODE, Role.BOTH])
    assert masks(books.snapshot(0.0)) == ([True] * 3, [True] * 3, [False, True, True])


def test_in_a_strict_fleet_each_does_its_own() -> None:
    books = fleet([Role.PREFILL, Role.DECODE, Role.BOTH], elastic=False)
    expected = ([True, False, True], [False, True, True], [False, True, True])
    assert masks(books.snapshot(0.0)) == expected


def test_in_a_strict_fleet_prefill_engines_decode_while_nobody_else_can() -> None:
    books = fleet([Role.PREFILL, Role.DECODE], elastic=False)
    books.set_up(1, False)
    assert masks(books.snapshot(0.0)) == ([True, False], [True, False], [False, False])
    books.set_up(1, True)
    assert masks(books.snapshot(0.0)) == ([True, False], [False, True], [False, True])


def test_an_engine_that_reported_nothing_costs_what_the_others_do() -> None:
    books = Books(elastic=True)
    for i in range(4):
        books.join(f"e{i}", Role.BOTH, 8)
    assert books.cost(3) == NOMINAL
    books.set_cost(0, COST)
    assert [books.cost(i) for i in range(4)] == [COST] * 4
    books.set_cost(1, COST.scaled(2.0))
    books.set_cost(2, COST.scaled(9.0))
    assert books.cost(3) == COST.scaled(2.0)
    assert books.cost(0) == COST
    books.join("e4", Role.BOTH, 8)
    assert books.cost(4) == COST.scaled(2.0)
    assert books.snapshot(0.0).cost(4) == COST.scaled(2.0)
    books.set_cost(3, COST.scaled(3.0))
    assert books.cost(3) == COST.scaled(3.0)


def test_costs_that_change_change_what_is_left() -> None:
    books = fleet()
    books.begin_decode(0, 200, 50, 100, 0.0)
    before = books.snapshot(0.0).drain_s[0]
    books.set_cost(0, COST.scaled(3.0))
    assert books.snapshot(0.0).drain_s[0] == pytest.approx(3 * before)
