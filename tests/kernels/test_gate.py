"""Every kernel of the quickstart and of DeepSeek-V3 compiles for sm_90 and passes the gate; faulty ones do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiler.kernels import KERNELS, emit_kernel
from compiler.kernels.gate import SHARED_BYTES, gate
from tests.kernels.shapes import QUICKSTART, V3, Call, calls, describe

NUM_SMS = 132
MODELS = {"quickstart": QUICKSTART, "v3": V3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

CALLS: dict[str, Call] = {
    f"{model}-{dtype}-{index}-{op}": (op, arguments)
    for model, shapes in MODELS.items()
    for dtype in DTYPES
    for index, (op, arguments) in enumerate(calls(shapes, DTYPES[dtype]))
}
BF16_FORWARD = next(call for name, call in CALLS.items() if name.startswith("v3-bf16") and call[0] == "grouped_linear")
FP32_FORWARD = next(call for name, call in CALLS.items() if name.startswith("v3-fp32") and call[0] == "grouped_linear")


def test_every_kernel_is_among_the_calls() -> None:
    assert {op for op, _ in CALLS.values()} == set(KERNELS)


@pytest.mark.parametrize("name", CALLS)
def test_passes(name: str) -> None:
    op, arguments = CALLS[name]
    file = emit_kernel(op, describe(arguments), NUM_SMS)
    assert file
    verdicts = gate(file, op, arguments)
    assert verdicts
    for verdict in verdicts:
        assert not verdict.failures, verdict
        assert verdict.registers > 0 and verdict.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(
    ("call", "old", "new", "failure"),
    [
        # 128 × 256 sums in four warps: 256 registers a thread for the sums alone.
        (BF16_FORWARD, "'BLOCK_IN': 64, 'num_warps': 8", "'BLOCK_IN': 64, 'num_warps': 4", "spills"),
        (BF16_FORWARD, "'num_stages': 4", "'num_stages': 6", "of shared memory"),
        # Fewer than 64 rows are no warpgroup product.
        (BF16_FORWARD, "'BLOCK_R': 128, 'BLOCK_OUT': 256", "'BLOCK_R': 32, 'BLOCK_OUT': 128", "HMMA"),
        (FP32_FORWARD, 'input_precision="ieee"', 'input_precision="tf32"', "multiplies f32 with"),
    ],
    ids=["spills", "shared", "hmma", "tf32"],
)
def test_refuses(call: Call, old: str, new: str, failure: str) -> None:
    op, arguments = call
    file = emit_kernel(op, describe(arguments), NUM_SMS)
    assert file and old in file.source
    verdicts = gate(replace(file, source=file.source.replace(old, new)), op, arguments)
    failures = [text for verdict in verdicts for text in verdict.failures]
    assert any(failure in text for text in failures), verdicts
