"""What is right, and cannot be compiled and trained yet."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.rules.finding import Finding
from dsl.schema import BUILT_IN, Precision, Spec

ROLES = ("parameter", "compute", "linear", "accumulate", "gradients", "master", "moments", "dispatch", "combine")
RECIPES = ("bf16", "fp32", "fp64")  # of those that a precision is equally far from, the first is named


def trains_in_a_built_in_precision(spec: Spec) -> Iterator[Finding]:
    """One of the built-in FP64, FP32 and BF16 recipes, or one that equals it, or does but for BF16 moments."""
    found = {name: _differing(spec.precision, BUILT_IN[name]) for name in RECIPES}
    nearest = min(RECIPES, key=lambda name: len(found[name]))
    if not found[nearest]:
        return
    differing = ", ".join(f"{role} in {dtype}" for role, dtype in found[nearest].items())
    message = f"precision {spec.precision.name} has {differing}; training runs in fp64, fp32 or bf16"
    yield Finding("E1001", message, "precision", f"write `precision = {nearest}`")


def _differing(precision: Precision, recipe: Precision) -> dict[str, str]:
    """The roles that do not have the recipe's dtype. Moments beside FP32 master weights may be BF16."""
    differing = {role: getattr(precision, role) for role in ROLES if getattr(precision, role) != getattr(recipe, role)}
    if recipe.master == "fp32" and precision.moments == "bf16":
        differing.pop("moments", None)
    return differing
