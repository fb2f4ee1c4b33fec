"""The result of `dsc schedule`: schedules with their measurements, and formatting of numbers."""

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
    """A schedule and, with costs, its measurements; or why there is no such schedule (`fault`).

    `parts`: how many activations of this schedule count as one for the cap, and in the output for a single schedule.
    `bounded`: the placements that the lower bound covers, if not only this schedule's. `order`: if one was searched
    for, the micro-batch of the data at each position. Then `measured` is for this order, and `unordered` is the
    makespan in the order of the data. `candidates`: schedules that may become the shortest after an order is searched
    for each.
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
    """One schedule, or several to compare.

    `costs` and `cap` are per action of the one schedule; if several are compared, per 1/P of the model.
    """

    entries: tuple[ScheduleAnswer, ...]
    costs: Costs | None
    compared: bool = False
    cap: Fraction | tuple[Fraction, ...] | None = None  # for every rank, or one per rank
    memory: Fraction | None = None  # the cap in bytes, if it was given in bytes
    unit: str = ""  # of times; "" if unknown
    layout: str | None = None  # layers of a spec's stages, in the notation of Megatron
    notes: tuple[str, ...] = ()  # lines below a picture
    lanes: Callable[[Schedule], tuple[Lanes, ...]] | None = None  # communication of each rank over time


def columns(costs: Costs) -> tuple[str, ...]:
    """The columns of the table. The bytes of the fullest rank are shown if the costs have them."""
    return (*COLUMNS, "memory") if costs.bytes.activation else COLUMNS


def cells(measured: MeasuredSchedule) -> tuple[str, ...]:
    """The cells of `columns` after the name. Activations are counted per 1/P of the model."""
    peak_bytes = measured.peak_bytes
    return (
        number_text(measured.makespan),
        percent(measured.idle),
        number_text(Fraction(measured.peak_activations, measured.stages_a_rank)),
        str(measured.copies),
        number_text(measured.lower_bound),
        percent(measured.gap),
        number_text(measured.excess),
        *((gigabytes(max(peak_bytes)),) if peak_bytes else ()),
    )


def number_text(value: Fraction) -> str:
    """A number as text: 66, 50.4, 17,978."""
    if value.denominator == 1 or abs(value) >= 10_000:
        return f"{round(value):,}"
    return f"{float(value):,.{4 if abs(value) < 10 else 2}f}".rstrip("0").rstrip(".")


def percent(value: Fraction) -> str:
    return f"{float(value):.1%}"
