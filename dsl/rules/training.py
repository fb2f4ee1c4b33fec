"""What is right, and cannot be compiled and trained yet."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.rules.finding import Finding
from dsl.schema import BUILT_IN, Precision, Spec

ROLES = ("parameter", "compute", "linear", "accumulate", "gradients", "master", "moments", "dispatch", "combine")
TILES = ("activation_tile", "weight_tile", "promote")  # of a recipe whose linears have eight bits
RECIPES = ("bf16", "fp32", "fp64", "fp8_block")  # of those that a precision is equally far from, the first is named


def trains_in_a_built_in_precision(spec: Spec) -> Iterator[Finding]:
    """One of the built-in recipes, or one that equals it, or does but for the dtype of moments or master weights."""
    found = {name: _differing(spec.precision, BUILT_IN[name]) for name in RECIPES}
    nearest = min(RECIPES, key=lambda name: len(found[name]))
    if not found[nearest]:
        return
    message = f"precision {spec.precision.name} has {', '.join(found[nearest])}; training runs in {WORDS}"
    yield Finding("E1001", message, "precision", f"write `precision = {nearest}`")


WORDS = "fp64, fp32, bf16 or fp8_block"


def _differing(precision: Precision, recipe: Precision) -> list[str]:
    """What is not as the recipe has it, in words.

    Moments beside FP32 master weights may be FP32 or BF16. Beside BF16 weights, master weights may be BF16: the same.
    """
    differing = {role: getattr(precision, role) for role in ROLES if getattr(precision, role) != getattr(recipe, role)}
    if recipe.master == "fp32" and precision.moments in ("fp32", "bf16"):
        differing.pop("moments", None)
    if recipe.parameter == precision.master == "bf16":
        differing.pop("master", None)
    words = [f"{role} in {dtype}" for role, dtype in differing.items()]
    if recipe.linear == "e4m3":
        words += [f"another {key}" for key in TILES if getattr(precision, key) != getattr(recipe, key)]
    return words
