"""The placement of experts: the expert rank of each expert of each layer, and its file format.

A file has one line per device, so that a diff of two files shows the devices that changed. It lists the moves from the
previous placement; they must agree with it, so that the reviewed moves are the applied ones. It also has the load that
the placement was made for, from which a plan computes the balance. The load is optional.
`compiler/plan/experts/placement_file.py` reads the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

VERSION = 1


@dataclass(frozen=True)
class LayerPlacement:
    """The experts of one layer."""

    layer: str  # layers.3; the number of its row if the model is unknown
    devices: tuple[tuple[int, ...], ...]  # experts of each device
    moves: tuple[str, ...] = ()  # as in the file; empty if there is no previous placement
    load: tuple[float, ...] = ()  # tokens of each expert that it was made for; empty if unknown

    @property
    def num_experts(self) -> int:
        return 1 + max(max(device) for device in self.devices)


@dataclass(frozen=True)
class ExpertPlacement:
    """A placement that fits a spec: every layer with experts, each expert on one expert rank."""

    layers: Mapping[str, LayerPlacement]  # layers.3 → its experts, in the order of the model

    @property
    def num_ranks(self) -> int:
        """Number of expert ranks."""
        return max((len(layer.devices) for layer in self.layers.values()), default=1)

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """The expert rank of each expert, by layer."""
        rank_of = {
            name: {expert: rank for rank, device in enumerate(layer.devices) for expert in device}
            for name, layer in self.layers.items()
        }
        return {name: tuple(ranks[expert] for expert in range(len(ranks))) for name, ranks in rank_of.items()}

    @property
    def text(self) -> str:
        """The text of the file, in canonical form."""
        return to_text(tuple(self.layers.values()))

    @property
    def evenness(self) -> tuple[str, ...]:
        """The balance of the placement as text for people; empty if the file has no loads.

        Layers run one after the other, and each waits for its busiest rank. So the ratio over all layers is the sum of
        the busiest ranks' loads over the sum of the means.
        """
        loads = [row for layer in self.layers.values() if (row := _busiest(layer)) is not None]
        if not loads:
            return ()
        placed, ordered = (
            f"{max(row[column] / row[2] for row in loads):.3f} and "
            f"{sum(row[column] for row in loads) / sum(row[2] for row in loads):.3f}"
            for column in (0, 1)
        )
        return (
            f"under the load that experts were placed for, the busiest expert rank gets {placed} times the mean, in "
            f"the worst layer and over all layers; with experts in order it would be {ordered}; predicted times assume "
            "an even load",
        )


def _busiest(layer: LayerPlacement) -> tuple[float, float, float] | None:
    """Tokens of the busiest expert rank, of the busiest one if experts were placed in order, and the mean."""
    ranks, total = len(layer.devices), sum(layer.load)
    if not total:
        return None
    size = len(layer.load) // ranks
    return (
        max(sum(layer.load[expert] for expert in device) for device in layer.devices),
        max(sum(layer.load[rank * size : (rank + 1) * size]) for rank in range(ranks)),
        total / ranks,
    )


def to_text(layers: Sequence[LayerPlacement]) -> str:
    """JSON with one line per device, one per move, and one for the load of a layer."""
    return f'{{\n "version": {VERSION},\n "layers": [\n' + ",\n".join(map(_layer_text, layers)) + "\n ]\n}\n"


def _layer_text(layer: LayerPlacement) -> str:
    devices = ",\n".join(f"    {json.dumps(list(device))}" for device in layer.devices)
    moved = ",\n".join(f"    {json.dumps(move, ensure_ascii=False)}" for move in layer.moves)
    moved = f"[\n{moved}\n   ]" if moved else "[]"
    counts = [int(tokens) if tokens == int(tokens) else tokens for tokens in layer.load]
    load = f',\n   "load": {json.dumps(counts)}' if layer.load else ""
    head = f'  {{\n   "layer": {json.dumps(layer.layer)},\n   "devices": [\n{devices}\n   ],\n'
    return f'{head}   "moves": {moved}{load}\n  }}'


# --- The number of rows of an expert rank. The rows of each expert are padded to a multiple


class ReceivedRows(NamedTuple):
    """The rows that a rank receives in one layer and micro-batch."""

    rows: int  # R: rows for its experts, padding included
    copies: int = 0  # P: copies of tokens from its column, to be forwarded inside its node
    forwarded: int = 0  # X: rows that it forwards


def even_rows(rows: int, experts: int, alignment: int) -> int:
    """Rows with padding if `rows` are spread evenly over the experts of a rank."""
    per_expert, remainder = divmod(rows, experts)
    tiles = remainder * -(-(per_expert + 1) // alignment) + (experts - remainder) * -(-per_expert // alignment)
    return tiles * alignment


def most_rows(rows: int, experts: int, alignment: int) -> int:
    """The most rows with padding, over all ways to spread `rows`: as many experts as possible have one row beyond a
    multiple of `alignment`."""
    begun = min(rows, experts)
    return (begun + (rows - begun) // alignment) * alignment
