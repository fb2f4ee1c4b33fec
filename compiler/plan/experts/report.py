"""Layers to place, one after the other: a task each, and a row of the report each, as values and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.ir.expert_placement import LayerPlacement
from compiler.plan.experts.layer_search import FoundPlacement, GroupRule, place_layer
from compiler.plan.experts.layout import (
    Copies,
    ExpertLayout,
    Floats,
    Ints,
    LoadBalance,
    PlacementError,
    ReplicaMove,
    TokenRouting,
    balance_of,
    copies,
    default_placement,
    device_loads,
    in_order,
    moves,
)
from compiler.plan.experts.placement_file import layer_placement, physical_of

VERSION = 1


@dataclass(frozen=True)
class LayerRow:
    """A layer. `now`: the placement at hand, `moved`: what leads away from it; None where none is known."""

    layer: str
    load: Floats
    layout: ExpertLayout
    found: FoundPlacement
    now: Ints | None
    before: LoadBalance | None
    moved: tuple[ReplicaMove, ...] | None
    links: LinkBytes | None
    whole: LoadBalance | None = None  # of the best that keeps groups on their nodes, where this does not

    @property
    def busiest(self) -> tuple[float | None, float, float, float]:
        """Tokens of the busiest device: before, as the greedy has it, now; and of the average device."""
        mean = float(self.load.sum()) / self.layout.devices
        before = None if self.now is None else float(device_loads(self.load, self.now, self.layout.devices).max())
        return before, self.found.greedy.device * mean, self.found.balance.device * mean, mean


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of a token over the links between nodes and to the devices, there and back. before: None if not known."""

    row_bytes: int
    nodes: int
    to_nodes_before: Copies | None
    to_nodes: Copies
    to_devices_before: Copies | None
    to_devices: Copies
    to_nodes_whole: Copies | None  # where groups would be kept on their nodes


@dataclass(frozen=True)
class Overall:
    """Layers run one after the other, and each waits for its busiest device: their sums over those of the means."""

    before: float | None
    greedy: float
    after: float
    bound: float
    whole: float | None  # where no group were split; None where none is


def overall(rows: Sequence[LayerRow]) -> Overall:
    """The balance of all layers together; 1 where there is no load."""
    busiest = [row.busiest for row in rows]
    mean = sum(each[3] for each in busiest)
    if mean == 0:
        return Overall(None if busiest[0][0] is None else 1.0, 1.0, 1.0, 1.0, None)
    has_before = all(each[0] is not None for each in busiest)
    before = sum(each[0] or 0.0 for each in busiest) / mean if has_before else None
    bound = sum(row.found.bound * each[3] for row, each in zip(rows, busiest, strict=True)) / mean
    greedy, after = sum(each[1] for each in busiest) / mean, sum(each[2] for each in busiest) / mean
    whole = None
    if any(row.whole for row in rows):
        pairs = zip(rows, busiest, strict=True)
        whole = sum(each[2] if row.whole is None else row.whole.device * each[3] for row, each in pairs) / mean
    return Overall(before, greedy, after, bound, whole)


# ---------------------------------------------------------------- JSON


def document(rows: Sequence[LayerRow]) -> dict[str, Any]:
    """docs/json.md."""
    total = overall(rows)
    return {
        "version": VERSION,
        "layers": [_layer_value(row) for row in rows],
        "overall": {
            "before": total.before,
            "greedy": total.greedy,
            "after": total.after,
            "bound": total.bound,
            "groups_whole": total.whole,
        },
    }


def _layer_value(row: LayerRow) -> dict[str, Any]:
    found = row.found
    moved = None if row.moved is None else [[m.expert, m.source, m.destination] for m in row.moved]
    return {
        "layer": row.layer,
        "physical_to_logical": found.physical.tolist(),
        "balance": _balance_value(found.balance),
        "before": None if row.before is None else _balance_value(row.before),
        "greedy": _balance_value(found.greedy),
        "bound": found.bound,
        "gap": found.gap,
        "groups_kept": found.keeps_groups,
        "groups_whole": None if row.whole is None else _balance_value(row.whole),
        "moves": moved,
        "links": None if row.links is None else _links_value(row.links),
    }


def _balance_value(balance: LoadBalance) -> dict[str, float]:
    return {"device": balance.device, "node": balance.node}


def _links_value(links: LinkBytes) -> dict[str, Any]:
    pairs = ((links.to_nodes_before, links.to_devices_before), (links.to_nodes, links.to_devices))
    before, after = (None if node is None or device is None else _bytes(links, node, device) for node, device in pairs)
    return {"copy_bytes": links.row_bytes, "before": before, "after": after}


def _bytes(links: LinkBytes, node: Copies, device: Copies) -> dict[str, float]:
    return {
        "node_copies": node.expected,
        "least_node_copies": node.least,
        "most_node_copies": node.most,
        "between_nodes_bytes": node.over_links(links.nodes) * links.row_bytes,
        "busiest_node_bytes": node.busiest * (links.nodes - 1) / links.nodes * links.row_bytes,
        "to_devices_bytes": device.expected * links.row_bytes,
        "busiest_device_bytes": device.busiest * links.row_bytes,
    }


# ---------------------------------------------------------------- layers to place

MAX_CELLS = 1 << 22  # slots of all layers


@dataclass(frozen=True)
class LayerTask:
    """A layer. `now`: its placement at hand; None where experts have replicas, of which no plan knows."""

    layer: str
    load: Floats
    layout: ExpertLayout
    now: Ints | None = None
    steady: bool = False  # `now` is what a run has, so that little of it is changed
    routing: TokenRouting | None = None  # of a model that is known


def at_hand(layout: ExpertLayout, placement: LayerPlacement | None = None) -> Ints | None:
    """The placement of a layer before: that of a file, or else a plan's own."""
    if layout.replicas > layout.experts:
        return None
    if placement is None or len(placement.devices) != layout.devices or placement.num_experts != layout.experts:
        return default_placement(layout)
    return physical_of(placement)


def place_all(
    tasks: Sequence[LayerTask], rule: GroupRule, progress: Callable[[int], None] = lambda _: None
) -> list[LayerRow]:
    """`progress` is told how many layers are placed. PlacementError where they are too many, or do not fit."""
    cells = sum(task.layout.replicas for task in tasks)
    if cells > MAX_CELLS:
        raise PlacementError(f"{cells:,} physical experts of all layers are too many: at most {MAX_CELLS:,}")
    rows = []
    for done, task in enumerate(tasks):
        progress(done)
        rows.append(_row(task, rule))
    return rows


def _row(task: LayerTask, rule: GroupRule) -> LayerRow:
    load, layout, now = task.load, task.layout, task.now
    found = place_layer(load, layout, rule, now, task.steady)
    before = None if now is None else balance_of(load, now, layout)
    moved = None if now is None else moves(now, found.physical, layout)
    links = None
    if task.routing is not None:
        links = _links(task, task.routing, found)
    whole = None if found.whole is None else balance_of(load, found.whole, layout)
    return LayerRow(task.layer, load, layout, found, now, before, moved, links, whole)


def _links(task: LayerTask, routing: TokenRouting, found: FoundPlacement) -> LinkBytes:
    layout, now = task.layout, task.now
    pairs = [
        None if placement is None else copies(task.load, placement, layout, routing, parts)
        for parts in (layout.nodes, layout.devices)
        for placement in (now, found.physical)
    ]
    nodes_before, nodes, devices_before, devices = pairs
    assert nodes is not None and devices is not None
    whole = None if found.whole is None else copies(task.load, found.whole, layout, routing, layout.nodes)
    return LinkBytes(routing.row_bytes, layout.nodes, nodes_before, nodes, devices_before, devices, whole)


def file_layers(rows: Sequence[LayerRow]) -> list[LayerPlacement]:
    """What the file of a placement says of them."""
    return [
        layer_placement(
            row.layer, in_order(row.found.physical, row.layout), row.layout.devices, row.moved or (), row.load
        )
        for row in rows
    ]
