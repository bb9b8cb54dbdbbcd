"""Runs as a driver of its own: a Ray cluster of several nodes on this machine, each at an address
of its own, and a fleet over them while one node dies and another appears.

    python simulated_nodes.py MODEL
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from splitroll import Rollout
from splitroll.fleet.fleet import MemberState
from two_nodes import generated, prompts

HEAD, SECOND, THIRD, LATE = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
"""Not 127.0.0.1, for which Ray takes the machine's own address."""
SHARED = {THIRD: "::1"}
"""The third node is to be reached by another address than the one that Ray knows, over IPv6."""
RECOVERY_S = 150.0


def config(model: str, address: str) -> dict[str, Any]:
    return {
        "model": model,
        "engine": {
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 * 1024**2,
            "max_model_len": 2048,
        },
        "ray": {"address": address},
        "network": {"addresses": SHARED},
        "devices": {"placement": "spread"},
        "dispatch": {"policy": "round_robin", "roles": "strict"},
        "disaggregation": {
            "prefill": [{"nodes": {"resource": "prompts"}}],
            "decode": [{"replicas": 2, "nodes": {"labels": {"side": "decode"}}}],
        },
    }


def where(rollout: Rollout) -> dict[str, Any]:
    """Return of every engine that serves: its address, and the nodes of its plan and its actor."""
    of_node = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    actors = {actor.name: actor.node_id for actor in list_actors() if actor.state == "ALIVE"}
    found = {}
    for name, member in rollout.fleet.members.items():
        if member.state is MemberState.READY and member.engine is not None:
            (mine,) = (node for actor, node in actors.items() if f"-{name}-" in actor)
            planned = of_node[member.spec.node_id]
            found[name] = [member.spec.host, planned, of_node[mine]]
    return found


async def until_restarted(rollout: Rollout, name: str) -> list[dict[str, list[list[int]]]]:
    """Generate until an engine is seen to have died, and again once it has been started again."""
    member, results = rollout.fleet.members[name], []
    async with asyncio.timeout(RECOVERY_S):
        while member.state is MemberState.READY:
            results.append(await generated(rollout, prompts(12)))
        while member.state is not MemberState.READY:
            await asyncio.sleep(0.5)
        results.append(await generated(rollout, prompts(12)))
    return results


async def main(model: str) -> None:
    node = {"num_cpus": 1, "object_store_memory": 100_000_000}
    head = {**node, "node_ip_address": HEAD, "resources": {"prompts": 1}}
    labels = {"labels": {"side": "decode"}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**node, **labels, node_ip_address=SECOND)
        third = cluster.add_node(**node, **labels, node_ip_address=THIRD)
        report: dict[str, Any] = {}
        async with Rollout.open(config(model, cluster.address)) as rollout:
            report["opened"] = where(rollout)
            first = await generated(rollout, prompts(12))
            (lost,) = (name for name, (_, node, _) in report["opened"].items() if node == THIRD)
            generating = asyncio.create_task(until_restarted(rollout, lost))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(cluster.remove_node, third, False)
            same = [tokens == first for tokens in await generating]
            report["after_a_death"] = where(rollout)
            cluster.add_node(**node, **labels, node_ip_address=LATE)
            joined = (await rollout.scale(decode=3)).joined
            report["joined"] = [one.name for one in joined]
            report["after_one_more"] = where(rollout)
            same.append(await generated(rollout, prompts(12)) == first)
            done = await rollout.activity()
            report["decoding"] = sorted(engine.name for engine in done.engines if engine.decodes)
            report["same"] = same
            report["tokens"] = first
        print("REPORT", json.dumps(report), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    asyncio.run(main(sys.argv[1]))
