"""Checks of attention whose queries are some rows of each sequence, in Triton's interpreter, as in checks_attention.py.

Context rank r of c has the chunks r and 2c − 1 − r of 2c (`runtime.contract.zigzag`).
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiler.emit.kernels.kernel import LEGS
from runtime.contract.zigzag import rows_of_rank
from tests.compiler.emit.kernels import checks_attention, interpreted
from tests.compiler.emit.kernels.checks_attention import Lengths, Some, gqa_operands, mla_operands, some_rows, starts_of
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved
from tests.compiler.emit.kernels.interpreted import NUM_SMS, random, run

CHECKED = (
    "mla_attention", "mla_attention_dgrad", "gqa_attention", "gqa_attention_dgrad",
    "bounded_attention", "bounded_attention_dgrad",
)  # fmt: skip


def places_at(B: int, S: int, position_BQ: Tensor, lengths: Lengths) -> Some:
    """Places of queries that are the rows of these positions, in documents of these lengths."""
    position = position_BQ.flatten().to(torch.int32)
    starts = starts_of(B, S, lengths)
    return (some_rows(*starts, B, S, (None, position)) if starts else None), position


def of_context(B: int, S: int, context: int, rank: int, lengths: Lengths = ()) -> Some:
    """Places of the rows that a context rank has of B sequences."""
    rows = rows_of_rank(torch.arange(S).repeat(B), B, context, rank)
    return places_at(B, S, rows.view(B, -1), lengths)


def at_random(B: int, S: int, Q: int, lengths: Lengths, seed: int) -> Some:
    """Random places of Q rows of each sequence."""
    drawn_BS = torch.rand(B, S, generator=torch.Generator().manual_seed(seed))
    return places_at(B, S, drawn_BS.topk(Q, dim=1).indices.sort(dim=1).values, lengths)


def on_rank(
    op: str, dtype: torch.dtype, sizes: Any, context: int, rank: int, lengths: Lengths = (), *bounds: Any
) -> None:
    """The op and its gradient on one rank; `bounds`: window, softcap, sinks."""
    places = of_context(*sizes[:2], context, rank, lengths)
    getattr(checks_attention, op)(dtype, sizes, *bounds, some=places)


def random_rows(seed: int) -> None:
    """Any rows of sequences of any documents, with and without a window, a softcap and sinks."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(end: int) -> int:
        return int(torch.randint(1, end + 1, (), generator=generator))

    B, S = drawn(2), drawn(300)
    lengths = tuple(drawn(200) for _ in range(drawn(5) - 1))
    places = at_random(B, S, drawn(S), lengths, seed)
    checks_attention.mla(torch.bfloat16, (B, S, drawn(2), drawn(24), 2 * drawn(12), drawn(24)), some=places)
    grouped_sizes = B, S, drawn(2), drawn(3), 2 * drawn(16)
    bounds = drawn(S + 10), 6.0 * (drawn(2) - 1), drawn(2) > 1
    checks_attention.bounded(torch.bfloat16, grouped_sizes, *bounds, some=places)


def a_wrong_position_shows(op: str, sizes: Any) -> None:
    """A kernel that reads a neighbouring position, or positions of another rank, exceeds the bounds."""
    B, S = sizes[:2]
    places, right = of_context(B, S, 2, 0), run
    for row, shift in ((1, -1), (1, 1), (-1, -1)):
        wrong = places[1].clone()
        wrong[row] += shift
        for positions in (wrong, of_context(B, S, 2, 1)[1]):
            with (
                mock.patch.object(
                    checks_attention, "run", lambda *args, positions=positions: right(*args[:-1], positions)
                ),
                pytest.raises(AssertionError, match="times the bound"),
            ):
                getattr(checks_attention, op)(torch.bfloat16, sizes, some=places)


def whole_sequences_are_one_rank(op: str, sizes: Any, lengths: Lengths) -> None:
    """If one rank has all rows, results are bit-identical to kernels for documents with rotated queries and keys."""
    operands = checks_attention.OPERANDS[op](torch.bfloat16, sizes)
    *without_theta, _ = operands
    starts, positions = places_at(*sizes[:2], torch.arange(sizes[1]).repeat(sizes[0], 1), lengths)

    def results(*places: Tensor | None) -> list[Tensor]:
        o, lse = run(f"{op}_attention", *without_theta, 0.0, *places)
        do = random(*o.shape, dtype=torch.bfloat16, seed=4)
        return [o, lse, *run(f"{op}_attention_dgrad", do, *without_theta[:3], o, lse, *without_theta[3:], 0.0, *places)]

    for without_positions, with_positions in zip(results(starts), results(starts, positions), strict=True):
        assert torch.equal(without_positions, with_positions)


def bits_are_equal(op: str, sizes: Any, lengths: Lengths) -> None:
    """Bits are equal for any number of programs that share the tiles."""
    without_theta, places = (
        checks_attention.OPERANDS[op](torch.bfloat16, sizes)[:-1],
        of_context(*sizes[:2], 2, 1, lengths),
    )
    q, options = some_rows(without_theta[0], *sizes[:2], places), (*without_theta[1:], 0.0, *places)

    def results() -> list[Tensor]:
        o, lse = run(f"{op}_attention", q, *options)
        do = random(*o.shape, dtype=torch.bfloat16, seed=4)
        return [o, lse, *run(f"{op}_attention_dgrad", do, q, *options[:2], o, lse, *options[2:])]

    first, before = results(), interpreted.NUM_SMS
    try:
        for interpreted.NUM_SMS in (1, 7):
            for again, expected in zip(results(), first, strict=True):
                assert torch.equal(again, expected)
    finally:
        interpreted.NUM_SMS = before


def moves_what_ranks_need(context: int, rank: int) -> None:
    """Blocks of keys up to the position of a block's last row, and blocks of queries from the first that sees a key:
    no block that has nothing to see, on any rank, with 128 rows per block that divide a chunk."""
    B, S, _, nope, rope, value = sizes = 1, 256 * context, 1, 16, 16, 16
    q, kv, k_rope, *options, _ = mla_operands(torch.bfloat16, sizes)
    places = of_context(B, S, context, rank)
    q, positions = some_rows(q, B, S, places), places[1]
    Q = len(q)
    blocks, ends = Q // 128, [int(last) + 1 for last in positions[127::128]]
    with moved() as count:
        o, lse = run("mla_attention", q, kv, k_rope, *options, 0.0, *places)
    queue = 4 * (2 * LEGS * NUM_SMS + 1)
    place_bytes = 4 * blocks * (2 * 128 + 2 + 2)  # per row, and for the first and last row of a block
    pairs = sum(ends)
    once = bytes_of(q, o, lse)
    assert count[0] == queue + 4 * blocks + place_bytes + once + 2 * (
        (pairs + 64 * blocks) * (nope + rope) + pairs * value
    )

    do = random(*o.shape, dtype=torch.bfloat16, seed=4)
    with moved() as count:
        dq, dkv, dk_rope = run("mla_attention_dgrad", do, q, kv, k_rope, o, lse, *options, 0.0, *places)
    rows = bytes_of(do, o) + 3 * bytes_of(lse)
    by_queries = bytes_of(q, do, dq) + 2 * bytes_of(lse) + 2 * pairs * (nope + rope + value) + place_bytes
    tiles, queues = S // 128, 2 * queue + 4 * (blocks + S // 128)
    of_keys = 4 * tiles * (2 * 128 + 2 + 2)
    by_keys = bytes_of(kv, dkv) + 2 * S * rope + pairs * (2 * (nope + rope + value) + 8) + of_keys
    shared = 2 * 4 * S * rope + bytes_of(dk_rope)
    assert count[0] == rows + queues + by_queries + by_keys + shared


def moves_what_windows_need() -> None:
    """With a window much shorter than the gap between two chunks, the cost does not depend on the gap."""
    window, C = 128, 32

    def keys(S: int) -> float:
        q, k, v, *options, _ = gqa_operands(torch.bfloat16, (1, S, 1, 1, C))
        places = of_context(1, S, 2, 0)
        q = some_rows(q, 1, S, places)
        with moved() as count:
            o, lse = run("bounded_attention", q, k, v, None, *options, 0.0, window, 0.0, *places)
        blocks = len(q) // 128
        schedule_bytes = 4 * (2 * LEGS * NUM_SMS + 1 + blocks * (2 * 128 + 4 + 1))
        return (count[0] - bytes_of(q, o, lse) - schedule_bytes) / (2 * C * 64)

    for S in (512, 1024):
        blocks = S // 2 // 128
        reached = 4 * blocks - 2  # blocks of 64 keys: two of its own and two before it, except for the first
        assert keys(S) == reached + reached + blocks, S  # keys, values, the last keys again
