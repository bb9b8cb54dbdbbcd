"""GRPO on real engines: the weights that were trained are the weights that generate."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitroll.report import read_steps

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.fixture
def arguments(tiny_config: dict[str, Any], chat_model: Path, tmp_path: Path) -> list[str]:
    grpo = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16,
            "learning_rate": 1e-3, "use_cpu": True}  # fmt: skip
    config = {
        **tiny_config,
        "model": str(chat_model),
        "disaggregation": {"decode_replicas": 1},
        "dispatch": {"policy": "static"},
        "train": {"num": 8, "grpo": grpo},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "splitroll", "train", "--config", str(tmp_path / "c.yaml"),
            "--out", str(tmp_path / "run"), "--json"]  # fmt: skip


def test_engines_follow_the_trainer_step_by_step(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*arguments, "--steps", "3"], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 3
    steps = read_steps(tmp_path / "run" / "steps.jsonl")
    versions = [step.weight_version for step in steps]
    assert versions == list(range(versions[0], versions[0] + 3))
    for step in steps:
        assert (step.samples, step.split, step.shared, step.local) == (8, 2, 6, 0)
        assert step.logprob_gap_max is not None
        assert step.logprob_gap_max < 1e-3, "the engines do not have the trainer's weights"
        assert math.isfinite(step.reward)
        assert min(step.generate_s, step.sync_s, step.train_s) > 0
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert (tmp_path / "run" / "index.html").is_file()


@pytest.mark.soak
def test_a_terminated_run_ends_its_engines_and_keeps_its_steps(
    arguments: list[str], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*arguments, "--steps", "10000"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    file = tmp_path / "run" / "steps.jsonl"
    deadline = time.monotonic() + 200
    while not (file.exists() and file.read_text().count("\n") >= 2):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.terminate()  # Ray would end it with a crash report
    _, told = process.communicate(timeout=90)
    assert process.returncode == 130, told
    assert "interrupted" in told
    assert [step.step for step in read_steps(file)][:2] == [1, 2]
