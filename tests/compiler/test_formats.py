"""The formats that plans count against those that the runtime has: rows, tensors and their bytes."""

from __future__ import annotations

import pytest
import torch

from compiler.ir.dtypes import PackedDtype, flat_tensors, tensor_bytes
from dsl.facts.formats import E5M6, FP8, PRODUCTS, FormatFacts
from dsl.schema import BUILT_IN
from runtime.ops import elements
from runtime.ops.formats import FORMATS, pack_planes

ROWS = [form for form in (*PRODUCTS, E5M6) if form != FP8]


def test_rows_are_the_same() -> None:
    named = {"e4m3": elements.E4M3, "e2m1": elements.E2M1, "e5m6": elements.E5M6}
    assert [form.name for form in ROWS] == [*FORMATS]
    for form in ROWS:
        runtime_form = FORMATS[form.name]
        assert (named[form.element], form.tile, form.weight_tile, form.scale) == (
            *(runtime_form.element, runtime_form.tile, runtime_form.weight_tile, runtime_form.scale),
        )
        assert form.tensor_scale == (runtime_form.scale == "e4m3")


@pytest.mark.parametrize("form", ROWS, ids=lambda form: form.name)
@pytest.mark.parametrize("shape", [(3, 40), (65, 129), (2, 33, 47)])
def test_planned_tensors_equal_those_of_the_runtime(form: FormatFacts, shape: tuple[int, ...]) -> None:
    for tile, flags in ((form.tile, ()), (form.weight_tile, ())):
        dtype = str(PackedDtype(form.name, *tile, flags))
        tensors = pack_planes(torch.randn(shape), FORMATS[form.name], tile)
        planned = flat_tensors(shape, dtype)
        assert [(tensor.shape, tensor.dtype) for tensor in planned] == [
            (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors
        ]
        assert tensor_bytes(shape, dtype) == sum(tensor.nbytes for tensor in tensors)


def test_columns_are_transposed() -> None:
    dtype = str(PackedDtype("nvfp4", 16, 1, ("columns", "hadamard", "stochastic")))
    assert dtype == "nvfp4[16x1 columns hadamard stochastic]"
    tensors = [(tensor.suffix, tensor.shape) for tensor in flat_tensors(("R", 48), dtype)]
    assert tensors == [("", (48, "R/2")), ("_scales", (48, "R/16")), ("_scale", ())]


def test_built_in_recipes_have_formats() -> None:
    from dsl.schema.precision import format_of

    forms = {name: format_of(precision) for name, precision in BUILT_IN.items()}
    assert {name: form.name for name, form in forms.items() if form} == {
        "fp8_block": "fp8",
        "mxfp8": "mxfp8",
        "nvfp4": "nvfp4",
    }
