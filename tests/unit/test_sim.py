"""Whole steps on a virtual clock: nothing lost, the same for the same seed, load where it fits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitroll.bench.workloads import WORKLOADS, GroupJob, Load, make_load
from splitroll.dispatch.policy import POLICIES
from splitroll.sim.run import FleetModel, SimResult, Simulation
from splitroll.sim.study import MEASURED, Study

FLEET = FleetModel(2, 2, MEASURED)


def simulate(load: Load, policy: str = "adaptive", **settings: object) -> SimResult:
    return Simulation(FLEET, policy, **settings).run(load)  # type: ignore[arg-type]


def groups(lengths: list[list[int]], prompt_tokens: int = 200, max_tokens: int = 1024) -> Load:
    draw = random.Random(0)
    jobs = tuple(
        GroupJob(f"g{i}", tuple(draw.choices(range(1000), k=prompt_tokens)), tuple(mine))
        for i, mine in enumerate(lengths)
    )
    return Load(jobs, max_tokens=max_tokens)


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_equal_seeds_give_equal_steps(workload: str) -> None:
    load = make_load(workload, 3, 2)
    assert simulate(load) == simulate(load)


def test_other_seeds_give_other_steps() -> None:
    assert simulate(make_load("burst", 1)) != simulate(make_load("burst", 2))


@settings(max_examples=30, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    workload=st.sampled_from(sorted(WORKLOADS)),
    seed=st.integers(0, 1000),
    scale=st.floats(0.15, 0.6),
    prefills=st.integers(0, 3),
    decodes=st.integers(1, 4),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 1.0, 3.0]), max_size=7),
    seats=st.integers(1, 64),
    segment=st.sampled_from([None, 16, 64, 256]),
    elastic=st.booleans(),
    oracle=st.booleans(),
)
@example("adaptive", "agentic", 0, 0.5, 0, 2, [0.5], 1, None, True, False)  # brings KV along
def test_every_sample_ends_once_and_no_load_stays(
    policy: str,
    workload: str,
    seed: int,
    scale: float,
    prefills: int,
    decodes: int,
    speeds: list[float],
    seats: int,
    segment: int | None,
    elastic: bool,
    oracle: bool,
) -> None:
    load = make_load(workload, seed, scale)
    model = FleetModel(prefills, decodes, MEASURED, tuple(speeds), seats=seats)
    result = Simulation(
        model,
        policy,
        elastic=elastic,
        segment_tokens=segment,
        oracle=oracle,
    ).run(load)
    assert len(result.ended) == load.samples
    assert set(result.ended.values()) == {1}
    assert result.left == {}
    moves = {"migrated", "brought"}
    assert sum(n for kind, n in result.routes.items() if kind not in moves) == load.samples
    assert max(one.total for one in result.spent) <= result.makespan_s + 1e-6
    assert result.efficiency <= 1 + 1e-9


def test_an_engine_that_becomes_slow_gets_less() -> None:
    simulation = Simulation(FLEET, segment_tokens=None)
    load = make_load("burst", 0, 8)
    before = simulation.run(load).spent
    steps = [one.fixed / MEASURED.step for one in before]
    assert steps[0] > 0.7 * max(steps)
    simulation.clock.at(simulation.clock.now + 5.0, lambda _: simulation.set_speed(0, 3.0))
    simulation.run(make_load("burst", 1, 8))
    after = simulation.run(make_load("burst", 2, 8)).spent
    done = [one.decode / speed for one, speed in zip(after, simulation.speeds, strict=True)]
    assert done[0] < 0.6 * min(done[1:])
    busy = [one.total for one in after]
    assert busy[0] < 1.25 * max(busy[1:])


def test_a_prefix_that_all_share_does_not_gather_all_on_one_engine() -> None:
    result = simulate(make_load("shared-system-prompt", 0, 2))
    busy = [one.total for one in result.spent]
    assert min(busy) > 0.5 * max(busy)


def test_the_group_that_is_expected_to_be_longest_is_let_in_first() -> None:
    load = groups([[20] * 4, [30] * 4, [400] * 4, [25] * 4])
    model = replace(FLEET, prefills=0, decodes=1, seats=4)
    result = Simulation(model, oracle=True).run(load)
    ends = sorted(result.latencies, key=result.latencies.__getitem__)
    assert [name[:2] for name in ends[::4]] == ["g2", "g1", "g3", "g0"]


@pytest.mark.parametrize("seed", range(3))
def test_segments_do_not_prolong_a_long_tail(seed: int) -> None:
    load = make_load("long-tail", seed, 6)
    whole = simulate(load, segment_tokens=None).makespan_s
    assert simulate(load).makespan_s <= 1.05 * whole


def test_a_study_s_shares_add_up() -> None:
    row = replace(Study(), per_engine=64).run(4)
    assert row["samples"] == 256
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["shares"]["work"] == pytest.approx(row["work_bound_s"] / row["makespan_s"])
