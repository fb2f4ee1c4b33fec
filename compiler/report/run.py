"""The report of a run folder, written when its ranks have ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compiler.pipeline import lower_spec
from compiler.place.own import own_placement
from compiler.predict.memory_run import measured_memories
from compiler.rates.own import with_rates
from compiler.report.build import report_of
from compiler.report.page import report_html
from compiler.report.values import RunFigures
from compiler.schedules.own import own_schedule
from dsl.load import load


def write_run_report(run: Path) -> Path:
    """`run`/report.html from what it left: spec.resolved, schedule.txt, metrics.jsonl, load.json, data/*/meta.json."""
    spec = with_rates(load(run / "spec.resolved"), run)
    placement = own_placement(spec, run)
    lowered = lower_spec(spec, own_schedule(spec, run), placement=placement)
    figures = RunFigures(
        metrics=_lines(run / "metrics.jsonl"),
        data=_meta(run),
        load=_json(run / "load.json"),
        memory=measured_memories(run, spec, lowered.plan, lowered.cuts, lowered.schedules),
    )
    text = report_html(report_of(spec, lowered, figures))
    path = run / "report.html"
    temporary = path.with_name(".report.html.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
    return path


def _lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Whole lines only: a killed run may have left half of one."""
    whole, _, _ = path.read_text("utf-8").rpartition("\n")
    return tuple(json.loads(line) for line in whole.splitlines())


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _meta(run: Path) -> dict[str, Any]:
    """Of the corpus that was used last."""
    found = sorted((run / "data").glob("*/meta.json"), key=lambda p: (p.stat().st_mtime, p.name))
    return _json(found[-1]) if found else {}
