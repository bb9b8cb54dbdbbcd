"""Policies: pure functions of a snapshot."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from splitroll.dispatch.policy import POLICIES, EngineView, LeastLoaded, RoundRobin, Snapshot, share
from splitroll.dispatch.policy import Work as PolicyWork

WORK = PolicyWork(100, 10, 8)

views = st.lists(
    st.builds(
        EngineView,
        name=st.uuids().map(str),
        tokens_in_flight=st.integers(0, 10**6),
        free_seats=st.integers(-4, 64),
    ),
    unique_by=lambda view: view.name,
    max_size=12,
).map(tuple)


def test_round_robin_takes_every_engine_in_its_turn() -> None:
    engines = tuple(EngineView(name) for name in "abc")
    chosen = [RoundRobin().choose(Snapshot(engines, turn), WORK, 1)[0] for turn in range(6)]
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_least_loaded_takes_the_fewest_tokens() -> None:
    engines = (EngineView("a", 9, 1), EngineView("b", 3, 1), EngineView("c", 5, 1))
    assert LeastLoaded().choose(Snapshot(engines, 0), WORK, 2) == ("b", "c")


def test_least_loaded_prefers_an_engine_with_a_free_seat() -> None:
    engines = (EngineView("a", 0, 0), EngineView("b", 9, 1))
    assert LeastLoaded().choose(Snapshot(engines, 0), WORK, 1) == ("b",)


@given(views, st.integers(0, 100), st.integers(1, 5), st.sampled_from(sorted(POLICIES)))
def test_policies_choose_different_engines_that_exist(
    engines: tuple[EngineView, ...], turn: int, count: int, name: str
) -> None:
    chosen = POLICIES[name]().choose(Snapshot(engines, turn), WORK, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(engines))
    assert set(chosen) <= {view.name for view in engines}


@given(st.lists(st.integers(), unique=True, min_size=1), st.integers(1, 6))
def test_a_group_is_dealt_out_whole_and_evenly(indices: list[int], engines: int) -> None:
    parts = share(indices, [f"e{i}" for i in range(engines)])
    assert Counter(i for _, part in parts for i in part) == Counter(indices)
    sizes = [len(part) for _, part in parts]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
