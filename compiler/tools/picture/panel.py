"""A schedule and its costs → the values of a picture: boxes, messages, activations over time."""

from __future__ import annotations

from fractions import Fraction

from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline, simulate
from compiler.tools.picture.drawing import Cell, Copy, Drawn, Lanes, Message, Panel, Row
from runtime.contract.actions import COPIES, Action, ActionKind, actions_of, is_copy


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
    """A checked schedule under costs; simulated unless `timeline` is given.

    `activation`: what a forward keeps, in those of 1/P of the model. `lanes`: of each rank, what its communication lane
    does. ScheduleError where ranks wait in a circle.
    """
    timeline = timeline or simulate(schedule, costs)
    unit = float(timeline.unit)
    spans = tuple(tuple((start * unit, end * unit) for start, end in rank) for rank in timeline.ticks)
    default = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_micro_batches} micro-batches"
    rows = tuple(
        Row(
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
    """What direction 0, and 1 where there is one, means in words."""
    if schedule.stage_placement == BIDIRECTIONAL:
        return ("from the first rank on", "from the last rank back")
    return ("stage",) if len(schedule.stages_of(0)) == 1 else ("even pass", "odd pass")


def cells_of(schedule: Schedule, rank: int, spans: tuple[tuple[float, float], ...]) -> tuple[Cell, ...]:
    """The steps of a rank at the given times, without copies."""
    two_ways = schedule.stage_placement == BIDIRECTIONAL
    passes = {stage: k % 2 for k, stage in enumerate(schedule.stages_of(rank))}

    def drawn(action: Action) -> Drawn:
        tint = schedule.direction(action.micro_batch) if two_ways else passes[action.stage]
        return Drawn(str(action), action.kind, tint, action.micro_batch)

    return tuple(
        Cell(tuple(drawn(action) for action in actions_of(step)), start, end)
        for step, (start, end) in zip(schedule.actions[rank], spans, strict=True)
        if not is_copy(step)
    )


def _copies(schedule: Schedule, rank: int, timeline: Timeline) -> tuple[Copy, ...]:
    """The copies of a rank between its device and the host."""
    unit, ticks, steps = float(timeline.unit), timeline.ticks[rank], schedule.actions[rank]
    return tuple(
        Copy(str(steps[k]), start * unit, end * unit, k - before, ticks[k][1] * unit)
        for before, (k, start, end) in enumerate(timeline.copies[rank])
    )


def _messages(
    schedule: Schedule, spans: tuple[tuple[tuple[float, float], ...], ...], costs: Costs
) -> tuple[Message, ...]:
    """What crosses between ranks, by rank and in the order of sending."""
    last = schedule.num_stages - 1
    found, times = [], dict[tuple[int, int], float]()
    for rank, steps in enumerate(schedule.actions):
        for step, (_, end) in zip(steps, spans[rank], strict=True):
            for action in actions_of(step):
                to = action.stage + (1 if action.kind == "F" else -1)
                if action.kind == "W" or action.kind in COPIES or not 0 <= to <= last:
                    continue
                target = schedule.rank_of(to, action.micro_batch)
                if target != rank:
                    if (rank, target) not in times:
                        times[rank, target] = float(costs.message(rank, target))
                    tint = schedule.direction(action.micro_batch)
                    kind: ActionKind = "F" if action.kind == "F" else "B"
                    found.append(Message(str(action), kind, tint, rank, target, end, end + times[rank, target]))
    return tuple(found)
