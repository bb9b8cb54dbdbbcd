"""Sampling parameters, seeds, and the shape of a sample's line."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitroll import errors
from splitroll.errors import InvalidRequest, Problem
from splitroll.types import (
    Route,
    RouteKind,
    Sample,
    SamplingParams,
    Timing,
    VersionSpan,
    derive_seed,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("stop", [""]),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("min_tokens", 65),
        ("seed", -1),
        ("stop", "a string"),
        ("stop_token_ids", 3),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert [problem.path for problem in caught.value.problems] == [f"sampling.{name}"]


def test_all_bad_parameters_are_told_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(max_tokens=0, temperature=-1, top_p=3)
    assert len(caught.value.problems) == 3


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), unique=True))
def test_seeds_of_different_samples_differ(parts: list[tuple[int, int]]) -> None:
    seeds = [derive_seed(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, "prompt", 3) == 8259430964217631402


def test_a_samples_line_has_these_fields() -> None:
    sample = Sample(
        id="a",
        sample=1,
        prompt_token_ids=(1, 2),
        token_ids=(3,),
        text="x",
        logprobs=(-0.5,),
        finish_reason="stop",
        seed=7,
        weight_version=4,
        prefill_version=3,
        weight_versions=(VersionSpan(4, 0, 1),),
        route=Route(RouteKind.SHARED, "prefill-0", "decode-1"),
        timing=Timing(0.1, 0.2, 0.3, 0.4),
    )
    row = json.loads(json.dumps(sample.to_json()))
    assert list(row) == [
        "id", "sample", "prompt_token_ids", "token_ids", "text", "logprobs", "finish_reason",
        "seed", "weight_version", "prefill_version", "weight_versions", "route", "timing",
    ]  # fmt: skip
    assert row["route"] == {
        "kind": "shared",
        "prefill": "prefill-0",
        "decode": "decode-1",
        "moved_to": [],
        "why": {},
    }
    assert set(row["timing"]) == {"queued_s", "prefill_s", "transfer_s", "decode_s"}


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError([Problem("p", "f", "a", "h")]),
        errors.EngineDied("e", "c"),
        errors.EngineStartError("e", "c"),
        errors.LegTimeout("e", "c"),
        errors.GroupFailed("g", ["a", "b"]),
    ],
)
def test_errors_survive_the_way_between_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
