"""Recompute pass: the backward recomputes what a run's `recompute` names, so that F does not save it. No torch.

Where the backward read `rmsnorm_0` of a named op, it reads a copy, `rmsnorm_0_again`. The copy is computed once, from
copies of its arguments if their ops are named too, so a chain of recomputation starts at saved values. `split` does the
rest: F no longer saves the first value; the copy is computed in I and passed to W by the deferred list, or in W if only
W needs it.

These are not recomputed: the arguments of a segment (what arrived by communication is never sent again); its outputs,
which others hold anyway; and the statistics of an op (`rmsnorm_0_rstd`) if the backward needs nothing else of it.
Inputs and outputs that the segment lists in `remade` are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from compiler.ir.segment import SUM, Segment
from compiler.model.ops import RULES, Tensor
from compiler.model.segments.joint import Joint, OpNode
from compiler.model.segments.split import base_of, phases, view_nodes
from runtime.contract.weights import adds_to

ACTIVATIONS = (
    "swiglu",
    "gated_swiglu",
    "clamped_swiglu",
    "gate_rows",
    "geglu",
    "geglu_tanh",
    "gelu",
    "gelu_tanh",
    "relu2",
)
HYPER = ("hyper_products", "scale_parts", "hyper_mix", "hyper_collapse", "hyper_add")
NORMS = ("rmsnorm", "head_rmsnorm", "shared_rmsnorm", "unweighted_rmsnorm")
OPS = {"hyper": HYPER, "rmsnorm": NORMS, "swiglu": ACTIVATIONS}
WEIGHTS = {"mla_up": ("q_up", "kv_up"), "qkv": ("qkv",), "up": ("up",)}  # products of these and of their adapters' B
PRODUCTS = ("linear", "grouped_linear")
BIASES = ("add_bias", "add_grouped_bias")  # recomputed if what they are added to is
CHEAP = ("cat2", "add")  # recomputed if all their arguments are
AGAIN = "_again"


def is_named(segment: Segment, node: OpNode) -> bool:
    """Whether the names in `segment.recompute` include a node of the forward, by its op or with the whole segment. Sums
    are included only by `SUM`: saving a sum takes less memory than saving its two parts."""
    names = segment.recompute
    if node.op == "add":
        return SUM in names
    ops = {op for name in names for op in OPS.get(name, ())}
    weights = {weight for name in names for weight in WEIGHTS.get(name, ())}
    multiplied = adds_to(node.reads[1]) if node.op in PRODUCTS else ""
    return segment.recomputes_all or node.op in ops or multiplied in weights


def recompute_values(joint: Joint) -> Joint:
    """The joint graph whose backward reads recomputed copies of the values that its segment recomputes."""
    if not joint.segment.recompute:
        return joint
    phase_of = phases(joint)
    remade = _remade_inputs(joint)
    tensors = joint.tensors | {value: tensor for node in remade for value, tensor in _results(joint, node)}
    forward = [*remade, *(joint.nodes[index] for index, phase in phase_of.items() if phase == "F")]
    backward = {index for index, phase in phase_of.items() if phase != "F"}
    repeated = _nodes_to_recompute(joint, forward, [joint.nodes[index] for index in backward])

    held_values = _resident_outputs(joint)
    copy_of = {value: value + AGAIN for node in repeated for value in node.outputs if value not in held_values}
    views = list(view_nodes(joint).values())
    for view in views:  # in order: a view comes before views of it
        copy_of |= {value: value + AGAIN for value in view.outputs if view.reads[0] in copy_of}

    def reading_copies(node: OpNode) -> OpNode:
        return replace(node, args=tuple(copy_of.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args))

    copies: dict[str, OpNode] = {}
    for node in (*repeated, *(view for view in views if view.outputs[0] in copy_of)):
        copy = replace(reading_copies(node), outputs=tuple(value + AGAIN for value in node.outputs))
        copies |= dict.fromkeys(copy.outputs, copy)
        tensors |= {value + AGAIN: tensors[value] for value in node.outputs}
    nodes: list[OpNode] = []
    copied: list[str] = []

    def add(node: OpNode) -> None:
        """Append a node, and before it the copies that it is the first to read."""
        for value in node.reads:
            if value in copies and value not in copied:
                copied.extend(copies[value].outputs)
                add(copies[value])
        nodes.append(node)

    for index, node in enumerate(joint.nodes):
        add(reading_copies(node) if index in backward else node)
    return replace(joint, nodes=tuple(nodes), tensors=tensors, recomputed=tuple(copied))


def _resident_outputs(joint: Joint) -> set[str]:
    """The outputs that stay in memory whether or not the backward reads them: all that `remade` does not list."""
    return {value for name, value in joint.outputs} - {remade.value for remade in joint.segment.remade}


def _remade_inputs(joint: Joint) -> list[OpNode]:
    """The ops that recompute inputs. In the forward other segments computed these."""
    inputs = {argument.name for argument in joint.segment.inputs}
    return [
        OpNode(
            remade.op, remade.args, (remade.value, *(f"{remade.value}_{name}" for name in RULES[remade.op].outputs[1:]))
        )
        for remade in joint.segment.remade
        if remade.value in inputs
    ]


def _results(joint: Joint, node: OpNode) -> Iterable[tuple[str, Tensor]]:
    args = (joint.tensors[arg] if isinstance(arg, str) else arg for arg in node.args)
    return zip(node.outputs, RULES[node.op].infer(*args), strict=True)


def _nodes_to_recompute(joint: Joint, forward: Sequence[OpNode], backward: Sequence[OpNode]) -> list[OpNode]:
    """The named nodes of the forward with a result that is not held and that the backward, or another such node,
    reads."""
    views, held_values = view_nodes(joint), _resident_outputs(joint)

    makers: dict[str, OpNode] = {}  # by result; statistics alone are not worth recomputing
    for node in forward:
        parts = node.reads if node.op in CHEAP else node.reads[:1] if node.op in BIASES else ()
        follows_parts = bool(parts) and all(base_of(views, value) in makers for value in parts)
        if follows_parts or is_named(joint.segment, node):
            results = node.outputs[: len(node.outputs) - (0 if node.call else RULES[node.op].hidden)]
            makers |= {value: node for value in results if value not in held_values}
    repeated: list[OpNode] = []
    todo = [value for node in backward for value in node.reads]
    while todo:
        maker = makers.get(base_of(views, todo.pop()))
        if maker and maker not in repeated:
            repeated.append(maker)
            todo += maker.reads
    return repeated
