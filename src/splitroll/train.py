"""GRPO end to end: a task's questions, samples from a rollout, TRL's trainer, one record per step.

TRL and torch are imported where they are needed, so that a wrong configuration is told at once.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from splitroll.blocking import BlockingRollout
from splitroll.config import Config, Train, collecting, examine
from splitroll.config.rules import max_model_len
from splitroll.errors import ConfigError, Problem
from splitroll.groups import plan_groups
from splitroll.integrations.grpo import check_settings, sampling_params
from splitroll.model import ModelFacts
from splitroll.placement import check_devices
from splitroll.prompts import Tokenizer
from splitroll.report import StepRecord
from splitroll.tasks import Task, load_task
from splitroll.types import RouteKind

STEPS_FILE = "steps.jsonl"
MODEL_FOLDER = "model"

GRPO_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 24,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant",
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Where `splitroll train` departs from GRPOConfig's own defaults: a small model in float32 on one
machine, 4 questions x 8 samples for each step."""

_PATHS = {"--task": "train.task", "--num": "train.num", "--task-set": "train.task_set"}
"""Flags of `splitroll rollout` by the keys that mean the same here."""


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """Everything that was checked before anything starts.

    Attributes:
        args: TRL's GRPOConfig.
        out: the run's folder: steps.jsonl, and the trained model and tokenizer in model/.
    """

    config: Config
    facts: ModelFacts
    task: Task
    args: Any
    out: Path


def plan_training(
    source: Config | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    overwrite: bool = False,
) -> TrainPlan:
    """Check configuration, task, trainer settings and output folder; start nothing.

    Engines use the trainer's dtype unless `engine.dtype` says otherwise, so that their
    log-probabilities can be compared.

    Raises:
        ConfigError: with every problem found.
    """
    config, facts, problems = examine(source, overrides)
    with collecting(problems):
        check_devices(config)
    out = Path(config.train.out or "")
    with collecting(problems):
        _check_out(config.train.out, overwrite=overwrite)
    task = None
    with _renamed(problems, _PATHS.get):
        task = _load_task(config.train)
    with collecting(problems):
        _check_trl()
    args = None
    if not any(p.path.partition(".")[0] in ("train", "trl") for p in problems):
        with collecting(problems):
            args = _grpo_config(config.train, out)
    if args is not None:
        with _renamed(problems, lambda path: f"train.grpo.{path}"):
            check_settings(args)
        with collecting(problems):
            _check_batch(config.train, args)
    if args is not None and task is not None and facts is not None and not problems:
        with collecting(problems):
            _check_lengths(config, facts, task, args)
    if problems or args is None or task is None or facts is None:
        raise ConfigError(problems)
    return TrainPlan(_in_trainers_dtype(config, args), facts, task, args, out)


def train(
    plan: TrainPlan,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    on_start: Callable[[], None] = lambda: None,
    open_rollout: Callable[[Config], AbstractContextManager[Any]] = BlockingRollout,
) -> list[StepRecord]:
    """Train, writing a line for each step, then the model and the tokenizer.

    Args:
        on_step: called with each step's record, after it was written.
        on_start: called when the engines are up.
        open_rollout: makes the rollout, which starts when it is entered.

    Returns:
        The records of all steps.

    Raises:
        ConfigError: what only TRL knows to be wrong; nothing was started.
        SplitrollError: the engines failed.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    rollout = open_rollout(plan.config)
    records: list[StepRecord] = []
    with (plan.out / STEPS_FILE).open("w", encoding="utf-8") as file:

        def record(step: StepRecord) -> None:
            file.write(json.dumps(step.to_json()) + "\n")
            file.flush()
            records.append(step)
            on_step(step)

        trainer = _make_trainer(plan, rollout, record)
        with rollout:
            on_start()
            trainer.train(resume_from_checkpoint=plan.args.resume_from_checkpoint)
    trainer.save_model(str(plan.out / MODEL_FOLDER))
    return records


def step_record(
    step: int, logs: Mapping[str, Any], total_s: float, before: StepRecord | None = None
) -> StepRecord:
    """Return a step's record from what TRL logged of it and its wall time.

    A step that trains on samples of an earlier one (`num_iterations`, `steps_per_generation`) has
    no reward of its own, and the weight version of the one before.
    """
    routes = {kind.value: int(logs.get(f"splitroll/samples_{kind.value}", 0)) for kind in RouteKind}
    generate_s, prefill_s, transfer_s, decode_s, sync_s = (
        logs.get(f"splitroll/{phase}_s", 0.0)
        for phase in ("generate", "prefill", "transfer", "decode", "sync")
    )
    prefix = "splitroll/sync/"
    version = logs.get("splitroll/weight_version", before.weight_version if before else 0)
    return StepRecord(
        step=step,
        weight_version=int(version),
        reward=_number(logs.get("reward")),
        reward_std=_number(logs.get("reward_std")),
        loss=logs.get("loss"),
        logprob_gap_mean=logs.get("sampling/sampling_logp_difference/mean"),
        logprob_gap_max=logs.get("sampling/sampling_logp_difference/max"),
        samples=sum(routes.values()),
        tokens=int(logs.get("splitroll/tokens", 0)),
        **routes,
        generate_s=generate_s,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        decode_s=decode_s,
        sync_s=sync_s,
        sync_phases={
            name.removeprefix(prefix).removesuffix("_s"): value
            for name, value in logs.items()
            if name.startswith(prefix)
        },
        train_s=max(0.0, total_s - generate_s - sync_s),
        total_s=total_s,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _make_trainer(plan: TrainPlan, rollout: Any, on_step: Callable[[StepRecord], None]) -> Any:
    from datasets import Dataset
    from transformers import PrinterCallback, ProgressCallback
    from transformers.utils import logging

    from splitroll.integrations.trl import TrlBridge

    with _quiet():
        from trl import GRPOTrainer

    logging.disable_progress_bar()
    bridge = TrlBridge(rollout)
    rows = [{"prompt": row["messages"], "id": row["id"]} for row in plan.task.prompts]
    try:
        with _quiet():
            trainer = GRPOTrainer(
                model=plan.facts.path,
                reward_funcs=_reward(plan.task),
                args=plan.args,
                train_dataset=Dataset.from_list(rows),
                rollout_func=bridge.rollout_func,
                callbacks=[bridge.callback, _recorder(on_step)],
            )
    except ValueError as exc:
        raise _refused_by_trl(exc) from exc
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    return trainer


def _reward(task: Task) -> Callable[..., list[float]]:
    def score(completions: Sequence[Any], id: Sequence[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [task.score(one, text) for one, text in zip(id, texts, strict=True)]

    score.__name__ = task.name
    return score


def _recorder(on_step: Callable[[StepRecord], None]) -> Any:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """Makes a record of every step from TRL's log of it."""

        begun = 0.0
        last: StepRecord | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                total_s = time.perf_counter() - self.begun
                self.last = step_record(state.global_step, logs, total_s, self.last)
                on_step(self.last)

    return Recorder()


def _load_task(section: Train) -> Task:
    settings = section.task_set
    if settings is None:
        settings = {"min_digits": 1, "max_digits": 1} if section.task == "products" else {}
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_task(section.task, section.num, section.seed, given)


def _check_out(out: str | None, *, overwrite: bool) -> None:
    if not out:
        hint = "give --out, or set it in the configuration"
        raise ConfigError([Problem("train.out", "nothing", "a folder", hint)])
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ConfigError([Problem("train.out", f"{out}: a file", "a folder", "choose another")])
    if (folder / STEPS_FILE).exists() and not overwrite:
        hint = "choose another, or give --overwrite"
        raise ConfigError([Problem("train.out", f"{out}: an earlier run", "a new folder", hint)])


def _check_trl() -> None:
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        found, hint = f"no package {' and '.join(missing)}", "pip install splitroll[train]"
        raise ConfigError([Problem("trl", found, "it installed", hint)])


def _grpo_config(section: Train, out: Path) -> Any:
    """Return TRL's GRPOConfig; its names and kinds of values were checked before."""
    with _quiet():
        from trl import GRPOConfig
    settings = {
        **GRPO_DEFAULTS,
        **section.grpo,
        "output_dir": str(out / "checkpoints"),
        "max_steps": section.steps,
        "seed": section.seed,
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    try:
        with _quiet():
            return GRPOConfig(**settings)
    except (ValueError, TypeError, ImportError) as exc:
        raise _refused_by_trl(exc) from exc


def _refused_by_trl(exc: Exception) -> ConfigError:
    hint = "correct it"
    return ConfigError([Problem("train.grpo", str(exc), "what TRL's GRPOConfig takes", hint)])


def _check_batch(section: Train, args: Any) -> None:
    questions = args.generation_batch_size // args.num_generations
    if section.num < questions:
        allowed = f"{questions} or more, the questions of one generation batch"
        hint = "raise it, or lower train.grpo.per_device_train_batch_size"
        raise ConfigError([Problem("train.num", str(section.num), allowed, hint)])


def _check_lengths(config: Config, facts: ModelFacts, task: Task, args: Any) -> None:
    plan_groups(
        task.prompts,
        n=1,
        sampling=sampling_params(args, ()),
        tokenizer=Tokenizer(facts.path),
        max_model_len=max_model_len(config, facts),
        vocab_size=facts.vocab_size,
    )


def _in_trainers_dtype(config: Config, args: Any) -> Config:
    if "dtype" in config.engine:
        return config
    dtype = str((args.model_init_kwargs or {}).get("dtype", "float32")).removeprefix("torch.")
    return config.model_copy(update={"engine": {**config.engine, "dtype": dtype}})


@contextmanager
def _renamed(problems: list[Problem], rename: Callable[[str], str | None]) -> Iterator[None]:
    """Add the problems of a ConfigError to a list, under other paths."""
    found: list[Problem] = []
    with collecting(found):
        yield
    problems += [replace(problem, path=rename(problem.path) or problem.path) for problem in found]


@contextmanager
def _quiet() -> Iterator[None]:
    """TRL warns that rollout_func is experimental and that it does not know this vLLM, which it is
    not to use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TRL currently supports vLLM")
        warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
        yield
