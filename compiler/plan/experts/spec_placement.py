"""The placement of experts that a spec names (`parallel { placement = … }`), held to what the run can train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compiler.ir.expert_placement import ExpertPlacement, LayerPlacement
from compiler.plan.experts.layout import PlaceError
from compiler.plan.experts.placement_file import read_placement
from compiler.plan.experts.spec_experts import layers_with_experts
from dsl.schema import Spec


def expert_placement_for(spec: Spec, path: Path, any_degree: bool = False) -> ExpertPlacement:
    """The placement of the file that a spec names. PlaceError where the file does not fit the run.

    `any_degree`: the number of expert ranks is open, and the file says how many there are to be.
    """
    layers = read_placement(path)
    try:
        return _fitted(spec, layers, ExpertPlacement(layers).num_ranks if any_degree else spec.parallel.expert)
    except PlaceError as error:
        raise PlaceError(f"{path}: {error}", error.hint) from None


def _fitted(spec: Spec, layers: Mapping[str, LayerPlacement], num_ranks: int) -> ExpertPlacement:
    wanted = dict(layers_with_experts(spec))
    if missing := [name for name in wanted if name not in layers]:
        raise PlaceError(f"{missing[0]} is missing, whose experts are placed too")
    if strange := [name for name in layers if name not in wanted]:
        raise PlaceError(f"the model has no experts in {strange[0]}")
    for name, ffn in wanted.items():
        _check(layers[name], ffn.experts, num_ranks)
    return ExpertPlacement({name: layers[name] for name in wanted})


def _check(layer: LayerPlacement, num_experts: int, num_ranks: int) -> None:
    """Raise PlaceError unless each expert has one rank: gradient sums and checkpoints know no second replica."""
    name, devices = layer.layer, layer.devices
    if len(devices) != num_ranks:
        raise PlaceError(f"{name} is placed on {len(devices)} devices, and expert = {num_ranks}")
    if layer.num_experts != num_experts:
        raise PlaceError(f"{name} has {layer.num_experts} experts, and the model {num_experts}")
    ranks: dict[int, int] = {}
    for rank, device in enumerate(devices):
        for expert in device:
            if expert in ranks:
                raise PlaceError(
                    f"{name}: expert {expert} is on device {ranks[expert]} and on device {rank}: what is trained has "
                    "one replica of each expert",
                    "redundant experts are for serving; leave --replicas out of `dsc place`",
                )
            ranks[expert] = rank
