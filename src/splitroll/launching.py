"""What a fleet is launched on: the cluster, the places of its engines, and what starts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from splitroll.cluster import RayLauncher, open_cluster, take_inventory
from splitroll.config import Config
from splitroll.model import ModelFacts
from splitroll.opening import backend_of
from splitroll.placement import LOOPBACK, EngineSpec, place
from splitroll.router.launcher import (
    ROUTER_SPEC,
    RouterLauncher,
    as_routed,
    is_routed,
    reserved,
)


@dataclass(frozen=True, slots=True)
class Launching:
    """A launcher, and the fleet that it is for.

    Attributes:
        config: of the fleet; with a router, of the one engine that it then has.
        specs: its engines.
        address: of this host, as they reach it.
        elsewhere: names of the processes that are on other hosts.
    """

    config: Config
    specs: tuple[EngineSpec, ...]
    launcher: RayLauncher | RouterLauncher
    address: str
    elsewhere: tuple[str, ...]


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
            alone = len({spec.node_id for spec in specs} | {nodes[0].id}) == 1
            address = LOOPBACK if alone else nodes[0].address
            elsewhere = tuple(spec.name for spec in specs if spec.node_id != nodes[0].id)
            if is_routed(config):
                routers = RouterLauncher(config, facts, specs, fleet_id, endpoint)
                routed = as_routed(config)
                yield Launching(routed, (ROUTER_SPEC,), routers, address, elsewhere)
            else:
                backend = backend_of(config)
                ours = RayLauncher(config, facts, backend, fleet_id=fleet_id)
                yield Launching(config, specs, ours, address, elsewhere)
