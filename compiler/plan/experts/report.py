"""Places layers one after the other, from a task to a row of the report for each, as values and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.ir.expert_placement import LayerPlacement
from compiler.plan.experts.layer_search import FoundPlacement, GroupRule, place_layer
from compiler.plan.experts.layout import (
    Copies,
    ExpertLayout,
    ExpertMove,
    Floats,
    Ints,
    LoadBalance,
    PlacementError,
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
    """A placed layer."""

    layer: str
    load: Floats
    layout: ExpertLayout
    found: FoundPlacement
    now: Ints  # the current placement
    before: LoadBalance  # its balance
    moved: tuple[ExpertMove, ...]  # from the current placement to the found one
    links: LinkBytes | None
    whole: LoadBalance | None = None  # of the best placement that keeps groups on their nodes, if this one does not

    @property
    def busiest(self) -> tuple[float, float, float, float]:
        """Tokens of the busiest device before, with the greedy algorithm and after; and of the average device."""
        mean = float(self.load.sum()) / self.layout.devices
        before = float(device_loads(self.load, self.now, self.layout.devices).max())
        return before, self.found.greedy.device * mean, self.found.balance.device * mean, mean


@dataclass(frozen=True)
class LinkBytes:
    """The traffic of a token between nodes and to the devices."""

    row_bytes: int  # of a copy to the experts and back
    nodes: int
    to_nodes_before: Copies
    to_nodes: Copies
    to_devices_before: Copies
    to_devices: Copies
    to_nodes_whole: Copies | None  # if groups were kept on their nodes


@dataclass(frozen=True)
class Overall:
    """The balance of all layers: the sum of their busiest devices' loads over the sum of their mean loads.

    Layers run one after the other, and each waits for its busiest device.
    """

    before: float
    greedy: float
    after: float
    bound: float
    whole: float | None  # if all groups were kept on their nodes; None if they are


def overall(rows: Sequence[LayerRow]) -> Overall:
    """The balance of all layers together; 1 if there is no load."""
    busiest = [row.busiest for row in rows]
    mean = sum(each[3] for each in busiest)
    if mean == 0:
        return Overall(1.0, 1.0, 1.0, 1.0, None)
    bound = sum(row.found.bound * each[3] for row, each in zip(rows, busiest, strict=True)) / mean
    before, greedy, after = (sum(each[at] for each in busiest) / mean for at in range(3))
    whole = None
    if any(row.whole for row in rows):
        pairs = zip(rows, busiest, strict=True)
        whole = sum(each[2] if row.whole is None else row.whole.device * each[3] for row, each in pairs) / mean
    return Overall(before, greedy, after, bound, whole)


# ---------------------------------------------------------------- JSON


def document(rows: Sequence[LayerRow]) -> dict[str, Any]:
    """The JSON document of the report; see docs/json.md."""
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
    return {
        "layer": row.layer,
        "physical_to_logical": found.physical.tolist(),
        "balance": _balance_value(found.balance),
        "before": _balance_value(row.before),
        "greedy": _balance_value(found.greedy),
        "bound": found.bound,
        "gap": found.gap,
        "groups_kept": found.keeps_groups,
        "groups_whole": None if row.whole is None else _balance_value(row.whole),
        "moves": [[move.expert, move.source, move.destination] for move in row.moved],
        "links": None if row.links is None else _links_value(row.links),
    }


def _balance_value(balance: LoadBalance) -> dict[str, float]:
    return {"device": balance.device, "node": balance.node}


def _links_value(links: LinkBytes) -> dict[str, Any]:
    before = _bytes(links, links.to_nodes_before, links.to_devices_before)
    return {"copy_bytes": links.row_bytes, "before": before, "after": _bytes(links, links.to_nodes, links.to_devices)}


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

MAX_CELLS = 1 << 22  # experts of all layers


@dataclass(frozen=True)
class LayerTask:
    """A layer to place."""

    layer: str
    load: Floats
    layout: ExpertLayout
    now: Ints  # its current placement
    steady: bool = False  # whether a run uses `now`, so that little of it should change
    routing: TokenRouting | None = None  # None if the model is unknown


def at_hand(layout: ExpertLayout, placement: LayerPlacement | None = None) -> Ints:
    """The current placement of a layer: the given one if its sizes fit, or else the default."""
    if placement is None or len(placement.devices) != layout.devices or placement.num_experts != layout.experts:
        return default_placement(layout)
    return physical_of(placement)


def place_all(
    tasks: Sequence[LayerTask], rule: GroupRule, progress: Callable[[int], None] = lambda _: None
) -> list[LayerRow]:
    """Place all layers. `progress` is called with the number of layers that are done.

    Raises PlacementError if there are too many experts, or if sizes do not fit.
    """
    cells = sum(task.layout.experts for task in tasks)
    if cells > MAX_CELLS:
        raise PlacementError(f"{cells:,} experts in all layers are too many: the limit is {MAX_CELLS:,}")
    rows = []
    for done, task in enumerate(tasks):
        progress(done)
        rows.append(_row(task, rule))
    return rows


def _row(task: LayerTask, rule: GroupRule) -> LayerRow:
    load, layout, now = task.load, task.layout, task.now
    found = place_layer(load, layout, rule, now, task.steady)
    before, moved = balance_of(load, now, layout), moves(now, found.physical, layout)
    links = None if task.routing is None else _links(task, task.routing, found)
    whole = None if found.whole is None else balance_of(load, found.whole, layout)
    return LayerRow(task.layer, load, layout, found, now, before, moved, links, whole)


def _links(task: LayerTask, routing: TokenRouting, found: FoundPlacement) -> LinkBytes:
    layout, now = task.layout, task.now
    nodes_before, nodes, devices_before, devices = (
        copies(task.load, placement, layout, routing, parts)
        for parts in (layout.nodes, layout.devices)
        for placement in (now, found.physical)
    )
    whole = None if found.whole is None else copies(task.load, found.whole, layout, routing, layout.nodes)
    return LinkBytes(routing.row_bytes, layout.nodes, nodes_before, nodes, devices_before, devices, whole)


def file_layers(rows: Sequence[LayerRow]) -> list[LayerPlacement]:
    """The entries of the layers in a placement file."""
    return [
        layer_placement(row.layer, in_order(row.found.physical, row.layout), row.layout.devices, row.moved, row.load)
        for row in rows
    ]
