"""Kernels of the quickstart and of DeepSeek-V3 pass the gate for sm_90, and faulty ones do not. All: `make kernels`."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.emit.kernels import KERNELS, KernelFile, emit_kernel
from compiler.emit.kernels.calls import KernelCall
from tests.compiler.emit.kernels.gate import SM_90, SM_100, TARGETS, Gate, Verdict, occupancy
from tests.compiler.emit.kernels.gate_launch import arguments_of
from tests.compiler.emit.kernels.shapes import SAMPLE, VARIANTS, kernel_calls, rows_of

HERE = Path(__file__).parent


def distinct() -> dict[str, tuple[KernelCall, int]]:
    """The calls of the sample by a name of the first variant that makes them."""
    name_of: dict[tuple[KernelCall, int], str] = {}
    for file, run, values in SAMPLE:
        for index, call in enumerate(kernel_calls(file, run, values)):
            name_of.setdefault(call, "-".join([file.removesuffix(".dsc"), *values, str(index), call[0].op]))
    return {name: call for call, name in name_of.items()}


CALLS = distinct()
GATE = Gate()


@pytest.mark.parametrize("name", CALLS)
def test_passes(name: str) -> None:
    call, sms = CALLS[name]
    file = emit_kernel(call.op, call.arguments, sms)
    if file is None:
        return  # at these sizes the reference op runs
    for rows in rows_of(call) if name.startswith("quickstart") else rows_of(call)[:1]:
        verdicts = GATE.verdicts(file, call.op, arguments_of(call, rows))
        assert verdicts
        for verdict in verdicts:
            assert not verdict.failures, verdict
            assert verdict.registers > 0 and verdict.programs > 0


def test_every_kernel_is_called() -> None:
    missing = set(KERNELS)
    for variant in sorted(VARIANTS, key=lambda variant: variant[0] != "deepseek-v3.dsc"):
        for call, sms in kernel_calls(*variant) if missing else ():
            if call.op in missing and emit_kernel(call.op, call.arguments, sms):
                missing.remove(call.op)
    assert not missing, "ops that no spec calls; or tests.compiler.emit.kernels.shapes.NOT_IN_A_SPEC says why"


def test_every_kernel_is_checked() -> None:
    """The checks of the families together name every kernel as compared with its op in the interpreter."""
    checked: set[str] = set()
    for path in HERE.glob("checks_*.py"):
        assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        named = [node.value for node in assigned if ast.unparse(node.targets[0]) == "CHECKED"]
        assert len(named) == 1, f"{path.name} does not say what it checks"
        checked |= set(ast.literal_eval(named[0]))
    assert checked == set(KERNELS)


# ---------------------------------------------------------------- faults

STREAMS = {"_copy": ("ld.global.L1::evict_first", "st.global.cs")}
SOURCE = (HERE / "gated.py").read_text()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def arguments(op: str, dtype: str) -> tuple[Any, ...]:
    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if op == "copy":
        return tuple(tensor(4096, 4096, dtype=DTYPES[dtype]) for _ in range(2))
    return (*(tensor(4096, 4096, dtype=DTYPES[dtype]) for _ in range(2)), tensor(4096, 4096, dtype=torch.bfloat16))


def judged(op: str, dtype: str, source: str = SOURCE, target: Any = SM_90) -> Verdict:
    (verdict,) = Gate(target).verdicts(KernelFile("gated", source), op, arguments(op, dtype), STREAMS)
    return verdict


@pytest.mark.parametrize(
    ("op", "dtype", "instructions", "load_bytes"),
    [
        ("multiply", "bf16", {"HGMMA", "LDGSTS"}, 16),
        ("multiply_tiles", "bf16", {"HGMMA", "UTMALDG", "UTMASTG"}, 0),
        ("multiply_tiles", "fp8", {"QGMMA", "UTMALDG", "UTMASTG"}, 0),
        ("copy", "fp32", set(), 16),
        ("copy", "bf16", set(), 16),
    ],
)
def test_correct_kernels_pass(op: str, dtype: str, instructions: set[str], load_bytes: int) -> None:
    verdict = judged(op, dtype)
    assert not verdict.failures and set(verdict.instructions) == instructions and verdict.load_bytes == load_bytes


def test_a_change_that_idles_the_tensor_cores_shows() -> None:
    """Sums that are touched in every round wait for the product; what runs to the end in the tensor cores does not."""
    promoted = "total += tl.dot("
    assert judged("multiply", "bf16").idle == judged("copy", "bf16").idle == 0
    assert judged("multiply_tiles", "bf16").idle == 0 < judged("multiply_tiles", "fp8").idle
    touched = SOURCE.replace(promoted, "total = total * 0.5 + tl.dot(")
    assert judged("multiply_tiles", "bf16", touched).idle > judged("multiply_tiles", "bf16").idle
    with_root = SOURCE.replace(promoted, "total = tl.sqrt(total) + tl.dot(")
    assert judged("multiply_tiles", "fp8", with_root).idle > judged("multiply_tiles", "fp8").idle


def test_other_targets() -> None:
    verdicts = {target.name: judged("multiply", "bf16", target=target) for target in TARGETS}
    assert not any(verdict.failures for verdict in verdicts.values())
    assert "UTCHMMA" in verdicts["sm_100"].instructions and "HMMA" in verdicts["sm_80"].instructions
    assert "UTCQMMA" in judged("multiply_tiles", "fp8", target=SM_100).instructions
    for target in TARGETS:
        file = KernelFile("gated", SOURCE)
        eight = Gate(target).verdicts(file, "multiply_tiles", arguments("multiply_tiles", "fp8"), {})
        assert len(eight) == target.eight_bits


@pytest.mark.parametrize(
    ("op", "dtype", "old", "new", "failure"),
    [
        # 128 × 256 sums in four warps: the sums alone take 256 registers per thread.
        ("multiply", "bf16", '"BLOCK_K": 64, "num_warps": 8', '"BLOCK_K": 64, "num_warps": 4', "spills"),
        ("multiply", "bf16", '64, "num_warps": 8, "num_stages": 3', '64, "num_warps": 8, "num_stages": 6', "of shared"),
        # Fewer than 64 rows do not give a warpgroup product.
        ("multiply", "bf16", '"BLOCK_M": 128, "BLOCK_N": 256', '"BLOCK_M": 32, "BLOCK_N": 128', "HMMA"),
        ("multiply_tiles", "fp8", '"BLOCK_M": 128, "BLOCK_N": 128', '"BLOCK_M": 32, "BLOCK_N": 128', "not ['QGMMA']"),
        ("multiply", "fp32", 'input_precision="ieee"', 'input_precision="tf32"', "rounded to TF32"),
        ("multiply", "fp32", 'input_precision="ieee"', 'input_precision="tf32x3"', "rounded to TF32"),
        ("multiply_tiles", "fp8", "total += tl.dot(a.load([m, first]), b.load([n, first]).T)",
         "total = tl.dot(a.load([m, first]), b.load([n, first]).T, total)", "over more than 128"),
        ("multiply_tiles", "fp8", '"BLOCK_K": 128, "num_warps": 8, "num_stages": 3',
         '"BLOCK_K": 256, "num_warps": 8, "num_stages": 2', "over more than 128"),
        ("multiply_tiles", "bf16", "c.store([m, n], total.to(c.dtype))",
         "at = (m + tl.arange(0, BLOCK_M)[:, None]) * N + n + tl.arange(0, BLOCK_N)[None, :]\n"
         "    tl.store(c_MN + at, total.to(c.dtype))", "takes 3 descriptors and copies by 2"),
        # Triton silently does not specialise eight warps.
        ("multiply_tiles", "bf16", "SPECIALISED = False", "SPECIALISED = True", "has no USETMAXREG"),
        ("copy", "bf16", ', eviction_policy="evict_first"', "", "has no ld.global.L1::evict_first"),
        ("copy", "bf16", ', cache_modifier=".cs"', "", "has no st.global.cs"),
        ("copy", "bf16", 'eviction_policy="evict_first"', 'eviction_policy="evict_first", cache_modifier=".cg"',
         "does not compile: Modifier '.evict_first' cannot be combined with modifier '.cg'"),
        ("copy", "bf16", '"BLOCK": 1024', '"BLOCK": 256', "loads 4 bytes at a time"),
        ("copy", "bf16", "x + i, mask=i < size", "x + i, mask=i < size - 1", "loads 2 bytes at a time"),
    ],
)  # fmt: skip
def test_refuses(op: str, dtype: str, old: str, new: str, failure: str) -> None:
    assert SOURCE.count(old) == 1
    verdict = judged(op, dtype, SOURCE.replace(old, new))
    assert any(failure in text for text in verdict.failures), verdict


def test_shared_memory_is_limited_by_the_target() -> None:
    tile = '"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 16, "num_warps": 4'
    source = SOURCE.replace('"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8', tile)
    enough = judged("multiply", "bf16", source)
    size = enough.shared_bytes
    assert not enough.failures and size > 4096
    assert not judged("multiply", "bf16", source, replace(SM_90, shared_bytes=size)).failures
    too_little = judged("multiply", "bf16", source, replace(SM_90, shared_bytes=4096))
    assert too_little.failures == (f"wants {size} bytes of shared memory of 4096",)


def test_occupancy() -> None:
    """Occupancies are those of the CUDA occupancy calculator."""
    assert occupancy(SM_90, registers=32, shared_bytes=0, threads=128) == 16
    assert occupancy(SM_90, registers=128, shared_bytes=0, threads=256) == 2
    assert occupancy(SM_90, registers=168, shared_bytes=196608, threads=384) == 1
    assert occupancy(SM_90, registers=24, shared_bytes=32768, threads=64) == 6
    assert occupancy(SM_90, registers=16, shared_bytes=0, threads=32) == 32
