"""Checks of the kernels of the gated delta rule in Triton's interpreter: against its ops in FP64.

An error of a row passes through a system of equations and through all later states. What it becomes there follows from
the op itself, in FP64: how far its results move if its arguments do, at random and by a unit of their dtype. That is
what rounding each argument once would cost. Kernels also round what lies between their launches, so a row of a head may
be several times as far off. Both are measured as lengths of rows. Decays enter as differences of their sums over a
chunk, and their gradients are such sums, so a unit of theirs is one of a sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiler.model.ops import RULES
from runtime import ops
from runtime.ops.delta_rule import CHUNK
from tests.compiler.emit.kernels.interpreted import STORED, U, random, run

CHECKED = ("delta_rule", "delta_rule_dgrad")
MOVES = 12  # of the arguments, at random
TIMES = 12.0  # how many of these moves a row may be off


class Case(NamedTuple):
    """Sequences, their rows, heads of queries and keys, heads of values for each, widths of a key and of a value."""

    sequences: int = 1
    rows: int = 9
    key_heads: int = 1
    share: int = 2
    key: int = 20
    value: int = 12
    by_column: bool = False
    begins: tuple[int, ...] = ()  # where documents begin, beside 0
    decay: float = 0.1  # of the logarithms of decays, their scale
    logit: float = 0.0  # added to the logits of β


def operands(dtype: torch.dtype, case: Case) -> tuple[Any, ...]:
    """q, k and v are views of columns, as in a layer."""
    B, S, G, share, K, V, by_column, begins, strength, shift = case
    T, H = B * S, G * share
    qkv = random(T, 2 * G * K + H * V, dtype=dtype, seed=1)
    beta = random(T, H, seed=2) + shift
    decay = -random(T, H * (K if by_column else 1), seed=3).square() * strength
    starts = None
    if begins:
        place = torch.arange(S)
        starts = torch.stack([torch.where(place >= begin, begin, 0) for begin in (0, *begins)]).amax(0)
        starts = starts.to(torch.int32).repeat(B)
    return *qkv.split([G * K, G * K, H * V], dim=1), beta, decay, S, G, starts


def gradient_operands(dtype: torch.dtype, case: Case) -> tuple[Any, ...]:
    args = operands(dtype, case)
    return random(*args[2].shape, dtype=dtype, seed=4), *args


def wide(args: tuple[Any, ...]) -> list[Any]:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]


def tuple_of(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def lengths(x: Tensor, heads: int) -> Tensor:
    """The length of each row of each head."""
    return x.double().unflatten(1, (heads, -1)).norm(dim=-1)


def of_chunks(x: Tensor) -> Tensor:
    """For each element the sum of the magnitudes in its column, over its chunk of 64 rows and the one before."""
    of_rows = [x[max(0, row // CHUNK - 1) * CHUNK :][: 2 * CHUNK].double().abs().sum(0) for row in range(len(x))]
    return torch.stack(of_rows) if of_rows else x.double()


def moves(op: str, args: tuple[Any, ...], exact: tuple[Tensor, ...], heads: tuple[int, ...]) -> list[Tensor]:
    """The root mean square of the lengths by which rows move, for each result."""
    generator = torch.Generator().manual_seed(11)

    def moved(x: Any, name: str) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        size = U * of_chunks(x) if name == "decay" else max(STORED[x.dtype], 4 * U) * x.double().abs()
        return x.double() + size * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)

    names = RULES["delta_rule"].args if op == "delta_rule" else ("do", *RULES["delta_rule"].args)
    squares = [torch.zeros_like(lengths(x, count)) for x, count in zip(exact, heads, strict=True)]
    for _ in range(MOVES):
        results = tuple_of(ops.OPS[op](*map(moved, args, names)))
        for square, x, y, count in zip(squares, results, exact, heads, strict=True):
            square += lengths(x - y, count).square()
    return [(square / MOVES).sqrt() for square in squares]


def passed(args: tuple[Any, ...], gradients: tuple[Tensor, ...], heads: int) -> Tensor:
    """The size of what a row of a head adds to the loss, as it is read and as it changes the state. The gradient of a
    decay is a difference of sums of these."""
    do, *given = wide(args)
    o, v, dv = ops.OPS["delta_rule"](*given), given[2], gradients[2]
    return lengths(do, heads) * lengths(o, heads) + lengths(dv, heads) * lengths(v, heads)


def check(op: str, args: tuple[Any, ...], case: Case) -> float:
    """Results are as near to those in FP64 as roundings allow. Returns how near."""
    H = case.key_heads * case.share
    heads = (H,) if op == "delta_rule" else (case.key_heads, case.key_heads, H, H, H)
    found, exact = tuple_of(run(op, *args)), tuple_of(ops.OPS[op](*wide(args)))
    given = args[1:6] if len(heads) > 1 else args[2:3]
    worst = 0.0
    for x, y, of, count, argument in zip(found, exact, moves(op, args, exact, heads), heads, given, strict=True):
        assert x.dtype == argument.dtype and x.shape == y.shape and x.is_contiguous()
        bound = TIMES * of + STORED[x.dtype] * lengths(y, count) + 1e-30
        if argument is args[-4]:  # decays
            bound += 16 * U * of_chunks(passed(args, exact, count))
        worst = max(worst, float((lengths(x - y, count) / bound).amax()) if x.numel() else 0.0)
        if y.numel() > 1000:  # the bound tells a result from none
            assert bound.norm() < (0.5 if args[0].dtype == torch.bfloat16 else 0.01) * y.norm()
    assert worst <= 1, f"{worst:.3g} times the bound"
    return worst


def near(dtype: torch.dtype, values: dict[str, Any]) -> None:
    """Both ops."""
    case = Case(**values)
    check("delta_rule", operands(dtype, case), case)
    check("delta_rule_dgrad", gradient_operands(dtype, case), case)


def results(dtype: torch.dtype, case: Case) -> list[Tensor]:
    args, gradient_args = operands(dtype, case), gradient_operands(dtype, case)
    return [run("delta_rule", *args), *run("delta_rule_dgrad", *gradient_args)]


def bits_are_equal(dtype: torch.dtype, values: dict[str, Any]) -> None:
    """From run to run."""
    case = Case(**values)
    for again, first in zip(results(dtype, case), results(dtype, case), strict=True):
        assert torch.equal(again, first)


def no_bit_crosses_a_border(dtype: torch.dtype, values: dict[str, Any]) -> None:
    """Rows of other documents and sequences change no bit of the second document of the first sequence."""
    case = Case(**values)
    first, end = case.begins[0], case.begins[1]
    for op, args in (("delta_rule", operands(dtype, case)), ("delta_rule_dgrad", gradient_operands(dtype, case))):
        others = [x.clone() if isinstance(x, Tensor) else x for x in args]
        for x in others:
            if isinstance(x, Tensor) and x.is_floating_point():
                x[:first], x[end:] = -3, -3
        for x, y in zip(tuple_of(run(op, *args)), tuple_of(run(op, *others)), strict=True):
            assert torch.equal(x[first:end], y[first:end])


def nothing(by_column: bool) -> None:
    """No rows."""
    case = Case(sequences=0, by_column=by_column)
    for x in results(torch.bfloat16, case):
        assert x.shape[0] == 0


def a_lost_state_shows(dtype: torch.dtype, values: dict[str, Any]) -> None:
    """Results of a kernel that forgets the state at one row, and so reads other documents, exceed the bound."""
    case = Case(**values)
    *args, S, G, _ = operands(dtype, case)
    starts = torch.where(torch.arange(S) >= S - 1, S - 1, 0).to(torch.int32)
    exact = tuple_of(ops.OPS["delta_rule"](*wide(tuple(args)), S, G))
    (bound,) = moves("delta_rule", (*args, S, G), exact, (case.key_heads * case.share,))
    found = run("delta_rule", *args, S, G, starts)
    off = lengths(found - exact[0], case.key_heads * case.share)
    assert (off[-1] > 4 * TIMES * bound[-1]).all() and (off[:-1] <= TIMES * bound[:-1]).all()
