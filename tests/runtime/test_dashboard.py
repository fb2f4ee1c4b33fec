"""The dashboard as Grafana's SDK reads it, the queries and rules as PromQL, and the names of series."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel, RowPanel

from compiler.cli.main import main
from runtime.observe.watch.dashboard import ALERTS
from runtime.observe.watch.series import SERIES

NAMES = {series.name for series in SERIES}
UNITS = ("seconds", "bytes", "ratio", "total", "info")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> str:
    assert main(["watch", request.param]) == 0
    return capsys.readouterr().out


def inside(whole: Any, part: Any) -> bool:
    """Whether `whole` contains everything in `part`."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and inside(whole[key], value) for key, value in part.items()
        )
    if isinstance(part, list):
        return len(whole) == len(part) and all(inside(a, b) for a, b in zip(whole, part, strict=True))
    return bool(whole == part)


def selectors(node: Any) -> Iterator[str]:
    """The names of the series that a query reads."""
    yield from re.findall(r"\b(dsc_\w+)", node.prettify())


@pytest.mark.parametrize("printed", ["--dashboard"], indirect=True)
def test_grafana_reads_the_whole_dashboard(printed: str) -> None:
    """Its SDK, which is made of Grafana's schema, reads it, and writes back everything that is there."""
    register_default_plugins()
    form = json.loads(printed)
    dashboard = Dashboard.from_json(form)
    assert inside(json.loads(json.dumps(dashboard, cls=JSONEncoder)), form)
    panels = [panel for panel in dashboard.panels or () if isinstance(panel, Panel)]
    rows = [panel for panel in dashboard.panels or () if isinstance(panel, RowPanel)]
    assert len(panels) == len(SERIES) and len(rows) == len({series.group for series in SERIES})
    assert len({panel["id"] for panel in form["panels"]}) == len(form["panels"])
    drawn = [panel for panel in form["panels"] if panel["type"] != "row"]
    for panel, series in zip(drawn, SERIES, strict=True):
        (target,) = panel["targets"]
        expression = target["expr"].replace("$__rate_interval", "5m")
        assert {*selectors(promql_parser.parse(expression))} == {series.name}
        assert ("rate(" in expression) == (series.kind == "counter")
        assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} == {"run", *series.labels}
    cells = [
        (x, y) for panel in form["panels"] for g in [panel["gridPos"]]
        for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])
    ]  # fmt: skip
    assert len(cells) == len({*cells}) and max(x for x, _ in cells) < 24, "panels lie beside each other"


@pytest.mark.parametrize("printed", ["--rules"], indirect=True)
def test_rules_are_valid_for_prometheus(printed: str) -> None:
    """What promtool checks: groups, names, PromQL, durations, templates; and that they name series that there are."""
    (group,) = yaml.safe_load(printed)["groups"]
    assert group["name"] == "dsc" and len({rule["alert"] for rule in group["rules"]}) == len(ALERTS)
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch("[A-Z][A-Za-z]+", rule["alert"]) and re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        used = {*selectors(promql_parser.parse(rule["expr"]))}
        assert used and used <= NAMES
        assert {*re.findall(r"\$(\w+)", rule["annotations"]["summary"])} <= {"labels", "value"}


SILENT = dict(dsc_last_row_timestamp_seconds=0.0, dsc_running=1.0, dsc_step=5.0, dsc_last_step=9.0)


@pytest.mark.parametrize(
    ("minutes", "values", "alerts"),
    [
        (4, {}, set()),
        (6, {}, {"DscNoStep"}),
        (6, {"dsc_step": 9.0}, set()),
        (11, {"dsc_step": 9.0}, {"DscNotGone"}),
        (11, {"dsc_step": 9.0, "dsc_phase": 2.0, "dsc_phases": 2.0}, {"DscNotGone"}),
        (11, {"dsc_step": 9.0, "dsc_phase": 1.0, "dsc_phases": 2.0}, set()),
        (31, {"dsc_step": 9.0, "dsc_phase": 1.0, "dsc_phases": 2.0}, {"DscNoNextPhase"}),
        (31, {"dsc_phase": 1.0, "dsc_phases": 2.0}, {"DscNoStep"}),
    ],
)
def test_alerts_of_a_run_that_is_silent(minutes: int, values: dict[str, float], alerts: set[str]) -> None:
    """By the number of minutes since its last step. A comparison with a series that is missing has no result."""
    known = SILENT | values
    fired = set()
    for alert in ALERTS:
        if "dsc_last_row_timestamp_seconds" not in alert.expr:
            continue
        condition = re.sub(r" unless (.*)", r" and not (\1)", alert.expr).replace("time()", str(60.0 * minutes))
        condition = re.sub(r"dsc_\w+", lambda name: str(known.get(name[0], math.nan)), condition)
        if eval(condition, {"nan": math.nan}):
            fired.add(alert.name)
    assert fired == alerts


def test_names_follow_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming/: one word in front, base units and `_total` at the end."""
    assert len(NAMES) == len(SERIES)
    for series in SERIES:
        assert re.fullmatch(r"dsc(_[a-z]+)+", series.name) and series.help.endswith(".")
        assert series.name.endswith("_total") == (series.kind == "counter")
        if series.kind == "gauge" and series.unit != "short":  # a ratio may be above 1
            assert series.name.endswith("_ratio") == (series.unit == "percentunit")
        assert ("seconds" in series.name) == (series.unit == "s") or series.unit == "percentunit"
        assert ("bytes" in series.name) == (series.unit in ("bytes", "Bps"))
        assert all(re.fullmatch("[a-z_]+", label) and label != "run" for label in series.labels)


@pytest.mark.parametrize("words", [["--rules", "--dashboard"], ["--rules", "runs/a"], []])
def test_incompatible_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *words]) == 2
    assert " = hint: " in capsys.readouterr().err
