"""What a training run shows while it goes on and leaves behind: one record per step, a live table,
figures and a page.

matplotlib is imported only where a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from splitroll.types import Group


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
        split, shared, local: samples by their route.
        generate_s: wall time of generation.
        prefill_s, transfer_s, decode_s: the parts of generate_s that `attribute` found; what they
            leave of generate_s is the rest: queueing, or all of it where nothing is known.
        sync_s: wall time of giving the new weights to the engines.
        sync_phases: parts of sync_s by name, seconds.
        train_s: wall time of the optimizer's step.
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
    generate_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    sync_s: float = 0.0
    sync_phases: Mapping[str, float] = field(default_factory=dict)
    train_s: float = 0.0
    total_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the step as the JSON object of one line of a steps file."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StepRecord:
        """Return the step of one line of a steps file."""
        raise NotImplementedError


def read_steps(path: Path) -> list[StepRecord]:
    """Read a steps file: one JSON object per step and line."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Phases:
    """The wall time of a generation by phase, seconds."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float


def attribute(groups: Iterable[Group], wall_s: float) -> Phases:
    """Split the wall time of a generation, seconds, into phases that add up to it."""
    raise NotImplementedError


class LiveTable:
    """The steps so far, as a table that is drawn anew; without a terminal, a line per step."""

    def __init__(self, *, total_steps: int | None = None, console: Console | None = None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError

    def add(self, record: StepRecord) -> None:
        """Show a step."""
        raise NotImplementedError


def quarter_means(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Return the mean reward of the first and of the last quarter of the steps."""
    raise NotImplementedError


def write_report(
    folder: Path, steps: Sequence[StepRecord], *, title: str, facts: Mapping[str, str]
) -> list[Path]:
    """Write reward.png, steps.png and index.html, a page that needs nothing else."""
    raise NotImplementedError


def write_curves(path: Path, runs: Mapping[str, Sequence[StepRecord]]) -> None:
    """Write the reward of several runs, by label, as one PNG."""
    raise NotImplementedError


def write_comparison(path: Path, runs: Mapping[str, Sequence[StepRecord]]) -> None:
    """Write where the mean step of several runs, by label, spends its time, as one PNG."""
    raise NotImplementedError
