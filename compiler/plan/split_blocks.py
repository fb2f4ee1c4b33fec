"""The rows that ranks exchange inside a model: with tensor and context ranks, and with experts."""

from __future__ import annotations

from typing import Literal

from compiler.ir import Buffer, Communication
from compiler.ir.expert_placement import ReceivedRows, even_rows, most_rows
from compiler.ir.names import gradient_of
from compiler.model.layers import Place
from dsl.facts.devices import most_nodes_of_token
from dsl.schema import Moe, Spec
from runtime.contract.names import Site

# --- The number of rows that ranks send to experts and receive: with even load, and for planning memory


def mixtures(spec: Spec) -> tuple[Moe, ...]:
    """The mixtures of experts in a model's layers."""
    return tuple(layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe))


def sent_rows(spec: Spec, moe: Moe) -> int:
    """Rows that a rank sends in a layer and micro-batch: for each token, one to each slice of each chosen expert."""
    return spec.tokens_of_rank * moe.top_k * spec.parallel.expert_tensor


def balanced_rows(spec: Spec) -> int:
    """Rows that an expert rank receives in a layer with even load: as many as it sends, padded."""
    ranks, alignment = spec.parallel.expert, spec.row_alignment
    rows = (even_rows(sent_rows(spec, moe), moe.experts // ranks, alignment) for moe in mixtures(spec))
    return max(rows, default=0)


def held_rows(spec: Spec) -> int:
    """Rows for planning memory: as many as an expert rank sends, with the most padding that these can need."""
    ranks, alignment = spec.parallel.expert, spec.row_alignment
    rows = (most_rows(sent_rows(spec, moe), moe.experts // ranks, alignment) for moe in mixtures(spec))
    return max(rows, default=0)


def planned_received_rows(spec: Spec) -> ReceivedRows:
    """Rows for planning memory: `held_rows`, with as many forwarded copies and rows as a rank sends at most."""
    rows = held_rows(spec)
    if not spec.routes_by_nodes or not mixtures(spec):
        return ReceivedRows(rows)
    copies = max(copies_of(spec, moe) for moe in mixtures(spec))
    return ReceivedRows(rows, spec.tokens_of_rank * copies, max(sent_rows(spec, moe) for moe in mixtures(spec)))


def copies_of(spec: Spec, moe: Moe) -> int:
    """The most nodes to which a token is sent."""
    return min(moe.top_k, most_nodes_of_token(moe.groups, moe.top_groups, _group_nodes(spec)))


def _group_nodes(spec: Spec) -> int:
    assert spec.group_nodes, "rows go through whole nodes"
    return spec.group_nodes


def most_held(spec: Spec, rows: int) -> ReceivedRows:
    """The rows of a rank that receives `rows`, the most possible, while every token of its column goes to its node."""
    if not spec.routes_by_nodes:
        return ReceivedRows(rows)
    tokens, nodes = spec.tokens_of_rank, _group_nodes(spec)
    most_choices = max((min(moe.top_k, moe.experts // nodes) for moe in mixtures(spec)), default=0)
    return ReceivedRows(rows, nodes * tokens, nodes * tokens * most_choices * spec.parallel.expert_tensor)


# --- Rows that tensor and context ranks gather and scatter inside a model
#
# Tensor ranks split the parts of a layer: enter | gather | attention | scatter | between | gather | dense | scatter |
# leave; attention whose heads are normed together: products | scatter | gather | attention; and the ends of the model:
# embed | scatter, and final_norm | gather | head | scatter | loss. Context ranks gather the inputs of the keys and
# values of whole sequences: project | gather | attend.


def gather(place: Place, site: str, x: str, output: str) -> Communication:
    """Gather the rows `x` of all tensor ranks as `output`."""
    sent, received = _rows(place, x, place.T), _rows(place, output, place.tokens_of_context_rank)
    return _communication("gather", site, "tp", sent, received)


def scatter(place: Place, site: str, y: str, output: str) -> Communication:
    """Reduce-scatter `y` over tensor ranks: each gets its rows of the sum, as `output`."""
    sent, received = _rows(place, y, place.tokens_of_context_rank), _rows(place, output, place.T)
    return _communication("scatter", site, "tp", sent, received)


def sum_everywhere(place: Place, site: str, part: str, sums: str, output: str) -> tuple[Communication, Communication]:
    """Sum the squares `part` over tensor ranks, for heads that are normed together."""
    ranks, dtype = place.spec.parallel.tensor, place.wide_dtype
    sent, summed, received = (
        Buffer(name, (rows, 2), dtype) for name, rows in ((part, place.T), (sums, place.T // ranks), (output, place.T))
    )
    return (
        _communication("scatter", site, "tp", sent, summed),
        _communication("gather", site, "tp", summed, received),
    )


def gather_sequences(site: str, sent: Buffer, output: str, context: int) -> Communication:
    """Gather the rows `sent` of all context ranks, in the order of their sequences."""
    return _communication("gather", site, "cp", sent, _gathered_buffer(sent, output, context))


def gather_choices(site: str, sent: Buffer, output: str, ranks: int) -> Communication:
    """Gather the counts `sent` of all ranks with parts of the same sequences, one after the other."""
    return _communication("choices", site, "sq", sent, _gathered_buffer(sent, output, ranks))


def _gathered_buffer(sent: Buffer, output: str, ranks: int) -> Buffer:
    count, *columns = sent.shape
    assert isinstance(count, int), sent
    return Buffer(output, (count * ranks, *columns), sent.dtype)


def _rows(place: Place, name: str, count: int) -> Buffer:
    return Buffer(name, (count, place.D), place.dtype)


def scatter_parts(place: Place, site: str, y: str, output: str) -> Communication:
    """Scatter the partial cross entropies `y` of all tensor ranks: each gets its rows, side by side, as `output`."""
    columns, dtype = place.spec.parallel.tensor + 1, place.wide_dtype
    sent, received = (
        Buffer(y, (place.tokens_of_context_rank, columns), dtype),
        Buffer(output, (place.T, columns), dtype),
    )
    return _communication("scatter", site, "tp", sent, received)


def _communication(
    kind: Literal["gather", "scatter", "choices"],
    site: str,
    axis: Literal["tp", "cp", "sq"],
    sent: Buffer,
    received: Buffer,
) -> Communication:
    grad = kind != "choices"
    return Communication(
        kind=kind,
        site=Site(site),
        axis=axis,
        inputs=(sent.name,),
        outputs=(received,),
        sizes=(sent,),
        arriving=(received.with_name(gradient_of(received.name)),) if grad else (),
        returned=(sent.with_name(gradient_of(sent.name)),) if grad else (),
    )
