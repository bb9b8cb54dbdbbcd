"""Placement: exact devices, prefill first, sums that explain themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitroll.config import load_config
from splitroll.config.pools import pools
from splitroll.engines.ray_place import bundles
from splitroll.errors import ConfigError
from splitroll.placement import (
    EngineSpec,
    Node,
    Share,
    actor_name,
    engine_id,
    has_room,
    left_over,
    less,
    place,
    place_more,
)
from splitroll.types import Role


def nodes(*gpus: int, cores: int = 0) -> list[Node]:
    return [
        Node(f"n{i}", f"10.0.0.{i}", tuple(map(str, range(count))), tuple(range(cores)))
        for i, count in enumerate(gpus)
    ]


CLUSTER = "ray.address=auto"


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
    with pytest.raises(ConfigError, match=r"engine 2 of 2, with 3 devices"):
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
    parts = {s.name: s.shares or (Share(s.node_id, s.gpus),) for s in specs}
    given_out = [
        (part.node_id, gpu) for shares in parts.values() for part in shares for gpu in part.gpus
    ]
    assert len(given_out) == len(set(given_out))
    for spec in specs:
        size = prefill_tp if spec.role is Role.PREFILL else decode_tp
        assert sum(len(part.gpus) for part in parts[spec.name]) == size
        if max(gpus) >= size:
            assert len(parts[spec.name]) == 1, "a stage that fits on a node is on one"
        assert max(map(int, spec.gpus)) < gpus[int(spec.node_id[1:])]


# Nodes of several kinds, engines of several shapes.


def groups(role: str, *shapes: dict[str, Any]) -> str:
    return f"disaggregation.{role}={json.dumps(list(shapes))}"


def test_engines_of_a_role_are_numbered_over_its_groups() -> None:
    specs = planned(
        nodes(8),
        groups("prefill", {"replicas": 2}, {"tensor_parallel_size": 2}),
        groups("decode", {"data_parallel_size": 2}),
        groups("mixed", {}),
    )
    assert [(s.name, s.gpus, s.pool) for s in specs] == [
        ("prefill-0", ("0",), "disaggregation.prefill.0"),
        ("prefill-1", ("1",), "disaggregation.prefill.0"),
        ("prefill-2", ("2", "3"), "disaggregation.prefill.1"),
        ("decode-0", ("4", "5"), "disaggregation.decode.0"),
        ("engine-0", ("6",), "disaggregation.mixed.0"),
    ]
    assert left_over(specs, nodes(8)) == {"10.0.0.0": 1}


def test_roles_can_be_kept_to_nodes_by_resource_and_by_label() -> None:
    on = [
        replace(nodes(4, 4)[0], labels={"kind": "big"}),
        replace(nodes(4, 4)[1], resources=frozenset({"GPU", "L4"})),
    ]
    specs = planned(
        on,
        CLUSTER,
        groups("prefill", {"nodes": {"resource": "L4"}}),
        groups("decode", {"replicas": 2, "nodes": {"labels": {"kind": "big"}}}),
    )
    assert [(s.name, s.node_id) for s in specs] == [
        ("prefill-0", "n1"),
        ("decode-0", "n0"),
        ("decode-1", "n0"),
    ]
    with pytest.raises(ConfigError, match=r"decode\.0\.nodes: found label kind=small"):
        planned(on, CLUSTER, groups("decode", {"nodes": {"labels": {"kind": "small"}}}))
    alone = planned(nodes(4), groups("prefill", {"nodes": {"resource": "L4"}}))
    assert {s.node_id for s in alone} == {"n0"}, "a Ray of our own has this machine, and no other"


def test_who_can_be_anywhere_leaves_room_for_who_cannot() -> None:
    on = [replace(nodes(1, 1)[0], resources=frozenset({"L4"})), nodes(1, 1)[1]]
    bound = {"nodes": {"resource": "L4"}}
    specs = planned(on, CLUSTER, groups("prefill", {}), groups("decode", bound))
    assert [(s.name, s.node_id) for s in specs] == [("prefill-0", "n1"), ("decode-0", "n0")]


def test_cores_are_shared_wherever_one_node_has_too_few() -> None:
    def on(*cores: int) -> list[Node]:
        return [Node(f"n{i}", f"10.0.0.{i}", (), tuple(range(n))) for i, n in enumerate(cores)]

    two = groups("prefill", {"tensor_parallel_size": 2})
    specs = planned(on(1, 1, 1), CLUSTER, two, groups("decode", {}))
    assert [len(s.cores) for s in specs] == [1, 1]
    with pytest.raises(ConfigError, match="left over"):
        planned(on(1, 1, 1), CLUSTER, two, groups("decode", {}), "devices.share_cores=false")


def test_gpus_that_engines_are_yet_to_take_are_not_given_to_others() -> None:
    config = load_config(overrides=[CLUSTER, groups("prefill", {}), groups("decode", {})])
    present = place(config, nodes(2))
    prefills, decodes = pools(config)
    free = [Node("x", "10.0.1.1", ("0",), (0,)), Node("y", "10.0.1.2", ("0",), (0,))]
    first = place_more(config, free, present, prefills, 1, on_gpu=True)
    rest = less(free, first)
    second = place_more(config, rest, [*present, *first], decodes, 1, on_gpu=True)
    assert [(s.name, s.node_id) for s in (*first, *second)] == [
        ("prefill-1", "x"),
        ("decode-1", "y"),
    ]
    assert has_room(free, first[0])
    assert not has_room(rest, first[0])
    with pytest.raises(ConfigError, match="0 GPUs"):
        place_more(config, less(rest, second), present, decodes, 1, on_gpu=True)


def test_thousands_of_engines_are_placed_in_no_time() -> None:
    specs = planned(nodes(0), "disaggregation.decode_replicas=5000")
    assert specs[-1].name == "decode-4999"
    with pytest.raises(ConfigError, match="10000"):
        planned(nodes(0), "disaggregation.decode_replicas=1000000000")


def test_engines_are_packed_or_spread() -> None:
    def where(*overrides: str) -> list[str]:
        specs = planned(nodes(4, 4, 4), "disaggregation.decode_replicas=5", *overrides)
        return [s.node_id for s in specs]

    assert where() == ["n0"] * 4 + ["n1"] * 2
    assert where("devices.placement=spread") == ["n0", "n1", "n2"] * 2


def test_an_engine_larger_than_a_node_is_on_several_by_whole_stages() -> None:
    shape = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    specs = planned(nodes(5, 3), groups("prefill", shape), groups("decode", {}))
    assert specs[0].shares == (Share("n0", ("0", "1", "2", "3")), Share("n1", ("0", "1")))
    assert (specs[0].node_id, specs[0].gpus) == ("n0", ("0", "1", "2", "3"))
    assert (specs[1].node_id, specs[1].gpus) == ("n0", ("4",))
    assert left_over(specs, nodes(5, 3)) == {"10.0.0.1": 1}


def test_a_stage_larger_than_every_node_is_on_several_in_equal_parts() -> None:
    shape = {"tensor_parallel_size": 6}
    specs = planned(nodes(4, 4), groups("prefill", shape), groups("decode", {}))
    assert specs[0].shares == (Share("n0", ("0", "1", "2")), Share("n1", ("0", "1", "2")))
    assert (specs[1].node_id, specs[1].gpus) == ("n0", ("3",))


def test_data_parallel_ranks_stay_on_one_node() -> None:
    with pytest.raises(ConfigError, match="data parallel 3"):
        planned(nodes(2, 2), groups("prefill", {"data_parallel_size": 3}), groups("decode", {}))


@pytest.mark.parametrize(
    ("overrides", "hosts"),
    [
        ((), ["10.0.0.0", "10.0.0.1"]),
        (("network.subnet=192.168.0.0/16",), ["192.168.1.0", "192.168.1.1"]),
        (("network.subnet=fd00::/8",), ["fd00::10", "fd00::11"]),
        (("network.addresses={10.0.0.1: 172.16.0.9}",), ["10.0.0.0", "172.16.0.9"]),
    ],
)
def test_peers_meet_at_the_addresses_that_they_share(
    overrides: tuple[str, ...], hosts: list[str]
) -> None:
    on = [
        replace(node, addresses=(node.address, f"192.168.1.{i}", f"fd00::1{i}"))
        for i, node in enumerate(nodes(1, 1))
    ]
    specs = planned(on, "disaggregation.decode_replicas=1", *overrides)
    assert [s.host for s in specs] == hosts


def test_a_node_outside_the_subnet_is_told_with_what_it_has() -> None:
    on = [replace(node, addresses=(node.address,)) for node in nodes(1, 1)]
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.0 has 10\.0\.0\.0"):
        planned(on, "disaggregation.decode_replicas=1", "network.subnet=192.168.0.0/16")


SHAPES = st.fixed_dictionaries(
    {
        "replicas": st.integers(1, 4),
        "tensor_parallel_size": st.integers(1, 4),
        "pipeline_parallel_size": st.integers(1, 3),
        "data_parallel_size": st.integers(1, 2),
    }
)


@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=64),
    prefill=st.lists(SHAPES, min_size=1, max_size=3),
    decode=st.lists(SHAPES, min_size=1, max_size=3),
    mixed=st.lists(SHAPES, max_size=2),
    spread=st.booleans(),
)
def test_whatever_the_shapes_no_device_is_given_twice_and_none_is_made_up(
    gpus: list[int],
    prefill: list[dict[str, int]],
    decode: list[dict[str, int]],
    mixed: list[dict[str, int]],
    spread: bool,
) -> None:
    on = nodes(*gpus)
    try:
        specs = planned(
            on,
            "devices.kind=gpu",
            f"devices.placement={'spread' if spread else 'pack'}",
            groups("prefill", *prefill),
            groups("decode", *decode),
            groups("mixed", *mixed),
        )
    except ConfigError:
        return
    shapes = {
        f"disaggregation.{role}.{i}": shape
        for role, listed in (("prefill", prefill), ("decode", decode), ("mixed", mixed))
        for i, shape in enumerate(listed)
    }
    shares = [(s, share) for s in specs for share in (s.shares or (Share(s.node_id, s.gpus),))]
    given_out = [(share.node_id, gpu) for _, share in shares for gpu in share.gpus]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= {(node.id, gpu) for node in on for gpu in node.gpus}
    assert sum(left_over(specs, on).values()) == sum(gpus) - len(given_out)
    for spec in specs:
        shape = shapes[spec.pool]
        each = shape["tensor_parallel_size"]
        size = each * shape["pipeline_parallel_size"] * shape["data_parallel_size"]
        mine = [share for owner, share in shares if owner is spec]
        assert sum(len(share.gpus) for share in mine) == size == spec.world_size
        if max(gpus) >= each:
            assert all(len(share.gpus) % each == 0 for share in mine), "whole stages"
        assert len(mine) == 1 or shape["data_parallel_size"] == 1
        asked, at = bundles(spec)
        assert sum(bundle.get("GPU", 0) for bundle in asked) == size
        assert len(asked) == len(at)
        assert len(asked) in (1, size + 1)
    assert {s.pool for s in specs} == set(shapes)
    assert len({s.name for s in specs}) == len(specs)
