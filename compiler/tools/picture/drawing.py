"""The contents of a picture of schedules, as frozen values. Times are in the unit the picture names."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from runtime.contract.actions import ActionKind


@dataclass(frozen=True, slots=True)
class DrawnAction:
    """One action. `direction` 0 or 1 chooses the tint: the end its micro-batch enters from, or the rank's stage."""

    label: str  # F3.7
    kind: ActionKind
    direction: int
    micro_batch: int

    @property
    def css(self) -> str:
        """The classes that colour it."""
        return f"{self.kind} d{self.direction}"


@dataclass(frozen=True, slots=True)
class StepCell:
    """A step of a rank: one action, or the two of an overlapped pair, from `start` to `end`.

    `note` is said beside the times; `error` is the measured time over the planned one, less 1.
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
    """One activity of the communication lane of a rank, from `start` to `end`."""

    label: str  # dispatch F3.0@L17
    direction: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ExchangeShare:
    """An exchange of a body: {0} and {1} of the label stand for the micro-batches; times as shares of the body's."""

    label: str  # dispatch F3.{0}@L17
    slot: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class DrawnCopy:
    """A copy of an activation to the host (an O) or back (an R), beside what its rank computes.

    `before`: the step of the rank in front of which it stands, which is when memory is free, or taken: at `time`.
    """

    label: str  # O3.7
    start: float
    end: float
    before: int
    time: float

    @property
    def returns(self) -> bool:
        """Whether it is an R."""
        return self.label[0] == "R"


Lanes = tuple[tuple[str, tuple[ExchangeShare, ...]], ...]  # body, as F3 or F3_B4, and its exchanges


@dataclass(frozen=True, slots=True)
class DrawnMessage:
    """A message to the next stage on another rank. `label`: the action that computed it."""

    label: str
    kind: ActionKind  # F, or B for either kind of backward
    direction: int
    source: int  # ranks
    target: int
    sent: float
    arrived: float


@dataclass(frozen=True)
class BoxRow:
    """A line of boxes: what a rank does, or one of several tracks of it.

    `activation`: what a forward keeps until its backward, in those of 1/P of the model; 0 draws no curve. `keeps`: the
    share of it that is held from the end of an I to the end of its W.
    """

    rank: int
    track: str  # "" or planned, measured
    cells: tuple[StepCell, ...]
    activation: float = 1.0
    lanes: Lanes = ()
    keeps: Fraction = Fraction(1)
    copies: tuple[DrawnCopy, ...] = ()  # in the order in which they stand

    @cached_property
    def exchanges(self) -> tuple[DrawnExchange, ...]:
        """The activities of the communication lane, in the order of the steps."""
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
        """(time, activations from then on): one more at the start of an F, one less at the end of its B, or some at
        the ends of its I and W, or at its own end where nothing runs backward; one less at an O and one more at an R;
        () if they are not drawn."""
        trains = any(drawn.kind != "F" for cell in self.cells for drawn in cell.actions)
        frees = {"B": Fraction(1), "I": 1 - self.keeps, "W": self.keeps} if trains else {"F": Fraction(1)}
        live = Fraction(0)
        points = [(0.0, live)]
        moved: dict[int, list[tuple[float, Fraction]]] = {}
        for copy in self.copies:
            moved.setdefault(copy.before, []).append((copy.time, Fraction(1 if copy.returns else -1)))
        for number, cell in enumerate(self.cells if self.activation else ()):
            kinds = [drawn.kind for drawn in cell.actions]
            freed = sum((frees.get(kind, Fraction(0)) for kind in kinds), Fraction(0))
            changes = (*moved.get(number, ()), (cell.start, Fraction(kinds.count("F"))), (cell.end, -freed))
            for time, change in changes:
                if change:
                    live += change
                    if points[-1][0] == time:  # one ends as the next begins
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

    `directions` says what direction 0, and 1 where there is one, means; `facts` are a row of a table.
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
        made = sum(of.get(c.body, 0) for of, row in zip(lanes, self.rows, strict=True) if of for c in row.cells)
        return made + sum(len(row.copies) for row in self.rows)

    def end_of(self, track: str) -> float:
        """When the last step of a track ends."""
        return max((row.cells[-1].end for row in self.rows if row.cells and row.track == track), default=0.0)

    def idle_of(self, row: BoxRow) -> float:
        """The share of its track's time in which a row does nothing."""
        return 1 - row.busy / self.end_of(row.track)

    @property
    def idle(self) -> float:
        """The share of the step in which ranks do nothing, if there is one track."""
        return 1 - sum(row.busy for row in self.rows) / (self.makespan * len(self.rows))


@dataclass(frozen=True)
class Screen:
    """Where text goes: columns, whether in colours, and whether it can show ASCII only."""

    width: int = 100
    colours: bool = False
    ascii: bool = False


@dataclass(frozen=True)
class TextTable:
    """Texts in columns; the first is of words, the others of numbers."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """One schedule, or several on one axis. `unit`: what times are counted in; `us`: microseconds of one unit."""

    title: str
    unit: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    us: float = 1000.0
    given_table: TextTable | None = None

    @property
    def facts(self) -> str:
        """Facts of the only panel, in a line; empty if there are several panels."""
        return " · ".join(f"{name} {value}" for name, value in self.panels[0].facts) if len(self.panels) == 1 else ""

    @property
    def table(self) -> TextTable | None:
        """The table of the picture, or one of the facts of several panels."""
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
