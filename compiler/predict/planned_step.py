"""The predicted step of a lowered spec's largest batch: times and memory of each rank, its stages, and the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.machine.topology.fabric import LARGE, LEVELS, Fabric
from compiler.machine.topology.traffic import traffic
from compiler.plan.model_graph import model_graph
from compiler.predict.failures import Goodput
from compiler.predict.predict import memories, predict_timed_plan, time_schedule
from compiler.predict.prediction import Flops, GenerationTime, Prediction, RankMemory, StageRow, StepPrediction
from compiler.predict.timed_plan import TimedPlan
from compiler.program.lowered import LoweredPlan
from dsl.schema import Spec
from runtime.contract.names import ProgramName

MOST_DRAWN = 64  # devices of the largest cluster that is drawn as a graph; larger ones are listed by class of link
PURPOSES = ("experts", "gradients", "pipeline")
PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")  # fields of `RankMemory`


@dataclass(frozen=True, slots=True)
class StagePart:
    """A segment or exchange of a stage, and the seconds for which a micro-batch occupies its lane in both phases."""

    site: str
    kind: str
    seconds: float


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the placement. `sends`: bytes that a micro-batch's forward sends to the next stage."""

    row: StageRow
    parts: tuple[StagePart, ...]
    sends: int


@dataclass(frozen=True, slots=True)
class Level:
    """A class of links: the rate of one link, and the bytes that a step moves over all of them."""

    name: str
    links: int  # one for each device
    bandwidth: float  # achieved byte/s of each link
    latency_s: float
    moved: tuple[int, ...]  # bytes for each of PURPOSES

    @property
    def total(self) -> int:
        return sum(self.moved)

    @property
    def seconds(self) -> float:
        """Seconds that all links together would take to carry the bytes if all were busy."""
        return self.total / self.links / self.bandwidth


@dataclass(frozen=True)
class PlannedNetwork:
    """The cluster. `nodes`, `joints` and `ranks` are empty for more than `MOST_DRAWN` devices."""

    num_nodes: int
    num_devices: int
    levels: tuple[Level, ...]
    nodes: tuple[tuple[int, ...], ...] = ()  # world ranks of each node
    joints: tuple[tuple[str, str], ...] = ()  # a device and its switch, or two switches
    ranks: tuple[int, ...] = ()  # pipeline rank of each world rank


@dataclass(frozen=True)
class PlannedStep:
    """The prediction of a step of the largest batch."""

    step: StepPrediction
    ranks: tuple[RankMemory, ...]
    stages: tuple[PlannedStage, ...]
    network: PlannedNetwork
    flops: Flops  # of training on one token
    goodput: Goodput | None = None  # with failures; None if nothing is known about them
    mfu: Flops | None = None  # share of the BF16 peak; None if a device states none
    generation: GenerationTime | None = None  # of the completions that a step trains on
    calibrated: bool = True  # False if the times are those of another CPU

    @property
    def seconds(self) -> float:
        """Seconds of a step, with the generation of the completions that it trains on."""
        return self.step.seconds + (self.generation.seconds if self.generation else 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole cluster, with the time of generation."""
        return self.step.tokens / self.seconds


@dataclass(frozen=True)
class PredictedStep:
    """The timed plan of the largest batch, and its prediction."""

    timed: TimedPlan
    planned: PlannedStep


def predict_step(spec: Spec, lowered: LoweredPlan) -> PredictedStep:
    """Predict a step of the largest batch."""
    schedule = lowered.main_schedule
    timed = time_schedule(spec, lowered.lowering, schedule)
    program = lowered.programs[ProgramName.of("train", schedule.num_micro_batches)]
    return PredictedStep(timed, planned_step_of(timed, predict_timed_plan(timed, memories(timed, program))))


def planned_step_of(timed: TimedPlan, prediction: Prediction) -> PlannedStep:
    """The planned step of a timed plan with its prediction."""
    drawn = _stages(timed, prediction.stages), network_of(timed)
    p = prediction
    return PlannedStep(p.step, p.ranks, *drawn, p.flops, p.goodput, p.mfu, p.generation, p.calibrated)


def _stages(timed: TimedPlan, rows: Sequence[StageRow]) -> tuple[PlannedStage, ...]:
    """Each stage at the rates of the first rank that holds it."""
    graph = model_graph(timed.lowering.chains(row.stage, row.ranks[0]) for row in rows)
    drawn = []
    for row in rows:
        mine = {site: node for site, node in graph.nodes.items() if node.stage == row.stage}
        parts = tuple(StagePart(site, node.kind, sum(node.seconds.values())) for site, node in mine.items())
        sends = sum(edge.bytes for (maker, _), edge in graph.edges.items() if edge.is_message and maker in mine)
        drawn.append(PlannedStage(row, parts, sends))
    return tuple(drawn)


# ---------------------------------------------------------------- network


def network_of(timed: TimedPlan) -> PlannedNetwork:
    """Links by class with a step's traffic, and the graph of a small cluster."""
    fabric, mesh = timed.rates[0].fabric, timed.plan.mesh
    levels = _levels(fabric, traffic(fabric, timed.plan, timed.schedule))
    if fabric.num_devices > MOST_DRAWN:
        return PlannedNetwork(fabric.num_nodes, fabric.num_devices, levels)
    # Imports networkx, which a report of many devices does not need.
    from compiler.machine.topology.device_graph import graph_of

    graph = graph_of(fabric)
    nodes: dict[int, list[int]] = {}
    for device in range(fabric.num_devices):
        nodes.setdefault(fabric.place(device).node, []).append(device)
    edges = [(a, b) for a, b in graph.edges if "nvlink" not in (a[0], b[0])]
    ends = [(_name(a), _name(b)) for a, b in ((b, a) if b[0] in OF_A_DEVICE else (a, b) for a, b in edges)]
    joints = tuple((a, b) for a, b in ends if a != b)
    ranks = tuple(min(device // mesh.columns, mesh.pp - 1) for device in range(fabric.num_devices))
    return PlannedNetwork(
        fabric.num_nodes,
        fabric.num_devices,
        levels,
        tuple(tuple(devices) for devices in nodes.values()),
        joints,
        ranks,
    )


def _levels(fabric: Fabric, moved: Mapping[str, Mapping[str, int]]) -> tuple[Level, ...]:
    """The levels of the network that a step crosses. If nodes differ, the slower links count."""
    links = [nodes.links for nodes in fabric.nodes]
    levels = []
    for name in LEVELS:
        amounts = tuple(moved.get(purpose, {}).get(name, 0) for purpose in PURPOSES)
        if any(amounts):
            bandwidth = min(link.rate("message", name, LARGE) for link in links)
            latency_s = max(link.latency_of(name) for link in links)
            levels.append(Level(name, fabric.num_devices, bandwidth, latency_s, amounts))
    return tuple(levels)


OF_A_DEVICE = ("device", "nic")  # kinds of graph nodes that are part of a device


def _name(node: tuple[object, ...]) -> str:
    """The name of a graph node: `device 3` for a device and its NIC, `leaf 3.0` for a switch (rail and number)."""
    kind, *place = node
    return f"device {place[0]}" if kind in OF_A_DEVICE else f"{kind} {'.'.join(map(str, place))}"
