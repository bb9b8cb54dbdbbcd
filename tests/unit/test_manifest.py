"""Manifests: what a checkpoint holds, what is sent, how it differs, and how it is laid out."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from splitroll.errors import ConfigError
from splitroll.weights.manifest import (
    ALIGNMENT,
    Manifest,
    ParamSpec,
    checkpoint_manifest,
    compare,
    duplicates,
    layout,
    wire_manifest,
    worker_ranks,
)
from splitroll.weights.source import dtype_name

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).to(dtype)


def spec(name: str = "w", dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> ParamSpec:
    return ParamSpec(name, dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_checkpoints_dtypes_are_named_and_measured_as_torch_does(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = zeros(dtype, 3, 5)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    (found,) = checkpoint_manifest(tmp_path)
    assert found == ParamSpec("w", dtype_name(dtype), (3, 5))
    assert found.nbytes == tensor.nbytes


def test_scalars_and_empty_parameters_have_their_size(tmp_path: Path) -> None:
    tensors = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = {s.name: s for s in checkpoint_manifest(tmp_path)}
    assert (found["scalar"].shape, found["scalar"].nbytes) == ((), 4)
    assert (found["empty"].shape, found["empty"].nbytes) == ((0, 4), 0)


def test_parameters_come_as_they_lie_in_the_files(tmp_path: Path) -> None:
    # The format orders by alignment, largest first, and then by name.
    save_file({"z": zeros(torch.bfloat16, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    second = {
        "a": zeros(torch.bfloat16, 4),
        "c": zeros(torch.float32, 4),
        "b": zeros(torch.int64, 1),
    }
    metadata = {"format": "pt"}
    save_file(second, tmp_path / "model-00002-of-00002.safetensors", metadata=metadata)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_manifest(tmp_path) == (
        ParamSpec("z", "bfloat16", (2,)),
        ParamSpec("b", "int64", (1,)),
        ParamSpec("c", "float32", (4,)),
        ParamSpec("a", "bfloat16", (4,)),
    )


def test_the_tiny_models_manifest_is_that_of_its_state_dict(tiny_model: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model)
    expected = {
        ParamSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
    }
    found = checkpoint_manifest(tiny_model)
    assert set(found) == expected
    assert len(found) == len(expected)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    """As vLLM reads it: some models come twice, in their authors' own format as well."""
    save_file({"a": zeros(torch.float32, 1)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"layers.0.wq": zeros(torch.float32, 1)}, tmp_path / "consolidated.safetensors")
    index = '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert [s.name for s in checkpoint_manifest(tmp_path)] == ["a"]


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="safetensors") as raised:
        checkpoint_manifest(tmp_path)
    assert raised.value.problems[0].path == "model"


def test_weights_are_sent_in_the_engines_dtype() -> None:
    checkpoint = (spec("a"), spec("b"))
    assert wire_manifest(checkpoint, "bfloat16") == (
        spec("a", "bfloat16"),
        spec("b", "bfloat16"),
    )
    assert wire_manifest(checkpoint, "float32") == checkpoint


def test_what_is_kept_in_another_dtype_than_most_keeps_it() -> None:
    checkpoint = (
        spec("a", "bfloat16"),
        spec("b", "bfloat16"),
        spec("router.bias", "float32"),
        spec("ids", "int64"),
        spec("packed", "uint8"),
        spec("scaled", "float8_e4m3fn"),
    )
    assert [s.dtype for s in wire_manifest(checkpoint, "float16")] == [
        "float16",
        "float16",
        "float32",
        "int64",
        "uint8",
        "float8_e4m3fn",
    ]


def test_many_small_parameters_are_not_most_of_a_checkpoint() -> None:
    """Quantised weights have a small scale each, which must not lose its precision."""
    scales = tuple(spec(f"{i}.weight_scale_inv", "float32", (4, 4)) for i in range(7))
    checkpoint = (*scales, spec("embed_tokens.weight", "bfloat16", (1000, 512)))
    assert wire_manifest(checkpoint, "bfloat16") == checkpoint
    assert wire_manifest(checkpoint, "float16")[-1].dtype == "float16"


@pytest.mark.parametrize("checkpoint", [(), (spec("ids", "int64"),)])
def test_without_floating_parameters_nothing_is_cast(checkpoint: Manifest) -> None:
    assert wire_manifest(checkpoint, "bfloat16") == checkpoint


@given(
    st.lists(st.sampled_from(["float32", "bfloat16", "float16", "int8", "uint8"])),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_names_shapes_and_order_stay_on_the_wire(dtypes: list[str], engine_dtype: str) -> None:
    checkpoint = tuple(spec(str(i), dtype, (i,)) for i, dtype in enumerate(dtypes))
    wire = wire_manifest(checkpoint, engine_dtype)
    assert [(s.name, s.shape) for s in wire] == [(s.name, s.shape) for s in checkpoint]
    assert wire_manifest(wire, engine_dtype) == wire
    for before, after in zip(checkpoint, wire, strict=True):
        assert after.dtype in (before.dtype, engine_dtype)


def test_equal_manifests_have_no_difference_in_any_order() -> None:
    wanted = (spec("a"), spec("b", "int64"), spec("c", "bfloat16", ()))
    assert compare(reversed(wanted), wanted) == []


@pytest.mark.parametrize("given_dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("wanted_dtype", ["float16", "bfloat16", "float32"])
def test_floating_dtypes_may_differ(given_dtype: str, wanted_dtype: str) -> None:
    assert compare([spec("a", given_dtype)], (spec("a", wanted_dtype),)) == []


@pytest.mark.parametrize(
    ("given_dtype", "wanted_dtype"),
    [
        ("int64", "float32"),
        ("float32", "int64"),
        ("int32", "int64"),
        ("float8_e4m3fn", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
        ("bool", "uint8"),
        ("complex64", "float32"),
    ],
)
def test_other_dtypes_may_not_differ(given_dtype: str, wanted_dtype: str) -> None:
    (problem,) = compare([spec("a", given_dtype)], (spec("a", wanted_dtype),))
    assert problem.path == "weights.a"
    assert given_dtype in problem.found
    assert wanted_dtype in problem.allowed


def test_all_differences_are_told_at_once() -> None:
    wanted = (
        spec("fine"),
        spec("missing"),
        spec("reshaped", shape=(2, 3)),
        spec("flat", shape=(6,)),
        spec("kind", "int64"),
        spec("missing too", "bfloat16", (7,)),
    )
    given_ = [
        spec("unexpected"),
        spec("fine", "bfloat16"),
        spec("reshaped", shape=(3, 2)),
        spec("flat", shape=(2, 3)),
        spec("kind", "float32"),
        spec("model.layers.0.q_proj.lora_A.default.weight"),
    ]
    problems = {
        problem.path.removeprefix("weights."): problem for problem in compare(given_, wanted)
    }
    assert set(problems) == {
        "missing",
        "missing too",
        "reshaped",
        "flat",
        "kind",
        "unexpected",
        "model.layers.0.q_proj.lora_A.default.weight",
    }
    assert problems["missing"].found == "nothing"
    assert problems["missing too"].allowed == "bfloat16 [7]"
    assert (problems["reshaped"].found, problems["reshaped"].allowed) == (
        "float32 [3, 2]",
        "float32 [2, 3]",
    )
    assert (problems["unexpected"].found, problems["unexpected"].allowed) == (
        "float32 [2, 3]",
        "nothing",
    )
    assert "lora" not in problems["unexpected"].hint
    assert "PeftModel" in problems["model.layers.0.q_proj.lora_A.default.weight"].hint


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_every_name_that_one_side_lacks_is_told_once(given_: set[str], wanted: set[str]) -> None:
    problems = compare(map(spec, sorted(given_)), tuple(map(spec, sorted(wanted))))
    assert Counter(p.path for p in problems) == Counter(f"weights.{n}" for n in given_ ^ wanted)


DTYPE_NAMES = st.sampled_from(["bool", "float16", "bfloat16", "float32", "int64"])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def all_shares(draw: Any) -> list[Manifest]:
    """Parameters with names of their own, dealt out to trainer ranks."""
    shapes = draw(st.lists(st.tuples(DTYPE_NAMES, SHAPES), max_size=30))
    ranks = draw(st.integers(1, 4))
    dealt: list[list[ParamSpec]] = [[] for _ in range(ranks)]
    for index, (dtype, shape) in enumerate(shapes):
        dealt[draw(st.integers(0, ranks - 1))].append(ParamSpec(f"p{index}", dtype, shape))
    return [tuple(share) for share in dealt]


@given(all_shares(), st.integers(1, 2000))
def test_parameters_are_aligned_and_lie_apart(shares: list[Manifest], bucket_bytes: int) -> None:
    buckets, total = layout(shares, bucket_bytes)
    places = sorted((at, at + s.nbytes) for bucket in buckets for s, at in bucket.specs if s.nbytes)
    assert all(start % ALIGNMENT == 0 for start, _ in places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert all(end <= total for _, end in places)
    assert total <= sum(s.nbytes + ALIGNMENT for share in shares for s in share)


@given(all_shares(), st.integers(1, 2000))
def test_every_parameter_is_in_one_bucket_of_its_owner_in_order(
    shares: list[Manifest], bucket_bytes: int
) -> None:
    buckets, _ = layout(shares, bucket_bytes)
    for rank, share in enumerate(shares):
        laid = [s for bucket in buckets if bucket.owner == rank for s, _ in bucket.specs]
        assert laid == list(share)
    assert {bucket.owner for bucket in buckets} <= set(range(len(shares)))


@given(all_shares(), st.integers(1, 2000))
def test_a_bucket_is_full_but_not_overfull(shares: list[Manifest], bucket_bytes: int) -> None:
    buckets, _ = layout(shares, bucket_bytes)
    for bucket in buckets:
        assert bucket.specs
        assert len(bucket.specs) == 1 or sum(s.nbytes for s, _ in bucket.specs) <= bucket_bytes
    for rank in range(len(shares)):
        mine = [bucket for bucket in buckets if bucket.owner == rank]
        for bucket, following in itertools.pairwise(mine):
            more = sum(s.nbytes for s, _ in bucket.specs) + following.specs[0][0].nbytes
            assert more > bucket_bytes, "the next one would have fitted"


@given(all_shares(), st.integers(1, 2000))
def test_the_owners_of_buckets_take_turns(shares: list[Manifest], bucket_bytes: int) -> None:
    buckets, _ = layout(shares, bucket_bytes)
    owners = [bucket.owner for bucket in buckets]
    left = Counter(owners)
    while left:
        turn = sorted(left)
        assert owners[: len(turn)] == turn, "each that has buckets left, once"
        owners = owners[len(turn) :]
        left = Counter(owners)


def test_a_layout_of_nothing_is_empty() -> None:
    assert layout([], 100) == ((), 0)
    assert layout([(), ()], 100) == ((), 0)


def test_buckets_by_example() -> None:
    first = (spec("a", shape=(8,)), spec("b", shape=(8,)), spec("c", shape=(40,)))
    second = (spec("d", "int8", (1,)),)
    buckets, total = layout([first, second], 64)
    assert [(b.owner, [(s.name, at) for s, at in b.specs]) for b in buckets] == [
        (0, [("a", 0), ("b", 64)]),
        (1, [("d", 320)]),
        (0, [("c", 128)]),
    ]
    assert total == 384


def test_parameters_that_several_ranks_send_are_told() -> None:
    shares = [(spec("a"), spec("b")), (spec("b"), spec("c")), (spec("b"), spec("d"), spec("c"))]
    problems = duplicates(shares)
    assert [p.path for p in problems] == ["weights.b", "weights.c"]
    assert "0, 1, 2" in problems[0].found
    assert "1, 2" in problems[1].found


@given(all_shares())
def test_shares_with_names_of_their_own_have_no_duplicates(shares: list[Manifest]) -> None:
    assert duplicates(shares) == []


WORLDS = st.dictionaries(st.uuids().map(str), st.integers(1, 16), min_size=0, max_size=12)


@given(WORLDS, st.integers(0, 8))
def test_workers_ranks_are_unique_and_contiguous_per_engine(
    world_sizes: dict[str, int], first: int
) -> None:
    ranks = worker_ranks(world_sizes, first)
    assert list(ranks) == list(world_sizes)
    for name, mine in ranks.items():
        assert len(mine) == world_sizes[name]
        assert list(mine) == list(range(mine[0], mine[0] + len(mine)))
    every = [rank for mine in ranks.values() for rank in mine]
    assert every == list(range(first, first + sum(world_sizes.values()))), "no gap, none twice"


def test_workers_come_after_the_trainers_rank() -> None:
    assert worker_ranks({"p": 2, "d0": 1, "d1": 4}) == {
        "p": (1, 2),
        "d0": (3,),
        "d1": (4, 5, 6, 7),
    }
