"""`splitroll train`: GRPO on a task, with a line for each step, the trained model and a report."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console

from splitroll.config.pools import described
from splitroll.report import LiveTable, StepRecord, quarter_means, write_report
from splitroll.train import MODEL_FOLDER, TrainPlan, plan_training, train


def run(args: argparse.Namespace) -> int:
    plan = plan_training(args.config, _overrides(args), overwrite=args.overwrite)
    console = Console(stderr=True)
    console.print("starting the engines and proving every KV handoff between them ...", style="dim")
    begun = time.monotonic()

    def started() -> None:
        console.print(f"engines up and proven: {time.monotonic() - begun:.1f} s", style="dim")

    with LiveTable(total_steps=plan.config.train.steps, console=console) as table:
        records = train(plan, on_step=table.add, on_start=started)
    summary = _summary(plan, records, time.monotonic() - begun)
    write_report(plan.out, records, title=f"GRPO on {plan.task.name}", facts=_facts(plan))
    if args.json:
        args.stdout.write(json.dumps(summary) + "\n")
    else:
        console.print(f"trained model: {summary['model']}; report: {plan.out / 'index.html'}")
    return 0


def _overrides(args: argparse.Namespace) -> list[str]:
    """Return the overrides; a flag is one, and wins over --set."""
    flags = {"train.out": args.out, "train.steps": args.steps, "train.seed": args.seed}
    given = [f"{path}={json.dumps(value)}" for path, value in flags.items() if value is not None]
    return [*args.overrides, *given]


def _summary(plan: TrainPlan, records: list[StepRecord], wall_s: float) -> dict[str, Any]:
    first, last = quarter_means(records)
    return {
        "steps": len(records),
        "reward_first_quarter": first,
        "reward_last_quarter": last,
        "weight_version": records[-1].weight_version if records else None,
        "wall_s": round(wall_s, 3),
        "out": str(plan.out),
        "model": str(plan.out / MODEL_FOLDER),
    }


def _facts(plan: TrainPlan) -> dict[str, str]:
    config, section = plan.config, plan.config.train
    batch = plan.args.generation_batch_size
    return {
        "model": plan.facts.name,
        "task": f"{plan.task.name}, {section.num} questions, seed {section.seed}",
        "engines": f"{described(config)}; {config.engine['dtype']}",
        "generation": f"{batch} samples, {plan.args.num_generations} for each question, "
        f"up to {plan.args.max_completion_length} tokens",
        "optimizer": f"{plan.args.optim}, learning rate {plan.args.learning_rate:g}",
    }
