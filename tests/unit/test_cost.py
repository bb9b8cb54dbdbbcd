"""Fitted step costs: what is seen is learnt, what is not keeps its value."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.dispatch.cost import CostFit, StepCost, TransferFit
from splitroll.engines.protocol import StepStats

TRUE = StepCost(step=0.02, sequence=0.0015, context=2e-6, token=3e-4, pair=2e-8)


def decode(draw: random.Random, cost: StepCost = TRUE, noise: float = 0.0) -> StepStats:
    sequences = draw.randint(1, 64)
    context = sequences * draw.randint(64, 2048)
    seconds = cost.decode_step(sequences, context) * _noisy(draw, noise)
    return StepStats(seconds, sequences, context, 0, 0)


def prefill(draw: random.Random, cost: StepCost = TRUE, noise: float = 0.0) -> StepStats:
    sequences, tokens = draw.randint(0, 16), draw.randint(32, 2048)
    context, pairs = sequences * 300, tokens * draw.randint(tokens // 2, 4096)
    seconds = cost.decode_step(sequences, context) + cost.token * tokens + cost.pair * pairs
    return StepStats(seconds * _noisy(draw, noise), sequences, context, tokens, pairs)


def _noisy(draw: random.Random, noise: float) -> float:
    return max(0.3, draw.gauss(1.0, noise))


def fitted(noise: float = 0.0, rounds: int = 60, seed: int = 0) -> CostFit:
    draw, fit = random.Random(seed), CostFit()
    for _ in range(rounds):
        fit.observe([(decode if draw.random() < 0.8 else prefill)(draw, TRUE, noise)] * 1)
        fit.observe([decode(draw, TRUE, noise) for _ in range(4)] + [prefill(draw, TRUE, noise)])
    return fit


def assert_alike(found: StepCost | None, expected: StepCost, within: float) -> None:
    """Compare what is asked of costs: the times of steps, over the range that was seen."""
    assert found is not None
    for sequences, context in ((1, 300), (16, 5000), (64, 20_000), (8, 16_000)):
        seconds = expected.decode_step(sequences, context)
        assert found.decode_step(sequences, context) == pytest.approx(seconds, rel=within)
    for tokens, offset in ((200, 0), (1500, 0), (500, 1500)):
        seconds = expected.prefill(tokens, offset)
        assert found.prefill(tokens, offset) == pytest.approx(seconds, rel=within)


def test_it_knows_nothing_before_steps_of_both_kinds_were_seen() -> None:
    draw = random.Random(1)
    for kind in (decode, prefill):
        fit = CostFit()
        for _ in range(30):
            fit.observe([kind(draw)])
        assert fit.cost is None


def test_it_finds_the_coefficients_behind_exact_steps() -> None:
    cost = fitted(rounds=400).cost
    assert cost is not None
    assert_alike(cost, TRUE, 0.02)
    assert cost.step == pytest.approx(TRUE.step, rel=0.1)
    assert cost.sequence == pytest.approx(TRUE.sequence, rel=0.1)
    assert cost.token == pytest.approx(TRUE.token, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_noise_does_not_lead_it_astray(seed: int) -> None:
    assert_alike(fitted(noise=0.1, rounds=200, seed=seed).cost, TRUE, 0.15)


def test_a_short_probe_is_enough_to_start_with() -> None:
    # Prompts of 256 tokens, alone and four at once, then a few steps each; in one report.
    steps = []
    for batch in (1, 4):
        tokens = 256 * batch
        seconds = TRUE.step + TRUE.token * tokens + TRUE.pair * tokens * 128
        steps.append(StepStats(seconds, 0, 0, tokens, tokens * 128))
        for i in range(5):
            context = batch * (256 + i)
            steps.append(StepStats(TRUE.decode_step(batch, context), batch, context, 0, 0))
    fit = CostFit()
    fit.observe(steps)
    assert fit.cost is not None
    assert fit.cost.decode_step(1, 256) == pytest.approx(TRUE.decode_step(1, 256), rel=0.05)
    assert fit.cost.decode_step(4, 1024) == pytest.approx(TRUE.decode_step(4, 1024), rel=0.05)
    assert fit.cost.prefill(256) == pytest.approx(TRUE.prefill(256), rel=0.1)


@pytest.mark.parametrize(("seen", "other"), [(decode, "prefill"), (prefill, "decode_step")])
def test_what_is_not_seen_for_long_keeps_its_value(
    seen: Callable[[random.Random], StepStats], other: str
) -> None:
    fit, draw = fitted(), random.Random(5)
    assert fit.cost is not None
    before = getattr(fit.cost, other)(800, 400)
    for _ in range(300):
        fit.observe([seen(draw) for _ in range(8)])
    assert getattr(fit.cost, other)(800, 400) == pytest.approx(before, rel=0.02)


def test_steps_of_one_shape_leave_the_rest_where_it_was() -> None:
    fit = fitted()
    for _ in range(400):
        fit.observe([StepStats(TRUE.decode_step(1, 300), 1, 300, 0, 0)] * 4)
    assert_alike(fit.cost, TRUE, 0.1)


@pytest.mark.parametrize("factor", [1 / 8, 1 / 3, 3.0, 8.0])
def test_an_engine_that_changes_speed_is_known_within_some_dozen_steps(factor: float) -> None:
    fit, draw = fitted(rounds=300), random.Random(7)
    now = TRUE.scaled(factor)
    for _ in range(30):
        fit.observe([decode(draw, now)])
    assert fit.cost is not None
    seconds = now.decode_step(16, 5000)
    assert fit.cost.decode_step(16, 5000) == pytest.approx(seconds, rel=0.15)
    for _ in range(30):
        fit.observe([prefill(draw, now)])
    assert fit.cost.prefill(1000) == pytest.approx(now.prefill(1000), rel=0.2)


def test_an_engine_that_recovers_is_known_as_soon() -> None:
    fit, draw = fitted(), random.Random(8)
    for factor in (4.0, 1.0):
        for _ in range(5):
            fit.observe([decode(draw, TRUE.scaled(factor)) for _ in range(8)])
    assert fit.cost is not None
    assert fit.cost.decode_step(16, 5000) == pytest.approx(TRUE.decode_step(16, 5000), rel=0.15)


@pytest.mark.parametrize("kind", [decode, prefill])
def test_a_pause_of_the_machine_changes_little(
    kind: Callable[[random.Random, StepCost], StepStats],
) -> None:
    fit, draw = fitted(), random.Random(9)
    for _ in range(10):
        fit.observe([kind(draw, TRUE.scaled(100.0))])
        fit.observe([kind(draw, TRUE)])
    assert_alike(fit.cost, TRUE, 0.05)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            StepStats,
            seconds=st.floats(0, 100),
            sequences=st.integers(0, 256),
            context_tokens=st.integers(0, 10**6),
            prefill_tokens=st.integers(0, 8192),
            prefill_pairs=st.integers(0, 10**8),
        ),
        max_size=80,
    )
)
def test_no_steps_make_a_cost_negative(steps: list[StepStats]) -> None:
    fit = CostFit()
    for step in steps:
        fit.observe([step])
        if fit.cost is not None:
            assert fit.cost.step > 0
            assert min(fit.cost.sequence, fit.cost.context, fit.cost.token, fit.cost.pair) >= 0
            assert fit.cost.decode_step(8, 8000) < float("inf")


def test_it_starts_with_what_it_is_told() -> None:
    fit = CostFit(TRUE)
    assert fit.cost == TRUE
    fit.observe([decode(random.Random(3))])
    assert_alike(fit.cost, TRUE, 0.01)


def test_chunks_of_a_prompt_cost_what_the_whole_does() -> None:
    chunks = TRUE.prefill(512) + TRUE.prefill(512, 512) + TRUE.prefill(100, 1024)
    assert chunks == pytest.approx(TRUE.prefill(1124))


def test_a_transfer_is_a_constant_and_a_rate() -> None:
    fit, draw = TransferFit(), random.Random(2)
    assert not fit.known
    assert fit.seconds(10**6) == 0.0
    for _ in range(300):
        num_bytes = draw.randint(10**5, 10**8)
        fit.observe(num_bytes, 0.02 + 1e-9 * num_bytes)
    assert fit.known
    for num_bytes in (0, 10**6, 10**8):
        assert fit.seconds(num_bytes) == pytest.approx(0.02 + 1e-9 * num_bytes, rel=0.1)
    constant, per_byte = fit.coefficients
    assert constant + per_byte * 10**8 == fit.seconds(10**8)


def test_transfers_of_one_size_are_known_at_that_size() -> None:
    fit = TransferFit()
    for _ in range(20):
        fit.observe(5_000_000, 0.03)
    assert fit.seconds(5_000_000) == pytest.approx(0.03, rel=0.01)
