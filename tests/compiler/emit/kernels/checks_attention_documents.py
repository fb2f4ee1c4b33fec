"""Checks of the bytes that attention moves for sequences of several documents, in Triton's interpreter."""

from __future__ import annotations

import torch

from compiler.emit.kernels.kernel import LEGS
from tests.compiler.emit.kernels.checks_attention import gqa_operands, starts_of
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved
from tests.compiler.emit.kernels.interpreted import NUM_SMS, random, run

CHECKED = ("gqa_attention", "gqa_attention_dgrad")


def moves_what_documents_need() -> None:
    """Key blocks start at the first document of a query block, query blocks end with its last document: for documents
    of 128 tokens, only blocks on the diagonal are read."""
    B, S, G, group, C = sizes = 2, 256, 1, 2, 32
    q, k, v, *options = *gqa_operands(torch.bfloat16, sizes), *starts_of(B, S, (128,))
    T, blocks = B * S, B * G * group * (S // 128)
    start_bytes = 4 * 2 * T  # where documents begin, for what turns
    turn = 2 * 2 * T * (group + G) * C + 2 * 4 * T * C + start_bytes
    queue = 4 * (2 * LEGS * NUM_SMS + 1)
    with moved() as count:
        o, lse = run("gqa_attention", q, k, v, *options)
    of_rows = 4 * blocks * (128 + 2)  # and of its first row and its last
    keys, values = blocks * (128 + 64), blocks * 128  # 64 of the last keys again
    assert count[0] == turn + queue + 4 * blocks + of_rows + bytes_of(q, o, lse) + 2 * C * (keys + values)

    do = random(*o.shape, dtype=torch.bfloat16, seed=4)
    with moved() as count:
        run("gqa_attention_dgrad", do, q, k, v, o, lse, *options)
    rows = bytes_of(do, o) + 3 * bytes_of(lse)  # delta and lse in base 2
    angles_read = 4 * T * (group + G) * C
    by_queries = bytes_of(q, do, q) + 2 * bytes_of(lse) + 2 * 2 * C * values + of_rows + 4 * blocks * 128
    tiles = blocks // group
    of_keys = 4 * tiles * (128 + 2 + 128)
    by_keys = 2 * bytes_of(k, v) + blocks * 128 * (2 * 2 * C + 8) + of_keys
    queues = 2 * queue + 4 * (blocks + tiles)
    assert count[0] == turn + queues + rows + angles_read + by_queries + by_keys
