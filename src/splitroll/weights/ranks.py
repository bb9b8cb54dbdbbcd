"""Several trainer processes that push weights together, over torch.distributed.

    rank 0                            every other rank
    opening: what engines want   -->
                                 <--  share: what it has
    plan: who writes what        -->
    writes its part                   writes its part
                                 <--  written
    closing: how it ended        -->

Every rank writes its own part: into the same shared memory, or as files of its own. Only rank 0
talks to the fleet. A parameter that one rank alone has is sent by it; one that all have (replicas,
shards of one tensor) by one of them, in turn. What goes wrong on any rank ends the update on all.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from splitroll.errors import ConfigError, Problem, WeightUpdateFailed
from splitroll.weights.manifest import Manifest, ParamSpec, duplicates
from splitroll.weights.source import reading
from splitroll.weights.transport import WritePlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opening:
    """What every rank needs to know first."""

    version: int
    wanted: Manifest


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has."""

    pid: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank is to write."""

    write: WritePlan
    checksums: tuple[str, ...]


class TrainerRanks:
    """This process's place among the trainer's ranks.

    Made on every rank at the same point of the program: it makes a process group of its own.

    Args:
        group: the ranks that push together, None for all; its first is to hold the Rollout.
        timeout_s: longest wait for another rank: a whole update, the draining of work included.

    Raises:
        ConfigError: when torch.distributed is not initialised.
    """

    def __init__(self, group: Sequence[int] | None = None, timeout_s: float = 3600.0) -> None:
        if not dist.is_initialized():
            hint = "call torch.distributed.init_process_group, or leave ranks out"
            found = "torch.distributed is not initialised"
            raise ConfigError([Problem("ranks", found, "an initialised one", hint)])
        ranks = list(range(dist.get_world_size()) if group is None else group)
        limit = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(ranks, timeout=limit, backend="gloo")
        self._first = ranks[0]
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank())

    def update_weights(self, weights: Any) -> int:
        """Push this rank's share, on every rank but the first; returns the version.

        Blocks until the fleet has the weights or refused them. On the first rank call
        `Rollout.update_weights(..., ranks=...)` instead, at the same point of the program.

        Raises:
            ConfigError: as on the first rank, with every difference from the engines.
            WeightUpdateFailed: the update failed, on whatever rank or engine.
        """
        if self.rank == 0:
            hint = "call update_weights of the Rollout, with ranks="
            raise ConfigError([Problem("ranks", "the first rank", "another one", hint)])
        opening: Opening = self.hear()
        with contextlib.ExitStack() as stack:
            mine: Share | Exception
            try:
                source = stack.enter_context(reading(weights, opening.wanted))
                mine = Share(os.getpid(), source.manifest)
            except Exception as exc:  # a wall: the others are to be told, whatever it is
                mine = _tellable(exc, f"trainer rank {self.rank}")
            self.collect(mine)
            plan: Plan = self.hear()
            written: Mapping[str, str] | Exception
            try:
                written = plan.write.write(self.rank, source, plan.checksums)
            except Exception as exc:  # a wall: the others are to be told, whatever it is
                written = _tellable(exc, f"trainer rank {self.rank}")
            self.collect(written)
            closing: int = self.hear()
        return closing

    def tell(self, value: Any) -> None:
        """Send a value from the first rank to all; an exception is raised there."""
        dist.broadcast_object_list([value], src=self._first, group=self._group)

    def hear(self) -> Any:
        """Return what the first rank told."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=self._first, group=self._group)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def collect(self, mine: T) -> list[T]:
        """Gather a value of every rank on the first; empty on the others."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, values, dst=self._first, group=self._group)
        return values or []


class Conductor:
    """The first rank's side of one update; blocking calls, in order.

    `close` is called in any case: it tells the other ranks how the update ended, wherever in the
    exchange it did.
    """

    def __init__(self, ranks: TrainerRanks | None) -> None:
        self._ranks = ranks
        self._listening = True
        """The other ranks wait to be told something; else they send something first."""

    def open(self, version: int, wanted: Manifest) -> None:
        if self._ranks is not None:
            self._ranks.tell(Opening(version, wanted))
            self._listening = False

    def shares(self, manifest: Manifest) -> list[Share]:
        """Return what every rank has, this one first.

        Raises:
            Exception: what the first rank raised whose weights cannot be read.
        """
        mine = Share(os.getpid(), manifest)
        if self._ranks is None:
            return [mine]
        shares: list[Any] = self._ranks.collect(mine)
        self._listening = True
        for share in shares:
            if isinstance(share, Exception):
                raise share
        return shares

    def plan(self, plan: Plan) -> None:
        if self._ranks is not None:
            self._ranks.tell(plan)
            self._listening = False

    def written(self, sums: Mapping[str, str] | Exception) -> dict[str, str]:
        """Return the checksums of all ranks.

        Raises:
            Exception: what the first rank that failed raised; that another one gave up is no cause.
        """
        every = [sums] if self._ranks is None else self._ranks.collect(sums)
        self._listening = True
        errors = [one for one in every if isinstance(one, Exception)]
        causes = [one for one in errors if not isinstance(one, InterruptedError)]
        for error in causes or errors:
            raise error
        merged: dict[str, str] = {}
        for one in every:
            assert not isinstance(one, Exception), "raised above"
            merged |= one
        return merged

    def close(self, outcome: int | BaseException) -> None:
        """Tell the other ranks the version, or what was raised here."""
        if self._ranks is None:
            return
        if not self._listening:
            self._ranks.collect(RuntimeError("the update has ended"))
        told = outcome if isinstance(outcome, int) else _tellable(outcome, "the first trainer rank")
        self._ranks.tell(told)


def assign(
    shares: Sequence[Manifest], *, one_sender: bool = False
) -> tuple[list[Manifest], list[Problem]]:
    """Decide who sends what: a parameter that all ranks have is sent by one of them, in turn, or by
    the first.

    Returns:
        what each rank sends, and a problem for each parameter that some ranks have, but not all.
    """
    count = len(shares)
    everywhere = set.intersection(*({spec.name for spec in share} for share in shares))
    names = [spec.name for spec in shares[0] if spec.name in everywhere]
    turns = {name: 0 if one_sender else index % count for index, name in enumerate(names)}

    def sends(rank: int, spec: ParamSpec) -> bool:
        return turns.get(spec.name, rank) == rank

    parts = [
        tuple(spec for spec in share if sends(rank, spec)) for rank, share in enumerate(shares)
    ]
    return parts, duplicates(parts)


def _tellable(error: BaseException, who: str) -> Exception:
    """Return an error that any process can unpickle."""
    if isinstance(error, ConfigError | WeightUpdateFailed):
        return error
    return RuntimeError(f"{who}: {type(error).__name__}: {error}")
