"""Checks of the kernels that move rows between tokens and experts, in Triton's interpreter: bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compiler.emit.kernels import permute as choices
from runtime import ops
from tests.compiler.emit.kernels.checks_router import assert_apart
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = (
    "permute", "permute_placed", "permute_dgrad", "permute_dgrad_add", "permute_gate_dgrad", "route_permute",
    "unpermute", "unpermute_dgrad", "unpermute_add",
    "permute_fp8", "permute_placed_fp8", "route_permute_fp8", "unpermute_fp8_dgrad", "unpermute_dgrad_quantise",
    "embedding", "embedding_wgrad_",
)  # fmt: skip


def generated(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chosen(tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """gate_TK, expert_TK: some experts often, some never."""
    weight_TE = torch.rand(tokens, experts, generator=generated(1)) ** 4 * (torch.arange(experts) % 5 != 2)
    return random(tokens, k, seed=2), (weight_TE + 1e-9).multinomial(k, generator=generated(3)).view(tokens, k)


def equal(found: Any, wanted: Any) -> None:
    found, wanted = (value if isinstance(value, tuple) else (value,) for value in (found, wanted))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and (a.stride() == b.stride() or not a.numel())
        assert torch.equal(*(tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in (a, b)))


@contextmanager
def at_most(blocks: int) -> Iterator[None]:
    """Lowers the limit on blocks of tokens to `blocks`; to stay within it, blocks grow."""
    before, choices.BLOCKS = choices.BLOCKS, blocks
    try:
        yield
    finally:
        choices.BLOCKS = before


def permute(dtype: torch.dtype, tokens: int, experts: int, k: int, columns: int, blocks: int = 256) -> None:
    x_TD, slots_E = random(tokens, columns, dtype=dtype), torch.randperm(experts, generator=generated(4))
    gate_TK, expert_TK = chosen(tokens, experts, k)
    for op, last in (("permute", experts), ("permute_placed", slots_E)):
        with at_most(blocks):
            equal(run(op, x_TD, gate_TK, expert_TK, last), ops.OPS[op](x_TD, gate_TK, expert_TK, last))


def one_expert(tokens: int, k: int) -> None:
    """All choices of all tokens: the choices of a token may be equal."""
    x_TD, gate_TK, expert_TK = random(tokens, 8), random(tokens, k), torch.full((tokens, k), 2)
    equal(run("permute", x_TD, gate_TK, expert_TK, 4), ops.permute(x_TD, gate_TK, expert_TK, 4))


def route_permute(
    dtype: torch.dtype, tokens: int, experts: int, softmax: bool, groups: int, top_groups: int, k: int, by_slots: bool
) -> None:
    """Choices, order and rows equal the composition; gate weights equal the separate routing kernel."""
    logits_TE, bias_E = 2 * random(tokens, experts, seed=1), 0.1 * random(experts, seed=2)
    x_TD, slots_E = random(tokens, 40, dtype=dtype), torch.randperm(experts, generator=generated(4))
    options = (softmax, groups, top_groups, k, True, 2.5)
    assert_apart(logits_TE, bias_E, *options[:4])
    outputs = run("route_permute", logits_TE, bias_E, x_TD, slots_E if by_slots else None, *options)
    gate_TK, expert_TK = run("route", logits_TE, bias_E, *options)
    assert torch.equal(expert_TK, ops.route(logits_TE, bias_E, *options)[1])
    moved = (x_TD, gate_TK, expert_TK)
    permuted = ops.permute_placed(*moved, slots_E) if by_slots else ops.permute(*moved, experts)
    equal(outputs, (gate_TK, expert_TK, *permuted))


def back(dtype: torch.dtype, tokens: int, k: int, columns: int) -> None:
    """Sums in FP32 are the reference's bit for bit; in BF16 torch's `embedding_bag` rounds halves up, not to even."""
    gate_TK, expert_TK = chosen(tokens, 8, k)
    h_TD, shared_TD = random(tokens, columns, dtype=dtype, seed=1), random(tokens, columns, dtype=dtype, seed=2)
    _, gate_S, order_S, _ = ops.permute(h_TD, gate_TK, expert_TK, 8)
    y_SD = random(tokens * k, columns, dtype=dtype, seed=3)
    y_TD = run("unpermute", y_SD, order_S, k)
    exact_TD = ops.unpermute(*double(y_SD), order_S, k)
    within(y_TD, exact_TD, ops.unpermute(y_SD.double().abs(), order_S, k), k)
    if dtype == torch.float32:
        equal(y_TD, ops.unpermute(y_SD, order_S, k))
    equal(run("unpermute_add", h_TD, None, y_SD, order_S, k), h_TD + y_TD)
    equal(run("unpermute_add", h_TD, shared_TD, y_SD, order_S, k), h_TD + shared_TD + y_TD)
    equal(run("unpermute_dgrad", h_TD, order_S, k), ops.unpermute_dgrad(h_TD, order_S, k))
    equal(run("permute_dgrad", y_SD, order_S, k), y_TD)
    equal(run("permute_dgrad_add", y_SD, order_S, k, h_TD, None), h_TD + y_TD)
    equal(run("permute_dgrad_add", y_SD, order_S, k, h_TD, shared_TD), (h_TD + y_TD) + shared_TD)
    equal(run("permute_gate_dgrad", gate_S, order_S, k), gate_TK)


def eight_bits(tokens: int, experts: int, k: int, columns: int) -> None:
    """8-bit rows with their scales. The scales are column-major, as `quantise` returns and `requantise` reads them."""
    x_TD, scales_TB = ops.quantise(random(tokens, columns))
    gate_TK, expert_TK = chosen(tokens, experts, k)
    slots_E = torch.randperm(experts, generator=generated(4))
    for op, last in (("permute_fp8", experts), ("permute_placed_fp8", slots_E)):
        arguments = (x_TD, scales_TB, gate_TK, expert_TK, last)
        rows_SD, scales_SB, *_ = outputs = run(op, *arguments)
        equal(outputs, ops.OPS[op](*arguments))
        equal(run("requantise", rows_SD, scales_SB), ops.requantise(rows_SD, scales_SB))
    order_S = ops.permute(gate_TK, gate_TK, expert_TK, experts)[2]
    equal(
        run("unpermute_fp8_dgrad", x_TD, scales_TB, order_S, k),
        ops.unpermute_fp8_dgrad(x_TD, scales_TB, order_S, k),
    )
    for dtype, pow2 in ((torch.float32, False), (torch.bfloat16, True)):
        dy_TD = random(tokens, columns, dtype=dtype, seed=5)
        outputs = run("unpermute_dgrad_quantise", dy_TD, order_S, k, pow2)
        equal(outputs, ops.unpermute_dgrad_quantise(dy_TD, order_S, k, pow2))
    logits_TE, options = 2 * random(tokens, experts, seed=1), (False, 1, 1, k, True, 2.5)
    assert_apart(logits_TE, None, *options[:4])
    for slots in (None, slots_E):
        gate_TK, expert_TK, *permuted = run("route_permute_fp8", logits_TE, None, x_TD, scales_TB, slots, *options)
        equal((gate_TK, expert_TK), run("route", logits_TE, None, *options))
        moved = (x_TD, scales_TB, gate_TK, expert_TK)
        wanted = ops.permute_fp8(*moved, experts) if slots is None else ops.permute_placed_fp8(*moved, slots)
        equal(tuple(permuted), wanted)


def embedding(dtype: torch.dtype, tokens: int, vocab: int, columns: int) -> None:
    """A vocabulary smaller than the number of tokens, so tokens repeat. Some tokens are in another shard of it."""
    w_VD, dh_TD = random(vocab, columns, dtype=dtype, seed=1), random(tokens, columns, dtype=dtype, seed=2)
    tokens_T = torch.randint(vocab, (tokens,), generator=generated(1))
    tokens_T[1::4] = -1
    equal(run("embedding", tokens_T, w_VD), ops.embedding(tokens_T, w_VD))
    acc_VD = random(vocab, columns, seed=3)
    exact_VD, magnitude_VD = acc_VD.double(), acc_VD.double().abs()
    ops.embedding_wgrad_(exact_VD, dh_TD.double(), tokens_T)
    ops.embedding_wgrad_(magnitude_VD, dh_TD.double().abs(), tokens_T)
    assert run("embedding_wgrad_", acc_VD, dh_TD, tokens_T) is None
    within(acc_VD, exact_VD, magnitude_VD, tokens + 1)
