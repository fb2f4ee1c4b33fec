"""The largest logit of each head against brute force: one product for each query and visible key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.causal import BLOCK_ROWS
from tests.runtime.ops import cases
from tests.runtime.ops.cases import Args, Source
from tests.runtime.ops.references_attention import turn
from tests.runtime.ops.test_sizes import SEED, few

CASES = {"mla_attention": cases.mla_attention, "gqa_attention": cases.gqa_attention}
CASES |= {"bounded_attention": cases.bounded_attention}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 2e-5}  # BF16 is widened first


def queries_and_keys(op: str, args: Args) -> tuple[Tensor, Tensor]:
    """Rotated q_BQHC and k_BSHC. Rotated by positions in sequences, since logits only depend on distances."""
    if op == "mla_attention":
        q, kv, k_rope, S, H, nope, rope, _, theta, *_ = args
        kv_BSHW = kv.view(-1, S, H, kv.shape[1] // H)
        shared_BS1R = turn(k_rope.view(-1, S, 1, rope), theta)
        k_BSHC = torch.cat([kv_BSHW[..., :nope], shared_BS1R.expand(-1, -1, H, -1)], -1)
        q_BQHC = q.view(len(kv_BSHW), -1, H, nope + rope)
        return torch.cat([q_BQHC[..., :nope], turn(q_BQHC[..., nope:], theta)], -1), k_BSHC
    q, k, *options = args
    S, H, G, theta = options[-8:-4] if op == "bounded_attention" else options[-6:-2]
    k_BSGC = turn(k.view(-1, S, G, k.shape[1] // G), theta)
    q_BQHC = q.view(len(k_BSGC), -1, H, q.shape[1] // H)
    return turn(q_BQHC, theta), k_BSGC.repeat_interleave(H // G, dim=2)


def brute_force(op: str, args: Args) -> Tensor:
    """The largest logit of each head, H, in float64."""
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    q_BQHC, k_BSHC = queries_and_keys(op, wide)
    window = args[-4] if op == "bounded_attention" else 0
    (B, Q, H, C), S = q_BQHC.shape, k_BSHC.shape[1]
    starts, positions = args[-2:]
    largest = [-torch.inf] * H
    for b in range(B):
        for query in range(Q):
            position = query if positions is None else int(positions.view(B, Q)[b, query])
            first = 0 if starts is None else int(starts.view(B, Q)[b, query])
            first = max(first, position + 1 - window) if window else first
            logits_KH = torch.einsum("hc,khc->kh", q_BQHC[b, query], k_BSHC[b, first : position + 1]) / C**0.5
            largest = [max(pair) for pair in zip(largest, logits_KH.amax(0).tolist(), strict=True)]
    assert S >= Q
    return torch.tensor(largest, dtype=torch.float64)


def check(op: str, args: Args) -> None:
    """Assert that the largest logits are right, and that other results are bit-identical to the op without peaks."""
    plain, (o, peaks_H, lse) = OPS[op](*args), OPS[f"{op}_peaks"](*args)
    assert torch.equal(o, plain[0]) and torch.equal(lse, plain[1])
    assert peaks_H.dtype == lse.dtype
    tolerance = TOLERANCE[args[0].dtype]
    torch.testing.assert_close(peaks_H.double(), brute_force(op, args), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("some", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", CASES)
def test_peaks_equal_brute_force(op: str, dtype: torch.dtype, some: bool, documents: bool) -> None:
    check(op, CASES[op](Source(dtype, 0), documents=documents, some=some))


@few
@given(SEED, st.sampled_from([*CASES]), st.integers(1, 3), st.integers(4, 40), st.booleans(), st.booleans())
def test_peaks_of_sequences_of_any_length(seed: int, op: str, B: int, S: int, documents: bool, some: bool) -> None:
    check(op, CASES[op](Source(torch.float64, seed), B, S, documents=documents, some=some))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("op", CASES)
def test_peaks_over_several_blocks(op: str, dtype: torch.dtype) -> None:
    check(op, CASES[op](Source(dtype, 3), 2, 2 * BLOCK_ROWS + 3))


@pytest.mark.parametrize("bounds", [(0, 0.0, True), (3, 0.0, False), (0, 0.1, True), (1, 0.1, False)], ids=str)
def test_softcaps_and_sinks_leave_peaks_as_they_are(bounds: tuple[int, float, bool]) -> None:
    """A window changes peaks: hidden keys do not count."""
    check("bounded_attention", cases.bounded_attention(Source(torch.float64, 5), 2, 12, 2, 2, 4, 1e4, *bounds))


@pytest.mark.parametrize("op", CASES)
def test_logits_that_are_all_negative_have_a_negative_peak(op: str) -> None:
    """If a hidden key or a row of padding counted, its logit would be 0."""
    q, k, *options = CASES[op](Source(torch.float32, 0), 1, 33)
    args: list[Any] = [torch.ones_like(q), -torch.ones_like(k), *options]
    if op == "mla_attention":
        args[2] = -torch.ones_like(args[2])
        args[8] = 0.0
    else:
        args[-5 if op == "bounded_attention" else -3] = 0.0
    peaks_H = OPS[f"{op}_peaks"](*args)[1]
    assert (peaks_H < -1).all()
    check(op, tuple(args))
