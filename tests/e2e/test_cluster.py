"""A fleet in a Ray cluster of several nodes, all on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitroll import Rollout
from two_nodes import generated, prompts

pytestmark = pytest.mark.engines

SCRIPT = Path(__file__).parents[1] / "simulated_nodes.py"


def ran(*command: str) -> dict[str, Any]:
    """Return what a script reports; its Ray cluster must not be the one of this process."""
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            out, err = running.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            running.terminate()  # so that it ends its cluster
            out, err = running.communicate(timeout=60)
    for line in out.splitlines():
        if line.startswith("REPORT"):
            return dict(json.loads(line.removeprefix("REPORT")))
    pytest.fail(out[-3000:] + err[-6000:])


@pytest.mark.timeout(500)
async def test_engines_follow_the_nodes_of_a_cluster(
    tiny_model: Path, split_rollout: Rollout
) -> None:
    report = ran(str(SCRIPT), str(tiny_model))
    # The address by which peers reach it, the node of the plan, and the node that its actor is on.
    prefill, second, late = ["127.0.0.2"] * 3, ["127.0.0.3"] * 3, ["127.0.0.5"] * 3
    third = ["::1", "127.0.0.4", "127.0.0.4"]
    opened = report["opened"]
    assert opened.pop("prefill-0") == prefill
    assert sorted(opened.values()) == [second, third], "spread over the nodes with the label"
    after = report["after_a_death"]
    assert after.pop("prefill-0") == prefill
    assert list(after.values()) == [second, second]
    assert report["joined"] == ["decode-2"]
    assert report["after_one_more"]["decode-2"] == late
    assert all(report["same"]), report["same"]
    assert report["decoding"] == ["decode-0", "decode-1", "decode-2"]
    assert await generated(split_rollout, prompts(12)) == report["tokens"]
