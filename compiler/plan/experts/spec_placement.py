"""The placement of experts that a spec names (`parallel { placement = … }`), held to what the run can train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compiler.ir.expert_placement import ExpertPlacement, LayerPlacement
from compiler.plan.experts.layout import ExpertLayout, PlacementError, TokenRouting
from compiler.plan.experts.placement_file import read_placement
from dsl.closed_forms.memory import sent_bytes
from dsl.schema import Moe, Spec

# --- What a spec says of its experts: which layers have some, on how many devices and nodes, and how tokens choose


def layers_with_experts(spec: Spec) -> tuple[tuple[str, Moe], ...]:
    """In the order of a run's load.json: the MTP block, which has the last layer's, at the end."""
    model = spec.model
    found = [(f"layers.{index}", model.ffn(index)) for index in range(model.num_layers)]
    found += [("mtp.0", model.ffn(model.num_layers - 1))] if model.mtp else []
    return tuple((name, ffn) for name, ffn in found if isinstance(ffn, Moe))


def layout_of(
    spec: Spec,
    ffn: Moe,
    groups: int | None,
    nodes: int | None,
    devices: int | None,
    per_node: int | None = None,
) -> ExpertLayout:
    """Sizes of a layer; what is not given is the spec's: the expert ranks, which fill nodes one after the other. One
    of them is several devices where these split each expert.

    `per_node`: devices of a node where the layer runs; None: on all nodes equally many.
    """
    of = devices or spec.parallel.expert
    per_node = max(1, (per_node or spec.cluster.node.devices) // spec.parallel.expert_tensor)
    filled = of // per_node if of > per_node and of % per_node == 0 else 1
    return ExpertLayout(ffn.experts, groups or ffn.groups, nodes or filled, of)


def routing_of(spec: Spec, ffn: Moe) -> TokenRouting:
    """How tokens choose, and what a copy of one weighs: its row to the experts and back."""
    precision, hidden = spec.precision, spec.model.hidden
    there_and_back = sent_bytes(precision.dispatch, precision) + sent_bytes(precision.combine, precision)
    return TokenRouting(ffn.top_k, ffn.top_groups, round(hidden * there_and_back))


# --- spec placement


def expert_placement_for(spec: Spec, path: Path, any_degree: bool = False) -> ExpertPlacement:
    """The placement of the file that a spec names. PlacementError where the file does not fit the run.

    `any_degree`: the number of expert ranks is open, and the file says how many there are to be.
    """
    layers = read_placement(path)
    try:
        return _fitted(spec, layers, ExpertPlacement(layers).num_ranks if any_degree else spec.parallel.expert)
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}", error.hint) from None


def _fitted(spec: Spec, layers: Mapping[str, LayerPlacement], num_ranks: int) -> ExpertPlacement:
    wanted = dict(layers_with_experts(spec))
    if missing := [name for name in wanted if name not in layers]:
        raise PlacementError(f"{missing[0]} is missing, whose experts are placed too")
    if strange := [name for name in layers if name not in wanted]:
        raise PlacementError(f"the model has no experts in {strange[0]}")
    for name, ffn in wanted.items():
        _check(layers[name], ffn.experts, num_ranks)
    return ExpertPlacement({name: layers[name] for name in wanted})


def _check(layer: LayerPlacement, num_experts: int, num_ranks: int) -> None:
    """Raise PlacementError unless each expert has one rank: gradient sums and checkpoints know no second replica."""
    name, devices = layer.layer, layer.devices
    if len(devices) != num_ranks:
        raise PlacementError(f"{name} is placed on {len(devices)} devices, and expert = {num_ranks}")
    if layer.num_experts != num_experts:
        raise PlacementError(f"{name} has {layer.num_experts} experts, and the model {num_experts}")
    ranks: dict[int, int] = {}
    for rank, device in enumerate(devices):
        for expert in device:
            if expert in ranks:
                raise PlacementError(
                    f"{name}: expert {expert} is on device {ranks[expert]} and on device {rank}: what is trained has "
                    "one replica of each expert"
                )
            ranks[expert] = rank
