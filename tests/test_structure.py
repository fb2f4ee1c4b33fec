"""What may import what, what starts without torch, and how many parameters a function may take."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
OURS = {"dsl", "compiler", "runtime", "tests"}
RUNTIME_MODULES = (  # for the compiler
    "ops",
    "actions",
    "options",
    "adapter_names",
    "run_copy",
    "regular_files",
    "build_files",
    "outcome",
    "data",  # of inference, besides: tokenizers, shards, and the folders that a run keeps
    "checkpoint",
    "contract",  # dataclasses of what a build says to the runtime, and their JSON
    "rate",  # of a step, which exporters compare with that of another system
    "strict_json",
    "streams",
    "watch",  # following a run, and how it is shown
)
MAY_IMPORT = {
    "dsl": lambda name: name.startswith("dsl"),
    "runtime": lambda name: name.startswith("runtime"),
    "compiler": lambda name: name.startswith(
        (
            "compiler",
            "dsl",
            *(f"runtime.{module}" for module in RUNTIME_MODULES),
        )
    ),
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The imports and the functions of a module, also those inside of others."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    return [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, kinds)]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_what_they_may(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = {name for name in imported(path) if name.partition(".")[0] in OURS}
        wrong = {name for name in ours if not MAY_IMPORT[package](name)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


# The stages of the compiler: none imports a later one. docs/architecture.md says what each is.
ORDER = (
    *("dtypes", "holders", "stage_placement", "expert_placement", "ir", "textfile", "cache_folder"),
    *("ops", "layers", "segments", "modules"),
    *("schedules", "solver", "picture"),
    *("spec_files", "topology", "rates"),
    *("experts", "actions", "plan", "read_files"),
    *("lower", "proof"),
    *("predict", "decide", "refit", "difference"),
    *("kernels", "emit", "report", "build"),
    *("data_source", "templates", "exporters", "importers", "weights", "editor", "completion", "launch", "inference"),
    *("commands", "cli", "reference", "api", "dsc_trainer"),
)
# Imports that close a cycle: inside of functions, or of a type alone.
EXCUSED = {
    ("dsl.resolve.derive", "dsl.resolve.blocks"): "a value that is derived reads fields, and a field may be derived",
    ("dsl.resolve.evaluate", "dsl.resolve.derive"): "a reference may go into a range of layers, whose ends are values",
    ("dsl.resolve.meant", "dsl.reference.keys"): "a hint on an unknown key names the blocks that have it",
    ("compiler.spec_files", "compiler.rates.table"): "the type of a rate table, which a spec's value carries",
}


@cache
def imports_of_modules() -> frozenset[tuple[str, str]]:
    """Pairs of a module of ours and one that it imports, be it inside of a function or for types alone."""
    paths = {path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    found = set()
    for module, path in modules.items():
        for name in imported(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                found.add((module, target))
    return frozenset(found)


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """What imports itself through others."""
    graph: nx.DiGraph = nx.DiGraph(edges)
    return [sorted(component) for component in nx.strongly_connected_components(graph) if len(component) > 1]


def package_of(module: str) -> str:
    """The package or module right below dsl, compiler or runtime."""
    return ".".join(module.split(".")[:2])


def test_nothing_imports_itself_through_others() -> None:
    """Neither modules nor packages."""
    edges = imports_of_modules()
    assert EXCUSED.keys() <= edges, "an excuse for what is not imported"
    edges -= EXCUSED.keys()
    modules = cycles(edges)
    packages = cycles({(package_of(a), package_of(b)) for a, b in edges if package_of(a) != package_of(b)})
    print(f"cycles of imports: {len(modules)} between modules, {len(packages)} between packages")
    assert (modules, packages) == ([], [])


def test_no_stage_imports_a_later_one() -> None:
    edges = {(package_of(a), package_of(b)) for a, b in imports_of_modules() - EXCUSED.keys()}
    stages = {package for edge in edges for package in edge if package.startswith("compiler.")}
    assert {stage.removeprefix("compiler.") for stage in stages} == {*ORDER} and len(ORDER) == len({*ORDER})
    place = {f"compiler.{name}": at for at, name in enumerate(ORDER)}
    late = sorted((a, b) for a, b in edges if a in place and b in place and place[a] < place[b])
    assert late == [], "imports a later stage"


def test_the_order_of_stages_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text.partition("## Order of stages")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == [*ORDER]


@pytest.mark.parametrize(
    "modules",
    [
        "compiler.cli, compiler.data_source, compiler.commands.data, "
        "compiler.commands.check, compiler.commands.schedule, compiler.commands.train, compiler.commands.sweep, "
        "compiler.commands.eval, compiler.commands.generate",
        "compiler.decide, compiler.emit.build_files, compiler.emit.stage_modules, compiler.report",
        "runtime.actions, runtime.options, runtime.run_copy, runtime.build_files, runtime.build, runtime.outcome, "
        "runtime.contract, runtime.prepare",
    ],
)
def test_planning_needs_no_torch(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_checking_a_spec_needs_no_graphs() -> None:
    code = (
        "import sys; from compiler.cli import main; code = main(['check', 'specs/quickstart.dsc']);"
        "sys.exit(code or bool({'torch', 'networkx'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True).returncode == 0


MOST = 7
# The parameters of an op are its operands and the constants of a layer: they are what they are.
NUMERICS = (
    "runtime/ops/",
    "runtime/native/",
    "runtime/optimizers/",
    "compiler/ops/",
    "compiler/kernels/",
    "compiler/layers/",
    "compiler/inference/op_tables.py",
    "benchmarks/gpu/libraries.py",
    "benchmarks/gpu/peers.py",
)


def test_functions_take_less_than_eight_parameters() -> None:
    long = set()
    for path in [path for package in (*MAY_IMPORT, "benchmarks") for path in (ROOT / package).rglob("*.py")]:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                own = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if sum(each.arg not in ("self", "cls") for each in own) > MOST:
                    long.add(f"{path.relative_to(ROOT).as_posix()}:{node.name}")
    assert not {name for name in long if not name.startswith(NUMERICS)}, "make it a method of a value that owns them"
