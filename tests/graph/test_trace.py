"""What the recording of a segment relies on: that R is not in it, and that torch's slow parts are not needed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler import ir
from compiler.graph.convert import Recording
from compiler.graph.trace import RESULTS, trace, with_rows
from compiler.graph.trace import ROWS as TWO_ROWS
from compiler.oprules import Tensor
from runtime.ops.library import ops

ROOT = Path(__file__).parents[2]
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


def test_rows_that_decide_what_is_called_are_noticed() -> None:
    def branch(ops: Any, params: Any, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = ops.linear(x, params.w)
        return (ops.add(y, y) if x.shape[0] == TWO_ROWS[0] else y,)

    with pytest.raises(AssertionError, match="the number of rows decides what is called"):
        trace(replace(ROWS, function=branch), ops())


def test_rows_that_are_a_constant_are_noticed() -> None:
    def part(ops: Any, params: Any, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (ops.split2(x, x.shape[0])[0],)

    wide = replace(ROWS, function=part, params=(), inputs=(ir.Input("x", ("R", 40), "float32"),))
    with pytest.raises(AssertionError, match="or is a constant of a call"):
        trace(wide, ops())


@pytest.mark.parametrize("shapes", [((14, 2), (22, 2)), ((7, 7), (11, 11)), ((8,), (12,)), ((11,), (7,))])
def test_an_extent_that_is_made_of_rows_is_noticed(shapes: tuple[tuple[int, ...], ...]) -> None:
    one, other = (Recording((), (Tensor(shape, "float32"),), {}, {}) for shape in shapes)
    with pytest.raises(AssertionError, match="where R is 7"):
        with_rows(one, other)


def test_results_of_torchs_own_ops_are_torchs() -> None:
    """Shapes and dtypes that are computed here equal those of real tensors; what differs is refused."""
    a, b = torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(4, 5, dtype=torch.bfloat16)
    for target, args in (
        ("aten.add.Tensor", (a, a)),
        ("aten.cat.default", ([a, b], -1)),
        ("aten.cat.default", ([b], 1)),
    ):
        namespace, name, overload = target.split(".")
        real = getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args)
        ours = RESULTS[target](*args)
        assert (ours.shape, ours.dtype) == (real.shape, real.dtype)
    for target, args in (
        ("aten.add.Tensor", (a, b)),
        ("aten.cat.default", ([a, b], 0)),
        ("aten.add.Tensor", (a, a.float())),
    ):
        with pytest.raises(AssertionError):
            RESULTS[target](*args)


def test_tracing_a_model_imports_neither_sympy_nor_torch_compile() -> None:
    code = (
        "import sys; from pathlib import Path; from dsl.load import load; from compiler.graph import emit\n"
        "from compiler.pipeline import uses; from compiler.plan import make_plan\n"
        "plan = make_plan(load(Path('specs/quickstart.dsc')), None)\n"
        "for segment in {use.segment.key: use.segment for use in uses(plan)}.values(): emit(segment, 132)\n"
        "assert 'torch' in sys.modules\n"
        "print(*sorted({'sympy', 'torch._dynamo', 'torch.fx.experimental.symbolic_shapes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "\n"
