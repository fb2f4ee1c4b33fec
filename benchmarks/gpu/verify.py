"""Checks kernels against their ops in FP64 on the same arguments.

The error is ‖result − exact‖ / ‖exact‖ for each result, as a share of what its dtype allows:

- BF16: rounding normal numbers gives 0.00166. Allowed is 0.002 times √(1 + the number of independent intermediate
  roundings), times √(1 + 3/√n) if the squares of n numbers dominate the sum, because few numbers may all round far;
- FP32: sums of thousands of terms give 10⁻⁶. Allowed is 10⁻⁵, plus the intermediate roundings to BF16;
- integers: must be equal, as no choice in the arguments depends on FP32 rounding;
- E4M3: compared with the op in its own dtype, as FP64 would round other numbers. A sum that is off by one unit of FP32
  changes the BF16 number or the code of one in a thousand, by at most an eighth: 0.004. If numbers have a relative
  error e before they are quantised (`Case.coded`), a share of 8·e of the codes is off by an eighth: √(e/8).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.arguments import reference
from benchmarks.gpu.cases import Case
from benchmarks.gpu.sizes import Sizes
from compiler.emit.kernels import emit_kernel
from compiler.ir import Buffer
from compiler.model.ops.implementations import TRITON
from runtime import ops
from runtime.build.kernels import load_kernels
from runtime.ops.quantise import dequantise

E4M3 = torch.float8_e4m3fn
BF16_ERROR, FP32_ERROR, E4M3_ERROR = 2e-3, 1e-5, 4e-3
Arguments = tuple[Any, ...]


def describe(arguments: Arguments) -> Arguments:
    """The arguments with each tensor as a `Buffer`, as `emit_kernel` takes them."""
    return tuple(
        Buffer("argument", tuple(argument.shape), str(argument.dtype).removeprefix("torch."))
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    )


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """The folder for kernels that this process loads. It is removed at exit or by `cleanup`."""
    return tempfile.TemporaryDirectory(prefix="kernels-", ignore_cleanup_errors=True)


def emitted(op: str, arguments: Arguments, num_sms: int, implementation: str = TRITON) -> Callable[..., Any] | None:
    """The loaded kernel, or the call of a library, for these arguments; None if the reference op runs, or the library
    does not take them."""
    file = emit_kernel(op, describe(arguments), num_sms, implementation)
    if file is None or (implementation != TRITON and not file.library):
        return None
    path = Path(folder().name) / f"{file.name}_{num_sms}.py"
    path.write_text(file.source)
    kernel: Callable[..., Any] = vars(load_kernels(path))[op]
    return kernel


def copied(arguments: Arguments) -> Arguments:
    """The arguments with cloned tensors, which a kernel may change in place. Layouts are kept."""
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


def results(case: Case, function: Callable[..., Any], arguments: Arguments) -> tuple[Tensor, ...]:
    """The values that a function returns, then the arguments that it changed."""
    value = function(*arguments)
    returned = value if isinstance(value, tuple) else () if value is None else (value,)
    return (*returned, *(arguments[i] for i in case.written if arguments[i] is not None))


def exact(case: Case, arguments: Arguments) -> tuple[Tensor, ...]:
    """The expected results: in FP64, or for E4M3 arguments or results as the docstring of this module says."""
    arguments = copied(arguments)
    if case.op in _OF_FP8:
        return _OF_FP8[case.op](*arguments)
    if "quantise" in case.op or "_fp8" in case.op:
        return decoded(_without_planes(case, results(case, ops.OPS[case.op], arguments)))
    if case.op not in ops.OPS:  # the update of an optimizer, which rounds its state to its dtypes
        return results(case, reference(case.op), arguments)
    wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
    return results(case, ops.OPS[case.op], wide)


def decoded(found: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results with E4M3 dequantised. Data without following scales use the previous scales, transposed."""
    numbers: list[Tensor] = []
    scales = None
    for i, tensor in enumerate(found):
        if tensor.dtype != E4M3:
            numbers.append(tensor)
            continue
        if i + 1 < len(found) and found[i + 1].dtype == torch.float32 and found[i + 1].dim() == tensor.dim():
            scales = found[i + 1]
            numbers.append(dequantise(tensor, scales))
        else:
            assert scales is not None
            numbers.append(dequantise(tensor, scales.transpose(-1, -2)))
    return tuple(numbers)


def _without_planes(case: Case, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results, with E5M6 converted to BF16 if its codes need not be equal."""
    index = next((i for i, tensor in enumerate(found) if tensor.dtype == torch.uint8), None) if case.coded else None
    if index is None:
        return tuple(found)
    return *found[:index], ops.OPS["dequantise_e5m6"](*found[index : index + 3]), *found[index + 3 :]


def error(case: Case, dtype: torch.dtype, found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of all results, as a share of the allowed error for activations of `dtype`."""
    roundings = case.roundings if dtype == torch.bfloat16 else 0
    found = _without_planes(case, found)
    kinds = [tensor.dtype for tensor in found]
    found = decoded(found)
    assert len(found) == len(expected), (len(found), len(expected))
    worst = 0.0
    for kind, a, b in zip(kinds, found, expected, strict=True):
        assert a.shape == b.shape, (tuple(a.shape), tuple(b.shape))
        if not a.numel():
            continue
        if not a.is_floating_point():
            share = 0.0 if torch.equal(a, b) else float("inf")
        else:
            a, b = a.double(), b.double()
            distance, size = float((a - b).norm()), float(b.norm())
            few = float((b * b).norm()) / max(size, 1e-150) ** 2
            share = 0.0 if distance == 0 else distance / max(size, 1e-300) / allowed(kind, roundings, few, case.coded)
        worst = max(worst, share if share == share else float("inf"))
    return worst


def allowed(dtype: torch.dtype, roundings: int, few: float, coded: bool) -> float:
    """The allowed error. `few`: 1/√n as in the docstring of this module; `coded`: as in `Case`."""
    bf16 = BF16_ERROR * (1 + 3 * few) ** 0.5
    if dtype == E4M3:
        return (bf16 * (1 + roundings) ** 0.5 / 8) ** 0.5 if coded else E4M3_ERROR
    return bf16 * (1 + roundings) ** 0.5 if dtype == torch.bfloat16 else FP32_ERROR + bf16 * roundings**0.5


# ---------------------------------------------------------------- products of E4M3 in FP64


def _product(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor) -> tuple[Tensor, ...]:
    return (dequantise(x, xs).double() @ dequantise(w, ws).double().t(),)


def _wgrad(acc: Tensor, dy: Tensor, dys: Tensor, x: Tensor, xs: Tensor) -> tuple[Tensor, ...]:
    return (acc.double() + _product(dy, dys, x, xs)[0],)


def _grouped(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    return (ops.OPS["grouped_linear"](dequantise(x, xs).double(), dequantise(w, ws).double(), offsets),)


def _grouped_wgrad(acc: Tensor, dy: Tensor, dys: Tensor, x: Tensor, xs: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    dy_RN, x_RK = (dequantise(data, scales).double().t().contiguous() for data, scales in ((dy, dys), (x, xs)))
    return (acc.double() + ops.OPS["grouped_linear_wgrad"](dy_RN, x_RK, offsets, len(acc)),)


_OF_FP8: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "linear_fp8": _product,
    "linear_fp8_dgrad": _product,
    "linear_fp8_wgrad_": _wgrad,
    "grouped_linear_fp8": _grouped,
    "grouped_linear_fp8_dgrad": _grouped,
    "grouped_linear_fp8_wgrad_": _grouped_wgrad,
}


def moved_bytes(case: Case, sizes: Sizes, arguments: Arguments, found: Sequence[Tensor]) -> int:
    """The bytes moved: every argument read once and every result written once, unless the case sets `moved`."""
    if case.moved:
        return case.moved(sizes)
    read = [a for i, a in enumerate(arguments) if isinstance(a, Tensor) and i not in case.unread]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*read, *found))
