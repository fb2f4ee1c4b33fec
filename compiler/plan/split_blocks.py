"""Rows that ranks exchange inside of a model: with the ranks that split tensors or sequences, and with experts."""

from __future__ import annotations

from typing import Literal

from compiler.ir import Buffer, Communication
from compiler.ir.expert_placement import Received, even_rows, most_rows
from compiler.ir.names import gradient_of
from compiler.model.layers import Place
from dsl.facts.devices import reached
from dsl.schema import Moe, Spec
from runtime.contract.names import Site

# --- How many rows ranks send to experts and receive: when the load is even, and as memory is planned for


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


# --- What ranks exchange inside of a model: rows that tensor ranks, or context ranks, put together and take apart
#
# Tensor ranks split the parts of a layer: enter | gather | attention | scatter | between | gather | dense | scatter |
# leave, attention whose heads are normed together: products | scatter | gather | attention, and the ends: embed |
# scatter, and final_norm | gather | head | scatter | loss. Context ranks put together what keys and values of whole
# sequences are made of: project | gather | attend.


def gather(place: Place, site: str, x: str, out: str) -> Communication:
    """The rows `x` of every tensor rank, put together as `out`."""
    given, taken = _rows(place, x, place.T), _rows(place, out, place.tokens_of_context_rank)
    return _communication("gather", site, "tp", given, taken)


def scatter(place: Place, site: str, y: str, out: str) -> Communication:
    """The sum of what every tensor rank has as `y`; each gets its rows, as `out`."""
    given, taken = _rows(place, y, place.tokens_of_context_rank), _rows(place, out, place.T)
    return _communication("scatter", site, "tp", given, taken)


def sum_everywhere(place: Place, site: str, part: str, sums: str, out: str) -> tuple[Communication, Communication]:
    """The sums over tensor ranks of the squares that each has as `part`, of heads that are normed as one."""
    ranks, dtype = place.spec.parallel.tensor, place.wide_dtype
    given, mine, taken = (
        Buffer(name, (rows, 2), dtype) for name, rows in ((part, place.T), (sums, place.T // ranks), (out, place.T))
    )
    return (
        _communication("scatter", site, "tp", given, mine),
        _communication("gather", site, "tp", mine, taken),
    )


def gather_sequences(site: str, given: Buffer, out: str, context: int) -> Communication:
    """The rows `given` of every context rank, put together in the order of their sequences."""
    return _communication("gather", site, "cp", given, _of_all(given, out, context))


def gather_choices(site: str, given: Buffer, out: str, ranks: int) -> Communication:
    """The counts `given` of every rank that has parts of the same sequences, one after the other."""
    return _communication("choices", site, "sq", given, _of_all(given, out, ranks))


def _of_all(given: Buffer, out: str, ranks: int) -> Buffer:
    count, *columns = given.shape
    assert isinstance(count, int), given
    return Buffer(out, (count * ranks, *columns), given.dtype)


def _rows(place: Place, name: str, count: int) -> Buffer:
    return Buffer(name, (count, place.D), place.dtype)


def scatter_parts(place: Place, site: str, y: str, out: str) -> Communication:
    """The parts of the cross entropy that every tensor rank has as `y`, side by side; each gets its rows, as `out`."""
    columns, dtype = place.spec.parallel.tensor + 1, place.wide_dtype
    given, taken = (Buffer(y, (place.tokens_of_context_rank, columns), dtype), Buffer(out, (place.T, columns), dtype))
    return _communication("scatter", site, "tp", given, taken)


def _communication(
    kind: Literal["gather", "scatter", "choices"],
    site: str,
    axis: Literal["tp", "cp", "sq"],
    given: Buffer,
    taken: Buffer,
) -> Communication:
    grad = kind != "choices"
    return Communication(
        kind=kind,
        site=Site(site),
        axis=axis,
        inputs=(given.name,),
        outputs=(taken,),
        sizes=(given,),
        arriving=(taken.named(gradient_of(taken.name)),) if grad else (),
        returned=(given.named(gradient_of(given.name)),) if grad else (),
    )
