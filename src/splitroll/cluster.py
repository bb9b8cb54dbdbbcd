"""The Ray cluster: joined or started, its inventory, and engines launched in it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.state import available_resources_per_node  # ray 2.60 has no public one
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from splitroll.config.schema import Config
from splitroll.engines.arguments import engine_arguments
from splitroll.engines.protocol import Engine
from splitroll.engines.ray_engine import NAMESPACE, RayEngine
from splitroll.errors import ConfigError, FleetError, Problem
from splitroll.handoff.backend import KvBackend
from splitroll.model import ModelFacts
from splitroll.placement import EngineSpec, Node, actor_name, engine_id

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
        with _signal_handlers_kept(), _loopback_only() if local else contextlib.nullcontext():
            ray.init(logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as exc:
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


async def take_inventory(wants_gpus: bool) -> list[Node]:
    """Ask every node of the cluster what it has, on the node itself.

    Raises:
        FleetError: when a node does not answer.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    head = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda node: (node["NodeID"] != head, node["NodeManagerAddress"]))
    free = available_resources_per_node()
    asks = [
        _ask_node(node, int(free.get(node["NodeID"], {}).get("GPU", 0)) if wants_gpus else 0)
        for node in nodes
    ]
    try:
        async with asyncio.timeout(_INVENTORY_TIMEOUT_S):
            return list(await asyncio.gather(*asks))
    except (TimeoutError, RayError) as exc:
        addresses = ", ".join(node["NodeManagerAddress"] for node in nodes)
        raise FleetError(
            f"no inventory from all of {addresses} in {_INVENTORY_TIMEOUT_S:g} s: "
            f"{str(exc) or 'were their GPUs taken by another job meanwhile?'}"
        ) from exc


async def _ask_node(node: dict[str, Any], gpus: int) -> Node:
    """Ask a node, holding its free GPUs for a moment: Ray says which ones they are."""
    options = {
        "num_cpus": 0,
        "num_gpus": gpus,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    }
    ask = ray.remote(_describe_node).options(**options).remote()
    try:
        cores, gpu_ids = await ask
    except asyncio.CancelledError:
        ray.cancel(ask)
        raise
    return Node(
        id=node["NodeID"],
        address=node["NodeManagerAddress"],
        gpus=tuple(sorted(gpu_ids)),
        cores=tuple(sorted(cores)),
    )


def _describe_node() -> tuple[set[int], list[str]]:
    """Runs on the node: the cores that it lets us use, and the GPUs that Ray granted."""
    granted = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return os.sched_getaffinity(0), [str(gpu) for gpu in granted]


class RayLauncher:
    """Launches the engines of one fleet as Ray actors.

    Attributes:
        fleet_id: unique in the cluster; part of every name that the fleet uses.
        folder: where its engines keep their files: one log per incarnation, temporary files and
            IPC sockets. Removed by `tidy`.
    """

    def __init__(
        self, config: Config, facts: ModelFacts, backend: KvBackend | None, fleet_id: str
    ) -> None:
        self.fleet_id = fleet_id
        self.folder = Path(tempfile.gettempdir()) / f"splitroll-{fleet_id}"
        self._config = config
        self._facts = facts
        self._backend = backend

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
        return await RayEngine.launch(spec, name, arguments, log_path)

    def tidy(self) -> None:
        """Remove the fleet's folder on this machine, logs included, after an uneventful life."""
        shutil.rmtree(self.folder, ignore_errors=True)
