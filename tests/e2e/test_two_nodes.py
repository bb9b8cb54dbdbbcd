"""A fleet over two nodes: each a network namespace with a Ray node of its own, joined by a link."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitroll import Rollout
from two_nodes import generated, prompts

pytestmark = pytest.mark.engines

HERE, THERE = "10.77.0.1", "10.77.0.2"
PORT = 6399
SCRIPT = Path(__file__).parents[1] / "two_nodes.py"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def may_make_namespaces() -> bool:
    name = f"sr-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.SubprocessError):
        return False
    ip("netns", "del", name)
    return True


def inside(namespace: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    return subprocess.run(
        ["ip", "netns", "exec", namespace, *command],
        env=env,
        text=True,
        capture_output=True,
        **options,
    )


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, str, str]]:
    """Yield (the first namespace, its end of the link, the cluster's address)."""
    if not may_make_namespaces():
        pytest.skip("network namespaces need root, and `ip` of iproute2")
    tag = f"{os.getpid() % 10000}"
    spaces, links = (f"sr-a{tag}", f"sr-b{tag}"), (f"sra{tag}", f"srb{tag}")
    with contextlib.ExitStack() as stack:
        for name in spaces:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(spaces, links, (HERE, THERE), strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        # Short: names of Unix sockets have a limit.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sr-"))
        ray = str(Path(sys.executable).with_name("ray"))
        stack.callback(end_processes, spaces)
        common = ("--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats")
        started = inside(
            spaces[0], ray, "start", "--head", f"--node-ip-address={HERE}", f"--port={PORT}",
            "--include-dashboard=false", '--resources={"here": 1}', *common,
            f"--temp-dir={folder}", timeout=120,
        )  # fmt: skip
        assert started.returncode == 0, started.stdout + started.stderr
        started = inside(
            spaces[1], ray, "start", f"--address={HERE}:{PORT}", f"--node-ip-address={THERE}",
            "--labels=side=there", *common, timeout=120,
        )  # fmt: skip
        assert started.returncode == 0, started.stdout + started.stderr
        yield spaces[0], links[0], f"{HERE}:{PORT}"


def end_processes(spaces: tuple[str, ...]) -> None:
    """End what runs in our namespaces, and only that."""
    for sign in ("-TERM", "-KILL"):
        for name in spaces:
            found = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20
            )
            for pid in found.stdout.split():
                subprocess.run(["kill", sign, pid], capture_output=True)
        time.sleep(2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["nixl", pytest.param("mooncake", marks=pytest.mark.soak)])
async def test_a_link_that_is_cut_for_ten_seconds_costs_no_sample(
    two_nodes: tuple[str, str, str],
    tiny_model: Path,
    split_rollout: Rollout,
    backend: str,
) -> None:
    space, link, address = two_nodes
    ran = inside(
        space, sys.executable, str(SCRIPT), str(tiny_model), address, link, "10", backend,
        timeout=500,
    )  # fmt: skip
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("REPORT")] or [""]
    assert line, ran.stdout[-3000:] + ran.stderr[-6000:]
    report = json.loads(line.removeprefix("REPORT"))
    assert report["hosts"] == {"prefill-0": HERE, "decode-0": THERE}
    assert report["nodes"] == 2
    assert report["groups"] == 40
    assert report["took_s"] > 10, "they were generated while the link was cut"
    assert report["same"], "every group is what it was before the link was cut"
    assert report["handoffs"] >= 80
    assert await generated(split_rollout, prompts(40)) == report["tokens"]
