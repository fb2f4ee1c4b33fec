"""A run in a few numbers: its speed, its goodput, and the causes of lost time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.predict.planned_step import PlannedStep
from compiler.predict.prediction import seconds
from compiler.tools.picture import labels
from compiler.tools.report.charts import column
from compiler.tools.report.long_metrics import left_out, typical
from compiler.tools.report.lost_time import LostTime, seconds_of
from compiler.tools.report.sections import Report

# --- The time of a run's steps by part, measured and planned

# Parts of `spent_s` in the metrics (docs/json.md), with their colours and names.
PARTS = (
    ("compute", "p0", "compute"),
    ("message", "p4", "messages of the pipeline, bubble"),
    ("exchange", "p3", "exchanges"),
    ("sum", "p1", "sums over ranks"),
    ("data", "p2", "data"),
    ("generation", "m1", "generation"),
    ("reward", "m3", "rewards"),
    ("validation", "m5", "validation"),
    ("checkpoint", "m7", "checkpoint"),
    ("other", "p6", "between steps"),
    ("lost", "m6", "lost by failures"),
)
COMMUNICATION = ("message", "exchange", "sum")
MOST_BARS = 100
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, PLANNED = 920.0, 190.0, 46.0, 12.0, 8.0, 168.0, 44.0
Row = Mapping[str, Any]
Seconds = Mapping[str, float]  # by part


def seconds_of_parts(rows: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each part, summed over rows, as a mean of the ranks. Empty if no row has them."""
    totals: dict[str, float] = {}
    for row in rows:
        for parts in (row.get("spent_s"), left_out(row).get("spent_s")):
            if not isinstance(parts, Mapping):
                continue
            for part, *_ in PARTS:
                if part in parts:
                    totals[part] = totals.get(part, 0.0) + seconds_of(parts, part)
    return totals


def planned_parts(planned: PlannedStep) -> dict[str, float]:
    """Return the seconds of a planned step by the parts of `seconds_of_parts`, as a mean of the pipeline ranks.

    The compute of an action is the time of its segments; the rest of its time is an exposed exchange.
    """
    step, tail = planned.step, planned.step.tail
    work = step.num_micro_batches * sum(stage.row.compute_s for stage in planned.stages) / len(step.ranks)
    compute = min(work, step.mean.busy_s)
    generation = {"generation": planned.generation.seconds} if planned.generation else {}
    return generation | {
        "compute": compute + tail.norm_s + tail.update_s + tail.host_s,
        "message": step.mean.bubble_s,
        "exchange": step.mean.busy_s - compute,
        "sum": tail.reduction_s + tail.gather_s,
    }


# ---------------------------------------------------------------- the picture
@dataclass(frozen=True, slots=True)
class DrawnBlock:
    x: float
    y: float
    width: float
    height: float
    css: str
    title: str


@dataclass(frozen=True)
class PartsChart:
    """Stacked shares of time: a bar for each group of steps, and one for the plan at the right."""

    width: float
    height: float
    left: float
    right: float
    bottom: float
    blocks: tuple[DrawnBlock, ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, str], ...]
    has_plan: bool
    planned_generation: bool


def parts_chart(rows: Sequence[Row], lost_at: Mapping[int, float], planned: PlannedStep | None) -> PartsChart | None:
    """Draw the parts of the steps. Returns None if no row has them. `rows`: of the metrics; `lost_at`: seconds lost to
    failures before a step."""
    rows = [row for row in rows if seconds_of_parts([row])]
    if not rows:
        return None
    size = -(-len(rows) // MOST_BARS)
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    right = WIDTH - RIGHT - (2 * PLANNED if planned else 0.0)
    bar_width = (right - LEFT) / len(groups)
    blocks, ticks, used = [], [], dict[str, None]()
    between = -(-len(groups) // 12)  # every so many bars, one has a label
    for number, group in enumerate(groups):
        times = seconds_of_parts(group)
        if lost := sum(lost_at.get(row["step"], 0.0) for row in group):
            times["lost"] = lost
        first, last = group[0]["step"], group[-1]["step"]
        name = f"step {first}" if first == last else f"steps {first} to {last}"
        used |= dict.fromkeys(part for part, value in times.items() if value > 0)
        blocks += _stack_parts(times, LEFT + number * bar_width, bar_width, name)
        if number % between == 0:
            ticks.append((LEFT + (number + 0.5) * bar_width, f"{first:,}"))
    if planned:
        times = planned_parts(planned)
        used |= dict.fromkeys(part for part, value in times.items() if value > 0)
        x = WIDTH - RIGHT - PLANNED
        blocks += _stack_parts(times, x, PLANNED, "planned")
        ticks.append((x + PLANNED / 2, "planned"))
    return PartsChart(
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        bottom=BOTTOM,
        blocks=tuple(blocks),
        y_ticks=tuple((_y(share), f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)),
        x_ticks=tuple(ticks),
        legend=tuple((css, name) for part, css, name in PARTS if part in used),
        has_plan=planned is not None,
        planned_generation=planned is not None and planned.generation is not None,
    )


def _y(share: float) -> float:
    return BOTTOM - share * (BOTTOM - TOP)


def _stack_parts(times: Seconds, x: float, width: float, name: str) -> list[DrawnBlock]:
    """Stack the parts of a bar upwards from compute."""
    blocks, below, total = [], 0.0, sum(times.values()) or 1.0
    for part, css, meaning in PARTS:
        share = times.get(part, 0.0) / total
        if share * (BOTTOM - TOP) >= 0.05:
            title = f"{name}, {meaning}: {seconds(times[part])}, {share:.1%}"
            blocks.append(DrawnBlock(x, _y(below + share), width, _y(below) - _y(below + share), css, title))
        below += share
    return blocks


def describe_shares(times: Seconds) -> str:
    """Return shares as text: compute 80.1%, exposed communication 19.0% (…), data 0.0%."""
    total = sum(times.values())
    words = [f"compute {times.get('compute', 0.0) / total:.1%}"]
    if any(part in times for part in COMMUNICATION):
        names = {"message": "messages", "exchange": "exchanges", "sum": "sums"}
        shares = ", ".join(f"{names[part]} {times.get(part, 0.0) / total:.1%}" for part in COMMUNICATION)
        words.append(f"exposed communication {sum(times.get(p, 0.0) for p in COMMUNICATION) / total:.1%} ({shares})")
    other_parts = ("generation", "reward", "data", "checkpoint")
    words += [f"{part} {times[part] / total:.1%}" for part in other_parts if part in times]
    return ", ".join(words)


# --- summary

CAUSES = {"again": "trained again", "checkpoint": "checkpoints", "restart": "restarts", "other": "other"}


@dataclass(frozen=True)
class Summary:
    """The results of a run, and its plan. Values that its files lack are None or empty."""

    steps: int | None
    tokens: int | None
    tokens_per_s: float | None  # median of the steps
    mfu: float | None  # with causal attention, of the BF16 peak; None if the device has none
    lost: LostTime | None
    spent: Mapping[str, float]  # seconds of the steps by part, the mean of the ranks
    planned: PlannedStep | None

    @property
    def planned_goodput(self) -> float | None:
        """The goodput that the plan expects with failures."""
        goodput = self.planned.goodput if self.planned else None
        return goodput.share if goodput else None

    def to_json(self) -> dict[str, Any]:
        """Return the form `report` of docs/json.md, without the name and the page."""
        lost, planned = self.lost, self.planned
        mfu = planned.mfu.causal if planned and planned.mfu else None
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "goodput": lost.goodput if lost else None,
            "wall_s": lost.wall if lost else None,
            "lost_s": {cause: getattr(lost, cause) for cause in CAUSES} if lost else None,
            "spent_s": dict(self.spent),
            "planned": {
                "step_s": planned.seconds,
                "tokens_per_s": planned.tokens_per_second,
                "mfu": mfu,
                "goodput": self.planned_goodput,
                "spent_s": planned_parts(planned),
            }
            if planned
            else None,
        }

    def lines(self) -> Sequence[str]:
        """Return the lines that the terminal shows at the end of a run."""
        speed = [f"{self.steps:,} steps"] if self.steps is not None else []
        speed += [f"{labels.number(self.tokens_per_s)} tokens/s"] if self.tokens_per_s else []
        speed += [f"MFU {self.mfu:.1%}"] if self.mfu is not None else []
        lines = [f"speed: {', '.join(speed)}"] if speed else []
        if self.spent and sum(self.spent.values()):
            lines.append(f"time: {describe_shares(self.spent)}")
        return lines + [
            f"{name.partition(',')[0]}: {text}" for name, text in self.facts() if name != "time of the steps"
        ]

    def facts(self) -> Sequence[tuple[str, str]]:
        """Return the facts of the page about the time of the run."""
        facts = []
        if self.lost is not None:
            planned = self.planned_goodput
            expected = f"; planned {planned:.1%} with failures" if planned is not None else ""
            facts.append(("goodput, measured", f"{self.lost.goodput:.1%} of {self.lost.wall:,.1f} s{expected}"))
            parts = {name: getattr(self.lost, cause) for cause, name in CAUSES.items()}
            if lost := ", ".join(f"{name} {value:.1f} s" for name, value in parts.items() if value >= 0.05):
                facts.append(("time lost", lost))
        if self.spent and sum(self.spent.values()):
            facts.append(("time of the steps", describe_shares(self.spent)))
        return facts


def summary_of(report: Report) -> Summary | None:
    """Return the numbers of a run; None for a build that was not run."""
    run, planned = report.run, report.planned
    if run is None:
        return None
    steps, tokens = column(run.metrics, "step"), column(run.metrics, "tokens")
    speeds = [value for _, value in column(typical(run.metrics), "tokens_per_s")]
    speed = statistics.median(speeds) if speeds else None
    mfu = None
    if speed is not None and planned and planned.mfu:  # FLOPs per token and the peak are those of the plan
        mfu = planned.mfu.causal * speed / planned.step.tokens_per_second
    return Summary(
        steps=int(steps[-1][1]) if steps else None,
        tokens=int(tokens[-1][1]) if tokens else None,
        tokens_per_s=speed,
        mfu=mfu,
        lost=run.lost,
        spent=seconds_of_parts(run.metrics),
        planned=planned,
    )
