"""Charts of a comparison: makespans by workload and alternative, and engines over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitroll.bench.ours import Ran
from splitroll.report.canvas import LIGHT, new_figure, png, title_and_legend

_BEST, _OTHER, _BOUND = "#0072b2", "#9fb7c6", "#d55e00"
_PHASES = {"prefill": "#d55e00", "decode": "#009e73"}
_ROW = 0.34
_SHOWN_LANES = 64


def makespan_figure(results: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw every alternative's median makespan with its spread, as a multiple of `adaptive`'s (of
    the best one where it did not run), one panel row per workload; returns a PNG."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = sum(len(result["alternatives"]) + 1.4 for result in results)
    figure, axes = new_figure(0.8 + _ROW * rows, LIGHT)
    y, ticks, labels = 0.0, [], []
    for result in results:
        alternatives = result["alternatives"]
        best = min(one["median_s"] for one in alternatives.values())
        base = alternatives.get("adaptive", {"median_s": best})["median_s"]
        axes.text(0.0, y, f"{result['workload']}", fontweight="bold", fontsize=11, va="center")
        y += 1
        begun = y
        for name, one in sorted(alternatives.items(), key=lambda item: item[1]["median_s"]):
            colour = _BEST if name == "adaptive" else _OTHER
            axes.barh(y, one["median_s"] / base, height=0.7, color=colour)
            axes.plot([one["min_s"] / base, one["max_s"] / base], [y, y], color=LIGHT.ink, lw=1.2)
            axes.text(
                max(one["max_s"], one["median_s"]) / base + 0.02,
                y,
                f"{one['median_s']:.1f} s",
                fontsize=9,
                va="center",
            )
            ticks.append(y)
            labels.append(name)
            y += 1
        if result["lower_bound_s"] is not None:
            at = result["lower_bound_s"] / base
            axes.plot([at, at], [begun - 0.5, y - 0.5], color=_BOUND, lw=1.6, ls="--")
        y += 0.4
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=LIGHT.faint, lw=0.8)
    axes.set_xlabel("makespan, as a multiple of adaptive's median")
    handles = [
        Patch(color=_BEST, label="adaptive"),
        Patch(color=_OTHER, label="alternatives"),
        Line2D([], [], color=LIGHT.ink, lw=1.2, label="least to most of the rounds"),
        Line2D([], [], color=_BOUND, lw=1.6, ls="--", label="lower bound"),
    ]
    title_and_legend(figure, "The same work, in turn", LIGHT, handles)
    return png(figure)


def timeline_figure(workload: str, runs: Mapping[str, Ran]) -> bytes:
    """Draw what each engine did over time, one lane per sample under way, for some alternatives on
    the same axis; returns a PNG."""
    from matplotlib.patches import Patch

    lanes = {
        name: {engine: _lanes(ran, engine) for engine in sorted({s.engine for s in ran.spans})}
        for name, ran in runs.items()
    }
    high = sum(len(lane) for engines in lanes.values() for lane in engines.values())
    figure, axes = new_figure(1.6 + 0.05 * high + 0.4 * len(lanes), LIGHT)
    y, ticks, labels = 0.0, [], []
    for name, engines in lanes.items():
        for engine, rows in engines.items():
            for row in rows:
                for span in row:
                    axes.barh(
                        y,
                        span.end_s - span.start_s,
                        left=span.start_s,
                        height=0.9,
                        color=_PHASES[span.phase],
                        alpha=0.85,
                        lw=0,
                    )
                y += 1
            ticks.append(y - len(rows) / 2)
            labels.append(f"{name}\n{engine}")
            axes.axhline(y, color=LIGHT.faint, lw=0.8)
            y += 1
        axes.plot([runs[name].makespan_s] * 2, [y - 2, y], color=LIGHT.ink, lw=1.5)
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds since the work was asked for")
    handles = [Patch(color=colour, label=phase) for phase, colour in _PHASES.items()]
    title_and_legend(figure, f"{workload}: engines over time, the last round", LIGHT, handles)
    return png(figure)


def _lanes(ran: Ran, engine: str) -> list[list[Any]]:
    """Return an engine's spans in as few rows as they fit without overlapping."""
    rows: list[list[Any]] = []
    for span in sorted(
        (s for s in ran.spans if s.engine == engine and s.end_s > s.start_s),
        key=lambda span: span.start_s,
    ):
        free = next((row for row in rows if row[-1].end_s <= span.start_s + 1e-6), None)
        if free is not None:
            free.append(span)
        elif len(rows) < _SHOWN_LANES:
            rows.append([span])
    return rows
