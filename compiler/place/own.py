"""The placement of a spec's own: the file that `parallel { placement = … }` names, held to what the run can train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compiler.place.document import LayerPlacement, read_placement, to_text
from compiler.place.layout import PlaceError
from compiler.place.of_spec import layers_with_experts
from dsl.diagnostics import Diagnostic, SpecError
from dsl.schema import Spec
from dsl.source import Span


@dataclass(frozen=True)
class OwnPlacement:
    """A file that fits its spec. text: what a build has as `BUILT`, so that it stands alone.

    owners: expert rank of each expert, by layer
    """

    layers: Mapping[str, LayerPlacement]
    owners: Mapping[str, tuple[int, ...]]

    @property
    def text(self) -> str:
        """The file, in the one form that it is written in."""
        return to_text(tuple(self.layers.values()))


def own_placement(spec: Spec, folder: Path) -> OwnPlacement | None:
    """What the spec in `folder` names; None where it names none. PlaceError where the file does not fit the run."""
    if spec.parallel.placement is None:
        return None
    path = folder / spec.parallel.placement
    layers, wanted = read_placement(path), dict(layers_with_experts(spec))
    try:
        if missing := [name for name in wanted if name not in layers]:
            raise PlaceError(f"{missing[0]} is missing, whose experts are placed too")
        if strange := [name for name in layers if name not in wanted]:
            raise PlaceError(f"the model has no experts in {strange[0]}")
        owners = {name: _owners(layers[name], ffn.experts, spec.parallel.expert) for name, ffn in wanted.items()}
    except PlaceError as error:
        raise PlaceError(f"{path}: {error}", error.hint) from None
    return OwnPlacement({name: layers[name] for name in wanted}, owners)


def _owners(layer: LayerPlacement, num_experts: int, ranks: int) -> tuple[int, ...]:
    """The rank of each expert. Each has one: the sums of gradients and the checkpoints know no second replica."""
    name, devices = layer.layer, layer.devices
    if len(devices) != ranks:
        raise PlaceError(f"{name} is placed on {len(devices)} devices, and expert = {ranks}")
    if layer.num_experts != num_experts:
        raise PlaceError(f"{name} has {layer.num_experts} experts, and the model {num_experts}")
    owners: dict[int, int] = {}
    for rank, device in enumerate(devices):
        for expert in device:
            if expert in owners:
                raise PlaceError(
                    f"{name}: expert {expert} is on device {owners[expert]} and on device {rank}: what is trained has "
                    "one replica of each expert",
                    "redundant experts are for serving; leave --replicas out of `dsc place`",
                )
            owners[expert] = rank
    return tuple(owners[expert] for expert in range(num_experts))


def checked(spec: Spec, origins: Mapping[str, Span], folder: Path) -> OwnPlacement | None:
    """The same; raises what is wrong with the file as a SpecError at the place that names it."""
    if wrong := mistakes(spec, origins, folder):
        raise SpecError(wrong)
    return own_placement(spec, folder)


def mistakes(spec: Spec, origins: Mapping[str, Span], folder: Path) -> tuple[Diagnostic, ...]:
    """What is wrong with the file that a spec in `folder` names, at the place where it does."""
    try:
        own_placement(spec, folder)
    except PlaceError as error:
        hint = error.hint or "`dsc place RUN -o FILE` writes one"
        return (Diagnostic("P0101", str(error), origins.get("parallel.placement"), hint),)
    return ()
