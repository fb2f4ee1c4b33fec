"""Ops that compute by blocks, chunks, pools or windows, with documents, contexts and caches that end at block borders.

Other tests draw random sizes, which seldom hit a border. Here documents begin, contexts are split and caches continue
one token before each border, at it, and one token after it, for each block size of an op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.model.ops import RULES
from compiler.model.ops.rule import PLACES
from compiler.tools.inference.op_tables import CachedForward, Forward
from runtime.ops import OPS
from runtime.ops.causal import BLOCK_ROWS
from runtime.ops.delta_rule import CHUNK, continued_delta_rule
from tests.runtime.ops import cases, compress_cases
from tests.runtime.ops.cases import Args, Source, as_tuple, gradient_arguments
from tests.runtime.ops.test_ops import assert_close, compare

SEQUENCE = 2 * CHUNK + 5
# Rows of a block: 32 in C++ (runtime/ops/native/attention.cpp), 64 on torch, 64 in chunks of states; 42 positions if
# three heads share a key.
BORDERS = sorted({size * times + shift for size in (32, 42, 64) for times in (1, 2) for shift in (-1, 0, 1)})
assert BLOCK_ROWS == CHUNK == 64
Case = Callable[..., Args]
OF_DOCUMENTS: dict[str, tuple[str, Case]] = {
    "latent": ("mla_attention", partial(cases.mla_attention, H=2, nope=2, rope=2, value=2)),
    "grouped": ("gqa_attention", partial(cases.gqa_attention, G=1, C=2)),
    "window as a block": ("bounded_attention", partial(cases.bounded_attention, G=1, C=2, window=BLOCK_ROWS)),
    "window of a block and one": ("bounded_attention", partial(cases.bounded_attention, G=1, r=1, C=2, window=33)),
    "rotate": ("rotate", cases.rotate),
    "convolve": ("convolve", cases.convolve),
    "states, decay of channels": ("delta_rule", partial(cases.delta_rule, G=1, K=3, V=2, channels=True)),
    "states, decay of heads": ("delta_rule", partial(cases.delta_rule, G=1, K=3, V=2, channels=False)),
}


def of_documents(kind: str, dtype: torch.dtype, begins: tuple[int, ...]) -> tuple[str, Args]:
    """An op and its arguments for two sequences, in each of which documents begin at 0 and at `begins`."""
    op, case = OF_DOCUMENTS[kind]
    args = list(cases.widened(op, case(Source(dtype, 3), 2, SEQUENCE, documents=True)))
    starts_S = torch.zeros(SEQUENCE, dtype=torch.int32)
    for begin in begins:
        starts_S[begin:] = begin
    args[RULES[op].args.index("starts")] = starts_S.repeat(2)
    return op, tuple(args)


@pytest.mark.parametrize("kind", OF_DOCUMENTS)
def test_documents_that_begin_at_a_border_equal_separate_ones(kind: str) -> None:
    for begins in (*((border,) for border in BORDERS), (32, 64, 96, 128)):
        compare(*of_documents(kind, torch.float64, begins), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OF_DOCUMENTS)
def test_no_bit_of_a_document_crosses_a_border(kind: str, dtype: torch.dtype) -> None:
    """In C++, too: the contents of one document do not change a bit of the other's results and gradients."""
    for border in BORDERS:
        op, args = of_documents(kind, dtype, (border,))
        unchanged = [slice(border, SEQUENCE), slice(SEQUENCE, SEQUENCE + border)]  # one document of each sequence
        changed_args = tuple(_changed(arg, unchanged) for arg in args)
        for name, operands in ((op, args), *gradient_arguments(op, args, Source(dtype, 1))):
            if name.endswith(("wgrad", "dgrad_w")) or "_wgrad" in name:
                continue  # sums over all documents
            changed = changed_args if name == op else dict(gradient_arguments(op, changed_args, Source(dtype, 1)))[name]
            for result, expected in zip(as_tuple(OPS[name](*operands)), as_tuple(OPS[name](*changed)), strict=True):
                if result.shape[:1] == (2 * SEQUENCE,):
                    assert all(torch.equal(result[rows], expected[rows]) for rows in unchanged), (name, border)


def _changed(arg: Any, kept: list[slice]) -> Any:
    """A tensor of token rows with other numbers outside the kept documents."""
    if not isinstance(arg, Tensor) or arg.dim() != 2 or len(arg) != 2 * SEQUENCE:
        return arg
    changed = torch.full_like(arg, -3)
    for rows in kept:
        changed[rows] = arg[rows]
    return changed


@pytest.mark.parametrize("kind", ["latent", "grouped", "window as a block", "window of a block and one"])
@pytest.mark.parametrize("begins", [(), (63,), (64,), (65,), (128, 192)])
def test_ranks_of_a_context_that_is_cut_at_the_borders_of_blocks(kind: str, begins: tuple[int, ...]) -> None:
    """Two ranks have four pieces of 64 positions: the first and last, and the two between."""
    op, case = OF_DOCUMENTS[kind]
    for pieces in ((0, 3), (1, 2)):
        positions = torch.cat([torch.arange(64 * piece, 64 * piece + 64) for piece in pieces]).to(torch.int32)
        starts = torch.zeros(256, dtype=torch.int32)
        for begin in begins:
            starts[begin:] = begin
        args = list(case(Source(torch.float64, 3), 1, 256, some=True))
        args[0] = Source(torch.float64, 4).normal(128, args[0].shape[1])
        args[-2:] = [starts[positions.long()] if begins else None, positions]
        compare(op, tuple(args), torch.float64)


# ---------------------------------------------------------------- caches

WINDOW, RATE = 4, 3
CACHED: dict[str, tuple[str, Case]] = {
    "grouped": ("gqa_attention", cases.gqa_attention),
    "window": ("bounded_attention", partial(cases.bounded_attention, window=WINDOW)),
    "taps": ("convolve", partial(cases.convolve, J=WINDOW)),
    "states": ("delta_rule", cases.delta_rule),
    "pools": ("compress", partial(compress_cases.compress, rate=RATE, overlap=False)),
    "pools that overlap": ("compress", partial(compress_cases.compress, rate=RATE, overlap=True)),
}


@pytest.mark.parametrize("kind", CACHED)
def test_caches_continue_at_any_token(kind: str) -> None:
    """Prompts that end before, at and after every border of a window, a pool and taps."""
    op, case = CACHED[kind]
    tokens, rule = 4 * RATE + 1, RULES[op]
    arguments = zip(rule.args, case(Source(torch.float64, 2), 1, tokens), strict=True)
    args = [arg for name, arg in arguments if name not in PLACES]
    expected = getattr(Forward(tokens), op)(*args)
    weights = [arg for arg in args if isinstance(arg, Tensor) and len(arg) != tokens]
    for first in range(1, tokens):
        for ends in ((first, tokens), tuple(range(first, tokens + 1))):
            cached, rows, start = CachedForward(weights), [], 0
            for end in ends:
                cached.begin(start, end - start)
                new = (x[start:end] if isinstance(x, Tensor) and len(x) == tokens else x for x in args)
                rows.append(getattr(cached, op)(*new))
                start = end
            output = rows[-1] if op == "compress" else torch.cat(rows)
            assert_close(output, expected, 1e-12)


@pytest.mark.parametrize("channels", [False, True])
def test_states_continue_at_the_borders_of_chunks(channels: bool) -> None:
    *tensors, S, G, _ = cases.delta_rule(Source(torch.float64, 5), 1, SEQUENCE, 1, 1, 3, 2, channels)
    expected = OPS["delta_rule"](*tensors, S, G)
    for first in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1):
        state, outputs = None, []
        for q, k, v, beta, decay in zip(*(tensor.split([first, S - first]) for tensor in tensors), strict=True):
            o, state = continued_delta_rule(q, k, v, beta, decay, G, state)
            outputs.append(o)
        assert_close(torch.cat(outputs), expected, 1e-12)
