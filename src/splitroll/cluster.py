"""The Ray cluster: joined or started, its inventory, and engines launched in it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.state import available_resources_per_node  # ray 2.60 has no public one
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from splitroll.config.pools import Pool, pool_of
from splitroll.config.schema import Config
from splitroll.engines.arguments import engine_arguments
from splitroll.engines.protocol import Engine
from splitroll.engines.ray_engine import RayEngine
from splitroll.engines.ray_place import NAMESPACE, Place
from splitroll.errors import ConfigError, FleetError, NoPlace, Problem
from splitroll.handoff.backend import KvBackend, check_backend
from splitroll.model import ModelFacts
from splitroll.placement import EngineSpec, Node, actor_name, engine_id, has_room, less, place_more
from splitroll.ports import own_addresses

_CONNECT_TIMEOUT_S = 10.0
_INVENTORY_TIMEOUT_S = 60.0
_OBJECT_STORE_BYTES = 256 * 1024**2
"""Requests and samples are small; KV does not pass through Ray."""

_SIGACTION_BYTES = 256
"""Room for glibc's struct sigaction, of 152 bytes on x86-64; its content is only kept."""

_users = 0
"""How many fleets of this process use a cluster that we entered."""
_users_lock = threading.Lock()


@contextlib.asynccontextmanager
async def open_cluster(config: Config) -> AsyncGenerator[None, None]:
    """Join the cluster of `ray.address`, or start one on this machine.

    A process that is in a cluster already stays in it. A cluster that we joined or started is left
    when its last user in this process is done.

    Raises:
        ConfigError: when the address leads to no cluster.
    """
    global _users
    with _users_lock:
        ours = _users > 0 or not ray.is_initialized()
        if ours and _users == 0:
            _enter_cluster(config)
        _users += ours
    try:
        yield
    finally:
        with _users_lock:
            _users -= ours
            if ours and _users == 0:
                ray.shutdown()


def _enter_cluster(config: Config) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = config.ray.address is None
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
    if local:
        # Ray's workers would run at a niceness of 15: whatever else runs here would take turns from
        # the engines.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options.update(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",  # nothing outside this machine needs to reach it
        )
    else:
        options.update(address=config.ray.address)
    try:
        if config.ray.address not in (None, "auto"):
            host, _, port = config.ray.address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        with _signal_handlers_kept(), _loopback_only() if local else _one_try():
            ray.init(logging_level=logging.ERROR, **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as exc:
        hint = "start one (ray start --head), or leave ray.address out to use this machine"
        allowed = "null, auto, or the address of a Ray cluster that runs"
        found = f"{config.ray.address!r} ({str(exc).splitlines()[0]})"
        raise ConfigError([Problem("ray.address", found, allowed, hint)]) from exc


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Have a Ray of our own listen on loopback only.

    Ray takes 127.0.0.1 for a name of this machine, and listens on all interfaces, unless its
    switch for machines that can be no clusters is set, which is named after Windows and macOS.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    with _environment(name, "0"):  # for the processes that it starts
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before


def _one_try() -> contextlib.AbstractContextManager[None]:
    """Have Ray try once to reach a cluster, of its 20 times 45 s."""
    return _environment("RAY_gcs_server_port_wait_time_s", "1")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself and ends the process with a crash report; give it back.

    In the main thread Ray sets a handler of Python's and one of C's, elsewhere one of C's alone,
    which Python may not set there; then the C library gives it back.
    """
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)
        return
    sigaction = ctypes.CDLL(None).sigaction
    kept = ctypes.create_string_buffer(_SIGACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, kept)
    try:
        yield
    finally:
        sigaction(int(signal.SIGTERM), kept, None)


async def take_inventory(wants_gpus: bool, *, all_must_answer: bool = True) -> list[Node]:
    """Ask every node of the cluster what it has, on the node itself.

    Raises:
        FleetError: when a node does not answer, or none does.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    head = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda node: (node["NodeID"] != head, node["NodeManagerAddress"]))
    free = available_resources_per_node()
    asks = [
        _ask_node(node, int(free.get(node["NodeID"], {}).get("GPU", 0)) if wants_gpus else 0)
        for node in nodes
    ]
    limited = [asyncio.wait_for(ask, _INVENTORY_TIMEOUT_S) for ask in asks]
    answers = await asyncio.gather(*limited, return_exceptions=True)
    found = [answer for answer in answers if isinstance(answer, Node)]
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in failed:
        if not isinstance(error, TimeoutError | RayError):
            raise error
    if not found or (failed and all_must_answer):
        addresses = ", ".join(node["NodeManagerAddress"] for node in nodes)
        raise FleetError(
            f"no inventory from all of {addresses} in {_INVENTORY_TIMEOUT_S:g} s: "
            f"{str(failed[0]) or 'were their GPUs taken by another job meanwhile?'}"
        ) from failed[0]
    return found


async def _ask_node(node: dict[str, Any], gpus: int) -> Node:
    """Ask a node, holding its free GPUs for a moment: Ray says which ones they are."""
    options = {
        "num_cpus": 0,
        "num_gpus": gpus,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    }
    ask = ray.remote(_describe_node).options(**options).remote()
    try:
        cores, gpu_ids, addresses = await ask
    except asyncio.CancelledError:
        ray.cancel(ask)
        raise
    return Node(
        id=node["NodeID"],
        address=node["NodeManagerAddress"],
        gpus=tuple(sorted(gpu_ids, key=_by_number)),
        cores=tuple(sorted(cores)),
        addresses=tuple(addresses),
        resources=frozenset(node["Resources"]),
        labels=dict(node.get("Labels") or {}),
    )


def _by_number(gpu: str) -> tuple[int, str]:
    return (int(gpu) if gpu.isdigit() else -1, gpu)


def _describe_node() -> tuple[set[int], list[str], list[str]]:
    """Runs on the node: the cores that it lets us use, the GPUs that Ray granted, its addresses."""
    granted = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return os.sched_getaffinity(0), [str(gpu) for gpu in granted], own_addresses()


class RayLauncher:
    """Launches the engines of one fleet as Ray actors.

    Attributes:
        fleet_id: unique in the cluster; part of every name that the fleet uses.
        folder: where its engines keep their files: one log per incarnation, temporary files and
            IPC sockets. Removed by `tidy`.
    """

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        backend: KvBackend | None,
        fleet_id: str,
        *,
        on_gpu: bool = False,
    ) -> None:
        self.fleet_id = fleet_id
        self._on_gpu = on_gpu
        self.folder = Path(tempfile.gettempdir()) / f"splitroll-{fleet_id}"
        self._config = config
        self._facts = facts
        self._backend = backend
        self._places: dict[str, Place] = {}

    async def launch(self, spec: EngineSpec, generation: int) -> Engine:
        name = actor_name(self.fleet_id, spec.name, generation)
        transfer = None
        if self._backend is not None:
            transfer = self._backend.transfer(
                spec,
                engine_id=engine_id(self.fleet_id, spec.name, generation),
                lease_s=self._config.disaggregation.kv_lease_s,
                elastic=self._config.dispatch.roles == "elastic",
            )
        arguments = engine_arguments(self._config, self._facts, spec, transfer)
        log_path = self.folder / f"{spec.name}-{generation}.log"
        place = self._places[spec.name] = await Place.reserve(spec, name)
        return await RayEngine.launch(spec, place, arguments, log_path)

    async def relocate(self, spec: EngineSpec, others: Sequence[EngineSpec]) -> EngineSpec:
        """See `fleet.Launcher`."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        is_there = {spec.node_id, *(share.node_id for share in spec.shares)} <= alive
        if is_there and (not self._on_gpu or has_room(await self._free_nodes(others), spec)):
            return spec
        pool = pool_of(self._config, spec.pool)
        try:
            (found,) = await self.place_more(pool, 1, others, ())
        except (ConfigError, FleetError) as exc:
            why = "its node is gone, or has no room for it, and no other has"
            raise NoPlace(spec.name, f"{why}: {exc}") from exc
        return replace(found, name=spec.name)

    async def place_more(
        self, pool: Pool, count: int, present: Sequence[EngineSpec], taken: Iterable[str]
    ) -> tuple[EngineSpec, ...]:
        """Place further engines beside those of the fleet; for `taken` see `placement.place_more`.

        Raises:
            ConfigError: there is no room for them.
        """
        nodes = await self._free_nodes(present)
        alive = {node.id for node in nodes}
        here = [spec for spec in present if spec.node_id in alive]
        found = place_more(self._config, nodes, here, pool, count, on_gpu=self._on_gpu, taken=taken)
        self._check_reach(found, present)
        check_backend(self._backend, found)
        return found

    async def _free_nodes(self, present: Sequence[EngineSpec]) -> list[Node]:
        """Return what nodes have that neither is taken nor will be by engines that are to start."""
        # First: a place that is reserved meanwhile may not be in the inventory yet.
        held = {name for name, place in self._places.items() if place.is_held}
        nodes = await take_inventory(wants_gpus=self._on_gpu, all_must_answer=False)
        return less(nodes, [spec for spec in present if spec.name not in held])

    def _check_reach(self, found: Sequence[EngineSpec], present: Sequence[EngineSpec]) -> None:
        """
        Raises:
            ConfigError: weights that reach all engines now would not reach one of these.
        """
        transport = self._config.weights.transport
        home = ray.get_runtime_context().get_node_id()
        if transport not in ("shm", "ipc") or any(spec.is_beyond(home) for spec in present):
            return
        if beyond := [spec.name for spec in found if spec.is_beyond(home)]:
            told = f"{transport}, with {', '.join(beyond)} on another host"
            hint = "shared memory ends at the host: set weights.transport to disk or nccl"
            raise ConfigError([Problem("weights.transport", told, "room on this host", hint)])

    def tidy(self) -> None:
        """Remove the fleet's folder on this machine, logs included, after an uneventful life."""
        shutil.rmtree(self.folder, ignore_errors=True)
