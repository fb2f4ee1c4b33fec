"""What a spec says of its experts: which layers have some, on how many devices and nodes, and how tokens choose."""

from __future__ import annotations

from compiler.plan.experts.copies import Routing
from compiler.plan.experts.layout import Layout
from dsl.closed_forms.memory import sent_bytes
from dsl.schema import Moe, Spec


def layers_with_experts(spec: Spec) -> tuple[tuple[str, Moe], ...]:
    """In the order of a run's load.json: the MTP block, which has the last layer's, at the end."""
    model = spec.model
    found = [(f"layers.{index}", model.ffn(index)) for index in range(model.num_layers)]
    found += [("mtp.0", model.ffn(model.num_layers - 1))] if model.mtp else []
    return tuple((name, ffn) for name, ffn in found if isinstance(ffn, Moe))


def layout_of(
    spec: Spec,
    ffn: Moe,
    replicas: int | None,
    groups: int | None,
    nodes: int | None,
    devices: int | None,
    per_node: int | None = None,
) -> Layout:
    """Sizes of a layer; what is not given is the spec's: the expert ranks, which fill nodes one after the other. One
    of them is several devices where these split each expert.

    `per_node`: devices of a node where the layer runs; None: on all nodes equally many.
    """
    of = devices or spec.parallel.expert
    per_node = max(1, (per_node or spec.cluster.node.devices) // spec.parallel.expert_tensor)
    filled = of // per_node if of > per_node and of % per_node == 0 else 1
    return Layout(ffn.experts, replicas or ffn.experts, groups or ffn.groups, nodes or filled, of)


def routing_of(spec: Spec, ffn: Moe) -> Routing:
    """How tokens choose, and what a copy of one weighs: its row to the experts and back."""
    precision, hidden = spec.precision, spec.model.hidden
    there_and_back = sent_bytes(precision.dispatch, precision) + sent_bytes(precision.combine, precision)
    return Routing(ffn.top_k, ffn.top_groups, round(hidden * there_and_back))
