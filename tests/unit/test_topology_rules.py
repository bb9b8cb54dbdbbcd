"""Pools of engines, and the table of which can exist and hand KV to which."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from splitroll.config import check_config, load_config, to_yaml
from splitroll.config.pools import described, pools, replicas
from splitroll.config.topology import (
    ENGINE_RULES,
    MUST_MATCH,
    PAIR_RULES,
    handoffs,
    kv_roles,
    topology_problems,
)
from splitroll.errors import ConfigError, Problem
from splitroll.model import ModelFacts
from splitroll.types import Role

DENSE = ModelFacts("dense", "dense", 8, 4, 2048, 4096, num_layers=4)
MLA = ModelFacts("mla", "mla", 8, 8, 2048, 4096, num_layers=4, is_mla=True)
EXPERTS = ModelFacts("moe", "moe", 8, 4, 2048, 4096, num_layers=4, num_experts=8)
MOONCAKE = "disaggregation.transfer_backend=mooncake"
STRICT = "dispatch.roles=strict"


def groups(role: str, *shapes: dict[str, Any]) -> str:
    return f"disaggregation.{role}={json.dumps(list(shapes))}"


def sizes(role: str, **shape: int) -> str:
    return groups(role, shape)


def told(*overrides: str, facts: ModelFacts = DENSE) -> list[Problem]:
    return list(topology_problems(load_config(overrides=overrides), facts))


def test_a_role_may_have_several_shapes_and_engines_may_have_both() -> None:
    config = load_config(
        overrides=[
            groups("prefill", {"replicas": 2}, {"tensor_parallel_size": 4}),
            groups("mixed", {"replicas": 3, "engine": {"max_num_seqs": 7}}),
            "engine.max_num_seqs=5",
        ]
    )
    found = [(p.role, p.path, p.replicas, p.world_size) for p in pools(config)]
    assert found == [
        (Role.PREFILL, "disaggregation.prefill.0", 2, 1),
        (Role.PREFILL, "disaggregation.prefill.1", 1, 4),
        (Role.DECODE, "disaggregation.decode", 2, 1),
        (Role.BOTH, "disaggregation.mixed.0", 3, 1),
    ]
    assert [p.arguments(config)["max_num_seqs"] for p in pools(config)] == [5, 5, 5, 7]
    assert replicas(config, Role.DECODE, Role.BOTH) == 5
    assert described(config) == "3 prefill and 2 decode and 3 mixed, nixl"
    assert load_config(json.loads(config.model_dump_json())) == config


def test_a_list_reads_back_as_itself_and_an_entry_can_be_overridden(tmp_path: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(load_config(overrides=[groups("decode", {}, {"replicas": 2})])))
    config = load_config(path, ["disaggregation.decode.1.replicas=4"])
    assert [p.replicas for p in pools(config) if p.role is Role.DECODE] == [1, 4]


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        ([groups("prefill", {"replica": 2})], "disaggregation.prefill.0.replica", "replicas"),
        ([groups("prefill", {"replicas": 0})], "disaggregation.prefill.0.replicas", "1 or more"),
        (["disaggregation.prefill.replicas=2"], "disaggregation.prefill.replicas", "unknown"),
        (
            [groups("mixed", {"nodes": {"label": {}}})],
            "disaggregation.mixed.0.nodes.label",
            "labels",
        ),
        ([groups("prefill")], "disaggregation.prefill", "at least one"),
        (
            [groups("decode", {}), "disaggregation.decode_replicas=2"],
            "disaggregation.decode_replicas",
            "leave it out",
        ),
        ([groups("decode", {}), "disaggregation.decode.4.replicas=1"], None, "0 to 0"),
        (["disaggregation.decode=[1, 2]"], "disaggregation.decode.1", "section"),
        (["engine.pipeline_parallel_size=2"], "engine.pipeline_parallel_size", "disaggregation"),
        (["network.subnet=10.0.0.1/8"], "network.subnet", "subnet"),
        (["ray.address=ray://head:10001"], "ray.address", "HOST:PORT"),
        (["ray.address=head"], "ray.address", "HOST:PORT"),
        (["network.addresses={n: here}"], "network.addresses.n", "IP address"),
    ],
)
def test_what_is_wrong_with_a_shape_is_told_where_it_stands(
    overrides: list[str], path: str | None, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(overrides=overrides), DENSE)
    found = {problem.path: str(problem) for problem in caught.value.problems}
    if path is None:
        assert says in str(found)
    else:
        assert says in found[path]


@pytest.mark.parametrize(
    ("override", "do"),
    [
        ("disaggregation.prefill={replicas: 2}", "set disaggregation.prefill_replicas, or make"),
        ("disaggregation.mixed={replicas: 1}", "write [{replicas: 1}]"),
        ("disaggregation.mixed=1", "write [{replicas: 1}]"),
        ("disaggregation.prefill.0.replicas=2", "write a list"),
        ("disaggregation.decode.tensor_parallel_size='2'", "write it without quotes"),
        ("disaggregation.mixed_replicas=1", "write mixed: [{replicas: ...}]"),
        ("disaggregation.prefill.nodes=big", "write {resource: big}, if you mean that"),
        ("ray=auto", "write {address: auto}, if you mean that"),
        ("disaggregation.prefill.nodes.labels=3", "a mapping, {name: value}; write one"),
    ],
)
def test_what_is_written_in_the_wrong_form_is_told_with_the_right_one(
    override: str, do: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(do)):
        load_config(overrides=[override])


def test_colocated_engines_hand_off_nothing() -> None:
    assert kv_roles(load_config(overrides=["disaggregation.enabled=false"])).sources == set()


def test_handoffs_follow_the_roles_and_elastic_engines_have_all() -> None:
    mixed = groups("mixed", {})
    strict = load_config(overrides=[STRICT, mixed])
    assert {(a.role, b.role) for a, b in handoffs(strict)} == {
        (Role.PREFILL, Role.DECODE),
        (Role.PREFILL, Role.BOTH),
        (Role.BOTH, Role.DECODE),
    }
    elastic = load_config(overrides=[mixed])
    assert len(handoffs(elastic)) == 3 * 3 - 2  # of one prefill and one mixed engine none to itself


# Every rule of the table is broken, and kept.


@pytest.mark.parametrize(
    ("backend", "prefill", "decode", "facts", "rule"),
    [
        ("nixl", {"tensor_parallel_size": 3}, {}, DENSE, "heads are whole"),
        ("nixl", {"pipeline_parallel_size": 5}, {}, DENSE, "every pipeline stage"),
        ("nixl", {"expert_parallel": True}, {}, DENSE, "experts are spread"),
        ("nixl", {"tensor_parallel_size": 8}, {"tensor_parallel_size": 2}, DENSE, "replicated"),
        ("nixl", {"pipeline_parallel_size": 2}, {}, DENSE, "one stage"),
        ("nixl", {}, {"pipeline_parallel_size": 2}, DENSE, "one stage"),
    ],
)
def test_a_broken_rule_is_told_with_sizes_and_what_would_work(
    backend: str, prefill: dict[str, Any], decode: dict[str, Any], facts: ModelFacts, rule: str
) -> None:
    found = told(
        STRICT,
        f"disaggregation.transfer_backend={backend}",
        groups("prefill", prefill),
        groups("decode", decode),
        facts=facts,
    )
    named = [one for one in (*ENGINE_RULES, *PAIR_RULES) if one.name.startswith(rule)]
    assert len(named) == 1
    assert found
    assert all(problem.hint and problem.allowed for problem in found)
    value = str(next(iter({**prefill, **decode}.values()))).lower()
    assert any(value in problem.found for problem in found)


@pytest.mark.parametrize(
    ("backend", "prefill", "decode", "facts"),
    [
        ("nixl", {"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}, DENSE),
        ("nixl", {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2}, DENSE),
        ("nixl", {"tensor_parallel_size": 2}, {"tensor_parallel_size": 8}, DENSE),
        ("nixl", {"tensor_parallel_size": 8}, {"tensor_parallel_size": 2}, MLA),
        ("nixl", {"data_parallel_size": 2}, {"data_parallel_size": 3}, DENSE),
        ("nixl", {}, {"expert_parallel": True, "data_parallel_size": 2}, EXPERTS),
        ("mooncake", {"tensor_parallel_size": 8}, {"tensor_parallel_size": 2}, DENSE),
        ("mooncake", {"pipeline_parallel_size": 2}, {}, DENSE),
        ("mooncake", {}, {"pipeline_parallel_size": 4}, DENSE),
    ],
)
def test_what_a_backend_supports_is_let_through(
    backend: str, prefill: dict[str, Any], decode: dict[str, Any], facts: ModelFacts
) -> None:
    overrides = (groups("prefill", prefill), groups("decode", decode))
    assert told(STRICT, f"disaggregation.transfer_backend={backend}", *overrides, facts=facts) == []


def test_elastic_engines_must_keep_the_rules_both_ways() -> None:
    shapes = (sizes("prefill", tensor_parallel_size=2), sizes("decode", tensor_parallel_size=8))
    assert told(STRICT, *shapes) == []
    (problem,) = told(*shapes)
    assert "strict" in problem.hint


def test_a_mixed_engine_is_in_pairs_with_all() -> None:
    shapes = (groups("mixed", {"pipeline_parallel_size": 2}), STRICT)
    assert len(told(*shapes)) == 2  # with prefill and with decode
    assert told(*shapes, MOONCAKE) == []


@pytest.mark.parametrize("name", MUST_MATCH)
def test_every_group_of_every_role_must_have_the_same_kind_of_kv(name: str) -> None:
    odd = {"engine": {name: "64"}}
    for role, others in (("decode", [{}, odd]), ("mixed", [odd])):
        (problem,) = told(groups(role, *others))
        assert name in problem.path
        assert problem.path.startswith(f"disaggregation.{{prefill,{role}")
    assert told(f"engine.{name}=64") == []


SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])


@given(
    backend=st.sampled_from(["nixl", "mooncake"]),
    strict=st.booleans(),
    prefill=st.tuples(SIZES, st.integers(1, 5), st.integers(1, 3)),
    decode=st.tuples(SIZES, st.integers(1, 5), st.integers(1, 3)),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
)
def test_the_table_says_what_vllm_would(
    backend: str,
    strict: bool,
    prefill: tuple[int, int, int],
    decode: tuple[int, int, int],
    kv_heads: int,
) -> None:
    """The predicate as it is in vLLM's connectors, written another way."""
    facts = ModelFacts("m", "m", 16, kv_heads, 2048, 4096, num_layers=4)

    def engine_works(tp: int, pp: int) -> bool:
        return 16 % tp == 0 and max(tp, kv_heads) % min(tp, kv_heads) == 0 and pp <= 4

    def pair_works(source: tuple[int, int, int], loader: tuple[int, int, int]) -> bool:
        if max(source[0], loader[0]) % min(source[0], loader[0]):
            return False
        if backend == "mooncake":
            return True
        reads_replicas = source[0] > loader[0] and source[0] > kv_heads
        return source[1] == loader[1] == 1 and not reads_replicas

    works = engine_works(*prefill[:2]) and engine_works(*decode[:2]) and pair_works(prefill, decode)
    if not strict:
        works = works and pair_works(decode, prefill)
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    overrides = [
        groups("prefill", dict(zip(names, prefill, strict=True))),
        groups("decode", dict(zip(names, decode, strict=True))),
        f"disaggregation.transfer_backend={backend}",
        f"dispatch.roles={'strict' if strict else 'elastic'}",
    ]
    assert (told(*overrides, facts=facts) == []) == works


def test_the_example_for_kuberay_holds_a_configuration_that_checks(tmp_path: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "kuberay.yaml").read_text()
    config_map, job = yaml.safe_load_all(text)
    path = tmp_path / "config.yaml"
    path.write_text(config_map["data"]["config.yaml"])
    config = load_config(path)
    check_config(config, DENSE)
    cluster = job["spec"]["rayClusterSpec"]
    offered = {
        name
        for group in cluster["workerGroupSpecs"]
        for name in json.loads(json.loads(group["rayStartParams"]["resources"]))
    }
    assert {pool.section.nodes.resource for pool in pools(config)} == offered
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    mounted = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    folder = next(mount["mountPath"] for mount in mounted if mount["name"] == "config")
    assert f"--config {folder}/config.yaml" in job["spec"]["entrypoint"]
