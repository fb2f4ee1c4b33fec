"""Makes Triton's interpreter (3.6 and 3.9) round BF16 and E4M3 as the hardware does. To be imported before any launch.

Unpatched, the interpreter adds and multiplies BF16 numbers as the bit patterns it stores them in, passes such
patterns to `tl.dot`, drops the low bits of an FP32 number instead of rounding it, and neither rounds nor saturates
E4M3. Here every cast is torch's, to nearest with ties to even, every BF16 operation is an FP32 operation
followed by such a cast, and `tl.dot` multiplies and sums in FP32.

A cast to eight bits saturates, as `cvt.rn.satfinite` does: too large numbers and infinity become the largest number
of its sign; NaN becomes the one NaN without a sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_convert_float, _binary, _unary = interpreter._convert_float, InterpreterBuilder.binary_op, InterpreterBuilder.unary_op

TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
SATURATING = (tl.float8e4nv, tl.float8e5)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes → integers that torch and numpy both have


def convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Bit patterns (or numbers) of `source` -> bit patterns of the nearest of `target`."""
    if source not in TORCH or target not in TORCH:
        return _convert_float(values, source, target, rounding)
    x = torch.from_numpy(np.array(values).view(f"int{source.primitive_bitwidth}")).view(TORCH[source])
    if target in SATURATING:
        limit = torch.finfo(TORCH[target]).max
        x = x.float().clamp(-limit, limit)  # keeps NaN
        x = torch.where(x.isnan(), x.abs(), x)
    bits = x.to(TORCH[target]).view(BITS[target.primitive_bitwidth // 8]).numpy()
    return bits.view(f"uint{target.primitive_bitwidth}").reshape(values.shape)


def _numbers(handle: Any) -> np.ndarray:
    """The values of a handle as numbers that numpy can add: FP32 if it holds bit patterns."""
    scalar = handle.dtype.scalar
    if scalar not in TORCH or scalar in (tl.float32, tl.float16):
        return handle.data
    return convert_float(handle.data, scalar, tl.float32, None).view(np.float32)


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar is tl.bfloat16


def _f32(handle: Any) -> Any:
    return TensorHandle(_numbers(handle), tl.float32) if _is_bf16(handle) else handle


def _bf16(handle: Any) -> Any:
    if handle.data.dtype != np.float32:
        return handle  # of a comparison
    return TensorHandle(convert_float(handle.data, tl.float32, tl.bfloat16, None), tl.bfloat16)


def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if _is_bf16(left) and _is_bf16(right):
        return _bf16(_binary(self, _f32(left), _f32(right), op))
    return _binary(self, left, right, op)


def unary_op(self: Any, argument: Any, op: Any) -> Any:
    return _bf16(_unary(self, _f32(argument), op)) if _is_bf16(argument) else _unary(self, argument, op)


def create_dot(self: Any, left: Any, right: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    a, b = (torch.from_numpy(np.ascontiguousarray(_numbers(operand))) for operand in (left, right))
    return TensorHandle((a @ b).numpy() + total.data, total.dtype.scalar)


interpreter._convert_float = convert_float
InterpreterBuilder.binary_op = binary_op
InterpreterBuilder.unary_op = unary_op
InterpreterBuilder.create_dot = create_dot
