"""The contents of a picture of schedules, as frozen values. Times are in the unit of the picture."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from runtime.contract.actions import ActionKind


@dataclass(frozen=True, slots=True)
class DrawnAction:
    """One action. `direction`, 0 or 1, sets the tint: the end where its micro-batch enters, or the rank's stage."""

    label: str  # F3.7
    kind: ActionKind
    direction: int
    micro_batch: int

    @property
    def css(self) -> str:
        """The CSS classes of its colour."""
        return f"{self.kind} d{self.direction}"


@dataclass(frozen=True, slots=True)
class StepCell:
    """A step of a rank: one action, or the two of an overlapped pair, from `start` to `end`.

    `note` is shown beside the times; `error` is measured / planned time − 1.
    """

    actions: tuple[DrawnAction, ...]
    start: float
    end: float
    note: str = ""
    error: float | None = None

    @property
    def body(self) -> str:
        """The step without its micro-batches: F3_B4."""
        return "_".join(drawn.label.partition(".")[0] for drawn in self.actions)

    @property
    def label(self) -> str:
        """The step in the notation of schedules."""
        names = "|".join(drawn.label for drawn in self.actions)
        return f"({names})" if len(self.actions) > 1 else names


@dataclass(frozen=True, slots=True)
class DrawnExchange:
    """One exchange on the communication lane of a rank, from `start` to `end`."""

    label: str  # dispatch F3.0@L17
    direction: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ExchangeShare:
    """An exchange of a body. {0} and {1} in the label stand for micro-batches; times are shares of the body's time."""

    label: str  # dispatch F3.{0}@L17
    slot: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class DrawnCopy:
    """A copy of an activation to the host (O) or back (R), parallel to compute.

    `before`: the step of the rank that it precedes. `time`: when its memory is freed or taken.
    """

    label: str  # O3.7
    start: float
    end: float
    before: int
    time: float

    @property
    def is_return(self) -> bool:
        """Whether it is an R."""
        return self.label[0] == "R"


Lanes = tuple[tuple[str, tuple[ExchangeShare, ...]], ...]  # a body, such as F3 or F3_B4, and its exchanges


@dataclass(frozen=True, slots=True)
class DrawnMessage:
    """A message to a neighbouring stage on another rank. `label`: the action that computed it."""

    label: str
    kind: ActionKind  # F, or B for either kind of backward
    direction: int
    source: int  # ranks
    target: int
    sent: float
    arrived: float


@dataclass(frozen=True)
class BoxRow:
    """A line of boxes: the steps of a rank, or one of several tracks of them.

    `activation`: memory that a forward keeps until its backward; the unit is the activation of 1/P of the model, and 0
    draws no curve. `keeps`: the share of it that is held from the end of an I to the end of its W.
    """

    rank: int
    track: str  # "" or planned, measured
    cells: tuple[StepCell, ...]
    activation: float = 1.0
    lanes: Lanes = ()
    keeps: Fraction = Fraction(1)
    copies: tuple[DrawnCopy, ...] = ()  # in execution order

    @cached_property
    def exchanges(self) -> tuple[DrawnExchange, ...]:
        """The exchanges of the communication lane, in the order of the steps."""
        lanes = dict(self.lanes)
        return tuple(
            DrawnExchange(
                share.label.format(*(drawn.micro_batch for drawn in cell.actions)),
                cell.actions[share.slot].direction,
                cell.start + share.start * (cell.end - cell.start),
                cell.start + share.end * (cell.end - cell.start),
            )
            for cell in self.cells
            for share in (lanes.get(cell.body, ()) if lanes else ())
        )

    @cached_property
    def live(self) -> tuple[tuple[float, float], ...]:
        """(time, activations held from then on); () if they are not drawn.

        An F adds one at its start, and an R adds one. A B removes one at its end, an I and its W together one at their
        ends, and an O one. Without backwards, an F removes its own at its end.
        """
        trains = any(drawn.kind != "F" for cell in self.cells for drawn in cell.actions)
        frees = {"B": Fraction(1), "I": 1 - self.keeps, "W": self.keeps} if trains else {"F": Fraction(1)}
        live = Fraction(0)
        points = [(0.0, live)]
        moved: dict[int, list[tuple[float, Fraction]]] = {}
        for copy in self.copies:
            moved.setdefault(copy.before, []).append((copy.time, Fraction(1 if copy.is_return else -1)))
        for number, cell in enumerate(self.cells if self.activation else ()):
            kinds = [drawn.kind for drawn in cell.actions]
            freed = sum((frees.get(kind, Fraction(0)) for kind in kinds), Fraction(0))
            changes = (*moved.get(number, ()), (cell.start, Fraction(kinds.count("F"))), (cell.end, -freed))
            for time, change in changes:
                if change:
                    live += change
                    if points[-1][0] == time:  # a step ends when the next begins
                        points.pop()
                    if not points or points[-1][1] != live:
                        points.append((time, live))
        return tuple((time, float(amount) * self.activation) for time, amount in points) if self.activation else ()

    @property
    def peak(self) -> float:
        return max((amount for _, amount in self.live), default=0)

    @property
    def busy(self) -> float:
        return sum(cell.end - cell.start for cell in self.cells)


@dataclass(frozen=True)
class Panel:
    """One schedule of at least one action.

    `directions`: the meaning of direction 0, and of 1 if it is used; `facts`: a row of a table.
    """

    name: str  # dualpipe, 4 ranks, 10 micro-batches
    rows: tuple[BoxRow, ...]
    directions: tuple[str, ...]
    messages: tuple[DrawnMessage, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    @cached_property
    def makespan(self) -> float:
        return max((row.cells[-1].end for row in self.rows if row.cells), default=0.0)

    @cached_property
    def cells(self) -> tuple[StepCell, ...]:
        return tuple(cell for row in self.rows for cell in row.cells)

    @cached_property
    def num_exchanges(self) -> int:
        """The number of exchanges and copies in all rows, counted without making them."""
        lanes = [{body: len(shares) for body, shares in row.lanes} for row in self.rows]
        exchanges = sum(
            counts.get(c.body, 0) for counts, row in zip(lanes, self.rows, strict=True) if counts for c in row.cells
        )
        return exchanges + sum(len(row.copies) for row in self.rows)

    def end_of(self, track: str) -> float:
        """Return the end of the last step of a track."""
        return max((row.cells[-1].end for row in self.rows if row.cells and row.track == track), default=0.0)

    def idle_of(self, row: BoxRow) -> float:
        """Return the share of its track's time in which a row is idle."""
        return 1 - row.busy / self.end_of(row.track)

    @property
    def idle(self) -> float:
        """The share of the step in which ranks are idle, if there is one track."""
        return 1 - sum(row.busy for row in self.rows) / (self.makespan * len(self.rows))


@dataclass(frozen=True)
class Screen:
    """A text output: its columns, whether it has colours, and whether it shows only ASCII."""

    width: int = 100
    colours: bool = False
    ascii: bool = False


@dataclass(frozen=True)
class TextTable:
    """A table of text. The first column has words, the others numbers."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """One schedule, or several on one time axis. `unit`: name of the time unit; `us`: microseconds per unit."""

    title: str
    unit: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    us: float = 1000.0
    given_table: TextTable | None = None

    @property
    def facts(self) -> str:
        """The facts of the only panel, in one line; empty if there are several panels."""
        return " · ".join(f"{name} {value}" for name, value in self.panels[0].facts) if len(self.panels) == 1 else ""

    @property
    def table(self) -> TextTable | None:
        """The given table, or else a table of the facts of several panels."""
        heads = tuple(dict.fromkeys(name for panel in self.panels for name, _ in panel.facts))
        if self.given_table or len(self.panels) == 1 or not heads:
            return self.given_table
        rows = [(panel.name, *(dict(panel.facts).get(head, "") for head in heads)) for panel in self.panels]
        return TextTable(("", *heads), tuple(rows))

    @property
    def makespan(self) -> float:
        return max(panel.makespan for panel in self.panels)

    @property
    def num_actions(self) -> int:
        return sum(len(cell.actions) for panel in self.panels for row in panel.rows for cell in row.cells)
