"""Stages of a model, and the plan: who holds which parameter and runs which stage."""

from __future__ import annotations

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
    """A segment at a place: local names bound to the stage's values and to logical parameters."""

    site: Site  # unique in the model
    segment: Segment
    params: tuple[tuple[str, str], ...]  # (local name, tensor name), e.g. ("up", "layers.3.ffn.experts.up")
    inputs: tuple[str, ...]  # stage values, in the segment's order
    outputs: tuple[str, ...]
    again: bool = False  # whether the backward of its layer first runs its forward again: what it gives is not kept

    def tensors(self, cut: Cut) -> dict[str, str]:
        """Tensor names by the names that its functions have for parameters."""
        found = dict(self.params)
        quantised = [each.names_of(found[each.param]) for each in cut.quantised]
        return found | {local: name for names in quantised for local, name in names.items()}


RowsKind = Literal["gather_rows", "scatter_rows", "gather_sequences", "scatter_sequences", "gather_choices"]
ROWS: Mapping[str, tuple[RowsKind, RowsKind]] = {  # by mesh axis: what puts rows together, and what sums them
    "tp": ("gather_rows", "scatter_rows"),
    "cp": ("gather_sequences", "scatter_sequences"),
    "sq": ("gather_choices", "gather_choices"),
}


@dataclass(frozen=True)
class Communication:
    """An exchange between segments.

    gather: the rows of a micro-batch that each tensor rank has, put together on all of them; scatter: sums of what they
    have of all rows, of which each gets its rows. Each is the gradient of the other. Between context ranks rows are put
    together in the order of their sequences. choices: counts that have no gradient, put together rank after rank.

    dispatch: (rows, gate, counts) -> (rows_R, gate_R, offsets_E); combine: y_R -> y. Rows of 8 bits are two tensors,
    data and scales, as gradients may be. Of the R rows those of an expert lie together, padded to a multiple of
    `alignment`. With one expert rank and an alignment of 1 nothing moves: what comes is what was sent, so the outputs
    alias the inputs, and gradients those of the outputs.

    With an `order` rows go through the node (runtime/comm/nodes.py): the counts go ahead with it, and come back with
    two tables more, `maps`, which every later exchange of the layer takes.
    """

    kind: Literal["dispatch", "combine", "gather", "scatter", "choices"]
    site: Site  # "L17", or of tensor ranks that of the segment between: "L3.attention"; of context ranks "L3.keys"
    axis: Literal["ep", "tp", "cp", "sq"]  # of the mesh; expert slices are spread as experts are
    inputs: tuple[str, ...]
    outputs: tuple[Buffer, ...]
    sizes: tuple[Buffer, ...]  # the inputs' buffers, for memory and cost
    arriving: tuple[Buffer, ...]  # gradients of outputs, which the backward of the exchange takes
    returned: tuple[Buffer, ...]  # gradients of inputs, which it makes of those
    alignment: int = 1  # what the rows of an expert are padded to a multiple of
    order: str = ""  # the order of the rows, where a token goes to a node once; "": each row goes by itself
    copies: int = 0  # that a rank then sends at most, one of each token to each node
    forwarded: tuple[Buffer, ...] = ()  # of these tensors, what a rank passes on in its node; freed by who waits
    forwarded_back: tuple[Buffer, ...] = ()  # of gradients
    again: bool = False  # whether the backward of its layer first moves the rows of its forward again

    @property
    def moves_rows(self) -> bool:
        """Whether ranks exchange rows of a micro-batch that they have parts of."""
        return self.axis in ROWS

    def rows_kind(self, phase: str) -> RowsKind:
        """The instruction that moves rows in a phase: a backward moves gradients the other way."""
        gathers, scatters = ROWS[self.axis]
        return gathers if (self.kind == "gather") == (phase == "F") else scatters


StageStep = Use | Communication


@dataclass(frozen=True)
class Stage:
    """A list of segments and communications. `loads` are data tensors, `input`/`output` what neighbours exchange."""

    index: int
    steps: tuple[StageStep, ...]
    loads: tuple[Buffer, ...]  # tokens, starts, targets, mtp_tokens, mtp_targets, …: stages.py
    input: Buffer | None  # None on the first stage
    output: Buffer | None  # None on the last stage
    # (metric, value): ("loss", …), ("mtp_loss", …), ("load layers.3", …), ("logits layers.3", …), …
    records: tuple[tuple[RecordName, str], ...]
    tangents: tuple[tuple[str, str], ...]  # (value, constant): the gradient of a loss output is a constant of the step
    tells: tuple[tuple[str, str], ...] = ()  # (name, value): what the executor is given of each micro-batch


# ---------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class Replica:
    """One row of the replica table: a logical parameter, or a slice of it, and who holds it."""

    name: str  # layers.3.ffn.experts.17.up
    tensor: str  # layers.3.ffn.experts.up: what segments take; experts of a rank are stacked in it
    shape: tuple[int, ...]  # of the logical parameter
    role: Role
    init: float | None  # standard deviation; None: ones; a bias starts at zero
    decay: bool
    holders: Holders
    uniform: bool = False  # whether first values are even between two bounds, or else normal
    slice: Slice | None = None
    matrices: tuple[int, ...] = ()  # rows of each matrix in it; nothing for what is no matrix of a layer
    mean: float = 0.0  # of first values, unless they are ones

    @property
    def key(self) -> str:
        """Its name in the table: that of the parameter, and where its slice of it begins."""
        return self.name if self.slice is None else f"{self.name}.from{self.slice.ranges[0][0]}"

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of what its holders have."""
        return held_shape(self.shape, self.slice)

    @property
    def num_elements(self) -> int:
        """Elements that its holders have."""
        return prod(self.held_shape)

    @property
    def updated_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what an optimizer of matrices updates apart: its matrices, or all that its holders have."""
        if self.slice is not None or not self.matrices:
            return (self.held_shape,)
        return tuple((rows, *self.shape[1:]) for rows in self.matrices)


@dataclass(frozen=True)
class Bucket:
    """Parameters with the same holders that the same stages use: one flat buffer, one reduction. Named by its first
    parameter."""

    name: str
    holders: Holders
    stages: tuple[int, ...]  # ascending; behind their last weight gradients the bucket's gradients are whole
    replicas: tuple[str, ...]  # keys of the table, decayed ones first, experts of one tensor adjacent
    owners: tuple[int, ...] = ()  # of each replica, which holder has its optimizer state, if each is owned whole
    sites: tuple[str, ...] = ()  # the segments that read it, where its holders divide gradients (zero = 2, 3)
    rest: bool = False  # whether the last of the rows of the optimizer updates it (`Optimizer.rows`)
    still: bool = False  # whether it is not trained in this phase of the run: it has its state, and no gradients

    @property
    def parts(self) -> int:
        """Parts of its gradients, of which each holder on a pipeline rank keeps one."""
        return len(self.holders.columns) if self.sites else 1

    @property
    def is_reduced(self) -> bool:
        """Whether several holders keep the same gradients, which are summed once a step: of a divided bucket, those of
        one column on several pipeline ranks."""
        return len(self.holders) > self.parts and not self.still


@dataclass(frozen=True)
class Sharded:
    """The tensors of a segment whose gradients, or weights too, are divided over data ranks (zero = 2, 3).

    A micro-batch's gradients, and gathered weights, are one flat tensor each: bucket after bucket, every bucket padded
    to equal parts for its holders.
    """

    tensors: frozenset[str]
    buckets: tuple[tuple[Holders, int], ...]  # of each: who divides it, on one pipeline rank; its padded elements
    gradients: Buffer
    weights: Buffer | None  # None: each holder has them whole (zero = 2)


@dataclass(frozen=True)
class Plan:
    """Who holds what, which segments each stage runs, and how each of them is cut."""

    mesh: Mesh
    stage_placement: StagePlacement
    stages: tuple[Stage, ...]
    cuts: Mapping[str, Cut] = field(repr=False)  # by site of use; equal segments share one
    replicas: tuple[Replica, ...]
    buckets: tuple[Bucket, ...]  # of what is trained
    frozen: tuple[Bucket, ...] = ()  # of weights that stay as they are: nothing of them is summed or updated
    assumptions: tuple[str, ...] = ()
    slots: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (tensor, place of each expert) of layers that are placed
    zero: int = 0  # 1: the holders of a bucket each update a part of it; 2 and 3: `Bucket.sites`
    sharded: Mapping[str, Sharded] = field(default_factory=dict, repr=False)  # by site of use
    overlap_reduce: bool = True  # whether gradients are summed under the backward
    averaged: bool = False  # whether evaluations are made with the moving average of the weights, too

    @property
    def held(self) -> tuple[Bucket, ...]:
        """The buckets of all weights."""
        return (*self.buckets, *self.frozen)

    @property
    def clips_logits(self) -> bool:
        """Whether stages record the largest logit of each head, by which a step makes queries and keys smaller."""
        return any(metric.is_largest for stage in self.stages for metric, _ in stage.records)

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """The segments of all stages at their places, in the order of the model."""
        return tuple(step for stage in self.stages for step in stage.steps if isinstance(step, Use))

    @property
    def cuts_by_key(self) -> dict[Hashable, Cut]:
        """The cut of each distinct segment, by its key."""
        return {use.segment.key: self.cuts[use.site] for use in self.uses}

    def moves_of(self, use: Use) -> tuple[int, int]:
        """How often a micro-batch gathers the weights of a segment, and scatters its gradients."""
        here, cut = self.sharded.get(use.site), self.cuts[use.site]
        if here is None:
            return 0, 0
        divided = [local for local, tensor in use.params if tensor in here.tensors]
        calls = (cut.F, cut.I, cut.W, *((cut.F,) if use.again else ()))
        gathers = sum(not {*each.args}.isdisjoint(divided) for each in calls) if here.weights else 0
        return gathers, int(any(accumulator_of(local) in cut.W.args for local in divided))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters a pipeline rank holds, ascending."""
        return self.stage_placement.stages_of(self.mesh.pp, rank)

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The pipeline ranks that hold a stage, that of direction 0 first."""
        return self.stage_placement.ranks_of_stage(self.mesh.pp, stage)
