"""The placement of experts: on which expert rank each expert of each layer is, and the text that files have of it.

A line a device, so that two files differ in the lines of the devices that differ; the moves that led here, which must
agree with it: what was reviewed is what is applied; and the load that it was made from, by which a plan knows how even
it is. A file without loads is one, too. `compiler/plan/experts/placement_file.py` reads the text.
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
    """The experts of one layer. `moves` are the text's, and empty where nothing is known of before."""

    layer: str  # layers.3; the number of its row where no model is known
    devices: tuple[tuple[int, ...], ...]  # experts of each device
    moves: tuple[str, ...] = ()
    load: tuple[float, ...] = ()  # tokens of each expert that it was made from; empty where they are not known

    @property
    def num_experts(self) -> int:
        return 1 + max(max(device) for device in self.devices)


@dataclass(frozen=True)
class ExpertPlacement:
    """A placement that fits a spec: every layer with experts, each expert on one expert rank."""

    layers: Mapping[str, LayerPlacement]  # layers.3 → its experts, in the order of the model

    @property
    def num_ranks(self) -> int:
        """Number of expert ranks that it is for."""
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
        """The file, in the one form that it is written in."""
        return to_text(tuple(self.layers.values()))

    @property
    def evenness(self) -> tuple[str, ...]:
        """How even it is, for people: nothing where the file has no loads.

        The layers run one after the other and each waits for its busiest rank, so that of all is the sum of the busiest
        over the sum of the means.
        """
        found = [loads for layer in self.layers.values() if (loads := _busiest(layer)) is not None]
        if not found:
            return ()
        reached, plain = (
            f"{max(each[at] / each[2] for each in found):.3f} and "
            f"{sum(each[at] for each in found) / sum(each[2] for each in found):.3f}"
            for at in (0, 1)
        )
        return (
            f"under the load that they were placed for, the busiest expert rank gets {reached} times the mean, in the "
            f"worst layer and over all; placed by their numbers it would be {plain}; times are of an even load",
        )


def _busiest(layer: LayerPlacement) -> tuple[float, float, float] | None:
    """Tokens of the busiest expert rank, of the busiest one if experts were placed by their numbers, and the mean."""
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
    """JSON, a line a device, a line a move, and a line of a load."""
    return f'{{\n "version": {VERSION},\n "layers": [\n' + ",\n".join(map(_layer_text, layers)) + "\n ]\n}\n"


def _layer_text(layer: LayerPlacement) -> str:
    devices = ",\n".join(f"    {json.dumps(list(device))}" for device in layer.devices)
    moved = ",\n".join(f"    {json.dumps(move, ensure_ascii=False)}" for move in layer.moves)
    moved = f"[\n{moved}\n   ]" if moved else "[]"
    counts = [int(tokens) if tokens == int(tokens) else tokens for tokens in layer.load]
    load = f',\n   "load": {json.dumps(counts)}' if layer.load else ""
    head = f'  {{\n   "layer": {json.dumps(layer.layer)},\n   "devices": [\n{devices}\n   ],\n'
    return f'{head}   "moves": {moved}{load}\n  }}'


# --- How many rows an expert rank has of its experts, padding among them: each expert's are padded to a multiple


class Received(NamedTuple):
    """What a rank receives in a layer and micro-batch."""

    rows: int  # R: of its experts, with their padding
    copies: int = 0  # P: of tokens from its column, to be forwarded inside its node
    forwarded: int = 0  # X: rows that it forwards


def even_rows(rows: int, experts: int, alignment: int) -> int:
    """Rows with their padding where `rows` are spread evenly over the experts of a rank."""
    each, more = divmod(rows, experts)
    tiles = more * -(-(each + 1) // alignment) + (experts - more) * -(-each // alignment)
    return tiles * alignment


def most_rows(rows: int, experts: int, alignment: int) -> int:
    """Rows with their padding where `rows` are spread over the experts so that padding is greatest: as many experts as
    can have one row beyond whole multiples."""
    begun = min(rows, experts)
    return (begun + (rows - begun) // alignment) * alignment
