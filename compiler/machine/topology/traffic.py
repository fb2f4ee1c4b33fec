"""Bytes that a step moves over each level of a cluster's links, for pictures. In closed form: data ranks are alike."""

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

# --- Times of the messages between pipeline ranks that run neighbouring stages

RankOf = Callable[[int], int]  # stage → the pipeline rank that runs it on a given micro-batch


@dataclass(frozen=True)
class Messages:
    """Seconds of a message by (sending pipeline rank, receiving pipeline rank). Serves every schedule."""

    seconds: Mapping[tuple[int, int], float]

    def sent_ns(self, kind: str, stage: int, num_stages: int, rank_of: RankOf) -> int:
        """Nanoseconds to send the result of an action to its next rank; 0 if it stays on its rank."""
        target = receiver(kind, stage, num_stages, rank_of)
        source = rank_of(stage)
        return 0 if target is None or target == source else round(self.seconds[source, target] * 1e9)


def receiver(kind: str, stage: int, num_stages: int, rank_of: RankOf) -> int | None:
    """The pipeline rank that receives the result of an action; None if nothing is sent."""
    if kind not in ("F", "B", "I"):
        return None
    after = stage + (1 if kind == "F" else -1)
    return rank_of(after) if 0 <= after < num_stages else None


def messages_of(fabric: Fabric, plan: Plan, placement: StagePlacement) -> Messages:
    """The messages of a placement, for both directions of micro-batches.

    All columns send at once, and the last message to arrive counts. Empty if no message leaves its rank.
    """
    seconds: dict[tuple[int, int], float] = {}
    mesh, last = plan.mesh, len(plan.stages) - 1
    for stage, output in ((stage.index, stage.output) for stage in plan.stages if stage.output):
        for micro_batch in (0, 1) if stage < last else ():
            a, b = (placement.rank_of(mesh.pp, 2, neighbour, micro_batch) for neighbour in (stage, stage + 1))
            if a != b and (a, b) not in seconds:
                time_s = fabric.message_s(mesh.rank(a, 0), mesh.rank(b, 0), output.fixed_bytes, mesh.columns)
                seconds[a, b] = seconds[b, a] = time_s
    return Messages(seconds)


# --- traffic

Traffic = Mapping[str, Mapping[str, int]]  # purpose → level → bytes of a step, over all devices


def traffic(fabric: Fabric, plan: Plan, schedule: Schedule) -> Traffic:
    """Bytes of `pipeline` messages, of rows to and from `experts`, and of `gradients`, over nvlink, leaf, spine, core.

    A message counts on each level that it crosses (`Fabric.path`). Experts count as evenly loaded: each member of a
    group receives equally many rows, and rows travel in the dispatch dtype in both directions. A row goes directly to
    its expert's rank, or through the rank with the same index on that rank's node. In the second case a token goes to
    each node once, and to as many nodes as it can. Gradients have 4 bytes and are summed in nodes and then between
    them, and gathered the same way. Sharded buckets move one way, in their own dtype, each time that a segment scatters
    or gathers them.
    """
    mesh = plan.mesh
    pipeline: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    sent = {kind: [_exchanged_bytes(stage, kind) for stage in plan.stages] for kind in "FBI"}
    copies_per_row = _copies_per_row(plan)
    back = schedule.turn
    message = next((stage.output.fixed_bytes for stage in plan.stages if stage.output), 0)
    for rank, row in enumerate(schedule.actions):
        actions = [action for step in row for action in actions_of(step) if action.kind in "FBI"]
        exchanged = sum(sent[action.kind][action.stage] for action in actions)
        for level, share in _group_levels(fabric, mesh.rank(rank, 0), mesh.expert_group, copies_per_row).items():
            experts[level] += round(exchanged * share * mesh.columns)
        # The destination of a result depends only on the direction of its micro-batch.
        message_counts = Counter([(action.kind, action.stage, action.micro_batch >= back) for action in actions])
        for (kind, stage, turned), times in message_counts.items():
            micro_batch = back if turned else 0
            target = receiver(kind, stage, schedule.num_stages, partial(schedule.rank_of, micro_batch=micro_batch))
            if target is not None and target != rank:
                levels = fabric.levels(mesh.rank(rank, 0), mesh.rank(target, 0), mesh.columns)
                pipeline.update({level: times * count * message for level, count in levels.items()})
    return {"pipeline": dict(pipeline), "experts": dict(experts), "gradients": dict(_gradients(fabric, plan, schedule))}


def _exchanged_bytes(stage: Stage, kind: str) -> int:
    """Bytes that a device sends to its group in an action on a micro-batch; a backward may dispatch again."""
    steps = [step for step in stage.steps if isinstance(step, Communication) and step.kind == "dispatch"]
    return sum((2 + (step.is_repeated and kind != "F")) * step.sizes[0].fixed_bytes for step in steps)


def _copies_per_row(plan: Plan) -> float:
    """Copies of tokens that are sent to nodes per routed row; 0 if rows go directly to their ranks."""
    steps = (step for stage in plan.stages for step in stage.steps if isinstance(step, Communication))
    dispatch = next((step for step in steps if step.kind == "dispatch" and step.order), None)
    return dispatch.copies / int(dispatch.sizes[0].shape[0]) if dispatch else 0.0


def _group_levels(fabric: Fabric, first: int, members: int, copies_per_row: float) -> dict[str, float]:
    """By level, the mean share of its rows that a member of the expert group starting at `first` sends over it.

    With `copies_per_row` copies per row, the shares on the network are those of the copies.
    """
    counts: Counter[str] = Counter()
    on_node = fabric.spread(range(first, first + members)).max_members
    if copies_per_row and on_node < members:
        nodes = members // on_node
        for offset in range(on_node, members, on_node):
            for level, count in fabric.levels(first, first + offset, members - offset).items():
                counts[level] += 2 * count
        shares = {level: copies_per_row * count / members / nodes for level, count in counts.items()}
        return shares | {"nvlink": (on_node - 1) / on_node}
    for offset in range(1, members):
        for level, count in (
            *fabric.levels(first, first + offset, members - offset).items(),
            *fabric.levels(first + offset, first, members - offset).items(),
        ):
            counts[level] += count
    return {level: count / members**2 for level, count in counts.items()}


def _gradients(fabric: Fabric, plan: Plan, schedule: Schedule) -> Counter[str]:
    sent = _summed_bytes(plan)
    for stage in plan.stages:
        ranks = plan.ranks_of_stage(stage.index)
        for use in (step for step in stage.steps if isinstance(step, Use) and step.site in plan.sharded):
            sharded, (gathers, scatters) = plan.sharded[use.site], plan.moves_of(use)
            of_element = scatters * ITEMSIZE[sharded.gradients.dtype]
            of_element += gathers * ITEMSIZE[sharded.weights.dtype] if sharded.weights else 0
            for holders, elements in sharded.buckets:
                groups = plan.mesh.columns // len(holders)
                for rank in ranks:
                    runs = schedule.num_micro_batches // len(ranks)
                    sent[holders.on_rank(rank)] += runs * of_element * elements * groups
    by_level: Counter[str] = Counter()
    for holders, num_bytes in sent.items():
        if len(holders) > 1:
            spread = fabric.spread(holders)
            by_level["nvlink"] += num_bytes * (spread.max_members - 1) * spread.nodes
            if spread.nodes > 1:
                by_level[fabric.level_of(holders)] += num_bytes * (spread.nodes - 1)
    return by_level


def _summed_bytes(plan: Plan) -> Counter[Holders]:
    """Bytes of gradients and weights that are summed and gathered after the last action, by holders."""
    by_key = {replica.key: replica for replica in plan.replicas}
    by_holders: Counter[Holders] = Counter()
    for bucket in (bucket for bucket in plan.buckets if not bucket.is_still):
        num_bytes = 4 * sum(by_key[name].num_elements for name in bucket.replicas)
        whole_moves = 2 if not bucket.sites else int(plan.zero == 2)
        by_holders[bucket.holders] += whole_moves * num_bytes
        for column in bucket.holders.of_first_copy(bucket.copies).columns if bucket.sites else ():
            alike = bucket.holders.alike(bucket.copies, column)
            by_holders[alike] += (2 - whole_moves) * num_bytes // bucket.parts
    return by_holders
