"""A placement of a layer's experts: its sizes, its balance, and the moves between two placements. Imports no torch.

A placement is an array `physical` with the expert of each slot. Slot p is on device p // (experts / devices), and
device d is on node d // (devices / nodes).
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
    """How many experts and groups a layer has, on how many nodes and devices. A group has consecutive experts."""

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
        """Return this layout. Raises PlacementError if a size is not possible or does not divide another."""
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
            raise PlacementError(
                f"the {self.experts} experts of the load file do not divide into groups = {self.groups}"
            )
        return self


@dataclass(frozen=True, slots=True)
class LoadBalance:
    """The largest load over the mean load, of devices and of nodes. 1 is perfect. Without any load it is 1."""

    device: float
    node: float


def device_loads(load: Floats, physical: Ints, devices: int) -> Floats:
    """Tokens of each device, from the tokens of each expert."""
    loads: Floats = load[physical].reshape(devices, -1).sum(axis=1)
    return loads


def node_loads(device: Floats, nodes: int) -> Floats:
    """Tokens of each node, from those of its devices."""
    loads: Floats = device.reshape(nodes, -1).sum(axis=1)
    return loads


def balance_of(load: Floats, physical: Ints, layout: ExpertLayout) -> LoadBalance:
    """How evenly a placement spreads a load."""
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
    slots_per_node, group_size = layout.experts // layout.nodes, layout.experts // layout.groups
    node = np.arange(layout.experts) // slots_per_node
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


def align_placement(physical: Ints, current: Ints, layout: ExpertLayout) -> Ints:
    """Renumber nodes, and devices within nodes, so that few experts have to move from the placement `current`.

    Nodes and devices take the numbers of those in `current` with which they share the most experts. The experts of each
    device are in ascending order. The balance stays the same.
    """
    new, old = _expert_matrix(physical, layout), _expert_matrix(current, layout)
    shared = new @ old.T  # [new device, old device] → number of experts that both have
    per_node = layout.devices // layout.nodes
    blocks = shared.reshape(layout.nodes, per_node, layout.nodes, per_node)
    devices = np.empty(layout.devices, dtype=np.int64)  # device in `current` → device in `physical`
    for new_node, old_node in _match_greedily(blocks.max(axis=3).sum(axis=1)):
        for new_device, old_device in _match_greedily(blocks[new_node, :, old_node, :]):
            devices[old_node * per_node + old_device] = new_node * per_node + new_device
    return in_order(physical.reshape(layout.devices, -1)[devices].reshape(-1), layout)


def in_order(physical: Ints, layout: ExpertLayout) -> Ints:
    """The placement with the experts of each device in ascending order."""
    ordered: Ints = np.sort(physical.reshape(layout.devices, -1), axis=1).reshape(-1)
    return ordered


def moves(current: Ints, physical: Ints, layout: ExpertLayout) -> tuple[ExpertMove, ...]:
    """The moves that turn the placement `current` into `physical`, in the order of experts."""
    sources, targets = ((np.argsort(placement) // layout.slots).tolist() for placement in (current, physical))
    pairs = enumerate(zip(sources, targets, strict=True))
    return tuple(ExpertMove(expert, source, target) for expert, (source, target) in pairs if source != target)


def _expert_matrix(physical: Ints, layout: ExpertLayout) -> Ints:
    """[device, expert] → 1 if the device has the expert, else 0."""
    has_expert = np.zeros((layout.devices, layout.experts), dtype=np.int64)
    has_expert[np.arange(layout.experts) // layout.slots, physical] = 1
    return has_expert


def _match_greedily(alike: Ints) -> list[tuple[int, int]]:
    """Pair rows and columns of a square matrix greedily: the largest entry with a free row and column is next."""
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
# load does not say how often two experts are chosen together. The estimate assumes that a token chooses groups with a
# probability in proportion to their load, independently of each other, and likewise experts within these groups. Two
# bounds hold without these assumptions: `lower` if the experts of a node are chosen together as often as possible, and
# `upper` if they are chosen together as rarely as possible.


@dataclass(frozen=True, slots=True)
class TokenRouting:
    """How a token chooses experts: `top_k` experts in `top_groups` groups. Also the size of a copy of a token."""

    top_k: int
    top_groups: int
    row_bytes: int  # of one copy, sent to the experts and back


@dataclass(frozen=True, slots=True)
class Copies:
    """How many copies of a token are sent, on average, to nodes or to devices."""

    expected: float
    lower: float  # lower bound for any choice of experts with this load
    upper: float  # upper bound, likewise
    busiest: float  # share of all tokens that reach the busiest node or device

    def over_links(self, nodes: int) -> float:
        """The expected number of copies that leave the token's node, if tokens start evenly on all nodes."""
        return self.expected * (nodes - 1) / nodes


def copies(load: Floats, physical: Ints, layout: ExpertLayout, routing: TokenRouting, parts: int) -> Copies:
    """Estimate the copies of a token to nodes or to devices. `parts`: the number of nodes or of devices. All zero
    without load."""
    total = float(load.sum())
    if total == 0:
        return Copies(0.0, 0.0, 0.0, 0.0)
    chosen = np.minimum(1.0, load / total * routing.top_k)  # probability that a token chooses each expert
    of_groups = _group_probabilities(chosen, layout, routing)
    on_part = np.zeros((parts, layout.experts))  # [part, expert] → that probability if the part has the expert, else 0
    on_part[np.arange(layout.experts) // (layout.experts // parts), physical] = chosen[physical]
    size = layout.experts // layout.groups
    of_experts = np.repeat(of_groups, size)
    within = np.divide(on_part, of_experts, out=np.zeros_like(on_part), where=of_experts > 0)  # if the group is chosen
    missed = 1.0 - of_groups * (1.0 - (1.0 - within).reshape(parts, layout.groups, size).prod(axis=2))
    reached = 1.0 - missed.prod(axis=1)
    lower, upper = float(on_part.max(axis=1).sum()), float(np.minimum(1.0, on_part.sum(axis=1)).sum())
    grouped = parts == layout.nodes and keeps_groups(physical, layout)  # then a token goes to no more nodes than groups
    upper = min(upper, routing.top_k, *([routing.top_groups] if grouped else []))
    return Copies(min(float(reached.sum()), upper), lower, upper, float(reached.max()))


def _group_probabilities(chosen: Floats, layout: ExpertLayout, routing: TokenRouting) -> Floats:
    """The probability that a token chooses each group: in proportion to load, with a sum of `top_groups`, at most 1."""
    group = chosen.reshape(layout.groups, -1)
    proportional = np.minimum(1.0, group.sum(axis=1) * routing.top_groups / routing.top_k)
    result: Floats = np.maximum(proportional, group.max(axis=1))
    return result
