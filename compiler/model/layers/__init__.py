"""The layers, each defined once as segments over a table of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from compiler import ir
from compiler.ir.dtypes import is_packed, parse_packed
from compiler.ir.segment import SUM
from compiler.model.layers import attention, dense, ends, hyper, indexer, moe, padding, residual
from compiler.model.layers.adapter import add_adapters
from compiler.model.layers.builder import Place
from compiler.model.layers.value_dtypes import storage_dtypes
from dsl.schema.run import WIDEST_NORM_GRADIENT
from runtime.contract.weights import matrix_of, weight_of

__all__ = ["LAYERS", "Layer", "Place"]


@dataclass(frozen=True)
class Layer:
    """A kind of segment."""

    plain: Callable[[Place], ir.Segment]  # builds the segment at a place
    parameters: Mapping[str, str]  # local name of a parameter → its logical name relative to the block
    recompute: tuple[str, ...] = ()  # names of a run's `recompute` that apply to it
    fused: tuple[str, ...] = ()  # fusion passes that apply to it: compiler/model/segments/fuse.py

    def path(self, param: str) -> str:
        """The logical name of a parameter relative to its block. An adapter's starts with that of its weight."""
        return self.parameters[weight_of(param)] + matrix_of(param)

    def build(self, place: Place) -> ir.Segment:
        """Build the segment at a place, with the recompute, storage and fusion that the run asks for. Cached by
        place."""
        if self.plain not in place.built:
            place.built[self.plain] = self._new(place)
        return place.built[self.plain]

    def _new(self, place: Place) -> ir.Segment:
        names = tuple(name for name in self.recompute if name in place.recompute)
        plain, lora = padding.around(place, self.plain(place)), place.spec.adapter
        plain = add_adapters(plain, lora) if lora else plain
        indexer_only = place.spec.train.only == "indexer"
        plain = indexer.freeze_all_but_indexer(plain) if indexer_only else plain
        dtypes = storage_dtypes(place, plain.kind)
        unfused = {*place.spec.unfused, *self.recompute} - {*names}  # `recompute` turns on the pass of its name
        unfused |= (
            set() if any(is_packed(dtype) and not parse_packed(dtype).form for _, dtype in dtypes) else {"quantise"}
        )
        unfused |= {"norm_gradient"} if place.D > WIDEST_NORM_GRADIENT else set()
        unfused |= (
            {"residual_norm", "norm_gradient"} if hyper.mixing(place) else set()
        )  # norms do not follow a plain sum of the residual stream
        # Adapters read the same values unquantised, and nothing is quantised for weights that are not trained.
        unfused |= {"quantise", "norm_gradient"} if lora or indexer_only else set()
        # An indexer reads the latent of queries unquantised, and products read it quantised. So do gates their input.
        unfused |= {"quantise"} if plain.kind in ("attention", "project") and indexer.indexer_of(place) else set()
        unfused |= {"quantise"} if attention.is_gated(place) and plain.kind in GATED else set()
        fused = tuple(name for name in self.fused if name not in unfused)
        return replace(plain, recompute=names, stored=dtypes, fused=fused)


GATED = ("attention", "project", "attend", "products")
LAYERS: dict[str, Layer] = {
    "added": Layer(residual.build_added, residual.ADDED_PARAMETERS),
    "attention": Layer(
        attention.build,
        attention.PARAMETERS,
        ("rmsnorm", "mla_up", "qkv", "hyper", "attention"),
        ("residual_norm", "quantise", "norm_gradient"),
    ),
    "attend": Layer(attention.build_attend, attention.PARAMETERS, ("rmsnorm", "mla_up", "attention"), ("quantise",)),
    "balance": Layer(moe.build_balance, {}),
    "between": Layer(
        residual.build_between, residual.BETWEEN_PARAMETERS, ("hyper",), ("residual_norm", "norm_gradient")
    ),
    "dense": Layer(
        dense.build,
        dense.PARAMETERS,
        ("rmsnorm", "swiglu", "up", "hyper", "dense", SUM),
        ("residual_norm", "quantise", "norm_gradient"),
    ),
    "embed": Layer(ends.build_embed, ends.EMBED_PARAMETERS),
    "enter": Layer(residual.build_enter, residual.ENTER_PARAMETERS, ("hyper",), ("norm_gradient",)),
    "experts": Layer(moe.build_experts, moe.EXPERTS_PARAMETERS, ("swiglu", "up", "experts"), ("quantise",)),
    "final_norm": Layer(ends.build_final_norm, ends.FINAL_NORM_PARAMETERS, ("hyper",)),
    "head": Layer(ends.build_head, ends.HEAD_PARAMETERS, ("logits",), ("logits",)),
    "join": Layer(moe.build_join, moe.JOIN_PARAMETERS, ("hyper",), ("join", "quantise")),
    "leave": Layer(residual.build_leave, residual.LEAVE_PARAMETERS),
    "loss": Layer(ends.build_loss, {}),
    "mtp_input": Layer(ends.build, ends.PARAMETERS, ("rmsnorm",)),
    "products": Layer(attention.build_products, attention.PARAMETERS, (), ("quantise",)),
    "project": Layer(
        attention.build_project,
        attention.PARAMETERS,
        ("rmsnorm", "qkv", "hyper", "attention"),
        ("quantise", "norm_gradient"),
    ),
    "router": Layer(
        moe.build_router,
        moe.ROUTER_PARAMETERS,
        ("rmsnorm", "hyper", "router"),
        ("residual_norm", "route", "quantise", "norm_gradient"),
    ),
    "streams": Layer(hyper.build_copy, {}),
    "shared": Layer(moe.build_shared, moe.SHARED_PARAMETERS, ("rmsnorm", "swiglu", "up", "shared"), ("quantise",)),
}
