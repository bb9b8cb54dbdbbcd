"""Two trainer processes push to three engines: who sends what, and what ends an update for both."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import trainer_rank
from conftest import SimulatedSystem, simulated
from splitroll.errors import ConfigError, WeightUpdateFailed
from splitroll.weights.manifest import ParamSpec
from splitroll.weights.ranks import TrainerRanks, assign

NAMES = [f"w{i}" for i in range(9)]


def specs(names: list[str]) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name, "float32", (4,)) for name in names)


def test_a_share_is_sent_by_the_rank_that_has_it() -> None:
    parts, problems = assign([specs(["a", "c"]), specs(["b"])])
    assert not problems
    assert [[spec.name for spec in part] for part in parts] == [["a", "c"], ["b"]]


@given(
    st.integers(1, 5),
    st.lists(st.sampled_from(NAMES), unique=True, min_size=1),
    st.booleans(),
)
def test_what_all_ranks_have_is_sent_once_and_in_turn(
    ranks: int, names: list[str], one_sender: bool
) -> None:
    parts, problems = assign([specs(names)] * ranks, one_sender=one_sender)
    assert not problems
    assert sorted(spec.name for part in parts for spec in part) == sorted(names)
    sizes = [len(part) for part in parts]
    if one_sender:
        assert sizes[0] == len(names)
    else:
        assert max(sizes) - min(sizes) <= 1


def test_what_some_ranks_have_but_not_all_is_refused_by_name() -> None:
    _, problems = assign([specs(["a", "b"]), specs(["b"]), specs(["c"])])
    assert [problem.path for problem in problems] == ["weights.b"]
    assert "ranks 0, 1" in problems[0].found


def test_without_torch_distributed_it_says_so() -> None:
    with pytest.raises(ConfigError, match="is not initialised"):
        TrainerRanks()


class Pair:
    """This process as rank 0, and one that pushes as rank 1."""

    def __init__(self, system: SimulatedSystem, folder: Path) -> None:
        self.system = system
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self, *pushes: str) -> TrainerRanks:
        script = Path(trainer_rank.__file__)
        store = self.folder / "store"
        command = [sys.executable, str(script), str(store), str(self.folder), *pushes]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return trainer_rank.join(str(store), 0)

    async def push(self, ranks: TrainerRanks, name: str, *, whole: bool = False) -> Any:
        state = load_file(self.folder / f"{name}.safetensors")
        mine = state if whole else trainer_rank.shares(state)[0]
        return await asyncio.wait_for(self.system.updater.update(mine, ranks=ranks), 30)

    async def told(self) -> list[str]:
        assert self.process is not None
        out, _ = await asyncio.to_thread(self.process.communicate, timeout=30)
        return out.splitlines()


@pytest_asyncio.fixture(params=["shm", "disk"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    for name, value in (("initial", 0.0), ("next", 3.0), ("after", 5.0)):
        state = {f"w{i}": torch.full((40, 30), value + i) for i in range(6)}
        save_file(state, tmp_path / f"{name}.safetensors")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file(load_file(tmp_path / "initial.safetensors"), checkpoint / "model.safetensors")
    options = ["weights.timeout_s=4", "weights.bucket_bytes=10000", "weights.verify=full"]
    if request.param == "disk":
        options += ["weights.transport=disk", f"weights.path={tmp_path / 'shared'}"]
    async with simulated(*options, checkpoint=checkpoint) as system:
        made = Pair(system, tmp_path)
        yield made
        if dist.is_initialized():
            dist.destroy_process_group()
        if made.process is not None:
            made.process.kill()
            made.process.wait()


def digest(pair: Pair) -> set[str]:
    return {engine._weights for engine in pair.system.launcher.engines.values()}


async def test_each_rank_sends_its_share_to_every_engine(pair: Pair) -> None:
    ranks = pair.start("next", "after")
    for version, name in enumerate(("next", "after"), start=1):
        report = await pair.push(ranks, name)
        assert report.version == version
        assert report.engines == ("decode-0", "decode-1", "prefill-0")
        assert report.verified == 6
        split = digest(pair)
        assert len(split) == 1
    assert await pair.told() == ["version 1", "version 2"]
    await pair.system.updater.update(load_file(pair.folder / "after.safetensors"))
    assert digest(pair) == split, "one rank alone sends the same"


async def test_replicas_are_sent_once(pair: Pair) -> None:
    ranks = pair.start("next:both")
    report = await pair.push(ranks, "next", whole=True)
    assert report.nbytes == 6 * 40 * 30 * 4
    assert await pair.told() == ["version 1"]


async def test_a_difference_on_any_rank_is_told_on_all(pair: Pair) -> None:
    ranks = pair.start("next:stranger", "after")
    with pytest.raises(ConfigError, match=r"weights\.stranger"):
        await pair.push(ranks, "next")
    assert (await pair.push(ranks, "after")).version == 1
    first, second = await pair.told()
    assert first.startswith("ConfigError: 1 problem: - weights.stranger")
    assert second == "version 1"


async def test_weights_that_one_rank_cannot_read_are_told_on_all(pair: Pair) -> None:
    ranks = pair.start("next:twice", "after")
    with pytest.raises(ConfigError, match="it comes twice"):
        await pair.push(ranks, "next")
    assert (await pair.push(ranks, "after")).version == 1
    first, second = await pair.told()
    assert "it comes twice" in first
    assert second == "version 1"


async def test_a_rank_that_fails_ends_the_update_on_all(pair: Pair) -> None:
    ranks = pair.start("next:break", "after")
    with pytest.raises(WeightUpdateFailed, match="out of memory on rank 1"):
        await pair.push(ranks, "next")
    assert pair.system.fleet.weight_version == 0
    assert (await pair.push(ranks, "after")).version == 1
    first, second = await pair.told()
    assert "out of memory on rank 1" in first
    assert second == "version 1"


async def test_a_rank_that_is_killed_leaves_the_fleet_with_what_it_served(pair: Pair) -> None:
    ranks = pair.start("next:die")
    with pytest.raises((WeightUpdateFailed, RuntimeError)):
        await pair.push(ranks, "next")
    assert pair.system.fleet.weight_version == 0
    assert len(digest(pair)) == 1
    report = await pair.system.updater.update(load_file(pair.folder / "after.safetensors"))
    assert report.version == 1
    assert len(report.engines) == 3
