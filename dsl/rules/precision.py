"""Rules on low-precision dtypes: the roles each is for, and the tiles of elements that share a scale."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.facts.formats import FP8 as BLOCKS
from dsl.facts.formats import PRODUCTS, FormatFacts
from dsl.rules.finding import Finding, nearest_multiple
from dsl.schema import Compressed, Custom, DeltaNet, Dense, Dtype, Gqa, Mla, Moe, Precision, Spec
from dsl.schema.precision import format_of
from dsl.schema.run import WIDEST_NORM_GRADIENT

FP8 = "e4m3"
MAX_FLA_KEY = 256  # columns of a key that flash-linear-attention takes
MAX_FLASH_KEY = 192  # columns of a key in a deterministic backward of FlashAttention-3
OPERANDS = (FP8, "e2m1")  # low-precision dtypes that a linear may read
# Low precision would lose values that add up over a run. dtype → (width, roles) in words of messages, and the roles.
ROLES: dict[Dtype, tuple[str, str, tuple[str, ...]]] = {
    "e4m3": ("eight bits", "linear, dispatch and combine", ("linear", "dispatch", "combine")),
    "e2m1": ("four bits", "linear", ("linear",)),
    "e5m6": ("twelve bits", "attention_output", ("attention_output",)),
}
ALL_ROLES = (
    *("parameter", "compute", "linear", "accumulate", "gradients", "master", "moments", "dispatch", "combine"),
    "attention_output",
    "logits",
)
TILED_ROLES = {"activation_tile": ("linear", "dispatch", "combine"), "weight_tile": ("linear",)}
READ = 16  # bytes, which are FP8 elements, that a product reads at a time
TILES = {"activation_tile": {"e4m3": "1x128", "e2m1": "1x16"}, "weight_tile": {"e4m3": "128x128", "e2m1": "16x16"}}


def low_precision_has_a_role(spec: Spec) -> Iterator[Finding]:
    """Operands of linears and token rows in transit may be FP8; values that add up over a run may not."""
    for role in ALL_ROLES:
        dtype = getattr(spec.precision, role)
        if dtype in ROLES and role not in ROLES[dtype][2]:
            bits, allowed, _ = ROLES[dtype]
            wide = role in ("parameter", "compute", "linear", "moments", "dispatch", "combine")
            wider = spec.precision.compute if role == "attention_output" else "bf16" if wide else "fp32"
            yield Finding(
                "E0911",
                f"{role} = {dtype}: {bits} are only for {allowed}",
                f"precision.{role}",
                f"write `{role} = {wider}`",
            )
    stored, compute = spec.precision.attention_output, spec.precision.compute
    if stored == "e5m6" and compute != "bf16":
        message = f"attention_output = e5m6 is read as bf16, but attention computes in {compute}"
        yield Finding("E0911", message, "precision.attention_output", f"write `attention_output = {compute}`")
    elif stored not in (None, compute, *ROLES):
        hint = "write `attention_output = e5m6`" if compute == "bf16" else f"write `attention_output = {compute}`"
        message = f"attention_output = {stored}, but attention returns {compute}"
        yield Finding("E0911", message, "precision.attention_output", hint)


def logits_have_a_valid_dtype(spec: Spec) -> Iterator[Finding]:
    """Logits have the dtype that the head computes in, or FP32."""
    logits, compute = spec.precision.logits, spec.precision.compute
    if logits not in (None, compute, "fp32", *ROLES):
        message = f"logits = {logits}, but the head computes in {compute}"
        yield Finding("E0911", message, "precision.logits", "write `logits = fp32`")


def tiles_are_given(spec: Spec) -> Iterator[Finding]:
    """Low-precision dtypes have too little range: every role in one needs a tile, which has a scale."""
    for tile, roles in TILED_ROLES.items():
        roles = tuple(role for role in roles if role != "linear" or not spec.precision.scales_tensors)
        users = [(role, dtype) for role in roles if (dtype := getattr(spec.precision, role)) in OPERANDS]
        if users and getattr(spec.precision, tile) is None:
            role, dtype = users[0]
            message = f"{role} = {dtype}, but no {tile} says which elements share a scale"
            yield Finding("E0909", message, f"precision.{role}", f"add `{tile} = {TILES[tile][dtype]}`")


def tiles_match_a_format(spec: Spec) -> Iterator[Finding]:
    """Tiles and scales of linears match a format; E4M3 with FP32 scales may have tiles of any size."""
    precision = spec.precision
    if precision.linear not in OPERANDS:
        return
    form, plain = format_of(precision), precision.linear == FP8 and precision.scale == "fp32"
    if form is None and (precision.tensor_scale or not plain) and not precision.scales_tensors:
        closest = max(
            (f for f in PRODUCTS if f.element == precision.linear), key=lambda f: _num_equal_keys(f, precision)
        )
        wanted = zip(("activation_tile", "weight_tile", "scale", "tensor_scale"), closest.keys[1:], strict=True)
        message = f"linear = {precision.linear} has tiles and scales that match no format"
        settings = ", ".join(f"{key} = {_value_text(value)}" for key, value in wanted)
        hint = f"the tiles and scales of {closest.name} are `{settings}`"
        yield Finding("E0921", message, "precision.linear", hint)
    for role in ("dispatch", "combine"):
        if form not in (None, BLOCKS) and getattr(precision, role) == FP8:
            tile, scale = precision.activation_tile, precision.scale
            message = f"{role} = {FP8} takes 1x128 tiles with fp32 scales; this precision has {tile} and {scale}"
            yield Finding("E0921", message, f"precision.{role}", f"write `{role} = {precision.compute}`")


def _num_equal_keys(form: FormatFacts, precision: Precision) -> int:
    """Number of keys in which a precision matches a format."""
    tiles = ((tile.rows, tile.columns) if tile else None for tile in (precision.activation_tile, precision.weight_tile))
    keys = (precision.linear, *tiles, precision.scale, precision.tensor_scale)
    return sum(a == b for a, b in zip(form.keys, keys, strict=True))


def _value_text(value: object) -> str:
    """A value of a format as it is written."""
    return f"{value[0]}x{value[1]}" if isinstance(value, tuple) else str(value).lower()


def some_layers_are_not_high(spec: Spec) -> Iterator[Finding]:
    """At least one layer has low-precision linears."""
    precision, layers = spec.precision, spec.model.num_layers
    high = precision.high
    if high and precision.linear in OPERANDS and high.first + high.last >= layers:
        message = (
            f"high = {high.first} first and {high.last} last of {layers} layers: no linear is in {precision.linear}"
        )
        hint = "take a precision with `linear = bf16`, or fewer layers in `high`"
        yield Finding("E0920", message, "precision.high", hint, (("the model", "model"),))


def operands_are_read_whole(spec: Spec) -> Iterator[Finding]:
    """Low-precision products read 16 elements at a time, or a narrower tile, so the widths that linears sum over are
    multiples of that."""
    precision, linear = spec.precision, spec.precision.linear
    if linear not in OPERANDS:
        return
    elements = min((READ, *(tile.columns for name in TILES if (tile := getattr(precision, name)) is not None)))
    for name, factor, width, path, ranks in _summed_widths(spec):
        if width % (elements * ranks):
            value = width // factor
            nearest_value = next(
                candidate
                for candidate in _nearest_first(value, elements * ranks)
                if candidate * factor % (elements * ranks) == 0
            )
            reads = f"linear = {linear} reads {elements} elements at a time"
            on_each = f" on {ranks} tensor ranks, {width // ranks:,} on each," if ranks > 1 else ""
            message = f"{name} = {width:,}{on_each} is not a multiple of {elements}, but {reads}"
            note = ("the dtype is given here", "precision.linear")
            yield Finding("E0910", message, path, f"write `{path.rpartition('.')[2]} = {nearest_value}`", (note,))


def _summed_widths(spec: Spec) -> Iterator[tuple[str, int, int, str, int]]:
    """Yield the width that the forward of each linear sums over: (name, width per unit of its key, width, path, tensor
    ranks that split it)."""
    model, tensor = spec.model, spec.parallel.tensor
    yield "hidden", 1, model.hidden, "model.hidden", 1
    for path, attention in model.attentions:
        if isinstance(attention, Gqa):
            width = attention.head_dim
            ranks = tensor if attention.heads % tensor == 0 else 1
            yield f"heads·head_dim = {attention.heads}·{width}", width, attention.heads * width, f"{path}.heads", ranks
        elif isinstance(attention, Mla):
            width = attention.head_dim.value
            if attention.query_rank is not None:
                yield "query_rank", 1, attention.query_rank, f"{path}.query_rank", 1
            yield "kv_rank", 1, attention.kv_rank, f"{path}.kv_rank", 1
            ranks = tensor if attention.heads % tensor == 0 else 1
            yield f"heads·value = {attention.heads}·{width}", width, attention.heads * width, f"{path}.heads", ranks
        elif isinstance(attention, Compressed):
            groups, rank = attention.groups, attention.out_rank
            yield "query_rank", 1, attention.query_rank, f"{path}.query_rank", 1
            yield f"groups·out_rank = {groups}·{rank}", groups, groups * rank, f"{path}.out_rank", 1
        elif isinstance(attention, DeltaNet):
            width = attention.value_dim
            if attention.gate == "channel":
                yield "value_dim", 1, width, f"{path}.value_dim", 1
            ranks = tensor if attention.heads % tensor == 0 else 1
            yield f"heads·value_dim = {attention.heads}·{width}", width, attention.heads * width, f"{path}.heads", ranks
    for index, span in enumerate(model.layers):
        if not isinstance(span.ffn, Custom):
            ranks = tensor if isinstance(span.ffn, Dense) and span.ffn.inner % tensor == 0 else 1
            yield "inner", 1, span.ffn.inner, f"model.layers.{index}.ffn.inner", ranks
        if isinstance(span.ffn, Moe) and span.ffn.shared_inner is not None:
            yield "shared_inner", 1, span.ffn.shared_inner, f"model.layers.{index}.ffn.shared_inner", 1


def _nearest_first(value: int, limit: int = READ) -> Iterator[int]:
    """Yield `value`, then the numbers up to `limit` away from it, the nearest first; of two, the larger one first."""
    yield value
    for distance in range(1, limit + 1):
        yield value + distance
        if value > distance:
            yield value - distance


def sums_are_promoted(spec: Spec) -> Iterator[Finding]:
    """Partial sums are promoted to FP32 at the end of a tile, where its scale is applied."""
    precision = spec.precision
    if precision.promote is None or precision.linear != FP8:
        return
    for name in TILES:
        tile = getattr(precision, name)
        if tile is not None and precision.promote % tile.columns:
            message = f"promote = {precision.promote} is not a multiple of the {tile.columns} columns of {name}"
            hint = f"write `promote = {nearest_multiple(precision.promote, tile.columns)}`"
            yield Finding("E0912", message, "precision.promote", hint, (("the tile", f"precision.{name}"),))
            break


def _has_further_sums(spec: Spec, no_moe: bool) -> bool:
    """Whether the gradient of some norm can be fused with more than the gradient of the residual: with a sum before it,
    or with the recomputed norm."""
    readers = {"attention", "dense"} - {*spec.recompute} if "rmsnorm" in spec.recompute else set()
    has_sums = not no_moe or spec.model.has_latents or bool(readers)
    return (
        has_sums
        and spec.model.norm != "post"
        and spec.model.hyper_connections is None
        and spec.model.hidden <= WIDEST_NORM_GRADIENT
    )


def unfused_ops_exist(spec: Spec) -> Iterator[Finding]:
    """`unfused` names only ops that would otherwise be fused: ops of MoE layers, and ops whose result is multiplied or
    sent in FP8. FP8 for returning rows alone fuses nothing."""
    no_moe = not any(isinstance(span.ffn, Moe) for span in spec.model.layers)
    packed = (spec.precision.linear == FP8 and spec.precision.scale == "fp32") or (
        spec.precision.dispatch == FP8 and not no_moe
    )
    model = spec.model
    absent = {"route": no_moe, "quantise": not packed, "norm_gradient": not _has_further_sums(spec, no_moe)}
    streams = model.hyper_connections is not None
    # the output of experts is normed or scaled before it is added
    is_rescaled = model.norm != "pre" or model.residual_scale != 1 or streams
    absent["join"] = no_moe or (is_rescaled and not any(isinstance(s.ffn, Moe) and s.ffn.shared for s in model.layers))
    absent["residual_norm"] = model.norm == "post" or streams  # with several streams, no sum precedes a norm
    absent_ops = [name for name in spec.unfused if absent.get(name)]
    if absent_ops:
        remaining = ", ".join(name for name in spec.unfused if name not in absent_ops)
        model_words, precision_words = f"model {model.name}", f"precision {spec.precision.name}"
        message = f"unfused names {', '.join(absent_ops)}, but {model_words} in {precision_words} does not fuse that"
        notes = (("the model", "model"), ("the precision", "precision"))
        applies = ("norm_gradient" in absent_ops or (no_moe and absent_ops != ["quantise"]), "quantise" in absent_ops)
        related = tuple(note for note, applied in zip(notes, applies, strict=True) if applied)
        yield Finding("E0913", message, "unfused", f"write `unfused = [{remaining}]`", related)


def kernels_exist(spec: Spec) -> Iterator[Finding]:
    """`kernels` states implementations only of ops that the model has."""
    attentions = [attention for _, attention in spec.model.attentions]
    has_experts = any(isinstance(span.ffn, Moe) for span in spec.model.layers)
    needed = {
        "attention": ("no grouped-query attention", any(isinstance(attention, Gqa) for attention in attentions)),
        "latent_attention": ("no `mla` attention", any(isinstance(attention, Mla) for attention in attentions)),
        "grouped_products": ("no routed experts", has_experts),
        "sparse_attention": ("no indexer", any(getattr(attention, "indexer", None) for attention in attentions)),
        "compressed_attention": ("no `compressed` attention", any(isinstance(a, Compressed) for a in attentions)),
        "delta_rule": ("no linear attention", any(isinstance(attention, DeltaNet) for attention in attentions)),
    }
    for key, (missing, is_there) in needed.items():
        if getattr(spec.kernels, key) is not None and not is_there:
            message = f"kernels.{key} is set, but model {spec.model.name} has {missing}"
            yield Finding("E0913", message, f"kernels.{key}", f"remove `{key}`", (("the model", "model"),))


def libraries_compute_the_ops(spec: Spec) -> Iterator[Finding]:
    """A library that `kernels` names computes the ops of the run: in BF16, and with the shapes that it takes."""
    precision, related = spec.precision, (("the precision", "precision"),)
    if spec.kernels.grouped_products == "grouped_mm" and precision.linear != "bf16":
        message = f"grouped_mm multiplies BF16, but precision {precision.name} multiplies in {precision.linear}"
        yield Finding("E0945", message, "kernels.grouped_products", "remove `grouped_products`", related)
    if spec.kernels.fp8_products == "deep_gemm" and (precision.linear != FP8 or precision.scales_tensors):
        form = "scales whole tensors" if precision.linear == FP8 else f"multiplies in {precision.linear}"
        message = f"deep_gemm multiplies FP8 in tiles, but precision {precision.name} {form}"
        yield Finding("E0945", message, "kernels.fp8_products", "remove `fp8_products`", related)
    attentions = (("attention", "cudnn"), ("attention", "flash_attn"), ("latent_attention", "flash_attn"))
    for key, library in (*attentions, ("delta_rule", "fla")):
        if getattr(spec.kernels, key) == library:
            yield from _library_takes_sequences(spec, key, library)
    if spec.kernels.latent_attention == "flash_attn":
        yield from _latent_attention_is_apart(spec)
    if spec.kernels.delta_rule != "fla":
        return
    path, hint = "kernels.delta_rule", "remove `delta_rule`"
    for place, attention in spec.model.attentions:
        if isinstance(attention, DeltaNet):
            if attention.key_dim > MAX_FLA_KEY:
                message = f"fla takes keys of up to {MAX_FLA_KEY} columns, not {attention.key_dim}"
                yield Finding("E0945", message, path, hint, (("the width", f"{place}.key_dim"),))
            if attention.gate == "channel" and attention.key_heads != attention.heads:
                message = "with a decay for each channel, fla needs as many heads of keys as of values"
                yield Finding("E0945", message, path, hint, (("the key heads", f"{place}.key_heads"),))


def _latent_attention_is_apart(spec: Spec) -> Iterator[Finding]:
    """A library computes latent attention alone: no quantisation of its result, and a key no wider than 192 columns."""
    path, hint = "kernels.latent_attention", "remove `latent_attention`"
    if spec.precision.linear in OPERANDS and "quantise" not in spec.unfused:
        message = f"precision {spec.precision.name} quantises the result of latent attention in its kernel"
        related = (("the precision", "precision.linear"),)
        yield Finding("E0945", message, path, f"write `unfused = [quantise]`, or {hint}", related)
    for place, attention in spec.model.attentions:
        if isinstance(attention, Mla):
            key = attention.head_dim.nope + attention.head_dim.rope
            if key > MAX_FLASH_KEY:
                message = f"flash_attn takes keys of up to {MAX_FLASH_KEY} columns, not {key}"
                yield Finding("E0945", message, path, hint, (("the width", f"{place}.head_dim"),))


def _library_takes_sequences(spec: Spec, key: str, library: str) -> Iterator[Finding]:
    """A library of attention computes in BF16, and whole sequences, and does not return the largest logits."""
    path, hint, precision = f"kernels.{key}", f"remove `{key}`", spec.precision
    if precision.compute != "bf16":
        message = f"{library} computes in BF16, but precision {precision.name} computes in {precision.compute}"
        yield Finding("E0945", message, path, hint, (("the precision", "precision"),))
    if spec.data.documents == "masked":
        message = f"{library} computes whole sequences, but documents are masked from one another"
        yield Finding("E0945", message, path, hint, (("the documents", "data.documents"),))
    if spec.train.optimizer.qk_clip is not None and key != "delta_rule":
        message = f"qk_clip needs the largest logits of attention, which {library} does not return"
        yield Finding("E0945", message, path, hint, (("the bound of logits", "train.optimizer.qk_clip"),))
