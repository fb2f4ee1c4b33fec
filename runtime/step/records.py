"""Records of a step: the sums that ranks count, such as losses and tokens per expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.contract import MoeLayer, RunPlan
from runtime.contract.names import RecordName


def combine_records(name: str, first: Tensor, second: Tensor) -> Tensor:
    """Combine a record of two micro-batches: the maximum for logits, else the sum."""
    return torch.maximum(first, second) if RecordName(name).is_largest else first + second


def extents_of(plan: RunPlan) -> dict[str, int]:
    """Return the number of values of each record: a load has one for each expert."""
    experts = {RecordName.of("load", layer.name): layer.experts for layer in plan.moe_layers}
    return {name: experts.get(RecordName(name), 1) for name in plan.records}


def flat(tensors: Mapping[str, Tensor], plan: RunPlan, device: torch.device) -> Tensor:
    """Return the records of a rank in one vector, with zeros for those that it does not have: float64, in which counts
    are exact. Loads are in the order of experts."""
    records = dict(tensors)
    for layer in plan.moe_layers:
        if layer.slots is not None and (name := RecordName.of("load", layer.name)) in records:
            records[name] = records[name].reshape(-1)[torch.tensor(layer.slots, device=device)]
    parts = [
        records.get(name, torch.zeros(extent, device=device)).reshape(-1).to(torch.float64)
        for name, extent in extents_of(plan).items()
    ]
    return torch.cat(parts)


def split_by_name(summed: Tensor, plan: RunPlan) -> dict[str, Tensor]:
    """Split records that were summed over the world, by name."""
    extents = extents_of(plan)
    return dict(zip(extents, summed.split([*extents.values()]), strict=True))


def largest_logits(tensors: Mapping[str, Tensor], plan: RunPlan, column: int, device: torch.device) -> Tensor:
    """Return the largest logit of each head, block after block: −∞ for heads that this rank does not have. Heads are
    divided over tensor ranks in equal contiguous ranges. float64, in which all logits are exact."""
    tensor, parts = plan.mesh.tp, []
    for attention in plan.clipped:
        peaks_H = torch.full((attention.heads,), -torch.inf, dtype=torch.float64, device=device)
        if (peaks := tensors.get(RecordName.of("logits", attention.name))) is not None:
            peaks_H.view(tensor, -1)[column % tensor].copy_(peaks)
        parts.append(peaks_H)
    return torch.cat(parts)


def logits_row(peaks: Tensor, clip: float) -> dict[str, Any]:
    """Return the metrics of the largest logits of a step."""
    return {"largest_logit": peaks.max().item(), "clipped_heads": int((peaks > clip).sum())}


def losses(sums: Mapping[str, Tensor], plan: RunPlan) -> dict[str, float]:
    """Return the mean losses of a step or an evaluation from its sums over the world."""
    losses = {"loss": (sums["loss"] / sums["targets"].clamp(min=1)).item()}
    if "mtp_loss" in sums:
        losses["mtp_loss"] = (sums["mtp_loss"] / sums["mtp_targets"].clamp(min=1)).item()
    balance = [
        y.sequence_loss * (sums[k] / sums["sequences"]).item()
        for y in plan.moe_layers
        if (k := RecordName.of("sequence_loss", y.site)) in sums
    ]
    return losses | index_loss(sums, plan) | ({"sequence_loss": sum(balance)} if balance else {})


def imbalance(sums: Mapping[str, Tensor], layers: Sequence[MoeLayer]) -> dict[str, Any]:
    """Return the load of the busiest expert over the mean load, by layer and as the mean of layers. 1 is ideal."""
    loads = {layer.name: sums[RecordName.of("load", layer.name)] for layer in layers}
    ratios = {name: (load.max() / load.mean()).item() for name, load in loads.items()}
    return {"imbalance": sum(ratios.values()) / len(ratios), "layer_imbalance": ratios} if ratios else {}


def layer_tangents(plan: RunPlan, counts: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the gradients of the objective with respect to the losses of layers: the sequence-wise balance losses, and
    the losses of indexers, which are sums over tokens. `counts`: sequences, and with indexers their tokens."""
    sequences = counts["sequences"].item()
    balance: dict[str, float] = {
        RecordName.of("sequence_loss", layer.site): layer.sequence_loss / sequences for layer in plan.moe_layers
    }
    if not plan.indexers:
        return balance
    rows = _num_indexer_rows(plan, counts["tokens"].item())
    return balance | {RecordName.of("index_loss", indexer.site): indexer.loss / rows for indexer in plan.indexers}


def index_loss(sums: Mapping[str, Tensor], plan: RunPlan) -> dict[str, float]:
    """Return the mean loss of the indexers in nats per token, without its weight. Empty if there are no indexers."""
    if not plan.indexers:
        return {}
    total = sum(sums[RecordName.of("index_loss", indexer.site)].item() for indexer in plan.indexers)
    return {"index_loss": total / (_num_indexer_rows(plan, sums["tokens"].item()) * len(plan.indexers))}


def _num_indexer_rows(plan: RunPlan, tokens: float) -> float:
    """Return the rows of all ranks that an indexer's loss sums over: each token is a row on every tensor rank."""
    return max(tokens, 1) * plan.mesh.tp
