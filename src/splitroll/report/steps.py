"""One record per training step, its line in a steps file, and what follows from all of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from splitroll.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step.

    Attributes:
        step: number of the step, from 1.
        weight_version: of the weights that generated the step's samples.
        reward: mean reward of the samples.
        reward_std: standard deviation of the samples' rewards.
        loss: the trainer's loss; None where there is none.
        logprob_gap_mean: mean over tokens of |engine's - trainer's log-probability|, nats.
        logprob_gap_max: its maximum, nats.
        samples: samples generated.
        tokens: tokens sampled.
        split, shared, local, migrated: samples by their route.
        generate_s: wall time of generation.
        prefill_s, transfer_s, decode_s: the parts of generate_s that `attribute` found; what they
            leave of it is the queue. All 0 where the phases are not known.
        sync_s: wall time of giving the new weights to the engines.
        sync_phases: parts of sync_s by name, seconds.
        train_s: wall time of the trainer's own work.
        total_s: wall time of the whole step.
    """

    step: int
    weight_version: int
    reward: float
    reward_std: float
    loss: float | None = None
    logprob_gap_mean: float | None = None
    logprob_gap_max: float | None = None
    samples: int = 0
    tokens: int = 0
    split: int = 0
    shared: int = 0
    local: int = 0
    migrated: int = 0
    generate_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    sync_s: float = 0.0
    sync_phases: Mapping[str, float] = field(default_factory=dict)
    train_s: float = 0.0
    total_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the step as the JSON object of one line of a steps file.

        JSON has no NaN and no infinity: they become null.
        """
        row = {f.name: _finite(getattr(self, f.name)) for f in fields(self)}
        row["sync_phases"] = {name: _finite(s) for name, s in self.sync_phases.items()}
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StepRecord:
        """Return the step of one line; null is NaN where the field cannot be None.

        Raises:
            KeyError: when a field without a default is missing. Unknown ones are left out.
        """
        known = {f.name: row[f.name] for f in fields(cls) if f.name in row}
        missing = {"step", "weight_version", "reward", "reward_std"} - known.keys()
        if missing:
            raise KeyError(min(missing))
        for f in fields(cls):
            if f.type == "float" and f.name in known:
                known[f.name] = _or_nan(known[f.name])
        if "sync_phases" in known:
            known["sync_phases"] = {k: _or_nan(v) for k, v in known["sync_phases"].items()}
        return cls(**known)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def read_steps(path: Path) -> list[StepRecord]:
    """Read a steps file: one JSON object per step and line.

    A last line without its newline is left out: the run was ended while it wrote it.

    Raises:
        ConfigError: when another line is not a step.
    """
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(True), 1):
        if not line.endswith("\n"):
            break
        try:
            steps.append(StepRecord.from_json(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            problem = Problem(f"{path}, line {number}", repr(exc), "a step", "remove the line")
            raise ConfigError([problem]) from exc
    return steps


def finite_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are finite numbers; None when none is."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.fmean(finite) if finite else None


def quarter(steps: Sequence[StepRecord]) -> int:
    """Return how many steps a quarter of them has, at least 1."""
    return max(1, len(steps) // 4)


def quarter_means(steps: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    """Return the mean reward of the first and of the last quarter of the steps.

    A quarter has len(steps) // 4 steps, at least 1. Rewards that are no number do not count; None
    where no step counts.
    """
    k = quarter(steps)
    return (
        finite_mean(step.reward for step in steps[:k]),
        finite_mean(step.reward for step in steps[-k:]),
    )


PARTS = ("prefill", "transfer", "decode", "queue", "generate", "sync", "train", "other")
"""What a step's time is divided into. "generate" is a generation of which no phase is known, in
place of the four before it; "other" is what the rest leaves of the step."""


def time_parts(step: StepRecord) -> dict[str, float]:
    """Divide a step's wall time, in seconds, into `PARTS`; none is negative."""
    parts = dict.fromkeys(PARTS, 0.0)
    for name in ("prefill", "transfer", "decode", "sync", "train"):
        parts[name] = _seconds(getattr(step, f"{name}_s"))
    known_s = parts["prefill"] + parts["transfer"] + parts["decode"]
    rest_s = max(0.0, _seconds(step.generate_s) - known_s)
    parts["queue" if known_s > 0 else "generate"] = rest_s
    parts["other"] = max(0.0, _seconds(step.total_s) - sum(parts.values()))
    return parts


def mean_parts(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the mean of `time_parts` over steps, in seconds, without the parts that are zero."""
    parts = [time_parts(step) for step in steps]
    means = {name: statistics.fmean(part[name] for part in parts) for name in PARTS}
    return {name: seconds for name, seconds in means.items() if seconds > 1e-6}


def _seconds(value: float) -> float:
    return max(0.0, value) if math.isfinite(value) else 0.0
