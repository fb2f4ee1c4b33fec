"""A row of an op has the same bits whatever rows are beside it, which generation relies on."""

from __future__ import annotations

from collections import Counter
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.causal import angles
from runtime.ops.native import ops as native
from runtime.rl.next_tokens import Next, NextTokens

DTYPES = (torch.float32, torch.bfloat16)
ROWS = 70


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def of_rows(name: str, x: Tensor, width: int) -> Tensor:
    """An op on only the rows of x; its other arguments are drawn again, with the same values each time."""
    torch.manual_seed(1)
    N = x.shape[1]
    if name == "linear":
        return OPS["linear"](x, random(width, N, dtype=x.dtype))
    if name == "rmsnorm":
        return OPS["rmsnorm"](x, random(N, dtype=x.dtype), 1e-6)[0]
    if name in ("sigmoid", "softmax"):
        return OPS["route"](x, random(N), name == "softmax", 1, 1, 2, True, 2.5)[0]
    if name == "cross_entropy":
        return OPS["cross_entropy"](x, torch.zeros(len(x), dtype=torch.int64))[1]
    return OPS[name](x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["linear", "rmsnorm", "swiglu", "sqrt_softplus", "sigmoid", "softmax", "cross_entropy"])
@settings(max_examples=40, deadline=None)
@given(st.integers(0, ROWS - 1), st.integers(1, 20), st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_rows_have_the_same_bits_alone(
    op: str, dtype: torch.dtype, first: int, num: int, half: int, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x = random(ROWS, 2 * half, dtype=torch.float32 if op in ("sigmoid", "softmax", "sqrt_softplus") else dtype)
    rows = slice(first, first + num)
    assert torch.equal(of_rows(op, x, width)[rows], of_rows(op, x[rows], width))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 100),
    st.integers(0, 40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 2**32 - 1),
)
def test_last_queries(dtype: torch.dtype, end: int, more: int, heads: int, share: int, half: int, seed: int) -> None:
    """Attention of the last queries to the keys so far is bit-identical to that of the whole sequence."""
    torch.manual_seed(seed)
    S, H, C = end + more, heads * share, 2 * half
    q, k, v = (random(2 * S, n * C, dtype=dtype) for n in (H, heads, heads))
    angles_Sr = angles(S, C, 1e4, dtype, q.device)
    num, second = 1 + seed % end, slice(S, S + end)
    rows = slice(S + end - num, S + end)
    expected = OPS["gqa_attention"](q, k, v, S, H, heads, 1e4)[0]
    output = native.gqa_attention(q[rows], k[second], v[second], angles_Sr[:end], H, heads, None)[0]
    assert torch.equal(output, expected[rows])
    q, kv, k_rope = random(2 * S, H * 3 * half, dtype=dtype), random(2 * S, H * 2 * half, dtype=dtype), k[:, :C]
    expected = OPS["mla_attention"](q, kv, k_rope, S, H, half, C, half, 1e4)[0]
    output = native.mla_attention(q[rows], kv[second], k_rope[second], angles_Sr[:end], H, half, half, None)[0]
    assert torch.equal(output, expected[rows])


@pytest.mark.parametrize("op", ["gqa_attention", "mla_attention"])
def test_attention_that_a_model_clips_generates_alike(op: str) -> None:
    """Ops that also return the largest logits, for `qk_clip`, have the same outputs as those that do not."""
    torch.manual_seed(0)
    S, H = 6, 4
    widths, sizes = {
        "gqa_attention": ((H * 8, 2 * 8, 2 * 8), (S, H, 2, 1e4)),
        "mla_attention": ((H * 12, H * 16, 4), (S, H, 8, 4, 8, 1e4)),
    }[op]
    inputs = [random(S, width) for width in widths]
    outputs = []
    for name in (op, f"{op}_peaks"):
        tokens = NextTokens(MagicMock(), 0, slots=1, sequence=S, next=[Next(slot=0, start=0, count=S, sequence=0)])
        outputs.append(tokens._functions()[name](*inputs, *sizes))
    (plain, nothing), (clipped, peaks_H, no_more) = outputs
    assert torch.equal(plain, clipped) and nothing is None is no_more
    assert torch.equal(plain, OPS[op](*inputs, *sizes)[0])
    assert peaks_H.shape == (H,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spans_have_the_bits_of_whole_sequences(dtype: torch.dtype) -> None:
    """Attention of some tokens of three sequences, in slots of another order, equals that of each sequence."""
    S, H, G, C, nope, rope, value = 21, 4, 2, 8, 6, 4, 10
    torch.manual_seed(0)
    spans = [(2, 0, 13), (0, 9, 1), (1, 4, 3)]
    ends = [start + count for _, start, count in spans]
    spans_N3 = torch.tensor(spans, dtype=torch.int32)
    widths = {"gqa": (H * C, G * C, G * C), "mla": (H * (nope + rope), H * (nope + value), rope)}
    for name, width in widths.items():
        texts = [[random(end, columns, dtype=dtype) for columns in width] for end in ends]
        kept = [torch.zeros((3, S, columns), dtype=dtype) for columns in width[1:]]
        for (slot, start, _), text in zip(spans, texts, strict=True):
            for cache, x in zip(kept, text[1:], strict=True):
                cache[slot, :start] = x[:start]
        rows = [torch.cat([text[i][-count:] for (*_, count), text in zip(spans, texts, strict=True)]) for i in range(3)]
        if name == "gqa":
            o = native.gqa_spans(*rows, angles(S, C, 1e4, dtype, rows[0].device), (H, G), spans_N3, *kept)
            whole = [OPS["gqa_attention"](*text, len(text[0]), H, G, 1e4)[0] for text in texts]
        else:
            turns = angles(S, rope, 1e4, dtype, rows[0].device)
            o = native.mla_spans(*rows, turns, (H, nope, value), spans_N3, *kept)
            whole = [OPS["mla_attention"](*text, len(text[0]), H, nope, rope, value, 1e4)[0] for text in texts]
        expected = [x[-count:] for (*_, count), x in zip(spans, whole, strict=True)]
        assert torch.equal(o, torch.cat(expected)), name


@pytest.mark.parametrize("sequences", [1, 5])
def test_attention_of_a_round_is_one_call(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer calls attention once, for any number of sequences."""
    calls = Counter[str]()
    call = native.call
    monkeypatch.setattr(native, "call", lambda name, *args: calls.update([name]) or call(name, *args))
    next_tokens = [Next(slot, start=0, count=1, sequence=slot) for slot in range(sequences)]
    tokens = NextTokens(MagicMock(), 0, slots=sequences, sequence=4, next=next_tokens)
    for layer in range(1, 4):
        tokens._functions()["gqa_attention"](*(random(sequences, width) for width in (16, 8, 8)), 4, 4, 2, 1e4)
        assert calls == {"gqa_spans": layer}
