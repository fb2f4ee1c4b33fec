"""Sums, and joining and splitting columns: torch's own operations. The halves of `split2` are views."""

from __future__ import annotations

from compiler.model.ops.rule import Extent, Gradient, Rule, Tensor, elementwise


def _infer_add(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    assert a == b, (a, b)
    return (a,)


def _infer_cat2(a_TM: Tensor, b_TN: Tensor) -> tuple[Tensor, ...]:
    (T, M), (_, N) = a_TM.shape, b_TN.shape
    return (Tensor((T, M + N), a_TM.dtype),)


def _infer_split2(x_TM: Tensor, at: int) -> tuple[Tensor, ...]:
    T, M = x_TM.shape
    assert 0 < at < M, (x_TM, at)
    return Tensor((T, at), x_TM.dtype), Tensor((T, M - at), x_TM.dtype)


ADD = Rule(
    args=("a", "b"),
    outputs=("y",),
    infer=_infer_add,
    kernel_class="add",
    flops=elementwise("a", 1),
    dgrad=Gradient("", reads=("d_y",), gives=("a", "b")),
)

CAT2 = Rule(
    args=("a", "b"),
    outputs=("y",),
    infer=_infer_cat2,
    kernel_class="copy",
    dgrad=Gradient("split2", reads=("d_y", Extent("a", 1)), gives=("a", "b")),
)

SPLIT2 = Rule(
    args=("x", "at"),
    outputs=("a", "b"),
    infer=_infer_split2,
    kernel_class="copy",
    differentiable=("a", "b"),
    dgrad=Gradient("cat2", reads=("d_a", "d_b"), gives=("x",)),
    view=True,
)

RULES = {"add": ADD, "cat2": CAT2, "split2": SPLIT2}
