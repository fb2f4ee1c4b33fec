"""Where the time of the steps of a run went, part by part, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.predict.numbers import seconds
from compiler.predict.planned_step import Planned
from compiler.tools.report.lost_time import seconds_of

# Parts of `spent_s` of a row of the metrics (docs/json.md), the colour of each, and what it is called.
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


def spent(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds of each part, over all rows: the mean of the ranks. Empty where no row says it."""
    found: dict[str, float] = {}
    for row in rows:
        parts = row.get("spent_s")
        if not isinstance(parts, Mapping):
            continue
        for part, *_ in PARTS:
            if part in parts:
                found[part] = found.get(part, 0.0) + seconds_of(parts, part)
    return found


def planned_parts(planned: Planned) -> dict[str, float]:
    """Seconds of a planned step, the mean of the pipeline ranks: what `spent` would have of it.

    The compute of an action is the time of its segments; what it takes beside is an exchange that nothing hides.
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
class Block:
    x: float
    y: float
    width: float
    height: float
    css: str
    title: str


@dataclass(frozen=True)
class PartsChart:
    """Stacked shares of the time, a bar for some steps, and one of the plan at the right."""

    width: float
    height: float
    left: float
    right: float
    bottom: float
    blocks: tuple[Block, ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, str], ...]
    has_plan: bool
    planned_generation: bool


def parts_chart(rows: Sequence[Row], lost_at: Mapping[int, float], planned: Planned | None) -> PartsChart | None:
    """`rows`: of the metrics; `lost_at`: seconds that failures cost in front of a step. None where no row has parts."""
    rows = [row for row in rows if spent([row])]
    if not rows:
        return None
    size = -(-len(rows) // MOST_BARS)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    right = WIDTH - RIGHT - (2 * PLANNED if planned else 0.0)
    each = (right - LEFT) / len(groups)
    blocks, ticks, used = [], [], dict[str, None]()
    between = -(-len(groups) // 12)  # bars from one that is named to the next
    for number, group in enumerate(groups):
        found = spent(group)
        if lost := sum(lost_at.get(row["step"], 0.0) for row in group):
            found["lost"] = lost
        first, last = group[0]["step"], group[-1]["step"]
        name = f"step {first}" if first == last else f"steps {first} to {last}"
        used |= dict.fromkeys(part for part, value in found.items() if value > 0)
        blocks += _stacked(found, LEFT + number * each, each, name)
        if number % between == 0:
            ticks.append((LEFT + (number + 0.5) * each, f"{first:,}"))
    if planned:
        found = planned_parts(planned)
        used |= dict.fromkeys(part for part, value in found.items() if value > 0)
        x = WIDTH - RIGHT - PLANNED
        blocks += _stacked(found, x, PLANNED, "planned")
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


def _stacked(found: Seconds, x: float, width: float, name: str) -> list[Block]:
    """A bar, from compute at the ground upwards."""
    blocks, below, whole = [], 0.0, sum(found.values()) or 1.0
    for part, css, what in PARTS:
        share = found.get(part, 0.0) / whole
        if share * (BOTTOM - TOP) >= 0.05:
            title = f"{name}, {what}: {seconds(found[part])}, {share:.1%}"
            blocks.append(Block(x, _y(below + share), width, _y(below) - _y(below + share), css, title))
        below += share
    return blocks


def described(found: Seconds) -> str:
    """Shares in words: compute 80.1%, exposed communication 19.0% (…), data 0.0%."""
    whole = sum(found.values())
    words = [f"compute {found.get('compute', 0.0) / whole:.1%}"]
    if any(part in found for part in COMMUNICATION):
        names = {"message": "messages", "exchange": "exchanges", "sum": "sums"}
        each = ", ".join(f"{names[part]} {found.get(part, 0.0) / whole:.1%}" for part in COMMUNICATION)
        words.append(f"exposed communication {sum(found.get(p, 0.0) for p in COMMUNICATION) / whole:.1%} ({each})")
    others = ("generation", "reward", "data", "checkpoint")
    words += [f"{part} {found[part] / whole:.1%}" for part in others if part in found]
    return ", ".join(words)
