"""What a placement of a layer's experts is, how even it is, and what moves from one to another. No torch.

Slot p is on device p // (experts / devices), device d on node d // (devices / nodes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MAX_EXPERTS = 65_536  # of a layer


class PlacementError(ValueError):
    """What is asked for cannot be placed; `hint` says what to change."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Sizes of a layer: experts in groups of neighbours, devices in nodes."""

    experts: int
    groups: int
    nodes: int
    devices: int

    @property
    def slots(self) -> int:
        """Experts of a device."""
        return self.experts // self.devices

    @property
    def groups_divide(self) -> bool:
        """Whether every node can have whole groups, equally many."""
        return self.groups % self.nodes == 0

    def check(self) -> ExpertLayout:
        """Itself; PlacementError where the sizes do not fit each other."""
        for name in ("experts", "groups", "nodes", "devices"):
            if getattr(self, name) < 1:
                raise PlacementError(f"{name} = {getattr(self, name)}: at least 1")
        if self.experts > MAX_EXPERTS:
            raise PlacementError(f"experts = {self.experts:,} are too many: at most {MAX_EXPERTS:,}")
        if self.experts % self.devices:
            raise PlacementError(f"experts = {self.experts} cannot be spread evenly over devices = {self.devices}")
        if self.devices % self.nodes:
            raise PlacementError(
                f"devices = {self.devices} cannot be spread evenly over nodes = {self.nodes}",
                "--devices counts the devices of all nodes together",
            )
        if self.experts % self.groups:
            raise PlacementError(f"groups = {self.groups} do not divide the {self.experts} experts of the load file")
        return self


@dataclass(frozen=True, slots=True)
class LoadBalance:
    """Largest load over the mean load; 1 is perfect, and what a layer without load has."""

    device: float
    node: float


def device_loads(load: Floats, physical: Ints, devices: int) -> Floats:
    """Tokens of each device. `physical`: the expert in each slot."""
    loads: Floats = load[physical].reshape(devices, -1).sum(axis=1)
    return loads


def node_loads(device: Floats, nodes: int) -> Floats:
    """Tokens of each node, from those of its devices."""
    loads: Floats = device.reshape(nodes, -1).sum(axis=1)
    return loads


def balance_of(load: Floats, physical: Ints, layout: ExpertLayout) -> LoadBalance:
    """How even a placement is."""
    total = load.sum()
    if total == 0:
        return LoadBalance(1.0, 1.0)
    device = device_loads(load, physical, layout.devices)
    node = node_loads(device, layout.nodes)
    return LoadBalance(
        max(1.0, float(device.max() * layout.devices / total)), max(1.0, float(node.max() * layout.nodes / total))
    )


def default_placement(layout: ExpertLayout) -> Ints:
    """What a plan does by itself: expert e on device e // (experts / devices)."""
    return np.arange(layout.experts, dtype=np.int64)


def keeps_groups(physical: Ints, layout: ExpertLayout) -> bool:
    """Whether all experts of each group are on one node."""
    slots_of_node, group_size = layout.experts // layout.nodes, layout.experts // layout.groups
    node = np.arange(layout.experts) // slots_of_node
    pairs = np.unique(physical // group_size * layout.nodes + node)
    return len(pairs) == layout.groups


# ---------------------------------------------------------------- what moves
@dataclass(frozen=True, slots=True)
class ExpertMove:
    """An expert leaves a device for another."""

    expert: int
    source: int
    destination: int

    def __str__(self) -> str:
        return f"expert {self.expert}: device {self.source} → device {self.destination}"


def aligned(physical: Ints, now: Ints, layout: ExpertLayout) -> Ints:
    """The placement with its nodes, and the devices of each, renamed after those of `now` that they resemble most.

    Experts of a device are in ascending order. Loads do not change.
    """
    new, old = _held(physical, layout), _held(now, layout)
    shared = new @ old.T  # [new device, old device] → experts of both
    per_node = layout.devices // layout.nodes
    blocks = shared.reshape(layout.nodes, per_node, layout.nodes, per_node)
    devices = np.empty(layout.devices, dtype=np.int64)  # old name → new device
    for new_node, old_node in _matched(blocks.max(axis=3).sum(axis=1)):
        for mine, theirs in _matched(blocks[new_node, :, old_node, :]):
            devices[old_node * per_node + theirs] = new_node * per_node + mine
    return in_order(physical.reshape(layout.devices, -1)[devices].reshape(-1), layout)


def in_order(physical: Ints, layout: ExpertLayout) -> Ints:
    """The experts of every device ascending."""
    ordered: Ints = np.sort(physical.reshape(layout.devices, -1), axis=1).reshape(-1)
    return ordered


def moves(now: Ints, physical: Ints, layout: ExpertLayout) -> tuple[ExpertMove, ...]:
    """What leads from one placement to the other, by expert."""
    sources, targets = ((np.argsort(each) // layout.slots).tolist() for each in (now, physical))
    pairs = enumerate(zip(sources, targets, strict=True))
    return tuple(ExpertMove(expert, source, target) for expert, (source, target) in pairs if source != target)


def _held(physical: Ints, layout: ExpertLayout) -> Ints:
    """[device, expert] → 1 where the device has the expert."""
    held = np.zeros((layout.devices, layout.experts), dtype=np.int64)
    held[np.arange(layout.experts) // layout.slots, physical] = 1
    return held


def _matched(alike: Ints) -> list[tuple[int, int]]:
    """Pairs (row, column) of a square matrix, the most alike first; each once."""
    size = len(alike)
    rows, columns, pairs = set(range(size)), set(range(size)), []
    for flat in np.argsort(-alike.reshape(-1), kind="stable").tolist():
        row, column = divmod(flat, size)
        if row in rows and column in columns:
            rows.remove(row)
            columns.remove(column)
            pairs.append((row, column))
            if not rows:
                break
    return pairs


# --- What a placement sends over the links: copies of a token to nodes and to devices
#
# A token goes to each node once, from there to each device once, as DeepSeek-V3 dispatches it (arXiv 2412.19437,
# §3.2.2). How often two experts are chosen together is not in a load, so it is assumed that a token takes a group as
# often as the group's load says, and that within its groups its experts do not depend on each other; groups neither.
# What holds without the assumption is given beside it: `least` where experts of a node are chosen together as often as
# can be, `most` where as seldom.


@dataclass(frozen=True, slots=True)
class TokenRouting:
    """How a token chooses: `top_k` experts of `top_groups` groups; and what a copy of it weighs."""

    top_k: int
    top_groups: int
    row_bytes: int  # there and back


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a token, on average: expected, and what no choice of experts with this load goes below or above.

    busiest: share of tokens that the busiest node or device gets a copy of.
    """

    expected: float
    least: float
    most: float
    busiest: float

    def over_links(self, nodes: int) -> float:
        """Expected copies that leave the token's node: tokens begin on every node alike."""
        return self.expected * (nodes - 1) / nodes


def copies(load: Floats, physical: Ints, layout: ExpertLayout, routing: TokenRouting, parts: int) -> Copies:
    """To the nodes (`parts` = nodes) or to the devices of a placement; zeros without load."""
    total = float(load.sum())
    if total == 0:
        return Copies(0.0, 0.0, 0.0, 0.0)
    chosen = np.minimum(1.0, load / total * routing.top_k)  # how often a token takes each expert
    used = _used(chosen, layout, routing)
    here = np.zeros((parts, layout.experts))  # [part, expert] → how often a token takes it there
    here[np.arange(layout.experts) // (layout.experts // parts), physical] = chosen[physical]
    size = layout.experts // layout.groups
    of_group = np.repeat(used, size)
    within = np.divide(here, of_group, out=np.zeros_like(here), where=of_group > 0)
    missed = 1.0 - used * (1.0 - (1.0 - within).reshape(parts, layout.groups, size).prod(axis=2))
    reached = 1.0 - missed.prod(axis=1)
    least, most = float(here.max(axis=1).sum()), float(np.minimum(1.0, here.sum(axis=1)).sum())
    whole = parts == layout.nodes and keeps_groups(physical, layout)  # then a token has no more nodes than groups
    most = min(most, routing.top_k, *([routing.top_groups] if whole else []))
    return Copies(min(float(reached.sum()), most), least, most, float(reached.max()))


def _used(chosen: Floats, layout: ExpertLayout, routing: TokenRouting) -> Floats:
    """How often a token takes each group: in proportion to its load, `top_groups` in all, no group more than always."""
    group = chosen.reshape(layout.groups, -1)
    used = np.minimum(1.0, group.sum(axis=1) * routing.top_groups / routing.top_k)
    result: Floats = np.maximum(used, group.max(axis=1))
    return result
