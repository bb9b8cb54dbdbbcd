"""`splitroll simulate`: whole rollout steps on simulated fleets, against their lower bound."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from splitroll.bench.workloads import WORKLOADS
from splitroll.dispatch.cost import StepCost
from splitroll.dispatch.policy import POLICIES
from splitroll.errors import ConfigError, Problem
from splitroll.sim.study import MEASURED, Study
from splitroll.sim.study import run as run_study


def run(args: argparse.Namespace) -> int:
    study = Study(
        workload=_one_of("--workload", args.workload, tuple(WORKLOADS)),
        policy=_one_of("--policy", args.policy, tuple(POLICIES)),
        samples=_at_least("--samples", args.samples, 1),
        per_engine=args.per_engine and _at_least("--per-engine", args.per_engine, 1),
        seed=args.seed,
        cost=MEASURED if args.cost is None else _cost(args.cost),
        segment_tokens=args.segment_tokens or None,
        oracle=args.oracle,
    )
    fleets = [_at_least("--engines", engines, 2) for engines in args.engines]
    progress = Console(stderr=True)
    rows = run_study(
        study,
        fleets,
        lambda row: progress.print(f"{row['engines']} engines: simulated in {row['wall_s']:.1f} s"),
    )
    if args.json:
        result = {"workload": study.workload, "policy": study.policy, "fleets": rows}
        args.stdout.write(json.dumps(result) + "\n")
    else:
        width = None if args.stdout.isatty() else 160
        _print(Console(file=args.stdout, width=width), study, rows)
    return 0


def _print(console: Console, study: Study, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{study.workload}, {study.policy}: one step on a virtual clock")
    columns = ("engines", "samples", "makespan s", "work s", "longest s", "efficiency")
    shares = ("idle", "recomputed", "batches")
    for column in (*columns, *shares, "moves", "decision us", "decisions/s", "wall s"):
        table.add_column(column, justify="right")
    table.add_column("routes")
    for row in rows:
        table.add_row(
            str(row["engines"]),
            str(row["samples"]),
            *(f"{row[key]:.1f}" for key in ("makespan_s", "work_bound_s", "longest_bound_s")),
            f"{row['efficiency']:.1%}",
            *(f"{row['shares'][share]:.1%}" for share in shares),
            str(row["moves"]),
            *(f"{row[key]:.0f}" for key in ("decision_us", "decisions_per_s")),
            f"{row['wall_s']:.1f}",
            ", ".join(f"{count} {kind}" for kind, count in row["routes"].items()),
        )
    console.print(table)
    console.print(
        "efficiency: the lower bound, the larger of work (each prompt computed once, each token at "
        "the best batch efficiency seen, over all engines) and longest (the longest sequence "
        "alone), over the makespan. Of the engines' time: idle; recomputed, prompt tokens that an "
        "engine had computed before; batches, steps less efficient than the best one."
    )


def _cost(text: str) -> StepCost:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 5 or min(values) < 0 or values[0] <= 0:
        allowed = "five numbers: step,sequence,context,token,pair in seconds"
        raise ConfigError([Problem("--cost", repr(text), allowed, "step must be above 0")])
    return StepCost(*values)


def _one_of(flag: str, asked: str, known: tuple[str, ...]) -> str:
    if asked not in known:
        raise ConfigError([Problem(flag, repr(asked), ", ".join(known), "choose one of these")])
    return asked


def _at_least(flag: str, asked: int, least: int) -> int:
    if asked < least:
        raise ConfigError([Problem(flag, str(asked), f"{least} or more", "ask for more")])
    return asked
