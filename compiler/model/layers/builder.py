"""What the builders of all layers share: where a segment stands, and its parts spelled shortly."""

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
    """Where a segment stands in the model. `ffn` and `attention` are those of its layer (None: the model's attention);
    the MTP block has the last layer's."""

    spec: Spec
    ffn: Dense | Moe | Custom
    mtp: bool = False
    high: bool = False  # whether the linears of its layer stay in the dtype of activations
    attention: AnyAttention | None = None
    built: dict[object, ir.Segment] = field(default_factory=dict, init=False, repr=False, compare=False)  # by layer
    part: bool = False  # whether it has a tensor rank's part of the matrices of a layer, and all rows
    inside: tuple[str, ...] | None = None  # what its backward computes again; None: what the run names

    @property
    def model(self) -> Model:
        return self.spec.model

    @property
    def recompute(self) -> tuple[str, ...]:
        """What the backward of its segments computes again."""
        return self.spec.recompute if self.inside is None else self.inside

    @property
    def T(self) -> int:
        """Tokens of a micro-batch that the segment sees: those of a context rank, or of one of its tensor ranks."""
        return self.of_tensor_ranks if self.part else self.spec.tokens_of_rank

    @property
    def of_tensor_ranks(self) -> int:
        """Tokens of a micro-batch that the tensor ranks of a context rank have together."""
        return self.keys // self.spec.parallel.context

    @property
    def keys(self) -> int:
        """Tokens of a micro-batch on all ranks."""
        return self.spec.train.micro_batch * self.spec.train.sequence

    @property
    def ways(self) -> int:
        """Parts that the matrices of the segment are split into, of which it has one."""
        return self.spec.parallel.tensor if self.part else 1

    @property
    def D(self) -> int:
        return self.model.hidden

    @property
    def N(self) -> int:
        """Width of the residual stream: D, or the D of every stream of hyper-connections."""
        return self.model.stream_width

    @property
    def moe(self) -> Moe:
        assert isinstance(self.ffn, Moe), "a segment of a MoE layer"
        return self.ffn

    @property
    def S(self) -> int:
        """Routed rows of a micro-batch, one for each token and slice of a chosen expert."""
        return self.T * self.moe.top_k * self.slices

    @property
    def slices(self) -> int:
        """Slices of the width of each routed expert: each is on a rank of its own, and gets rows as an expert does."""
        return self.spec.parallel.expert_tensor

    @property
    def experts_local(self) -> int:
        """Experts of a layer on one rank, or as many slices of them."""
        return self.moe.experts // self.spec.parallel.expert

    def is_custom(self, kind: str) -> bool:
        """Whether a segment of this kind is a module of the user's own, whose products stay as they are traced."""
        part = {"attention": self.attention or self.model.attention, "dense": self.ffn}.get(kind)
        return isinstance(part, Custom | CustomAttention)

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
        """What attention is told of where tokens stand: where the document of each begins in its sequence, if documents
        are kept apart, and its position, if context ranks have parts of sequences."""
        starts = (index("starts", self.T, dtype="int32"),) if self.spec.data.masks_documents else ()
        return (*starts, *((index("positions", self.T, dtype="int32"),) if self.spec.parallel.context > 1 else ()))

    def weight(self, name: str, *shape: int, stack: int = 0) -> ir.Param:
        """A matrix, random at first and decayed; of `stack` > 0 experts, each of `shape`."""
        full, dtype = (stack, *shape) if stack else shape, TORCH_DTYPE[self.spec.precision.parameter]
        return ir.Param(name, full, dtype, stack, init=self.model.init_std, decay=True, matrices=shape[:1])

    def table(self, name: str, rows: int) -> ir.Param:
        """Rows of the embedding or of the head: random at first and decayed, and no matrix of a layer."""
        return replace(self.weight(name, rows, self.D), matrices=())

    def gain(self, name: str, width: int, grad: bool = True) -> ir.Param:
        """The gain of a norm: ones at first, and not decayed."""
        return ir.Param(name, (width,), TORCH_DTYPE[self.spec.precision.parameter], grad=grad, init=None)

    def vector(self, name: str, width: int, init: float = 0.0, stack: int = 0) -> ir.Param:
        """A bias or a logit for each of `width`: of deviation `init` at first, and not decayed. Of `stack` > 0 experts,
        each of `width`."""
        shape, dtype = (stack, width) if stack else (width,), TORCH_DTYPE[self.spec.precision.parameter]
        return ir.Param(name, shape, dtype, stack, init=init)

    def positions(self, name: str, rows: int, width: int) -> ir.Param:
        """A number for each position and column: zeros at first, and not decayed; no matrix."""
        return ir.Param(name, (rows, width), TORCH_DTYPE[self.spec.precision.parameter])

    def rows(self, params: tuple[ir.Param, ...], *parts: int) -> tuple[ir.Param, ...]:
        """The rows of matrices, and elements of vectors, that a rank has of each part of a fused product."""
        return tuple(self._split(param, 0, parts) for param in self.fused(params, *parts))

    def fused(self, params: tuple[ir.Param, ...], *parts: int) -> tuple[ir.Param, ...]:
        """Parameters of a product whose weight is several matrices one below another, of so many rows on a rank."""
        ranks = self.slices if params and params[0].stack else self.ways
        whole = tuple(ranks * part for part in parts)
        return tuple(replace(each, matrices=whole) if each.matrices else each for each in params)

    def columns(self, params: tuple[ir.Param, ...]) -> tuple[ir.Param, ...]:
        """The columns of matrices that a rank has; vectors are whole, one of each expert too."""
        return tuple(
            self._split(each, 1, each.shape[-1:]) if len(each.shape) > 1 + (each.stack > 0) else each for each in params
        )

    def _split(self, param: ir.Param, dimension: int, parts: tuple[int, ...]) -> ir.Param:
        ranks = self.slices if param.stack else self.ways
        return replace(param, split=ir.TensorSplit(dimension, parts, ranks)) if ranks > 1 else param

    def input(self, name: str, *shape: int | str) -> ir.Input:
        """An activation."""
        return ir.Input(name, shape, self.dtype)


def index(name: str, *shape: int | str, dtype: str = "int64") -> ir.Input:
    """Integers a segment reads; no gradient."""
    return ir.Input(name, shape, dtype, grad=False)


def segment(
    kind: str,
    function: Callable[..., tuple[Any, ...]],
    params: tuple[ir.Param, ...],
    inputs: tuple[ir.Input, ...],
    outputs: tuple[str | ir.Output, ...],
    **constants: Constant,
) -> ir.Segment:
    """A segment whose function takes `constants` by keyword. An output given by its name has a gradient."""
    return segment_of(kind, partial(function, **constants), params, inputs, outputs, constants)


def segment_of(
    kind: str,
    function: Callable[..., tuple[Any, ...]],
    params: tuple[ir.Param, ...],
    inputs: tuple[ir.Input, ...],
    outputs: tuple[str | ir.Output, ...],
    constants: Mapping[str, Constant],
) -> ir.Segment:
    """A segment of a function that has its settings: a frozen dataclass that is called. `constants` are printed in the
    emitted segment and tell segments apart, so they say all that the function does."""
    named = tuple(ir.Output(output) if isinstance(output, str) else output for output in outputs)
    return ir.Segment(kind, function, params, inputs, named, tuple(constants.items()))


# --- Products with a weight of a segment and, where it has one, a bias: `up` and `up_bias`


def linear(ops: Any, p: Any, name: str, x_TK: Any, biased: bool) -> Any:
    """x·W, and the bias of each column."""
    y_TN = ops.linear(x_TK, getattr(p, name))
    return ops.add_bias(y_TN, getattr(p, bias_of(name))) if biased else y_TN


def grouped_linear(ops: Any, p: Any, name: str, x_RK: Any, offsets_E: Any, biased: bool, gate_R: Any = None) -> Any:
    """x·W of each row's expert, and the bias of that, times the row's gate weight if there is one."""
    y_RN = ops.grouped_linear(x_RK, getattr(p, name), offsets_E)
    return ops.add_grouped_bias(y_RN, getattr(p, bias_of(name)), offsets_E, gate_R) if biased else y_RN


def weights(place: Place, name: str, rows: int, columns: int, biased: bool, stack: int = 0) -> tuple[ir.Param, ...]:
    """The parameters of a product: W, and the bias of its rows."""
    weight = place.weight(name, rows, columns, stack=stack)
    return (weight, place.vector(bias_of(name), rows, stack=stack)) if biased else (weight,)


def bias_of(name: str) -> str:
    """The name of the bias that goes with a weight."""
    return f"{name}_bias"


def named(paths: dict[str, str], *names: str) -> dict[str, str]:
    """Paths of parameters, and of the biases that go with those of `names`."""
    return paths | {bias_of(name): bias_of(paths[name]) for name in names}
