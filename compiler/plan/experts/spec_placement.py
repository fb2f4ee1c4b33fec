"""The placement of experts that a spec names (`parallel { placement = … }`), checked against the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compiler.ir.expert_placement import ExpertPlacement, LayerPlacement
from compiler.plan.experts.layout import ExpertLayout, PlacementError, TokenRouting
from compiler.plan.experts.placement_file import read_placement
from dsl.closed_forms.memory import sent_bytes
from dsl.schema import Moe, Spec

# --- The experts of a spec: which layers have them, on how many devices and nodes, and how tokens choose them


def layers_with_experts(spec: Spec) -> tuple[tuple[str, Moe], ...]:
    """The layers with experts, in the order of a run's load.json. The MTP block, with the last layer's MoE, is last."""
    model = spec.model
    layers = [(f"layers.{index}", model.ffn(index)) for index in range(model.num_layers)]
    layers += [("mtp.0", model.ffn(model.num_layers - 1))] if model.mtp else []
    return tuple((name, ffn) for name, ffn in layers if isinstance(ffn, Moe))


def layout_of(
    spec: Spec,
    ffn: Moe,
    groups: int | None,
    nodes: int | None,
    devices: int | None,
    per_node: int | None = None,
) -> ExpertLayout:
    """The sizes of a layer. Those that are None come from the spec, whose expert ranks fill one node after the other.

    An expert rank counts as one device even if several devices split its experts. `per_node`: devices of a node that
    runs the layer; None if all nodes have equally many.
    """
    ranks = devices or spec.parallel.expert
    per_node = max(1, (per_node or spec.cluster.node.devices) // spec.parallel.expert_tensor)
    filled = ranks // per_node if ranks > per_node and ranks % per_node == 0 else 1
    return ExpertLayout(ffn.experts, groups or ffn.groups, nodes or filled, ranks)


def routing_of(spec: Spec, ffn: Moe) -> TokenRouting:
    """How tokens choose experts, and the bytes of a copy's row to the experts and back."""
    precision, hidden = spec.precision, spec.model.hidden
    row_bytes = sent_bytes(precision.dispatch, precision) + sent_bytes(precision.combine, precision)
    return TokenRouting(ffn.top_k, ffn.top_groups, round(hidden * row_bytes))


# --- spec placement


def expert_placement_for(spec: Spec, path: Path, any_degree: bool = False) -> ExpertPlacement:
    """The placement in the file that a spec names. Raises PlacementError if it does not fit the run.

    `any_degree`: whether the number of expert ranks is `auto`, so that the file decides it.
    """
    layers = read_placement(path)
    try:
        return _build_placement(spec, layers, ExpertPlacement(layers).num_ranks if any_degree else spec.parallel.expert)
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}", error.hint) from None


def _build_placement(spec: Spec, layers: Mapping[str, LayerPlacement], num_ranks: int) -> ExpertPlacement:
    wanted = dict(layers_with_experts(spec))
    if missing := [name for name in wanted if name not in layers]:
        raise PlacementError(f"{missing[0]} is missing, but it has experts to place")
    if extra := [name for name in layers if name not in wanted]:
        raise PlacementError(f"the model has no experts in {extra[0]}")
    for name, ffn in wanted.items():
        _check(layers[name], ffn.experts, num_ranks)
    return ExpertPlacement({name: layers[name] for name in wanted})


def _check(layer: LayerPlacement, num_experts: int, num_ranks: int) -> None:
    """Raise PlacementError unless each expert has one rank: reductions and checkpoints expect a single replica."""
    name, devices = layer.layer, layer.devices
    if len(devices) != num_ranks:
        raise PlacementError(f"{name} is placed on {len(devices)} devices, but expert = {num_ranks}")
    if layer.num_experts != num_experts:
        raise PlacementError(f"{name} has {layer.num_experts} experts, but the model has {num_experts}")
    ranks: dict[int, int] = {}
    for rank, device in enumerate(devices):
        for expert in device:
            if expert in ranks:
                raise PlacementError(
                    f"{name}: expert {expert} is on device {ranks[expert]} and on device {rank}, but a run trains one "
                    "replica of each expert"
                )
            ranks[expert] = rank
