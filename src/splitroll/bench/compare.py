"""Two colocated engines against one prefill and one decode engine, the same groups in turn."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitroll.config import Config
from splitroll.rollout import Rollout
from splitroll.types import FailedGroup, Prompt, SamplingParams

ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "colocated": ("disaggregation.enabled=false", "colocated.replicas=2"),
    "split": ("disaggregation.prefill_replicas=1", "disaggregation.decode_replicas=1"),
}
"""Overrides of the two fleets; both have two engines on the same devices."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups of n samples; all alternatives generate the same number of tokens."""

    groups: int
    n: int
    prompt_tokens: int
    max_tokens: int

    def prompts(self, round_index: int) -> list[Prompt]:
        """Return fresh prompts, the same for every alternative of a round."""
        draw = random.Random(round_index)
        return [
            Prompt(
                f"{round_index}-{i}", tuple(draw.choices(range(100, 4000), k=self.prompt_tokens))
            )
            for i in range(self.groups)
        ]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, seed=0)


@dataclass(slots=True)
class Measured:
    """What one alternative took, by round; the warm-up round is left out."""

    wall_s: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    handoffs: int = 0
    routes: Counter[str] = field(default_factory=Counter)
    completion_tokens: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)


async def compare(
    config: Config,
    workload: Workload,
    rounds: int,
    on_round: Callable[[str, int, float], None] = lambda name, index, wall_s: None,
) -> dict[str, Measured]:
    """Run the workload on every alternative in turn, `rounds` times after one warm-up round.

    Both fleets are up all the time; an idle engine uses a few per cent of a core.
    """
    measured = {name: Measured() for name in ALTERNATIVES}
    async with contextlib.AsyncExitStack() as stack:
        rollouts = {
            name: await stack.enter_async_context(Rollout.open(config, overrides=overrides))
            for name, overrides in ALTERNATIVES.items()
        }
        for index in range(rounds + 1):
            for name in _order(index):
                before = await rollouts[name].activity()
                result = await _run(rollouts[name], workload, index)
                after = await rollouts[name].activity()
                on_round(name, index, result.wall_s[0])
                if index > 0:
                    total = measured[name]
                    total.wall_s += result.wall_s
                    total.routes += result.routes
                    total.completion_tokens += result.completion_tokens
                    total.kv_bytes += after.kv_bytes - before.kv_bytes
                    total.handoffs += after.handoffs - before.handoffs
    return measured


def report(workload: Workload, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the comparison as one JSON object; `ratio` above 1 means that the split was slower."""
    split, colocated = measured["split"], measured["colocated"]
    ratios = [s / c for s, c in zip(split.wall_s, colocated.wall_s, strict=True)]
    return {
        "workload": {
            "groups": workload.groups,
            "n": workload.n,
            "prompt_tokens": workload.prompt_tokens,
            "max_tokens": workload.max_tokens,
        },
        "rounds": len(ratios),
        "ratio_split_to_colocated": {
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        },
        "alternatives": {
            name: {
                "median_s": one.median_s,
                "wall_s": one.wall_s,
                "kv_bytes": one.kv_bytes,
                "handoffs": one.handoffs,
                "routes": dict(one.routes),
                "completion_tokens": one.completion_tokens,
            }
            for name, one in measured.items()
        },
    }


def _order(index: int) -> Sequence[str]:
    """Alternate who goes first, so that neither always follows the other."""
    names = list(ALTERNATIVES)
    return names if index % 2 == 0 else names[::-1]


async def _run(rollout: Rollout, workload: Workload, index: int) -> Measured:
    result = Measured()
    prompts = workload.prompts(index)
    begun = time.monotonic()
    async for group in rollout.generate(prompts, n=workload.n, sampling=workload.sampling):
        assert not isinstance(group, FailedGroup), 'generate(on_error="raise") yields none'
        result.routes.update(sample.route.kind.value for sample in group.samples)
        result.completion_tokens += sum(len(sample.token_ids) for sample in group.samples)
    result.wall_s.append(time.monotonic() - begun)
    return result
