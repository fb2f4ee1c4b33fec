"""plan.json of a build: the mesh, the model, the training recipe, and what each rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from runtime.contract.data import DataRecipe, DataRequest
from runtime.contract.held import (
    NO_HOST,
    Bias,
    ExpertTable,
    HeldParameter,
    Host,
    OptimizerState,
    PlannedBucket,
    QuantisedTensor,
)
from runtime.contract.mesh import MAX_RANKS, MAX_SMS, Mesh, NodeKind, Opening
from runtime.contract.names import Site
from runtime.contract.recipe import (
    MAX_STEPS,
    Adapter,
    Amount,
    Batches,
    Count,
    Dtype,
    Layer,
    Name,
    Placement,
    Shape,
    TrainRecipe,
    Vocab,
)
from runtime.contract.slices import Slice, tiling_problem
from runtime.system.strict_json import FormError, NumberRange, Pattern, Tree, read

# --- Predicted times of bodies and programs: shown to people, never used by ranks


@dataclass(frozen=True)
class BodyTimes:
    """Predicted times of a body, and the share of its communication that overlaps with compute."""

    ms: float
    compute_ms: float
    communication_ms: float
    hidden: float


@dataclass(frozen=True)
class ProgramTimes:
    """Predicted share of a program's communication that overlaps with compute."""

    hidden: float


@dataclass(frozen=True)
class OverlapTimes:
    """Predicted times of each body and of each program, by name."""

    bodies: Mapping[str, BodyTimes]
    programs: Mapping[str, ProgramTimes]


# --- Values of the spec


@dataclass(frozen=True)
class PlannedPrecision:
    """The dtype of each kind of tensor, and that of accumulation."""

    parameter: Dtype
    compute: Dtype
    linear: Dtype
    accumulate: Dtype
    gradients: Dtype
    master: Dtype
    moments: Dtype
    dispatch: Dtype
    combine: Dtype


@dataclass(frozen=True)
class PlannedPhase:
    """A value of a setting that changes during training. It holds until `until_tokens` tokens are trained; None: to the
    end."""

    value: float
    until_tokens: Amount | None


# --- The model


@dataclass(frozen=True)
class PlannedLayers:
    """Layers `first` to `last`, both included, which have the same feed-forward part. `attention`: None for that of the
    model."""

    first: Layer
    last: Layer
    ffn: Tree
    attention: Tree | None = None


@dataclass(frozen=True)
class PlannedModel:
    """The model of the spec. Ranks read no key of a Tree; they only compare it with the Tree in a checkpoint."""

    name: str
    vocab: Vocab
    hidden: Count
    init_std: float
    norm_eps: float
    attention: Tree
    layers: tuple[PlannedLayers, ...]
    mtp: Tree | None
    more: Tree | None = None  # other keys of the model block without their default values


# --- Messages between ranks, and layers with work at the end of a step


@dataclass(frozen=True)
class StageMessage:
    """The message from one stage to the next."""

    shape: Shape
    dtype: Dtype


@dataclass(frozen=True)
class MoeLayer:
    """What a rank needs of a MoE layer at the end of a step.

    `bias`: the tensor of the balancing bias; None if the layer has none. `slots`: the slot of each expert, or of its
    first slice if experts are split; None if experts are whole and in order. Loads are counted by slot. `replays`: the
    number of experts per token whose choice is replayed, if several steps train on the same completions.
    """

    site: Site
    name: Name  # layers.3
    experts: Count
    sent_rows: Count  # rows that a rank sends per micro-batch
    held_rows: Count  # planned rows of a rank: as many as it sends, plus the largest possible padding
    sequence_loss: float
    bias: Name | None
    bias_rate: tuple[PlannedPhase, ...] | None
    slots: tuple[Amount, ...] | None = None
    replays: Count | None = None


@dataclass(frozen=True)
class PlannedIndexer:
    """The indexer that chooses keys for a layer's attention: its site, and the weight of its loss."""

    site: Site
    loss: Annotated[float, NumberRange(0)]


@dataclass(frozen=True)
class ClippedRows:
    """Rows of a parameter that produce queries or keys, which QK-clip scales.

    They begin at row `first`. Each of the `heads` heads has the same consecutive `parts`: pairs of a number of rows and
    an exponent from 0 to 1. QK-clip multiplies the rows of a part by γ to the power of its exponent.
    """

    parameter: Name
    first: Amount
    heads: Count
    parts: tuple[tuple[Count, Annotated[float, NumberRange(0, 1)]], ...]

    @property
    def end(self) -> int:
        return self.first + self.heads * sum(rows for rows, _ in self.parts)


@dataclass(frozen=True)
class ClippedAttention:
    """The attention of a block to which QK-clip applies. The largest logit among the query heads of a key head decides
    how much they are clipped. `heads`: the number of query heads."""

    name: Name  # of the block: layers.3
    heads: Count
    key_heads: Count
    rows: tuple[ClippedRows, ...]


# --- The plan


@dataclass(frozen=True)
class RunPlan:
    """Everything that a rank needs besides its program."""

    run: Annotated[str, Pattern(r"[A-Za-z_][A-Za-z0-9_.-]{0,1100}")]  # becomes a folder name
    mesh: Mesh
    cluster: tuple[NodeKind, ...]
    communication_sms: Annotated[int, NumberRange(0, MAX_SMS)]  # SMs of a device that are reserved for communication
    placement: Placement
    zero: Annotated[int, NumberRange(0, 3)]
    precision: PlannedPrecision
    row_alignment: Count  # received rows of an expert are padded to a multiple of it
    model: PlannedModel
    train: TrainRecipe
    optimizer: OptimizerState
    data: DataRecipe
    steps: Annotated[int, NumberRange(1, MAX_STEPS)]  # in a run with phases, those of this phase
    batches: Batches  # by step, from the first step of this build
    mtp_weight: tuple[PlannedPhase, ...] | None
    message: StageMessage | None  # None if there is one stage
    openings: tuple[Opening, ...]  # the channels of all ranks, in the order of opening
    records: tuple[Annotated[str, Pattern(r"[a-z_]+( [A-Za-z0-9_.]+)?")], ...]
    moe_layers: tuple[MoeLayer, ...]
    stages: tuple[tuple[Site, ...], ...]  # the sites of each stage
    overlap: OverlapTimes
    memory: tuple[Amount, ...]  # predicted bytes, by pipeline rank
    buckets: tuple[PlannedBucket, ...]
    biases: tuple[Bias, ...]
    indexers: tuple[PlannedIndexer, ...] = ()
    quantised: tuple[QuantisedTensor, ...] = ()
    host: Host = NO_HOST
    frozen: tuple[PlannedBucket, ...] = ()  # frozen weights
    adapter: Adapter | None = None
    sequence_part: Amount = 0  # bytes of the largest message that a context rank sends
    tables: tuple[ExpertTable, ...] = ()
    choices_part: Amount = 0  # bytes of the counts of chosen experts that a rank sends
    clipped: tuple[ClippedAttention, ...] = ()  # in the order of the blocks

    @staticmethod
    def from_json(text: str | bytes) -> RunPlan:
        """Parse a plan and check that its parts are consistent. Raises FormError."""
        plan = read(RunPlan, text, "a plan")
        _check_parts(plan)
        return plan

    @property
    def parameters(self) -> tuple[HeldParameter, ...]:
        """All trained logical parameters."""
        return tuple(parameter for bucket in self.buckets for parameter in bucket.parameters)

    @property
    def untrained(self) -> tuple[Bias | ExpertTable, ...]:
        """Balancing biases and expert tables of routers, which have no gradients. With adapters they never change."""
        return (*self.biases, *self.tables)

    def gathers(self, bucket: PlannedBucket) -> bool:
        """Whether the weights of a bucket are sharded, so that segments gather them."""
        return self.zero == 3 and bool(bucket.sites)

    def peers(self, bucket: PlannedBucket, rank: int) -> tuple[int, ...]:
        """Return the holders of a bucket that keep the same gradients as `rank`: all of them or, for a sharded bucket,
        those with the same place in their groups of columns (`Mesh.copies`)."""
        columns = self.mesh.shard_columns
        return tuple(h for h in bucket.holders if not bucket.sites or (h - rank) % columns == 0)

    def dividers(self, bucket: PlannedBucket, rank: int) -> tuple[int, ...]:
        """Return the holders of a bucket in the group of columns of `rank` on its pipeline rank. If the bucket has
        sites, they shard it."""
        columns = self.mesh.shard_columns
        return tuple(h for h in bucket.holders if h // columns == rank // columns)

    def is_reduced(self, bucket: PlannedBucket) -> bool:
        """Whether several holders keep the same gradients, which are then summed once a step."""
        return len(self.peers(bucket, bucket.holders[0])) > 1 and not bucket.still

    @property
    def edges(self) -> tuple[tuple[int, ...], ...]:
        """Pairs of pipeline ranks that exchange messages: (source, destination)."""
        return tuple(opening.ranks for opening in self.openings if opening.kind == "edge")

    @property
    def keeps_first_weights(self) -> bool:
        """Whether ranks keep initial weights: frozen weights, or the reference model of a KL divergence."""
        return bool(self.frozen) or (self.train.grpo is not None and self.train.grpo.kl > 0)

    @property
    def data_request(self) -> DataRequest:
        return DataRequest(self.data, self.model.vocab, self.train.seed)


def _check_parts(plan: RunPlan) -> None:
    """Raise FormError if two parts of a plan contradict each other. O(size of the plan)."""
    mesh, layers, batches = plan.mesh, plan.model.layers, plan.batches
    demand(mesh.world <= MAX_RANKS and mesh.columns % mesh.expert_group == 0, "mesh")
    demand(layers and layers[0].first == 0, "model.layers")
    for span, after in zip(layers, [*layers[1:], None], strict=True):
        demand(span.first <= span.last, "model.layers")
        demand(after is None or after.first == span.last + 1, "model.layers")
    demand(len(plan.memory) == mesh.pp, "memory")
    demand(sum(kind.nodes * kind.devices for kind in plan.cluster) == mesh.world, "cluster")
    demand(all(kind.sms is None or kind.sms > plan.communication_sms for kind in plan.cluster), "communication_sms")
    demand(mesh.node == 0 or mesh.expert_group % mesh.node == 0, "mesh")
    demand(mesh.dp % mesh.copies == 0 == mesh.shard_columns % mesh.expert_group, "mesh")
    demand(mesh.copies == 1 or plan.zero >= 2, "mesh")
    demand(mesh.sq == 1 or mesh.sq % mesh.cp == 0, "mesh")
    for opening in plan.openings:
        ends = opening.ranks
        demand(ends and len({*ends}) == len(ends) and max(ends) < mesh.pp, "openings")
        demand(opening.kind != "edge" or len(ends) == 2, "openings")
    demand(not plan.host.memory or len(plan.host.memory) == mesh.pp, "host.memory")
    demand(plan.train.rate, "train.rate")
    if (within := plan.train.within) is not None:
        demand(within.number <= within.phases and (within.number > 1) == (within.first_step > 0), "train.within")
        demand(within.longest % plan.train.sequence == 0 == within.first_token % within.longest, "train.within")
    _check_grpo(plan)
    validate = plan.train.validate
    demand(not (validate and validate.ema and plan.train.ema is None), "train.validate.ema")
    demand(plan.buckets and all(bucket.parameters for bucket in plan.buckets), "buckets")
    demand(bool(plan.frozen) == (plan.adapter is not None), "frozen")
    demand(all(bucket.parameters and not bucket.owners for bucket in plan.frozen), "frozen")
    parts = ("buckets", plan.buckets), ("frozen", plan.frozen), ("biases", plan.biases), ("tables", plan.tables)
    for part, rows in parts:
        for row in rows:
            holders = row.holders
            demand(holders and [*holders] == sorted({*holders}) and holders[-1] < mesh.world, f"{part}: holders")
    demand(all(len(table.shape) == 2 and table.shape[1] <= table.below for table in plan.tables), "tables")
    parameters = [parameter for bucket in (*plan.buckets, *plan.frozen) for parameter in bucket.parameters]
    slices = defaultdict[tuple[str, Shape], list[Slice | None]](list)
    for parameter in parameters:
        demand(parameter.slice is None or parameter.slice.fits(parameter.shape), f"slice of {parameter.name}")
        slices[parameter.name, parameter.shape].append(parameter.slice)
    for (name, shape), held_slices in slices.items():
        demand(not tiling_problem(shape, held_slices), f"slices of {name}")
    tensors = {parameter.tensor for parameter in parameters}
    demand(all(weight.tensor in tensors and plan.zero < 3 for weight in plan.quantised), "quantised")
    demand(not plan.optimizer.rest or plan.train.optimizer.rest is not None, "optimizer: rest")
    for bucket in plan.buckets:
        owners, count = bucket.owners, len(bucket.holders)
        is_whole = plan.optimizer.is_whole(bucket)
        num_owners = len(bucket.parameters) if plan.zero and is_whole and count > 1 else 0
        demand(not bucket.rest or plan.train.optimizer.rest is not None, "buckets: rest")
        for parameter in bucket.parameters if is_whole else ():
            demand(
                not parameter.matrices or sum(parameter.matrices) == parameter.shape[0], f"matrices of {parameter.name}"
            )
            demand(not parameter.matrices or parameter.slice is None, f"matrices of {parameter.name}")
        demand(len(owners) == num_owners and all(owner < count for owner in owners), "buckets: owners")
        held_by = {holder % mesh.shard_columns for holder in bucket.holders}
        divided = plan.zero >= 2 and len(held_by) > 1 and not bucket.still
        demand(bool(bucket.sites) == divided and not (divided and owners), "buckets: sites")
        demand(bucket.stages and [*bucket.stages] == sorted({*bucket.stages}), "buckets: stages")
    demand(bool(plan.clipped) == (plan.train.optimizer.qk_clip is not None), "clipped")
    shapes = {parameter.name: parameter.shape for parameter in plan.parameters}
    for clipped in plan.clipped:
        demand(clipped.heads % clipped.key_heads == 0 == clipped.heads % mesh.tp, f"clipped: {clipped.name}")
        for of_heads in clipped.rows:
            fits = of_heads.heads % clipped.key_heads == 0 and of_heads.end <= shapes.get(of_heads.parameter, (0,))[0]
            demand(fits, f"clipped: {clipped.name}")
    demand(batches and batches[0][0] == 0, "batches")
    demand(all(a[0] < b[0] for a, b in pairwise(batches)), "batches")
    sequences = mesh.dp * plan.train.micro_batch
    demand(all(size > 0 and size % sequences == 0 for _, size in batches), "batches")


def _check_grpo(plan: RunPlan) -> None:
    grpo = plan.train.grpo
    demand((grpo is None) == (plan.data.prompts is None), "data.prompts")
    if grpo is None:
        return
    demand(grpo.temperature > 0 and grpo.prompt + grpo.completion <= plan.train.sequence, "train.grpo")
    demand(all(size % grpo.group == 0 for _, size in plan.batches), "train.grpo.group")
    names = {reward.name for reward in grpo.rewards}
    demand(names and len(names) == len(grpo.rewards), "train.grpo.rewards")
    for reward in grpo.rewards:
        demand((reward.check == "regex") == (reward.pattern is not None), "train.grpo.rewards")
        demand(reward.file == (f"rewards/{reward.name}.py" if reward.check == "python" else None), "train.grpo.rewards")


def demand(condition: object, place: str) -> None:
    """Raise FormError, with `place` as the part of the plan that is wrong, unless the condition holds."""
    if not condition:
        raise FormError(f"{place}: not valid for a plan")
