"""Rules on precisions and recomputed ops that cannot be compiled and trained yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsl.facts.formats import FP8, FormatFacts
from dsl.rules.finding import Finding
from dsl.rules.precision import OPERANDS
from dsl.schema import BUILT_IN, DeltaNet, Gqa, Moe, Precision, Spec
from dsl.schema.precision import format_of

ROLES = ("parameter", "compute", "linear", "accumulate", "gradients", "master", "moments", "dispatch", "combine")
TILES = ("activation_tile", "weight_tile", "scale", "tensor_scale")  # with `linear`, the keys of a format
# Of equally near recipes, one with the same linears is named, else the first one here: the default.
RECIPES = sorted(BUILT_IN, key=lambda name: (name != "bf16", name == "fp64"))
*_FIRST, _LAST = BUILT_IN
WORDS = f"{', '.join(_FIRST)} or {_LAST}"


def trains_in_a_built_in_precision(spec: Spec) -> Iterator[Finding]:
    """The precision equals a built-in recipe, or differs only in keys that may be chosen freely."""
    differences = {name: _differences(spec.precision, BUILT_IN[name]) for name in RECIPES}
    linear = spec.precision.linear
    wanted = [name for name in RECIPES if linear in OPERANDS and BUILT_IN[name].linear == linear]
    nearest = min(wanted or RECIPES, key=lambda name: (len(differences[name]), BUILT_IN[name].linear != linear))
    if not differences[nearest]:
        return
    message = f"precision {spec.precision.name} has {', '.join(differences[nearest])}; training runs only in {WORDS}"
    yield Finding("E1001", message, "precision", f"write `precision = {nearest}`")


def _differences(precision: Precision, recipe: Precision) -> list[str]:
    """The differences of a precision from a recipe, in words.

    Moments beside FP32 master weights may be FP32 or BF16. Master weights of BF16 weights may be BF16, the same
    tensors.
    """
    differing = {role: getattr(precision, role) for role in ROLES if getattr(precision, role) != getattr(recipe, role)}
    if recipe.master == "fp32" and precision.moments in ("fp32", "bf16"):
        differing.pop("moments", None)
    if recipe.parameter == precision.master == "bf16":
        differing.pop("master", None)
    if (
        precision.scales_tensors or format_of(precision) not in (None, FP8)
    ) and precision.dispatch == precision.compute:
        differing.pop("dispatch", None)
    if precision.logits not in (None, precision.compute):
        differing["logits"] = precision.logits
    words = [f"{role} in {dtype}" for role, dtype in differing.items()]
    return (
        [*words, *_low_bit_differences(precision, recipe, format_of(precision))] if recipe.linear in OPERANDS else words
    )


def _low_bit_differences(precision: Precision, recipe: Precision, form: FormatFacts | None) -> Iterator[str]:
    """The settings that low-precision products do not support. The FP8 ops round gradients to nearest and do not
    transform them."""
    of_recipe = format_of(recipe)
    assert of_recipe, "a built-in recipe has a format"
    if precision.scales_tensors:
        yield "one scale for each tensor"
        return
    if form is None or form.scale != of_recipe.scale:
        differing = (key for key in TILES if getattr(precision, key) != getattr(recipe, key))
        yield from (f"{key} = {str(getattr(precision, key)).lower()}" for key in differing)
    if form == FP8:
        promote = "no promote" if precision.promote is None else f"promote = {precision.promote}"
        yield from (promote,) if precision.promote != recipe.promote else ()
        yield from ("stochastic gradients",) if precision.gradient_rounding == "stochastic" else ()
        yield from ("hadamard",) if precision.hadamard else ()


def has_kernels_of_the_precision(spec: Spec) -> Iterator[Finding]:
    """Accelerators run kernels, and only FP8 blocks have some; CPUs run the reference ops of all formats."""
    precision = spec.precision
    form = format_of(precision) if precision.linear in OPERANDS else None
    device = next((candidate for candidate in spec.cluster.devices if candidate.bf16 is not None), None)
    if device is not None and form not in (None, FP8):
        message = f"device {device.name} would run linears in {form.name}, but no kernel multiplies in it yet"
        hint = "write `precision = fp8_block`, or train on a cluster of CPUs"
        yield Finding("E1006", message, "precision.linear", hint)


def runs_on_its_own_software(spec: Spec) -> Iterator[Finding]:
    """dsc trains with its own kernels, launches and exchanges."""
    if spec.stack.differs:
        yield Finding(
            "E1010", "`stack` describes other software, whose runs can only be planned", "stack", "remove `stack`"
        )


# --- Recomputed ops exist, and are named once

LAYER = "layer"


def recomputed_ops_exist(spec: Spec) -> Iterator[Finding]:
    """Recomputed ops are ops of the model."""
    moe = [span.ffn for span in spec.model.layers if isinstance(span.ffn, Moe)]
    absent = {"mla_up": not spec.model.has_latents} | dict.fromkeys(("router", "experts"), not moe)
    attentions = [span.attention or spec.model.attention for span in spec.model.layers]
    absent["qkv"] = not any(isinstance(attention, Gqa | DeltaNet) for attention in attentions)
    absent["shared"] = not any(ffn.shared for ffn in moe)
    absent["dense"] = len(moe) == len(spec.model.layers)
    absent["hyper"] = spec.model.hyper_connections is None
    absent["logits"] = spec.model.logit_cap is not None  # a separate op caps them, which needs all of them
    absent_ops = [name for name in spec.recompute if absent.get(name)]
    if absent_ops:
        message = f"recompute names {', '.join(absent_ops)}, but model {spec.model.name} does not compute that"
        yield _finding_without(spec, absent_ops, message, (("the model", "model"),))


def layers_are_named_once(spec: Spec) -> Iterator[Finding]:
    """Beside `layer`, `recompute` names only ops outside the recomputed layers: other layers, the head, the norms
    before MTP."""
    ends = spec.model.hyper_connections is not None
    ops_outside = {LAYER, "logits", *(("rmsnorm",) if spec.model.mtp else ()), *(("hyper",) if ends else ())}
    ops_inside = [name for name in spec.recompute if name not in ops_outside]
    if LAYER in spec.recompute and spec.recompute_layers is None and ops_inside:
        message = (
            f"recompute names {', '.join(ops_inside)} beside layer, which already recomputes every layer as a whole"
        )
        yield _finding_without(spec, ops_inside, message)


def counted_layers_are_recomputed(spec: Spec) -> Iterator[Finding]:
    """`recompute_layers` needs `layer` in `recompute`, and is at most the number of layers."""
    count, num_layers = spec.recompute_layers, spec.model.num_layers + (spec.model.mtp.depth if spec.model.mtp else 0)
    if count is None:
        return
    if LAYER not in spec.recompute:
        message = f"recompute_layers = {count}, but recompute does not name layer"
        hint = f"write `recompute = [{', '.join((LAYER, *spec.recompute))}]`"
        yield Finding("E0927", message, "recompute_layers", hint, (("the recomputed ops", "recompute"),))
    elif count > num_layers:
        message = f"recompute_layers = {count}, but model {spec.model.name} has {num_layers} layers"
        yield Finding("E0927", message, "recompute_layers", "remove `recompute_layers`: all layers are recomputed")


def _finding_without(
    spec: Spec, excluded: Sequence[str], message: str, related: tuple[tuple[str, str], ...] = ()
) -> Finding:
    remaining = ", ".join(name for name in spec.recompute if name not in excluded)
    return Finding("E0913", message, "recompute", f"write `recompute = [{remaining}]`", related)
