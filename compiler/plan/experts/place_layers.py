"""Places the experts of layers, one layer after the other, and reports each as a row and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

VERSION = 1  # of the JSON, docs/json.md


class BusiestTokens(NamedTuple):
    """Tokens of the busiest device of a layer, and of the average device."""

    before: float
    greedy: float
    after: float
    mean: float


@dataclass(frozen=True)
class LayerRow:
    """A placed layer."""

    layer: str
    load: Floats
    layout: ExpertLayout
    placement: FoundPlacement
    current: Ints  # the placement before
    before: LoadBalance  # its balance
    moved: tuple[ExpertMove, ...]  # from the current placement to the new one
    traffic: TokenTraffic | None  # None if the model is unknown
    groups_whole: LoadBalance | None = (
        None  # of the best placement that keeps groups on their nodes, if this one does not
    )

    @property
    def busiest(self) -> BusiestTokens:
        mean = float(self.load.sum()) / self.layout.devices
        before = float(device_loads(self.load, self.current, self.layout.devices).max())
        return BusiestTokens(before, self.placement.greedy.device * mean, self.placement.balance.device * mean, mean)


@dataclass(frozen=True)
class TokenTraffic:
    """The copies of a token that go between nodes and to devices, before and after, and the bytes of a copy."""

    copy_bytes: int  # to the experts and back
    nodes: int
    to_nodes_before: Copies
    to_nodes: Copies
    to_devices_before: Copies
    to_devices: Copies
    to_nodes_groups_whole: Copies | None  # if groups were kept on their nodes


@dataclass(frozen=True)
class OverallBalance:
    """The balance of all layers: the sum of their busiest devices' loads over the sum of their mean loads.

    Layers run one after the other, and each waits for its busiest device.
    """

    before: float
    greedy: float
    after: float
    bound: float
    groups_whole: float | None  # if all groups were kept on their nodes; None if they are


def overall(rows: Sequence[LayerRow]) -> OverallBalance:
    """The balance of all layers together; 1 if there is no load."""
    busiest = [row.busiest for row in rows]
    mean = sum(tokens.mean for tokens in busiest)
    if mean == 0:
        return OverallBalance(1.0, 1.0, 1.0, 1.0, None)
    groups_whole = None
    if any(row.groups_whole for row in rows):
        pairs = zip(rows, busiest, strict=True)
        loads = (
            tokens.after if row.groups_whole is None else row.groups_whole.device * tokens.mean for row, tokens in pairs
        )
        groups_whole = sum(loads) / mean
    return OverallBalance(
        before=sum(tokens.before for tokens in busiest) / mean,
        greedy=sum(tokens.greedy for tokens in busiest) / mean,
        after=sum(tokens.after for tokens in busiest) / mean,
        bound=sum(row.placement.bound * tokens.mean for row, tokens in zip(rows, busiest, strict=True)) / mean,
        groups_whole=groups_whole,
    )


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
            "groups_whole": total.groups_whole,
        },
    }


def _layer_value(row: LayerRow) -> dict[str, Any]:
    placement = row.placement
    return {
        "layer": row.layer,
        "physical_to_logical": placement.physical.tolist(),
        "balance": _balance_value(placement.balance),
        "before": _balance_value(row.before),
        "greedy": _balance_value(placement.greedy),
        "bound": placement.bound,
        "gap": placement.gap,
        "groups_kept": placement.keeps_groups,
        "groups_whole": None if row.groups_whole is None else _balance_value(row.groups_whole),
        "moves": [[move.expert, move.source, move.destination] for move in row.moved],
        "links": None if row.traffic is None else _traffic_value(row.traffic),
    }


def _balance_value(balance: LoadBalance) -> dict[str, float]:
    return {"device": balance.device, "node": balance.node}


def _traffic_value(traffic: TokenTraffic) -> dict[str, Any]:
    return {
        "copy_bytes": traffic.copy_bytes,
        "before": _bytes(traffic, traffic.to_nodes_before, traffic.to_devices_before),
        "after": _bytes(traffic, traffic.to_nodes, traffic.to_devices),
    }


def _bytes(traffic: TokenTraffic, node: Copies, device: Copies) -> dict[str, float]:
    return {
        "node_copies": node.expected,
        "least_node_copies": node.lower,
        "most_node_copies": node.upper,
        "between_nodes_bytes": node.over_links(traffic.nodes) * traffic.copy_bytes,
        "busiest_node_bytes": node.busiest * (traffic.nodes - 1) / traffic.nodes * traffic.copy_bytes,
        "to_devices_bytes": device.expected * traffic.copy_bytes,
        "busiest_device_bytes": device.busiest * traffic.copy_bytes,
    }


# ---------------------------------------------------------------- layers to place

MAX_TOTAL_EXPERTS = 1 << 22  # of all layers


@dataclass(frozen=True)
class LayerTask:
    """A layer to place."""

    layer: str
    load: Floats
    layout: ExpertLayout
    current: Ints  # its placement before
    steady: bool = False  # whether a run uses `current`, so that little of it should change
    routing: TokenRouting | None = None  # None if the model is unknown


def current_placement(layout: ExpertLayout, placement: LayerPlacement | None = None) -> Ints:
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
    total = sum(task.layout.experts for task in tasks)
    if total > MAX_TOTAL_EXPERTS:
        raise PlacementError(f"{total:,} experts in all layers are too many: the limit is {MAX_TOTAL_EXPERTS:,}")
    rows = []
    for done, task in enumerate(tasks):
        progress(done)
        rows.append(_row(task, rule))
    return rows


def _row(task: LayerTask, rule: GroupRule) -> LayerRow:
    load, layout, current = task.load, task.layout, task.current
    placement = place_layer(load, layout, rule, current, task.steady)
    before, moved = balance_of(load, current, layout), moves(current, placement.physical, layout)
    traffic = None if task.routing is None else _traffic(task, task.routing, placement)
    groups_whole = None if placement.grouped is None else balance_of(load, placement.grouped, layout)
    return LayerRow(task.layer, load, layout, placement, current, before, moved, traffic, groups_whole)


def _traffic(task: LayerTask, routing: TokenRouting, placement: FoundPlacement) -> TokenTraffic:
    layout, current = task.layout, task.current
    nodes_before, nodes, devices_before, devices = (
        copies(task.load, physical, layout, routing, parts)
        for parts in (layout.nodes, layout.devices)
        for physical in (current, placement.physical)
    )
    groups_whole = (
        None if placement.grouped is None else copies(task.load, placement.grouped, layout, routing, layout.nodes)
    )
    return TokenTraffic(routing.row_bytes, layout.nodes, nodes_before, nodes, devices_before, devices, groups_whole)


def file_layers(rows: Sequence[LayerRow]) -> list[LayerPlacement]:
    """The entries of the layers in a placement file."""
    return [
        layer_placement(
            row.layer, in_order(row.placement.physical, row.layout), row.layout.devices, row.moved, row.load
        )
        for row in rows
    ]
