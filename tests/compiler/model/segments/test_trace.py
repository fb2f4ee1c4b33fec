"""Traced segments with a number of rows unknown at compile time."""

from __future__ import annotations

from compiler import ir
from compiler.model.segments.torch_ops import ops
from compiler.model.segments.trace import trace

ROWS = ir.Segment(
    kind="rows",
    function=lambda ops, params, x: (ops.linear(x, params.w),),
    params=(ir.Param("w", (3, 2), "float32"),),
    inputs=(ir.Input("x", ("R", 2), "float32"),),
    outputs=(ir.Output("y"),),
)


def test_rows_are_a_name() -> None:
    joint = trace(ROWS, ops())
    shapes = {name: tensor.shape for name, tensor in joint.tensors.items()}
    assert shapes == {
        "w": (3, 2),
        "x": ("R", 2),
        "d_y": ("R", 3),
        "y": ("R", 3),
        "d_x": ("R", 2),
        "linear_wgrad_0": (3, 2),
    }
