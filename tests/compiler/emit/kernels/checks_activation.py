"""Checks of the kernels of activations other than SwiGLU in Triton's interpreter, against FP64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = (
    "gelu", "gelu_dgrad", "gelu_tanh", "gelu_tanh_dgrad", "relu2", "relu2_dgrad",
    "geglu", "geglu_dgrad", "geglu_tanh", "geglu_tanh_dgrad", "clamped_swiglu", "clamped_swiglu_dgrad",
)  # fmt: skip
LIMIT = 7.0
CONSTANTS = {"clamped_swiglu": (LIMIT, 1.702, 1.0)}
PLAIN = ("gelu", "gelu_tanh", "relu2")


def operands(op: str, dtype: torch.dtype, rows: int, inner: int) -> tuple[Tensor, Tensor]:
    """(dy, h). Each half has numbers at which exponentials overflow and clamped activations are cut off."""
    halves = 1 if op in PLAIN else 2
    h, dy = 3 * random(rows, halves * inner, dtype=dtype, seed=1), random(rows, inner, dtype=dtype, seed=2)
    if rows and inner >= 8:
        for first in range(0, halves * inner, inner):
            h[0, first : first + 8] = torch.tensor([-200.0, -60.0, -LIMIT, -0.0, 5.0, LIMIT, 60.0, 200.0])
    return dy, h


def terms(op: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes, FP64, that the value and the derivative of an activation are off by a few units of."""
    if op in ("gelu", "geglu"):  # Φ is 0.5 + 0.5 · erf; e^(−x²/2) is off by x²/2 units, as its argument is rounded
        density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
        return x.abs(), 1 + x.abs() * density * (1 + x.square())
    if op == "relu2":
        return x.square(), 2 * x.abs()
    if op == "clamped_swiglu":
        cut = x.clamp(max=LIMIT)
        argument = CONSTANTS[op][1] * cut
        share = torch.sigmoid(argument)
        return cut.abs() * share * (1 + argument.abs()), share * (1 + argument.abs()) ** 2
    argument = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
    growth = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x.square())
    share, off = torch.sigmoid(argument), 1 + argument.abs()
    tail = (1 - share) * off + (argument.abs() < 40)  # 1 − share: beyond 40, exactly 0
    # The reference computes 1 + tanh in FP64, with an error of 2⁻⁵³ where it cancels: 2⁻²⁹ of FP32's unit.
    cancelled = 2.0**-29
    return x.abs() * (share * off + cancelled), share * off + x.abs() * growth * (share * tail + cancelled) + cancelled


def activation(op: str, dtype: torch.dtype, rows: int, inner: int) -> None:
    dy, h = operands(op, dtype, rows, inner)
    constants = CONSTANTS.get(op, ())
    dy64, h64 = double(dy, h)
    y, dh = run(op, h, *constants), run(f"{op}_dgrad", dy, h, *constants)
    assert y.dtype == dh.dtype == dtype
    exact, dh_exact = ops.OPS[op](h64, *constants), ops.OPS[f"{op}_dgrad"](dy64, h64, *constants)
    if op in PLAIN:
        value, slope = terms(op, h64)
        within(y, exact, value, 16)
        within(dh, dh_exact, dy64.abs() * slope, 20)
        return
    g, u = h64.chunk(2, 1)
    value, slope = terms(op, g)
    up = u.clamp(-LIMIT, LIMIT).abs() + 1 if constants else u.abs()
    within(y, exact, value * up, 16)
    within(dh, dh_exact, torch.cat([up * slope, value], 1) * dy64.abs().repeat(1, 2), 20)


def keeps_nan(op: str) -> None:
    """NaN gives NaN in its own element only, even where the activation is clamped."""
    dy, h = operands(op, torch.float32, 3, 16)
    constants = CONSTANTS.get(op, ())
    h[1, 3] = torch.nan
    y, dh = run(op, h, *constants), run(f"{op}_dgrad", dy, h, *constants)
    assert y.isnan().nonzero().tolist() == [[1, 3]]
    assert dh.isnan().nonzero().tolist() == [[1, 3]] if op in PLAIN else [[1, 3], [1, 19]]


def moves_each_byte_once(op: str) -> None:
    dy, h = operands(op, torch.bfloat16, 24, 256)
    for name, args in ((op, (h,)), (f"{op}_dgrad", (dy, h))):
        with moved() as count:
            result = run(name, *args, *CONSTANTS.get(op, ()))
        assert count[0] == bytes_of(*args, result), name
