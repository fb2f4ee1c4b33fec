"""Splits a joint graph into F, I and W by reachability. No torch.

F = ancestors of the outputs. A node with several outputs is never divided: outputs that only the backward reads belong
to F, too. I = ancestors of the input gradients, minus F. W = ancestors of the weight gradients, minus F and I.
The saved list is what I and W read of F's values, the deferred list is what W reads of I's values. Tangents are
arguments of both.

Further rules:

- Views own no storage. The tensor that they view crosses, and each function takes the view again where it reads it. The
  same holds for constants, which are made of no tensor, such as a mask.
- W gets gradient accumulators and no weights, which may no longer be on the device. So a node that reads a weight
  belongs to I, unless it is one of our ops that end a weight gradient.
- A value that is recomputed from a value that I recomputes belongs to I: W gets the end of such a chain, not its
  beginning.
- An input gradient is gone once I has returned it. So a node that reads one belongs to I.

`phases` alone decides which function a node belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compiler import ir
from compiler.ir.names import accumulator_of, gradient_of
from compiler.model.ops.torch_calls import is_torch_view
from compiler.model.segments.joint import ADD_TO, COLUMNS, Joint, OpNode


@dataclass(frozen=True)
class CutFunctions:
    """The nodes of each function and the cut, without costs. Views come right before their first reader; the nodes of W
    accumulate gradients."""

    F: tuple[OpNode, ...]
    I: tuple[OpNode, ...]
    W: tuple[OpNode, ...]
    cut: ir.Cut

    @property
    def functions(self) -> dict[str, tuple[OpNode, ...]]:
        """The nodes of F, I and W by name."""
        return {"F": self.F, "I": self.I, "W": self.W}


def phases(joint: Joint) -> dict[int, str]:
    """The phase of each needed node, by its index. Views and constants have none: each function takes its own."""
    views, duplicated = view_nodes(joint), duplicated_nodes(joint)
    producer = {value: index for index, node in enumerate(joint.nodes) for value in node.outputs}
    params = {*joint.params}
    weights = params | {value for value in views if base_of(views, value) in params}

    def ancestors(values: Iterable[str]) -> set[int]:
        seen: set[int] = set()
        todo = [producer[value] for value in values if value in producer]
        while todo:
            index = todo.pop()
            if index not in seen:
                seen.add(index)
                todo += [producer[value] for value in joint.nodes[index].reads if value in producer]
        return seen

    gradients = [value for _, value in joint.gradients]
    forward = ancestors([*(value for _, value in joint.outputs), *joint.early])
    needed = ancestors([*gradients, *(value for _, value in joint.weights)])
    ends = {
        value for _, value in joint.weights if value in producer and joint.nodes[producer[value]].is_weight_gradient
    }
    weighing = [
        node
        for index, node in enumerate(joint.nodes)
        if index in needed and weights.intersection(node.reads) and not ends.intersection(node.outputs)
    ]
    inward = ancestors([*gradients, *(value for node in weighing for value in node.outputs)])
    returned = {value for value in gradients if value in producer}
    inward |= ancestors(
        value
        for index in needed - inward
        if any(base_of(views, read) in returned for read in joint.nodes[index].reads)
        for value in joint.nodes[index].outputs
    )
    recomputed = {producer[value] for value in joint.recomputed}
    chained = [index for index in recomputed & needed if ancestors(joint.nodes[index].reads) & recomputed & inward]
    inward |= ancestors(value for index in chained for value in joint.nodes[index].outputs)
    phase_of = dict.fromkeys(needed, "W") | dict.fromkeys(inward, "I") | dict.fromkeys(forward, "F")
    return {index: phase_of[index] for index in sorted(phase_of) if joint.nodes[index].outputs[0] not in duplicated}


def view_nodes(joint: Joint) -> dict[str, OpNode]:
    """By result: the nodes whose result shares the storage of the first tensor that they read."""
    return {node.outputs[0]: node for node in joint.nodes if node.op == COLUMNS or is_torch_view(node.op)}


def duplicated_nodes(joint: Joint) -> dict[str, OpNode]:
    """By result: views and constants, which each function computes where it reads them."""
    views, constants = view_nodes(joint), dict[str, OpNode]()
    for node in joint.nodes:
        if all(value in constants for value in node.reads):
            constants |= dict.fromkeys(node.outputs, node)
    return views | constants


def base_of(views: Mapping[str, OpNode], value: str) -> str:
    """The value that owns the storage of a value."""
    while value in views:
        value = views[value].reads[0]
    return value


def split(joint: Joint) -> CutFunctions:
    """The three functions of a joint graph, and the signatures and buffers of the cut between them."""
    views, duplicated, phase_of = view_nodes(joint), duplicated_nodes(joint), phases(joint)
    functions = {name: [joint.nodes[index] for index, phase in phase_of.items() if phase == name] for name in "FIW"}
    functions["W"] = accumulating(functions["W"], joint)
    results = {name: [value for node in nodes for value in node.outputs] for name, nodes in functions.items()}
    read = {
        name: {value for node in insert_views(nodes, duplicated) for value in node.reads} - duplicated.keys()
        for name, nodes in functions.items()
    }
    gradients = tuple((gradient_of(name), value) for name, value in joint.gradients)
    assert not any(value in views for _, value in (*joint.outputs, *gradients)), "a segment returns no views"

    params, inputs, tangents = joint.params, joint.inputs, joint.tangents
    named = {param.name for param in joint.segment.params}  # F takes these even if it does not read them
    outputs = tuple(dict.fromkeys(value for name, value in joint.outputs if value == name))
    backward = read["I"] | read["W"] | {value for _, value in gradients}
    saved = tuple(value for value in results["F"] if value in backward and value not in outputs)
    deferred = tuple(value for value in results["I"] if value in read["W"])
    arguments = (*inputs, *outputs, *saved, *tangents)
    accumulators = tuple(accumulator_of(name) for name, _ in joint.weights)
    assert not set(deferred) & {value for _, value in gradients}, "W reads no input gradient"
    crossing = {*arguments, *deferred, *accumulators}
    assert read["W"] - set(results["W"]) <= crossing | set(params), "every value W reads crosses the cut"

    def signature(name: str, candidates: tuple[str, ...], returns: tuple[str, ...]) -> ir.Signature:
        direct = {value for _, value in gradients} if name == "I" else set()
        return ir.Signature(tuple(value for value in candidates if value in read[name] | direct), returns)

    def buffers(values: Iterable[tuple[str, str]], storages: dict[str, str]) -> tuple[ir.Buffer, ...]:
        """Buffers of (name, value) pairs. `storages` collects the values, so that a value's second buffer is an
        alias."""
        result = []
        for name, value in values:
            tensor = joint.tensors[value]
            result.append(ir.Buffer(name, tensor.shape, tensor.dtype, storages.get(value, "")))
            storages.setdefault(value, name)
        return tuple(result)

    input_storages = {name: name for name in inputs}
    cut = ir.Cut(
        F=ir.Signature(
            (*(p for p in params if p in named | read["F"]), *inputs), (*(name for name, _ in joint.outputs), *saved)
        ),
        I=signature("I", (*params, *arguments), (*(name for name, _ in gradients), *deferred)),
        W=signature("W", (*accumulators, *params, *arguments, *deferred), ()),
        outputs=buffers(joint.outputs, dict(input_storages)),
        saved=buffers(((value, value) for value in saved), {}),
        gradients=buffers(gradients, {value: value for value in (*tangents, *arguments)}),
        deferred=buffers(((value, value) for value in deferred), {}),
        costs=(),
    )
    F, I, W = (tuple(insert_views(functions[name], duplicated)) for name in "FIW")
    return CutFunctions(F, I, W, cut)


def accumulating(nodes: list[OpNode], joint: Joint) -> list[OpNode]:
    """Rewrite the op that ends each weight gradient: `linear_wgrad(dy, x)` to `linear_wgrad_(g_w, dy, x)`.

    A parameter that is read twice has a sum of weight gradients: each summand is accumulated, and the sum is dropped.
    The accumulator has the parameter's shape, so the accumulating op takes no extents. A gradient that another op
    computes, perhaps in I, is added by `ADD_TO`.
    """
    producer = {value: node for node in nodes for value in node.outputs}
    rewritten: dict[OpNode, OpNode | None] = {}
    added: list[OpNode] = []

    def summands(value: str) -> list[str]:
        node = producer.get(value)
        if node is None or node.op != "add":
            return [value]
        return [part for summand in node.reads for part in summands(summand)]

    for param, value in joint.weights:
        parts = summands(value)
        if all(part in producer and producer[part].is_weight_gradient for part in parts):
            for part in parts:
                rewritten[producer[part]] = OpNode(
                    f"{producer[part].op}_", (accumulator_of(param), *producer[part].reads), ()
                )
            rewritten |= dict.fromkeys(_sums(value, producer))
        else:
            added.append(OpNode(ADD_TO, (accumulator_of(param), value), ()))
    result = [rewritten.get(node, node) for node in nodes]
    return [node for node in (*result, *added) if node is not None]


def _sums(value: str, producer: Mapping[str, OpNode]) -> list[OpNode]:
    """The `add` nodes of a sum."""
    node = producer[value]
    return [node, *(add for read in node.reads for add in _sums(read, producer))] if node.op == "add" else []


def insert_views(nodes: Iterable[OpNode], duplicated: Mapping[str, OpNode]) -> list[OpNode]:
    """The nodes, with each view and constant (`duplicated`) right before the first node that reads it."""
    result: list[OpNode] = []
    placed: set[str] = set()

    def take(value: str) -> None:
        if value in duplicated and value not in placed:
            placed.update(duplicated[value].outputs)
            for read in duplicated[value].reads:
                take(read)
            result.append(duplicated[value])

    for node in nodes:
        for value in node.reads:
            take(value)
        result.append(node)
    return result
