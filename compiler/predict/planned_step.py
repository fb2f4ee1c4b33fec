"""A lowered spec → the predicted step of its largest batch: times and memory of every rank, stages, and the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.machine.topology.fabric import LARGE, LEVELS, Fabric
from compiler.machine.topology.traffic import traffic
from compiler.plan.model_graph import model_graph
from compiler.predict.failures import Goodput
from compiler.predict.predict import TimedPlan, memories, predicted, timed_on
from compiler.predict.prediction import Flops, GenerationTime, Prediction, RankMemory, StageRow, StepPrediction
from compiler.program.lowered import Lowered
from dsl.schema import Spec
from runtime.contract.names import ProgramName

MOST_DRAWN = 64  # devices of a cluster that is drawn, and not told in classes alone
PURPOSES = ("experts", "gradients", "pipeline")
PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")  # of `RankMemory`


@dataclass(frozen=True, slots=True)
class StagePart:
    """A segment or exchange of a stage, and the seconds that a micro-batch holds its lane, forward and backward."""

    site: str
    kind: str
    seconds: float


@dataclass(frozen=True)
class StageDrawn:
    """A stage of the placement; `sends`: bytes of a micro-batch that go to the next stage, of values that it made."""

    row: StageRow
    parts: tuple[StagePart, ...]
    sends: int


@dataclass(frozen=True, slots=True)
class Level:
    """A class of links: what one carries, and what a step moves over all of them, by purpose."""

    name: str
    links: int  # ends of links, one for each device
    bandwidth: float  # byte/s of each, achieved
    latency_s: float
    moved: tuple[int, ...]  # bytes of each of PURPOSES

    @property
    def total(self) -> int:
        return sum(self.moved)

    @property
    def seconds(self) -> float:
        """Seconds for which all links together would carry the bytes, were all busy."""
        return self.total / self.links / self.bandwidth


@dataclass(frozen=True)
class PlannedNetwork:
    """The cluster. `nodes`: world ranks of each node, `joints`: a device and its switch, or two switches; if few."""

    num_nodes: int
    num_devices: int
    levels: tuple[Level, ...]
    nodes: tuple[tuple[int, ...], ...] = ()
    joints: tuple[tuple[str, str], ...] = ()
    ranks: tuple[int, ...] = ()  # pipeline rank of each world rank


@dataclass(frozen=True)
class PlannedStep:
    """The prediction of a step of the largest batch."""

    step: StepPrediction
    ranks: tuple[RankMemory, ...]
    stages: tuple[StageDrawn, ...]
    network: PlannedNetwork
    flops: Flops  # of training on a token
    goodput: Goodput | None = None  # beside failures; None where nothing is known of them
    mfu: Flops | None = None  # share of the BF16 peak; None where a device has none
    generation: GenerationTime | None = None  # of the completions that a step learns from
    calibrated: bool = True  # False where times are those of another CPU

    @property
    def seconds(self) -> float:
        """Seconds of a step and of the completions that it learns from."""
        return self.step.seconds + (self.generation.seconds if self.generation else 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole cluster, the time of the completions included."""
        return self.step.tokens / self.seconds


@dataclass(frozen=True)
class PredictedStep:
    """The timed plan of the largest batch, and what is planned from it."""

    timed: TimedPlan
    planned: PlannedStep


def predict_step(spec: Spec, lowered: Lowered) -> PredictedStep:
    """Predict a step of the largest batch."""
    schedule = lowered.main_schedule
    timed = timed_on(spec, lowered.lowering, schedule)
    program = lowered.programs[ProgramName.of("train", schedule.num_micro_batches)]
    return PredictedStep(timed, planned_of(timed, predicted(timed, memories(timed, program))))


def planned_of(found: TimedPlan, prediction: Prediction) -> PlannedStep:
    """`prediction`: of the timed plan."""
    drawn = _stages(found, prediction.stages), network_of(found)
    p = prediction
    return PlannedStep(p.step, p.ranks, *drawn, p.flops, p.goodput, p.mfu, p.generation, p.calibrated)


def _stages(found: TimedPlan, rows: Sequence[StageRow]) -> tuple[StageDrawn, ...]:
    """Each stage at the rates of the first rank that holds it."""
    graph = model_graph(found.lowering.chains(row.stage, row.ranks[0]) for row in rows)
    drawn = []
    for row in rows:
        mine = {site: node for site, node in graph.nodes.items() if node.stage == row.stage}
        parts = tuple(StagePart(site, node.kind, sum(node.seconds.values())) for site, node in mine.items())
        sends = sum(edge.bytes for (maker, _), edge in graph.edges.items() if edge.crosses and maker in mine)
        drawn.append(StageDrawn(row, parts, sends))
    return tuple(drawn)


# ---------------------------------------------------------------- network


def network_of(found: TimedPlan) -> PlannedNetwork:
    """Links by class with a step's traffic, and the cluster as a graph where it is small."""
    fabric, mesh = found.rates[0].fabric, found.plan.mesh
    levels = _levels(fabric, traffic(fabric, found.plan, found.schedule))
    if fabric.num_devices > MOST_DRAWN:
        return PlannedNetwork(fabric.num_nodes, fabric.num_devices, levels)
    # with networkx, which no report of many devices waits for
    from compiler.machine.topology.device_graph import graph_of

    graph = graph_of(fabric)
    nodes: dict[int, list[int]] = {}
    for device in range(fabric.num_devices):
        nodes.setdefault(fabric.place(device)[0], []).append(device)
    edges = [(a, b) for a, b in graph.edges if "nvlink" not in (a[0], b[0])]
    ends = [(_name(a), _name(b)) for a, b in ((b, a) if b[0] in OF_A_DEVICE else (a, b) for a, b in edges)]
    joints = tuple((a, b) for a, b in ends if a != b)
    ranks = tuple(min(device // mesh.columns, mesh.pp - 1) for device in range(fabric.num_devices))
    return PlannedNetwork(
        fabric.num_nodes,
        fabric.num_devices,
        levels,
        tuple(tuple(each) for each in nodes.values()),
        joints,
        ranks,
    )


def _levels(fabric: Fabric, moved: Mapping[str, Mapping[str, int]]) -> tuple[Level, ...]:
    """Levels of the network that a step crosses, with the slower links where nodes differ."""
    links = [nodes.links for nodes in fabric.nodes]
    found = []
    for name in LEVELS:
        each = tuple(moved.get(purpose, {}).get(name, 0) for purpose in PURPOSES)
        if any(each):
            bandwidth = min(link.rate("message", name, LARGE) for link in links)
            found.append(Level(name, fabric.num_devices, bandwidth, max(link.latency_of(name) for link in links), each))
    return tuple(found)


OF_A_DEVICE = ("device", "nic")  # kinds of nodes


def _name(node: tuple[object, ...]) -> str:
    """A device with its NIC is one; a switch is `leaf 3.0`: rail and number."""
    kind, *place = node
    return f"device {place[0]}" if kind in OF_A_DEVICE else f"{kind} {'.'.join(map(str, place))}"
