"""One self-contained page on a build, and on a run of it: schedule, placement, memory, losses, expert load.

`report_html(report)` is pure; everything it shows is in the plain values of `Report`.
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
