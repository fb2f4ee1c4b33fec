"""What `dsc schedule` was asked for: schedules with what they take, and its numbers in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.measure import MeasuredSchedule
from compiler.schedule.memory import gigabytes
from compiler.schedule.schedule import Schedule
from compiler.tools.picture.drawing import Lanes

COLUMNS = ("schedule", "makespan", "bubble", "activations", "copies", "bound", "gap", "excess")


@dataclass(frozen=True)
class ScheduleAnswer:
    """A schedule, what it takes where there are costs, or why there is no such schedule.

    `parts`: how many activations of this schedule make one of those that the cap counts, and a single schedule shows.
    `bounded`: the placements that the lower bound is of, if not of this schedule's alone.
    `order`: where one was searched for, the micro-batch of the data at each position; `measured` is of it, and
    `unordered` is the makespan in the order of the data. `candidates`: schedules of which another may be the shortest
    once each has an order of its own.
    """

    name: str
    schedule: Schedule | None = None
    measured: MeasuredSchedule | None = None
    fault: str = ""
    parts: int = 1
    bounded: tuple[StagePlacement, ...] = ()
    order: tuple[int, ...] = ()
    unordered: Fraction | None = None
    candidates: tuple[ScheduleAnswer, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What was asked for: one schedule, or several side by side.

    `costs` are those of an action of the one schedule; of 1/P of the model where several are compared, and so is `cap`.
    """

    entries: tuple[ScheduleAnswer, ...]
    costs: Costs | None
    compared: bool = False
    cap: Fraction | tuple[Fraction, ...] | None = None  # of every rank, or one for each
    memory: Fraction | None = None  # the bytes that a rank may hold, where these are the cap
    unit: str = ""  # of times, where it is known
    layout: str | None = None  # of a spec's stages, in Megatron's words
    notes: tuple[str, ...] = ()  # what a picture says below it
    lanes: Callable[[Schedule], tuple[Lanes, ...]] | None = None  # of each rank, what its bodies communicate when


def columns(costs: Costs) -> tuple[str, ...]:
    """The columns of a table under some costs: with the bytes of the fullest rank, where they are known."""
    return (*COLUMNS, "memory") if costs.bytes.activation else COLUMNS


def cells(measured: MeasuredSchedule) -> tuple[str, ...]:
    """What `columns` has behind the name. Activations are counted in those of 1/P of the model."""
    held = measured.peak_bytes
    return (
        shown(measured.makespan),
        percent(measured.idle),
        shown(Fraction(measured.peak_activations, measured.stages_a_rank)),
        str(measured.copies),
        shown(measured.lower_bound),
        percent(measured.gap),
        shown(measured.excess),
        *((gigabytes(max(held)),) if held else ()),
    )


def shown(value: Fraction) -> str:
    """A number for people: 66, 50.4, 17,978."""
    if value.denominator == 1 or abs(value) >= 10_000:
        return f"{round(value):,}"
    return f"{float(value):,.{4 if abs(value) < 10 else 2}f}".rstrip("0").rstrip(".")


def percent(value: Fraction) -> str:
    return f"{float(value):.1%}"
