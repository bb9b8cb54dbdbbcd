"""The command line on real engines, as its users call it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SUMMARY_KEYS = {
    "groups", "samples", "failed", "prompt_tokens", "completion_tokens", "wall_s", "handoffs",
    "kv_bytes", "routes", "engines",
}  # fmt: skip


@pytest.fixture
def arguments(tiny_config: dict[str, Any], tmp_path: Path) -> list[str]:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_config))
    rows = [{"id": f"q{i}", "prompt_token_ids": [10 + i] * (20 + i)} for i in range(12)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        sys.executable, "-m", "splitroll", "rollout", "--config", str(tmp_path / "c.yaml"),
        "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "s.jsonl"), "--n", "4",
        "--max-tokens", "16", "--set", "disaggregation.decode_replicas=1", "dispatch.policy=static",
        "--json",
    ]  # fmt: skip


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=200, check=False)


def fleet_files() -> set[str]:
    return {
        path.name
        for pattern in ("splitroll-*", "vllm_dist_*")
        for path in Path(tempfile.gettempdir()).glob(pattern)
    }


def test_a_rollout_prints_one_object_and_writes_every_sample(
    arguments: list[str], tmp_path: Path
) -> None:
    left_before = fleet_files()
    done = run(arguments)
    assert done.returncode == 0, done.stderr
    assert fleet_files() == left_before
    summary = json.loads(done.stdout)
    assert set(summary) >= SUMMARY_KEYS
    assert (summary["groups"], summary["samples"], summary["failed"]) == (12, 48, 0)
    assert summary["routes"] == {"split": 12, "shared": 36, "local": 0, "migrated": 0}
    assert summary["handoffs"] == 12
    assert summary["kv_bytes"] > 0
    engines = {engine["name"]: engine for engine in summary["engines"]}
    assert engines["prefill-0"]["prefills"] == 12
    assert engines["decode-0"]["decodes"] == 48
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert {(row["id"], row["sample"]) for row in rows} == {
        (f"q{i}", j) for i in range(12) for j in range(4)
    }
    for row in rows:
        assert len(row["token_ids"]) == len(row["logprobs"]) >= 1
        assert row["finish_reason"] in ("stop", "length")
        assert row["weight_version"] == 0
    again = run(arguments)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


def test_an_interrupted_rollout_resumes_to_the_same_file(
    arguments: list[str], tmp_path: Path
) -> None:
    slow = [*arguments, "--max-tokens", "80", "--set", "engine.max_num_seqs=4"]
    job = subprocess.Popen(slow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "s.jsonl.partial"
    end = time.monotonic() + 150
    while time.monotonic() < end and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 130, stderr
    assert not (tmp_path / "s.jsonl").exists()
    kept = len(partial.read_text().splitlines())
    assert 0 < kept < 48
    resumed = run([*slow, "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout)
    assert summary["samples"] == 48
    assert summary["resumed"] == kept // 4
    assert sum(engine["decodes"] for engine in summary["engines"]) == 48 - kept
    assert sorted(os.listdir(tmp_path)) == ["c.yaml", "p.jsonl", "s.jsonl", "s.jsonl.run"]


def test_check_reports_every_pair_and_the_weights(
    tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_config))
    command = [sys.executable, "-m", "splitroll", "check", "--config", str(tmp_path / "c.yaml")]
    done = run([*command, "--json", "--weights"])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    weights = report["weights"]
    assert (weights["version"], weights["engines"], weights["parameters"]) == (1, 3, 39)
    assert weights["max_logprob_gap"] < 1e-4
    names = ("prefill-0", "decode-0", "decode-1")
    pairs = [(pair["prefill"], pair["decode"]) for pair in report["pairs"]]
    assert sorted(pairs) == sorted(itertools.permutations(names, 2))
    for pair in report["pairs"]:
        assert pair["ok"]
        assert pair["kv_bytes"] == pair["kv_bytes_needed"] > 0
        assert pair["recomputed_tokens"] == 0
        assert pair["max_logprob_gap"] < 1e-4


@pytest.mark.soak
def test_a_colocated_rollout_has_the_same_output(arguments: list[str], tmp_path: Path) -> None:
    done = run([*arguments, "--set", "disaggregation.enabled=false", "colocated.replicas=1"])
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert set(summary) >= SUMMARY_KEYS
    assert summary["routes"] == {"split": 0, "shared": 0, "local": 48, "migrated": 0}
    assert (summary["handoffs"], summary["kv_bytes"]) == (0, 0)
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 48
