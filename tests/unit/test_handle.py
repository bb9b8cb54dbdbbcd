"""Handles: used once, in time, at their own weight version."""

from __future__ import annotations

import pytest

from splitroll.errors import HandleRefused
from splitroll.handoff.handle import KvHandle


def handle(**changes: float) -> KvHandle:
    values: dict[str, float] = {"born_s": 100.0, "max_age_s": 10.0, "weight_version": 3, **changes}
    return KvHandle(
        prefill_engine="p",
        params={"x": 1},
        weight_version=int(values["weight_version"]),
        born_s=values["born_s"],
        max_age_s=values["max_age_s"],
        elapsed_s=0.0,
    )


def test_it_can_be_taken_in_time() -> None:
    assert handle().take(now_s=109.9, weight_version=3) == {"x": 1}


def test_it_is_refused_before_its_lease_could_end() -> None:
    with pytest.raises(HandleRefused, match="old"):
        handle().take(now_s=110.1, weight_version=3)


def test_it_is_refused_a_second_time() -> None:
    one = handle()
    one.take(now_s=101, weight_version=3)
    with pytest.raises(HandleRefused, match="used before"):
        one.take(now_s=101, weight_version=3)


def test_it_is_refused_by_an_engine_of_another_weight_version() -> None:
    with pytest.raises(HandleRefused, match="weight version 3"):
        handle().take(now_s=101, weight_version=4)


def test_a_refused_handle_is_not_taken() -> None:
    one = handle()
    with pytest.raises(HandleRefused):
        one.take(now_s=999, weight_version=3)
    assert not one.taken


def test_it_settles_once() -> None:
    calls: list[int] = []
    one = handle()
    one.when_settled(lambda: calls.append(1))
    one.settle()
    one.settle()
    assert calls == [1]


def test_a_callback_after_settling_is_called_at_once() -> None:
    calls: list[int] = []
    one = handle()
    one.settle()
    one.when_settled(lambda: calls.append(1))
    assert calls == [1]
