"""The steps of a training run while it goes on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from splitroll.report.steps import StepRecord, finite_mean, quarter_means

_ROWS = 12
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_WIDE = 48


class LiveTable:
    """The last steps as a table that is drawn anew; without a terminal, a line per step.

    While it shows, whatever else prints must do so on the same console.
    """

    def __init__(self, *, total_steps: int | None = None, console: Console | None = None) -> None:
        """Show nothing yet.

        Args:
            total_steps: how many steps the run will have, if known.
            console: where to; stderr if None.
        """
        self.console = console or Console(stderr=True)
        self._total_steps = total_steps
        self._steps: list[StepRecord] = []
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def add(self, record: StepRecord) -> None:
        """Show a step."""
        self._steps.append(record)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            line = step_line(record, self._total_steps)
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(title=self._title(), caption=self._caption())
        for name in ("step", "reward", "gap", "generate", "sync", "train", "total", "version"):
            table.add_column(name, justify="right")
        for step in self._steps[-_ROWS:]:
            seconds = (step.generate_s, step.sync_s, step.train_s, step.total_s)
            table.add_row(
                str(step.step),
                number(step.reward),
                number(step.logprob_gap_mean, "#.2g"),
                *(f"{s:.1f} s" for s in seconds),
                str(step.weight_version),
            )
        return table

    def _title(self) -> str:
        first, last = quarter_means(self._steps)
        text = f"reward {number(first)} → {number(last)}"
        if not self.console.encoding.startswith("utf"):
            return text.replace("→", "to")
        return f"{text}  {sparkline([step.reward for step in self._steps])}"

    def _caption(self) -> str:
        done = len(self._steps)
        if self._total_steps is None:
            return f"{done} steps"
        text = f"{done} of {self._total_steps} steps"
        mean_s = finite_mean(step.total_s for step in self._steps)
        if mean_s is None or done >= self._total_steps:
            return text
        return f"{text}, about {mean_s * (self._total_steps - done) / 60:.1f} min left"


def step_line(record: StepRecord, total_steps: int | None = None) -> str:
    """Return a step as one line of plain text."""
    of = "" if total_steps is None else f"/{total_steps}"
    parts = [
        f"step {record.step}{of}",
        f"reward {number(record.reward)}",
        f"gap {number(record.logprob_gap_mean, '#.2g')}",
        f"generate {record.generate_s:.1f} s",
        f"sync {record.sync_s:.1f} s",
        f"train {record.train_s:.1f} s",
        f"total {record.total_s:.1f} s",
        f"version {record.weight_version}",
    ]
    return "  ".join(parts)


def number(value: float | None, spec: str = ".3f") -> str:
    """Return a number as text; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:{spec}}"


def sparkline(values: Sequence[float]) -> str:
    """Return values as one line of bars, of means where there are too many; a gap is a space."""
    wide = min(len(values), _SPARKS_WIDE)
    edges = [i * len(values) // wide for i in range(wide + 1)] if wide else []
    means = [finite_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if mean is not None]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    top = len(_SPARKS) - 1

    def spark(mean: float | None) -> str:
        if mean is None:
            return " "
        return _SPARKS[round((mean - low) / span * top) if span > 0 else top // 2]

    return "".join(spark(mean) for mean in means)
