"""What a training run shows while it goes on and leaves behind: one record per step, a live table,
figures and a page.

matplotlib is imported only where a figure is drawn.
"""

from splitroll.report.attribution import Phases, attribute
from splitroll.report.figures import write_comparison, write_curves
from splitroll.report.live import LiveTable, step_line
from splitroll.report.page import write_report
from splitroll.report.steps import StepRecord, mean_parts, quarter_means, read_steps

__all__ = [
    "LiveTable",
    "Phases",
    "StepRecord",
    "attribute",
    "mean_parts",
    "quarter_means",
    "read_steps",
    "step_line",
    "write_comparison",
    "write_curves",
    "write_report",
]
