"""What is compared before an emitted segment is handed out: its base graph with a trace of torch, and its text with its
graph. No torch."""

from __future__ import annotations

import ast
from dataclasses import replace

from compiler.model.ops import Tensor
from compiler.model.ops.torch_calls import is_torch_call
from compiler.model.segments.joint import ADD_TO, COLUMNS, Joint, OpNode
from compiler.model.segments.printer import ATEN, KernelOf, aliases, device_of, node_of, returned_values
from compiler.model.segments.split import CutFunctions


def base_graph(traced: Joint, interpreted: Joint) -> None:
    """The base graph of the op rules is the one that torch traced, up to the order of independent nodes.

    Both take their names from `joint.Draft`. So they are equal if they have the same nodes (op, arguments, results),
    the same shape and dtype of every value, and the same values as outputs and gradients.
    """
    kind = interpreted.segment.kind
    torch_has = {node.outputs: node for node in traced.needed}
    rules_have = {node.outputs: node for node in interpreted.needed}
    for outputs in (*rules_have, *torch_has):
        rule, torch = rules_have.get(outputs), torch_has.get(outputs)
        assert rule == torch, f"segment {kind}: the op rules have {_said(rule)}, and torch traced {_said(torch)}"
        for name in (*rules_have[outputs].reads, *outputs):
            one, other = interpreted.tensors[name], traced.tensors[name]
            assert one == other, (
                f"segment {kind}: at {_said(rule)} the op rules have {name} as {_tensor(one)}, and torch traced it as "
                f"{_tensor(other)}"
            )
    for role in ("outputs", "gradients", "weights"):
        for (name, one), (_, other) in zip(getattr(interpreted, role), getattr(traced, role), strict=True):
            assert one == other, (
                f"segment {kind}: {name} of {role} is {one} by the op rules, and {other} as torch traced"
            )


def _said(node: OpNode | None) -> str:
    if node is None:
        return "no such node"
    return f"`{', '.join(node.outputs)} = {node.op}({', '.join(map(str, node.args))})`"


def _tensor(tensor: Tensor) -> str:
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def text(source: str, joint: Joint, parts: CutFunctions, kernel_of: KernelOf) -> None:
    """The text, parsed, is the graph: each function has the same nodes in the same order, arguments and results, and
    calls the kernels of their sizes.
    """
    body = ast.parse(source).body
    functions = {f.name: f for f in body if isinstance(f, ast.FunctionDef)}
    assert list(functions) == ["F", "I", "W"]
    bindings = {ast.unparse(s) for s in body if isinstance(s, ast.Assign)} - {ATEN}
    table = aliases(parts, kernel_of)
    assert bindings == {f"{a.name} = on_cuda(__file__, {a.file!r}, {a.op})" for a in table.values()}, bindings
    meant = {alias.name: (alias.op, alias.file) for alias in table.values()}
    for name, nodes in parts.functions.items():
        function, signature = functions[name], getattr(parts.cut, name)
        statements = [s for s in function.body if not _is_docstring(s)]
        assert tuple(arg.arg for arg in function.args.args) == signature.args, name
        returned: tuple[str, ...] = ()
        if statements and isinstance(statements[-1], ast.Return):
            returned = _names(statements.pop().value)  # type: ignore[attr-defined]
        assert returned == returned_values(joint, parts, name), name
        said = device_of(signature, nodes)
        assert tuple(ast.unparse(each) for each in statements[: len(said)]) == said, name
        written = [_node(statement) for statement in statements[len(said) :]]
        read = tuple(replace(node, op=meant.get(node.op, (node.op, None))[0]) for node in written)
        assert read == nodes, f"{name} was not printed as it is in the graph"
        files = [meant.get(node.op, (node.op, None))[1] for node in written]
        assert files == [kernel_of(node) for node in nodes], f"{name} calls a kernel of other sizes"


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _names(expression: ast.expr) -> tuple[str, ...]:
    parts = expression.elts if isinstance(expression, ast.Tuple) else [expression]
    assert all(isinstance(part, ast.Name) for part in parts), ast.unparse(expression)
    return tuple(part.id for part in parts)  # type: ignore[attr-defined]


def _node(statement: ast.stmt) -> OpNode:
    """The node a printed statement is."""
    outputs: tuple[str, ...] = ()
    if isinstance(statement, ast.Assign):
        outputs = _names(statement.targets[0])
    assert isinstance(statement, ast.Assign | ast.Expr), ast.unparse(statement)
    value = statement.value
    if isinstance(value, ast.Subscript):
        rows, columns = value.slice.elts  # type: ignore[attr-defined]
        assert ast.unparse(rows) == ":"
        return OpNode(COLUMNS, (*_names(value.value), columns.lower.value, columns.upper.value), outputs)
    assert isinstance(value, ast.Call), ast.unparse(statement)
    op, args = ast.unparse(value.func), value.args
    if is_torch_call(op):
        return node_of(value, outputs)
    if isinstance(value.func, ast.Attribute) and value.func.attr == ADD_TO:
        return OpNode(ADD_TO, (*_names(value.func.value), *_names(args[0])), outputs)
    if op == "torch.cat":
        assert [ast.unparse(k) for k in value.keywords] == ["dim=-1"]
        return OpNode("cat2", _names(args[0]), outputs)
    assert not value.keywords
    parsed = tuple(arg.id if isinstance(arg, ast.Name) else ast.literal_eval(arg) for arg in args)
    return OpNode("add" if op == "torch.add" else op, parsed, outputs)
