"""Make the values of a picture from a schedule and its costs: boxes, messages, activations over time."""

from __future__ import annotations

import statistics
from dataclasses import replace
from fractions import Fraction

from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline, simulate
from compiler.tools.picture import labels
from compiler.tools.picture.drawing import (
    BoxRow,
    DrawnAction,
    DrawnCopy,
    DrawnMessage,
    Lanes,
    Panel,
    Picture,
    StepCell,
    TextTable,
)
from compiler.tools.picture.recorded import RecordedTimes
from runtime.contract.actions import COPIES, KINDS, Action, ActionKind, actions_of, is_copy


def panel_of(
    schedule: Schedule,
    costs: Costs,
    *,
    name: str = "",
    lanes: tuple[Lanes, ...] = (),
    facts: tuple[tuple[str, str], ...] = (),
    activation: Fraction = Fraction(1),
    timeline: Timeline | None = None,
) -> Panel:
    """Return the panel of a checked schedule, simulated unless `timeline` is given.

    `activation`: memory that a forward keeps; the unit is the activation of 1/P of the model. `lanes`: by rank, the
    exchanges of its bodies. Raises ScheduleError if ranks wait for each other in a cycle.
    """
    timeline = timeline or simulate(schedule, costs)
    unit = float(timeline.unit)
    spans = tuple(tuple((start * unit, end * unit) for start, end in rank) for rank in timeline.ticks)
    default = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_micro_batches} micro-batches"
    rows = tuple(
        BoxRow(
            rank,
            "",
            cells_of(schedule, rank, spans[rank]),
            float(activation),
            lanes[rank] if lanes else (),
            costs.keeps,
            _copies(schedule, rank, timeline) if timeline.copies else (),
        )
        for rank in range(schedule.num_ranks)
    )
    messages = _messages(schedule, spans, costs)
    return Panel(name or default, rows, directions_of(schedule), messages, facts)


def directions_of(schedule: Schedule) -> tuple[str, ...]:
    """Return the names of direction 0 and, if there is one, of direction 1."""
    if schedule.stage_placement == BIDIRECTIONAL:
        return ("from the first rank on", "from the last rank back")
    return ("stage",) if len(schedule.stages_of(0)) == 1 else ("even pass", "odd pass")


def cells_of(schedule: Schedule, rank: int, spans: tuple[tuple[float, float], ...]) -> tuple[StepCell, ...]:
    """Return the steps of a rank at the times of `spans`, without copies."""
    two_ways = schedule.stage_placement == BIDIRECTIONAL
    passes = {stage: k % 2 for k, stage in enumerate(schedule.stages_of(rank))}

    def drawn(action: Action) -> DrawnAction:
        tint = schedule.direction(action.micro_batch) if two_ways else passes[action.stage]
        return DrawnAction(str(action), action.kind, tint, action.micro_batch)

    return tuple(
        StepCell(tuple(drawn(action) for action in actions_of(step)), start, end)
        for step, (start, end) in zip(schedule.actions[rank], spans, strict=True)
        if not is_copy(step)
    )


def _copies(schedule: Schedule, rank: int, timeline: Timeline) -> tuple[DrawnCopy, ...]:
    """The copies of a rank between its device and the host."""
    unit, ticks, steps = float(timeline.unit), timeline.ticks[rank], schedule.actions[rank]
    return tuple(
        DrawnCopy(str(steps[k]), start * unit, end * unit, k - before, ticks[k][1] * unit)
        for before, (k, start, end) in enumerate(timeline.copies[rank])
    )


def _messages(
    schedule: Schedule, spans: tuple[tuple[tuple[float, float], ...], ...], costs: Costs
) -> tuple[DrawnMessage, ...]:
    """The messages between ranks, by rank and in the order of sending."""
    last = schedule.num_stages - 1
    messages, times = [], dict[tuple[int, int], float]()
    for rank, steps in enumerate(schedule.actions):
        for step, (_, end) in zip(steps, spans[rank], strict=True):
            for action in actions_of(step):
                to_stage = action.stage + (1 if action.kind == "F" else -1)
                if action.kind == "W" or action.kind in COPIES or not 0 <= to_stage <= last:
                    continue
                target = schedule.rank_of(to_stage, action.micro_batch)
                if target != rank:
                    if (rank, target) not in times:
                        times[rank, target] = float(costs.message(rank, target))
                    tint = schedule.direction(action.micro_batch)
                    kind: ActionKind = "F" if action.kind == "F" else "B"
                    messages.append(DrawnMessage(str(action), kind, tint, rank, target, end, end + times[rank, target]))
    return tuple(messages)


# --- Planned and measured times in one picture: for every rank the planned steps, and below them the measured ones with
# the error of each action


def picture_of_measurement(
    title: str, schedule: Schedule, costs: Costs, measured: RecordedTimes, source: str, num_other_steps: int = 0
) -> Picture:
    """Return the picture, with times in ms. `costs`: in ms; `source`: their origin in words; `num_other_steps`:
    number of traced steps of other programs, which it does not show."""
    planned = panel_of(schedule, costs)
    spans = [tuple((start / 1000, end / 1000) for start, end in rank) for rank in measured.spans]
    rows: list[BoxRow] = []
    for row in planned.rows:
        cells = cells_of(schedule, row.rank, spans[row.rank])
        judged = tuple(_compare_cells(a, b) for a, b in zip(row.cells, cells, strict=True))
        rows += [replace(row, track="planned", activation=0.0), BoxRow(row.rank, "measured", judged)]
    panel = Panel(planned.name, tuple(rows), directions_of(schedule), _messages_of_both(planned, rows))
    took, plan = measured.makespan / 1000, planned.makespan
    errors = [abs(cell.error) for row in rows for cell in row.cells if cell.error is not None]
    facts = (
        ("planned", f"{labels.number(plan)} ms"),
        ("measured", f"{labels.number(took)} ms ({percent(took / plan - 1)})"),
        ("error of an action", f"{statistics.median(errors):.0%} (median)"),
        ("traced steps", str(measured.num_steps)),
    )
    notes = [f"Planned from {source}. Measured times are medians over steps and the devices of each pipeline rank."]
    if num_other_steps:
        steps = "1 traced step is" if num_other_steps == 1 else f"{num_other_steps:,} traced steps are"
        notes.append(f"{steps} left out: they ran other programs, of another phase or of a plan before a resume.")
    table = _table(schedule, costs, measured)
    return Picture(title, "ms", (replace(panel, facts=facts),), tuple(notes), us=1000.0, given_table=table)


def percent(share: float) -> str:
    """Format a share with its sign: +12%, −3%."""
    return f"{share:+.0%}".replace("-", "−")


def _compare_cells(planned: StepCell, measured: StepCell) -> StepCell:
    plan, took = planned.end - planned.start, measured.end - measured.start
    error = took / plan - 1 if plan else None
    late = measured.start - planned.start
    deviation = f" ({percent(error)})" if error is not None else ""
    comparison = "later" if late >= 0 else "earlier"
    times = f"measured {labels.number(took)} ms, planned {labels.number(plan)} ms{deviation}"
    note = f"{times}, starts {labels.number(abs(late))} ms {comparison}"
    return replace(measured, note=note, error=error)


def _messages_of_both(planned: Panel, rows: list[BoxRow]) -> tuple[DrawnMessage, ...]:
    """Return the planned messages with the measured times of sending and receiving."""
    ends = {(r.rank, d.label): c.end for r in rows if r.track == "measured" for c in r.cells for d in c.actions}
    return tuple(
        replace(m, sent=sent, arrived=sent + m.arrived - m.sent)
        for m in planned.messages
        for sent in [ends[m.source, m.label]]
    )


def _order(name: str) -> tuple[object, ...]:
    """Sort key: F0 … F15, B0 …, then pairs."""
    return ("|" in name, *((KINDS.index(part[0]), int(part[1:])) for part in name.split(" | ")))


def _table(schedule: Schedule, costs: Costs, measured: RecordedTimes) -> TextTable:
    """A row per kind of action and stage."""
    by_action: dict[str, tuple[list[float], list[float]]] = {}
    for rank, (steps, samples) in enumerate(zip(schedule.actions, measured.samples, strict=True)):
        for step, times in zip(steps, samples, strict=True):
            name = " | ".join(f"{a.kind}{a.stage}" for a in actions_of(step))
            planned_times, measured_times = by_action.setdefault(name, ([], []))
            planned_times.append(float(costs.step_time(step, rank)))
            measured_times += [time / 1000 for time in times]
    rows = []
    for name, (planned_times, measured_times) in sorted(by_action.items(), key=lambda item: _order(item[0])):
        plan, took = statistics.median(planned_times), statistics.median(measured_times)
        low, *_, high = statistics.quantiles(measured_times * 2, n=20, method="inclusive")
        spread = f"{labels.number(low)} – {labels.number(high)}"
        rows.append(
            (
                name,
                labels.number(plan),
                labels.number(took),
                spread,
                percent(took / plan - 1),
                f"{len(measured_times):,}",
            )
        )
    return TextTable(("action", "planned, ms", "measured, ms", "nine of ten, ms", "error", "samples"), tuple(rows))
