"""The nodes that a plan is for, as plan.json lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from runtime.system.strict_json import MAX_INT, Pattern, Range

MAX_NODES = 1 << 20
MAX_SMS = 4096
Several = Annotated[int, Range(1, MAX_NODES)]


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind, in the order in which ranks are laid on them: how many, and the devices of each.

    `sms`: streaming multiprocessors of a device; None: it is a CPU. `memory`: bytes of a device.
    """

    nodes: Several
    devices: Several
    device: Annotated[str, Pattern(".{1,200}")]
    sms: Annotated[int, Range(1, MAX_SMS)] | None
    memory: Annotated[int, Range(1, MAX_INT)]


def node_kind(cluster: Sequence[NodeKind], rank: int) -> NodeKind:
    """The kind of node that a world rank is laid on. IndexError where the cluster has no such rank."""
    for kind in cluster:
        rank -= kind.nodes * kind.devices
        if rank < 0:
            return kind
    raise IndexError("the cluster has no such rank")
