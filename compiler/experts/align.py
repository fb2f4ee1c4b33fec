"""Two placements of a layer, one after the other: what moves, and names of devices under which least does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.experts.layout import Ints, Layout


@dataclass(frozen=True, slots=True)
class Move:
    """A replica of an expert leaves a device for another; -1: it is made, or given up."""

    expert: int
    source: int
    destination: int

    def __str__(self) -> str:
        here = "new" if self.source < 0 else f"device {self.source}"
        there = "gone" if self.destination < 0 else f"device {self.destination}"
        return f"expert {self.expert}: {here} → {there}"


def aligned(physical: Ints, now: Ints, layout: Layout) -> Ints:
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


def in_order(physical: Ints, layout: Layout) -> Ints:
    """The experts of every device ascending."""
    ordered: Ints = np.sort(physical.reshape(layout.devices, -1), axis=1).reshape(-1)
    return ordered


def moves(now: Ints, physical: Ints, layout: Layout) -> tuple[Move, ...]:
    """What leads from one placement to the other, by expert."""
    old, new = _held(now, layout), _held(physical, layout)
    change = new - old
    found = []
    for expert in np.flatnonzero(change.any(axis=0)).tolist():
        gone = np.repeat(np.arange(layout.devices), np.maximum(-change[:, expert], 0)).tolist()
        come = np.repeat(np.arange(layout.devices), np.maximum(change[:, expert], 0)).tolist()
        count = max(len(gone), len(come))
        gone += [-1] * (count - len(gone))
        come += [-1] * (count - len(come))
        found += [Move(expert, a, b) for a, b in zip(gone, come, strict=True)]
    return tuple(found)


def _held(physical: Ints, layout: Layout) -> Ints:
    """[device, expert] → replicas."""
    held = np.zeros((layout.devices, layout.experts), dtype=np.int64)
    np.add.at(held, (np.arange(layout.replicas) // (len(physical) // layout.devices), physical), 1)
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
