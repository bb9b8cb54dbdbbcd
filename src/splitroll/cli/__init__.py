"""The `splitroll` command: arguments here, each command in a module of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.metadata
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

DEFAULT_NUM = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status.

    0: done; 1: the fleet or some groups failed; 2: bad input, nothing was started;
    130: interrupted.
    """
    args = _parser().parse_args(argv)
    command = importlib.import_module(f"splitroll.cli.{args.command.replace('-', '_')}")
    # --json promises one object on stdout: whatever else writes there goes to stderr.
    with _stdout_kept_clean() as stdout:
        args.stdout = stdout
        from splitroll.errors import ConfigError, SplitrollError

        try:
            return _run(command.run, args)
        except ConfigError as exc:
            print(f"splitroll: {exc}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except SplitrollError as exc:
            print(f"splitroll: {exc}", file=sys.stderr)
            return EXIT_FAILED
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("splitroll: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="splitroll",
        description="Rollouts for RL post-training, prefill and decode split across vLLM engines.",
    )
    parser.add_argument(
        "--version", action="version", version=importlib.metadata.version("splitroll")
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_rollout(commands.add_parser("rollout", help="generate groups of samples into a file"))
    check = commands.add_parser("check", help="start the fleet and prove every KV handoff")
    _add_config(check)
    check.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    check.add_argument(
        "--weights",
        action="store_true",
        help="push the model's own weights back, compare every checksum, prove again",
    )
    check.add_argument(
        "--ports", action="store_true", help="list every port that the fleet listens on, and why"
    )
    config = commands.add_parser("config", help="check and print the resolved configuration")
    _add_config(config)
    serve = commands.add_parser("serve", help="put the fleet behind vLLM's HTTP API")
    _add_config(serve)
    _add_bench(
        commands.add_parser("bench", help="compare policies, and vllm-router, on the same work")
    )
    _add_train(commands.add_parser("train", help="train a model on a task with TRL's GRPO"))
    weights = commands.add_parser("bench-weights", help="time weight updates against their bounds")
    _add_config(weights)
    weights.add_argument("--rounds", type=int, default=5, help="of each fleet (%(default)s)")
    weights.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    simulate = commands.add_parser("simulate", help="simulate a rollout step on large fleets")
    _add_simulate(simulate)
    return parser


_MORE_SAMPLING: tuple[tuple[str, type, float], ...] = (
    ("--min-p", float, 0.0),
    ("--min-tokens", int, 0),
    ("--repetition-penalty", float, 1.0),
    ("--presence-penalty", float, 0.0),
    ("--frequency-penalty", float, 0.0),
)


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines, each with an id and one of prompt, messages, prompt_token_ids",
    )
    source.add_argument("--task", metavar="NAME", help="a reasoning-gym dataset, scored")
    parser.add_argument("--num", type=int, help=f"questions of the task ({DEFAULT_NUM})")
    parser.add_argument(
        "--task-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the task's dataset, for instance max_digits=1",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="where samples are written")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="per sample (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off (%(default)s)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a sample at this text; may be given several times",
    )
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    for flag, kind, default in _MORE_SAMPLING:
        parser.add_argument(flag, type=kind, default=default, help="as in vLLM (%(default)s)")
    parser.add_argument("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID")
    parser.add_argument("--ignore-eos", action="store_true")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="go on with an unfinished run")
    earlier.add_argument("--overwrite", action="store_true", help="replace an earlier run's file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--workload", action="append", default=[], metavar="NAME", help="may be repeated (all)"
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="an alternative: a policy, or router-...; may be repeated (all)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each alternative (%(default)s)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write results and charts there, beside those of other workloads",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines", type=int, nargs="+", default=[8, 64, 256, 1024], help="of each fleet"
    )
    parser.add_argument("--workload", default="burst", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--policy", default="adaptive", metavar="NAME", help="(%(default)s)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--samples", type=int, default=100_000, help="of the step, over all engines (%(default)s)"
    )
    size.add_argument("--per-engine", type=int, help="samples of each engine instead")
    parser.add_argument("--seed", type=int, default=0, help="of the workload (%(default)s)")
    parser.add_argument(
        "--cost",
        metavar="STEP,SEQUENCE,CONTEXT,TOKEN,PAIR",
        help="seconds of a step's terms (fitted to an engine on two CPU cores)",
    )
    parser.add_argument("--segment-tokens", type=int, default=256, help="0 is off (%(default)s)")
    parser.add_argument("--oracle", action="store_true", help="tell the policy every length")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--out", metavar="DIR", help="where the run is written (train.out)")
    parser.add_argument("--steps", type=int, help="optimizer steps (train.steps)")
    parser.add_argument("--seed", type=int, help="(train.seed)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run's files")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML; without it, the defaults")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        dest="overrides",
        metavar="PATH=VALUE",
        help="override, for instance disaggregation.decode_replicas=2; may be given several times",
    )


def _run(command: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> int:
    """Run a command, async or not; SIGTERM ends it as Ctrl-C does, with all engines closed."""
    if inspect.iscoroutinefunction(command):
        if args.command == "serve":
            from splitroll.serve import loop

            return loop.run(_until_signal(command(args)))
        return asyncio.run(_until_signal(command(args)))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return command(args)  # type: ignore[no-any-return]


async def _until_signal(work: Any) -> int:
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task  # type: ignore[no-any-return]


@contextlib.contextmanager
def _stdout_kept_clean() -> Any:
    """Yield the real stdout; file descriptor 1 goes to stderr meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
