"""The plan of a spec: the layers of each stage, the holders of each tensor, and the replicas that are reduced.

Placement is a graph, tensor → stage → pipeline rank: the ranks reached from a tensor hold it. Therefore the second copy
of a mirrored stage, and the embedding and head that MTP shares with the main model, need no special rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter

from compiler.ir import Bucket, Plan, Replica, Stage, Use
from compiler.ir.holders import Holders, sharing
from compiler.plan.blocks import NO_CUTS, CutModel, CutsByKey, cut_model, cuts_by_site
from compiler.plan.layer_runs import Runs, stage_placement_of_spec
from compiler.plan.parameters import SegmentTensor, tensors
from compiler.plan.sharding import dividing_sites, sharded_segments, with_owners
from compiler.plan.spec_files import expert_placement_of
from compiler.plan.split_search import NEAR
from compiler.plan.splitting import Splitting
from compiler.plan.stages import stages_of
from dsl.schema import Optimizer, Spec
from runtime.contract.mesh import Mesh
from runtime.contract.names import ParameterName

WITH_STATE, WITHOUT = ("parameter", "still"), ("frozen",)  # roles of tensors in buckets, with and without state
HELD = (*WITH_STATE, *WITHOUT)
Owners = Mapping[str, tuple[int, ...]]  # layer, such as layers.3 → the expert rank of each of its experts


def make_plan(spec: Spec, cuts_by_key: CutsByKey = NO_CUTS) -> Plan:
    """Make the plan of a spec that has passed its checks. Pure, and without torch.

    Stages and experts are placed as in the files that the spec names, if it names any. `cuts_by_key`: cuts of other
    plans to reuse, by the key of a segment.
    """
    model, placement = cut_model(spec, cuts_by_key), stage_placement_of_spec(spec)
    return plan_of(model, Splitting(model, placement.num_stages(spec.parallel.pipeline), placement).runs)


def plan_of(model: CutModel, runs: Runs) -> Plan:
    """The plan of a model with the given run of layers on each stage."""
    spec = model.spec
    parallel = spec.parallel
    node = spec.cluster.node.devices if spec.routes_by_nodes else 0
    degrees = parallel.pipeline, parallel.data, parallel.expert, parallel.tensor, parallel.context
    mesh = Mesh(*degrees, node, parallel.expert_tensor, spec.sequence_ranks, parallel.copies)
    stage_placement = stage_placement_of_spec(spec)
    stages = stages_of(model, runs)
    uses = [step for stage in stages for step in stage.steps if isinstance(step, Use)]
    users = stages_of_tensors(stages)
    ranks_of = {
        used_by: tuple(sorted({rank for stage in used_by for rank in stage_placement.ranks_of_stage(mesh.pp, stage)}))
        for used_by in set(users.values())
    }
    rows = tensors(spec, (step for stage in stages for step in stage.steps))
    expert_placement = expert_placement_of(spec)
    owners: Owners = expert_placement.owners if expert_placement else {}
    owned = {row.name: _owners(row, mesh.ep, owners) for row in rows if row.num_experts is not None}
    replicas = tuple(
        replica
        for row in rows
        for replica in replicas_of(row, ranks_of[users[row.name]], mesh, owned.get(row.name, ()))
    )
    sites = dividing_sites(stages, replicas, parallel)
    rank_of: dict[str, int] = {
        step.site: stage_placement.ranks_of_stage(mesh.pp, stage.index)[0] for stage in stages for step in stage.steps
    }
    optimizer = spec.train.optimizer
    grouped, frozen = (
        buckets([r for r in replicas if r.role in roles], users, sites, optimizer, parallel.copies)
        for roles in (WITH_STATE, WITHOUT)
    )
    grouped = with_owners(grouped, replicas, optimizer, parallel.zero)
    return Plan(
        mesh=mesh,
        stage_placement=stage_placement,
        stages=stages,
        cuts=cuts_by_site(uses, model.cuts_by_key) if model.recomputed_blocks else model.cuts,
        replicas=replicas,
        buckets=grouped,
        frozen=frozen,
        assumptions=(
            *_assumptions(spec, len(stages), bool(owned)),
            *(expert_placement.evenness if expert_placement else ()),
        ),
        slots=tuple(
            (row.name, slots_of(_owners(row, mesh.ep, owners), mesh.etp)) for row in rows if row.role == "slots"
        ),
        zero=parallel.zero,
        sharded=sharded_segments(spec, replicas, grouped, rank_of),
        overlap_reduce=parallel.overlap_reduce,
        evaluates_average=spec.train.validate is not None and spec.train.validate.ema,
    )


def _assumptions(spec: Spec, num_stages: int, has_experts: bool) -> Iterator[str]:
    """Say where layers and experts are, if there is more than one place for them."""
    if spec.parallel.layout is not None:
        yield "layers are on the stages that the layout names"
    elif num_stages > 1:
        yield (
            "layers are split so that the most loaded pipeline rank takes the least time, and then the slowest stage; "
            f"of splits that take at most {1 / NEAR:.0%} more, the one whose fullest device holds least is chosen"
        )
    slices = spec.parallel.expert_tensor
    split = f"; a rank has {slices} devices, each with a slice of the width of its experts" if slices > 1 else ""
    if has_experts and spec.parallel.placement is not None:
        yield f"experts are on the expert ranks that {spec.parallel.placement} names{split}"
    elif has_experts and spec.parallel.expert_group > 1:
        yield f"expert e of E is on expert rank e // (E / expert){split}"


def slots_of(owners: Sequence[int], slices: int = 1) -> tuple[int, ...]:
    """The slot of each expert in its layer. Ranks follow each other, with the experts of a rank in order.

    With several slices, the slot is that of an expert's first slice. Each further slice is as many slots later as a
    rank has experts.
    """
    order = sorted(range(len(owners)), key=lambda expert: (owners[expert], expert))
    places, local = {expert: place for place, expert in enumerate(order)}, len(owners) // (max(owners) + 1)
    return tuple(places[expert] + owner * local * (slices - 1) for expert, owner in enumerate(owners))


def _owners(tensor: SegmentTensor, num_ranks: int, owners: Owners) -> tuple[int, ...]:
    """The expert rank of each expert in the layer of a tensor that has an entry per expert."""
    num_experts, placed = tensor.num_experts or tensor.shape[0], owners.get(ParameterName(tensor.name).block)
    return placed or tuple(e // (num_experts // num_ranks) for e in range(num_experts))


def stages_of_tensors(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Tensor → the stages that use it, ascending."""
    users_of: dict[str, dict[int, None]] = defaultdict(dict)
    for stage in stages:
        for step in stage.steps:
            if isinstance(step, Use):
                for _, tensor in step.params:
                    users_of[tensor][stage.index] = None
    return {tensor: tuple(users) for tensor, users in users_of.items()}


@lru_cache(maxsize=8192)  # plans of a search share most rows; DeepSeek-V3 has 925 tensors
def replicas_of(
    tensor: SegmentTensor, pipeline_ranks: tuple[int, ...], mesh: Mesh, owners: tuple[int, ...]
) -> tuple[Replica, ...]:
    """A replica for each logical parameter of a tensor, or for each of its slices. Those of an expert are on its owner.

    Equal holders share one value.
    """
    row, split = (tensor.shape, tensor.role, tensor.init, tensor.decay), tensor.split
    slices = [split.slice_of(rank) for rank in range(split.ranks)] if split else [None]
    names = tensor.names()
    of_experts, places = tensor.num_experts is not None, tuple(owners) if owners else (0,)
    assert not (of_experts and split) or len(slices) == mesh.etp, f"{tensor.name} is not split as experts are"
    holders = {
        (place, index): Holders(
            pipeline_ranks, sharing(mesh, of_experts, split is not None, place * mesh.etp + index), mesh.columns
        )
        for place in {*places}
        for index in range(len(slices))
    }
    return tuple(
        Replica(name, tensor.name, *row, holders[place, index], tensor.uniform, part, tensor.matrices, tensor.mean)
        for name, place in zip(names, places, strict=True)
        for index, part in enumerate(slices)
    )


def buckets(
    replicas: Sequence[Replica],
    stages: Mapping[str, tuple[int, ...]],
    sites: Mapping[str, tuple[str, ...]],
    optimizer: Optimizer,
    copies: int = 1,
) -> tuple[Bucket, ...]:
    """Parameters grouped by holders, stages, row of the optimizer, and whether they are trained.

    In a bucket, parameters with weight decay come first, and otherwise all are in model order. `stages`: the stages
    that use a tensor. `sites`: the segments that read a sharded tensor, by which these are grouped too. `copies`: as in
    Mesh.
    """
    grouped: dict[tuple[Holders, tuple[int, ...], tuple[str, ...], bool, bool], list[Replica]] = defaultdict(list)
    for tensor, rows in groupby(replicas, key=attrgetter("tensor")):
        for (holders, matrices, role), group in groupby(rows, key=attrgetter("holders", "matrices", "role")):
            key = holders, stages[tensor], sites.get(tensor, ()), optimizer.is_rest(matrices), role == "still"
            grouped[key].extend(group)
    return tuple(
        Bucket(members[0].key, holders, used_by, tuple(r.key for r in members), (), read_by, is_rest, is_still, copies)
        for (holders, used_by, read_by, is_rest, is_still), group in grouped.items()
        for members in [sorted(group, key=lambda r: not r.decay)]
    )
