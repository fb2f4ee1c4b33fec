"""How many rows ranks send to experts and receive: when the load is even, and as memory is planned for."""

from __future__ import annotations

from compiler.ir.received_rows import Received, even_rows, most_rows
from dsl.facts.nodes import reached
from dsl.schema import Moe, Spec


def mixtures(spec: Spec) -> tuple[Moe, ...]:
    """The mixtures of experts of a model's layers."""
    return tuple(layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe))


def sent_rows(spec: Spec, moe: Moe) -> int:
    """Rows that a rank sends in a layer and micro-batch: one to each slice of each chosen expert of each token."""
    return spec.tokens_of_rank * moe.top_k * spec.parallel.expert_tensor


def balanced_rows(spec: Spec) -> int:
    """Rows an expert rank receives in a layer when the experts' load is even: as many as it sends, padded."""
    ranks, alignment = spec.parallel.expert, spec.row_alignment
    found = (even_rows(sent_rows(spec, moe), moe.experts // ranks, alignment) for moe in mixtures(spec))
    return max(found, default=0)


def held_rows(spec: Spec) -> int:
    """Rows that memory is planned for: as many as an expert rank sends, with as much padding as those can need."""
    ranks, alignment = spec.parallel.expert, spec.row_alignment
    found = (most_rows(sent_rows(spec, moe), moe.experts // ranks, alignment) for moe in mixtures(spec))
    return max(found, default=0)


def held(spec: Spec) -> Received:
    """What memory is planned for: `held_rows`, and that a rank forwards as many copies and rows as it sends at most."""
    rows = held_rows(spec)
    if not spec.by_nodes:
        return Received(rows)
    copies = max(copies_of(spec, moe) for moe in mixtures(spec))
    return Received(rows, spec.tokens_of_rank * copies, max(sent_rows(spec, moe) for moe in mixtures(spec)))


def copies_of(spec: Spec, moe: Moe) -> int:
    """The most nodes that a token goes to."""
    return min(moe.top_k, reached(moe.groups, moe.top_groups, _group_nodes(spec)))


def _group_nodes(spec: Spec) -> int:
    assert spec.group_nodes, "rows go through whole nodes"
    return spec.group_nodes


def most_held(spec: Spec, rows: int) -> Received:
    """What a rank has if it receives `rows`, the most there can be, and every token of its column goes to its node."""
    if not spec.by_nodes:
        return Received(rows)
    tokens, nodes = spec.tokens_of_rank, _group_nodes(spec)
    most = max(min(moe.top_k, moe.experts // nodes) for moe in mixtures(spec))
    return Received(rows, nodes * tokens, nodes * tokens * most * spec.parallel.expert_tensor)
