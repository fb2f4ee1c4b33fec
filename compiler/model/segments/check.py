"""Checks before a segment is emitted: its base graph must equal a torch trace, and its text must equal its graph. No
torch."""

from __future__ import annotations

import ast
from dataclasses import replace

from compiler.model.ops import Tensor
from compiler.model.ops.torch_calls import is_torch_call
from compiler.model.segments.joint import ADD_TO, COLUMNS, Joint, OpNode
from compiler.model.segments.printer import ATEN, KernelOf, aliases, device_of, node_of, returned_values
from compiler.model.segments.split import CutFunctions


def base_graph(traced: Joint, interpreted: Joint) -> None:
    """Assert that the op rules give the graph that torch traced, up to the order of independent nodes.

    Both take their names from `joint.Draft`, so they are equal if they have the same nodes (op, arguments, results),
    the same shape and dtype for every value, and the same values as outputs and gradients.
    """
    kind = interpreted.segment.kind
    torch_has = {node.outputs: node for node in traced.needed_nodes}
    rules_have = {node.outputs: node for node in interpreted.needed_nodes}
    for outputs in (*rules_have, *torch_has):
        rule, torch = rules_have.get(outputs), torch_has.get(outputs)
        assert rule == torch, f"segment {kind}: the op rules give {_node_text(rule)}, torch traced {_node_text(torch)}"
        for name in (*rules_have[outputs].reads, *outputs):
            by_rules, by_torch = interpreted.tensors[name], traced.tensors[name]
            assert by_rules == by_torch, (
                f"segment {kind}: at {_node_text(rule)}, {name} is {_tensor(by_rules)} by the op rules, and "
                f"{_tensor(by_torch)} in the torch trace"
            )
    for role in ("outputs", "gradients", "weights"):
        for (name, by_rules), (_, by_torch) in zip(getattr(interpreted, role), getattr(traced, role), strict=True):
            assert by_rules == by_torch, (
                f"segment {kind}: {role}: {name} is {by_rules} by the op rules, and {by_torch} in the torch trace"
            )


def _node_text(node: OpNode | None) -> str:
    if node is None:
        return "no such node"
    return f"`{', '.join(node.outputs)} = {node.op}({', '.join(map(str, node.args))})`"


def _tensor(tensor: Tensor) -> str:
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def text(source: str, joint: Joint, parts: CutFunctions, kernel_of: KernelOf) -> None:
    """Assert that the text parses to the graph: each function has the same nodes in the same order, with the same
    arguments and results, and calls the kernels for their sizes.
    """
    body = ast.parse(source).body
    functions = {f.name: f for f in body if isinstance(f, ast.FunctionDef)}
    assert list(functions) == ["F", "I", "W"]
    bindings = {ast.unparse(node) for node in body if isinstance(node, ast.Assign)} - {ATEN}
    table = aliases(parts, kernel_of)
    assert bindings == {f"{a.name} = on_cuda(__file__, {a.file!r}, {a.op})" for a in table.values()}, bindings
    ops_and_files = {alias.name: (alias.op, alias.file) for alias in table.values()}
    for name, nodes in parts.functions.items():
        function, signature = functions[name], getattr(parts.cut, name)
        statements = [s for s in function.body if not _is_docstring(s)]
        assert tuple(arg.arg for arg in function.args.args) == signature.args, name
        returned: tuple[str, ...] = ()
        if statements and isinstance(statements[-1], ast.Return):
            returned = _names(statements.pop().value)  # type: ignore[attr-defined]
        assert returned == returned_values(joint, parts, name), name
        device = device_of(signature, nodes)
        assert tuple(ast.unparse(statement) for statement in statements[: len(device)]) == device, name
        printed = [_node(statement) for statement in statements[len(device) :]]
        parsed = tuple(replace(node, op=ops_and_files.get(node.op, (node.op, None))[0]) for node in printed)
        assert parsed == nodes, f"the text of {name} differs from its graph"
        files = [ops_and_files.get(node.op, (node.op, None))[1] for node in printed]
        assert files == [kernel_of(node) for node in nodes], f"{name} calls a kernel for other sizes"


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _names(expression: ast.expr) -> tuple[str, ...]:
    parts = expression.elts if isinstance(expression, ast.Tuple) else [expression]
    assert all(isinstance(part, ast.Name) for part in parts), ast.unparse(expression)
    return tuple(part.id for part in parts)  # type: ignore[attr-defined]


def _node(statement: ast.stmt) -> OpNode:
    """Parse a printed statement back into its node."""
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
