"""An engine's place in the Ray cluster: a placement group of its own, on exact devices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from splitroll.engines.arguments import EngineArguments
from splitroll.errors import EngineStartError
from splitroll.placement import EngineSpec

NAMESPACE = "splitroll"
_MAX_CONCURRENCY = 10_000
"""Calls that an actor runs at once; the dispatcher bounds them long before this."""
_RESERVE_TIMEOUT_S = 60.0
_WAIT_S = 1.0
_NODE_LABEL = "ray.io/node-id"
_LEAVE_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""vLLM's processes end with their parents by themselves; Python's resource tracker must outlive
them all (`tracker`)."""
_A_LITTLE = {"memory": 1024}
"""A bundle must ask for something; threads and cores are placed by us."""

Bundle = dict[str, float]


class Place:
    """What an engine holds of the cluster until it is released."""

    def __init__(self, spec: EngineSpec, name: str, group: PlacementGroup) -> None:
        self._spec = spec
        self._name = name
        self._group = group
        self.is_held = True

    @classmethod
    async def reserve(cls, spec: EngineSpec, name: str) -> Place:
        """Wait until the cluster has reserved an engine's nodes and devices; cancelling this gives
        them back.

        Raises:
            EngineStartError: they are not free.
        """
        asked, nodes = bundles(spec)
        labels = [{_NODE_LABEL: node} for node in nodes]
        group = placement_group(asked, strategy="PACK", name=name, bundle_label_selector=labels)
        place = cls(spec, name, group)
        try:
            async with asyncio.timeout(_RESERVE_TIMEOUT_S):
                # Not `ready()`, which starts a worker process on the node to tell.
                while not await asyncio.to_thread(group.wait, _WAIT_S):
                    await asyncio.to_thread(_check_alive, spec.name, nodes)
        except (TimeoutError, RayError) as exc:
            place.release()
            why = str(exc) or f"not free within {_RESERVE_TIMEOUT_S:g} s"
            raise EngineStartError(spec.name, f"its place {asked} on nodes {nodes}: {why}") from exc
        except BaseException:
            place.release()
            raise
        return place

    def options(self, arguments: EngineArguments) -> dict[str, Any]:
        """Return Ray's options that pin the engine's actor to its place."""
        return {
            "name": self._name,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            # The ranks of an engine on several nodes are actors of their own, in the other bundles.
            "num_gpus": 0 if self._spec.shares else len(self._spec.gpus),
            "max_restarts": 0,
            "max_concurrency": _MAX_CONCURRENCY,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=0
            ),
            "runtime_env": {"env_vars": {**arguments.env, **_LEAVE_CHILDREN}},
        }

    def release(self) -> None:
        """Give the place back; whatever is in it ends."""
        self.is_held = False
        if ray.is_initialized():
            with contextlib.suppress(RayError, ValueError):
                remove_placement_group(self._group)


def _check_alive(engine: str, nodes: Sequence[str]) -> None:
    """
    Raises:
        EngineStartError: one of these nodes is gone: nobody is to wait for it.
    """
    gone = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}.intersection(nodes)
    if gone:
        raise EngineStartError(engine, f"its node {', '.join(sorted(gone))} is gone")


def bundles(spec: EngineSpec) -> tuple[list[Bundle], list[str]]:
    """Return what an engine's placement group asks for, and the node of each bundle.

    The actor is in the first. An engine on several nodes has a bundle of one GPU for every rank
    besides: vLLM's Ray executor wants exactly as many (vllm 0.32, `v1/executor/ray_utils.py`).
    """
    if not spec.shares:
        gpus = {"GPU": float(len(spec.gpus))} if spec.gpus else {}
        return [{**_A_LITTLE, **gpus}], [spec.node_id]
    ranks = [share.node_id for share in spec.shares for _ in share.gpus]
    return [dict(_A_LITTLE), *({"GPU": 1.0} for _ in ranks)], [spec.node_id, *ranks]
