"""`splitroll bench`: a split against a colocated fleet on the same groups, in turn."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from splitroll.bench.compare import Workload, compare, report
from splitroll.config import load_checked


async def run(args: argparse.Namespace) -> int:
    config, _ = load_checked(args.config, args.overrides)
    workload = Workload(args.groups, args.n, args.prompt_tokens, args.max_tokens)
    progress = Console(stderr=True)

    def on_round(name: str, index: int, wall_s: float) -> None:
        progress.print(f"{'warm-up' if index == 0 else f'round {index}'}: {name} {wall_s:.2f} s")

    result = report(workload, await compare(config, workload, args.rounds, on_round))
    if args.json:
        args.stdout.write(json.dumps(result) + "\n")
    else:
        _print(Console(file=args.stdout), result)
    return 0


def _print(console: Console, result: dict[str, Any]) -> None:
    shape = result["workload"]
    table = Table(
        title=f"{shape['groups']} groups x {shape['n']} samples, {shape['prompt_tokens']} tokens "
        f"in, {shape['max_tokens']} out, {result['rounds']} rounds"
    )
    for column in ("fleet", "median s", "min s", "max s", "KV moved", "handoffs", "routes"):
        table.add_column(column)
    for name, one in result["alternatives"].items():
        table.add_row(
            name,
            f"{one['median_s']:.2f}",
            f"{min(one['wall_s']):.2f}",
            f"{max(one['wall_s']):.2f}",
            f"{one['kv_bytes'] / 1e6:.1f} MB",
            str(one["handoffs"]),
            ", ".join(f"{count} {kind}" for kind, count in one["routes"].items()),
        )
    console.print(table)
    ratio = result["ratio_split_to_colocated"]
    verdict = "slower" if ratio["median"] > 1 else "faster"
    console.print(
        f"split / colocated: median {ratio['median']:.2f} (min {ratio['min']:.2f}, max "
        f"{ratio['max']:.2f}): the split is {verdict} on this workload"
    )
