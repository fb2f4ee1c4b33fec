"""Modules that commands on text import; imports are their start-up time (benchmarks/startup.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = "specs/deepseek-v3.dsc"
# lark builds the parser's table when the grammar changes; pydantic's validators import the plugin loader (30 ms)
NEVER = {"torch", "numpy", "triton", "rich", "jinja2", "networkx", "lark", "pydantic.plugin._loader"}
REPORTS = {"runtime.build.files", "compiler.emit", "compiler.predict.why", "compiler.schedule.solver"}
PLANNING = {"compiler.ir", "compiler.machine", "compiler.model.layers", "compiler.schedule", "runtime.contract.plan"}


@pytest.mark.parametrize(
    ("command", "never"),
    [
        (["check", SPEC], NEVER | PLANNING),
        (["show", "--origin", SPEC], NEVER | PLANNING),
        (["plan", SPEC], {"torch", "numpy", "jinja2", "networkx", "compiler.tools.report.page"} | REPORTS),
        (["fmt", "--check", SPEC], {*NEVER, "pydantic", "dsl.schema"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_on_text_loads_little(command: list[str], never: set[str]) -> None:
    code = f"import sys\nfrom compiler.cli.main import main\nprint(main({command}))\nprint(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *_, status, modules = process.stdout.splitlines()
    assert status == "0"
    assert not never & set(modules.split())
