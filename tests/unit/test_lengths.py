"""Expected lengths, against brute force over what has finished."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.dispatch.lengths import LengthModel


def learnt(lengths: list[int], max_tokens: int = 1024) -> LengthModel:
    """Return a model that saw these lengths, each of another prompt."""
    model = LengthModel()
    for i, tokens in enumerate(lengths):
        model.observe(("seen", i), max_tokens, tokens)
    return model


def test_before_any_sample_has_finished_it_is_half_of_what_is_left() -> None:
    model = LengthModel()
    assert model.expected("p", 256) == 128
    assert model.expected("p", 256, 128) == 64
    assert model.expected("p", 256, 255) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1024), min_size=1, max_size=64), st.integers(0, 1023))
def test_the_rest_at_an_age_is_the_mean_over_those_that_were_longer(
    lengths: list[int], age: int
) -> None:
    model = learnt(lengths * 64)
    longer = [n - age for n in lengths if n > age]
    if longer:
        expected = min(statistics.fmean(longer), 1024 - age)
        assert model.expected("other", 1024, age) == pytest.approx(max(1.0, expected))


def test_limits_near_each_other_learn_together() -> None:
    model = learnt([40] * 64, max_tokens=2011)
    assert model.expected("other", 1830) == 40
    assert model.expected("other", 2047) == 40
    assert model.expected("other", 1024) == 512, "a limit of another kind says nothing"
    assert model.expected("other", 30) == 15


def test_what_finished_first_does_not_decide_for_long() -> None:
    # The first to finish are the shortest: one of them says little about all.
    model = learnt([8])
    assert model.expected("other", 1024) == 8
    for i in range(30):
        model.observe(i, 1024, 200)
        expected = model.expected("other", 1024)
    assert expected > 150


@given(
    st.lists(st.integers(0, 512), max_size=80),
    st.integers(1, 512),
    st.integers(0, 600),
    st.booleans(),
)
def test_it_is_never_above_what_max_tokens_leaves(
    lengths: list[int], max_tokens: int, age: int, own: bool
) -> None:
    model = learnt([min(n, max_tokens) for n in lengths], max_tokens)
    if own:
        model.observe("p", max_tokens, max_tokens)
    expected = model.expected("p", max_tokens, age)
    assert 1 <= expected <= max(1, max_tokens - age)


def test_siblings_shift_it_towards_themselves() -> None:
    model = learnt([100] * 200)
    usual = model.expected("p", 1024)
    seen = [usual]
    for _ in range(6):
        model.observe("p", 1024, 300)
        seen.append(model.expected("p", 1024))
    assert seen == sorted(seen)
    assert seen[-1] > 1.8 * usual
    for _ in range(20):
        model.observe("q", 1024, 20)
    assert model.expected("q", 1024) < 0.5 * usual
    assert model.expected("r", 1024) == pytest.approx(usual, rel=0.2)


def test_one_sibling_does_not_outweigh_all_others() -> None:
    model = learnt([100] * 200)
    model.observe("p", 1024, 1024)
    assert model.expected("p", 1024) <= 4 * 110


def test_of_heavy_tails_the_rest_grows_with_age() -> None:
    draw = random.Random(0)
    model = learnt([min(8000, int(16 * draw.paretovariate(1.1))) for _ in range(4000)], 8192)
    rests = [model.expected("p", 8192, age) for age in (0, 64, 256, 1024)]
    assert rests == sorted(rests)
    assert rests[-1] > 4 * rests[0]


def test_of_equal_lengths_the_rest_falls_with_age() -> None:
    model = learnt([100] * 200)
    assert [model.expected("p", 1024, age) for age in (0, 40, 99)] == [100, 60, 1]


def test_what_outlives_all_that_is_known_is_expected_to_go_on() -> None:
    model = learnt([100] * 200)
    assert model.expected("p", 1024, 400) == 200
    assert model.expected("p", 1024, 900) == 124


def test_other_limits_are_other_lengths() -> None:
    model = learnt([1000] * 100, 1024)
    assert model.expected("p", 64) == 32


def test_it_forgets_what_was_long_ago() -> None:
    model = learnt([500] * 5000 + [10] * 4200)
    assert model.expected("p", 1024) == pytest.approx(10)
