"""Render a `Report` as one HTML file with inline CSS and SVG, light and dark, without scripts or external resources."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from compiler.predict.planned_step import PlannedStep, PredictedStep
from compiler.predict.prediction import seconds
from compiler.program.lowered import LoweredPlan
from compiler.tools.picture import labels, palette
from compiler.tools.picture.geometry import Style, figure_of, pixels
from compiler.tools.picture.sheet import bulk, figure_css
from compiler.tools.picture.template import environment
from compiler.tools.report import charts
from compiler.tools.report.diagrams import view_of
from compiler.tools.report.long_metrics import typical
from compiler.tools.report.sections import RankRow, Report, StageLine, report_of
from compiler.tools.report.summary import PartsChart, parts_chart, summary_of
from dsl.schema import Spec

FOLDER = Path(__file__).parent
PAGE_WIDTH, MOST_WIDTH = 820.0, 12_000.0  # pixels of the schedule: on the page, and at most if it scrolls
STEP_ROWS = 100  # the measured step is the median of at most this many steps, as a resume may change the plan
LAST_STEPS = 10  # the training loss of the summary is the mean of this many steps, since one step is noisy


def build_pages(spec: Spec, lowered: LoweredPlan, step: PredictedStep) -> dict[str, str]:
    """Return the pages of a build by file name, for `compile_spec(pages=…)`."""
    return {"report.html": report_html(report_of(spec, lowered, step=step))}


def report_html(report: Report) -> str:
    """Return the page. Pure: equal values give equal bytes, and every text is escaped."""
    style = palette.css(with_series=True) + figure_css() + (FOLDER / "style.css").read_text("utf-8")
    unit = pixels((report.schedule,), PAGE_WIDTH, MOST_WIDTH)
    return (
        environment(FOLDER)
        .get_template("page.html.j2")
        .render(
            report=report,
            style=Markup(style),  # safe: it contains nothing of the report
            timeline=figure_of(report.schedule, unit, Style()),
            bulk=bulk,
            placement=placement_rows(report),
            memory=memory_rows(report),
            run=_run(report) if report.run else None,
            view=view_of(report.planned) if report.planned else None,
        )
    )


# ---------------------------------------------------------------- placement and memory


@dataclass(frozen=True)
class PlacementRow:
    """A pipeline rank, and the stage it holds in each column, or None. `tints`: how deep in the model each stage is."""

    rank: RankRow
    stages: tuple[StageLine | None, ...]
    tints: tuple[int, ...]


def placement_rows(report: Report) -> tuple[PlacementRow, ...]:
    """Return stages by rank. A column is a direction if stages are mirrored, else the k-th stage of the rank."""
    mirrored = any(len(stage.ranks) > 1 for stage in report.stages)
    last = max(1, len(report.stages) - 1)
    num_columns = max((len(rank.stages) for rank in report.ranks), default=0)
    rows = []
    for rank in report.ranks:
        cells: list[StageLine | None] = [None] * num_columns
        for k, stage in enumerate(sorted((s for s in report.stages if rank.rank in s.ranks), key=lambda s: s.index)):
            cells[stage.ranks.index(rank.rank) if mirrored else k] = stage
        tints = tuple(round(10 + 34 * cell.index / last) if cell else 0 for cell in cells)
        rows.append(PlacementRow(rank, tuple(cells), tints))
    return tuple(rows)


@dataclass(frozen=True)
class MemoryRow:
    """A pipeline rank, its total bytes, and a bar of its kinds of memory: (css class, offset, width) in percent."""

    rank: RankRow
    total: int
    parts: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class MemoryTable:
    kinds: tuple[tuple[str, str], ...]  # (css class, kind)
    rows: tuple[MemoryRow, ...]
    amounts: tuple[tuple[int, ...], ...]  # bytes by row and kind


def memory_rows(report: Report) -> MemoryTable:
    """Return the memory table. Kinds are in order of appearance; the bar of the fullest rank has full width."""
    kinds = list(dict.fromkeys(kind for rank in report.ranks for kind, _ in rank.memory))
    css = {kind: f"m{min(i, 7)}" for i, kind in enumerate(kinds)}
    largest = max((sum(amount for _, amount in rank.memory) for rank in report.ranks), default=0) or 1
    rows, amounts = [], []
    for rank in report.ranks:
        offset, parts = 0, []
        for kind, amount in rank.memory:
            parts.append((css[kind], f"{100 * offset / largest:.2f}", f"{100 * amount / largest:.2f}"))
            offset += amount
        rows.append(MemoryRow(rank, offset, tuple(parts)))
        table = dict(rank.memory)
        assert len(table) == len(rank.memory), f"a kind of memory is listed twice on rank {rank.rank}"
        amounts.append(tuple(table.get(kind, 0) for kind in kinds))
    return MemoryTable(tuple((css[kind], kind) for kind in kinds), tuple(rows), tuple(amounts))


# ---------------------------------------------------------------- a run


@dataclass(frozen=True)
class RunView:
    step_line: str  # the measured step beside the planned one
    has_unigram: bool
    facts: tuple[tuple[str, str], ...]
    data: tuple[tuple[str, str], ...]
    held_out: tuple[str, ...]
    reward: charts.Chart | None
    loss: charts.Chart | None
    panels: tuple[charts.Chart, ...]
    parts: PartsChart | None  # where the time of the steps went
    load: charts.LoadMap | None


def _run(report: Report) -> RunView:
    run = report.run
    assert run is not None
    unigram = run.data.get("unigram_nats")
    measured = measured_step(run.metrics)
    planned = report.planned
    facts = _summary(run.metrics, unigram)
    if measured:
        facts += (("step, measured", seconds(measured.seconds)),)
        facts += ((_step_label(planned), seconds(planned.seconds)),) if planned else ()
    summary = summary_of(report)
    facts += tuple(summary.facts()) if summary else ()
    facts += _health(run.events)
    if run.damaged_rows:
        facts += (("damaged lines of metrics.jsonl, left out", f"{run.damaged_rows:,}"),)
    return RunView(
        step_line=measured.line(planned.seconds) if measured and planned else "",
        has_unigram=unigram is not None,
        facts=facts,
        data=_data_facts(run.data),
        held_out=tuple(run.data.get("held_out", ())),
        reward=charts.reward_chart(run.metrics),
        loss=charts.loss_chart(run.metrics, unigram),
        panels=charts.panels(run.metrics),
        parts=parts_chart(run.metrics, run.lost.lost_at if run.lost else {}, planned),
        load=charts.load_map(run.load.get("load", ()), report.moe_layers),
    )


def _step_label(planned: PlannedStep) -> str:
    """Return the label of the planned time of a step."""
    generation = " with its completions" if planned.generation else ""
    return f"step{generation}, planned{'' if planned.calibrated else ' but not calibrated for this machine'}"


@dataclass(frozen=True)
class MeasuredStep:
    """The median of a run's last steps of the largest batch."""

    seconds: float
    num_steps: int

    def line(self, planned_s: float) -> str:
        """Return a sentence that compares the step with the planned one."""
        change = f"{self.seconds / planned_s - 1:+.0%}".replace("-", "−")
        steps = f"the last {self.num_steps} steps" if self.num_steps > 1 else "one step"
        return f"Measured: {seconds(self.seconds)} ({change}), the median of {steps} of the largest batch."


def measured_step(metrics: Sequence[Mapping[str, Any]]) -> MeasuredStep | None:
    """Return the measured step; None if no row has a positive time. Tokens of a row are `tokens_per_s` · `step_s`."""
    times, speeds = dict(charts.column(metrics, "step_s")), dict(charts.column(metrics, "tokens_per_s"))
    tokens = {step: round(time * speeds.get(step, 0.0)) for step, time in times.items() if time > 0}
    largest = max(tokens.values(), default=0)
    last = [times[step] for step, size in tokens.items() if size == largest][-STEP_ROWS:]
    return MeasuredStep(statistics.median(last), len(last)) if last else None


def _summary(metrics: tuple[Mapping[str, Any], ...], unigram: float | None) -> tuple[tuple[str, str], ...]:
    facts = []
    training, validation = charts.column(metrics, "loss"), charts.column(metrics, "validation_loss")
    tokens, speed = charts.column(metrics, "tokens"), charts.column(typical(metrics), "tokens_per_s")
    rewards = charts.column(metrics, "reward")
    if training:
        name, points = ("reward", rewards) if rewards else ("training loss", training)
        last = [value for _, value in points[-LAST_STEPS:]]
        facts += [
            ("steps", f"{training[-1][0]:,.0f}"),
            (f"{name}, last {len(last)} steps", f"{statistics.fmean(last):.3f}"),
        ]
    if validation:
        facts.append(("validation loss", f"{validation[-1][1]:.3f}"))
    if unigram is not None:
        facts.append(("unigram cross-entropy", f"{unigram:.3f}"))
        if validation:
            facts.append(("validation below unigram", f"{unigram - validation[-1][1]:+.3f}".replace("-", "−")))
    if tokens:
        facts.append(("tokens", labels.count(int(tokens[-1][1]))))
    if speed:
        facts.append(("tokens per second, median", labels.number(statistics.median(value for _, value in speed))))
    return (*facts, *_phases(metrics))


def _health(events: tuple[Mapping[str, Any], ...]) -> tuple[tuple[str, str], ...]:
    """Return the number of bad steps by the action that followed, of device faults, and of slow ranks, with the last of
    each."""
    facts = []
    for action, name in (("skip", "batches skipped"), ("rollback", "rollbacks"), ("stop", "stops after bad steps")):
        if rows := [row for row in events if row.get("event") == "bad_step" and row.get("action") == action]:
            facts.append((name, f"{len(rows):,}, the last at step {rows[-1]['step']:,}: {rows[-1].get('reason')}"))
    if rows := [row for row in events if row.get("event") == "fault"]:
        facts.append(
            ("device faults", f"{len(rows):,}, the last at step {rows[-1]['step']:,}: {rows[-1].get('reason')}")
        )
    if rows := [row for row in events if row.get("event") == "straggler"]:
        facts.append(("slow ranks", f"{len(rows):,}, the last at step {rows[-1]['step']:,}: {rows[-1].get('reason')}"))
    return tuple(facts)


def _phases(metrics: tuple[Mapping[str, Any], ...]) -> tuple[tuple[str, str], ...]:
    """Return a line for each phase of a run; empty for a run without phases."""
    facts = []
    for number in sorted({row["phase"] for row in metrics if type(row.get("phase")) is int}):
        rows = [row for row in metrics if row.get("phase") == number]
        words = [f"steps {rows[0]['step']:,} to {rows[-1]['step']:,}"]
        if loss := charts.column(rows, "loss"):
            words.append(f"loss {loss[-1][1]:.3f}")
        if speed := charts.column(typical(rows), "tokens_per_s"):
            words.append(f"{labels.number(statistics.median(value for _, value in speed))} tokens per second")
        facts.append((f"phase {number}", ", ".join(words)))
    return tuple(facts)


def _data_facts(data: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the facts of meta.json about the data."""
    if not data:
        return ()
    facts = [("source", str(data["source"])), ("tokenizer", f"{data['tokenizer']['vocab']:,} tokens")]
    for name, split in data["splits"].items():
        words = f"{split['files']:,} files, {labels.count(split['tokens'])} tokens, {labels.num_bytes(split['bytes'])}"
        facts.append((name, words))
    skipped = [f"{number:,} {reason}" for reason, number in sorted(data["skipped"].items())]
    facts += [("left out", ", ".join(skipped))] * bool(skipped)
    if filters := data.get("filters", {}):
        from runtime.data.filters import summary_line  # imports numpy, which other pages do not need

        facts += [(f"filters {source}".strip(), summary_line(counts)) for source, counts in filters.items()]
    return tuple(facts)
