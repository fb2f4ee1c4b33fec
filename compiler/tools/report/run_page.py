"""The report of a run folder, written after its ranks have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from compiler.files.text import TextFileError, read_form
from compiler.pipeline import lower_spec
from compiler.plan.read_files import load_with_files
from compiler.tools.report.long_metrics import Rows, drawn_rows, step_rows, steps_of_starts
from compiler.tools.report.lost_time import lost_time
from compiler.tools.report.measured_memory import peaks_of_ranks
from compiler.tools.report.page import report_html
from compiler.tools.report.sections import Report, RunFigures, report_of
from runtime.system.regular_files import write

MOST_META_BYTES = 256 << 20  # largest meta.json that is read; it may name every file of a corpus
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class CorpusSplit(_Form):
    """The sizes of the training or validation part of a corpus."""

    files: Count
    tokens: Count
    bytes: Count


class Tokenizer(_Form):
    """The tokenizer of a corpus."""

    vocab: Count


class FilteredCounts(_Form):
    """Documents of a source before and after its filters."""

    documents: Count
    kept: Count
    left_out: dict[str, Count]


class DataForm(_Form):
    """The fields of data/*/meta.json that the page shows."""

    source: str | list[str]
    tokenizer: Tokenizer
    splits: dict[str, CorpusSplit]
    skipped: dict[str, Count]
    filters: dict[str, FilteredCounts] = {}
    held_out: list[str] = []
    unigram_nats: Annotated[float, Field(ge=0, lt=1e6)] | None = None


class LoadForm(_Form):
    """load.json: tokens of each expert, a list per MoE layer."""

    load: list[list[Count]]


def write_run_report(run: Path) -> tuple[Path, Report]:
    """Write `run`/report.html. Returns its path and the report.

    Raises ValueError or SpecError with the path of a missing or damaged file, OSError if the report cannot be written.
    """
    report = run_report(run)
    return _write(run, report_html(report)), report


def run_report(run: Path) -> Report:
    """Return the report of a run from its spec.resolved, schedule.txt, metrics.jsonl, events.jsonl, load.json and
    data/*/meta.json. Raises ValueError or SpecError as `write_run_report` does."""
    spec = load_with_files(run / "spec.resolved")
    lowered = lower_spec(spec)
    events = events_of(run)
    metrics, damaged = drawn_rows(run / "metrics.jsonl", steps_of_starts(events))
    figures = RunFigures(
        metrics=metrics,
        data=_meta(run),
        load=_load(run / "load.json"),
        memory=peaks_of_ranks(run, spec, lowered.lowering, lowered.schedules),
        damaged_rows=damaged,
        lost=lost_time(metrics, rows_before_resumes(run), events) if events else None,
        events=events,
    )
    return report_of(spec, lowered, figures)


def _write(run: Path, text: str) -> Path:
    path = run / "report.html"
    if path.is_dir():
        raise TextFileError(f"{path} is a folder, but the report is written there: move it away")
    write(path, text)
    return path


def rows_before_resumes(run: Path) -> Rows:
    """Return the rows of steps that were trained again, from the files that a resume moved them to."""
    return tuple(row for path in sorted(run.glob("metrics.[0-9]*.jsonl")) for row in drawn_rows(path).rows)


def events_of(run: Path) -> Rows:
    """Return the events of a run that have a step; none if the file cannot be read."""
    try:
        return step_rows(run / "events.jsonl").rows
    except TextFileError:
        return ()


def _load(path: Path) -> dict[str, Any]:
    return read_form(path, MOST_META_BYTES, LoadForm).model_dump() if path.exists() else {}


def _meta(run: Path) -> dict[str, Any]:
    """Return `meta.json` of the corpus that was used last; empty if there is none."""
    try:
        paths = sorted((run / "data").glob("*/meta.json"), key=lambda p: (p.stat().st_mtime, p.name))
    except OSError as error:
        raise TextFileError(f"{error.filename}: {error.strerror}") from None
    return read_form(paths[-1], MOST_META_BYTES, DataForm).model_dump() if paths else {}
