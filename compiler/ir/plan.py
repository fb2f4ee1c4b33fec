"""The stages of a model, and the plan: which ranks hold which parameters and run which stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from compiler.ir.holders import Holders
from compiler.ir.names import accumulator_of
from compiler.ir.segment import Buffer, Cut, Role, Segment
from compiler.ir.stage_placement import StagePlacement
from runtime.contract.mesh import Mesh
from runtime.contract.names import RecordName, Site
from runtime.contract.slices import Slice, held_shape


@dataclass(frozen=True)
class Use:
    """A segment at a site of the model: its local names bound to the stage's values and to logical parameters."""

    site: Site  # unique in the model
    segment: Segment
    params: tuple[tuple[str, str], ...]  # (local name, tensor name), e.g. ("up", "layers.3.ffn.experts.up")
    inputs: tuple[str, ...]  # stage values, in the segment's order
    outputs: tuple[str, ...]
    is_repeated: bool = False  # whether the backward of its layer first reruns its forward: its results are not saved

    def tensors(self, cut: Cut) -> dict[str, str]:
        """Tensor names by the local names of parameters, quantised copies included."""
        tensors = dict(self.params)
        quantised = [weight.names_of(tensors[weight.param]) for weight in cut.quantised]
        return tensors | {local: name for names in quantised for local, name in names.items()}


RowsKind = Literal["gather_rows", "scatter_rows", "gather_sequences", "scatter_sequences", "gather_choices"]
ROWS: Mapping[str, tuple[RowsKind, RowsKind]] = {  # by mesh axis: gather rows, sum and scatter them
    "tp": ("gather_rows", "scatter_rows"),
    "cp": ("gather_sequences", "scatter_sequences"),
    "sq": ("gather_choices", "gather_choices"),
}


@dataclass(frozen=True)
class Communication:
    """An exchange between segments.

    gather: all-gather of the rows of a micro-batch over tensor or context ranks; scatter: reduce-scatter of rows. Each
    is the gradient of the other. Between context ranks the gathered rows are in sequence order. choices: all-gather of
    counts, rank after rank, without gradient.

    dispatch: (rows, gate, counts) -> (rows_R, gate_R, offsets_E); combine: y_R -> y. Quantised rows are two tensors,
    data and scales; so may gradients be. The R rows are grouped by expert, each group padded to a multiple of
    `alignment`. With one expert rank and an alignment of 1 nothing moves: the outputs alias the inputs, and the
    gradients of the inputs alias those of the outputs.

    With an `order`, a token is sent once to each node and forwarded inside it (runtime/comm/nodes.py). The order is
    sent ahead with the counts. Two more tables, `maps`, come back, and every later exchange of the layer takes them.
    """

    kind: Literal["dispatch", "combine", "gather", "scatter", "choices"]
    site: Site  # "L17" of expert ranks; "L3.attention", the segment, of tensor ranks; "L3.keys" of context ranks
    axis: Literal["ep", "tp", "cp", "sq"]  # of the mesh; expert slices are exchanged like experts
    inputs: tuple[str, ...]
    outputs: tuple[Buffer, ...]
    sizes: tuple[Buffer, ...]  # the inputs' buffers, for memory and cost
    arriving: tuple[Buffer, ...]  # gradients of outputs, which the backward of the exchange takes
    returned: tuple[Buffer, ...]  # gradients of inputs, which it returns
    alignment: int = 1  # the rows of an expert are padded to a multiple of this
    order: str = ""  # the value with the order of the rows, if a token is sent to a node once; "": each row is sent
    copies: int = 0  # with an `order`: the most copies of tokens that a rank sends, one per token and node
    forwarded: tuple[Buffer, ...] = ()  # what a rank forwards of these tensors in its node; the wait frees it
    forwarded_back: tuple[Buffer, ...] = ()  # the same for gradients
    is_repeated: bool = False  # whether the backward of its layer first repeats the exchange of its forward

    @property
    def moves_rows(self) -> bool:
        """Whether it gathers or scatters rows of a micro-batch that are sharded over ranks."""
        return self.axis in ROWS

    def rows_kind(self, phase: str) -> RowsKind:
        """The kind of the instruction in a phase: a backward moves gradients the other way."""
        gathers, scatters = ROWS[self.axis]
        return gathers if (self.kind == "gather") == (phase == "F") else scatters


StageStep = Use | Communication


@dataclass(frozen=True)
class Stage:
    """A list of segments and communications. `loads` are data tensors; `input` and `output` are pipeline messages."""

    index: int
    steps: tuple[StageStep, ...]
    loads: tuple[Buffer, ...]  # tokens, starts, targets, mtp_tokens, mtp_targets, …: stages.py
    input: Buffer | None  # None on the first stage
    output: Buffer | None  # None on the last stage
    # (metric, value): ("loss", …), ("mtp_loss", …), ("load layers.3", …), ("logits layers.3", …), …
    records: tuple[tuple[RecordName, str], ...]
    tangents: tuple[tuple[str, str], ...]  # (value, constant): the gradient of a loss is a constant of the step
    tells: tuple[tuple[str, str], ...] = ()  # (name, value): values of each micro-batch that the executor reads


# ---------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class Replica:
    """One row of the replica table: a logical parameter or a slice of it, and the ranks that hold it."""

    name: str  # layers.3.ffn.experts.17.up
    tensor: str  # layers.3.ffn.experts.up: the tensor that segments read; the experts of a rank are stacked in it
    shape: tuple[int, ...]  # of the logical parameter
    role: Role
    init: float | None  # standard deviation; None: ones; a bias starts at zero
    decay: bool
    holders: Holders
    uniform: bool = False  # whether initial values are uniform, else normal
    slice: Slice | None = None
    matrices: tuple[int, ...] = ()  # rows of each matrix in it; () if it is not a matrix of a layer
    mean: float = 0.0  # of initial values, unless they are ones

    @property
    def key(self) -> str:
        """Its name in the table: the parameter's name, and the begin of its slice if there is one."""
        return self.name if self.slice is None else f"{self.name}.from{self.slice.ranges[0][0]}"

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape that its holders have."""
        return held_shape(self.shape, self.slice)

    @property
    def num_elements(self) -> int:
        """Elements on each holder."""
        return prod(self.held_shape)

    @property
    def updated_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that an optimizer of matrices updates separately: its matrices, or the whole held tensor."""
        if self.slice is not None or not self.matrices:
            return (self.held_shape,)
        return tuple((rows, *self.shape[1:]) for rows in self.matrices)


@dataclass(frozen=True)
class Bucket:
    """Parameters with the same holders and stages, in one flat buffer with one reduction. Named by its first
    parameter."""

    name: str
    holders: Holders
    stages: tuple[int, ...]  # ascending; after their last weight gradients the bucket's gradients are complete
    replicas: tuple[str, ...]  # keys of the table, decayed ones first, experts of one tensor adjacent
    owners: tuple[int, ...] = ()  # per replica, the holder that has its optimizer state, if each is owned whole
    sites: tuple[str, ...] = ()  # the segments that read it, if its gradients are sharded over holders (zero = 2, 3)
    is_of_rest: bool = False  # whether the last row of the optimizer updates it (`Optimizer.rows`)
    is_still: bool = False  # not trained in this phase of the run: it has optimizer state, and no gradients
    copies: int = 1  # groups of columns that each keep a copy of its shards (`Mesh.copies`)

    @property
    def parts(self) -> int:
        """Number of shards of its gradients; each holder in a group of columns keeps one."""
        return self.holders.num_shards(self.copies) if self.sites else 1

    @property
    def is_reduced(self) -> bool:
        """Whether several holders keep the same gradients, which are summed once per step. For a sharded bucket these
        are the holders of one shard: one in each group of columns, on each pipeline rank."""
        return len(self.holders) > self.parts and not self.is_still

    @property
    def keepers(self) -> Holders:
        """The holders that keep the same gradients as its first holder."""
        return self.holders.alike(self.copies) if self.sites else self.holders

    def sharing(self, pipeline_rank: int) -> Holders:
        """The holders on a pipeline rank that share the first copy of its shards."""
        return self.holders.of_first_copy(self.copies).on_rank(pipeline_rank)


@dataclass(frozen=True)
class ShardedTensors:
    """The tensors of a segment whose gradients (zero = 2), or gradients and weights (zero = 3), are sharded over data
    ranks.

    A micro-batch's gradients, and the gathered weights, are one flat tensor each: bucket after bucket, each padded to
    equal shards for its holders.
    """

    tensors: frozenset[str]
    buckets: tuple[tuple[Holders, int], ...]  # per bucket: the holders that share its first copy, its padded elements
    gradients: Buffer
    weights: Buffer | None  # None: weights are not sharded (zero = 2)


@dataclass(frozen=True)
class Plan:
    """The parameters and stages of each rank, the segments of each stage, and their cuts."""

    mesh: Mesh
    stage_placement: StagePlacement
    stages: tuple[Stage, ...]
    cuts: Mapping[str, Cut] = field(repr=False)  # by site of use; equal segments share one
    replicas: tuple[Replica, ...]
    buckets: tuple[Bucket, ...]  # of trained parameters
    frozen: tuple[Bucket, ...] = ()  # of frozen weights, which are neither reduced nor updated
    assumptions: tuple[str, ...] = ()
    slots: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (tensor, slot of each expert) of layers with a placement
    zero: int = 0  # 1: the holders of a bucket each update a shard of it; 2 and 3: see `Bucket.sites`
    sharded: Mapping[str, ShardedTensors] = field(default_factory=dict, repr=False)  # by site of use
    overlap_reduce: bool = True  # whether gradients are reduced during the backward
    evaluates_average: bool = False  # whether the moving average of the weights is evaluated, too

    @property
    def all_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of all weights, trained and frozen."""
        return (*self.buckets, *self.frozen)

    @property
    def clips_logits(self) -> bool:
        """Whether stages record the largest logit of each head for QK-clip."""
        return any(metric.is_largest for stage in self.stages for metric, _ in stage.records)

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """The uses of segments in all stages, in model order."""
        return tuple(step for stage in self.stages for step in stage.steps if isinstance(step, Use))

    @cached_property
    def elements(self) -> dict[str, int]:
        """Elements of each replica on each of its holders, by the replica's key."""
        sizes = {(replica.tensor, replica.slice): replica.num_elements for replica, _ in self.alike}
        return {replica.key: sizes[replica.tensor, replica.slice] for replica in self.replicas}

    @cached_property
    def alike(self) -> tuple[tuple[Replica, int], ...]:
        """The first replica of each tensor and slice, and their number. They differ only in their names and columns."""
        first: dict[tuple[str, Slice | None], Replica] = {}
        counts = Counter[tuple[str, Slice | None]]()
        for replica in self.replicas:
            key = replica.tensor, replica.slice
            first.setdefault(key, replica)
            counts[key] += 1
        return tuple((replica, counts[key]) for key, replica in first.items())

    @cached_property
    def bucket_elements(self) -> dict[str, int]:
        """Elements of each bucket on each of its holders, before sharding, by the bucket's name."""
        return {bucket.name: sum(map(self.elements.__getitem__, bucket.replicas)) for bucket in self.all_buckets}

    @property
    def cuts_by_key(self) -> dict[Hashable, Cut]:
        """The cut of each distinct segment, by its key."""
        return {use.segment.key: self.cuts[use.site] for use in self.uses}

    def moves_of(self, use: Use) -> tuple[int, int]:
        """How often a micro-batch all-gathers the weights of a segment, and reduce-scatters its gradients."""
        sharded, cut = self.sharded.get(use.site), self.cuts[use.site]
        if sharded is None:
            return 0, 0
        names = [local for local, tensor in use.params if tensor in sharded.tensors]
        calls = (cut.F, cut.I, cut.W, *((cut.F,) if use.is_repeated else ()))
        gathers = sum(not {*call.args}.isdisjoint(names) for call in calls) if sharded.weights else 0
        return gathers, int(any(accumulator_of(local) in cut.W.args for local in names))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters a pipeline rank holds, ascending."""
        return self.stage_placement.stages_of(self.mesh.pp, rank)

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The pipeline ranks that hold a stage, that of direction 0 first."""
        return self.stage_placement.ranks_of_stage(self.mesh.pp, stage)
