"""The geometry of drawings of a plan: bars of the step, stages, the cluster. All in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.predict.planned_step import PURPOSES, Level, PlannedNetwork, PlannedStage, PlannedStep
from compiler.predict.prediction import CALIBRATE, RankMemory, RankTime, ranges, seconds
from compiler.tools.picture import labels
from compiler.tools.report.charts import Chart, ChartSeries, chart

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
WIDTH = 920.0
ROW, GAP = 15.0, 4.0
MOST_ROWS, MOST_CURVES = 64, 32
# Fields of RankTime, their colours in a schedule, and their names.
STEP = (
    ("overlapped_s", "p5", "pairs, overlapped"),
    ("forward_s", "p0", "forward alone"),
    ("backward_s", "p1", "backward alone"),
    ("weight_s", "p2", "weight gradients alone"),
    ("optimizer_s", "p3", "reduction, optimizer"),
    ("bubble_s", "p4", "bubble"),
)
# Kinds of segments (compiler/model/layers) and exchanges → colour and name in the legend.
KINDS = {
    "attention": ("p0", "attention"),
    "experts": ("p1", "experts"),
    "dense": ("p2", "dense"),
    "shared": ("p2", "shared experts"),
    "dispatch": ("p3", "exchanges"),
    "combine": ("p3", "exchanges"),
}
OTHER = ("p6", "the rest")
COLOURS = ("p3", "p1", "p0")  # one for each of PURPOSES
LINKS = {"nvlink": "in a node", "leaf": "under a leaf switch", "spine": "over a spine", "core": "over the core"}


@dataclass(frozen=True, slots=True)
class Bar:
    x: float
    y: float
    width: float
    css: str
    title: str


@dataclass(frozen=True)
class Bars:
    """Rows of bars. `rows`: (y of the middle, name at the left, note at the right); `more`: number of rows left out."""

    width: float
    height: float
    left: float
    right: float
    bars: tuple[Bar, ...]
    rows: tuple[tuple[float, str, str], ...]
    legend: tuple[tuple[str, str], ...]  # (css, meaning)
    num_hidden: int


def step_bars(ranks: Sequence[RankTime]) -> Bars:
    """Draw the step of every pipeline rank as a bar of its parts."""
    used = [(row, css, name) for row, css, name in STEP if any(getattr(rank, row) for rank in ranks)]
    rows = [
        (
            f"rank {rank.pp_rank}",
            f"idle {seconds(rank.bubble_s)}" if rank.bubble_s else "not idle",
            [
                (getattr(rank, row), css, f"rank {rank.pp_rank}, {name}: {seconds(getattr(rank, row))}")
                for row, css, name in used
            ],
        )
        for rank in ranks
    ]
    return _bars(rows, tuple((css, name) for _, css, name in used), 56.0, 74.0)


def stage_bars(stages: Sequence[PlannedStage]) -> Bars:
    """Draw the time of a micro-batch in each segment of each stage, and the size of the message to the next stage."""
    rows = []
    for stage in stages:
        cells = [
            (part.seconds, KINDS.get(part.kind, OTHER)[0], f"{part.site}: {seconds(part.seconds)}")
            for part in stage.parts
        ]
        sent = f"{labels.num_bytes(stage.sends)} on" if stage.sends else ""
        ranks = f"rank{'s' * (len(stage.row.ranks) > 1)} {ranges(stage.row.ranks)}"
        rows.append((f"stage {stage.row.stage}, {ranks}", sent, cells))
    kinds = {KINDS.get(part.kind, OTHER) for stage in stages for part in stage.parts}
    legend = [
        (css, ", ".join(name for kind_css, name in sorted(kinds) if kind_css == css)) for css in sorted(dict(kinds))
    ]
    return _bars(rows, tuple(legend), 136.0, 84.0)


def _bars(
    rows: Sequence[tuple[str, str, Sequence[tuple[float, str, str]]]],
    legend: tuple[tuple[str, str], ...],
    left: float,
    right: float,
) -> Bars:
    longest = max((sum(value for value, *_ in cells) for *_, cells in rows), default=0.0) or 1.0
    bars, labels = [], []
    for index, (name, note, cells) in enumerate(rows[:MOST_ROWS]):
        y, x = index * (ROW + GAP), left
        labels.append((y + ROW / 2, name, note))
        for value, css, title in cells:
            width = value / longest * (WIDTH - left - right)
            if width >= 0.05:
                bars.append(Bar(x, y, width, css, title))
            x += width
    num_shown = min(len(rows), MOST_ROWS)
    height = num_shown * (ROW + GAP)
    return Bars(WIDTH, height, left, WIDTH - right, tuple(bars), tuple(labels), legend, len(rows) - num_shown)


# ---------------------------------------------------------------- memory


CAPACITY = "capacity"  # css class


@dataclass(frozen=True)
class Curves:
    """A chart for each of the fullest pipeline ranks. `more`: number of ranks left out; `unit`: of bytes."""

    unit: str
    charts: tuple[tuple[Chart, bool], ...]  # (chart, whether the rank fits)
    num_hidden: int
    num_capacities: int  # charts that show the capacity of the device


def memory_curves(ranks: Sequence[RankMemory]) -> Curves:
    """Draw the bytes that a device holds over the step, beside its capacity."""
    fullest = sorted(ranks, key=lambda rank: (-rank.peak_bytes, rank.pp_rank))[:MOST_CURVES]
    drawn_ranks = [rank for rank in ranks if rank in fullest and rank.timeline]
    unit, name = next((pair for pair in UNITS if fullest[0].peak_bytes >= pair[0]), (1, "bytes"))
    charts = tuple((_curve(rank, unit), rank.fits) for rank in drawn_ranks)
    num_capacities = sum(curve.css == CAPACITY for drawn, _ in charts for curve in drawn.curves)
    return Curves(name, charts, len(ranks) - len(fullest), num_capacities)


def _curve(rank: RankMemory, unit: int) -> Chart:
    points = tuple((second, num_bytes / unit) for second, num_bytes in rank.timeline)
    end = points[-1][0]
    series = [ChartSeries("held", "", points)]
    if rank.peak_bytes * 4 > rank.capacity_bytes:  # a larger capacity would flatten the curve
        series.append(ChartSeries(CAPACITY, "", ((0.0, rank.capacity_bytes / unit), (end, rank.capacity_bytes / unit))))
    title = f"rank {rank.pp_rank}: {labels.num_bytes(rank.peak_bytes)} at {rank.peak_action}"
    return chart(title, series, 300, 130, from_zero=True, named=False, whole_steps=False)


# ---------------------------------------------------------------- the cluster


@dataclass(frozen=True, slots=True)
class Chip:
    x: float
    y: float
    width: float
    height: float
    css: str
    label: str
    title: str


@dataclass(frozen=True)
class ClusterDrawing:
    """Nodes as frames with their devices, switches above them, and lines between."""

    width: float
    height: float
    frames: tuple[Chip, ...]
    chips: tuple[Chip, ...]
    switches: tuple[Chip, ...]
    lines: tuple[tuple[float, float, float, float], ...]
    num_ranks: int


SIDE, INSET, SPACE = 24.0, 8.0, 16.0


def cluster_of(network: PlannedNetwork) -> ClusterDrawing | None:
    """Draw the cluster. Returns None if it is too large."""
    if not network.nodes:
        return None
    names = sorted({end for joint in network.joints for end in joint if not end.startswith("device ")}, key=_tier)
    tiers = sorted({_tier(name)[0] for name in names}, reverse=True)
    top = len(tiers) * 52.0
    per_row = max(1, int((WIDTH + SPACE) // (len(max(network.nodes, key=len)) * (SIDE + 4) + 2 * INSET + SPACE)))
    frames, chips, places = [], [], {}
    num_ranks = max(network.ranks) + 1
    for node, devices in enumerate(network.nodes):
        width = len(devices) * (SIDE + 4) - 4 + 2 * INSET
        x = (node % per_row) * (len(max(network.nodes, key=len)) * (SIDE + 4) - 4 + 2 * INSET + SPACE)
        y = top + (node // per_row) * (SIDE + 2 * INSET + 34)
        frames.append(Chip(x, y, width, SIDE + 2 * INSET, "node", f"node {node}", ""))
        for k, device in enumerate(devices):
            rank = network.ranks[device]
            place = x + INSET + k * (SIDE + 4), y + INSET
            places[f"device {device}"] = place[0] + SIDE / 2, y
            css = f"d{round(4 * rank / max(1, num_ranks - 1))}"
            chips.append(Chip(*place, SIDE, SIDE, css, str(device), f"world rank {device}, pipeline rank {rank}"))
    total_width = max(frame.x + frame.width for frame in frames)
    switches = []
    for level, tier in enumerate(tiers):
        tier_names = [name for name in names if _tier(name)[0] == tier]
        for k, name in enumerate(tier_names):
            x, y = (k + 0.5) * total_width / len(tier_names), level * 52.0 + 4
            places[name] = x, y + 9
            kind, _, rail = name.partition(" ")
            switches.append(
                Chip(x - 22, y, 44, 18, kind, f"{kind} {rail.partition('.')[0]}", f"{kind} switches of rail {rail}")
            )
    lines = tuple((*places[a], *places[b]) for a, b in network.joints)
    height = max(frame.y + frame.height for frame in frames) + 20
    return ClusterDrawing(total_width, height, tuple(frames), tuple(chips), tuple(switches), lines, num_ranks)


def _tier(name: str) -> tuple[int, list[int]]:
    kind, _, place = name.partition(" ")
    return ("leaf", "spine", "core").index(kind), [int(number) for number in place.split(".")]


@dataclass(frozen=True, slots=True)
class LevelRow:
    """A class of links as text. `parts`: (css, offset, width) of its bar in percent of the longest one."""

    name: str
    bandwidth: str
    latency: str
    moved: tuple[str, ...]
    total: str
    of_device: str
    seconds: str
    parts: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class PlanView:
    """The drawings and numbers of a plan."""

    step: Bars
    step_s: str
    generation_s: str  # "" if the run generates nothing
    calibrate: str  # the command that calibrates predictions; "" if they are calibrated
    low_s: str
    high_s: str
    confidence: str
    bound_s: str
    stages: Bars
    memory: Curves
    has_experts: bool
    cluster: ClusterDrawing | None
    purposes: tuple[tuple[str, str], ...]  # css, meaning
    levels: tuple[LevelRow, ...]
    network_note: str


def view_of(planned: PlannedStep) -> PlanView:
    """Drawn."""
    step, network = planned.step, planned.network
    largest = max((level.total for level in network.levels), default=1)
    nodes = f"{network.num_nodes:,} node{'s' * (network.num_nodes != 1)}"
    return PlanView(
        step=step_bars(step.ranks),
        step_s=seconds(step.seconds),
        generation_s=seconds(planned.generation.seconds) if planned.generation else "",
        calibrate="" if planned.calibrated else CALIBRATE,
        low_s=seconds(step.interval.low_s) if step.interval else "",
        high_s=seconds(step.interval.high_s) if step.interval else "",
        confidence=f"{step.interval.confidence:.0%}" if step.interval else "",
        bound_s=seconds(step.bound_s),
        stages=stage_bars(planned.stages),
        memory=memory_curves(planned.ranks),
        has_experts=any(part.kind == "experts" for stage in planned.stages for part in stage.parts),
        cluster=cluster_of(network),
        purposes=tuple(
            (css, purpose)
            for index, (css, purpose) in enumerate(zip(COLOURS, PURPOSES, strict=True))
            if any(level.moved[index] for level in network.levels)
        ),
        levels=tuple(level_row(level, largest) for level in network.levels),
        network_note=f"{nodes}, {network.num_devices:,} devices.",
    )


def level_row(level: Level, longest_bytes: int) -> LevelRow:
    """Return the row of a class of links. `longest_bytes`: bytes of the longest bar."""
    parts, offset = [], 0
    for css, moved in zip(COLOURS, level.moved, strict=True):
        parts.append((css, f"{100 * offset / longest_bytes:.2f}", f"{100 * moved / longest_bytes:.2f}"))
        offset += moved
    return LevelRow(
        name=LINKS[level.name],
        bandwidth=f"{level.bandwidth / 1e9:.4g} GB/s",
        latency=seconds(level.latency_s),
        moved=tuple(labels.num_bytes(moved) if moved else "" for moved in level.moved),
        total=labels.num_bytes(level.total),
        of_device=labels.num_bytes(round(level.total / level.links)),
        seconds=seconds(level.seconds),
        parts=tuple(parts),
    )
