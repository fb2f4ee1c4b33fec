"""Checks of attention to a window and to entries in Triton's interpreter: against its op in FP64, as near.py allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compiler.emit.kernels.compressed_attention as family
import tests.compiler.emit.kernels.interpreted as interpreted
from runtime import ops
from runtime.ops.causal import columns, split_heads
from runtime.ops.indexer import is_chosen
from tests.compiler.emit.kernels.interpreted import STORED, double, random, run
from tests.compiler.emit.kernels.near import Bounds, Near, attend, attend_dgrad, close

CHECKED = ("compressed_attention", "compressed_attention_dgrad")
Sizes = tuple[int, int, int, int, int, int]  # B, S, H, C, window, rate


def chosen_entries(B: int, S: int, rate: int, top_k: int) -> Tensor:
    """Random choices of the entries that each query sees, [B·S, K], in ascending order, then −1."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for position in torch.arange(S).repeat(B).tolist():
        row = torch.randperm((position + 1) // rate, generator=generator)[:top_k].sort().values
        rows.append(torch.nn.functional.pad(row, (0, top_k - len(row)), value=-1))
    return torch.stack(rows).to(torch.int32)


def operands(dtype: torch.dtype, sizes: Sizes, top_k: int, sinks: bool, view: bool = False) -> tuple[Any, ...]:
    """`view`: queries and keys are columns of wider tensors."""
    B, S, H, C, window, rate = sizes
    wide_q = random(B * S, H * C + 8 * view, dtype=dtype, seed=1)
    wide_kv = random(B * S, C + 16 * view, dtype=dtype, seed=2)
    entries = random(B * (S // rate), C, dtype=dtype, seed=3)
    chosen = chosen_entries(B, S, rate, top_k) if top_k else None
    return (
        *(wide_q[:, 8 * view :], wide_kv[:, 8 * view : C + 8 * view], entries, chosen),
        *(random(H, dtype=dtype, seed=5) if sinks else None, S, H, window, rate),
    )


def attention(dtype: torch.dtype, sizes: Sizes, top_k: int, sinks: bool, view: bool = False) -> None:
    """Results are as near to those in FP64 as roundings allow. `top_k` 0: all entries that a query sees."""
    B, S, H, C, window, rate = sizes
    q, kv, entries, chosen, sinks_H, *options = operands(dtype, sizes, top_k, sinks, view)
    o, lse = run("compressed_attention", q, kv, entries, chosen, sinks_H, *options)
    q64, kv64, entries64 = double(q, kv, entries)
    sinks64 = None if sinks_H is None else sinks_H.double()
    exact = ops.OPS["compressed_attention"](q64, kv64, entries64, chosen, sinks64, *options)

    query, key, entry = torch.arange(S)[:, None], torch.arange(S), torch.arange(S // rate)
    unseen_keys = ((key > query) | (key <= query - window)).expand(B, S, S)
    if chosen is None:
        unseen_entries = (entry >= (query + 1) // rate).expand(B, -1, -1)
    else:
        unseen_entries = ~is_chosen(chosen, S // rate).view(B, S, S // rate)
    unseen = torch.cat((unseen_keys, unseen_entries), -1).repeat_interleave(H, dim=0)
    both = torch.cat((kv64.reshape(B, S, C), entries64.view(B, S // rate, C)), 1).repeat_interleave(H, dim=0)
    queries, keys = Near.of(split_heads(q64.contiguous(), S, H).flatten(0, 1)), Near.of(both)
    bounds = Bounds(sinks_P=None if sinks64 is None else sinks64.repeat(B), unseen_PQS=unseen)
    near_o, near_lse = attend(queries, keys, keys, dtype, bounds)
    close(o, near_o.map(lambda x: columns(x, H)), dtype, exact[0])
    close(lse, near_lse.map(lambda x: x.view(B, 1, H, S).mT), torch.float32, exact[1])

    do = random(*o.shape, dtype=dtype, seed=4)
    gradients = in_batches(do, q, kv, entries, chosen, o, lse, *options)
    do64, o64, lse64 = double(do, o, lse)
    expected = ops.OPS["compressed_attention_dgrad"](do64, q64, kv64, entries64, chosen, o64, lse64, *options)
    by_head = [split_heads(x, S, H).flatten(0, 1) for x in (do64, o64)]
    of_rows = lse64.view(B, S, H).mT.reshape(B * H, S, 1)
    dq, dk, dv = attend_dgrad(*by_head, of_rows, queries, keys, keys, dtype, group=H, bounds=Bounds(unseen_PQS=unseen))
    close(gradients[0], dq.map(lambda x: columns(x, H)), dtype, expected[0])
    dboth = Near(dk.exact + dv.exact, dk.off + dv.off).map(lambda x: x.unflatten(0, (B, H))).sum(1)
    close(gradients[1], dboth.map(lambda x: x[:, :S].flatten(0, 1)), dtype, expected[1])
    dentries = dboth.map(lambda x: x[:, S:].flatten(0, 1))
    if chosen is not None:
        added = added_to_keys(by_head[0], by_head[1], of_rows, queries.exact, keys.exact, unseen)
        of_tokens = added.unflatten(0, (B, H)).sum(1)[:, :, S:]
        dentries.off.add_(STORED[dtype] * of_tokens.abs().sum(1).flatten(0, 1))
    close(gradients[2], dentries, dtype, expected[2])


def in_batches(do: Tensor, q: Tensor, *arguments: Any, tokens: int = 6) -> Any:
    """The gradient, with what a few tokens add to chosen entries at a time."""
    chosen = arguments[2]
    width = 1 if chosen is None else chosen.shape[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "ADDED_BYTES", tokens * width * do.shape[1] // arguments[-3] * do.element_size())
        return run("compressed_attention_dgrad", do, q, *arguments)


def added_to_keys(do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, unseen: Tensor) -> Tensor:
    """The part of each query in the gradient of each key, [P, Q, S, C]. The kernel rounds its sum over heads."""
    scale = q.shape[-1] ** -0.5
    weights = (q @ k.mT * scale - lse).masked_fill(unseen, -torch.inf).exp()
    dscores = weights * (do @ k.mT - (do * o).sum(-1, keepdim=True)) * scale
    return weights[..., None] * do[:, :, None] + dscores[..., None] * q[:, :, None]


def results(args: tuple[Any, ...]) -> list[Tensor]:
    q, kv, entries, chosen, _, *options = args
    o, lse = run("compressed_attention", *args)
    do = random(*o.shape, dtype=o.dtype, seed=4)
    return [o, lse, *in_batches(do, q, kv, entries, chosen, o, lse, *options)]


def bits_are_equal(dtype: torch.dtype, sizes: Sizes, top_k: int) -> None:
    """Bits are equal from run to run, and those of results and of the gradient of queries for any number of programs
    that share the tiles. Sums for keys have as many parts as there are programs for them."""
    args = operands(dtype, sizes, top_k, sinks=True)
    first, before = results(args), interpreted.NUM_SMS
    assert all(torch.equal(again, expected) for again, expected in zip(results(args), first, strict=True))
    try:
        for interpreted.NUM_SMS in (1, 7):
            for again, expected in zip(results(args)[:3], first[:3], strict=True):
                assert torch.equal(again, expected)
    finally:
        interpreted.NUM_SMS = before


def sinks_of_nothing(sizes: Sizes) -> None:
    """A sink of −∞ gives the same bits as no sink, and a sink of NaN makes only its head's results NaN."""
    *tensors, sinks, S, H, window, rate = operands(torch.bfloat16, sizes, 3, sinks=True)
    without = run("compressed_attention", *tensors, None, S, H, window, rate)
    sinks.fill_(-torch.inf)
    for output, expected in zip(run("compressed_attention", *tensors, sinks, S, H, window, rate), without, strict=True):
        assert torch.equal(output, expected)
    sinks[0] = torch.nan
    o, lse = run("compressed_attention", *tensors, sinks, S, H, window, rate)
    by_head = o.view(len(o), H, -1)
    assert by_head[:, 0].isnan().all() and torch.equal(by_head[:, 1:], without[0].view(by_head.shape)[:, 1:])
    assert lse[..., 0].isnan().all()


def a_wrong_entry_shows(sizes: Sizes) -> None:
    """A kernel that takes one other entry for one query exceeds the bounds by far."""
    args = operands(torch.bfloat16, sizes, 3, sinks=False)
    wrong = args[3].clone()
    wrong[-1, 0] = next(entry for entry in range(sizes[1] // sizes[5]) if entry not in wrong[-1].tolist())
    exact = ops.OPS["compressed_attention"](*double(*args[:3]), *args[3:])[0]
    found = [run("compressed_attention", *args[:3], chosen, *args[4:])[0] for chosen in (args[3], wrong)]
    right, other = ((o.double() - exact).abs().amax() for o in found)
    assert other > 4 * right
