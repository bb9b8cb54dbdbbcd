"""`splitroll check`: start the fleet and report the proof of every prefill/decode pair, and, on
request, that of a weight update."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from splitroll.cli import EXIT_BAD_INPUT, EXIT_FAILED
from splitroll.cli.display import Display
from splitroll.config import load_config
from splitroll.errors import ConfigError, ProofError, SplitrollError
from splitroll.fleet.prove import PairProof
from splitroll.ports import fleet_ports
from splitroll.rollout import Rollout
from splitroll.weight_proof import prove_weights

_WEIGHT_COLUMNS = ("version", "engines", "parameters", "mbytes", "total_s", "max_logprob_gap")
_PORT_COLUMNS = ("address", "port", "loopback", "purpose")


async def run(args: argparse.Namespace) -> int:
    report: dict[str, Any] = {"ok": False, "engines": [], "pairs": [], "problem": None}
    status = EXIT_FAILED
    display = Display()
    try:
        verify = ["weights.verify=full"] if args.weights else []
        config = load_config(args.config, [*args.overrides, *verify])
        with display.showing():
            async with Rollout.open(config, on_state=display.engines) as rollout:
                report["engines"] = [_engine(engine.info) for engine in rollout.fleet.ready()]
                report["pairs"] = [proof.to_json() for proof in rollout.fleet.proofs]
                if args.ports:
                    infos = [engine.info for engine in rollout.fleet.ready()]
                    report["ports"] = [port.to_json() for port in fleet_ports(infos)]
                if args.weights:
                    report["weights"] = (await prove_weights(rollout)).to_json()
        report["ok"] = True
        status = 0
    except ProofError as exc:
        report["pairs"] = [p.to_json() for p in exc.proofs if isinstance(p, PairProof)]
        report["problem"] = str(exc)
    except ConfigError as exc:
        report["problem"] = str(exc)
        status = EXIT_BAD_INPUT
    except SplitrollError as exc:
        report["problem"] = str(exc)
    if args.json:
        args.stdout.write(json.dumps(report) + "\n")
    else:
        # Wide where nobody's terminal sets the width: cut columns help nobody.
        width = None if args.stdout.isatty() else 160
        _print(Console(file=args.stdout, width=width), report)
    return status


def _engine(info: Any) -> dict[str, Any]:
    return {
        "name": info.name,
        "role": info.role.value,
        "dtype": info.dtype,
        "block_size": info.block_size,
        "kv_tokens": info.num_blocks * info.block_size,
        "start_s": {phase: round(seconds, 2) for phase, seconds in info.start_s.items()},
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    if report["engines"]:
        console.print(_table("engines", report["engines"], ("name", "role", "dtype", "kv_tokens")))
    if report["pairs"]:
        columns = (
            "prefill",
            "decode",
            "ok",
            "prompt_tokens",
            "recomputed_tokens",
            "kv_bytes",
            "kv_bytes_needed",
            "max_logprob_gap",
            "problem",
        )
        console.print(
            _table("KV handoff, proven against local generation", report["pairs"], columns)
        )
    if "ports" in report:
        console.print(_table("listening ports", report["ports"], _PORT_COLUMNS))
    if "weights" in report:
        console.print(_table("weights, pushed and compared", [report["weights"]], _WEIGHT_COLUMNS))
    elif report["ok"] and not report["pairs"]:
        console.print("colocated: no KV is handed off")
    if report["problem"]:
        console.print(
            f"not working: {report['problem']}", style="red", markup=False, soft_wrap=True
        )
    else:
        console.print("[green]all engines and all pairs work[/]")


def _table(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(escape(_cell(row[column])) for column in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if isinstance(value, float) else str(value)
