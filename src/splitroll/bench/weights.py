"""Weight updates of one, two and three engines against what bounds them: the trainer's writing of
the bytes, and vLLM's own reload of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from splitroll.config import Config
from splitroll.rollout import Rollout
from splitroll.weights.manifest import Manifest, checkpoint_manifest, layout, wire_manifest
from splitroll.weights.offer import WeightOffer

T = TypeVar("T")

ENGINES = (1, 2, 3)
WARM_UPS = 2
"""Two segments of shared memory take turns: after two updates, both are mapped everywhere."""
SLACK = 1.3
"""What an update may take of the longer of writing and loading."""
PAUSE_SLACK = 1.1
"""What the fleet's pause may take of the part in which engines load."""
MEMORY = "/dev/shm"
"""A file system in memory."""

OnRound = Callable[[int, str, int, float], None]
"""Told the number of engines, the transport, the round (warm-ups before 0) and the seconds."""


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds, on a fleet that is idle otherwise.

    Attributes:
        write: the bytes, once, into shared memory that is mapped in.
        reload: vLLM's own reload, from files in memory, on one engine.
        load: the same files, by our loader, on the same engine.
        push: an update through shared memory, from the call to its return.
        pushed_load: its part in which engines load.
        pushed_pause: its part in which the fleet computes nothing.
        path: files written to memory, then vLLM's own reload on all engines at once.
    """

    write: float
    reload: float
    load: float
    push: float
    pushed_load: float
    pushed_pause: float
    path: float


@dataclass(slots=True)
class Measured:
    """What updates of one number of engines took; warm-ups are left out."""

    nbytes: int = 0
    rounds: list[Round] = field(default_factory=list)
    disk_s: list[float] = field(default_factory=list)


def bound(engines: int, cores: int, write_s: float, reload_s: float) -> float:
    """Return the longest that an update may take.

    Engines that have a core each load at the same time. One engine has to load on its one core
    whatever the trainer does, so what counts is that it does so while the trainer writes.
    """
    if engines == 1:
        return write_s + reload_s
    return SLACK * max(write_s, engines * reload_s / min(engines, cores))


async def measure(config: Config, rounds: int, on_round: OnRound) -> dict[int, Measured]:
    """Measure fleets of one, two and three colocated engines, one after another."""
    measured = {}
    for engines in ENGINES:
        measured[engines] = one = Measured()
        async with _open(config, engines, "weights.transport=shm") as rollout:
            bench = await asyncio.to_thread(_Bench, rollout)
            one.nbytes = bench.nbytes
            for index in range(-WARM_UPS, rounds):
                taken = await bench.round()
                on_round(engines, "shm", index, taken.push)
                if index >= 0:
                    one.rounds.append(taken)
        with tempfile.TemporaryDirectory(prefix="splitroll-bench-") as path:
            overrides = ("weights.transport=disk", f"weights.path={path}")
            async with _open(config, engines, *overrides) as rollout:
                for index in range(-WARM_UPS, rounds):
                    seconds = (await rollout.update_weights(bench.weights)).total_s
                    on_round(engines, "disk", index, seconds)
                    if index >= 0:
                        one.disk_s.append(seconds)
    return measured


def _open(
    config: Config, engines: int, *overrides: str
) -> contextlib.AbstractAsyncContextManager[Rollout]:
    fleet = ("disaggregation.enabled=false", f"colocated.replicas={engines}")
    return Rollout.open(config, overrides=(*fleet, *overrides))


class _Bench:
    """Measures one fleet."""

    def __init__(self, rollout: Rollout) -> None:
        # Imported late: torch takes seconds.
        from splitroll.weights.disk import read_files
        from splitroll.weights.segment import Segment

        self._rollout = rollout
        self._engines: list[Any] = rollout.fleet.ready()
        folder = Path(rollout.facts.path)
        dtype = self._engines[0].info.dtype
        self._manifest: Manifest = wire_manifest(checkpoint_manifest(folder), dtype)
        self.nbytes = sum(spec.nbytes for spec in self._manifest)
        self.weights = {name: tensor.clone() for name, tensor in read_files(folder)}
        bucket_bytes = rollout.config.weights.bucket_bytes
        self._buckets, size = layout([self._manifest], bucket_bytes)
        self._segment = Segment.create(len(self._buckets), size, [os.getpid()])

    async def round(self) -> Round:
        first = self._engines[0]
        with tempfile.TemporaryDirectory(dir=MEMORY, prefix="splitroll-bench-") as path:
            write_s, _ = await _timed(asyncio.to_thread(self._write))
            save_s, _ = await _timed(asyncio.to_thread(self._save, path))
            reload_s, _ = await _timed(_reload(first, path))
            load_s, _ = await _timed(first.load_weights(WeightOffer(folder=path)))
            push_s, update = await _timed(self._rollout.update_weights(self.weights))
            reloads = asyncio.gather(*(_reload(engine, path) for engine in self._engines))
            all_s, _ = await _timed(reloads)
        return Round(
            write=write_s,
            reload=reload_s,
            load=load_s,
            push=push_s,
            pushed_load=update.load_s,
            pushed_pause=update.pause_s,
            path=save_s + all_s,
        )

    def _write(self) -> None:
        from splitroll.weights.shm import tensor_at

        for bucket in self._buckets:
            for spec, at in bucket.specs:
                tensor_at(self._segment, spec, at).copy_(self.weights[spec.name])

    def _save(self, path: str) -> None:
        import torch
        from safetensors.torch import save_file

        file = {
            spec.name: self.weights[spec.name].to(getattr(torch, spec.dtype))
            for spec in self._manifest
        }
        save_file(file, Path(path) / "model.safetensors")


async def _reload(engine: Any, path: str) -> None:
    await engine.call_workers("reload_weights", weights_path=path)


async def _timed(work: Awaitable[T]) -> tuple[float, T]:
    begun_s = time.monotonic()
    result = await work
    return time.monotonic() - begun_s, result


def report(measured: Mapping[int, Measured], cores: int) -> dict[str, Any]:
    """Return the measurement as one JSON object: medians, and whether they are within bounds."""
    return {
        "cores": cores,
        "nbytes": max(one.nbytes for one in measured.values()),
        "rounds": min(len(one.rounds) for one in measured.values()),
        "fleets": {
            str(engines): _fleet_report(engines, cores, one) for engines, one in measured.items()
        },
    }


def _fleet_report(engines: int, cores: int, one: Measured) -> dict[str, Any]:
    columns: dict[str, Sequence[float]] = {
        f"{column.name}_s": [getattr(each, column.name) for each in one.rounds]
        for column in fields(Round)
    }
    columns["disk_s"] = one.disk_s
    median = {name: statistics.median(values) for name, values in columns.items()}
    bound_s = bound(engines, cores, median["write_s"], median["reload_s"])
    to_bound = median["push_s"] / bound_s
    to_load = statistics.median(each.pushed_pause / each.pushed_load for each in one.rounds)
    return {
        "median": median,
        "rounds": columns,
        "bound_s": bound_s,
        "push_to_bound": to_bound,
        "pause_to_load": to_load,
        "within_bounds": to_bound <= 1 and to_load <= PAUSE_SLACK,
    }
