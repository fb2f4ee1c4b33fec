"""Names say what a thing is: words that say nothing name no file, and no parameter."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = ("dsl", "compiler", "runtime")
# No file is named by one of these.
EMPTY = {
    *(
        "own",
        "made",
        "told",
        "known",
        "kept",
        "values",
        "things",
        "stuff",
        "misc",
        "util",
        "utils",
        "helper",
        "helpers",
    ),
    *("text", "code", "cost", "key", "word", "file"),
}
# These say something in their package, if no other file of the tree has the name.
VAGUE = {
    *("build", "files", "texts", "words", "codes", "costs", "trace", "keys", "run", "page", "data", "common", "core"),
    *("base", "items", "output", "template", "types", "state", "lines", "placement"),
}


def files(tree: str) -> Iterator[Path]:
    return (path for path in (ROOT / tree).rglob("*.py") if "golden" not in path.parts)


@pytest.mark.parametrize("tree", TREES)
def test_a_file_says_what_it_holds(tree: str) -> None:
    names = Counter(path.stem for path in files(tree))
    assert not names.keys() & EMPTY
    assert not [name for name in sorted(VAGUE) if names[name] > 1], "two files of a tree share a name that says little"


@pytest.mark.parametrize("tree", [*TREES, "tests", "benchmarks"])
def test_a_parameter_says_what_it_is(tree: str) -> None:
    """What a file of the spec says travels with the spec: no function takes it as `own` or `placed`.

    Nor is anything called `told` or `known`: a name says what was reported, found or looked up.
    """
    found = []
    for path in files(tree):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = node.arg if isinstance(node, ast.arg | ast.keyword) else None
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id  # a field
            if name in ("own", "placed", "told", "known"):
                found.append(f"{path.relative_to(ROOT)}: {name}")
    assert not found


def test_a_stage_placement_is_no_text() -> None:
    """Its text is for files; the compiler has the type."""
    for path in files("compiler"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            annotated = isinstance(node, ast.arg | ast.AnnAssign) and isinstance(node.annotation, ast.Name)
            if annotated and node.annotation.id == "str":  # type: ignore[union-attr]
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)  # type: ignore[union-attr]
                assert not name.endswith("placement"), f"{path}: {name}"
