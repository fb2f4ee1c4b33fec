"""The structure of the product in numbers: `python -m tests.measure.structure [--format json]`.

For `dsl`, `compiler` and `runtime`: names in the folder itself, and in the fullest folder below it; files and lines of
Python; files of fewer than 60 and 30 lines; imports of a later room in its order; and cycles of imports
between files and between rooms, including imports inside functions and for types only. A room is a folder or a file
directly in one of the three.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx

ROOT = Path(__file__).parents[2]
PACKAGES = ("dsl", "compiler", "runtime")


def room_of(module: str) -> str:
    """`compiler.schedule` for `compiler.schedule.solver.exact`."""
    return ".".join(module.split(".")[:2])


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of the syntax tree of a module."""
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))


def imported(path: Path) -> set[str]:
    """Every name that a module imports: `compiler.ir.plan.Plan`."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def imports_of_modules(root: Path = ROOT) -> frozenset[tuple[str, str]]:
    """Pairs of a module and an imported one, including imports inside functions or for types only."""
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    modules = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    pairs = set()
    for module, path in modules.items():
        for name in imported(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                pairs.add((module, target))
    return frozenset(pairs)


def imports_of_rooms(edges: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Pairs of a room and another that it imports."""
    pairs = {(room_of(a), room_of(b)) for a, b in edges}
    return frozenset((a, b) for a, b in pairs if a != b)


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules that import themselves through others."""
    components = nx.strongly_connected_components(nx.DiGraph(edges))
    return sorted(sorted(component) for component in components if len(component) > 1)


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of entries of one folder, at any depth, that import each other in a circle."""
    groups = []
    words = [(a.split("."), b.split(".")) for a, b in edges]
    for depth in range(1, max(len(a) for a, _ in words)):
        beside = {
            (".".join(a[: depth + 1]), ".".join(b[: depth + 1]))
            for a, b in words
            if len(a) > depth < len(b) and a[:depth] == b[:depth] and a[depth] != b[depth]
        }
        groups += cycles(beside)
    return groups


def names_in(folder: Path) -> list[str]:
    """The visible entries of a folder: files and folders, except `__init__.py` and Python's caches."""
    hidden, ours = ("__", "."), [path for path in folder.iterdir() if path.suffix != ".so"]
    return sorted(path.name for path in ours if not path.name.startswith(hidden) and holds_something(path))


def holds_something(path: Path) -> bool:
    """Whether a path is a file, or a folder with more than the bytecode of files that were there."""
    return path.is_file() or any(entry.suffix != ".pyc" for entry in path.rglob("*") if entry.is_file())


def rows(root: Path, orders: Mapping[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """A row for each of the three packages. `orders`: the rooms of each, the first imports none of the others."""
    edges = imports_of_modules(root)
    result = []
    for package in PACKAGES:
        files = [path for path in (root / package).rglob("*.py") if path.stat().st_size]
        lengths = [len(path.read_text("utf-8").splitlines()) for path in files]
        folders = {path.parent for path in (root / package).rglob("*.py")} - {root / package}
        fullest, num_names = Counter({folder: len(names_in(folder)) for folder in folders}).most_common(1)[0]
        inner_edges = [(a, b) for a, b in edges if a.startswith(f"{package}.") and b.startswith(f"{package}.")]
        place = {f"{package}.{room}": number for number, room in enumerate(orders.get(package, ()))}
        up = [(a, b) for a, b in imports_of_rooms(inner_edges) if a in place and b in place and place[a] < place[b]]
        result.append(
            {
                "package": package,
                "names": len(names_in(root / package)),
                "fullest": f"{fullest.relative_to(root).as_posix()}: {num_names}",
                "files": len(files),
                "lines": sum(lengths),
                "below 60": sum(length < 60 for length in lengths),
                "below 30": sum(length < 30 for length in lengths),
                "imports up": len(up),
                "cycles of files": len(cycles(inner_edges)),
                "circles in folders": len(circles(inner_edges)),
            }
        )
    return result


def main(words: list[str]) -> int:
    """Print the table."""
    from tests.test_structure import ROOMS

    table = rows(ROOT, ROOMS)
    if words == ["--format", "json"]:
        print(json.dumps(table, indent=1))
        return 0
    widths = {key: max(len(key), *(len(str(row[key])) for row in table)) for key in table[0]}
    for row in [dict(zip(widths, widths, strict=True)), *table]:
        print("  ".join(str(row[key]).rjust(width) for key, width in widths.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
