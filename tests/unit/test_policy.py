"""Policies, over fleets and loads that are built as the dispatcher builds them."""

from __future__ import annotations

import copy
import dataclasses
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.dispatch.allocator import Allocator, Piece
from splitroll.dispatch.books import Books, Snapshot
from splitroll.dispatch.cost import StepCost
from splitroll.dispatch.policy import POLICIES, GroupRoute, Part, Policy, Work, share
from splitroll.types import Role

COST = StepCost(step=0.02, sequence=0.001, context=1e-6, token=2e-4, pair=1e-8)
WORK = Work(prompt_tokens=200, samples=1, expected=64, max_tokens=256)
CHEAP = (0.001, 1e-12)
"""A transfer that takes next to nothing."""


def fleet(
    roles: Sequence[Role] = (Role.BOTH, Role.BOTH),
    *,
    elastic: bool = True,
    speeds: Sequence[float] = (),
    seats: int = 64,
) -> Books:
    books = Books(elastic=elastic)
    for i, role in enumerate(roles):
        engine = books.join(f"e{i}", role, seats)
        books.set_cost(engine, COST.scaled(speeds[i] if i < len(speeds) else 1.0))
        books.set_up(engine, True)
    return books


def decide(policy: str, books: Books, work: Work, waiting_s: float = 0.0) -> GroupRoute:
    route = POLICIES[policy]().decide(books.snapshot(0.0, waiting_s), work)
    books.turn += 1
    assert route is not None
    return route


def give(books: Books, engine: int, sequences: int, expected: float = 64) -> None:
    for _ in range(sequences):
        books.begin_decode(engine, 200, expected, 256, 0.0)


def place(books: Books, route: GroupRoute, work: Work) -> None:
    for part in route.parts:
        seconds = books.cost(part.prefill).prefill(work.prompt_tokens)
        books.begin_prefill(part.prefill, seconds, work.prompt_tokens, 0.0)
        give(books, part.decode, part.samples, work.expected)


def placed(policy: str, books: Books, work: Work, times: int) -> Counter[int]:
    """Give out the same work many times; returns the samples by engine."""
    counts: Counter[int] = Counter()
    for _ in range(times):
        route = decide(policy, books, work)
        for part in route.parts:
            counts[part.decode] += part.samples
        place(books, route, work)
    return counts


# All policies.

ENGINES = st.lists(
    st.tuples(
        st.sampled_from(Role),
        st.booleans(),  # up
        st.floats(0.2, 5),  # speed
        st.integers(0, 3),  # prefills
        st.integers(0, 9),  # sequences
    ),
    min_size=1,
    max_size=8,
)
WORKS = st.builds(
    Work,
    prompt_tokens=st.integers(1, 4000),
    samples=st.integers(1, 16),
    expected=st.floats(1, 1000),
    max_tokens=st.just(1024),
    avoid=st.integers(0, 255),
    block_bytes=st.just(700_000),
    transfer=st.tuples(st.floats(0, 0.5), st.floats(0, 1e-7)),
    pairs=st.dictionaries(
        st.tuples(st.integers(0, 7), st.integers(0, 7)),
        st.tuples(st.floats(0, 0.5), st.floats(0, 1e-7)),
    ),
    spread=st.none() | st.integers(1, 4),
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Snapshot, Work]:
    """Return a fleet under some load, and work that it may be asked to do."""
    engines, now = draw(ENGINES), draw(st.floats(0, 5))
    books = Books(elastic=draw(st.booleans()))
    for i, (role, _, speed, _, _) in enumerate(engines):
        books.set_cost(books.join(f"e{i}", role, 8), COST.scaled(speed))
    for i, (_, up, _, prefills, sequences) in enumerate(engines):
        books.set_up(i, up)
        for _ in range(prefills):
            books.begin_prefill(i, 0.4, 200, 0.0)
        give(books, i, sequences, 20 * (i + 1))
    books.turn = draw(st.integers(0, 20))
    work = draw(WORKS)
    up = [i for i, (_, is_up, *_) in enumerate(engines) if is_up]
    if up and draw(st.booleans()):
        work = dataclasses.replace(work, held_by=draw(st.sampled_from(up)))
    left, cached = (1 << len(engines)) - 1, []
    for depth in draw(st.lists(st.integers(1, 100), max_size=3, unique=True)):
        if (mask := draw(st.integers(0, 255)) & left) != 0:
            cached.append((mask, 32 * depth))
            left &= ~mask
    work = dataclasses.replace(work, cached=cached)
    return books.snapshot(now, draw(st.floats(0, 100))), work


def values(snapshot: Snapshot) -> list[Any]:
    found = [getattr(snapshot, field.name) for field in dataclasses.fields(snapshot)]
    return [v.tolist() if isinstance(v, np.ndarray) else v for v in found]


def allowed(mask: Any, avoid: int) -> set[int]:
    """Return the engines of a mask, without those to avoid unless no other is left."""
    numbers = {int(n) for n in np.flatnonzero(mask)}
    return {n for n in numbers if not avoid >> n & 1} or numbers


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=120, deadline=None)
@given(situations())
def test_a_decision_changes_nothing_and_is_always_the_same(
    name: str, situation: tuple[Snapshot, Work]
) -> None:
    snapshot, work = situation
    before, asked = copy.deepcopy(values(snapshot)), copy.deepcopy(work)
    policy = POLICIES[name]()
    first = policy.decide(snapshot, work)
    assert policy.decide(snapshot, work) == first
    assert POLICIES[name]().decide(snapshot, work) == first
    assert values(snapshot) == before
    assert work == asked


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=150, deadline=None)
@given(situations())
def test_all_samples_go_to_engines_that_are_up_and_may_take_them(
    name: str, situation: tuple[Snapshot, Work]
) -> None:
    snapshot, work = situation
    route = POLICIES[name]().decide(snapshot, work)
    if route is None:
        assert not snapshot.up.any()
        return
    assert route.why.policy == name
    assert sum(part.samples for part in route.parts) == work.samples
    assert min(part.samples for part in route.parts) > 0
    assert len({part.decode for part in route.parts}) == len(route.parts)
    if work.spread is not None:
        assert len(route.parts) <= work.spread
    if name in ("round_robin", "least_loaded", "static"):
        # They keep the roles apart even in an elastic fleet.
        preferred = snapshot.prefers_decode
        decodes = preferred if preferred.any() else snapshot.decodes
        prefills = snapshot.prefills & ~preferred
    else:
        decodes, prefills = snapshot.decodes, snapshot.prefills
    for part in route.parts:
        assert part.decode in allowed(decodes, work.avoid)
        if not part.is_local:
            assert part.prefill == work.held_by or part.prefill in allowed(prefills, work.avoid)


@pytest.mark.parametrize("name", POLICIES)
def test_engines_to_avoid_are_taken_only_when_no_other_is_left(name: str) -> None:
    books = fleet([Role.BOTH] * 3)
    give(books, 2, 60)
    for avoid, expected in ((0b011, {2}), (0b110, {0}), (0b111, {0, 1, 2})):
        work = dataclasses.replace(WORK, samples=4, avoid=avoid, transfer=CHEAP)
        for part in decide(name, books, work).parts:
            assert {part.prefill, part.decode} <= expected


@pytest.mark.parametrize("name", POLICIES)
def test_there_is_no_route_only_when_nothing_is_up(name: str) -> None:
    books = fleet([Role.PREFILL, Role.DECODE], elastic=False)
    for down in (1, 0):
        books.set_up(down, False)
        route = POLICIES[name]().decide(books.snapshot(0.0), WORK)
        assert route is None if down == 0 else route is not None


@pytest.mark.parametrize("name", POLICIES)
def test_no_engine_is_preferred_for_ever(name: str) -> None:
    counts = placed(name, fleet([Role.BOTH] * 5), WORK, 200)
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert max(counts.values()) <= 1.5 * min(counts.values())


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"round_robin"}))
def test_the_idle_engine_is_chosen(name: str) -> None:
    for idle in range(3):
        books = fleet([Role.BOTH] * 3)
        for engine in {0, 1, 2} - {idle}:
            give(books, engine, 4)
        assert decide(name, books, WORK).parts == (Part(idle, idle, 1),)


def test_samples_are_dealt_evenly_and_no_engine_gets_none() -> None:
    assert share([3, 4, 5], ["a", "b"]) == [("a", (3, 5)), ("b", (4,))]
    assert share([3], ["a", "b"]) == [("a", (3,))]


@pytest.mark.parametrize("name", POLICIES)
def test_a_group_goes_to_as_many_engines_as_it_is_told_and_has_samples(name: str) -> None:
    for samples, spread, expected in ((4, 2, [2, 2]), (2, 4, [1, 1]), (5, 3, [2, 2, 1])):
        work = dataclasses.replace(WORK, samples=samples, spread=spread)
        route = decide(name, fleet([Role.BOTH] * 4), work)
        assert sorted((part.samples for part in route.parts), reverse=True) == expected


# The ones that each have their way.


def test_round_robin_takes_turns_whatever_the_load() -> None:
    books = fleet([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE])
    give(books, 3, 60)
    pairs = [decide("round_robin", books, WORK).parts[0] for _ in range(12)]
    assert [part.decode for part in pairs] == [2, 3, 4] * 4
    assert [part.prefill for part in pairs] == [0, 1] * 6


def test_least_loaded_takes_a_free_seat_before_fewer_tokens() -> None:
    books = fleet([Role.BOTH] * 2, seats=4)
    for _ in range(4):
        books.begin_decode(0, 10, 5, 10, 0.0)
    books.begin_decode(1, 2000, 500, 1000, 0.0)
    assert decide("least_loaded", books, WORK).parts[0].decode == 1


@settings(max_examples=150, deadline=None)
@given(situations())
def test_colocated_never_hands_off(situation: tuple[Snapshot, Work]) -> None:
    route = POLICIES["colocated"]().decide(*situation)
    assert route is None or all(part.is_local for part in route.parts)


@settings(max_examples=150, deadline=None)
@given(situations())
def test_static_always_splits_where_both_roles_are(situation: tuple[Snapshot, Work]) -> None:
    snapshot, work = situation
    work = dataclasses.replace(work, held_by=-1)
    route = POLICIES["static"]().decide(snapshot, work)
    only_prefill = snapshot.prefills & ~snapshot.prefers_decode
    if route is not None and snapshot.prefers_decode.any() and only_prefill.any():
        assert not any(part.is_local for part in route.parts)


def test_static_takes_the_prefill_engine_that_is_done_first() -> None:
    books = fleet([Role.PREFILL, Role.PREFILL, Role.DECODE], elastic=False, speeds=[4.0])
    taken = Counter(part.prefill for part in _static_parts(books, 50))
    assert taken[1] > 3 * taken[0] > 0


def _static_parts(books: Books, times: int) -> list[Part]:
    parts = []
    for _ in range(times):
        route = decide("static", books, WORK)
        place(books, route, WORK)
        parts += route.parts
    return parts


# Adaptive.


def test_among_equals_the_one_with_the_prefix_is_chosen() -> None:
    for holder in range(3):
        work = dataclasses.replace(WORK, cached=[(1 << holder, 192)])
        assert decide("adaptive", fleet([Role.BOTH] * 3), work).parts[0].decode == holder


def test_a_deeper_prefix_is_better_than_a_shallow_one() -> None:
    work = dataclasses.replace(WORK, cached=[(0b01, 64), (0b10, 192)])
    assert decide("adaptive", fleet(), work).parts[0].decode == 1


@pytest.mark.parametrize("name", ["adaptive", "colocated"])
def test_nobody_waits_longer_for_a_prefix_than_computing_it_takes(name: str) -> None:
    work = dataclasses.replace(WORK, prompt_tokens=1600, cached=[(0b01, 1568)])
    saved = COST.prefill(1568)
    for backlog, expected in ((0.3 * saved, 0), (3 * saved, 1)):
        books = fleet()
        books.begin_prefill(0, backlog, 100, 0.0)
        assert decide(name, books, work).parts[0].decode == expected


@pytest.mark.parametrize("name", ["adaptive", "colocated"])
def test_one_popular_prefix_does_not_make_a_hot_spot(name: str) -> None:
    # One system prompt for all; at first only one engine has it.
    made = Allocator(name, elastic=True)
    for i in range(8):
        made.join(
            f"e{i}",
            Role.BOTH,
            seats=64,
            num_blocks=2000,
            block_size=32,
            block_bytes=700_000,
            cost=COST,
        )
        made.set_up(i, True)
    made.observe_transfer(0, 1, 200, 0.02)
    system = tuple(range(1024))
    made.note_prompt(3, made.accept("warm", system, 1, 64))
    counts: Counter[int] = Counter()
    for i in range(96):
        prompt = system + tuple(range(10_000 + 200 * i, 10_126 + 200 * i))
        piece = made.accept(i, prompt, 4, 64)
        _carry_out(made, piece, counts)
    assert len(counts) == 8
    assert max(counts.values()) < 2 * 96 * 4 / 8


def _carry_out(made: Allocator, piece: Piece, counts: Counter[int]) -> None:
    route = made.decide(piece, 0.0)
    assert route is not None
    for part in route.parts:
        made.begin_prefill(part.prefill, piece, 0.0)
        made.note_prompt(part.decode, piece)
        for _ in range(part.samples):
            made.begin_decode(part.decode, piece, 0.0)
        counts[part.decode] += part.samples


@pytest.mark.parametrize("slowness", [2.0, 4.0])
def test_a_slow_engine_gets_less_in_proportion(slowness: float) -> None:
    counts = placed("adaptive", fleet([Role.BOTH] * 4, speeds=[1, slowness]), WORK, 300)
    fast = statistics.fmean(counts[engine] for engine in (0, 2, 3))
    assert fast / counts[1] == pytest.approx(slowness, rel=0.3)


def test_kv_leaves_an_overloaded_engine_when_moving_is_cheap() -> None:
    books = fleet()
    give(books, 0, 40, 200)
    held = dataclasses.replace(WORK, prompt_tokens=8000, held_by=0, block_bytes=700_000)
    cheap = dataclasses.replace(held, transfer=CHEAP)
    assert decide("adaptive", books, cheap).parts == (Part(0, 1, 1),)
    dear = dataclasses.replace(held, transfer=(60.0, 0.0))
    route = decide("adaptive", books, dear)
    assert all(part.is_local for part in route.parts)
    why = decide("adaptive", books, cheap).why
    assert why.local is not None
    assert why.handoff is not None


def test_kv_stays_where_it_is_when_all_are_alike() -> None:
    for holder in range(4):
        books = fleet([Role.BOTH] * 4)
        for engine in range(4):
            give(books, engine, 3)
        work = dataclasses.replace(WORK, prompt_tokens=1500, held_by=holder, transfer=CHEAP)
        assert decide("adaptive", books, work).parts == (Part(holder, holder, 1),)


def test_kv_stays_with_an_engine_a_little_busier_than_the_others() -> None:
    # No index knows what a sample has generated so far: only the handle does.
    books = fleet([Role.BOTH] * 4)
    for engine in range(4):
        give(books, engine, 3)
    books.begin_prefill(2, 0.01, 10, 0.0)
    work = dataclasses.replace(WORK, prompt_tokens=1500, held_by=2, transfer=(0.2, 0.0))
    assert decide("adaptive", books, work).parts == (Part(2, 2, 1),)


def test_kv_goes_over_the_quicker_of_two_links() -> None:
    books = fleet([Role.PREFILL, Role.DECODE, Role.DECODE], elastic=False)
    work = dataclasses.replace(WORK, prompt_tokens=1500, held_by=0, block_bytes=700_000)
    slow, quick = (0.05, 1e-7), (0.01, 1e-9)
    for near in (1, 2):
        pairs = {(0, 3 - near): slow, (0, near): quick}
        linked = dataclasses.replace(work, transfer=slow, pairs=pairs)
        assert decide("adaptive", books, linked).parts == (Part(0, near, 1),)


TURN = dataclasses.replace(
    WORK,
    prompt_tokens=3000,
    cached=[(1, 2880)],
    room=[1000, 1000],
    transfer=CHEAP,
    block_bytes=700_000,
)
"""The next turn of an episode whose KV engine 0 has."""
DEAR = StepCost(step=0.02, sequence=0.001, context=0.0, token=1e-3, pair=0.0)


def busy_holder(busy_s: float) -> Books:
    books = fleet([Role.BOTH] * 2)
    for engine in range(2):
        books.set_cost(engine, DEAR)
    if busy_s:
        books.begin_decode(0, 500, busy_s / DEAR.step, 10_000, 0.0)
    return books


def test_a_turn_stays_with_its_kv_takes_it_along_or_leaves_it() -> None:
    stays = decide("adaptive", busy_holder(0.0), TURN)
    assert stays.parts == (Part(0, 0, 1),)
    along = decide("adaptive", busy_holder(100.0), TURN)
    assert along.parts == (Part(1, 1, 1, kv_from=0, kv_tokens=2880),)
    assert along.why.moved is not None
    assert along.why.local is not None
    assert along.why.finish == along.why.moved < along.why.local
    slow = dataclasses.replace(TURN, transfer=(10.0, 0.0))
    assert decide("adaptive", busy_holder(100.0), slow).parts == (Part(1, 1, 1),)


def test_kv_is_not_moved_where_it_would_drop_other_kv_or_others_count_on_it() -> None:
    for room, moves in (([0, 2000 // 32], False), ([0, 3200 // 32], True), (None, False)):
        tight = dataclasses.replace(TURN, room=room)
        route = decide("adaptive", busy_holder(100.0), tight)
        assert (route.parts[0].kv_from == 0) is moves


def test_other_policies_move_no_cached_kv() -> None:
    for policy in POLICIES:
        if policy != "adaptive":
            route = decide(policy, busy_holder(100.0), TURN)
            assert all(part.kv_from < 0 for part in route.parts)


def test_a_busy_decode_engine_has_its_prompts_computed_elsewhere() -> None:
    books = fleet([Role.PREFILL, Role.DECODE], elastic=False)
    books.begin_prefill(1, 2.0, 100, 0.0)
    long = dataclasses.replace(WORK, prompt_tokens=3000, transfer=CHEAP, block_bytes=700_000)
    assert decide("adaptive", books, long).parts == (Part(0, 1, 1),)


def test_a_group_is_spread_when_nothing_else_waits_and_that_ends_sooner() -> None:
    group = dataclasses.replace(WORK, samples=8, expected=200, max_tokens=400)
    costly = StepCost(step=0.02, sequence=0.02, context=0.0, token=1e-5, pair=0.0)

    def idle() -> Books:
        books = fleet([Role.BOTH] * 4)
        for engine in range(4):
            books.set_cost(engine, costly)
        return books

    spread = decide("adaptive", idle(), group)
    assert [part.samples for part in spread.parts] == [2] * 4
    together = decide("adaptive", idle(), group, waiting_s=10_000)
    assert [part.samples for part in together.parts] == [8]


def test_a_group_stays_together_when_its_prompt_is_dear_and_its_samples_short() -> None:
    group = dataclasses.replace(WORK, prompt_tokens=4000, samples=4, expected=4)
    assert len(decide("adaptive", fleet([Role.BOTH] * 4), group).parts) == 1


def test_a_fleet_is_filled_evenly_by_groups() -> None:
    group = dataclasses.replace(WORK, samples=8)
    counts = placed("adaptive", fleet([Role.BOTH] * 6), group, 60)
    assert max(counts.values()) <= 1.2 * min(counts.values())


def test_what_is_estimated_is_told() -> None:
    books = fleet()
    give(books, 0, 40, 200)
    route = decide("adaptive", books, dataclasses.replace(WORK, transfer=CHEAP))
    why = route.why
    assert why.local is not None
    assert why.added > 0
    assert why.added_local > 0
    assert decide("round_robin", books, WORK).why.local is None


def test_a_decision_in_a_large_fleet_takes_well_under_a_millisecond() -> None:
    """100,000 sequences on 1,024 engines; the bound is generous, not what it should take."""
    books = fleet([Role.PREFILL, Role.DECODE] * 512, seats=128)
    draw = random.Random(0)
    for i in range(100_000):
        books.begin_decode(i % 1024, 200, draw.uniform(1, 256), 256, 0.0)
    policy: Policy = POLICIES["adaptive"]()
    taken = []
    for i in range(200):
        work = dataclasses.replace(
            WORK, samples=1 + i % 8, cached=[(1 << i, 192)], transfer=(0.02, 1e-9)
        )
        begun = time.perf_counter()
        assert policy.decide(books.snapshot(1.0), work) is not None
        taken.append(time.perf_counter() - begun)
    assert statistics.median(taken) < 0.001
