"""Shared by the builders of all layers: the place of a segment in the model, and shorthands for its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from compiler import ir
from compiler.ir.dtypes import TORCH_DTYPE
from compiler.model.ops.rule import statistics_dtype
from dsl.schema import AnyAttention, Custom, CustomAttention, Dense, Model, Moe, Spec

Constant = int | float | bool | str | tuple[int | float, ...]


@dataclass(frozen=True)
class Place:
    """The place of a segment in the model. `ffn` and `attention` are those of its layer (None: the model's attention).
    The MTP block has those of the last layer."""

    spec: Spec
    ffn: Dense | Moe | Custom
    is_mtp: bool = False
    is_high_precision: bool = False  # the linears of its layer stay in the dtype of activations
    attention: AnyAttention | None = None
    built: dict[object, ir.Segment] = field(default_factory=dict, init=False, repr=False, compare=False)  # by layer
    is_tensor_shard: bool = False  # holds one tensor-parallel shard of the layer's weights, and computes all tokens
    recomputed: tuple[str, ...] | None = None  # replaces the run's `recompute`, unless None

    @property
    def model(self) -> Model:
        return self.spec.model

    @property
    def recompute(self) -> tuple[str, ...]:
        """What the backward of its segments recomputes."""
        return self.spec.recompute if self.recomputed is None else self.recomputed

    @property
    def T(self) -> int:
        """Tokens of a micro-batch that the segment computes: all of a context rank, or those of one tensor rank."""
        return self.tokens_of_context_rank if self.is_tensor_shard else self.spec.tokens_of_rank

    @property
    def tokens_of_context_rank(self) -> int:
        """Tokens of a micro-batch on all tensor ranks of a context rank."""
        return self.keys // self.spec.parallel.context

    @property
    def keys(self) -> int:
        """Tokens of a micro-batch on all context and tensor ranks."""
        return self.spec.train.micro_batch * self.spec.train.sequence

    @property
    def tensor_shards(self) -> int:
        """Number of tensor-parallel shards of the segment's matrices."""
        return self.spec.parallel.tensor if self.is_tensor_shard else 1

    @property
    def D(self) -> int:
        """Width of hidden states."""
        return self.model.hidden

    @property
    def N(self) -> int:
        """Width of the residual stream: D, or D times the streams of hyper-connections."""
        return self.model.stream_width

    @property
    def moe(self) -> Moe:
        """The MoE part of the layer. AssertionError if the layer has none."""
        assert isinstance(self.ffn, Moe), "a segment of a MoE layer"
        return self.ffn

    @property
    def S(self) -> int:
        """Routed rows of a micro-batch: one per token, chosen expert and slice of it."""
        return self.T * self.moe.top_k * self.slices

    @property
    def slices(self) -> int:
        """Slices of the width of each routed expert. Each is on its own rank and gets its own rows."""
        return self.spec.parallel.expert_tensor

    @property
    def experts_local(self) -> int:
        """Experts of a layer, or slices of experts, on one rank."""
        return self.moe.experts // self.spec.parallel.expert

    def is_custom(self, kind: str) -> bool:
        """Whether a segment of this kind is a user's module, whose products are not quantised."""
        block = {"attention": self.attention or self.model.attention, "dense": self.ffn}.get(kind)
        return isinstance(block, Custom | CustomAttention)

    @property
    def dtype(self) -> str:
        """Dtype of activations."""
        return TORCH_DTYPE[self.spec.precision.compute]

    @property
    def wide_dtype(self) -> str:
        """Dtype of router scores and gate weights."""
        return statistics_dtype(self.dtype)

    @property
    def places(self) -> tuple[ir.Input, ...]:
        """The positions and document starts that attention reads: `starts`, where each token's document begins in its
        sequence, if documents are masked; `positions` of the tokens under context parallelism."""
        starts = (index("starts", self.T, dtype="int32"),) if self.spec.data.masks_documents else ()
        return (*starts, *((index("positions", self.T, dtype="int32"),) if self.spec.parallel.context > 1 else ()))

    def weight(self, name: str, *shape: int, stack: int = 0) -> ir.Param:
        """A matrix, randomly initialized, with weight decay. With `stack` > 0: one matrix of `shape` per expert."""
        full, dtype = (stack, *shape) if stack else shape, TORCH_DTYPE[self.spec.precision.parameter]
        return ir.Param(name, full, dtype, stack, init=self.model.init_std, decay=True, matrices=shape[:1])

    def table(self, name: str, rows: int) -> ir.Param:
        """Rows of the embedding or of the head: randomly initialized, with weight decay; not a matrix of a layer."""
        return replace(self.weight(name, rows, self.D), matrices=())

    def gain(self, name: str, width: int, grad: bool = True) -> ir.Param:
        """The gain of a norm: initialized to ones, without weight decay."""
        return ir.Param(name, (width,), TORCH_DTYPE[self.spec.precision.parameter], grad=grad, init=None)

    def vector(self, name: str, width: int, init: float = 0.0, stack: int = 0) -> ir.Param:
        """A vector such as a bias: initialized with standard deviation `init`, without weight decay. With `stack` > 0:
        one vector of `width` per expert."""
        shape, dtype = (stack, width) if stack else (width,), TORCH_DTYPE[self.spec.precision.parameter]
        return ir.Param(name, shape, dtype, stack, init=init)

    def positions(self, name: str, rows: int, width: int) -> ir.Param:
        """A number per position and column: initialized to zeros, without weight decay; not a matrix of a layer."""
        return ir.Param(name, (rows, width), TORCH_DTYPE[self.spec.precision.parameter])

    def rows(self, params: tuple[ir.Param, ...], *parts: int) -> tuple[ir.Param, ...]:
        """Parameters sharded by rows: a rank has `parts` rows of each part of a fused product."""
        return tuple(self._split(param, 0, parts) for param in self.fused_params(params, *parts))

    def fused_params(self, params: tuple[ir.Param, ...], *parts: int) -> tuple[ir.Param, ...]:
        """Parameters of a product that fuses several matrices, stacked by rows, with `parts` rows of each on a rank."""
        ranks = self.slices if params and params[0].stack else self.tensor_shards
        matrix_rows = tuple(ranks * part for part in parts)
        return tuple(replace(param, matrices=matrix_rows) if param.matrices else param for param in params)

    def columns(self, params: tuple[ir.Param, ...]) -> tuple[ir.Param, ...]:
        """Parameters sharded by columns. Vectors, including those of experts, are replicated."""
        return tuple(
            self._split(param, 1, param.shape[-1:]) if len(param.shape) > 1 + (param.stack > 0) else param
            for param in params
        )

    def _split(self, param: ir.Param, dimension: int, parts: tuple[int, ...]) -> ir.Param:
        ranks = self.slices if param.stack else self.tensor_shards
        return replace(param, split=ir.TensorSplit(dimension, parts, ranks)) if ranks > 1 else param

    def input(self, name: str, *shape: int | str) -> ir.Input:
        """An activation."""
        return ir.Input(name, shape, self.dtype)


def index(name: str, *shape: int | str, dtype: str = "int64") -> ir.Input:
    """An integer input, without gradient."""
    return ir.Input(name, shape, dtype, grad=False)


def segment(
    kind: str,
    function: Callable[..., tuple[Any, ...]],
    params: tuple[ir.Param, ...],
    inputs: tuple[ir.Input, ...],
    outputs: tuple[str | ir.Output, ...],
    **constants: Constant,
) -> ir.Segment:
    """A segment whose function takes `constants` by keyword. An output given as a name has a gradient."""
    return segment_of(kind, partial(function, **constants), params, inputs, outputs, constants)


def segment_of(
    kind: str,
    function: Callable[..., tuple[Any, ...]],
    params: tuple[ir.Param, ...],
    inputs: tuple[ir.Input, ...],
    outputs: tuple[str | ir.Output, ...],
    constants: Mapping[str, Constant],
) -> ir.Segment:
    """A segment whose function is a callable frozen dataclass with its settings. `constants` are printed in the emitted
    segment and distinguish segments, so they must describe all that the function does."""
    named = tuple(ir.Output(output) if isinstance(output, str) else output for output in outputs)
    return ir.Segment(kind, function, params, inputs, named, tuple(constants.items()))


# --- Products with a weight of a segment and its bias, if it has one: `up` and `up_bias`


def linear(ops: Any, p: Any, name: str, x_TK: Any, biased: bool) -> Any:
    """x·W, plus the bias."""
    y_TN = ops.linear(x_TK, getattr(p, name))
    return ops.add_bias(y_TN, getattr(p, bias_of(name))) if biased else y_TN


def grouped_linear(ops: Any, p: Any, name: str, x_RK: Any, offsets_E: Any, biased: bool, gate_R: Any = None) -> Any:
    """x·W of each row's expert, plus that expert's bias times the row's gate weight, if there is one."""
    y_RN = ops.grouped_linear(x_RK, getattr(p, name), offsets_E)
    return ops.add_grouped_bias(y_RN, getattr(p, bias_of(name)), offsets_E, gate_R) if biased else y_RN


def weights(place: Place, name: str, rows: int, columns: int, biased: bool, stack: int = 0) -> tuple[ir.Param, ...]:
    """The parameters of a product: W and its bias, if it has one."""
    weight = place.weight(name, rows, columns, stack=stack)
    return (weight, place.vector(bias_of(name), rows, stack=stack)) if biased else (weight,)


def bias_of(name: str) -> str:
    """The name of a weight's bias."""
    return f"{name}_bias"


def add_bias_paths(paths: dict[str, str], *names: str) -> dict[str, str]:
    """`paths` and the paths of the biases of `names`."""
    return paths | {bias_of(name): bias_of(paths[name]) for name in names}
