"""Small changes of product code, any of which a test should notice: mutants.

A mutant changes one expression or one statement inside a function: a comparison, a sign, a number by one, a
condition, or a call that is removed. Text for people, and code that runs at import, do not change.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

PRODUCT = ("dsl", "compiler", "runtime")
LEAST = 3  # mutants of a package that has so many lines to change

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


class Mutant(NamedTuple):
    """Replace bytes `begin` to `end` of `file` by `text`. `line`: its first line. `is_statement`: not an expression.

    `function`: the outermost function around it, after the names of its classes. `digest`: of its line, valid while the
    line has this text in this function; empty until the line is chosen.
    """

    file: str
    function: str
    line: int
    begin: int
    end: int
    text: str
    is_statement: bool
    digest: str = ""

    @property
    def package(self) -> str:
        """The folder of the file, at most three levels deep."""
        return "/".join(self.file.split("/")[:-1][:3])

    def apply(self, source: bytes) -> bytes:
        return source[: self.begin] + self.text.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """`a < b` → `a <= b`, on one line."""
        before = " ".join(source[self.begin : self.end].decode().split())
        return f"`{before}` → `{self.text}`"


def choose(root: Path, count: int, seed: int = 0) -> list[Mutant]:
    """About `count` mutants of the product, at most one per line; packages get shares by their lines, at least LEAST.

    A line is chosen by its text and function, and not by the path of its file: most mutants stay
    when the product changes or modules move. Of equal lines one is chosen. The first ones of each package are
    the same for any count.
    """
    packages = lines_of_packages(root, seed)
    total = sum(map(len, packages.values()))
    chosen: dict[str, Mutant] = {}
    for _, entries in sorted(packages.items()):
        share = max(LEAST, round(count * len(entries) / total))
        for digest, mutants in entries[:share]:
            chosen.setdefault(digest, mutants[int(digest, 16) % len(mutants)]._replace(digest=digest))
    return [*chosen.values()]


@cache
def lines_of_packages(root: Path, seed: int) -> dict[str, list[tuple[str, list[Mutant]]]]:
    """The lines of each package in the order in which they are chosen: digest, and the mutants of the line."""
    packages: dict[str, list[tuple[str, list[Mutant]]]] = defaultdict(list)
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*.py")):
            source, file = path.read_bytes(), path.relative_to(root).as_posix()
            texts, lines, repeats = source.splitlines(), defaultdict[int, list[Mutant]](list), Counter[bytes]()
            for mutant in mutants_of(source, file):
                lines[mutant.line].append(mutant)
            for line, mutants in sorted(lines.items()):
                text = mutants[0].function.encode() + b" " + texts[line - 1].strip()
                digest = hashlib.sha256(f"{seed} {text!r} {repeats[text]}".encode()).hexdigest()
                packages[mutants[0].package].append((digest, mutants))
                repeats[text] += 1
    return {package: sorted(entries) for package, entries in packages.items()}


def mutants_of(source: bytes, file: str) -> Iterator[Mutant]:
    """Each mutant of a module."""
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def mutant(function: str, node: ast.expr | ast.stmt, text: str) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        return Mutant(file, function, node.lineno, begin, end, text, isinstance(node, ast.stmt))

    for name, function in outermost_functions(ast.parse(source)):
        for statement in function.body:
            for node in changeable(statement):
                for text in changes(node):
                    yield mutant(name, node, text)


def outermost_functions(
    node: ast.AST, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function that is not nested in another one, with its name after those of its classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield within + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from outermost_functions(child, f"{within}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from outermost_functions(child, within)


def changeable(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """A node and those below it, without text for people (f-strings, errors), annotations and defaults."""
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: no effect in correct code
        return
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.arguments | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and isinstance(
            node, ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from changeable(child)


def changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Yield the texts that may replace a node, each a mutant."""
    match node:
        case ast.Compare(ops=[op]):
            yield changed(node, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in OPERATORS and not is_text(node.left) and not is_text(node.right):
            yield changed(node, op=OPERATORS[type(op)]())
        case ast.BoolOp(op=ast.And()):
            yield changed(node, op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield changed(node, op=ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp():
            yield changed(node, body=node.orelse, orelse=node.body)
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Constant(value=float(value)):
            yield repr(2 * value if value else 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS and not node.keywords:
            yield changed(node, func=ast.Name(FUNCTIONS[name]))
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            for index, generator in enumerate(node.generators):
                if generator.ifs:
                    without = copy.deepcopy(node)
                    without.generators[index].ifs = []
                    yield ast.unparse(without)
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.AugAssign(op=op) if type(op) in OPERATORS and not is_text(node.value):
            yield changed(node, op=OPERATORS[type(op)]())[1:-1]
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"


def changed(node: ast.expr | ast.stmt, **fields: object) -> str:
    duplicate = copy.copy(node)
    for name, value in fields.items():
        setattr(duplicate, name, value)
    return f"({ast.unparse(duplicate)})"


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def with_probes(source: bytes, mutants: Sequence[tuple[int, Mutant]]) -> bytes:
    """The module with a call for each mutant, made when the place that it would change is executed."""
    inserts: list[tuple[int, int, bytes]] = []
    for number, mutant in mutants:
        call = f"__import__('mutant_probes').hit({number})".encode()
        if mutant.is_statement:
            inserts.append((mutant.begin, 0, call + b"; "))
        else:
            inserts += [(mutant.begin, -mutant.end, b"(" + call + b" or ("), (mutant.end, -mutant.begin, b"))")]
    for place, _, text in sorted(inserts, reverse=True):
        source = source[:place] + text + source[place:]
    return source
