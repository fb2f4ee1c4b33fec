"""The import rule, and what starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"dsl", "compiler", "runtime", "tests"}
RUNTIME_MODULES = (  # for the compiler
    "ops",
    "actions",
    "options",
    "run_copy",
    "build_files",
    "outcome",
    "data.corpus",
    "contract",  # dataclasses of what a build says to the runtime, and their JSON
    "strict_json",
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


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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


@pytest.mark.parametrize(
    "modules",
    [
        "compiler.cli, compiler.data, compiler.commands.check, compiler.commands.schedule, compiler.commands.train",
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


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for package in ("dsl", "compiler", "runtime", "tests")
        for path in (ROOT / package).rglob("*.py")
        if "golden" not in path.parts and (count := len(path.read_text("utf-8").splitlines())) > 400
    }
    assert not long
