"""Allowed imports, commands that start without torch, and the maximum number of a function's parameters."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.measure.structure import PACKAGES, circles, cycles, imported, imports_of_modules, names_in, nodes_of, room_of

ROOT = Path(__file__).parents[1]
OURS = {*PACKAGES, "tests"}
MOST_ROOMS = 13
# The rooms (folders or files) of each package: none imports a later one. docs/architecture.md describes them.
ROOMS = {
    "dsl": (
        *("messages", "facts", "text", "schema", "closed_forms", "canonical", "leaves", "rules", "reference"),
        *("resolve", "conflict", "load"),
    ),
    "compiler": (
        *("files", "ir", "model", "schedule", "machine", "plan", "program", "predict", "emit", "pipeline"),
        *("tools", "api", "cli"),
    ),
    "runtime": (
        *("system", "contract", "build", "ops", "comm", "checkpoint", "data", "state", "launch", "observe", "step"),
        *("rl", "run"),
    ),
}
MAY_IMPORT = {
    "dsl": ("dsl",),
    "runtime": ("runtime",),
    "compiler": (
        "compiler",
        "dsl",
        "runtime.system",
        "runtime.contract",  # the contents of a build, and its JSON
        "runtime.ops",  # what emitted segments call
        "runtime.build.files",
        "runtime.build.run_copy",
        "runtime.checkpoint",  # of inference: the folders that a run keeps
        "runtime.data",  # of inference: tokenizers and shards
        "runtime.observe.watch",  # following a run, and how it is shown
    ),
}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_allowed_ones(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = {name for name in imported(path) if name.partition(".")[0] in OURS}
        wrong = {name for name in ours if not name.startswith(MAY_IMPORT[package])}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_no_files_and_no_entries_of_a_folder_import_each_other_in_a_circle() -> None:
    """Including imports inside functions and type-only imports."""
    edges = imports_of_modules()
    assert (cycles(edges), circles(edges)) == ([], [])


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_no_folder_imports_a_later_one(package: str) -> None:
    place = {f"{package}.{room}": number for number, room in enumerate(ROOMS[package])}
    inside = {(a, b) for a, b in imports_of_modules() if room_of(a) in place and room_of(b) in place}
    late = sorted((a, b) for a, b in inside if place[room_of(a)] < place[room_of(b)])
    assert late == [], "imports a later room"


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_a_package_has_at_most_13_folders(package: str) -> None:
    assert {name.removesuffix(".py") for name in names_in(ROOT / package)} == {*ROOMS[package]}
    assert len(ROOMS[package]) <= MOST_ROOMS


def test_the_command_line_and_the_api_are_siblings() -> None:
    uses = [(a, b) for a, b in imports_of_modules() if {room_of(a), room_of(b)} == {"compiler.api", "compiler.cli"}]
    assert [(a, b) for a, b in uses if a != "compiler.cli.dsc_trainer"] == []  # the name of the API in the distribution


@pytest.mark.parametrize(
    "modules",
    [
        "compiler.cli.main, compiler.tools.data_source, compiler.cli.commands.data, compiler.cli.commands.check, "
        "compiler.cli.commands.schedule, compiler.cli.commands.train, compiler.cli.commands.sweep, "
        "compiler.cli.commands.eval, compiler.cli.commands.generate",
        "compiler.pipeline, compiler.api, compiler.tools.report",
        "runtime.build.build, runtime.contract.options, runtime.data.__main__, runtime.system.outcome",
    ],
)
def test_planning_needs_no_torch(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_checking_a_spec_needs_no_graphs() -> None:
    code = (
        "import sys; from compiler.cli.main import main; code = main(['check', 'specs/quickstart.dsc']);"
        "sys.exit(code or bool({'torch', 'networkx'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True).returncode == 0


MOST = 8
# The parameters of an op are its operands and the constants of a layer, so their number is given.
NUMERICS = (
    "runtime/ops/",
    "runtime/ops/native/",
    "runtime/state/optimizers/",
    "compiler/model/ops/",
    "compiler/tools/inference/op_tables.py",
    "benchmarks/gpu/libraries.py",
    "benchmarks/gpu/peers.py",
)


def functions(path: Path) -> list[ast.FunctionDef]:
    """The functions of a module, also those inside of others."""
    return [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]


def test_functions_take_at_most_eight_parameters() -> None:
    long = set()
    for path in [path for package in (*PACKAGES, "benchmarks") for path in (ROOT / package).rglob("*.py")]:
        for node in functions(path):
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if sum(parameter.arg not in ("self", "cls") for parameter in parameters) > MOST:
                long.add(f"{path.relative_to(ROOT).as_posix()}:{node.name}")
    assert not {name for name in long if not name.startswith(NUMERICS)}, "make it a method of a value that owns them"


# Where text may be parsed: modules that define names, and those that read input of people or other programs.
OF_NAMES = {
    "compiler/ir/dtypes.py",
    "compiler/ir/module.py",
    "compiler/ir/names.py",
    "compiler/ir/segment.py",
    "compiler/model/ops/torch_calls.py",
    "compiler/plan/parameters.py",
    "compiler/program/proof/effects.py",
    "runtime/contract/actions.py",
    "runtime/contract/names.py",
    "runtime/contract/options.py",
    "runtime/contract/weights.py",
}
OF_TEXT = {
    "compiler/emit/build_summary.py": "plurals",
    "compiler/emit/kernels/__init__.py": "paths",
    "compiler/emit/segment_cache.py": "names of Python modules",
    "compiler/emit/stage_modules.py": "emitted Python, and the spec that it is from",
    "compiler/model/modules/named.py": "what a spec names: a file and a function",
    "compiler/model/modules/tracing.py": "names of PyTorch",
    "compiler/model/segments/convert.py": "names of PyTorch",
    "compiler/model/segments/printer.py": "emitted Python",
    "compiler/model/segments/torch_calls.py": "names of PyTorch",
    "compiler/model/segments/torch_ops.py": "names of PyTorch",
    "compiler/predict/search.py": "keys of a spec",
    "compiler/predict/why.py": "keys of a spec",
    "compiler/predict/why_shown.py": "keys of a spec",
    "compiler/schedule/costs.py": "what a user gives",
    "compiler/schedule/schedule.py": "a file",
    "runtime/build/build.py": "paths",
    "runtime/build/certificate.py": "paths",
    "runtime/build/files.py": "paths and versions",
    "runtime/build/modules.py": "names of Python modules",
    "runtime/build/run_copy.py": "paths",
    "runtime/run/profile.py": "names of Python modules",
    "runtime/run/resume.py": "keys of a spec, and versions",
    "runtime/run/train.py": "what a user gives",
}
CORE = (
    *(f"compiler/{room}" for room in ("ir", "model", "plan", "program", "schedule", "emit", "predict")),
    *(f"runtime/{room}" for room in ("contract", "build", "comm", "state", "step", "rl", "run")),
)
APART = {"startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix"}


def test_only_name_types_take_names_apart() -> None:
    """The meaning of a name is always a property of its type (runtime/contract/names.py)."""
    paths = [path for folder in CORE for path in sorted((ROOT / folder).rglob("*.py"))]
    taking = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in APART
    }
    assert taking == OF_NAMES | OF_TEXT.keys()


def test_class_names_are_unique() -> None:
    """A class name is unambiguous without its module."""
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(path.relative_to(ROOT).as_posix())
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_an_installation_imports_modules_that_exist() -> None:
    """It stores their bytecode: a name that is no module would end `make train`."""
    text = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("OF_A_RUN :="))
    names = [name.strip() for name in line.partition(":=")[2].split(",")]
    assert len(names) > 5 and [name for name in names if importlib.util.find_spec(name) is None] == []
