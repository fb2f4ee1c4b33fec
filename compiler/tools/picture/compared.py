"""Planned and measured on one picture: of every rank what was planned, what was measured below it, and by how much
each action missed."""

from __future__ import annotations

import statistics
from dataclasses import replace

from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.tools.picture import labels
from compiler.tools.picture.drawing import Cell, Message, Panel, Picture, Row, Table
from compiler.tools.picture.panel import cells_of, directions_of, panel_of
from compiler.tools.picture.recorded import Measured
from runtime.contract.actions import KINDS, actions_of


def measured_picture(
    title: str, schedule: Schedule, costs: Costs, measured: Measured, source: str, left_out: int = 0
) -> Picture:
    """`costs` in ms; `source` says in words where they come from. Times of the picture are ms. `left_out`: traced steps
    of other programs, which are not in it."""
    planned = panel_of(schedule, costs)
    spans = [tuple((start / 1000, end / 1000) for start, end in rank) for rank in measured.spans]
    rows: list[Row] = []
    for row in planned.rows:
        cells = cells_of(schedule, row.rank, spans[row.rank])
        found = tuple(_judged(a, b) for a, b in zip(row.cells, cells, strict=True))
        rows += [replace(row, track="planned", activation=0.0), Row(row.rank, "measured", found)]
    panel = Panel(planned.name, tuple(rows), directions_of(schedule), _messages(planned, rows))
    took, plan = measured.makespan / 1000, planned.makespan
    errors = [abs(cell.error) for row in rows for cell in row.cells if cell.error is not None]
    facts = (
        ("planned", f"{labels.number(plan)} ms"),
        ("measured", f"{labels.number(took)} ms ({percent(took / plan - 1)})"),
        ("an action misses its plan by", f"{statistics.median(errors):.0%} (median)"),
        ("traced steps", str(measured.num_steps)),
    )
    notes = [f"Planned from {source}; measured are medians over steps and the devices of each pipeline rank."]
    if left_out:
        steps = "1 traced step is" if left_out == 1 else f"{left_out:,} traced steps are"
        notes.append(f"{steps} left out: they ran other programs, of another phase or of a plan before a resume.")
    table = _table(schedule, costs, measured)
    return Picture(title, "ms", (replace(panel, facts=facts),), tuple(notes), us=1000.0, given_table=table)


def percent(share: float) -> str:
    """+12%, −3%."""
    return f"{share:+.0%}".replace("-", "−")


def _judged(planned: Cell, measured: Cell) -> Cell:
    plan, took = planned.end - planned.start, measured.end - measured.start
    error = took / plan - 1 if plan else None
    late = measured.start - planned.start
    missed = f" ({percent(error)})" if error is not None else ""
    when = "later" if late >= 0 else "earlier"
    times = f"measured {labels.number(took)} ms, planned {labels.number(plan)} ms{missed}"
    note = f"{times}, starts {labels.number(abs(late))} ms {when}"
    return replace(measured, note=note, error=error)


def _messages(planned: Panel, rows: list[Row]) -> tuple[Message, ...]:
    """The planned messages at the times at which they were really sent and taken."""
    ends = {(r.rank, d.label): c.end for r in rows if r.track == "measured" for c in r.cells for d in c.actions}
    return tuple(
        replace(m, sent=sent, arrived=sent + m.arrived - m.sent)
        for m in planned.messages
        for sent in [ends[m.source, m.label]]
    )


def _order(name: str) -> tuple[object, ...]:
    """F0 … F15, B0 …, and pairs behind them."""
    return ("|" in name, *((KINDS.index(part[0]), int(part[1:])) for part in name.split(" | ")))


def _table(schedule: Schedule, costs: Costs, measured: Measured) -> Table:
    """A row a kind of action and stage."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for rank, (steps, samples) in enumerate(zip(schedule.actions, measured.samples, strict=True)):
        for step, times in zip(steps, samples, strict=True):
            name = " | ".join(f"{a.kind}{a.stage}" for a in actions_of(step))
            plans, tooks = found.setdefault(name, ([], []))
            plans.append(float(costs.of(step, rank)))
            tooks += [time / 1000 for time in times]
    rows = []
    for name, (plans, tooks) in sorted(found.items(), key=lambda item: _order(item[0])):
        plan, took = statistics.median(plans), statistics.median(tooks)
        low, *_, high = statistics.quantiles(tooks * 2, n=20, method="inclusive")
        spread = f"{labels.number(low)} – {labels.number(high)}"
        rows.append(
            (name, labels.number(plan), labels.number(took), spread, percent(took / plan - 1), f"{len(tooks):,}")
        )
    return Table(("action", "planned, ms", "measured, ms", "nine of ten, ms", "error", "samples"), tuple(rows))
