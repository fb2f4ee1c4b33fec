"""Bytes a step moves over each level of a cluster's links, for pictures: in closed form, as all data ranks do alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from compiler.ir import Communication, Plan, Stage, Use
from compiler.ir.dtypes import ITEMSIZE
from compiler.ir.holders import Holders
from compiler.ir.stage_placement import StagePlacement
from compiler.machine.topology.fabric import Fabric
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import actions_of

# --- What a message between pipeline ranks takes: of two that run neighbouring stages, over the links between them

RankOf = Callable[[int], int]  # stage → the pipeline rank that runs it on the micro-batch at hand


@dataclass(frozen=True)
class Messages:
    """What messages take, by (pipeline rank that sends, pipeline rank that receives): a price for every schedule."""

    seconds: Mapping[tuple[int, int], float]

    def sent_ns(self, kind: str, stage: int, num_stages: int, rank_of: RankOf) -> int:
        """Nanoseconds that the result of an action is on the links to the next rank; 0 where it stays on its own."""
        to = receiver(kind, stage, num_stages, rank_of)
        here = rank_of(stage)
        return 0 if to is None or to == here else round(self.seconds[here, to] * 1e9)


def receiver(kind: str, stage: int, num_stages: int, rank_of: RankOf) -> int | None:
    """The pipeline rank that the result of an action goes to; None where it goes nowhere."""
    if kind not in ("F", "B", "I"):
        return None
    after = stage + (1 if kind == "F" else -1)
    return rank_of(after) if 0 <= after < num_stages else None


def messages_of(fabric: Fabric, plan: Plan, placement: StagePlacement) -> Messages:
    """The messages of a placement, in both directions of micro-batches.

    All columns send at once, and the last message to be there counts. Empty where nothing crosses.
    """
    found: dict[tuple[int, int], float] = {}
    mesh, last = plan.mesh, len(plan.stages) - 1
    for stage, output in ((stage.index, stage.output) for stage in plan.stages if stage.output):
        for micro_batch in (0, 1) if stage < last else ():
            a, b = (placement.rank_of(mesh.pp, 2, each, micro_batch) for each in (stage, stage + 1))
            if a != b and (a, b) not in found:
                time_s = fabric.message_s(mesh.rank(a, 0), mesh.rank(b, 0), output.fixed_bytes, mesh.columns)
                found[a, b] = found[b, a] = time_s
    return Messages(found)


# --- traffic

Traffic = Mapping[str, Mapping[str, int]]  # what for → level → bytes of a step, of all devices together


def traffic(fabric: Fabric, plan: Plan, schedule: Schedule) -> Traffic:
    """Bytes of `pipeline` messages, of rows to and from `experts`, and of `gradients`, over nvlink, leaf, spine, core.

    A message counts on each level it crosses (Fabric.path). Experts are evenly loaded: a row goes to each member of its
    group as often, there and back in the dtype they are dispatched in. It goes by itself, or through the rank of the
    same index on its node, to which a token goes once; then a token goes to as many nodes as it can. Gradients, of 4
    bytes, are summed in nodes and then between them, and gathered the same way; what data ranks divide goes one way
    each time that a segment scatters or gathers it, in its own dtype.
    """
    mesh = plan.mesh
    pipeline: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    sent = {kind: [_exchanged(stage, kind) for stage in plan.stages] for kind in "FBI"}
    copied = _copied(plan)
    back = schedule.turn
    message = next((stage.output.fixed_bytes for stage in plan.stages if stage.output), 0)
    for rank, row in enumerate(schedule.actions):
        actions = [action for step in row for action in actions_of(step) if action.kind in "FBI"]
        exchanged = sum(sent[action.kind][action.stage] for action in actions)
        for level, share in _group_levels(fabric, mesh.rank(rank, 0), mesh.expert_group, copied).items():
            experts[level] += round(exchanged * share * mesh.columns)
        # Where results go depends on the direction of a micro-batch alone.
        ways = Counter([(action.kind, action.stage, action.micro_batch >= back) for action in actions])
        for (kind, stage, turned), times in ways.items():
            micro_batch = back if turned else 0
            to = receiver(kind, stage, schedule.num_stages, partial(schedule.rank_of, micro_batch=micro_batch))
            if to is not None and to != rank:
                levels = fabric.levels(mesh.rank(rank, 0), mesh.rank(to, 0), mesh.columns)
                pipeline.update({level: times * count * message for level, count in levels.items()})
    return {"pipeline": dict(pipeline), "experts": dict(experts), "gradients": dict(_gradients(fabric, plan, schedule))}


def _exchanged(stage: Stage, kind: str) -> int:
    """Bytes that a device sends to its group in an action on a micro-batch; a backward may send rows again."""
    steps = [step for step in stage.steps if isinstance(step, Communication) and step.kind == "dispatch"]
    return sum((2 + (step.again and kind != "F")) * step.sizes[0].fixed_bytes for step in steps)


def _copied(plan: Plan) -> float:
    """Copies of tokens that go to nodes, for each routed row; 0 where each row goes by itself."""
    steps = (step for stage in plan.stages for step in stage.steps if isinstance(step, Communication))
    dispatch = next((step for step in steps if step.kind == "dispatch" and step.order), None)
    return dispatch.copies / int(dispatch.sizes[0].shape[0]) if dispatch else 0.0


def _group_levels(fabric: Fabric, first: int, members: int, copied: float) -> dict[str, float]:
    """The mean share of its rows that a member of the expert group from `first` on sends over each level; of copies
    over the network, where there are so many for each row."""
    found: Counter[str] = Counter()
    on_node = fabric.spread(range(first, first + members)).most
    if copied and on_node < members:
        nodes = members // on_node
        for offset in range(on_node, members, on_node):
            for level, count in fabric.levels(first, first + offset, members - offset).items():
                found[level] += 2 * count
        shares = {level: copied * count / members / nodes for level, count in found.items()}
        return shares | {"nvlink": (on_node - 1) / on_node}
    for offset in range(1, members):
        for level, count in (
            *fabric.levels(first, first + offset, members - offset).items(),
            *fabric.levels(first + offset, first, members - offset).items(),
        ):
            found[level] += count
    return {level: count / members**2 for level, count in found.items()}


def _gradients(fabric: Fabric, plan: Plan, schedule: Schedule) -> Counter[str]:
    sent = _summed(plan)
    for stage in plan.stages:
        ranks = plan.ranks_of_stage(stage.index)
        for use in (step for step in stage.steps if isinstance(step, Use) and step.site in plan.sharded):
            here, (gathers, scatters) = plan.sharded[use.site], plan.moves_of(use)
            of_element = scatters * ITEMSIZE[here.gradients.dtype]
            of_element += gathers * ITEMSIZE[here.weights.dtype] if here.weights else 0
            for holders, elements in here.buckets:
                groups = plan.mesh.columns // len(holders)
                for rank in ranks:
                    runs = schedule.num_micro_batches // len(ranks)
                    sent[holders.on(rank)] += runs * of_element * elements * groups
    found: Counter[str] = Counter()
    for holders, num_bytes in sent.items():
        if len(holders) > 1:
            spread = fabric.spread(holders)
            found["nvlink"] += num_bytes * (spread.most - 1) * spread.nodes
            if spread.nodes > 1:
                found[fabric.level_of(holders)] += num_bytes * (spread.nodes - 1)
    return found


def _summed(plan: Plan) -> Counter[Holders]:
    """Bytes of gradients and weights that are summed and gathered behind the last action, by holders."""
    of = {replica.key: replica for replica in plan.replicas}
    found: Counter[Holders] = Counter()
    for bucket in (each for each in plan.buckets if not each.still):
        num_bytes = 4 * sum(of[name].num_elements for name in bucket.replicas)
        whole = 2 if not bucket.sites else int(plan.zero == 2)
        found[bucket.holders] += whole * num_bytes
        for column in bucket.holders.columns if bucket.sites else ():
            found[bucket.holders.at(column)] += (2 - whole) * num_bytes // bucket.parts
    return found
