"""The pictures of `dsc schedule`, drawn by compiler/tools/picture."""

from __future__ import annotations

from fractions import Fraction

from compiler.cli.commands.schedule_answer import Answer, ScheduleAnswer, cells, columns, number_text, percent
from compiler.schedule.costs import Costs
from compiler.tools.picture.drawing import Panel, Picture
from compiler.tools.picture.formats import check_size, render
from compiler.tools.picture.panel import panel_of
from runtime.contract.actions import actions_of

UNIT = "forwards of a stage, where F, I and W cost the same"


def draw(answer: Answer, name: str) -> str:
    """Draw an answer in a format of compiler/tools/picture. Raises ValueError if it has too many actions."""
    schedules = [entry.schedule for entry in answer.entries if entry.schedule is not None]
    check_size(sum(len(actions_of(step)) for s in schedules for steps in s.actions for step in steps), name)
    return render(picture_of(answer), name)


def picture_of(answer: Answer) -> Picture:
    """A panel for each schedule; for a name without a schedule, a note says why."""
    panels = tuple(_panel(entry, answer) for entry in answer.entries if entry.schedule is not None)
    notes = [*(f"{entry.name}: {entry.fault}" for entry in answer.entries if entry.fault), *answer.notes]
    if answer.compared:
        notes.append(
            "Costs and activations are for 1/P of the model: with v stages per rank, an action has 1/v of both."
        )
        title = " · ".join(entry.name for entry in answer.entries)
        first = next(entry.schedule for entry in answer.entries if entry.schedule)
        title += f": {first.num_ranks} ranks, {first.num_micro_batches} micro-batches"
    else:
        title = panels[0].name
    unit = answer.unit or (UNIT if answer.costs is None else "units of the costs")
    return Picture(title, unit, panels, tuple(notes))


def _panel(entry: ScheduleAnswer, answer: Answer) -> Panel:
    schedule, measured = entry.schedule, entry.measured
    assert schedule is not None
    if measured is None:
        return panel_of(schedule, Costs(O=Fraction(1), R=Fraction(1)))
    if answer.compared:
        facts = tuple(zip(columns(measured.costs)[1:], cells(measured), strict=True))
        activation = Fraction(1, measured.stages_a_rank)
        return panel_of(
            schedule, measured.costs, name=entry.name, facts=facts, activation=activation, timeline=measured.timeline
        )
    unit = f" {answer.unit}" if answer.unit else ""
    facts = (
        ("makespan", number_text(measured.makespan) + unit),
        ("bubble", percent(measured.idle)),
        ("bound", number_text(measured.lower_bound) + unit),
        ("gap", percent(measured.gap)),
        ("activations at most", number_text(Fraction(measured.peak_activations, entry.parts))),
    )
    lanes = answer.lanes(schedule) if answer.lanes else ()
    activation = Fraction(1, entry.parts)
    return panel_of(
        schedule, measured.costs, facts=facts, lanes=lanes, activation=activation, timeline=measured.timeline
    )
