"""One self-contained page on a build, and on a run of it: schedule, placement, memory, losses, expert load.

`report_html(report)` is pure; everything it shows is in the plain values of `Report`.
"""

from compiler.report.page import report_html
from compiler.report.values import Cell, Drawn, ExpertRow, RankRow, Report, RunFigures, StageRow, drawn_schedule

__all__ = [
    "Cell",
    "Drawn",
    "ExpertRow",
    "RankRow",
    "Report",
    "RunFigures",
    "StageRow",
    "drawn_schedule",
    "report_html",
]
