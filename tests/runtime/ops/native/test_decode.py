"""The C++ ops of tokens whose predecessors are cached, against the training ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.causal import angles
from runtime.ops.rotate import ramped_angles
from tests.runtime.ops.native.guarded import fenced_call
from tests.runtime.ops.source import Source

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
THETA = 100.0
pytestmark = pytest.mark.usefixtures("instructions")


def fenced(name: str, dtype: torch.dtype, *args: Any) -> None:
    """Call a function on memory next to protected pages, before and after its operands."""
    kept = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    fenced_call(False, name, dtype, *kept)
    fenced_call(True, name, dtype, *args)
    assert all(torch.equal(x, y) for x, y in zip(args, kept, strict=True) if isinstance(x, Tensor))


def near(found: Tensor, expected: Tensor) -> bool:
    off = (found.double() - expected.double()).abs().max()
    return bool(off <= NEAR[found.dtype] * expected.double().abs().max())


def stored(rows: Tensor, room: int) -> Tensor:
    """A cache with these rows, and zeros after them."""
    return torch.cat((rows, rows.new_zeros(room - len(rows), rows.shape[1])))


def turned(x: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Rotate the heads of each row by the angles of its position."""
    pairs = torch.view_as_complex(x.float().unflatten(1, (heads, -1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(1).to(x.dtype)


@DTYPES
@pytest.mark.parametrize(
    ("start", "new", "heads", "groups", "C"), [(5, 1, 4, 2, 6), (30, 2, 3, 3, 16), (1, 8, 2, 1, 34)]
)
def test_grouped_queries(dtype: torch.dtype, start: int, new: int, heads: int, groups: int, C: int) -> None:
    source, N, last = Source(dtype, start), start + new, slice(start, start + new)
    q, k, v = (source.normal(N, n * C) for n in (heads, groups, groups))
    turns = angles(N, C, THETA, dtype, q.device)
    rotated = turned(k, turns, groups)
    cache = stored(torch.cat((rotated, v), dim=1)[:start], N + 3)
    o = q.new_empty(new, heads * C)
    sizes = new, torch.tensor([start]), heads, groups, C
    fenced("decode_gqa", dtype, *sizes, q[last], k[last], v[last], torch.view_as_real(turns), cache, o)
    assert near(cache[:N], torch.cat((rotated, v), dim=1))
    assert near(o, OPS["gqa_attention"](q, k, v, N, heads, groups, THETA)[0][last])


@DTYPES
@pytest.mark.parametrize(("start", "new", "heads", "sizes"), [(5, 1, 2, (5, 2, 3, 9)), (40, 2, 4, (16, 8, 16, 32))])
def test_latents(dtype: torch.dtype, start: int, new: int, heads: int, sizes: tuple[int, int, int, int]) -> None:
    nope, rope, value, C = sizes
    source, N, last = Source(dtype, start), start + new, slice(start, start + new)
    q, latent, k_rope = source.normal(N, heads * (nope + rope)), source.normal(N, C), source.normal(N, rope)
    up = source.normal(heads * (nope + value), C) / C**0.5
    turns = angles(N, rope, THETA, dtype, q.device)
    rotated = turned(k_rope, turns, 1)
    latents, ropes = stored(latent[:start], N + 3), stored(rotated[:start], N + 3)
    o = q.new_empty(new, heads * value)
    args = q[last], latent[last], k_rope[last], up, torch.view_as_real(turns), latents, ropes, o
    fenced("decode_mla", dtype, new, torch.tensor([start]), heads, nope, rope, value, C, *args)
    assert torch.equal(latents[:N], latent) and near(ropes[:N], rotated)
    kv = (latent.double() @ up.double().t()).to(torch.float32)
    wide = [x.float() for x in (q, kv, k_rope)]
    assert near(o, OPS["mla_attention"](*wide, N, heads, nope, rope, value, THETA)[0][last])


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(("experts", "groups", "top_groups", "top_k"), [(16, 4, 2, 4), (7, 1, 1, 3), (6, 6, 2, 2)])
@pytest.mark.parametrize("biased", [True, False])
def test_experts_are_chosen_as_in_training(
    softmax: bool, experts: int, groups: int, top_groups: int, top_k: int, biased: bool
) -> None:
    source = Source(torch.float32, experts)
    logits_TE, bias_E = source.normal(5, experts), source.normal(experts) if biased else None
    logits_TE[0] = 0.5  # ties
    score_TE, gate_TK, expert_TK = torch.empty(5, experts), torch.empty(5, top_k), torch.empty((5, top_k)).long()
    fenced("scores", torch.float32, 5, experts, softmax, logits_TE, score_TE)
    sizes = 5, experts, top_k, groups, top_groups, 1 if softmax else 2, not softmax
    fenced("choose", torch.float32, *sizes, 2.5, score_TE, bias_E, gate_TK, expert_TK)
    expected = OPS["route"](logits_TE, bias_E, softmax, groups, top_groups, top_k, not softmax, 2.5)
    assert torch.equal(expert_TK, expected[1])
    assert torch.allclose(gate_TK, expected[0], rtol=1e-5, atol=0)


@DTYPES
def test_rows_of_experts(dtype: torch.dtype) -> None:
    """Rows are sorted by expert and multiplied by its weight, as in training."""
    T, K, E, D, N, source = 3, 2, 5, 10, 18, Source(dtype, 1)
    x_TD, w_END = source.normal(T, D), source.normal(E, N, D)
    expert_TK, gate_TK = torch.tensor([[4, 1], [0, 1], [1, 4]]), torch.rand(T, K)
    rows_SD, _, _, counts_E = OPS["permute"](x_TD, gate_TK, expert_TK, E)
    ends_E, y_SN = torch.empty(E, dtype=torch.int32), x_TD.new_empty(T * K, N)
    fenced("ends", torch.float32, E, counts_E, ends_E)
    assert torch.equal(ends_E, counts_E.cumsum(0).int())
    fenced("decode_experts", dtype, E, ends_E, N, D, rows_SD, w_END, y_SN)
    assert near(y_SN, OPS["grouped_linear"](rows_SD, w_END, ends_E))


@DTYPES
@pytest.mark.parametrize("width", [0, 4, 6])
def test_rotations(dtype: torch.dtype, width: int) -> None:
    T, start, heads, C, first = 3, 7, 2, 10, 3
    settings, x = (THETA, 4.0, 1.0, 2.0, 0.0), Source(dtype, width).normal(start + T, heads * C + 2)[:, : heads * C]
    turns = torch.view_as_real(ramped_angles(start + T, width, *settings, dtype, x.device)) if width else None
    y = torch.empty((T, heads * C), dtype=dtype)
    sizes = T, torch.tensor([start]), heads, C, first, width
    fenced("decode_rotate", dtype, *sizes, x[start:], turns, 1.5 * 0.7, 0.7, y)
    assert near(y, OPS["rotate"](x, start + T, heads, first, width, *settings, 1.5, 0.7)[start:])


@DTYPES
def test_sums_and_copies(dtype: torch.dtype) -> None:
    x_TD, y_TD = Source(dtype, 0).normal(2, 3, 37)
    sum_TD, wider = torch.empty_like(x_TD), torch.zeros((3, 50), dtype=dtype)
    fenced("decode_add", dtype, x_TD.numel(), x_TD, y_TD, sum_TD)
    fenced("decode_copy", dtype, *x_TD[:, :9].shape, x_TD[:, :9], wider[:, 2:11])
    assert torch.equal(sum_TD, x_TD + y_TD) and torch.equal(wider[:, 2:11], x_TD[:, :9])
