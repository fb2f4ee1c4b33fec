"""The effect of BF16 rounding on a computation, estimated by running it in wider numbers with random rounding.

Monte Carlo arithmetic (Parker, 1997): where a BF16 run rounds a number to one of 8 bits, the number is rounded up or
down with the probability that keeps its mean. The spread of a few such runs estimates the error of these roundings
in each result. Rounding to nearest has half the variance of random rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from runtime.ops import OPS
from tests.runtime.ops.cases import arguments, as_tuple

BITS = 8  # of precision
PRODUCTS = ("linear_wgrad_", "grouped_linear_wgrad_")  # accumulations of a rounded product; others round nothing
SPREADS = 2.0  # a run with rounding to nearest stays within this factor: 2.8 of its standard deviations
SAMPLES = 6


def at_random(x: Tensor, generator: torch.Generator) -> Tensor:
    """x with 8 bits, up or down at random."""
    mantissa, exponent = torch.frexp(x)
    scaled = mantissa * 2.0**BITS
    chance = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    return torch.ldexp((scaled + chance).floor(), exponent - BITS)


@cache
def rounded_results(op: str) -> tuple[bool, ...]:
    """Which results of an op a BF16 run rounds."""
    return tuple(result.dtype == torch.bfloat16 for result in as_tuple(OPS[op](*arguments(op, torch.bfloat16))))


def to_nearest(x: Tensor) -> Tensor:
    """x with 8 bits, as BF16 rounds it."""
    return x.to(torch.bfloat16).to(x.dtype)


def rounding(namespace: MutableMapping[str, Any], generator: torch.Generator | None) -> None:
    """Replace the ops in an emitted segment, which is wider, by ops that round where a BF16 run does: at random, or
    without a generator to nearest."""
    rounded = to_nearest if generator is None else partial(at_random, generator=generator)
    for name, value in list(namespace.items()):
        if value in OPS.values():
            namespace[name] = _rounding(value.__name__, value, rounded)
    add = _rounding("swiglu", torch.add, rounded)  # one result, rounded
    namespace["torch"] = SimpleNamespace(add=add, cat=torch.cat)


def _rounding(op: str, function: Callable[..., Any], rounded: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def accumulating(acc: Tensor, *args: Any) -> None:
        product = torch.zeros_like(acc)
        function(product, *args)
        acc.add_(rounded(product) if op in PRODUCTS else product)

    def pure(*args: Any) -> Any:
        results = as_tuple(function(*args))
        flags = rounded_results(op)
        outputs = tuple(rounded(r) if flag else r for r, flag in zip(results, flags, strict=True))
        return outputs if len(outputs) > 1 else outputs[0]

    return accumulating if op.endswith("_") else pure


def spread(samples: Iterable[Tensor], exact: Tensor) -> float:
    """Root mean square of the norms of the samples' errors."""
    squares = [float((sample.double() - exact.double()).square().sum()) for sample in samples]
    return float((sum(squares) / len(squares)) ** 0.5)


def assert_rounded(found: Tensor, exact: Tensor, samples: list[Tensor], what: str) -> None:
    """`found`, of a BF16 run, is off from `exact` as roundings at random are: not more, and if it has many elements,
    not much less, so that the bound means something."""
    size, error = spread(samples, exact), float((found.double() - exact.double()).norm())
    narrow = 1e-5 * float(exact.double().norm())  # what FP32 is off
    assert error <= SPREADS * size + narrow, f"{what}: off by {error:.3g}, roundings alone {size:.3g}"
    if found.numel() >= 64 and size > 10 * narrow:
        assert error >= size / 3, f"{what}: off by {error:.3g} only, roundings {size:.3g}"
