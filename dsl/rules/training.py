"""What is right, and cannot be compiled and trained yet."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.rules.finding import Finding
from dsl.schema import BUILT_IN, Precision, Spec

ROLES = ("parameter", "compute", "linear", "accumulate", "gradients", "master", "moments", "dispatch", "combine")


def trains_in_a_built_in_precision(spec: Spec) -> Iterator[Finding]:
    """One of the built-in FP64, FP32 and BF16 recipes, or one that equals it."""
    if any(not _differing(spec.precision, recipe) for recipe in BUILT_IN.values()):
        return
    name = "bf16" if spec.precision.compute == "bf16" else "fp32"
    differing = ", ".join(f"{role} in {dtype}" for role, dtype in _differing(spec.precision, BUILT_IN[name]).items())
    message = f"precision {spec.precision.name} has {differing}; training runs in fp64, fp32 or bf16"
    yield Finding("E1001", message, "precision", f"write `precision = {name}`")


def _differing(precision: Precision, recipe: Precision) -> dict[str, str]:
    """The roles that do not have the recipe's dtype."""
    return {role: getattr(precision, role) for role in ROLES if getattr(precision, role) != getattr(recipe, role)}
