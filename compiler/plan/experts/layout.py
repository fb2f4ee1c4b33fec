"""A placement of a layer's experts: its sizes, its balance, and the moves between two placements. Imports no torch.

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
    """A placement that is not possible or not valid. `hint` says what to change."""

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
        """The number of experts on a device."""
        return self.experts // self.devices

    @property
    def groups_divide(self) -> bool:
        """Whether every node can have the same number of whole groups."""
        return self.groups % self.nodes == 0

    def check(self) -> ExpertLayout:
        """Return itself. Raises PlacementError if the sizes do not fit each other."""
        for name in ("experts", "groups", "nodes", "devices"):
            if getattr(self, name) < 1:
                raise PlacementError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.experts > MAX_EXPERTS:
            raise PlacementError(f"experts = {self.experts:,} are too many: the limit is {MAX_EXPERTS:,}")
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
    """The largest load over the mean load, of devices and of nodes. 1 is perfect, and stands for no load."""

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
    """The balance of a placement."""
    total = load.sum()
    if total == 0:
        return LoadBalance(1.0, 1.0)
    device = device_loads(load, physical, layout.devices)
    node = node_loads(device, layout.nodes)
    return LoadBalance(
        max(1.0, float(device.max() * layout.devices / total)), max(1.0, float(node.max() * layout.nodes / total))
    )


def default_placement(layout: ExpertLayout) -> Ints:
    """The placement of a plan without a placement file: expert e is on device e // (experts / devices)."""
    return np.arange(layout.experts, dtype=np.int64)


def keeps_groups(physical: Ints, layout: ExpertLayout) -> bool:
    """Whether all experts of each group are on one node."""
    slots_of_node, group_size = layout.experts // layout.nodes, layout.experts // layout.groups
    node = np.arange(layout.experts) // slots_of_node
    pairs = np.unique(physical // group_size * layout.nodes + node)
    return len(pairs) == layout.groups


# ---------------------------------------------------------------- moves
@dataclass(frozen=True, slots=True)
class ExpertMove:
    """An expert moves from one device to another."""

    expert: int
    source: int
    destination: int

    def __str__(self) -> str:
        return f"expert {self.expert}: device {self.source} → device {self.destination}"


def aligned(physical: Ints, now: Ints, layout: ExpertLayout) -> Ints:
    """The placement with its nodes, and the devices of each, renamed to the ones in `now` that they resemble most.

    The experts of each device are in ascending order. Loads do not change.
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
    """The placement with the experts of each device in ascending order."""
    ordered: Ints = np.sort(physical.reshape(layout.devices, -1), axis=1).reshape(-1)
    return ordered


def moves(now: Ints, physical: Ints, layout: ExpertLayout) -> tuple[ExpertMove, ...]:
    """The moves that lead from one placement to the other, by expert."""
    sources, targets = ((np.argsort(each) // layout.slots).tolist() for each in (now, physical))
    pairs = enumerate(zip(sources, targets, strict=True))
    return tuple(ExpertMove(expert, source, target) for expert, (source, target) in pairs if source != target)


def _held(physical: Ints, layout: ExpertLayout) -> Ints:
    """[device, expert] → 1 if the device has the expert, else 0."""
    held = np.zeros((layout.devices, layout.experts), dtype=np.int64)
    held[np.arange(layout.experts) // layout.slots, physical] = 1
    return held


def _matched(alike: Ints) -> list[tuple[int, int]]:
    """(row, column) pairs of a square matrix, the most alike first, with each row and column once."""
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


# --- The traffic of a placement on the links: copies of a token to nodes and to devices
#
# A token goes to each node once, and from there to each device once, as in DeepSeek-V3 (arXiv 2412.19437, §3.2.2). A
# load does not say how often two experts are chosen together. The estimate assumes that a token takes each group as
# often as the group's load says, independently, and independent experts within its groups. Two bounds hold without
# these assumptions: `least`, if experts of a node are chosen together as often as possible, and `most`, as rarely as
# possible.


@dataclass(frozen=True, slots=True)
class TokenRouting:
    """How a token chooses experts: `top_k` experts in `top_groups` groups; and the size of its copies."""

    top_k: int
    top_groups: int
    row_bytes: int  # of a copy to the experts and back


@dataclass(frozen=True, slots=True)
class Copies:
    """The average number of copies of a token."""

    expected: float
    least: float  # lower bound for any choice of experts with this load
    most: float  # upper bound, likewise
    busiest: float  # share of the tokens of which the busiest node or device gets a copy

    def over_links(self, nodes: int) -> float:
        """The expected number of copies that leave the token's node, if tokens start evenly on all nodes."""
        return self.expected * (nodes - 1) / nodes


def copies(load: Floats, physical: Ints, layout: ExpertLayout, routing: TokenRouting, parts: int) -> Copies:
    """Copies of a token to the nodes (`parts` = nodes) or to the devices of a placement; zeros without load."""
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
    whole = parts == layout.nodes and keeps_groups(physical, layout)  # then a token goes to no more nodes than groups
    most = min(most, routing.top_k, *([routing.top_groups] if whole else []))
    return Copies(min(float(reached.sum()), most), least, most, float(reached.max()))


def _used(chosen: Floats, layout: ExpertLayout, routing: TokenRouting) -> Floats:
    """The probability that a token takes each group: in proportion to load, `top_groups` in sum, and at most 1."""
    group = chosen.reshape(layout.groups, -1)
    used = np.minimum(1.0, group.sum(axis=1) * routing.top_groups / routing.top_k)
    result: Floats = np.maximum(used, group.max(axis=1))
    return result
