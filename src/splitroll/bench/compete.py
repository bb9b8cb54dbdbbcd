"""The alternatives on the same work, in turn: our policies on one fleet of two engines, and stock
vLLM servers behind vllm-router, two connected by NIXL and two plain ones.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitroll.bench.ours import Ran, run_load
from splitroll.bench.stock_client import drive
from splitroll.bench.stock_servers import StockServer, stock_router, stock_servers
from splitroll.bench.workloads import Load, make_load
from splitroll.config import Config, load_checked
from splitroll.dispatch.cost import StepCost
from splitroll.dispatch.observe import observed
from splitroll.dispatch.policy import POLICIES
from splitroll.engines.protocol import StepStats
from splitroll.rollout import Rollout

OURS: tuple[str, ...] = tuple(POLICIES)
ROUTERS: Mapping[str, tuple[bool, str]] = {
    "router-pd": (True, "round_robin"),
    "router-cache_aware": (False, "cache_aware"),
    "router-consistent_hash": (False, "consistent_hash"),
    "router-round_robin": (False, "round_robin"),
}
"""vllm-router's modes: (prefill and decode apart, its policy)."""
ALTERNATIVES: tuple[str, ...] = (*OURS, *ROUTERS)

_SPLIT = ("disaggregation.prefill_replicas=1", "disaggregation.decode_replicas=1")
_COLOCATED = ("disaggregation.enabled=false", "colocated.replicas=2")
_CONCURRENCY = 256
_SEATS = 64
_TIMEOUT_S = 1800.0

Runner = Callable[[Load, int], Awaitable[Ran]]


@dataclass(slots=True)
class Measured:
    """What one alternative took on one workload, by round; the warm-up is left out."""

    makespan_s: list[float] = field(default_factory=list)
    routes: Counter[str] = field(default_factory=Counter)
    ledger: Counter[str] = field(default_factory=Counter)
    last: Ran | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.makespan_s)


@dataclass(slots=True)
class Course:
    """All that was measured on one workload.

    Attributes:
        bounds_s: by round, the lower bound of any makespan; see `lower_bound`.
    """

    workload: str
    measured: dict[str, Measured]
    bounds_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Arena:
    """The alternatives, running.

    Attributes:
        best_token_s: fewest seconds per token that any decode step of our engines took.
    """

    runners: dict[str, Runner]
    rollout: Rollout
    best_token_s: float = math.inf

    @property
    def cost(self) -> StepCost:
        return self.rollout.dispatcher.allocator.books.typical_cost()


@contextlib.asynccontextmanager
async def open_arena(
    config: Config, names: Sequence[str], cores: Sequence[int]
) -> AsyncGenerator[Arena, None]:
    """Start what the named alternatives need: at most six engines, of which two work at a time."""
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="splitroll-bench-")))
        rollout = await stack.enter_async_context(
            Rollout.open(config, overrides=[*_SPLIT, "dispatch.policy=adaptive"], observe=False)
        )
        arena = Arena({}, rollout)
        for name in names:
            if name in OURS:
                arena.runners[name] = await _ours(arena, name)
        for split in (True, False):
            mine = [name for name in names if name in ROUTERS and ROUTERS[name][0] is split]
            if mine:
                overrides = [*(_SPLIT if split else _COLOCATED), "dispatch.roles=strict"]
                stock, facts = load_checked(config, overrides)
                folder = logs / ("split" if split else "plain")
                servers = await stack.enter_async_context(
                    stock_servers(stock, facts, cores, folder)
                )
                for name in mine:
                    arena.runners[name] = await _router(stack, name, servers, facts.name, folder)
        yield arena


async def _ours(arena: Arena, policy: str) -> Runner:
    rollout = arena.rollout
    dispatcher = rollout.dispatcher
    if policy != "adaptive":
        dispatcher = rollout.another_dispatcher(f"dispatch.policy={policy}")

    def tap(steps: Sequence[StepStats]) -> None:
        for step in steps:
            if step.sequences and not step.prefill_tokens:
                arena.best_token_s = min(arena.best_token_s, step.seconds / step.sequences)

    probe = True

    async def run(load: Load, seed: int) -> Ran:
        nonlocal probe
        # As after the weight update between two steps.
        for engine in rollout.fleet.ready():
            await engine.reset_prefix_cache()
        dispatcher.allocator.forget_prefixes()
        async with observed(rollout.fleet, dispatcher.allocator, probe=probe, tap=tap):
            probe = False
            return await run_load(dispatcher, load, seed)

    return run


async def _router(
    stack: contextlib.AsyncExitStack,
    name: str,
    servers: Sequence[StockServer],
    model: str,
    logs: Path,
) -> Runner:
    policy: Any = ROUTERS[name][1]
    url = await stack.enter_async_context(stock_router(servers, policy, logs))

    async def run(load: Load, seed: int) -> Ran:
        driven = await drive(
            url, load, model, concurrency=_CONCURRENCY, seed=seed, timeout_s=_TIMEOUT_S
        )
        return Ran(driven.makespan_s, ends_s=[served.end_s for served in driven.timeline])

    return run


async def compete(
    arena: Arena,
    workload: str,
    rounds: int,
    on_round: Callable[[str, str, int, float], None] = lambda workload, name, index, wall_s: None,
) -> Course:
    """Run a workload on every alternative in turn, `rounds` times after one warm-up round.

    All alternatives of a round have prompts and outputs of the same lengths, of other tokens, so
    that none finds the prompts of another one in a cache. Who goes first changes by round.
    """
    names = list(arena.runners)
    course = Course(workload, {name: Measured() for name in names})
    for index in range(rounds + 1):
        load = make_load(workload, index)
        at = index % len(names)
        for name in names[at:] + names[:at]:
            serial = index * len(names) + names.index(name)
            ran = await arena.runners[name](load.shifted(serial), serial)
            on_round(workload, name, index, ran.makespan_s)
            if index:
                measured = course.measured[name]
                measured.makespan_s.append(ran.makespan_s)
                measured.routes += ran.routes
                measured.ledger.update(ran.ledger)
                measured.last = ran
        if index and arena.best_token_s < math.inf:
            course.bounds_s.append(lower_bound(load, arena.cost, arena.best_token_s, engines=2))
    return course


def lower_bound(load: Load, cost: StepCost, best_token_s: float, engines: int) -> float:
    """Return seconds that no schedule can beat: the larger of all work, each prompt computed once
    and each token at the best batch efficiency that was seen, over the engines; and the longest
    sequence decoded alone.
    """
    unique, longest = 0.0, 0.0
    common = _common_prefix([group.prompt for group in load.groups])
    for index, group in enumerate(load.groups):
        tokens = len(group.prompt)
        known = common if index else 0
        unique += cost.prefill(tokens - known, known)
        length = max(group.lengths)
        alone = cost.prefill(tokens) + length * cost.decode_step(1, tokens + length / 2)
        longest = max(longest, alone)
    for episode in load.episodes:
        before, alone = 0, 0.0
        for turn in episode.turns:
            new = len(turn.observation)
            unique += cost.prefill(new, before)
            alone += cost.prefill(new, before)
            before += new
            alone += turn.length * cost.decode_step(1, before)
            before += turn.length
        longest = max(longest, alone)
    work = (unique + load.completion_tokens * best_token_s) / engines
    return max(work, longest)


def report(course: Course) -> dict[str, Any]:
    """Return the comparison as one JSON object; ratios are to `adaptive`, median of rounds."""
    ours = course.measured.get("adaptive")
    bound = statistics.median(course.bounds_s) if course.bounds_s else None
    alternatives = {}
    for name, one in course.measured.items():
        row: dict[str, Any] = {
            "median_s": one.median_s,
            "min_s": min(one.makespan_s),
            "max_s": max(one.makespan_s),
            "makespan_s": one.makespan_s,
            "routes": dict(one.routes),
            "ledger": dict(one.ledger),
        }
        if ours is not None:
            ratios = [a / b for a, b in zip(one.makespan_s, ours.makespan_s, strict=True)]
            row["to_adaptive"] = statistics.median(ratios)
        if bound is not None:
            row["to_bound"] = one.median_s / bound
        alternatives[name] = row
    return {
        "workload": course.workload,
        "rounds": len(next(iter(course.measured.values())).makespan_s),
        "lower_bound_s": bound,
        "alternatives": alternatives,
    }


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
