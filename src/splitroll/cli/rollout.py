"""`splitroll rollout`: prompts in, a samples file out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from splitroll.cli import DEFAULT_NUM, EXIT_FAILED
from splitroll.cli.display import Display, summary_tables, timed
from splitroll.config import Config, collecting, examine
from splitroll.config.rules import max_model_len
from splitroll.dispatch.assembly import GroupWork
from splitroll.errors import ConfigError, Problem
from splitroll.groups import plan_groups
from splitroll.placement import check_devices
from splitroll.prompts import PromptLike, Tokenizer, read_prompt_file
from splitroll.rollout import Activity, Rollout, with_score
from splitroll.samples import SampleFile, run_fingerprint
from splitroll.tasks import Task, load_task
from splitroll.types import FailedGroup, RouteKind, SamplingParams


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that was checked before anything starts."""

    config: Config
    works: Sequence[GroupWork]
    sampling: SamplingParams
    task: Task | None
    file: SampleFile


async def run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    begun = time.monotonic()
    failed: list[FailedGroup] = []
    activity = None
    resumed = len(plan.file.done)
    todo = [work for work in plan.works if work.prompt.id not in plan.file.done]
    display = Display(total_groups=len(todo))
    try:
        if todo:
            with display.showing():
                activity = await _generate(plan, todo, args.n, display, failed)
        if not failed and not plan.file.is_finished:
            plan.file.finish()
    except asyncio.CancelledError:
        if plan.file.done:
            display.say(f"{len(plan.file.done)} complete groups are kept: go on with --resume")
        raise
    finally:
        plan.file.close()
    summary = _summary(plan.file, failed, activity, time.monotonic() - begun, resumed)
    _report(args, display, summary, failed)
    return EXIT_FAILED if failed else 0


def _plan(args: argparse.Namespace) -> _Plan:
    """Check configuration, prompts, sampling and output file; start nothing."""
    problems: list[Problem] = []
    task = None
    prompts: Sequence[PromptLike] = ()
    sampling = SamplingParams()
    with collecting(problems):
        sampling = _sampling(args)
    with collecting(problems):
        SampleFile.check_name(Path(args.out), resume=args.resume, overwrite=args.overwrite)
    with collecting(problems):
        if args.task:
            task = load_task(args.task, args.num or DEFAULT_NUM, args.seed, args.task_set)
            prompts = task.prompts
        else:
            _refuse_task_flags(args)
            prompts = read_prompt_file(Path(args.prompts), problems)
    config, facts, found = examine(args.config, args.overrides)
    problems += found
    with collecting(problems):
        check_devices(config)
    works: Sequence[GroupWork] = ()
    if facts is not None:
        with collecting(problems):
            works = plan_groups(
                prompts,
                n=args.n,
                sampling=sampling,
                tokenizer=Tokenizer(facts.path),
                max_model_len=max_model_len(config, facts),
                vocab_size=facts.vocab_size,
            )
    if problems or facts is None:
        raise ConfigError(problems)
    file = SampleFile(Path(args.out), run_fingerprint(facts.path, works), args.n)
    file.open(resume=args.resume, overwrite=args.overwrite)
    return _Plan(config, works, sampling, task, file)


def _refuse_task_flags(args: argparse.Namespace) -> None:
    if args.num is not None or args.task_set:
        found = "--num or --task-set with --prompts"
        raise ConfigError([Problem("--prompts", found, "these with --task only", "leave them out")])


def _sampling(args: argparse.Namespace) -> SamplingParams:
    names = {field.name for field in fields(SamplingParams)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return SamplingParams(**given)


async def _generate(
    plan: _Plan,
    todo: Sequence[GroupWork],
    n: int,
    display: Display,
    failed: list[FailedGroup],
) -> Activity:
    async with contextlib.AsyncExitStack() as stack:
        display.say("starting the engines and proving every KV handoff between them ...", "dim")
        with timed(display, "engines up and proven"):
            opening = Rollout.open(plan.config, on_state=display.engines)
            rollout = await stack.enter_async_context(opening)
        prompts = [work.prompt for work in todo]
        groups = rollout.generate(prompts, n=n, sampling=plan.sampling, on_error="yield")
        async for group in groups:
            display.group_done()
            if isinstance(group, FailedGroup):
                display.say(str(group.error), style="red")
                failed.append(group)
                continue
            if plan.task is not None:
                group = with_score(group, functools.partial(plan.task.score, group.id))
            plan.file.write(group)
        return await rollout.activity()


def _summary(
    file: SampleFile,
    failed: Sequence[FailedGroup],
    activity: Activity | None,
    wall_s: float,
    resumed: int,
) -> dict[str, Any]:
    rows = [row for group in file.done.values() for row in group]
    routes = Counter(row["route"]["kind"] for row in rows)
    scores = [row["score"] for row in rows if row.get("score") is not None]
    return {
        "groups": len(file.done),
        "samples": len(rows),
        "failed": len(failed),
        "prompt_tokens": sum(len(group[0]["prompt_token_ids"]) for group in file.done.values()),
        "completion_tokens": sum(len(row["token_ids"]) for row in rows),
        "wall_s": round(wall_s, 3),
        "handoffs": activity.handoffs if activity else 0,
        "kv_bytes": activity.kv_bytes if activity else 0,
        "routes": {kind.value: routes[kind.value] for kind in RouteKind},
        "moves": activity.moves if activity else 0,
        "estimated_saved_s": round(activity.estimated_saved_s, 3) if activity else 0.0,
        "engines": [asdict(engine) for engine in activity.engines] if activity else [],
        "computed_tokens": dict(activity.computed_tokens) if activity else {},
        "recomputed_tokens": activity.recomputed_tokens if activity else 0,
        "retries": activity.retries if activity else 0,
        "resumed": resumed,
        "failures": [{"id": group.id, "error": str(group.error)} for group in failed],
        "score_mean": sum(scores) / len(scores) if scores else None,
        "out": str(file.path) if not failed else None,
    }


def _report(
    args: argparse.Namespace,
    display: Display,
    summary: Mapping[str, Any],
    failed: Sequence[FailedGroup],
) -> None:
    if args.json:
        args.stdout.write(json.dumps(summary) + "\n")
    else:
        from rich.console import Console

        console = Console(file=args.stdout)
        for table in summary_tables(summary):
            console.print(table)
    if failed:
        display.say(
            f"{len(failed)} groups failed; the others are kept: repeat the call with --resume"
        )
    else:
        display.say(f"samples: {args.out}")
