"""How long it takes to add an engine to a fleet that generates, and to take one out:

    python -m splitroll.bench.scale --rounds 3

A fleet of one prefill and one decode engine grows by one of each and shrinks again, under a stream
of groups. The report has the seconds of every phase, and tokens per second before, while and after.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from splitroll.config import load_checked
from splitroll.errors import SplitrollError
from splitroll.rollout import Rollout
from splitroll.types import Group, Prompt, SamplingParams

_OVERRIDES = ("disaggregation.prefill_replicas=1", "disaggregation.decode_replicas=1")
_PROMPTS, _TOKENS, _GROUP = 8, 64, 2
_SAMPLING = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
_STEADY_S = 10.0


class _Stream:
    """Groups without end, and the tokens that came of them."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self.tokens = self.failed = 0

    async def run(self) -> None:
        turn = 0
        while True:
            turn += 1
            asked = [
                Prompt(
                    str(i),
                    tuple(100 + (turn * 131 + i * 17 + 7 * j) % 3900 for j in range(_TOKENS)),
                )
                for i in range(_PROMPTS)
            ]
            async for group in self._rollout.generate(asked, n=_GROUP, sampling=_SAMPLING):
                if isinstance(group, Group):
                    self.tokens += sum(len(sample.token_ids) for sample in group.samples)
                else:
                    self.failed += 1

    @contextlib.asynccontextmanager
    async def counted(self, rates: list[float]) -> Any:
        tokens, begun_s = self.tokens, time.perf_counter()
        yield
        rates.append((self.tokens - tokens) / (time.perf_counter() - begun_s))


async def measure(source: str | None, overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return medians over rounds."""
    config, _ = load_checked(source, [*_OVERRIDES, *overrides])
    phases: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    drains: list[float] = []
    async with Rollout.open(config) as rollout:
        stream = _Stream(rollout)
        running = asyncio.create_task(stream.run())
        try:
            for _ in range(rounds):
                async with stream.counted(rates["1x1"]):
                    await asyncio.sleep(_STEADY_S)
                async with stream.counted(rates["growing"]):
                    report = await rollout.scale(prefill=2, decode=2)
                for one in report.joined:
                    phases[one.name.rpartition("-")[0]].append(one.seconds)
                async with stream.counted(rates["2x2"]):
                    await asyncio.sleep(_STEADY_S)
                async with stream.counted(rates["shrinking"]):
                    report = await rollout.scale(prefill=1, decode=1)
                drains += [one.drain_s for one in report.left]
                if running.done():
                    await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return {
        "joining_s": {role: _medians(found) for role, found in phases.items()},
        "leaving_s": round(statistics.median(drains), 2),
        "tokens_per_s": {name: round(statistics.median(found)) for name, found in rates.items()},
        "failed_groups": stream.failed,
    }


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="PATH=VALUE")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 101), metavar="N")
    args = parser.parse_args()
    try:
        found = asyncio.run(measure(args.config, args.overrides, args.rounds))
    except SplitrollError as exc:
        sys.exit(str(exc))
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
