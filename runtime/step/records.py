"""Records of a step: what the ranks count of it, such as its losses and how many tokens each expert got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.contract import MoeLayer, RunPlan
from runtime.contract.names import RecordName


def joined(name: str, one: Tensor, other: Tensor) -> Tensor:
    """A record of two micro-batches: the larger logits, of all else the sum."""
    return torch.maximum(one, other) if RecordName(name).is_largest else one + other


def extents_of(plan: RunPlan) -> dict[str, int]:
    """Numbers that each record has: a load is one of each expert."""
    experts = {RecordName.of("load", layer.name): layer.experts for layer in plan.moe_layers}
    return {name: experts.get(RecordName(name), 1) for name in plan.records}


def flat(found: Mapping[str, Tensor], plan: RunPlan, device: torch.device) -> Tensor:
    """The records of a rank, one after the other, zeros for those that it does not have: float64, in which counts are
    exact. Loads are by expert."""
    here = dict(found)
    for layer in plan.moe_layers:
        if layer.slots is not None and (name := RecordName.of("load", layer.name)) in here:
            here[name] = here[name].reshape(-1)[torch.tensor(layer.slots, device=device)]
    parts = [
        here.get(name, torch.zeros(extent, device=device)).reshape(-1).to(torch.float64)
        for name, extent in extents_of(plan).items()
    ]
    return torch.cat(parts)


def by_name(summed: Tensor, plan: RunPlan) -> dict[str, Tensor]:
    """Records that were summed over the world, by name."""
    extents = extents_of(plan)
    return dict(zip(extents, summed.split([*extents.values()]), strict=True))


def largest_logits(found: Mapping[str, Tensor], plan: RunPlan, column: int, device: torch.device) -> Tensor:
    """The largest logit of each head of all blocks, one block after the other: −∞ of heads that a rank of this column
    does not have. A tensor rank has neighbouring heads, as many as any other. float64, in which all are exact."""
    tensor, parts = plan.mesh.tp, []
    for each in plan.clipped:
        peaks_H = torch.full((each.heads,), -torch.inf, dtype=torch.float64, device=device)
        if (peaks := found.get(RecordName.of("logits", each.name))) is not None:
            peaks_H.view(tensor, -1)[column % tensor].copy_(peaks)
        parts.append(peaks_H)
    return torch.cat(parts)


def logits_row(peaks: Tensor, clip: float) -> dict[str, Any]:
    """What the row of a step says of the largest logit of each head."""
    return {"largest_logit": peaks.max().item(), "clipped_heads": int((peaks > clip).sum())}


def losses(sums: Mapping[str, Tensor], plan: RunPlan) -> dict[str, float]:
    """Mean losses of a step or an evaluation, of its sums over the world."""
    found = {"loss": (sums["loss"] / sums["targets"].clamp(min=1)).item()}
    if "mtp_loss" in sums:
        found["mtp_loss"] = (sums["mtp_loss"] / sums["mtp_targets"].clamp(min=1)).item()
    balance = [
        y.sequence_loss * (sums[k] / sums["sequences"]).item()
        for y in plan.moe_layers
        if (k := RecordName.of("sequence_loss", y.site)) in sums
    ]
    return found | index_loss(sums, plan) | ({"sequence_loss": sum(balance)} if balance else {})


def imbalance(sums: Mapping[str, Tensor], layers: Sequence[MoeLayer]) -> dict[str, Any]:
    """Load of the busiest expert over the mean, of each layer and the mean over layers; 1 is perfect balance."""
    loads = {layer.name: sums[RecordName.of("load", layer.name)] for layer in layers}
    ratios = {name: (load.max() / load.mean()).item() for name, load in loads.items()}
    return {"imbalance": sum(ratios.values()) / len(ratios), "layer_imbalance": ratios} if ratios else {}


def layer_tangents(plan: RunPlan, counts: Mapping[str, Tensor]) -> dict[str, float]:
    """The gradients of the step's objective with respect to the losses of layers: of the balance of each sequence, and
    of indexers, which are sums over tokens. `counts`: sequences, and where there are indexers their tokens."""
    sequences = counts["sequences"].item()
    balance: dict[str, float] = {
        RecordName.of("sequence_loss", layer.site): layer.sequence_loss / sequences for layer in plan.moe_layers
    }
    if not plan.indexers:
        return balance
    rows = _indexed_rows(plan, counts["tokens"].item())
    return balance | {RecordName.of("index_loss", each.site): each.loss / rows for each in plan.indexers}


def index_loss(sums: Mapping[str, Tensor], plan: RunPlan) -> dict[str, float]:
    """The mean loss of the indexers, in nats of a token and without its weight; nothing where there are none."""
    if not plan.indexers:
        return {}
    total = sum(sums[RecordName.of("index_loss", each.site)].item() for each in plan.indexers)
    return {"index_loss": total / (_indexed_rows(plan, sums["tokens"].item()) * len(plan.indexers))}


def _indexed_rows(plan: RunPlan, tokens: float) -> float:
    """Rows of all ranks that the loss of an indexer is of: a token is a row of each tensor rank of its column."""
    return max(tokens, 1) * plan.mesh.tp
