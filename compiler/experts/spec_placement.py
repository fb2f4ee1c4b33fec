"""The placement of a spec's own: the file that `parallel { placement = … }` names, held to what the run can train."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compiler.experts.layout import PlaceError, device_loads
from compiler.experts.placement_file import LayerPlacement, read_placement, to_text
from compiler.experts.spec_experts import layers_with_experts
from dsl.diagnostics import Diagnostic, SpecError
from dsl.schema import Spec
from dsl.source import Span

EXPERT = "parallel.expert"


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

    @property
    def said(self) -> tuple[str, ...]:
        """How even it is, for people: nothing where the file has no loads.

        The layers run one after the other and each waits for its busiest rank, so that of all is the sum of the busiest
        over the sum of the means.
        """
        found = [both for layer in self.layers.values() if (both := _busiest(layer)) is not None]
        if not found:
            return ()
        placed, plain = (
            f"{max(each[at] / each[2] for each in found):.3f} and "
            f"{sum(each[at] for each in found) / sum(each[2] for each in found):.3f}"
            for at in (0, 1)
        )
        return (
            f"under the load that they were placed for, the busiest expert rank gets {placed} times the mean, in the "
            f"worst layer and over all; placed by their numbers it would be {plain}; times are of an even load",
        )


def _busiest(layer: LayerPlacement) -> tuple[float, float, float] | None:
    """Tokens of the busiest expert rank, of the busiest one if experts were placed by their numbers, and the mean."""
    load, ranks = np.array(layer.load), len(layer.devices)
    if not load.sum():
        return None
    return (
        float(device_loads(load, layer.physical, ranks).max()),
        float(load.reshape(ranks, -1).sum(axis=1).max()),
        float(load.sum() / ranks),
    )


def own_placement(spec: Spec, folder: Path) -> OwnPlacement | None:
    """What the spec in `folder` names; None where it names none. PlaceError where the file does not fit the run."""
    if spec.parallel.placement is None:
        return None
    path = folder / spec.parallel.placement
    return _fitted(spec, path, read_placement(path))


def _fitted(spec: Spec, path: Path, layers: Mapping[str, LayerPlacement]) -> OwnPlacement:
    """The layers of a file, held to a run. PlaceError where they do not fit it."""
    wanted = dict(layers_with_experts(spec))
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


def mistakes(
    spec: Spec, origins: Mapping[str, Span], folder: Path, opened: Collection[str] = ()
) -> tuple[Diagnostic, ...]:
    """What is wrong with the file that a spec in `folder` names, at the place where it does.

    `opened`: keys that are `auto`; where the expert ranks are, the file says how many there are to be.
    """
    try:
        if EXPERT in opened:
            degree_of(spec, folder)
        else:
            own_placement(spec, folder)
    except PlaceError as error:
        hint = error.hint or "`dsc place RUN -o FILE` writes one"
        return (Diagnostic("P0101", str(error), origins.get("parallel.placement"), hint),)
    return ()


def degree_of(spec: Spec, folder: Path) -> int | None:
    """The number of expert ranks that the file of a spec in `folder` is for; None where it names none.

    PlaceError where it fits the model on no number of them.
    """
    if spec.parallel.placement is None:
        return None
    path = folder / spec.parallel.placement
    layers = read_placement(path)
    degree = max((len(layer.devices) for layer in layers.values()), default=1)
    parallel = spec.parallel.model_copy(update={"expert": degree})
    _fitted(spec.model_copy(update={"parallel": parallel}), path, layers)
    return degree
