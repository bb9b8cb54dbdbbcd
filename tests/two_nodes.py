"""Runs in one of two network namespaces, as the driver: a prefill engine here, a decode engine in
the other, and the link between them cut for a while.

    python two_nodes.py MODEL RAY_ADDRESS LINK SECONDS BACKEND
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from typing import Any

from splitroll import Group, Prompt, Rollout, SamplingParams

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


def prompts(count: int) -> list[Prompt]:
    draw = random.Random(5)
    lengths = [draw.choice((20, 64, 200, 700)) for _ in range(count)]
    return [
        Prompt(str(i), tuple(draw.choices(range(10, 4000), k=k))) for i, k in enumerate(lengths)
    ]


async def generated(rollout: Rollout, asked: list[Prompt]) -> dict[str, list[list[int]]]:
    found = {}
    async for group in rollout.generate(asked, n=2, sampling=GREEDY):
        assert isinstance(group, Group)
        found[group.id] = [list(sample.token_ids) for sample in group.samples]
    return found


async def cut(link: str, seconds: float) -> None:
    for delay_s, state in ((1.0, "down"), (seconds, "up")):
        await asyncio.sleep(delay_s)
        command = ["ip", "link", "set", link, state]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=20)


async def main(model: str, address: str, link: str, seconds: float, backend: str) -> None:
    config: dict[str, Any] = {
        "model": model,
        "engine": {
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 * 1024**2,
            "max_model_len": 2048,
        },
        "ray": {"address": address},
        "dispatch": {"policy": "static", "roles": "strict"},
        "disaggregation": {
            "transfer_backend": backend,
            "prefill": [{"nodes": {"resource": "here"}}],
            "decode": [{"nodes": {"labels": {"side": "there"}}}],
        },
    }
    async with Rollout.open(config) as rollout:
        specs = {name: member.spec for name, member in rollout.fleet.members.items()}
        undisturbed = await generated(rollout, prompts(40))
        cutting = asyncio.create_task(cut(link, seconds))
        begun_s = time.monotonic()
        meanwhile = await generated(rollout, prompts(40))
        took_s = time.monotonic() - begun_s
        await cutting
        afterwards = await generated(rollout, prompts(40))
        stats = rollout.dispatcher.stats
        report = {
            "hosts": {name: spec.host for name, spec in specs.items()},
            "nodes": len({spec.node_id for spec in specs.values()}),
            "handoffs": stats.handoffs,
            "took_s": took_s,
            "same": undisturbed == meanwhile == afterwards,
            "groups": len(meanwhile),
            "tokens": undisturbed,
        }
    print("REPORT", json.dumps(report), flush=True)


if __name__ == "__main__":
    _, folder, where, interface, cut_s, kv_backend = sys.argv
    asyncio.run(main(folder, where, interface, float(cut_s), kv_backend))
