"""Figures of training runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitroll.report.canvas import LIGHT, Theme, new_figure, png, title_and_legend
from splitroll.report.live import number
from splitroll.report.steps import (
    PARTS,
    StepRecord,
    finite_mean,
    mean_parts,
    quarter,
    quarter_means,
    time_parts,
)

# Okabe and Ito's colours, which the colour-blind can tell apart; neighbours also differ in
# lightness.
_COLOUR = {
    "prefill": "#0072b2",
    "transfer": "#56b4e9",
    "decode": "#009e73",
    "queue": "#c3c9cf",
    "generate": "#cc79a7",
    "sync": "#f0b429",
    "train": "#d55e00",
    "other": "#7a828a",
}
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":")


def reward_figure(steps: Sequence[StepRecord], theme: Theme = LIGHT) -> bytes:
    """Draw the mean reward of every step and of the first and last quarter; returns a PNG."""
    figure, axes = new_figure(4.6, theme)
    numbers = [step.step for step in steps]
    rewards = [step.reward for step in steps]
    window = _window(steps)
    axes.plot(numbers, rewards, "o-", color="#56b4e9", ms=4, lw=0.8, label="step")
    if window > 1:
        label = f"mean of the last {window} steps"
        axes.plot(numbers, moving_average(rewards, window), color="#0072b2", lw=2.5, label=label)
    _draw_quarters(axes, steps, theme)
    axes.set_ylabel("mean reward per sample")
    _step_axis(axes, [steps])
    title_and_legend(figure, "Mean reward", theme, axes.get_legend_handles_labels()[0])
    return png(figure)


def _draw_quarters(axes: Any, steps: Sequence[StepRecord], theme: Theme) -> None:
    if len(steps) == 1:
        return
    k = quarter(steps)
    label = f"first and last {'step' if k == 1 else f'{k} steps'}: {_change(steps)}"
    for part, mean in zip((steps[:k], steps[-k:]), quarter_means(steps), strict=True):
        if mean is not None:
            ends = (part[0].step - 0.4, part[-1].step + 0.4)
            axes.plot(ends, (mean, mean), color=theme.ink, lw=2.5, ls=(0, (3, 1)), label=label)
            label = "_"  # one entry in the legend


def _change(steps: Sequence[StepRecord]) -> str:
    first, last = quarter_means(steps)
    return f"{number(first)} → {number(last)}"


def steps_figure(steps: Sequence[StepRecord], theme: Theme = LIGHT) -> bytes:
    """Draw where the time of every step went, and the mean step; returns a PNG."""
    figure, axes = new_figure(4.6, theme)
    numbers = [step.step for step in steps]
    parts = [time_parts(step) for step in steps]
    means = mean_parts(steps)
    total_s = sum(means.values())
    base = [0.0] * len(steps)
    edge = {"edgecolor": theme.paper, "linewidth": 0.6 if len(steps) <= 50 else 0.0}
    for name, mean_s in means.items():
        heights = [part[name] for part in parts]
        label = f"{name}  {mean_s:.2f} s, {mean_s / total_s:.0%}"
        axes.bar(numbers, heights, 0.86, bottom=base, color=_COLOUR[name], label=label, **edge)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set_ylabel("wall time (s)")
    _step_axis(axes, [steps])
    axes.set_title("Time of a step", loc="left", color=theme.ink, fontweight="bold", fontsize=13)
    if means:
        handles, labels = axes.get_legend_handles_labels()
        legend = axes.legend(
            handles[::-1],
            labels[::-1],
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            title=f"mean step: {total_s:.2f} s",
            frameon=False,
            labelcolor=theme.ink,
            fontsize=11,
            title_fontsize=11,
            alignment="left",
        )
        legend.get_title().set_color(theme.ink)
    return png(figure)


def write_curves(path: Path, runs: Mapping[str, Sequence[StepRecord]]) -> None:
    """Write the reward of several runs, by label, as one PNG."""
    figure, axes = new_figure(4.6, LIGHT)
    window = min(_window(steps) for steps in runs.values())
    styles = zip(itertools.cycle(_LINES), itertools.cycle(_DASHES), strict=False)
    for (label, steps), (colour, dash) in zip(runs.items(), styles, strict=False):
        numbers = [step.step for step in steps]
        rewards = [step.reward for step in steps]
        axes.plot(numbers, rewards, "o", color=colour, ms=3, alpha=0.35)
        average = moving_average(rewards, window)
        axes.plot(
            numbers, average, color=colour, ls=dash, lw=2.5, label=f"{label}: {_change(steps)}"
        )
    axes.set_ylabel("mean reward per sample")
    _step_axis(axes, runs.values())
    title = "Mean reward, first → last quarter"
    if window > 1:
        title += f"; lines: mean of the last {window} steps"
    title_and_legend(figure, title, LIGHT, axes.get_legend_handles_labels()[0])
    path.write_bytes(png(figure))


def write_comparison(path: Path, runs: Mapping[str, Sequence[StepRecord]]) -> None:
    """Write where the mean step of several runs, by label, spends its time, as one PNG."""
    figure, axes = new_figure(1.7 + 0.75 * len(runs), LIGHT)
    means = {label: mean_parts(steps) for label, steps in runs.items()}
    longest_s = max(sum(parts.values()) for parts in means.values())
    present = [name for name in PARTS if any(name in parts for parts in means.values())]
    starts = dict.fromkeys(runs, 0.0)
    edge = {"edgecolor": LIGHT.paper, "linewidth": 0.8}
    for name in present:
        for row, (label, parts) in enumerate(means.items()):
            seconds = parts.get(name, 0.0)
            axes.barh(row, seconds, 0.62, left=starts[label], color=_COLOUR[name], **edge)
            if seconds > 0.05 * longest_s:
                middle = starts[label] + seconds / 2
                _inside(axes, middle, row, f"{seconds:.2f}", _COLOUR[name])
            starts[label] += seconds
    for row, total_s in enumerate(starts.values()):
        axes.annotate(
            f"{total_s:.2f} s",
            (total_s, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
            fontsize=11,
            color=LIGHT.ink,
        )
    axes.set_yticks(
        range(len(runs)), [f"{_plain(k)}\n{_count(steps)}" for k, steps in runs.items()]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, longest_s * 1.1 or 1.0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=LIGHT.faint, lw=0.8)
    axes.set_xlabel("mean wall time of a step (s)")
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLOUR[name], label=name) for name in present]
    title_and_legend(figure, "Where a step's time goes", LIGHT, handles)
    path.write_bytes(png(figure))


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last `window` values at each; NaN before there are so many."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    means = [finite_mean(part) if len(part) == window else None for part in parts]
    return [math.nan if mean is None else mean for mean in means]


def _plain(label: str) -> str:
    """Return a label that matplotlib does not take for mathematics."""
    return label.replace("$", r"\$")


def _count(steps: Sequence[StepRecord]) -> str:
    return "1 step" if len(steps) == 1 else f"{len(steps)} steps"


def _window(steps: Sequence[StepRecord]) -> int:
    return max(1, min(10, len(steps) // 4))


def _step_axis(axes: Any, runs: Iterable[Sequence[StepRecord]]) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = [step.step for steps in runs for step in steps]
    axes.set_xlabel("step")
    axes.set_xlim(min(numbers) - 0.7, max(numbers) + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _inside(axes: Any, x: float, y: float, text: str, background: str) -> None:
    """Write on a coloured surface, in what can be read on it."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 95
    axes.text(
        x, y, text, ha="center", va="center", fontsize=11, color="#ffffff" if dark else "#000000"
    )
