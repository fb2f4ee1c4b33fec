"""Records of a step: what the ranks count of it, such as its losses and how many tokens each expert got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.contract import MoeLayer, Plan


def extents_of(plan: Plan) -> dict[str, int]:
    """Numbers that each record has: a load is one of each expert."""
    return {n: next((y.experts for y in plan.moe_layers if n == f"load {y.name}"), 1) for n in plan.records}


def flat(found: Mapping[str, Tensor], plan: Plan, device: torch.device) -> Tensor:
    """The records of a rank, one after the other, zeros for those that it does not have: float64, in which counts are
    exact. Loads are by expert."""
    here = dict(found)
    for layer in plan.moe_layers:
        if layer.slots is not None and (name := f"load {layer.name}") in here:
            here[name] = here[name][torch.tensor(layer.slots, device=device)]
    parts = [
        here.get(name, torch.zeros(extent, device=device)).reshape(-1).to(torch.float64)
        for name, extent in extents_of(plan).items()
    ]
    return torch.cat(parts)


def by_name(summed: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Records that were summed over the world, by name."""
    extents = extents_of(plan)
    return dict(zip(extents, summed.split([*extents.values()]), strict=True))


def imbalance(sums: Mapping[str, Tensor], layers: Sequence[MoeLayer]) -> dict[str, Any]:
    """Load of the busiest expert over the mean, of each layer and the mean over layers; 1 is perfect balance."""
    loads = {layer.name: sums[f"load {layer.name}"] for layer in layers}
    ratios = {name: (load.max() / load.mean()).item() for name, load in loads.items()}
    return {"imbalance": sum(ratios.values()) / len(ratios), "layer_imbalance": ratios} if ratios else {}
