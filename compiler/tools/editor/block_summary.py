"""A named block in a few lines: what a model counts, a cluster has, a precision keeps, a run does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dsl.closed_forms import counts, ramp
from dsl.facts import units
from dsl.load import Analysis, block_view
from dsl.schema import Cluster, Model, Precision, Spec


def summary(analysis: Analysis, kind: str, name: str) -> str:
    """Markdown about a named block; "" if it is unknown, or has mistakes of its own."""
    definitions = analysis.definitions
    if definitions.broken or (kind, name) not in definitions.blocks:
        return ""
    if kind == "run":
        complete = (view.spec for view in analysis.views if not view.context.failed)
        return next((_run(spec) for spec in complete if getattr(spec, "name", "") == name), "")
    view, _ = block_view(definitions, kind, name, explain=False)
    node: Any = getattr(view.spec, kind)
    if node is None or any(path.startswith(f"{kind}.") for path in view.context.failed):
        return ""
    if isinstance(node, Model):
        return _model(node)
    return _cluster(node) if isinstance(node, Cluster) else _precision(node)


def _model(model: Model) -> str:
    found = counts.parameters(model)
    kinds = Counter(model.ffn(layer).kind for layer in range(model.num_layers))
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    lines = [
        f"{found.total:,} parameters, {found.active:,} active for a token",
        f"{model.num_layers} layers ({layers}), hidden {model.hidden:,}, attention {model.attention.kind}",
    ]
    if model.mtp is not None:
        lines.append(f"{found.mtp:,} more parameters for MTP of depth {model.mtp.depth}")
    return _list(lines)


def _cluster(cluster: Cluster) -> str:
    lines = []
    for count, node in cluster.parts:
        nodes = "1 node" if count == 1 else f"{count:,} nodes"
        lines.append(f"{count * node.devices:,} × {node.device.name}: {nodes} of {node.devices:,}")
        lines.append(f"{units.write(node.device.memory, 'byte')} a device")
    return _list(lines)


def _precision(precision: Precision) -> str:
    roles: dict[str, list[str]] = {}
    for role, value in precision:
        if role != "name" and isinstance(value, str):
            roles.setdefault(value, []).append(role)
    return _list(f"{dtype}: {', '.join(names)}" for dtype, names in roles.items())


def _run(spec: Spec) -> str:
    degrees = ((name, each) for name, each in spec.parallel if name != "zero" and isinstance(each, int))
    parallel = ", ".join(f"{name} = {degree}" for name, degree in degrees if degree > 1)
    schedule = spec.schedule.name or spec.schedule.file
    steps = ramp.of(spec).steps_for(spec.train.tokens)
    return _list(
        [
            f"model {spec.model.name}, cluster {spec.cluster.name}, precision {spec.precision.name}",
            f"{spec.cluster.world:,} ranks: {parallel or 'data = 1'}; schedule {schedule}",
            f"{spec.train.tokens:,} tokens in {steps:,} steps",
        ]
    )


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
