"""Quantising in C++ is bit-identical to the torch ops, for every number and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.native import library
from runtime.ops.quantise import dequantise
from tests.runtime.ops.cases import as_tuple

E4M3 = torch.float8_e4m3fn
FROM_WIDE = ("quantise", "quantise_columns", "quantise_both", "quantise_blocks", "quantise_requantise")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, E4M3: torch.uint8}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
some = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.usefixtures("instructions")


def same(op: str, *args: Any) -> None:
    """Assert that the op gives the same bits with the library as without it."""
    results = as_tuple(OPS[op](*args))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_functions", dict)
        wanted = as_tuple(OPS[op](*args))
    for result, expected in zip(results, wanted, strict=True):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        assert (result.is_contiguous(), result.mT.is_contiguous()) == (
            expected.is_contiguous(),
            expected.mT.is_contiguous(),
        )
        assert torch.equal(result.view(BITS[result.dtype]), expected.view(BITS[expected.dtype])), op


def everywhere(x_RC: Tensor) -> None:
    """Check all ops on x, with either rule for scales."""
    for pow2 in (False, True):
        for op in FROM_WIDE:
            same(op, x_RC, pow2)


def of_any_bits(generator: np.random.Generator, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of every magnitude, including NaN, infinities and subnormals; half of the tiles have one magnitude."""
    bits = torch.from_numpy(generator.integers(-(2**31), 2**31, (rows, columns), dtype=np.int32))
    x = bits.view(torch.float32) if dtype == torch.float32 else (bits >> 16).to(torch.int16).view(torch.bfloat16)
    usual = torch.from_numpy(generator.standard_normal((rows, columns)) * 2.0 ** generator.integers(-140, 120))
    blank = torch.from_numpy(generator.random((rows, -(-columns // 64)))).repeat_interleave(64, 1)[:, :columns]
    return torch.where(blank < 0.2, torch.zeros_like(x), torch.where(blank < 0.7, usual.to(dtype), x))


def test_the_library_computes_them(instructions: str) -> None:
    """The tests below compare two different paths."""
    functions = library.functions(instructions)
    assert {(name, dtype) for name, dtype in functions if "quantise" in name} == {
        *((name, E4M3) for name in ("requantise", "dequantise")),
        *((name, dtype) for name in FROM_WIDE if name in library.signatures() for dtype in BITS if dtype != E4M3),
    }


@DTYPES
@some
@given(st.integers(0, 2**31), st.integers(0, 300), st.integers(1, 300), st.integers(0, 9), st.integers(0, 9))
def test_any_size_and_layout(dtype: torch.dtype, seed: int, rows: int, columns: int, before: int, after: int) -> None:
    wider = of_any_bits(np.random.default_rng(seed), rows, before + columns + after, dtype)
    everywhere(wider[:, before : before + columns])


@pytest.mark.parametrize("shape", [(2, 3, 130), (3, 129, 5), (1, 256, 384)])
def test_blocks_of_experts(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    w[0, 2] = torch.nan
    for pow2 in (False, True):
        same("quantise_blocks", w, pow2)
        same("quantise_blocks", w.bfloat16(), pow2)
        same("quantise_blocks", w.transpose(1, 2), pow2)


def test_every_bf16_number() -> None:
    """Each is in a tile with other numbers of its exponent, and in one with others of its significand."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    everywhere(every.view(512, 128))
    everywhere(every.view(512, 128).t().contiguous())


def test_encoding_at_every_magnitude() -> None:
    """In tiles with scale 1, FP32 numbers up to 448 are rounded unscaled: ties, and the numbers next to them."""
    steps = np.arange(0, 0x43E00000, 2**14, dtype=np.int64)
    near = [np.clip(steps + shift, 0, 0x43E00000) for shift in (-1, 0, 1)]
    bits = torch.from_numpy(np.concatenate(near).astype(np.int32))
    bits = bits[: len(bits) // 127 * 127].view(-1, 127)
    x = torch.cat((torch.full((len(bits), 1), 448.0), bits.view(torch.float32)), 1)
    q, s = OPS["quantise"](x)
    assert (s == 1).all() and torch.equal(q.view(torch.uint8), x.to(E4M3).view(torch.uint8))
    q, s = OPS["quantise"](-x)
    assert torch.equal(q.view(torch.uint8), (-x).to(E4M3).view(torch.uint8))


@some
@given(st.integers(0, 2**31), st.integers(0, 300), st.integers(1, 300), st.booleans(), st.booleans())
def test_requantising_any_codes(seed: int, rows: int, columns: int, turned: bool, pow2: bool) -> None:
    """All codes, including NaN, and scales of any magnitude and either layout."""
    generator = np.random.default_rng(seed)
    q = torch.from_numpy(generator.integers(0, 256, (rows, columns + 2), dtype=np.uint8)).view(E4M3)[:, 1:-1]
    tiles = -(-columns // 128)
    s = torch.from_numpy(2.0 ** generator.integers(-126, 120, (rows, tiles))).float()
    s *= torch.from_numpy(1 + generator.random((rows, tiles))).float()
    s[generator.random((rows, tiles)) < 0.02] = torch.inf
    s = s.t().contiguous().t() if turned else s
    same("requantise", q, s, pow2)
    values = dequantise(q, s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_functions", dict)
        assert torch.equal(values.nan_to_num(nan=7.0), dequantise(q, s).nan_to_num(nan=7.0))


def test_operands_that_only_torch_takes() -> None:
    """An FP64 operand, or one whose rows are not contiguous, has the same result."""
    x = torch.randn(40, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for given_to in (x, x.float()[:, ::2], x.bfloat16().t()):
        everywhere(given_to)
