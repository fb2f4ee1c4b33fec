"""FP8: which roles it is for, and the tiles of elements that share a scale (arXiv 2412.19437, §3.3)."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.rules.finding import Finding, nearest_multiple
from dsl.schema import Gqa, Moe, Spec

FP8 = "e4m3"
WIDE_ROLES = ("parameter", "compute", "accumulate", "gradients", "master", "moments")  # FP8 would lose the run
TILED_ROLES = {"activation_tile": ("linear", "dispatch", "combine"), "weight_tile": ("linear",)}
READ = 16  # bytes, and elements of eight bits
TILES = {"activation_tile": "1x128", "weight_tile": "128x128"}


def eight_bits_have_a_role(spec: Spec) -> Iterator[Finding]:
    """Operands of linears and rows on their way may have eight bits; what adds up over a run may not."""
    for role in WIDE_ROLES:
        if getattr(spec.precision, role) == FP8:
            wider = "bf16" if role in ("parameter", "compute", "moments") else "fp32"
            message = f"{role} = {FP8}: eight bits are for linear, dispatch and combine"
            yield Finding("E0911", message, f"precision.{role}", f"write `{role} = {wider}`")


def tiles_are_given(spec: Spec) -> Iterator[Finding]:
    """Eight bits have no range of their own: each tile brings its scale."""
    for tile, roles in TILED_ROLES.items():
        users = [role for role in roles if getattr(spec.precision, role) == FP8]
        if users and getattr(spec.precision, tile) is None:
            message = f"{users[0]} = {FP8}, but no {tile} says which elements share a scale"
            yield Finding("E0909", message, f"precision.{users[0]}", f"add `{tile} = {TILES[tile]}`")


def operands_are_read_whole(spec: Spec) -> Iterator[Finding]:
    """Products read 16 elements of eight bits at a time, or all of a narrower tile; only widths that a linear sums over
    count."""
    precision = spec.precision
    if precision.linear != FP8:
        return
    read = min((READ, *(tile.columns for name in TILES if (tile := getattr(precision, name)) is not None)))
    for what, factor, width, at in _summed_widths(spec):
        if width % read:
            value = width // factor
            near = next(each for each in _outwards(value) if each * factor % read == 0)
            message = f"{what} = {width:,} is no multiple of {read}, and linear = {FP8} reads {read} elements at a time"
            note = ("the dtype is given here", "precision.linear")
            yield Finding("E0910", message, at, f"write `{at.rpartition('.')[2]} = {near}`", (note,))


def _summed_widths(spec: Spec) -> Iterator[tuple[str, int, int, str]]:
    """(name, width of a value of its key, width, path) of what the forward of each linear sums over."""
    model, attention = spec.model, spec.model.attention
    yield "hidden", 1, model.hidden, "model.hidden"
    if isinstance(attention, Gqa):
        width = attention.head_dim
        yield f"heads·head_dim = {attention.heads}·{width}", width, attention.heads * width, "model.attention.heads"
    else:
        width = attention.head_dim.value
        if attention.query_rank is not None:
            yield "query_rank", 1, attention.query_rank, "model.attention.query_rank"
        yield "kv_rank", 1, attention.kv_rank, "model.attention.kv_rank"
        yield f"heads·value = {attention.heads}·{width}", width, attention.heads * width, "model.attention.heads"
    for index, span in enumerate(model.layers):
        yield "inner", 1, span.ffn.inner, f"model.layers.{index}.ffn.inner"


def _outwards(value: int) -> Iterator[int]:
    """`value`, and the numbers around it, the nearest first and of two the larger one."""
    yield value
    for distance in range(1, READ + 1):
        yield value + distance
        if value > distance:
            yield value - distance


def sums_are_promoted(spec: Spec) -> Iterator[Finding]:
    """Partial sums move to FP32 at the end of a tile, where its scale is applied."""
    precision = spec.precision
    if precision.promote is None or precision.linear != FP8:
        return
    for name in TILES:
        tile = getattr(precision, name)
        if tile is not None and precision.promote % tile.columns:
            message = f"promote = {precision.promote} is no multiple of the {tile.columns} columns of {name}"
            hint = f"write `promote = {nearest_multiple(precision.promote, tile.columns)}`"
            yield Finding("E0912", message, "precision.promote", hint, (("the tile", f"precision.{name}"),))
            break


def recomputed_ops_exist(spec: Spec) -> Iterator[Finding]:
    """What is computed again is computed at all."""
    moe = [span.ffn for span in spec.model.layers if isinstance(span.ffn, Moe)]
    absent = {"mla_up": isinstance(spec.model.attention, Gqa)} | dict.fromkeys(("router", "experts"), not moe)
    absent["shared"] = not any(ffn.shared for ffn in moe)
    absent["dense"] = len(moe) == len(spec.model.layers)
    lost = [name for name in spec.recompute if absent.get(name)]
    if lost:
        kept = ", ".join(name for name in spec.recompute if name not in lost)
        message = f"recompute names {', '.join(lost)}, which model {spec.model.name} does not compute"
        yield Finding("E0913", message, "recompute", f"write `recompute = [{kept}]`", (("the model", "model"),))


def unfused_ops_exist(spec: Spec) -> Iterator[Finding]:
    """What is left apart would be one kernel: ops of MoE layers, and those whose result is multiplied or sent in eight
    bits. Rows in eight bits that come back alone are read as they are."""
    no_moe = not any(isinstance(span.ffn, Moe) for span in spec.model.layers)
    packed = spec.precision.linear == FP8 or (spec.precision.dispatch == FP8 and not no_moe)
    absent = {"route": no_moe, "join": no_moe, "quantise": not packed}
    lost = [name for name in spec.unfused if absent.get(name)]
    if lost:
        kept = ", ".join(name for name in spec.unfused if name not in lost)
        model, precision = f"model {spec.model.name}", f"precision {spec.precision.name}"
        message = f"unfused names {', '.join(lost)}, which {model} in {precision} does not fuse"
        notes = (("the model", "model"), ("the precision", "precision"))
        applies = (no_moe and lost != ["quantise"], "quantise" in lost)
        shown = tuple(note for note, applied in zip(notes, applies, strict=True) if applied)
        yield Finding("E0913", message, "unfused", f"write `unfused = [{kept}]`", shown)
