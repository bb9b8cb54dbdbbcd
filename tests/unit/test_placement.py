"""Placement: exact devices, prefill first, sums that explain themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitroll.config import load_config
from splitroll.errors import ConfigError
from splitroll.placement import EngineSpec, Node, actor_name, engine_id, place
from splitroll.types import Role


def nodes(*gpus: int, cores: int = 0) -> list[Node]:
    return [
        Node(f"n{i}", f"10.0.0.{i}", tuple(map(str, range(count))), tuple(range(cores)))
        for i, count in enumerate(gpus)
    ]


def planned(on: list[Node], *overrides: str) -> tuple[EngineSpec, ...]:
    return place(load_config(overrides=overrides), on)


def test_gpus_go_to_prefill_first_then_decode_in_order() -> None:
    specs = planned(
        nodes(8),
        "disaggregation.prefill.tensor_parallel_size=2",
        "disaggregation.decode.tensor_parallel_size=3",
    )
    assert [(s.name, s.gpus) for s in specs] == [
        ("prefill-0", ("0", "1")),
        ("decode-0", ("2", "3", "4")),
        ("decode-1", ("5", "6", "7")),
    ]


def test_too_few_gpus_are_told_with_the_sum_and_its_terms() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(
            nodes(4, 1),
            "disaggregation.decode.tensor_parallel_size=4",
            "devices.kind=gpu",
        )
    text = str(caught.value)
    assert "1 prefill x 1 GPUs + 2 decode x 4 GPUs = 9 GPUs" in text
    assert "5 GPUs (4 on 10.0.0.0, 1 on 10.0.0.1)" in text


def test_an_engine_that_fits_no_single_node_is_told() -> None:
    with pytest.raises(ConfigError, match=r"decode-1 with 3 devices"):
        planned(nodes(4, 2, 2), "disaggregation.decode.tensor_parallel_size=3")


def test_cores_are_exclusive_where_they_suffice() -> None:
    specs = planned(nodes(0, cores=3))
    assert [s.cores for s in specs] == [(0,), (1,), (2,)]


def test_cores_are_shared_where_they_do_not_suffice() -> None:
    assert [s.cores for s in planned(nodes(0, cores=2))] == [(0, 1)] * 3


def test_sharing_cores_can_be_forbidden() -> None:
    with pytest.raises(ConfigError, match=r"= 3 cores"):
        planned(nodes(0, cores=2), "devices.share_cores=false")


def test_a_colocated_fleet_has_engines_of_both_roles() -> None:
    specs = planned(nodes(0, cores=2), "disaggregation.enabled=false")
    assert [(s.name, s.role) for s in specs] == [("engine-0", Role.BOTH), ("engine-1", Role.BOTH)]


def test_one_node_talks_over_loopback_and_several_over_their_addresses() -> None:
    assert {s.host for s in planned(nodes(3))} == {"127.0.0.1"}
    assert {s.host for s in planned(nodes(1, 1, 1))} == {"10.0.0.0", "10.0.0.1", "10.0.0.2"}


def test_names_differ_by_fleet_engine_and_generation() -> None:
    names = {actor_name(f, e, g) for f in "ab" for e in ("x-0", "x-1") for g in (0, 1)}
    assert len(names) == 8
    assert engine_id("a", "x-0", 0) != engine_id("a", "x-0", 1)


@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=16),
    prefills=st.integers(1, 6),
    decodes=st.integers(1, 6),
    prefill_tp=st.integers(1, 4),
    decode_tp=st.integers(1, 4),
)
def test_no_device_is_given_twice_and_every_engine_gets_its_own_number(
    gpus: list[int], prefills: int, decodes: int, prefill_tp: int, decode_tp: int
) -> None:
    try:
        specs = planned(
            nodes(*gpus),
            "devices.kind=gpu",
            f"disaggregation.prefill_replicas={prefills}",
            f"disaggregation.decode_replicas={decodes}",
            f"disaggregation.prefill.tensor_parallel_size={prefill_tp}",
            f"disaggregation.decode.tensor_parallel_size={decode_tp}",
        )
    except ConfigError:
        free = sum(gpus)
        needed = prefills * prefill_tp + decodes * decode_tp
        assert needed > free or max(prefill_tp, decode_tp) > 1
        return
    assert len(specs) == prefills + decodes
    given_out = [(s.node_id, gpu) for s in specs for gpu in s.gpus]
    assert len(given_out) == len(set(given_out))
    for spec in specs:
        assert len(spec.gpus) == (prefill_tp if spec.role is Role.PREFILL else decode_tp)
        assert max(map(int, spec.gpus)) < gpus[int(spec.node_id[1:])]
