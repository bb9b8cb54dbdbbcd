"""How long the allocator takes to decide, by the size of the fleet. Needs no engine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from splitroll.dispatch.allocator import Allocator
from splitroll.dispatch.cost import StepCost
from splitroll.engines.protocol import StepStats
from splitroll.types import Role

ENGINES = (8, 64, 256, 1024)
SEQUENCES = 100
"""In flight on every engine."""
PROMPT_TOKENS = (180, 220)
MAX_TOKENS = 256
STEPS = 20
"""Steps in one report of an engine."""

_COST = StepCost(step=0.02, sequence=0.001, context=1e-6, token=2e-4, pair=1e-8)
_TURN_S = 0.002


def measure(
    engines: Sequence[int] = ENGINES, *, decisions: int = 1000, policy: str = "adaptive"
) -> dict[str, Any]:
    """Return microseconds by number of engines, of the median and of 1 in 100.

    `sample` is the decision on one sample, `group` on eight of one prompt, each with the work
    before it withdrawn and the prefix index asked; `begin_end` gives a sequence out and takes it
    off again, `accept` hashes a prompt, `report` learns from one engine's steps.
    """
    return {str(count): _measured(count, decisions, policy) for count in engines}


def _measured(engines: int, decisions: int, policy: str) -> dict[str, Any]:
    draw = random.Random(engines)
    allocator = _fleet(engines, policy)
    now = 0.0
    inside = []
    for i in range(engines * SEQUENCES):
        piece = allocator.accept(i, _prompt(draw), 1, MAX_TOKENS)
        allocator.withdraw(piece)
        ticket = allocator.begin_decode(i % engines, piece, now)
        allocator.note_prompt(i % engines, piece)
        inside.append((ticket, piece))
        now += 1.0 / (engines * SEQUENCES)
    draw.shuffle(inside)
    taken: dict[str, list[float]] = {
        "sample": [],
        "group": [],
        "begin_end": [],
        "accept": [],
        "report": [],
    }
    for i in range(decisions):
        for kind, samples in (("sample", 1), ("group", 8)):
            tokens = _prompt(draw)
            begun = time.perf_counter()
            piece = allocator.accept((kind, i), tokens, samples, MAX_TOKENS)
            accepted = time.perf_counter()
            route = allocator.decide(piece, now)
            taken[kind].append(time.perf_counter() - accepted)
            taken["accept"].append(accepted - begun)
            assert route is not None, "all engines are up"
            decode = route.parts[0].decode
        # One sequence ends and another begins, as in a fleet that is kept full.
        at = i % len(inside)
        ticket, before = inside[at]
        begun = time.perf_counter()
        allocator.end_decode(ticket, before, now)
        inside[at] = (allocator.begin_decode(decode, piece, now), piece)
        taken["begin_end"].append(time.perf_counter() - begun)
        steps = _report(draw)
        begun = time.perf_counter()
        allocator.observe_steps(i % engines, steps)
        taken["report"].append(time.perf_counter() - begun)
        now += _TURN_S
    return {kind: _quantiles(seconds) for kind, seconds in taken.items()}


def _fleet(engines: int, policy: str) -> Allocator:
    allocator = Allocator(policy, elastic=True)
    for i in range(engines):
        number = allocator.join(
            f"engine-{i}",
            Role.DECODE if i % 4 else Role.PREFILL,
            seats=2 * SEQUENCES,
            num_blocks=4096,
            block_size=32,
            block_bytes=700_000,
            cost=_COST,
        )
        allocator.set_up(number, True)
    allocator.observe_transfer(0, engines - 1, 200, 0.02)
    return allocator


def _prompt(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.choices(range(100, 4000), k=draw.randint(*PROMPT_TOKENS)))


def _report(draw: random.Random) -> list[StepStats]:
    steps = []
    for i in range(STEPS):
        sequences = draw.randint(SEQUENCES // 2, SEQUENCES)
        context, tokens = 300 * sequences, 0 if i % 10 else 200
        pairs = tokens * tokens // 2
        seconds = _COST.decode_step(sequences, context) + _COST.prefill(tokens)
        steps.append(StepStats(seconds * draw.gauss(1, 0.05), sequences, context, tokens, pairs))
    return steps


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_us": round(1e6 * statistics.median(ordered), 1),
        "p99_us": round(1e6 * ordered[int(0.99 * len(ordered))], 1),
    }
