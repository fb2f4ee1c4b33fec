"""Checks of attention over chosen keys in Triton's interpreter: against its ops in FP64, within bounds of near.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tests.compiler.emit.kernels.interpreted as interpreted
from runtime import ops
from runtime.contract.zigzag import rows_of_rank
from runtime.ops.causal import columns, split_heads
from runtime.ops.indexer import is_chosen
from tests.compiler.emit.kernels.checks_attention import Sizes
from tests.compiler.emit.kernels.checks_quantise import moved
from tests.compiler.emit.kernels.interpreted import double, random, run
from tests.compiler.emit.kernels.near import Bounds, Near, attend, attend_dgrad, cat, close

CHECKED = ("chosen_attention", "chosen_attention_dgrad")


def chosen_keys(B: int, position_Q: Tensor, top_k: int, reach: int = 0) -> Tensor:
    """Random choices of queries at these positions of B sequences, [B·Q, K]: of the keys up to their own, with `reach`
    of the last so many."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for position in position_Q.repeat(B).tolist():
        first = max(0, position + 1 - reach) if reach else 0
        row = first + torch.randperm(position + 1 - first, generator=generator)[:top_k].sort().values
        rows.append(torch.nn.functional.pad(row, (0, top_k - len(row)), value=-1))
    return torch.stack(rows).to(torch.int32)


def operands(dtype: torch.dtype, sizes: Sizes, chosen_TK: Tensor) -> tuple[Any, ...]:
    B, S, H, nope, rope, value = sizes
    T = len(chosen_TK)
    q, kv = (
        random(T, H * (nope + rope), dtype=dtype, seed=1),
        random(B * S, H * (nope + value), dtype=dtype, seed=2),
    )
    return q, kv, random(B * S, rope, dtype=dtype, seed=3), chosen_TK, S, H, nope, rope, value


def attention(dtype: torch.dtype, sizes: Sizes, top_k: int, reach: int = 0, context: tuple[int, int] = (1, 0)) -> None:
    """Both ops, on the rows that a context rank (ranks, rank) has of each sequence."""
    B, S = sizes[:2]
    position_Q = rows_of_rank(torch.arange(S), 1, *context) if context[0] > 1 else torch.arange(S)
    near(dtype, sizes, chosen_keys(B, position_Q, top_k, reach))


def near(dtype: torch.dtype, sizes: Sizes, chosen_TK: Tensor) -> None:
    """Results are as near to those in FP64 as roundings allow."""
    B, S, H, nope, rope, value = sizes
    q, kv, k_rope, *options = operands(dtype, sizes, chosen_TK)
    do, Q = random(len(q), H * value, dtype=dtype, seed=4), len(q) // B
    o, lse = run("chosen_attention", q, kv, k_rope, *options)
    q64, kv64, k_rope64, do64, o64, lse64 = double(q, kv, k_rope, do, o, lse)
    o_exact, lse_exact = ops.OPS["chosen_attention"](q64, kv64, k_rope64, *options)

    unseen = ~is_chosen(chosen_TK, S).view(B, Q, S).repeat_interleave(H, dim=0)
    bounds = Bounds(unseen_PQS=unseen)
    queries, by_head = (Near.of(split_heads(x, rows, H).flatten(0, 1)) for x, rows in ((q64, Q), (kv64, S)))
    moved_keys = Near.of(split_heads(k_rope64, S, 1).expand(B, H, S, rope).flatten(0, 1))
    keys, values = cat(by_head.map(lambda x: x[..., :nope]), moved_keys), by_head.map(lambda x: x[..., nope:])
    near_o, near_lse = attend(queries, keys, values, dtype, bounds)
    close(o, near_o.map(lambda x: columns(x, H)), dtype, o_exact)
    close(lse, near_lse, torch.float32, lse_exact)

    gradients = run("chosen_attention_dgrad", do, q, kv, k_rope, o, lse, *options)
    expected = ops.OPS["chosen_attention_dgrad"](do64, q64, kv64, k_rope64, o64, lse64, *options)
    do_by_head, o_by_head = (split_heads(x, Q, H).flatten(0, 1) for x in (do64, o64))
    lse_by_head = lse64.view(B * H, Q, 1)
    dq, dk, dv = attend_dgrad(do_by_head, o_by_head, lse_by_head, queries, keys, values, dtype, bounds=bounds)
    dkv = cat(dk.map(lambda x: x[..., :nope]), dv)
    dk_rope = dk.map(lambda x: x[..., nope:].unflatten(0, (B, H))).sum(1)
    close(gradients[0], dq.map(lambda x: columns(x, H)), dtype, expected[0])
    close(gradients[1], dkv.map(lambda x: columns(x, H)), dtype, expected[1])
    close(gradients[2], dk_rope, dtype, expected[2])


def results(args: tuple[Any, ...]) -> list[Tensor]:
    q, kv, k_rope, *options = args
    o, lse = run("chosen_attention", *args)
    do = random(*o.shape, dtype=o.dtype, seed=4)
    return [o, lse, *run("chosen_attention_dgrad", do, q, kv, k_rope, o, lse, *options)]


def nothing_chosen(dtype: torch.dtype, sizes: Sizes, top_k: int, empty: slice) -> None:
    """Queries that have chosen nothing have o = 0, lse = −∞ and no gradient; keys that nobody has chosen have none. All
    other results are finite, and their rows those of a call without these queries."""
    B, S, H = sizes[:3]
    chosen_TK = chosen_keys(B, torch.arange(S), top_k)
    chosen_TK.view(B, S, -1)[:, empty] = -1
    o, lse, dq, dkv, dk_rope = results(operands(dtype, sizes, chosen_TK))
    assert not o.view(B, S, -1)[:, empty].any() and not dq.view(B, S, -1)[:, empty].any()
    assert torch.equal(lse.isinf(), (chosen_TK < 0).all(1).view(B, 1, S).expand(B, H, S))
    unread = ~is_chosen(chosen_TK, S).view(B, S, S).any(1)
    assert not dkv.view(B, S, -1)[unread].any() and not dk_rope.view(B, S, -1)[unread].any()
    assert all(x.isfinite().all() for x in (o, dq, dkv, dk_rope))


def all_chosen_is_causal(sizes: Sizes) -> None:
    """If each query has chosen all keys up to its own, outputs are nearly those of `mla_attention` on rotated rows."""
    B, S = sizes[:2]
    q, kv, k_rope, chosen_TK, *shape = operands(torch.float32, sizes, chosen_keys(B, torch.arange(S), S))
    o, lse = run("chosen_attention", q, kv, k_rope, chosen_TK, *shape)
    exact = ops.OPS["mla_attention"](*double(q, kv, k_rope), *shape, 0.0)
    torch.testing.assert_close(o.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-5)


def bits_are_equal(dtype: torch.dtype, sizes: Sizes, top_k: int) -> None:
    """Bits are equal from run to run, and for any number of programs that share the tiles."""
    args = operands(dtype, sizes, chosen_keys(sizes[0], torch.arange(sizes[1]), top_k))
    first, before = results(args), interpreted.NUM_SMS
    try:
        for interpreted.NUM_SMS in (before, 1, 7):
            for again, expected in zip(results(args), first, strict=True):
                assert torch.equal(again, expected)
    finally:
        interpreted.NUM_SMS = before


def a_wrong_choice_shows(sizes: Sizes, top_k: int) -> None:
    """A kernel that takes one other key for one query exceeds the bounds."""
    chosen_TK = chosen_keys(sizes[0], torch.arange(sizes[1]), top_k)
    wrong_TK = chosen_TK.clone()
    row = wrong_TK[-1]
    unused = [key for key in range(sizes[1]) if key not in row.tolist()]
    row[0] = unused[0]
    wrong_TK[-1] = row.sort().values
    args, other = operands(torch.bfloat16, sizes, chosen_TK), operands(torch.bfloat16, sizes, wrong_TK)
    exact = ops.OPS["chosen_attention"](*double(*args[:3]), *args[3:])[0]
    found = [(run("chosen_attention", *each)[0].double() - exact).abs().amax() for each in (args, other)]
    assert found[1] > 4 * found[0]


def moves_only_chosen_blocks() -> None:
    """Blocks in which nothing is chosen are not read: with a short reach, key bytes do not grow with the square of a
    sequence."""

    def forward(S: int) -> int:
        args = operands(torch.bfloat16, (1, S, 1, 16, 16, 16), chosen_keys(1, torch.arange(S), 8, reach=16))
        with moved() as count:
            run("chosen_attention", *args)
        return count[0]

    half, whole = forward(512), forward(1024)
    assert whole < 2.5 * half, (half, whole)
