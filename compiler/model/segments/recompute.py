"""Recompute: the backward computes again what a run's `recompute` names, instead of F keeping it. No torch.

Of an op that is named, the backward reads second values: `rmsnorm_0_again` where it read `rmsnorm_0`. They are made
once, from second values where the op's arguments are named too (so a chain begins at what is kept). `split` does the
rest: F no longer saves the first value; the second one is made in I, and handed to W by the deferred list, or in W if
only W needs it.

Kept are the arguments of a segment (what arrived by communication is never sent again), its outputs, which others hold
anyway, and the statistics of an op (`rmsnorm_0_rstd`) of which the backward needs nothing else. Inputs and outputs that
the segment says are `remade` are not kept.
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
WEIGHTS = {"mla_up": ("q_up", "kv_up"), "qkv": ("qkv",), "up": ("up",)}  # the product of it, and of its adapter's last
PRODUCTS = ("linear", "grouped_linear")
BIASES = ("add_bias", "add_grouped_bias")  # made again where what they are added to is
PUTTING = ("cat2", "add")  # computes next to nothing: made again where all its parts are
AGAIN = "_again"


def is_named(segment: Segment, node: OpNode) -> bool:
    """Whether the names in `segment.recompute` mean a node of the forward: a kind of op, or the whole segment, but for
    sums, which are less to keep than their two parts, unless these are made again too."""
    names = segment.recompute
    if node.op == "add":
        return SUM in names
    ops = {op for name in names for op in OPS.get(name, ())}
    weights = {weight for name in names for weight in WEIGHTS.get(name, ())}
    multiplied = adds_to(node.reads[1]) if node.op in PRODUCTS else ""
    return segment.repeats or node.op in ops or multiplied in weights


def recomputed(joint: Joint) -> Joint:
    """The joint graph whose backward reads second values of what its segment computes again."""
    if not joint.segment.recompute:
        return joint
    where = phases(joint)
    remade = _remade_inputs(joint)
    tensors = joint.tensors | {value: tensor for node in remade for value, tensor in _results(joint, node)}
    forward = [*remade, *(joint.nodes[index] for index, phase in where.items() if phase == "F")]
    backward = {index for index, phase in where.items() if phase != "F"}
    repeated = _repeated(joint, forward, [joint.nodes[index] for index in backward])

    held = _held(joint)
    second = {value: value + AGAIN for node in repeated for value in node.outputs if value not in held}
    views = list(view_nodes(joint).values())
    for view in views:  # in order: a view of a view comes behind it
        second |= {value: value + AGAIN for value in view.outputs if view.reads[0] in second}

    def reading_second(node: OpNode) -> OpNode:
        return replace(node, args=tuple(second.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args))

    copies: dict[str, OpNode] = {}
    for node in (*repeated, *(view for view in views if view.outputs[0] in second)):
        copy = replace(reading_second(node), outputs=tuple(value + AGAIN for value in node.outputs))
        copies |= dict.fromkeys(copy.outputs, copy)
        tensors |= {value + AGAIN: tensors[value] for value in node.outputs}
    nodes: list[OpNode] = []
    again: list[str] = []

    def add(node: OpNode) -> None:
        """A node behind the copies it reads: each right before its first reader."""
        for value in node.reads:
            if value in copies and value not in again:
                again.extend(copies[value].outputs)
                add(copies[value])
        nodes.append(node)

    for index, node in enumerate(joint.nodes):
        add(reading_second(node) if index in backward else node)
    return replace(joint, nodes=tuple(nodes), tensors=tensors, again=tuple(again))


def _held(joint: Joint) -> set[str]:
    """Results of F that somebody holds besides the backward."""
    return {value for name, value in joint.outputs} - {remade.value for remade in joint.segment.remade}


def _remade_inputs(joint: Joint) -> list[OpNode]:
    """The ops that make inputs, which were other segments' in the forward."""
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


def _repeated(joint: Joint, forward: Sequence[OpNode], backward: Sequence[OpNode]) -> list[OpNode]:
    """The nodes of the forward that are named, and of which the backward, or another such node, reads a result that
    nobody holds."""
    views, held = view_nodes(joint), _held(joint)

    makers: dict[str, OpNode] = {}  # of results; statistics alone are not worth it
    for node in forward:
        parts = node.reads if node.op in PUTTING else node.reads[:1] if node.op in BIASES else ()
        put = bool(parts) and all(base_of(views, value) in makers for value in parts)
        if put or is_named(joint.segment, node):
            results = node.outputs[: len(node.outputs) - (0 if node.call else RULES[node.op].hidden)]
            makers |= {value: node for value in results if value not in held}
    found: list[OpNode] = []
    todo = [value for node in backward for value in node.reads]
    while todo:
        maker = makers.get(base_of(views, todo.pop()))
        if maker and maker not in found:
            found.append(maker)
            todo += maker.reads
    return found
