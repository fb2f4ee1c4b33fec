"""Adapters: the weights beside them, and the matrices that have one."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.messages.diagnostics import join_as_code
from dsl.rules.finding import Finding
from dsl.schema import AnyAttention, Compressed, Custom, CustomAttention, DeltaNet, Dense, Gqa, Model, Moe, Spec
from dsl.schema.model import is_gated

Extents = tuple[int, int]  # rows and columns of a matrix
EXPERTS = ("expert_up", "expert_down")


def adapters_are_beside_weights(spec: Spec) -> Iterator[Finding]:
    """Frozen weights come from a checkpoint: random weights would stay random."""
    if spec.adapter is not None and spec.train.initial is None:
        message = "adapters are trained beside frozen weights, but the run has no initial weights"
        hint = 'name their checkpoint in `train`: `initial = "llama.weights"`; `dsc import hf` makes one'
        yield Finding("E0940", message, "adapter", hint)


def adapted_matrices_exist(spec: Spec) -> Iterator[Finding]:
    """Each name in `on` is a matrix that some layer has."""
    if spec.adapter is None:
        return
    on, matrices = spec.adapter.on, matrices_of(spec.model)
    absent_matrices: list[str] = [name for name in on if name not in matrices]
    if absent_matrices:
        remaining: list[str] = [name for name in on if name in matrices] or [*matrices]
        message = (
            f"adapters are on {join_as_code(absent_matrices, 'and')}, which no layer of model {spec.model.name} has"
        )
        hint = f"write `on = [{', '.join(remaining)}]`; the model has {join_as_code([*matrices], 'and')}"
        if not matrices:
            hint = "remove `adapter`: custom modules cannot have adapters"
        yield Finding("E0941", message, "adapter.on", hint, (("the model", "model"),))


def rank_is_low(spec: Spec) -> Iterator[Finding]:
    """A rank above the smaller dimension of a matrix adds parameters, but B · A is no more general."""
    if spec.adapter is None:
        return
    matrices = matrices_of(spec.model)
    sizes = [(min(extents), extents, name) for name in spec.adapter.on for extents in matrices.get(name, ())]
    smallest_extent, (rows, columns), name = min(sizes, default=(spec.adapter.rank, (0, 0), ""))
    if spec.adapter.rank > smallest_extent:
        message = (
            f"rank = {spec.adapter.rank:,} is more than the smaller dimension of {name}, a matrix {rows:,} × "
            f"{columns:,}"
        )
        yield Finding(
            "E0942", message, "adapter.rank", f"write `rank = {smallest_extent}` or less", (("the model", "model"),)
        )


def adapters_read_their_dtype(spec: Spec) -> Iterator[Finding]:
    """Adapters compute in the dtype of activations, but experts may receive their rows in FP8."""
    lora, precision = spec.adapter, spec.precision
    if lora is None:
        return
    if precision.dispatch != precision.compute and {*lora.on} & {*EXPERTS}:
        message = f"experts receive token rows in {precision.dispatch}, but adapters read them in {precision.compute}"
        remaining = [name for name in lora.on if name not in EXPERTS]
        hint = (
            f"write `on = [{', '.join(remaining)}]`, or `precision = bf16`" if remaining else "write `precision = bf16`"
        )
        yield Finding("E0943", message, "adapter.on", hint, (("the precision", "precision"),))


def weights_are_whole(spec: Spec) -> Iterator[Finding]:
    """Frozen weights are not sharded: every rank that holds them holds all of them."""
    if spec.adapter is not None and spec.parallel.zero == 3 and spec.parallel.data > 1:
        message = "zero = 3 shards trained weights, but the weights beside adapters are frozen and whole on each rank"
        note = (("the adapters", "adapter"),)
        yield Finding("E0944", message, "parallel.zero", "write `zero = 2`, and more pipeline or expert ranks", note)


def matrices_of(model: Model) -> dict[str, set[Extents]]:
    """The matrices that may have an adapter: name in `on` → shapes [out, in]. Custom modules have none."""
    matrices: dict[str, set[Extents]] = {}
    for span in model.layers:
        for name, extents in (*_attention(span.attention or model.attention, model), *_ffn(span.ffn, model.hidden)):
            matrices.setdefault(name, set()).add(extents)
    if model.mtp:
        # with several streams, the embedding and each stream have separate projections
        inputs = 2 if model.hyper_connections is None else 1
        matrices["projection"] = {(model.hidden, inputs * model.hidden)}
    return matrices


def _attention(sizes: AnyAttention, model: Model) -> Iterator[tuple[str, Extents]]:
    D = model.hidden
    if isinstance(sizes, CustomAttention):
        return
    if isinstance(sizes, Gqa):
        gate = sizes.heads if sizes.output_gate else 0
        yield "qkv", ((sizes.heads + 2 * sizes.kv_heads + gate) * sizes.head_dim, D)
        yield "out", (D, sizes.heads * sizes.head_dim)
        return
    if isinstance(sizes, Compressed):
        yield "q_down", (sizes.query_rank, D)
        yield "q_up", (sizes.heads * sizes.head_dim, sizes.query_rank)
        yield "out", (D, sizes.groups * sizes.out_rank)
        return
    if isinstance(sizes, DeltaNet):
        yield "qkv", (2 * sizes.key_heads * sizes.key_dim + sizes.heads * sizes.value_dim, D)
        yield "out", (D, sizes.heads * sizes.value_dim)
        return
    nope, rope, value = sizes.head_dim.nope, sizes.head_dim.rope, sizes.head_dim.value
    if sizes.query_rank:
        yield "q_down", (sizes.query_rank, D)
        yield "q_up", (sizes.heads * (nope + rope), sizes.query_rank)
    else:
        yield "q", (sizes.heads * (nope + rope), D)
    yield "kv_down", (sizes.kv_rank + rope, D)
    yield "kv_up", (sizes.heads * (nope + value), sizes.kv_rank)
    yield "out", (D, sizes.heads * value)


def _ffn(ffn: Dense | Moe | Custom, D: int) -> Iterator[tuple[str, Extents]]:
    if isinstance(ffn, Custom):
        return
    factor = 2 if is_gated(ffn) else 1
    if isinstance(ffn, Moe):
        yield "expert_up", (factor * ffn.inner, D)
        yield "expert_down", (D, ffn.inner)
    inner = ffn.inner if isinstance(ffn, Dense) else (ffn.shared_inner or ffn.inner) * ffn.shared
    if inner:
        yield "up", (factor * inner, D)
        yield "down", (D, inner)
