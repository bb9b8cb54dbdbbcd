"""`splitroll train`: its settings checked at once, and a run on a rollout without engines."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL imports vLLM, which warns about itself
    import trl.trainer.grpo_trainer  # noqa: F401

from transformers import AutoModelForCausalLM, AutoTokenizer

from fake_rollout import FakeRollout
from splitroll.cli import main
from splitroll.config.grpo import grpo_fields, grpo_problems
from splitroll.errors import ConfigError
from splitroll.report import StepRecord, read_steps
from splitroll.train import MODEL_FOLDER, STEPS_FILE, plan_training, step_record, train


def settings(model: Path, out: Path, **section: Any) -> dict[str, Any]:
    grpo = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4,
            "use_cpu": True, **section.pop("grpo", {})}  # fmt: skip
    return {
        "model": str(model),
        "engine": {"dtype": "float32"},
        "train": {"out": str(out), "steps": 2, "num": 4, "grpo": grpo, **section},
    }


def paths(error: pytest.ExceptionInfo[ConfigError]) -> set[str]:
    return {problem.path for problem in error.value.problems}


def test_a_run_writes_every_step_and_the_trained_model(chat_model: Path, tmp_path: Path) -> None:
    plan = plan_training(settings(chat_model, tmp_path / "run", grpo={"learning_rate": 1e-3}))
    rollout = FakeRollout(chat_model)
    seen: list[StepRecord] = []
    records = train(plan, on_step=seen.append, open_rollout=lambda config: rollout)
    assert records == seen == read_steps(tmp_path / "run" / STEPS_FILE)
    assert [(r.step, r.weight_version, r.samples) for r in records] == [(1, 1, 4), (2, 2, 4)]
    for record in records:
        assert record.logprob_gap_max is not None
        assert record.logprob_gap_max < 1e-3
        assert (record.split, record.shared, record.local) == (2, 2, 0)
        assert record.sync_phases
        parts_s = record.generate_s + record.train_s + record.sync_s
        assert record.train_s == 0 or parts_s == pytest.approx(record.total_s)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / MODEL_FOLDER)
    final = rollout.pushes[-1]
    for name, parameter in trained.named_parameters():
        assert (parameter == final[name]).all()
    AutoTokenizer.from_pretrained(tmp_path / "run" / MODEL_FOLDER)
    with pytest.raises(ConfigError, match="--overwrite"):
        plan_training(settings(chat_model, tmp_path / "run"))
    plan_training(settings(chat_model, tmp_path / "run"), overwrite=True)


def test_all_problems_are_told_at_once_and_by_name(chat_model: Path) -> None:
    given = {
        "model": str(chat_model),
        "engine": {"block_sizee": 3},
        "train": {
            "task": "productz",
            "stps": 3,
            "grpo": {"learning_rate": "2e-5", "lerning_rate": 1, "seed": 2, "beta": True},
        },
    }
    with pytest.raises(ConfigError) as error:
        plan_training(given, ["train.steps=0"])
    assert paths(error) == {
        "engine.block_sizee", "train.task", "train.stps", "train.steps", "train.out",
        "train.grpo.learning_rate", "train.grpo.lerning_rate", "train.grpo.seed",
        "train.grpo.beta",
    }  # fmt: skip
    assert "write 2.0e-05" in str(error.value)


def test_what_the_bridge_and_trl_refuse_is_told_before_anything_starts(
    chat_model: Path, tmp_path: Path
) -> None:
    grpo = {"vllm_mode": "server", "generation_kwargs": {"num_beams": 2}, "top_p": 0.0}
    with pytest.raises(ConfigError) as error:
        plan_training(settings(chat_model, tmp_path, num=1, grpo=grpo))
    assert paths(error) == {
        "train.grpo.vllm_mode", "train.grpo.generation_kwargs.num_beams", "train.grpo.top_p",
        "train.num",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="divisible by num_generations"):
        plan_training(settings(chat_model, tmp_path, grpo={"num_generations": 3}))
    with pytest.raises(ConfigError, match="max_model_len"):
        plan_training(settings(chat_model, tmp_path, grpo={"max_completion_length": 5000}))


def test_the_engines_take_the_trainers_dtype_unless_told_otherwise(
    chat_model: Path, tmp_path: Path
) -> None:
    given = settings(chat_model, tmp_path)
    del given["engine"]
    assert plan_training(given).config.engine == {"dtype": "float32"}
    assert plan_training(given, ["engine.dtype=auto"]).config.engine == {"dtype": "auto"}


def test_fields_of_trl_are_read_without_importing_it() -> None:
    from dataclasses import fields

    from trl import GRPOConfig

    assert set(grpo_fields()) == {field.name for field in fields(GRPOConfig) if field.init}


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rate": 1}, {"min_p": None}, {"report_to": ["none"]}, {"top_k": 3},
        {"lr_scheduler_type": "cosine"}, {"generation_kwargs": {}}, {"bf16": None},
        {"trackio_static_space_id": False},
    ],
)  # fmt: skip
def test_kinds_of_values_that_fit(given: dict[str, Any]) -> None:
    assert list(grpo_problems(given)) == []


def test_a_step_on_earlier_samples_has_no_reward_of_its_own() -> None:
    first = step_record(1, {"loss": 0.5, "reward": 0.25, "splitroll/weight_version": 3.0}, 2.0)
    second = step_record(2, {"loss": 0.25, "splitroll/sync_s": 0.5}, 2.0, first)
    assert (second.weight_version, second.samples, second.train_s) == (3, 0, 1.5)
    assert math.isnan(second.reward)


def test_bad_input_to_the_command_is_status_2(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps(settings(chat_model, tmp_path)))
    given = ["train", "--config", str(tmp_path / "c.yaml"), "--steps", "0", "--seed", "-1"]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert "train.steps" in told
    assert "train.seed" in told
