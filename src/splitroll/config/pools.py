"""The engines that a configuration asks for, in pools: of one role, one shape and one set of
arguments each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from splitroll.config.schema import Config, EngineGroup, RoleEngines
from splitroll.types import Role

_DEFAULT_REPLICAS = {Role.PREFILL: 1, Role.DECODE: 2}


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines that are all alike.

    Attributes:
        path: of their section in the configuration; `replicas_path`: of their number.
    """

    role: Role
    path: str
    replicas_path: str
    replicas: int
    section: RoleEngines

    @property
    def world_size(self) -> int:
        """Devices, or on CPU processes, of each engine."""
        one = self.section
        return one.tensor_parallel_size * one.pipeline_parallel_size * one.data_parallel_size

    @property
    def sizes(self) -> str:
        """The sizes that are not 1, as messages tell them."""
        one = self.section
        named = {
            "tensor": one.tensor_parallel_size,
            "pipeline": one.pipeline_parallel_size,
            "data": one.data_parallel_size,
        }
        told = [f"{name} parallel {size}" for name, size in named.items() if size > 1]
        return ", ".join(told) or "no parallelism"

    def arguments(self, config: Config) -> Mapping[str, Any]:
        """Return the merged engine arguments."""
        return {**config.engine, **self.section.engine}


def pools(config: Config) -> tuple[Pool, ...]:
    """Return all pools of a configuration, prefill first; their engines are numbered in this order,
    by role."""
    split = config.disaggregation
    if not split.enabled:
        one = config.colocated
        return (Pool(Role.BOTH, "colocated", "colocated.replicas", one.replicas, one),)
    return (
        *_of_role(Role.PREFILL, "prefill", split.prefill, split.prefill_replicas),
        *_of_role(Role.DECODE, "decode", split.decode, split.decode_replicas),
        *_of_role(Role.BOTH, "mixed", split.mixed, None),
    )


def described(config: Config) -> str:
    """Return what kinds of engines there are to be, in words."""
    split = config.disaggregation
    if not split.enabled:
        return f"{config.colocated.replicas} colocated"
    kinds = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "mixed"}
    counted = [f"{replicas(config, role)} {kind}" for role, kind in kinds.items()]
    return " and ".join(one for one in counted if one[0] != "0") + f", {split.transfer_backend}"


def pool_of(config: Config, path: str) -> Pool:
    """Return the pool of a path."""
    return next(pool for pool in pools(config) if pool.path == path)


def replicas(config: Config, *roles: Role) -> int:
    """Return how many engines of some roles there are to be."""
    return sum(pool.replicas for pool in pools(config) if pool.role in roles)


def _of_role(
    role: Role, name: str, shapes: RoleEngines | list[EngineGroup], number: int | None
) -> Iterator[Pool]:
    path = f"disaggregation.{name}"
    if isinstance(shapes, list):
        for index, group in enumerate(shapes):
            own = f"{path}.{index}"
            yield Pool(role, own, f"{own}.replicas", group.replicas, group)
        return
    yield Pool(role, path, f"{path}_replicas", number or _DEFAULT_REPLICAS[role], shapes)
