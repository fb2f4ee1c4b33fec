"""The self-contained HTML report of a build or a run: schedule, placement, memory, losses, expert load.

`report_html(report)` is pure; `Report` holds everything it shows, as plain values.
"""

from compiler.tools.report.page import report_html
from compiler.tools.report.sections import ExpertRow, RankRow, Report, RunFigures, StageLine

__all__ = [
    "ExpertRow",
    "RankRow",
    "Report",
    "RunFigures",
    "StageLine",
    "report_html",
]
