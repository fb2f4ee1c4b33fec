"""Emitted kernel files: which ops have one, and that their text is deterministic, readable Python."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import compiler.emit.kernels
from compiler.emit.kernels import KERNELS, KernelFile, emit_kernel
from compiler.emit.kernels.kernel import KernelChoice, render
from compiler.ir import Buffer
from runtime.ops import OPS
from runtime.state.optimizers import reference_update
from tests.compiler.emit.kernels.shapes import SAMPLE, kernel_calls

ROOT = Path(__file__).parents[4]
TEMPLATES = sorted(Path(compiler.emit.kernels.__file__).parent.glob("*.j2"))


@cache
def emitted() -> dict[str, tuple[str, KernelFile]]:
    files = {}
    for variant in SAMPLE:
        for index, (call, _) in enumerate(kernel_calls(*variant)):
            if file := emit_kernel(call.op, call.arguments, 132):
                files[f"{variant}-{index}"] = (call.op, file)
    return files


def digest() -> str:
    return hashlib.sha256("".join(file.name + file.source for _, file in emitted().values()).encode()).hexdigest()


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_text_is_a_function_of_the_arguments(seed: str) -> None:
    code = "from tests.compiler.emit.kernels.test_emit import digest; print(digest())"
    environment = os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": "C"}
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True)
    assert process.stdout.decode().strip() == digest()


def test_equal_names_imply_equal_text() -> None:
    sources: dict[str, str] = {}
    for _, file in emitted().values():
        assert file.name.isidentifier()
        assert sources.setdefault(file.name, file.source) == file.source


@pytest.mark.parametrize("op", KERNELS)
def test_a_kernel_is_called_like_its_op(op: str) -> None:
    sources = {file.source for name, file in emitted().values() if name == op}
    for source in sources:
        functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        reference = OPS[op] if op in OPS else reference_update(op)
        vararg, parameters = functions[op].args.vararg, list(inspect.signature(reference).parameters)
        argument_names = [argument.arg for argument in functions[op].args.args]
        places = [name for name in parameters if name in ("starts", "positions")]
        if vararg:  # one argument, of as many as there are
            assert vararg.arg == "places" and places
            argument_names += places
        assert len(argument_names) == len(parameters)
        assert [name for name in argument_names if name in ("starts", "positions")] == places
        assert ast.get_docstring(functions[op])


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_is_python(path: Path) -> None:
    """To Python, Jinja lines are comments, and text between its braces is a set of a set. An included template is
    a part of a file, without a docstring."""
    text = path.read_text()
    tree = ast.parse(text)
    assert not path.name.endswith(".py.j2") or (ast.get_docstring(tree) and "{{" in text)
    assert any(isinstance(node, ast.FunctionDef) for node in tree.body)
    for line in text.splitlines():
        assert "{%" not in line and "{#" not in line


def test_the_text_passes_the_linter(tmp_path: Path) -> None:
    for _, file in emitted().values():
        (tmp_path / f"{file.name}.py").write_text(file.source)
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(ROOT / "pyproject.toml"),
        "--no-cache",
        str(tmp_path),
    ]
    result = subprocess.run(ruff, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


X = Buffer("x", ("R", 64), "float32")
W = Buffer("w", (4, 32, 64), "float32")
OFFSETS = Buffer("offsets", (8,), "int32")


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("linear", (X, W)),  # no kernel: torch's is the one to beat
        ("rmsnorm", (Buffer("x", ("R", 64), "float64"), Buffer("w", (64,), "float64"), 1e-6)),
        ("rmsnorm", (Buffer("x", ("R", 16385), "float32"), Buffer("w", (16385,), "float32"), 1e-6)),
        ("swiglu", (Buffer("h", ("R", 64), "float64"),)),
        ("grouped_linear", (X, Buffer("w", (4, 32, 64), "bfloat16"), OFFSETS)),
        ("grouped_linear_wgrad_", (W, Buffer("dy", ("R", 32), "float64"), Buffer("x", ("R", 64), "float64"), OFFSETS)),
    ],
)
def test_where_no_kernel_applies_the_op_runs(op: str, arguments: tuple[Any, ...]) -> None:
    assert emit_kernel(op, arguments, 132) is None


def test_the_number_of_rows_does_not_change_the_text() -> None:
    fixed, any_rows = Buffer("x", (4096, 64), "float32"), Buffer("x", ("R", 64), "float32")
    weight = Buffer("w", (64,), "float32")
    assert emit_kernel("rmsnorm", (fixed, weight, 1e-6), 132) == emit_kernel("rmsnorm", (any_rows, weight, 1e-6), 132)


def test_launches_leave_sms_to_communication() -> None:
    with_112, with_132 = (emit_kernel("grouped_linear", (X, W, OFFSETS), sms) for sms in (112, 132))
    assert with_112 and with_132
    assert with_132.source.replace("PROGRAMS = 132", "PROGRAMS = 112") == with_112.source


SWIGLU = KERNELS["swiglu"](132, Buffer("h", ("R", 16), "float32"))
assert SWIGLU


def test_values_enter_as_literals() -> None:
    hostile = "1\nimport os  # '\"{{ ROWS }}"
    assert SWIGLU
    source = render(replace(SWIGLU, values=(*SWIGLU.values, ("ROWS", hostile)))).source
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)
    }
    assert ast.literal_eval(assigned["ROWS"]) == hostile


@pytest.mark.parametrize(
    "choice",
    [
        replace(SWIGLU, values=SWIGLU.values[:-1]),
        replace(SWIGLU, name="swiglu-name"),
        replace(SWIGLU, values=(*SWIGLU.values, ("ROWS", object()))),
    ],
    ids=["missing", "name", "object"],
)
def test_an_invalid_kernel_choice_is_refused(choice: KernelChoice) -> None:
    with pytest.raises((AssertionError, ValueError, SyntaxError)):
        render(choice)
