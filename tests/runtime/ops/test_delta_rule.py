"""Linear attention for any sizes and several chunks, with decays of any strength, and token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ops import OPS
from runtime.ops.delta_rule import CHUNK, continued_delta_rule
from tests.runtime.ops import cases, references
from tests.runtime.ops.cases import Source
from tests.runtime.ops.test_ops import assert_close, compare

few = settings(max_examples=25)
SEED = st.integers(0, 2**31)


@few
@given(SEED, st.integers(1, 3), st.integers(1, 20), st.integers(1, 2), st.integers(1, 3), st.booleans(), st.booleans())
def test_any_size(seed: int, B: int, S: int, G: int, r: int, channels: bool, documents: bool) -> None:
    args = cases.delta_rule(Source(torch.float64, seed), B, S, G, r, 3, 2, channels, documents)
    compare("delta_rule", args, torch.float64)


@few
@given(SEED, st.integers(1, 3), st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_convolutions(seed: int, B: int, S: int, N: int, J: int, documents: bool) -> None:
    """A sequence may be shorter than the taps."""
    compare("convolve", cases.convolve(Source(torch.float64, seed), B, S, N, J, documents), torch.float64)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("sequence", [CHUNK, 2 * CHUNK + 3])
def test_several_chunks(sequence: int, channels: bool, documents: bool) -> None:
    args = cases.delta_rule(Source(torch.float64, 3), 2, sequence, 1, 2, 4, 3, channels, documents)
    compare("delta_rule", args, torch.float64)


@pytest.mark.parametrize("channels", [False, True])
def test_strong_decays_do_not_overflow(channels: bool) -> None:
    """States decay by e^-1000 in a chunk, at some tokens hardly. The FP32 error is that of sums near 1000."""
    *tensors, decay, S, G, _ = cases.delta_rule(Source(torch.float64, 4), 1, CHUNK + 5, channels=channels)
    decay = torch.where(decay < -1, 20 * decay, 0.01 * decay)
    exact = references.delta_rule(*tensors, decay, S, G)
    assert_close(OPS["delta_rule"](*tensors, decay, S, G), exact, 1e-12)
    narrow = [tensor.float() for tensor in (*tensors, decay)]
    assert_close(OPS["delta_rule"](*narrow, S, G), exact, 1e-4)
    gradients = OPS["delta_rule_dgrad"](torch.ones_like(narrow[2]), *narrow, S, G)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("split", [(1,) * 9, (4, 5), (8, 1)])
def test_states_continue_token_by_token(split: tuple[int, ...]) -> None:
    *tensors, S, G, _ = cases.delta_rule(Source(torch.float64, 5), 1, sum(split))
    state, outputs = None, []
    for rows in zip(*(tensor.split(split) for tensor in tensors), strict=True):
        q, k, v, beta, decay = rows
        o, state = continued_delta_rule(q, k, v, beta, decay, G, state)
        outputs.append(o)
    assert_close(torch.cat(outputs), OPS["delta_rule"](*tensors, S, G), 1e-13)


@pytest.mark.parametrize("op", ["delta_rule", "convolve"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_other_documents_change_no_bit(op: str, dtype: torch.dtype) -> None:
    args = cases.widened(
        op,
        {"delta_rule": cases.delta_rule, "convolve": cases.convolve}[op](Source(dtype, 0), B=1, S=50, documents=True),
    )
    begins = sorted({*args[-1].tolist()})
    first, end = begins[1], [*begins, 50][2]
    changed = [x.clone() if isinstance(x, torch.Tensor) and x.dim() == 2 and len(x) == 50 else x for x in args]
    for x in changed:
        if isinstance(x, torch.Tensor) and x.dim() == 2 and len(x) == 50:
            x[:first], x[end:] = -3, -3
    before, after = (cases.as_tuple(OPS[op](*operands))[0][first:end] for operands in (args, changed))
    assert torch.equal(before, after)
