"""The second of two trainer ranks, as a process: pushes its share, or dies on the way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from splitroll.errors import SplitrollError
from splitroll.weights.ranks import TrainerRanks


class Deadly(torch.Tensor):
    """A parameter in whose gathering the process dies."""

    def full_tensor(self) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Broken(torch.Tensor):
    """A parameter that cannot be gathered."""

    def full_tensor(self) -> torch.Tensor:
        raise RuntimeError("out of memory on rank 1")


def shares(state: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a state dict between two ranks, every other parameter each."""
    names = list(state)
    return {n: state[n] for n in names[::2]}, {n: state[n] for n in names[1::2]}


def join(store: str, rank: int) -> TrainerRanks:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return TrainerRanks(timeout_s=60)


def main(store: str, folder: str, *pushes: str) -> None:
    """Push a file of the folder for each argument NAME[:how]."""
    ranks = join(store, 1)
    for push in pushes:
        name, _, how = push.partition(":")
        mine: Any
        _, mine = shares(load_file(Path(folder) / f"{name}.safetensors"))
        last = list(mine)[-1]
        if how in ("die", "break"):
            mine[last] = mine[last].as_subclass(Deadly if how == "die" else Broken)
        if how == "stranger":
            mine["stranger"] = torch.zeros(3)
        if how == "twice":
            mine = [*mine.items(), (last, mine[last])]
        if how == "both":
            mine = load_file(Path(folder) / f"{name}.safetensors")
        try:
            print(f"version {ranks.update_weights(mine)}", flush=True)
        except (SplitrollError, RuntimeError) as exc:
            print(f"{type(exc).__name__}: {' '.join(str(exc).split())}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
