"""The self-contained HTML report of a build or a run: schedule, placement, memory, losses, expert load.

`page.report_html(report)` is pure; `sections.Report` holds everything it shows, as plain values.
"""
