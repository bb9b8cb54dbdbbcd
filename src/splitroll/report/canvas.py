"""What all figures have in common: 2000 pixels wide, to be read at 1000; drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitroll.errors import ConfigError, Problem

_WIDE, _DPI = 10.0, 200
_LEGEND_WIDE = 108
"""Letters that fit in a row of the legend."""


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of a figure that depend on what is behind it."""

    ink: str
    paper: str
    faint: str


LIGHT = Theme(ink="#1f2328", paper="#ffffff", faint="#d8dee4")
DARK = Theme(ink="#e6edf3", paper="#161b22", faint="#30363d")


def new_figure(high: float, theme: Theme) -> tuple[Any, Any]:
    """Return a figure of `high` inches and its axes, with only what is needed drawn."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        hint = "pip install splitroll[train]"
        raise ConfigError(
            [Problem("report", "no package matplotlib", "it installed", hint)]
        ) from exc
    figure = Figure(figsize=(_WIDE, high), dpi=_DPI, facecolor=theme.paper, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=theme.paper)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.ink)
    axes.tick_params(colors=theme.ink, labelsize=11)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=theme.ink, fontsize=12)
    axes.grid(visible=True, axis="y", color=theme.faint, lw=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def title_and_legend(figure: Any, title: str, theme: Theme, handles: Sequence[Any]) -> None:
    """Title at the left, and the legend between it and the axes, in as few rows as fit."""
    wide = [len(handle.get_label()) + 5 for handle in handles]
    columns = len(wide) if sum(wide) <= _LEGEND_WIDE else max(1, _LEGEND_WIDE // max(wide))
    legend = figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        labelcolor=theme.ink,
        fontsize=11,
        title=title,
        title_fontproperties={"weight": "bold", "size": 13},
        alignment="left",
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=1.8,
    )
    legend.get_title().set_color(theme.ink)


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor())
    return buffer.getvalue()
