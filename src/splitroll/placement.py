"""From configuration and cluster inventory to exact engines: name, node, devices. Pure, but for
`this_node`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitroll.config.schema import Config
from splitroll.errors import ConfigError, Problem
from splitroll.types import Role

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """What one node of the cluster has for us.

    Attributes:
        id: Ray's node id.
        address: the address that other nodes reach it by.
        gpus: ids of the free GPUs, as CUDA_VISIBLE_DEVICES takes them.
        cores: ids of the CPU cores that our processes may use.
    """

    id: str
    address: str
    gpus: tuple[str, ...]
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, placed.

    Attributes:
        gpus: GPU ids on the node, one per tensor-parallel rank; empty on CPU.
        cores: CPU cores that its threads may run on; empty on GPU (then all).
        threads: CPU threads of each tensor-parallel rank.
        host: address under which its peers reach it; loopback in a fleet on one node.
    """

    name: str
    role: Role
    node_id: str
    host: str
    tensor_parallel_size: int
    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class _Want:
    """Engines of one role, before they are placed."""

    role: Role
    path: str
    replicas: int
    tensor_parallel_size: int

    def term(self, unit: str, each: int) -> str:
        return f"{self.replicas} {self.role.value} x {self.tensor_parallel_size * each} {unit}"


def this_node() -> Node:
    """Return what this machine has, without asking Ray, to check a configuration early."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    if visible is not None:
        gpus = [part.strip() for part in visible.split(",") if part.strip()]
    return Node("local", "this machine", tuple(gpus), tuple(sorted(os.sched_getaffinity(0))))


def check_devices(config: Config) -> None:
    """Check that a fleet on this machine alone has the devices that it asks for.

    Raises:
        ConfigError: see `place`. A cluster's devices are known, and checked, when it is joined.
    """
    if config.ray.address is None:
        place(config, [this_node()])


def engine_name(role: Role, index: int) -> str:
    """Return an engine's name, stable over restarts; unique in its fleet."""
    return f"{'engine' if role is Role.BOTH else role.value}-{index}"


def actor_name(fleet_id: str, engine: str, generation: int) -> str:
    """Return the Ray name of one incarnation of an engine; unique in the cluster.

    This is the only place that builds it.
    """
    return f"splitroll-{fleet_id}-{engine}-{generation}"


def engine_id(fleet_id: str, engine: str, generation: int) -> str:
    """Return the KV connector's id of one incarnation; peers must never reuse an old one."""
    return actor_name(fleet_id, engine, generation)


def place(config: Config, nodes: Sequence[Node]) -> tuple[EngineSpec, ...]:
    """Place every engine on exact devices, prefill first.

    Raises:
        ConfigError: when the cluster has too few devices, with the sum and its terms.
    """
    wants = _wants(config)
    on_gpu = _use_gpus(config, nodes)
    engines = _place_on_gpus(wants, nodes) if on_gpu else _place_on_cores(config, wants, nodes)
    if len({spec.node_id for spec in engines}) > 1:
        return tuple(engines)
    return tuple(_with_host(spec, LOOPBACK) for spec in engines)


def _wants(config: Config) -> list[_Want]:
    section = config.disaggregation
    outside = config.router
    if outside.url is not None:
        return []
    if not section.enabled:
        both = config.colocated
        engines = _Want(Role.BOTH, "colocated.replicas", both.replicas, both.tensor_parallel_size)
        return [] if outside.worker_urls else [engines]
    prefill = _Want(
        Role.PREFILL,
        "disaggregation.prefill_replicas",
        section.prefill_replicas,
        section.prefill.tensor_parallel_size,
    )
    decode = _Want(
        Role.DECODE,
        "disaggregation.decode_replicas",
        section.decode_replicas,
        section.decode.tensor_parallel_size,
    )
    return [
        *([] if outside.prefill_urls else [prefill]),
        *([] if outside.decode_urls else [decode]),
    ]


def _use_gpus(config: Config, nodes: Sequence[Node]) -> bool:
    if config.devices.kind == "auto":
        return any(node.gpus for node in nodes)
    return config.devices.kind == "gpu"


def _place_on_gpus(wants: Sequence[_Want], nodes: Sequence[Node]) -> list[EngineSpec]:
    free = {node.id: list(node.gpus) for node in nodes}
    _check_sum(wants, "GPUs", 1, {node.address: len(node.gpus) for node in nodes})
    engines = []
    for want in wants:
        size = want.tensor_parallel_size
        for index in range(want.replicas):
            node = next((n for n in nodes if len(free[n.id]) >= size), None)
            if node is None:
                raise _does_not_fit(want, index, {n.address: len(free[n.id]) for n in nodes})
            taken, free[node.id] = free[node.id][:size], free[node.id][size:]
            engines.append(_spec(want, index, node, gpus=tuple(taken), cores=(), threads=1))
    return engines


def _place_on_cores(
    config: Config, wants: Sequence[_Want], nodes: Sequence[Node]
) -> list[EngineSpec]:
    threads = config.devices.cores_per_engine
    needed = sum(want.replicas * want.tensor_parallel_size * threads for want in wants)
    shared = needed > sum(len(node.cores) for node in nodes)
    if shared and not config.devices.share_cores:
        _check_sum(wants, "cores", threads, {node.address: len(node.cores) for node in nodes})
    free = {node.id: list(node.cores) for node in nodes}
    load = dict.fromkeys(free, 0)
    engines = []
    for want in wants:
        size = want.tensor_parallel_size * threads
        for index in range(want.replicas):
            if shared:
                node = min(nodes, key=lambda n: load[n.id] / max(1, len(n.cores)))
                cores = node.cores
            else:
                fits = next((n for n in nodes if len(free[n.id]) >= size), None)
                if fits is None:
                    raise _does_not_fit(want, index, {n.address: len(free[n.id]) for n in nodes})
                node = fits
                cores = tuple(free[node.id][:size])
                del free[node.id][:size]
            load[node.id] += size
            engines.append(_spec(want, index, node, gpus=(), cores=cores, threads=threads))
    return engines


def _spec(
    want: _Want,
    index: int,
    node: Node,
    *,
    gpus: tuple[str, ...],
    cores: tuple[int, ...],
    threads: int,
) -> EngineSpec:
    return EngineSpec(
        name=engine_name(want.role, index),
        role=want.role,
        node_id=node.id,
        host=node.address,
        tensor_parallel_size=want.tensor_parallel_size,
        gpus=gpus,
        cores=cores,
        threads=threads,
    )


def _with_host(spec: EngineSpec, host: str) -> EngineSpec:
    return EngineSpec(**{name: getattr(spec, name) for name in spec.__slots__} | {"host": host})


def _check_sum(wants: Sequence[_Want], unit: str, each: int, have: dict[str, int]) -> None:
    needed = sum(want.replicas * want.tensor_parallel_size * each for want in wants)
    if needed <= sum(have.values()):
        return
    terms = " + ".join(want.term(unit, each) for want in wants)
    nodes = ", ".join(f"{count} on {address}" for address, count in have.items())
    raise ConfigError(
        [
            Problem(
                " and ".join(want.path for want in wants),
                f"{terms} = {needed} {unit}",
                f"{sum(have.values())} {unit} ({nodes})",
                "ask for fewer or smaller engines, or a larger cluster"
                + (", or set devices.kind to cpu" if unit == "GPUs" else ""),
            )
        ]
    )


def _does_not_fit(want: _Want, index: int, free: dict[str, int]) -> ConfigError:
    left = ", ".join(f"{count} on {address}" for address, count in free.items())
    problem = Problem(
        want.path,
        f"{engine_name(want.role, index)} with {want.tensor_parallel_size} devices",
        f"engines that fit on one node; left over are {left}",
        "lower tensor_parallel_size or the number of replicas",
    )
    return ConfigError([problem])
