"""What parameters there are: names, dtypes, shapes. Pure, and without torch.

A manifest lists parameters as a checkpoint names them. An engine's manifest is that of the
checkpoint which it was started from; a trainer's weights must match it before a byte moves.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitroll.errors import ConfigError, Problem

ALIGNMENT = 64
"""Bytes; every parameter begins at a multiple of it."""

_SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Of the safetensors format, by torch's names."""

_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
_CASTABLE = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as a checkpoint holds it; `dtype` by torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)


Manifest = tuple[ParamSpec, ...]


def checkpoint_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder of safetensors files from their headers.

    Raises:
        ConfigError: when the folder holds none.
    """
    files = checkpoint_files(folder)
    if not files:
        hint = "save the model with safetensors (save_pretrained does)"
        found = "no .safetensors file in the model's folder"
        raise ConfigError([Problem("model", found, "a checkpoint in safetensors format", hint)])
    return tuple(spec for file in files for spec in _file_manifest(file))


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: where it has an index, those that it names.

    Some folders hold the same weights again, in their authors' format.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return files
    named = set(json.loads(index.read_bytes())["weight_map"].values())
    return [file for file in files if file.name in named]


def _file_manifest(file: Path) -> list[ParamSpec]:
    """Read one header: 8 bytes of length, then JSON (the safetensors format)."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    entries.sort(key=lambda item: item[1]["data_offsets"][0])
    return [
        ParamSpec(
            name,
            _SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"]),
            tuple(entry["shape"]),
        )
        for name, entry in entries
    ]


def wire_manifest(checkpoint: Manifest, engine_dtype: str) -> Manifest:
    """Return the manifest of what is sent to engines that compute in `engine_dtype`.

    Floating parameters are sent in the engines' dtype. Those that the checkpoint keeps in another
    dtype than most of its numbers (a router's bias, or scales, in float32) keep theirs.
    """
    floating: Counter[str] = Counter()
    for spec in checkpoint:
        if spec.dtype in _CASTABLE:
            floating[spec.dtype] += math.prod(spec.shape)
    common = floating.most_common(1)[0][0] if floating else engine_dtype
    return tuple(
        ParamSpec(spec.name, engine_dtype if spec.dtype == common else spec.dtype, spec.shape)
        for spec in checkpoint
    )


def compare(given: Iterable[ParamSpec], wanted: Manifest) -> list[Problem]:
    """Return every difference between a trainer's weights and the engines' manifest."""
    found = {spec.name: spec for spec in given}
    problems = []
    for spec in wanted:
        if (other := found.pop(spec.name, None)) is None:
            problems.append(_problem(spec.name, "nothing", spec, "send it too"))
        elif other.shape != spec.shape:
            problems.append(_problem(spec.name, _told(other), spec, "send the engines' shape"))
        elif other.dtype != spec.dtype and not {other.dtype, spec.dtype} <= set(_CASTABLE):
            hint = "the sender casts between floating dtypes only"
            problems.append(_problem(spec.name, _told(other), spec, hint))
    for name, other in found.items():
        hint = "the engines' checkpoint has no such parameter: leave it out or rename it"
        if "lora_" in name:
            hint = "merge the adapter into its base first, or hand over the PeftModel itself"
        problems.append(Problem(f"weights.{name}", _told(other), "nothing", hint))
    return problems


def _problem(name: str, found: str, wanted: ParamSpec, hint: str) -> Problem:
    return Problem(f"weights.{name}", found, _told(wanted), hint)


def _told(spec: ParamSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive parameters that are written, and then read, as one.

    Attributes:
        specs: with each parameter's byte offset from the start of the data.
        owner: index of the trainer rank that writes it.
    """

    specs: tuple[tuple[ParamSpec, int], ...]
    owner: int = 0


def layout(shares: Sequence[Manifest], bucket_bytes: int) -> tuple[tuple[Bucket, ...], int]:
    """Lay parameters out in buckets of about `bucket_bytes`, each of one trainer rank.

    Args:
        shares: what each rank sends, in its order.

    Returns:
        the buckets, ranks taking turns, and the bytes of all data.
    """
    offset = 0
    by_rank: list[list[Bucket]] = []
    for owner, share in enumerate(shares):
        buckets: list[Bucket] = []
        specs: list[tuple[ParamSpec, int]] = []
        size = 0
        for spec in share:
            if specs and size + spec.nbytes > bucket_bytes:
                buckets.append(Bucket(tuple(specs), owner))
                specs, size = [], 0
            specs.append((spec, offset))
            size += spec.nbytes
            offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        if specs:
            buckets.append(Bucket(tuple(specs), owner))
        by_rank.append(buckets)
    longest = max((len(buckets) for buckets in by_rank), default=0)
    turns = (buckets[i] for i in range(longest) for buckets in by_rank if i < len(buckets))
    return tuple(turns), offset


def duplicates(shares: Sequence[Manifest]) -> list[Problem]:
    """Return a problem for every parameter that more than one trainer rank sends."""
    senders: dict[str, list[int]] = {}
    for rank, share in enumerate(shares):
        for spec in share:
            senders.setdefault(spec.name, []).append(rank)
    return [
        Problem(
            f"weights.{name}",
            f"sent by the trainer ranks {', '.join(map(str, ranks))}",
            "one sender",
            "give every parameter to one rank's share",
        )
        for name, ranks in senders.items()
        if len(ranks) > 1
    ]


def worker_ranks(world_sizes: Mapping[str, int], first: int = 1) -> dict[str, tuple[int, ...]]:
    """Number the workers of all engines, in order, after the trainer's `first` ranks.

    The ranks of a collective over trainer and engines: an engine's offset is its first.

    Args:
        world_sizes: workers (tensor x pipeline x data parallel) by engine name.
    """
    ranks = {}
    for name, size in world_sizes.items():
        ranks[name] = tuple(range(first, first + size))
        first += size
    return ranks
