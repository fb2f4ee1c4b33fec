"""Layers to place, one after the other: a task each, a row of the report each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.expert_placement import LayerPlacement
from compiler.experts.align import in_order, moves
from compiler.experts.copies import Routing, copies
from compiler.experts.layer_search import GroupRule, Placed, place_layer
from compiler.experts.layout import Floats, Ints, Layout, PlaceError, balance_of, default_placement
from compiler.experts.placement_file import layer_placement, physical_of
from compiler.experts.report import Links, Row

MAX_CELLS = 1 << 22  # slots of all layers


@dataclass(frozen=True)
class Task:
    """A layer. `now`: its placement at hand; None where experts have replicas, of which no plan knows."""

    layer: str
    load: Floats
    layout: Layout
    now: Ints | None = None
    steady: bool = False  # `now` is what a run has, so that little of it is changed
    routing: Routing | None = None  # of a model that is known


def at_hand(layout: Layout, known: LayerPlacement | None = None) -> Ints | None:
    """The placement of a layer before: that of a file, or else a plan's own."""
    if layout.replicas > layout.experts:
        return None
    if known is None or len(known.devices) != layout.devices or known.num_experts != layout.experts:
        return default_placement(layout)
    return physical_of(known)


def place_all(tasks: Sequence[Task], rule: GroupRule, progress: Callable[[int], None] = lambda _: None) -> list[Row]:
    """`progress` is told how many layers are placed. PlaceError where they are too many, or do not fit."""
    cells = sum(task.layout.replicas for task in tasks)
    if cells > MAX_CELLS:
        raise PlaceError(f"{cells:,} physical experts of all layers are too many: at most {MAX_CELLS:,}")
    rows = []
    for done, task in enumerate(tasks):
        progress(done)
        rows.append(_row(task, rule))
    return rows


def _row(task: Task, rule: GroupRule) -> Row:
    load, layout, now = task.load, task.layout, task.now
    placed = place_layer(load, layout, rule, now, task.steady)
    before = None if now is None else balance_of(load, now, layout)
    moved = None if now is None else moves(now, placed.physical, layout)
    links = None
    if task.routing is not None:
        links = _links(task, task.routing, placed)
    whole = None if placed.whole is None else balance_of(load, placed.whole, layout)
    return Row(task.layer, load, layout, placed, now, before, moved, links, whole)


def _links(task: Task, routing: Routing, placed: Placed) -> Links:
    layout, now = task.layout, task.now
    pairs = [
        None if placement is None else copies(task.load, placement, layout, routing, parts)
        for parts in (layout.nodes, layout.devices)
        for placement in (now, placed.physical)
    ]
    nodes_before, nodes, devices_before, devices = pairs
    assert nodes is not None and devices is not None
    whole = None if placed.whole is None else copies(task.load, placed.whole, layout, routing, layout.nodes)
    return Links(routing.row_bytes, layout.nodes, nodes_before, nodes, devices_before, devices, whole)


def file_layers(rows: Sequence[Row]) -> list[LayerPlacement]:
    """What the file of a placement says of them."""
    return [
        layer_placement(
            row.layer, in_order(row.placed.physical, row.layout), row.layout.devices, row.moved or (), row.load
        )
        for row in rows
    ]
