"""Simulated steps at several sizes of fleet against their lower bound, with what each loses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splitroll.bench.workloads import make_load
from splitroll.dispatch.cost import StepCost
from splitroll.sim.run import FleetModel, SimResult, Simulation

MEASURED = StepCost(step=0.030, sequence=0.0014, context=4.6e-7, token=0.00125, pair=7.2e-7)
"""Fitted to an engine on two CPU cores with a model of 135 million parameters."""


@dataclass(frozen=True, slots=True)
class Study:
    """What to simulate.

    Attributes:
        samples: of the step, on all engines together.
        per_engine: the same of each engine instead, so that all fleets have equally much to do.
        oracle: see `Simulation`.
    """

    workload: str = "burst"
    policy: str = "adaptive"
    samples: int = 100_000
    per_engine: int | None = None
    seed: int = 0
    cost: StepCost = MEASURED
    segment_tokens: int | None = 256
    oracle: bool = False

    def run(self, engines: int) -> dict[str, Any]:
        """Simulate one step on so many engines, half of them for prefill by preference."""
        asked = self.samples if self.per_engine is None else self.per_engine * engines
        scale = asked / make_load(self.workload, self.seed).samples
        load = make_load(self.workload, self.seed, scale)
        begun = time.perf_counter()
        simulation = Simulation(
            FleetModel(engines // 2, engines - engines // 2, self.cost),
            self.policy,
            segment_tokens=self.segment_tokens,
            oracle=self.oracle,
        )
        result = simulation.run(load)
        return report(result, engines, time.perf_counter() - begun)


def run(
    study: Study, fleets: Sequence[int], on_done: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Simulate a step on fleets of several sizes, in turn."""
    rows = []
    for engines in fleets:
        rows.append(study.run(engines))
        on_done(rows[-1])
    return rows


def report(result: SimResult, engines: int, wall_s: float) -> dict[str, Any]:
    """Return one step as a JSON object; the shares of the engines' time add up to 1.

    `work`: what the bound counts. `idle`: no step at all. `recomputed`: prompt tokens that some
    engine had computed before; siblings, each the last tokens that fill no block. `batches`: decode
    steps that were less efficient than the best one, with fewer sequences or with more context.
    """
    whole = engines * result.makespan_s
    decode = sum(one.fixed + one.decode for one in result.spent)
    prefill = sum(one.prefill for one in result.spent)
    useful = (result.decoded_tokens * result.best_token_s + result.unique_s) / whole
    return {
        "engines": engines,
        "samples": result.samples,
        "makespan_s": result.makespan_s,
        "bound_s": result.bound_s,
        "work_bound_s": result.work_bound_s,
        "longest_bound_s": result.longest_bound_s,
        "efficiency": result.efficiency,
        "shares": {
            "work": useful,
            "idle": 1 - (decode + prefill) / whole,
            "recomputed": (prefill - result.unique_s) / whole,
            "batches": decode / whole - (useful - result.unique_s / whole),
        },
        "routes": {kind: n for kind, n in result.routes.items() if kind != "migrated"},
        "moves": result.routes["migrated"],
        "decisions": len(result.decision_s),
        "decision_us": 1e6 * statistics.median(result.decision_s),
        "decisions_per_s": len(result.decision_s) / sum(result.decision_s),
        "wall_s": wall_s,
    }
