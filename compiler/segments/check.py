"""What is compared before an emitted segment is handed out: cut with cut, work with work, text with graph. No torch."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from compiler import ir
from compiler.segments.joint import COLUMNS, Joint, Node
from compiler.segments.printer import KernelOf, aliases, returned_values
from compiler.segments.split import Split, phases


def cuts(traced: ir.Cut, planned: ir.Cut) -> None:
    """The cut that runs is the cut that was planned: signatures, names, shapes, dtypes and aliases."""

    def parts(cut: ir.Cut) -> dict[str, Any]:
        lists = {"outputs": cut.outputs, "saved": cut.saved, "gradients": cut.gradients, "deferred": cut.deferred}
        signatures = {"F": cut.F, "I": cut.I, "W": cut.W}
        return {name: sorted(buffers, key=repr) for name, buffers in lists.items()} | signatures

    for (name, one), other in zip(parts(traced).items(), parts(planned).values(), strict=True):
        assert one == other, f"{name} differs\n traced: {one}\nplanned: {other}"


def work(traced: Joint, planned: Joint) -> None:
    """F, I and W do the same ops."""

    def ops(joint: Joint) -> list[tuple[str, str]]:
        return sorted((phase, joint.nodes[index].op) for index, phase in phases(joint).items())

    assert ops(traced) == ops(planned), f"ops differ\n traced: {ops(traced)}\nplanned: {ops(planned)}"


def text(source: str, joint: Joint, parts: Split, kernel_of: KernelOf) -> None:
    """The text, parsed, is the graph: the same nodes in the same order, arguments and results of each function, each
    by the kernel of its sizes.
    """
    body = ast.parse(source).body
    functions = {f.name: f for f in body if isinstance(f, ast.FunctionDef)}
    assert list(functions) == ["F", "I", "W"]
    bindings = {ast.unparse(s) for s in body if isinstance(s, ast.Assign)}
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
        written = [_node(statement) for statement in statements]
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


def _node(statement: ast.stmt) -> Node:
    """The node a printed statement is."""
    outputs: tuple[str, ...] = ()
    if isinstance(statement, ast.Assign):
        outputs = _names(statement.targets[0])
    assert isinstance(statement, ast.Assign | ast.Expr), ast.unparse(statement)
    value = statement.value
    if isinstance(value, ast.Subscript):
        rows, columns = value.slice.elts  # type: ignore[attr-defined]
        assert ast.unparse(rows) == ":"
        return Node(COLUMNS, (*_names(value.value), columns.lower.value, columns.upper.value), outputs)
    assert isinstance(value, ast.Call), ast.unparse(statement)
    op, args = ast.unparse(value.func), value.args
    if op == "torch.cat":
        assert [ast.unparse(k) for k in value.keywords] == ["dim=-1"]
        return Node("cat2", _names(args[0]), outputs)
    assert not value.keywords
    parsed = tuple(arg.id if isinstance(arg, ast.Name) else ast.literal_eval(arg) for arg in args)
    return Node("add" if op == "torch.add" else op, parsed, outputs)
