"""From configuration and cluster inventory to exact engines: name, node, devices. Pure, but for
`this_node`."""

from __future__ import annotations

import ipaddress
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from splitroll.config.pools import Pool, pools
from splitroll.config.schema import Config
from splitroll.errors import ConfigError, Problem
from splitroll.types import Role

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """What one node of the cluster has for us.

    Attributes:
        id: Ray's node id.
        address: the address that Ray knows it by.
        gpus: ids of the free GPUs, as CUDA_VISIBLE_DEVICES takes them.
        cores: ids of the CPU cores that our processes may use.
        addresses: of its interfaces.
        resources: names of Ray's resources that it has any of; `labels`: its labels.
    """

    id: str
    address: str
    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    addresses: tuple[str, ...] = ()
    resources: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an engine that is on one node."""

    node_id: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, placed.

    Attributes:
        node_id: of the node that its actor is on.
        gpus: GPU ids on that node, one per rank that is there; empty on CPU.
        cores: CPU cores that its threads may run on; empty on GPU (then all).
        threads: CPU threads of each rank.
        host: address under which its peers reach it; loopback in a fleet on one node.
        pool: path of its section in the configuration.
        shares: what it has on each node, its own first, if that is more than one.
    """

    name: str
    role: Role
    node_id: str
    host: str
    tensor_parallel_size: int
    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int
    pool: str = ""
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    shares: tuple[Share, ...] = ()

    def is_beyond(self, node_id: str) -> bool:
        """Return whether any of it is on another node."""
        return {self.node_id, *(share.node_id for share in self.shares)} != {node_id}

    @property
    def world_size(self) -> int:
        """Ranks of all kinds, each with a device of its own, or on CPU a process."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


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
        ConfigError: when the cluster has too few devices, with the sum and its terms; or a node has
            no address that its peers share.
    """
    wants = _wanted(config)
    if _use_gpus(config, nodes):
        engines = _Placing(config, wants, nodes).on_gpus()
    else:
        engines = _Placing(config, wants, nodes).on_cores()
    if _is_alone(config, nodes, engines):
        return tuple(replace(spec, host=LOOPBACK) for spec in engines)
    return _with_hosts(config, nodes, engines)


def place_more(
    config: Config,
    nodes: Sequence[Node],
    present: Sequence[EngineSpec],
    pool: Pool,
    count: int,
    *,
    on_gpu: bool,
    taken: Iterable[str] = (),
) -> tuple[EngineSpec, ...]:
    """Place further engines of a pool beside those of a fleet.

    Args:
        nodes: with the GPUs that are free now.
        on_gpu: what the fleet runs on, whatever is free now.
        taken: names that were used before; a name stands for one shape, and one account.

    Raises:
        ConfigError: they do not fit, or would be where the others cannot reach them.
    """
    placing = _Placing(config, [replace(pool, replicas=count)], nodes, present, taken)
    engines = placing.on_gpus() if on_gpu else placing.on_cores()
    local = {spec.node_id for spec in present if spec.host == LOOPBACK}
    if not local:
        return _with_hosts(config, nodes, engines)
    if outside := [spec.name for spec in engines if {spec.node_id} != local or spec.shares]:
        found = f"{', '.join(outside)} on another node than the fleet, which talks over loopback"
        hint = "set ray.address when the fleet is opened, so that its engines listen for others"
        raise ConfigError([Problem(pool.replicas_path, found, "room on the fleet's node", hint)])
    return tuple(replace(spec, host=LOOPBACK) for spec in engines)


def _is_alone(config: Config, nodes: Sequence[Node], engines: Sequence[EngineSpec]) -> bool:
    """Return whether a fleet is, and stays, on one node."""
    used = {spec.node_id for spec in engines}
    used |= {share.node_id for spec in engines for share in spec.shares}
    return len(used) <= 1 and config.ray.address is None


def _with_hosts(
    config: Config, nodes: Sequence[Node], engines: Sequence[EngineSpec]
) -> tuple[EngineSpec, ...]:
    used = {spec.node_id for spec in engines}
    hosts = {node.id: shared_address(config, node) for node in nodes if node.id in used}
    return tuple(replace(spec, host=hosts[spec.node_id]) for spec in engines)


def less(nodes: Sequence[Node], specs: Sequence[EngineSpec]) -> list[Node]:
    """Return nodes without the GPUs that some engines are yet to take there."""
    to_take = Counter(
        share.node_id
        for spec in specs
        for share in (spec.shares or (Share(spec.node_id, spec.gpus),))
        for _ in share.gpus
    )
    return [replace(node, gpus=node.gpus[to_take[node.id] :]) for node in nodes]


def has_room(nodes: Sequence[Node], spec: EngineSpec) -> bool:
    """Return whether the GPUs of an engine are free where it was."""
    free = {node.id: len(node.gpus) for node in nodes}
    shares = spec.shares or (Share(spec.node_id, spec.gpus),)
    return all(len(share.gpus) <= free.get(share.node_id, -1) for share in shares)


def left_over(specs: Sequence[EngineSpec], nodes: Sequence[Node]) -> dict[str, int]:
    """Return how many GPUs no engine has, by the node's address; nodes without any are left out."""
    taken = Counter(
        share.node_id
        for spec in specs
        for share in (spec.shares or (Share(spec.node_id, spec.gpus),))
        for _ in share.gpus
    )
    rest = {node.address: len(node.gpus) - taken[node.id] for node in nodes}
    return {address: count for address, count in rest.items() if count}


def shared_address(config: Config, node: Node) -> str:
    """Return the address by which peers reach a node's engines.

    Raises:
        ConfigError: it has none in `network.subnet`.
    """
    if (named := config.network.addresses.get(node.address)) is not None:
        return named
    if config.network.subnet is None:
        return node.address
    subnet = ipaddress.ip_network(config.network.subnet)
    for address in (node.address, *node.addresses):
        if ipaddress.ip_address(address.partition("%")[0]) in subnet:
            return address
    found = f"{subnet}: node {node.address} has {', '.join(node.addresses) or 'no other address'}"
    hint = "name the subnet that engines share, or the node's address in network.addresses"
    allowed = "a subnet in which every node has an address"
    raise ConfigError([Problem("network.subnet", found, allowed, hint)])


def _wanted(config: Config) -> list[Pool]:
    outside = config.router
    if outside.url is not None:
        return []
    urls = {
        Role.PREFILL: outside.prefill_urls,
        Role.DECODE: outside.decode_urls,
        Role.BOTH: outside.worker_urls,
    }
    return [pool for pool in pools(config) if not urls[pool.role]]


def _use_gpus(config: Config, nodes: Sequence[Node]) -> bool:
    if config.devices.kind == "auto":
        return any(node.gpus for node in nodes)
    return config.devices.kind == "gpu"


class _Placing:
    """One run of `place`, or of `place_more` beside engines that are there."""

    def __init__(
        self,
        config: Config,
        wants: Sequence[Pool],
        nodes: Sequence[Node],
        present: Sequence[EngineSpec] = (),
        taken: Iterable[str] = (),
    ) -> None:
        self._config = config
        self._wants = wants
        self._nodes = nodes
        self._present = present
        self._taken = {*taken, *(spec.name for spec in present)}
        self._engines: dict[str, list[EngineSpec]] = {pool.path: [] for pool in wants}

    def on_gpus(self) -> list[EngineSpec]:
        free = {node.id: list(node.gpus) for node in self._nodes}
        self._check_sum("GPUs", 1, {node.address: len(node.gpus) for node in self._nodes})
        for pool in self._choosiest_first():
            for _ in range(pool.replicas):
                shares = self._shares(pool, free)
                for share in shares:
                    del free[share.node_id][: len(share.gpus)]
                first = next(n for n in self._nodes if n.id == shares[0].node_id)
                spread = tuple(shares) if len(shares) > 1 else ()
                self._add(pool, first, gpus=shares[0].gpus, cores=(), threads=1, shares=spread)
        return self._named()

    def on_cores(self) -> list[EngineSpec]:
        """Every engine has cores of its own, or, where these do not suffice and may be shared, all
        have all."""
        try:
            return self._on_cores(shared=False)
        except ConfigError:
            if not self._config.devices.share_cores:
                raise
        for placed in self._engines.values():
            placed.clear()
        return self._on_cores(shared=True)

    def _on_cores(self, *, shared: bool) -> list[EngineSpec]:
        threads = self._config.devices.cores_per_engine
        free = {node.id: self._free_cores(node) for node in self._nodes}
        if not shared:
            self._check_sum("cores", threads, {n.address: len(free[n.id]) for n in self._nodes})
        load = dict.fromkeys(free, 0)
        for spec in self._present:
            load[spec.node_id] = load.get(spec.node_id, 0) + spec.world_size * spec.threads
        for pool in self._choosiest_first():
            size = pool.world_size * threads
            for _ in range(pool.replicas):
                nodes = self._allowed(pool)
                if shared:
                    node = min(nodes, key=lambda n: load[n.id] / max(1, len(n.cores)))
                    cores = node.cores
                else:
                    fits = [n for n in nodes if len(free[n.id]) >= size]
                    if not fits:
                        raise self._does_not_fit(pool, nodes, free)
                    node = self._choose(fits, free)
                    cores = tuple(free[node.id][:size])
                    del free[node.id][:size]
                load[node.id] += size
                self._add(pool, node, gpus=(), cores=cores, threads=threads)
        return self._named()

    def _choosiest_first(self) -> list[Pool]:
        """Return the pools, those first that few nodes may have: the others go elsewhere."""
        return sorted(self._wants, key=lambda pool: len(self._allowed(pool)))

    def _named(self) -> list[EngineSpec]:
        """Return the engines in the order of their pools, numbered by role."""
        numbers: defaultdict[Role, Iterator[int]] = defaultdict(itertools.count)
        named = []
        for spec in itertools.chain.from_iterable(self._engines.values()):
            names = (engine_name(spec.role, number) for number in numbers[spec.role])
            name = next(name for name in names if name not in self._taken)
            named.append(replace(spec, name=name))
        return named

    def _free_cores(self, node: Node) -> list[int]:
        used = {core for spec in self._present if spec.node_id == node.id for core in spec.cores}
        return [core for core in node.cores if core not in used]

    def _shares(self, pool: Pool, free: Mapping[str, list[str]]) -> list[Share]:
        """Return an engine's devices: on one node if any has room for it, else whole pipeline
        stages on several, or parts of a stage, as large as divide it, where no node is as large
        as one."""
        nodes = self._allowed(pool)
        size = pool.world_size
        fits = [node for node in nodes if len(free[node.id]) >= size]
        if fits:
            node = self._choose(fits, free)
            return [Share(node.id, tuple(free[node.id][:size]))]
        each, shares = _largest_part(pool.section.tensor_parallel_size, nodes), []
        missing = size // each
        for node in sorted(nodes, key=lambda n: -(len(free[n.id]) // each)):
            parts = min(missing, len(free[node.id]) // each)
            if parts:
                shares.append(Share(node.id, tuple(free[node.id][: parts * each])))
                missing -= parts
        if missing or pool.section.data_parallel_size > 1:
            raise self._does_not_fit(pool, nodes, free)
        return shares

    def _allowed(self, pool: Pool) -> list[Node]:
        if self._config.ray.address is None:
            return list(self._nodes)  # this machine, whatever it would be called in a cluster
        asked = pool.section.nodes
        found = [
            node
            for node in self._nodes
            if (asked.resource is None or asked.resource in node.resources)
            and all(node.labels.get(name) == value for name, value in asked.labels.items())
        ]
        if found:
            return found
        wanted = [f"resource {asked.resource}"] if asked.resource is not None else []
        wanted += [f"label {name}={value}" for name, value in asked.labels.items()]
        have = "; ".join(
            f"{node.address}: {', '.join(sorted(node.resources)) or 'no resources'}, "
            f"labels {dict(node.labels)}"
            for node in self._nodes
        )
        problem = Problem(
            f"{pool.path}.nodes",
            " and ".join(wanted),
            f"what a node of the cluster has ({have})",
            "start a node with it (ray start --resources, --labels), or ask for less",
        )
        raise ConfigError([problem])

    def _choose(self, fits: Sequence[Node], free: Mapping[str, Sequence[Any]]) -> Node:
        """Return the first node, or with `devices.placement: spread` the one with most to spare."""
        if self._config.devices.placement == "pack":
            return fits[0]
        return max(fits, key=lambda node: len(free[node.id]))

    def _add(
        self,
        pool: Pool,
        node: Node,
        *,
        gpus: tuple[str, ...],
        cores: tuple[int, ...],
        threads: int,
        shares: tuple[Share, ...] = (),
    ) -> None:
        section = pool.section
        self._engines[pool.path].append(
            EngineSpec(
                name="",
                role=pool.role,
                node_id=node.id,
                host=node.address,
                tensor_parallel_size=section.tensor_parallel_size,
                gpus=gpus,
                cores=cores,
                threads=threads,
                pool=pool.path,
                pipeline_parallel_size=section.pipeline_parallel_size,
                data_parallel_size=section.data_parallel_size,
                shares=shares,
            )
        )

    def _check_sum(self, unit: str, each: int, have: dict[str, int]) -> None:
        terms = [(pool, pool.replicas * pool.world_size * each) for pool in self._wants]
        needed = sum(number for _, number in terms)
        if needed <= sum(have.values()):
            return
        told = " + ".join(
            f"{pool.replicas} {_kind(pool)} x {pool.world_size * each} {unit}" for pool, _ in terms
        )
        nodes = ", ".join(f"{count} on {address}" for address, count in have.items())
        raise ConfigError(
            [
                Problem(
                    " and ".join(pool.replicas_path for pool in self._wants),
                    f"{told} = {needed} {unit}",
                    f"{sum(have.values())} {unit} ({nodes})",
                    "ask for fewer or smaller engines, or a larger cluster"
                    + (", or set devices.kind to cpu" if unit == "GPUs" else ""),
                )
            ]
        )

    def _does_not_fit(
        self, pool: Pool, nodes: Sequence[Node], free: Mapping[str, Sequence[Any]]
    ) -> ConfigError:
        number = len(self._engines[pool.path]) + 1
        left = ", ".join(f"{len(free[node.id])} on {node.address}" for node in nodes)
        stages = pool.section.pipeline_parallel_size
        problem = Problem(
            pool.replicas_path,
            f"engine {number} of {pool.replicas}, with {pool.world_size} devices ({pool.sizes})",
            "engines that fit on one node"
            + (" or whose stages do" if stages > 1 else "")
            + f"; left over are {left}",
            "lower its sizes or the number of replicas",
        )
        return ConfigError([problem])


def _largest_part(ranks: int, nodes: Sequence[Node]) -> int:
    """Return how many tensor-parallel ranks of a pipeline stage are on one node, as many as fit."""
    most = max(1, *(len(node.gpus) for node in nodes))
    return next(part for part in range(min(ranks, most), 0, -1) if ranks % part == 0)


def _kind(pool: Pool) -> str:
    return "mixed" if pool.path.startswith("disaggregation.mixed") else pool.role.value
