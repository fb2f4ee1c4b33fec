"""What is right, and cannot be compiled and trained yet."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.rules.finding import Finding
from dsl.schema import Spec


def trains_in_full_precision(spec: Spec) -> Iterator[Finding]:
    """One of the built-in FP64 and FP32 recipes, or one that equals it."""
    dtypes = {
        role: getattr(spec.precision, role)
        for role in (
            "parameter", "compute", "linear", "accumulate", "gradients", "master", "moments", "dispatch", "combine",
        )
    }  # fmt: skip
    if len(set(dtypes.values())) == 1 and dtypes["parameter"] in ("fp64", "fp32"):
        return
    lower = ", ".join(f"{role} in {dtype}" for role, dtype in dtypes.items() if dtype not in ("fp64", "fp32"))
    message = f"precision {spec.precision.name} has {lower or 'several dtypes'}; training runs in fp64 or fp32"
    yield Finding("E1001", message, "precision", "write `precision = fp32`")
