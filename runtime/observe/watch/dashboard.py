"""A Grafana dashboard and Prometheus alert rules, generated from the table of series, so that all names exist.

dsc watch --dashboard > dsc.json        Grafana: Dashboards, New, Import
dsc watch --rules > dsc.rules.yml       prometheus.yml: rule_files: [dsc.rules.yml]
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from runtime.observe.watch.series import SERIES, Series

SCHEMA_VERSION = 39  # of Grafana 11
WIDTH, HEIGHT = 8, 7  # of a panel; a row of the dashboard is 24 wide
LONG = "$__rate_interval"
RUN = '{run=~"$run"}'
# Queries of series that are not drawn as `name{run=…}`.
QUERIES = {
    "dsc_spent_seconds_total": "rate({name}{run}[{long}]) / ignoring(part) group_left sum without(part) "
    "(rate({name}{run}[{long}]))",
    "dsc_last_row_timestamp_seconds": "time() - {name}{run}",
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard for import into Grafana: a panel for each series, in a row for each group."""
    panels: list[dict[str, Any]] = []
    y = 0
    for group, members in groupby(SERIES, key=lambda series: series.group):
        panels.append({"id": len(panels) + 1, "type": "row", "title": group, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})  # fmt: skip
        y += 1
        for index, series in enumerate(members):
            row, column = divmod(index, 24 // WIDTH)
            place = {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": y + row * HEIGHT}
            panels.append(_panel(len(panels) + 1, series, place))
        y = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    return {
        "uid": "dsc-run",
        "title": "dsc: a run",
        "tags": ["dsc"],
        "timezone": "browser",
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _variable()]},
        "annotations": {"list": []},
        "panels": panels,
    }


def query(series: Series) -> str:
    """Return the PromQL query of a series' panel."""
    form = QUERIES.get(series.name, "rate({name}{run}[{long}])" if series.kind == "counter" else "{name}{run}")
    return form.format(name=series.name, run=RUN, long=LONG)


def _panel(number: int, series: Series, place: dict[str, int]) -> dict[str, Any]:
    legend = " ".join(f"{{{{{label}}}}}" for label in ("run", *series.labels))
    return {
        "id": number,
        "type": "timeseries",
        "title": series.title,
        "description": series.help,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": series.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [{"refId": "A", "expr": query(series), "legendFormat": legend}],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable() -> dict[str, Any]:
    return {
        "name": "run",
        "type": "query",
        "label": "Run",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": "label_values(dsc_step, run)", "refId": "run"},
        "includeAll": True,
        "multi": True,
        "refresh": 2,
    }


# ---------------------------------------------------------------- alerts


class Alert(NamedTuple):
    """An alert rule: active while `expr` has a value for `lasts`, with severity and message."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str


ALERTS = (
    Alert("DscNoStep", "time() - dsc_last_row_timestamp_seconds > 300 and dsc_running == 1"
          " unless dsc_step >= dsc_last_step", "1m", "critical",
          "{{ $labels.run }} has trained no step for {{ $value | humanizeDuration }}"),
    Alert("DscNoNextPhase", "time() - dsc_last_row_timestamp_seconds > 1800 and dsc_step >= dsc_last_step"
          " and dsc_phase < dsc_phases", "1m", "critical",
          "a phase of {{ $labels.run }} has ended, and the next one has not begun for {{ $value | humanizeDuration }}"),
    Alert("DscNotGone", "time() - dsc_last_row_timestamp_seconds > 600 and dsc_step >= dsc_last_step"
          " unless dsc_phase < dsc_phases", "1m", "warning",
          "{{ $labels.run }} has trained its last step, but has not ended for {{ $value | humanizeDuration }}"),
    Alert("DscNotFinite", "dsc_finite == 0", "0s", "critical",
          "the loss or the gradient norm of {{ $labels.run }} is not finite"),
    Alert("DscBadSteps", "increase(dsc_bad_steps_total[1h]) > 0", "0s", "warning",
          "{{ $labels.run }} left out or rolled back {{ $value }} steps in an hour"),
    Alert("DscSavesFail", "increase(dsc_save_failures_total[1h]) > 0", "0s", "critical",
          "{{ $labels.run }} could not save a checkpoint"),
    Alert("DscCopiesFail", "dsc_failing_copy_places > 0", "10m", "warning",
          "checkpoints of {{ $labels.run }} are not copied to {{ $value }} places"),
    Alert("DscDeviceFault", "dsc_device_fault == 1", "0s", "warning",
          "device {{ $labels.gpu }} of rank {{ $labels.rank }} of {{ $labels.run }}: {{ $labels.kind }}"),
    Alert("DscRestarts", "increase(dsc_restarts_total[1h]) > 3", "0s", "warning",
          "the ranks of {{ $labels.run }} were started again {{ $value }} times in an hour"),
    Alert("DscStraggler", "dsc_straggler_ratio > 1", "0s", "warning",
          "rank {{ $labels.rank }} of {{ $labels.run }} on {{ $labels.host }} takes {{ $value }} times as long as its "
          "peers: {{ $labels.part }}"),
    Alert("DscSlow", "avg_over_time(dsc_step_duration_seconds[15m]) > 1.5 * dsc_predicted_step_duration_seconds", "15m",
          "info", "steps of {{ $labels.run }} take more than one and a half times what is planned"),
)  # fmt: skip


def rules() -> str:
    """Return the alert rules as a Prometheus file."""
    lines = ["groups:", "  - name: dsc", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f'        expr: "{alert.expr}"',
            f"        for: {alert.lasts}",
            f"        labels: {{ severity: {alert.severity} }}",
            f'        annotations: {{ summary: "{alert.summary}" }}',
        ]
    return "\n".join(lines) + "\n"
