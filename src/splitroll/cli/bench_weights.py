"""`splitroll bench-weights`: weight updates against the trainer's writing and vLLM's reload."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from rich.console import Console
from rich.table import Table

from splitroll.bench.weights import measure, report
from splitroll.config import load_checked


async def run(args: argparse.Namespace) -> int:
    config, _ = load_checked(args.config, args.overrides)
    progress = Console(stderr=True)

    def on_round(engines: int, transport: str, index: int, seconds: float) -> None:
        name = f"round {index + 1}" if index >= 0 else "warm-up"
        progress.print(f"{engines} engines, {transport}, {name}: {seconds:.3f} s")

    measured = await measure(config, args.rounds, on_round)
    result = report(measured, len(os.sched_getaffinity(0)))
    if args.json:
        args.stdout.write(json.dumps(result) + "\n")
    else:
        # Wide where nobody's terminal sets the width: cut columns help nobody.
        width = None if args.stdout.isatty() else 160
        _print(Console(file=args.stdout, width=width), result)
    return 0


def _print(console: Console, result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['nbytes'] / 1e6:.0f} MB to colocated engines on {result['cores']} cores: "
        f"median ms of {result['rounds']} rounds"
    )
    columns = ("write", "reload", "our load", "push", "bound", "push/bound", "pause", "load")
    for column in ("engines", *columns, "pause/load", "disk", "path", "within"):
        table.add_column(column, justify="right")
    for engines, one in result["fleets"].items():
        median, push = one["median"], one["rounds"]["push_s"]
        table.add_row(
            engines,
            _ms(median["write_s"]),
            _ms(median["reload_s"]),
            _ms(median["load_s"]),
            f"{_ms(median['push_s'])} ({_ms(min(push))}-{_ms(max(push))})",
            _ms(one["bound_s"]),
            f"{one['push_to_bound']:.2f}",
            _ms(median["pushed_pause_s"]),
            _ms(median["pushed_load_s"]),
            f"{one['pause_to_load']:.2f}",
            _ms(median["disk_s"]),
            _ms(median["path_s"]),
            "yes" if one["within_bounds"] else "no",
        )
    console.print(table)
    console.print(
        "write: the bytes to shared memory, once. reload: vLLM's own, from files in memory, on "
        "one engine while the others idle; our load: the same files through our loader. push: "
        "update_weights through shared memory, to all; its pause and its load. disk: "
        "update_weights through files. path: files written to memory, then vLLM's own reload on "
        "all engines at once."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
