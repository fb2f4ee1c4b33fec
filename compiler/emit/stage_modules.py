"""Prints `stages/rank_<r>.py`: the bodies of one pipeline rank as straight-line Python, one statement per instruction.

The text is parsed back and compared with the program: each statement, and the functions that contain them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from compiler.ir import Body, Instruction, SegmentCode, Use
from dsl.canonical import range_text
from dsl.schema import Model

MICRO_BATCHES = ("a", "b")  # parameters of a body, one per slot
WIDTH = 120  # columns of an emitted line
HEAD = '''"""Bodies of pipeline rank {rank}, constructed by dsc: what each action does, in order.

c: the executor · p: parameters · g: gradient accumulators · v, w: values of one stage and micro-batch
"""
'''
NAMESPACES = ("v", "w")  # the values of each slot's (stage, micro-batch)


@dataclass(frozen=True, slots=True)
class Statement:
    """`targets = callee(args)`. A `del` statement has the callee "del" and the names as args."""

    callee: str
    args: tuple[str, ...]
    targets: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.callee == "del":
            return "del " + ", ".join(self.args)
        assign = f"{', '.join(self.targets)} = " if self.targets else ""
        return f"{assign}{self.callee}({', '.join(self.args)})"


def statement(i: Instruction, modules: Mapping[str, str], is_replayed: bool = False) -> Statement:
    """The statement of an instruction. `modules`: segment module by site of use. `is_replayed`: it is a call of a
    segment that ranks replay as a CUDA graph."""
    v, a = NAMESPACES[i.slot], MICRO_BATCHES[i.slot]
    spaces = {*i.params_in, *i.weights_in}
    reads = tuple(f"{v}.{name}" for name in i.reads if name not in spaces)
    writes = tuple(f"{v}.{b.name}" for b in i.writes)
    stage = i.action.stage
    if i.kind == "run":
        params = _tensors("g" if i.phase == "W" else "p", v, i.params, i.params_in)
        weights = _tensors("p", v, i.weights, i.weights_in)
        function, tensors = f"{modules[i.site]}.{i.phase}", (*params, *weights, *reads)
        return (
            Statement("c.graph", (function, *tensors), writes) if is_replayed else Statement(function, tensors, writes)
        )
    if i.kind == "free":
        return Statement("del", reads)
    if i.kind in ("to_host", "from_host"):
        return Statement(f"c.{i.kind}", (str(stage), a, *reads), writes)
    if i.kind == "load":
        return Statement("c.load", (repr(i.site), a), writes)
    if i.kind == "zeros":
        return Statement("c.zeros", (repr(i.site),), writes)
    if i.kind == "constant":
        return Statement("c.constant", (repr(i.site),), writes)
    if i.kind == "record":
        return Statement("c.record", (repr(i.site), *reads))
    if i.kind == "tell":
        return Statement("c.tell", (repr(i.site), a, *reads))
    if i.kind == "receive":
        return Statement("c.receive", (repr(i.peer), repr(i.producer), a), writes)
    if i.kind == "send":
        return Statement("c.send", (repr(i.peer), repr(i.producer), a, *reads))
    recomputes = i.phase == "F" != i.action.kind  # the forward is run again at the beginning of a backward
    place = (repr(f"{'B' if recomputes else i.phase}{stage}"), a, repr(i.site))
    if i.kind == "wait":
        return Statement(f"c.wait_{i.wait}", place, writes)
    return Statement(f"c.{i.kind}", (*place, *reads))


def _tensors(space: str, v: str, names: Sequence[str], places: Sequence[str]) -> list[str]:
    """Tensors as attributes of the rank's `space` ("p" or "g"), or of the gathered values that hold them."""
    values = [f"{v}.{place}" if place else space for place in places] or [space] * len(names)
    return [f"{value}.{identifier(name)}" for value, name in zip(values, names, strict=True)]


def identifier(tensor: str) -> str:
    """A tensor's name as an attribute: layers.3.ffn.up → layers_3_ffn_up."""
    return tensor.replace(".", "_")


@dataclass(frozen=True)
class StageModules:
    """The stage modules of one build. `modules`: segment module by site of use. `replays`: whether an instruction is a
    call of a segment that ranks replay as a CUDA graph.

    Ranks share the texts of common instructions; each instruction is printed and parsed back once.
    """

    modules: Mapping[str, str]
    replays: Callable[[Instruction], bool] = lambda _: False
    _texts: dict[int, str] = field(default_factory=dict, init=False)  # of instructions, by id
    _bodies: list[Sequence[Body]] = field(default_factory=list, init=False)  # kept alive, so that ids are not reused

    def rank_module(self, rank: int, bodies: Sequence[Body]) -> str:
        """Return the text of the module of one pipeline rank."""
        self._bodies.append(bodies)
        unprinted = {id(i): i for body in bodies for i in body.instructions if id(i) not in self._texts}
        statements = [statement(i, self.modules, self.replays(i)) for i in unprinted.values()]
        self._texts.update(zip(unprinted, _read_back(statements), strict=True))
        sites = {i.site for b in bodies for i in b.instructions if i.kind == "run"}
        imports = sorted({self.modules[s] for s in sites})
        head = "\n".join((HEAD.format(rank=rank), *(f"from ..segments import {name}" for name in imports)))
        tail = "\n\nBODIES = {\n" + "".join(f"    {b.name!r}: {b.name},\n" for b in bodies) + "}\n"
        functions = [(_head(body), "\n".join([self._texts[id(i)] for i in body.instructions])) for body in bodies]
        _check("\n".join([head, *(begin for begin, _ in functions), tail]), bodies)
        return "\n".join([head, *(f"{begin}\n{text}" if text else begin for begin, text in functions), tail])


def _head(body: Body) -> str:
    names = ", ".join(MICRO_BATCHES[: len(body.actions)])
    spaces = [
        f"    {NAMESPACES[k]} = c.values({action.stage}, {MICRO_BATCHES[k]})" for k, action in enumerate(body.actions)
    ]
    return f"\n\ndef {body.name}(c, p, g, {names}):\n" + "\n".join(spaces)


def _wrap_statement(text: str) -> str:
    """Indent a statement, and break a long one after commas, inside parentheses."""
    if len(text) + 4 <= WIDTH:
        return "    " + text
    if text.startswith("del "):
        return f"    del {_block(text[4:])}"
    targets, equals, call = text.rpartition(" = ")
    callee, _, args = call.partition("(")
    head = f"    {targets}{equals}{callee}("
    if len(head) > WIDTH:
        head = f"    {_block(targets)} = {callee}("
    return f"{head.removesuffix('(')}{_block(args[:-1])}"


def _block(names: str) -> str:
    """Names in parentheses, as many per line as fit."""
    lines = [""]
    for word in names.split(" "):
        if len(lines[-1]) + 1 + len(word) > WIDTH - 8 and lines[-1]:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "(\n" + "\n".join(f"        {line}" for line in lines) + "\n    )"


def _read_back(statements: Sequence[Statement]) -> list[str]:
    """Print each statement, as one or more lines of a function, and assert that the texts parse back to the statements.

    Each text is a whole statement, independent of its position in a body. So a statement of several instructions is
    parsed once.
    """
    distinct = list(dict.fromkeys(statements))
    texts = [_wrap_statement(str(entry)) for entry in distinct]
    lines = list(accumulate((text.count("\n") + 1 for text in texts), initial=2))
    (function,) = ast.parse("def _():\n" + "\n".join([*texts, "    pass"])).body
    assert isinstance(function, ast.FunctionDef)
    *nodes, _ = function.body
    assert [node.lineno for node in nodes] == lines[:-1], "a statement does not begin where its text does"
    for entry, node in zip(distinct, nodes, strict=True):
        assert _read(node) == entry, f"the text of {entry} does not parse back to it"
    text_of = dict(zip(distinct, texts, strict=True))
    return [text_of[entry] for entry in statements]


def _check(source: str, bodies: Iterable[Body]) -> None:
    """Assert that the module, without the statements of its bodies, has one function per body."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for function, body in zip(functions, bodies, strict=True):
        assert function.name == body.name and len(function.body) == len(body.actions), f"body {body.name} is lost"


def _read(node: ast.stmt) -> Statement:
    if isinstance(node, ast.Delete):
        return Statement("del", tuple(name for t in node.targets for name in _names(t)))
    targets: tuple[str, ...] = ()
    if isinstance(node, ast.Assign):
        (target,) = node.targets
        targets = _names(target)
    assert isinstance(node, (ast.Assign, ast.Expr)) and isinstance(node.value, ast.Call), ast.unparse(node)
    return Statement(_text(node.value.func), tuple(map(_text, node.value.args)), targets)


def _names(target: ast.expr) -> tuple[str, ...]:
    return tuple(map(_text, target.elts if isinstance(target, ast.Tuple) else [target]))


def _text(node: ast.expr) -> str:
    """The source of an expression. Names, which nearly all are, are handled here: `ast.unparse` takes five times as
    long."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ast.unparse(node)


# --- The statement of `spec.resolved` that an emitted segment comes from


def add_origin_comment(code: SegmentCode, use: Use, model: Model, resolved: str) -> str:
    """The segment's source with a comment that names the line of the spec for its first use in the model."""
    lines = resolved.split("\n")  # strings in it may contain other characters that splitlines splits at
    begin = lines.index(f"model {model.name} {{")
    prefix = "  " + _statement(use, model)
    number = next(i for i, line in enumerate(lines) if i > begin and line.startswith(prefix))
    head, _, body = code.source.partition("\n")
    return f"{head}\n# from spec.resolved:{number + 1}: {lines[number].strip().removesuffix(' {')}\n{body}"


def _statement(use: Use, model: Model) -> str:
    """The beginning of the statement that a segment comes from."""
    site = use.site
    if site.predicts_ahead:
        return "mtp {"
    if site.layer is None:
        return "norm_eps = " if site == "final_norm" else "vocab = "
    span, part = model.layers[model.range_of(site.layer)], site.part
    if part == "attention" and span.attention is None:
        return "attention "
    return f"layers {range_text(span)} {{"
