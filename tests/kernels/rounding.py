"""Makes Triton's interpreter (3.6 and 3.9) round BF16 as the hardware does. To be imported before any launch.

As it comes, the interpreter adds and multiplies BF16 numbers as the bit patterns it stores them in, feeds such
patterns to `tl.dot`, and drops the low bits of an FP32 number instead of rounding it. Here every BF16 operation
is one of FP32 followed by torch's rounding to nearest even, and `tl.dot` multiplies and sums in FP32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_convert_float, _binary, _unary = interpreter._convert_float, InterpreterBuilder.binary_op, InterpreterBuilder.unary_op


def _widen(bits: np.ndarray) -> np.ndarray:
    """BF16 bit patterns -> the FP32 numbers they stand for: BF16 is the upper half of FP32."""
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    """FP32 numbers -> bit patterns of the nearest BF16 numbers."""
    rounded = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar is tl.bfloat16


def _f32(handle: Any) -> Any:
    return TensorHandle(_widen(handle.data).reshape(handle.data.shape), tl.float32) if _is_bf16(handle) else handle


def _bf16(handle: Any) -> Any:
    if handle.data.dtype != np.float32:
        return handle  # of a comparison
    return TensorHandle(_round(handle.data).reshape(handle.data.shape), tl.bfloat16)


def convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source is tl.bfloat16 and target is tl.float32:
        return _widen(values).view(np.uint32).reshape(values.shape)
    if source is tl.float32 and target is tl.bfloat16:
        return _round(np.ascontiguousarray(values).view(np.float32)).reshape(values.shape)
    return _convert_float(values, source, target, rounding)


def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if _is_bf16(left) and _is_bf16(right):
        return _bf16(_binary(self, _f32(left), _f32(right), op))
    return _binary(self, left, right, op)


def unary_op(self: Any, argument: Any, op: Any) -> Any:
    return _bf16(_unary(self, _f32(argument), op)) if _is_bf16(argument) else _unary(self, argument, op)


def create_dot(self: Any, left: Any, right: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    product = torch.from_numpy(np.ascontiguousarray(_f32(left).data)) @ torch.from_numpy(
        np.ascontiguousarray(_f32(right).data)
    )
    return TensorHandle(product.numpy() + total.data, total.dtype.scalar)


interpreter._convert_float = convert_float
InterpreterBuilder.binary_op = binary_op
InterpreterBuilder.unary_op = unary_op
InterpreterBuilder.create_dot = create_dot
