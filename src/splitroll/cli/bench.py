"""`splitroll bench`: policies, and vllm-router over stock servers, on the same work in turn."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from splitroll.bench.compete import ALTERNATIVES, Course, compete, open_arena, report
from splitroll.bench.figures import makespan_figure, timeline_figure
from splitroll.bench.workloads import WORKLOADS
from splitroll.config import load_checked
from splitroll.errors import ConfigError, Problem

_DEFAULTS = ("engine.max_model_len=4096", f"engine.kv_cache_memory_bytes={1024**3}")
"""On CPU: room for the longest episodes, and for those of all sessions."""


_SHOWN = ("adaptive", "colocated", "static")
"""Whose engines are shown over time."""


async def run(args: argparse.Namespace) -> int:
    workloads = _chosen("--workload", args.workload, tuple(WORKLOADS))
    policies = _chosen("--policy", args.policy, ALTERNATIVES)
    if args.rounds < 1:
        raise ConfigError([Problem("--rounds", str(args.rounds), "1 or more", "ask for more")])
    config, _ = load_checked(args.config, [*_DEFAULTS, *args.overrides])
    progress = Console(stderr=True)

    def on_round(workload: str, name: str, index: int, wall_s: float) -> None:
        which = f"round {index}" if index else "warm-up"
        progress.print(f"{workload}, {which}: {name} {wall_s:.2f} s")

    results = []
    cores = sorted(os.sched_getaffinity(0))
    async with open_arena(config, policies, cores) as arena:
        for workload in workloads:
            course = await compete(arena, workload, args.rounds, on_round)
            results.append(report(course))
            if args.out:
                _save(Path(args.out), course, results)
            if not args.json:
                _print(Console(file=args.stdout), results[-1])
    if args.json:
        args.stdout.write(json.dumps({"workloads": results}) + "\n")
    return 0


def _save(folder: Path, course: Course, results: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "bench.json"
    merged = merge(json.loads(file.read_text())["workloads"] if file.exists() else [], results)
    file.write_text(json.dumps({"workloads": merged}, indent=1) + "\n")
    (folder / "makespans.png").write_bytes(makespan_figure(merged))
    shown = {
        name: one.last
        for name, one in course.measured.items()
        if one.last is not None and one.last.spans and name in _SHOWN
    }
    if shown:
        figure = timeline_figure(course.workload, shown)
        (folder / f"timeline-{course.workload}.png").write_bytes(figure)


def merge(earlier: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest result of every workload, in their usual order: a comparison of hours can
    be made in parts."""
    newest = {one["workload"]: one for one in [*earlier, *results]}
    return [newest[name] for name in WORKLOADS if name in newest]


def _chosen(flag: str, asked: list[str], known: tuple[str, ...]) -> list[str]:
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ConfigError([Problem(flag, repr(unknown[0]), ", ".join(known), "choose of these")])
    return list(dict.fromkeys(asked)) or list(known)


def _print(console: Console, result: dict[str, Any]) -> None:
    bound = result["lower_bound_s"]
    title = f"{result['workload']}: makespan of {result['rounds']} rounds"
    table = Table(title=title if bound is None else f"{title}, lower bound {bound:.2f} s")
    for column in ("alternative", "median s", "min s", "max s", "to adaptive", "to bound"):
        table.add_column(column, justify="left" if column == "alternative" else "right")
    table.add_column("routes")
    for name, one in sorted(result["alternatives"].items(), key=lambda item: item[1]["median_s"]):
        ratios = [f"{one[key]:.2f}" if key in one else "" for key in ("to_adaptive", "to_bound")]
        seconds = [f"{one[key]:.2f}" for key in ("median_s", "min_s", "max_s")]
        routes = ", ".join(f"{count} {kind}" for kind, count in one["routes"].items())
        table.add_row(name, *seconds, *ratios, routes)
    console.print(table)
