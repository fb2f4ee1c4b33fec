"""The calls the gate takes are those that emitted segments make; operands of eight bits are data and scales."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from compiler.emit.emission import kernel_target, num_sms
from compiler.emit.kernels import emit_kernel
from compiler.emit.kernels.calls import KernelCall, TensorLayout, calls_of
from compiler.emit.segment_cache import emit
from compiler.plan.plan import make_plan
from dsl.load import load
from tests.compiler.emit.kernels.gate_launch import arguments_of
from tests.compiler.emit.kernels.shapes import UNFUSED, calls_in
from tests.specs.shipped import SPECS, shipped

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("file", ["tiny.dsc", "laptop-gqa.dsc"])
def test_calls_give_the_kernels_of_the_emitted_segments(file: str) -> None:
    spec = shipped(file)
    for segment in {use.segment.key: use.segment for use in make_plan(spec).uses}.values():
        files = [emit_kernel(call.op, call.arguments, num_sms(spec)) for call in calls_of(segment)]
        kernels = {(file.name, file.source) for file in files if file}
        assert kernels == set(emit(segment, kernel_target(spec)).kernels), segment.kind


@cache
def unfused() -> tuple[KernelCall, ...]:
    return calls_in(load(SPECS / "deepseek-v3.dsc", overrides=(UNFUSED,)))


def found(op: str) -> list[KernelCall]:
    return [call for call in unfused() if call.op == op]


@pytest.mark.parametrize(
    ("call", "layouts"),
    [
        ("quantise_blocks(bfloat16[1536, 7168], False)", {}),
        (
            "linear_fp8(float8_e4m3fn[4096, 7168], float32[4096, 56], float8_e4m3fn[576, 7168], float32[5, 56])",
            {1: TensorLayout((1, 4096))},
        ),
        (
            "linear_fp8_dgrad(float8_e4m3fn[4096, 576], float32[4096, 5], float8_e4m3fn[7168, 576], float32[56, 5])",
            {1: TensorLayout((1, 4096))},
        ),
        (
            "linear_fp8_wgrad_(float32[576, 7168], float8_e4m3fn[576, 4096], float32[576, 32],"
            " float8_e4m3fn[7168, 4096], float32[7168, 32])",
            {2: TensorLayout((1, 576)), 4: TensorLayout((1, 7168))},
        ),
        (
            "grouped_linear_fp8(float8_e4m3fn[R, 7168], float32[R, 56], float8_e4m3fn[4, 4096, 7168],"
            " float32[4, 32, 56], int32[4])",
            {1: TensorLayout((1, "R"))},
        ),
        (
            "grouped_linear_fp8_wgrad_(float32[4, 4096, 7168], float8_e4m3fn[4096, R], float32[4096, R/128],"
            " float8_e4m3fn[7168, R], float32[7168, R/128], int32[4])",
            {2: TensorLayout((1, 4096)), 4: TensorLayout((1, 7168))},
        ),
        (
            "gated_swiglu_fp8_dgrad(bfloat16[R, 2048], float8_e4m3fn[R, 4096], float32[R, 32], float32[R])",
            {2: TensorLayout((1, "R"))},
        ),
        ("requantise(float8_e4m3fn[R, 7168], float32[R, 56], True)", {1: TensorLayout((1, "R"))}),
    ],
)
def test_eight_bits(call: str, layouts: dict[int, TensorLayout]) -> None:
    (match,) = [candidate for candidate in found(call.partition("(")[0]) if str(candidate) == call]
    assert {index: layout for index, layout in enumerate(match.layouts) if layout} == layouts


def test_a_view_has_the_strides_and_offset_of_its_tensor() -> None:
    """The latent of V3 and the shared key of its heads are made by one product, [T, 512 + 64]."""
    (call,) = [call for call in found("rmsnorm") if call.arguments[0].shape == (4096, 512)]  # type: ignore[union-attr]
    assert call.layouts == (TensorLayout((576, 1)), None, None)
    attention, *_ = found("mla_attention")
    assert attention.layouts[2] == TensorLayout((576, 1), 512)
    tensor = arguments_of(attention, rows=1)[2]
    assert tensor.shape == (4096, 64) and tensor.stride() == (576, 1) and tensor.storage_offset() == 512


def test_accumulators_are_fp32() -> None:
    wgrads = [call for call in unfused() if call.op.endswith("wgrad_")]
    assert len(wgrads) > 10
    assert {call.arguments[0].dtype for call in wgrads} == {"float32"}  # type: ignore[union-attr]


@pytest.mark.parametrize(("rows", "tiles"), [(0, 0), (1, 1), (128, 1), (1000, 8)])
def test_rows(rows: int, tiles: int) -> None:
    call = found("grouped_linear_fp8_wgrad_")[0]
    _, data, scales, *_ = arguments_of(call, rows)
    assert data.shape[1] == rows and scales.shape[1] == tiles and scales.stride() == (1, scales.shape[0])


def test_need_no_torch() -> None:
    code = (
        "import sys; from compiler.emit.kernels.calls import calls;"
        "from compiler.plan.plan import make_plan; from dsl.load import load; spec = load('specs/tiny.dsc');"
        "calls(spec, (use.segment for use in make_plan(spec).uses)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
