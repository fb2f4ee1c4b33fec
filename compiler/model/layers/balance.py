"""The sequence-wise loss that balances the load of experts, where ranks have parts of sequences or rows may be padding.

Otherwise the router has it in one op. Source: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.model.layers.builder import Place, index, segment
from compiler.model.layers.padding import real_rows


def has_balance(place: Place) -> bool:
    """Whether a layer has a sequence-wise loss."""
    return place.moe.balance.sequence_loss > 0 and not place.mtp


def real_balance(
    ops: Any, values: tuple[Any, ...], sizes: tuple[int, int], softmax: tuple[bool, ...]
) -> tuple[Any, ...]:
    """The sequence-wise loss over tokens without padding. `values`: logits, or without `softmax` scores, the counts of
    choices, and which rows are tokens. `sizes`: rows of a sequence, and K."""
    balance = ops.real_balance if softmax else ops.real_balance_scores
    return (balance(*values, *sizes, *softmax),)


def rows_of_sequence(place: Place) -> int:
    """The rows that a rank has of each of its sequences."""
    return place.spec.train.sequence // place.spec.sequence_ranks


def balance(
    ops: Any,
    p: Any,
    scores_TE: Any,
    choices_NE: Any,
    *real_T: Any,
    rows: int,
    sequence: int,
    softmax: bool,
    given: bool,
    top_k: int = 0,
) -> tuple[Any, ...]:
    """Return a rank's part of the sequence-wise loss, where it has parts of sequences. `choices`: N counts, of all
    ranks that have parts of the same sequences. `given`: scores, not logits. `real`: which rows are tokens, if some may
    be padding."""
    if real_T:
        return real_balance(ops, (scores_TE, choices_NE, *real_T), (rows, top_k), () if given else (softmax,))
    if given:
        return (ops.counted_balance_scores(scores_TE, choices_NE, rows, sequence),)
    return (ops.counted_balance(scores_TE, choices_NE, rows, sequence, softmax),)


def build_balance(place: Place) -> ir.Segment:
    moe, rows = place.moe, rows_of_sequence(place)
    counts = place.T // rows * place.spec.sequence_ranks
    padded = real_rows(place)
    return segment(
        "balance",
        balance,
        (),
        (ir.Input("scores", (place.T, moe.experts), place.wide_dtype), index("choices", counts, moe.experts), *padded),
        ("sequence_loss",),
        rows=rows,
        sequence=place.spec.train.sequence,
        softmax=moe.score == "softmax",
        given=moe.score == "sqrt_softplus",
        **({"top_k": moe.top_k} if padded else {}),
    )
