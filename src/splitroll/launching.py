"""What a fleet is launched on: the cluster, the places of its engines, and what starts them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from splitroll.cluster import RayLauncher, open_cluster, take_inventory
from splitroll.config import Config
from splitroll.fleet.fleet import Fleet
from splitroll.handoff.backend import check_backend
from splitroll.model import ModelFacts
from splitroll.opening import backend_of
from splitroll.placement import LOOPBACK, EngineSpec, Node, left_over, place, shared_address
from splitroll.router.launcher import (
    ROUTER_SPEC,
    RouterLauncher,
    as_routed,
    is_routed,
    reserved,
)
from splitroll.scaling import PlaceMore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launching:
    """A launcher, and the fleet that it is for.

    Attributes:
        config: of the fleet; with a router, of the one engine that it then has.
        specs: its engines.
        address: of this host, as they reach it.
        elsewhere: returns the names of the fleet's processes that are on other hosts.
        place_more: finds places for engines that are to join; None where none can.
    """

    config: Config
    specs: tuple[EngineSpec, ...]
    launcher: RayLauncher | RouterLauncher
    address: str
    elsewhere: Callable[[Fleet], Sequence[str]]
    place_more: PlaceMore | None = None


@contextlib.asynccontextmanager
async def open_launching(config: Config, facts: ModelFacts) -> AsyncGenerator[Launching, None]:
    """Enter the cluster and place the engines; a router's endpoint is held before all else.

    Raises:
        ConfigError: they do not fit, or the router's port is taken.
    """
    fleet_id = os.urandom(4).hex()
    with reserved(config) as endpoint:
        async with open_cluster(config):
            nodes = await take_inventory(wants_gpus=config.devices.kind != "cpu")
            specs = place(config, nodes)
            check_backend(backend_of(config), specs)
            alone = all(spec.host == LOOPBACK for spec in specs)
            address = LOOPBACK if alone else shared_address(config, nodes[0])
            home = nodes[0].id
            _tell_left_over(specs, nodes)
            _tell_out_of_reach(config, home, specs)
            if is_routed(config):
                routers = RouterLauncher(config, facts, specs, fleet_id, endpoint)
                routed = as_routed(config)
                servers = _names_beyond(home, specs)
                yield Launching(routed, (ROUTER_SPEC,), routers, address, lambda fleet: servers)
            else:
                backend = backend_of(config)
                on_gpu = any(spec.gpus for spec in specs)
                ours = RayLauncher(config, facts, backend, fleet_id, on_gpu=on_gpu)

                def elsewhere(fleet: Fleet) -> Sequence[str]:
                    return _names_beyond(home, [m.spec for m in fleet.members.values()])

                yield Launching(config, specs, ours, address, elsewhere, ours.place_more)


def _tell_out_of_reach(config: Config, home: str, specs: Sequence[EngineSpec]) -> None:
    """Tell of engines to which weights cannot be pushed: who only samples may not mind."""
    transport, beyond = config.weights.transport, _names_beyond(home, specs)
    if transport in ("shm", "ipc") and beyond:
        log.warning(
            "weights.transport: %s ends at this host: to push weights to %s, use disk or nccl",
            transport,
            ", ".join(beyond),
        )


def _names_beyond(home: str, specs: Sequence[EngineSpec]) -> Sequence[str]:
    return [spec.name for spec in specs if spec.is_beyond(home)]


def _tell_left_over(specs: Sequence[EngineSpec], nodes: Sequence[Node]) -> None:
    """Tell of GPUs that no engine has."""
    if rest := left_over(specs, nodes):
        told = ", ".join(f"{count} on {address}" for address, count in rest.items())
        log.warning("GPUs that no engine has: %s", told)
