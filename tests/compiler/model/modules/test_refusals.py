"""Unsupported layers are refused at the key that names them, with the line of the user's file if there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.emit.kernels import KernelTarget
from compiler.plan.read_files import mistakes_of, with_files
from dsl.load import analyse, resolve
from dsl.messages.diagnostics import SpecError

SPEC = """model small {
  vocab = 300, hidden = 16, init_std = 0.2, norm_eps = 1e-6
  attention gqa { heads = 4, kv_heads = 2, head_dim = 4, rope { theta = 100 } }
  layers 0..1 { ffn custom { module = "own.py:Own" } }
}
cluster laptop { nodes = 1, node { devices = 1, device cpu { memory = 8GB } } }
run r {
  model = small, cluster = laptop, precision = fp32
  train { sequence = 8, micro_batch = 2, batch = 2, steps = 3, optimizer adamw { }, rate { constant at 1e-3 } }
  data { source = python_stdlib, tokenizer = train(300) }
}
"""
FILE = """import torch
from torch import nn


class Own(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden))
        {make}

    def forward(self, x):
        {step}
        return {result}
"""
# (lines of the class, message, hint)
WRONG = {
    "data-dependent shape": (
        {"step": "x = x[x.sum(1) > 0]"},
        "own.py:12: a shape or a branch of forward depends on values in tensors: aten.nonzero",
        "use ops whose shapes are fixed: torch.where, masks, sums",
    ),
    "data-dependent branch": (
        {"step": "x = -x if x.sum() > 0 else x"},
        "own.py:12: a shape or a branch of forward depends on values in tensors: aten._local_scalar_dense",
        "use ops whose shapes are fixed: torch.where, masks, sums",
    ),
    "in place on a parameter": (
        {"step": "self.weight.data.mul_(2)"},
        "own.py:12: forward writes into the parameter weight: aten.mul_",
        "compute a new tensor instead",
    ),
    "in place on the input": (
        {"step": "x += 1"},
        "own.py:12: forward writes into its input: aten.add_",
        "compute a new tensor instead",
    ),
    "random numbers": (
        {"step": "x = nn.functional.dropout(x, 0.1)"},
        "own.py:12: forward draws random numbers: aten.",
        "remove it: no training step draws random numbers",
    ),
    "batch norm": (
        {"make": "self.norm = nn.BatchNorm1d(hidden)", "step": "x = self.norm(x)"},
        "Own has a buffer, norm.running_mean; a layer may only have parameters",
        "compute it in forward, with torch.arange, torch.tril and the like",
    ),
    "frozen": (
        {"make": "self.frozen = nn.Parameter(torch.ones(hidden), requires_grad=False)", "result": "x * self.frozen"},
        "Own.frozen is frozen; all parameters of a layer are trained",
        "remove requires_grad=False",
    ),
    "unused": (
        {"make": "self.spare = nn.Linear(2, 2)"},
        "the result of forward does not depend on parameter spare.weight",
        "use it or remove it",
    ),
    "another shape": (
        {"result": "(x * self.weight)[:, :8]"},
        "forward returns float32 [16, 8], not float32 [16, 16], the shape of its input",
        "return that shape",
    ),
    "another dtype": (
        {"result": "(x * self.weight).double()"},
        "forward returns float64 [16, 16], not float32 [16, 16], the shape of its input",
        "return that shape",
    ),
    "complex numbers": (
        {"step": "x = torch.fft.ifft(torch.fft.fft(x)).real"},
        "forward has a tensor of complex64: aten.",
        "use float64, float32, bfloat16, int64, int32 or bool",
    ),
    "a tensor of numbers": (
        {"step": "x = x * torch.tensor([2.0])"},
        "forward creates a tensor from Python numbers, or reads a tensor that is not a parameter",
        "use torch.full or torch.arange in forward, or a parameter",
    ),
    "first values": (
        {"make": "self.first = nn.Parameter(torch.full((hidden,), 1e999))", "result": "x * self.weight * self.first"},
        "parameter first is initialized to inf",
        "initialize it to a finite number",
    ),
    "constructor": (
        {"make": "raise ValueError('no')"},
        "own.py:9: the constructor fails: ValueError: no",
        "correct the file",
    ),
    "forward": (
        {"step": "x = x @ x[:3]"},
        "own.py:12: forward fails: ",
        "correct the file",
    ),
}


def written(folder: Path, **lines: str) -> Path:
    """Write a spec with the file of its module beside it."""
    parts = {"make": "pass", "step": "pass", "result": "x * self.weight"} | lines
    (folder / "own.py").write_text(FILE.format(**parts))
    (folder / "spec.dsc").write_text(SPEC)
    return folder / "spec.dsc"


def mistake(path: Path) -> tuple[str, str, str]:
    """(place, message, hint) of the one mistake that planning a spec finds."""
    resolved = resolve(str(path), None, [])
    with pytest.raises(SpecError) as raised:
        with_files(resolved.spec, resolved.origins, path.parent)
    (diagnostic,) = raised.value.diagnostics
    assert diagnostic.span is not None and diagnostic.code == "M0101"
    return f"{diagnostic.span.line}:{diagnostic.span.text}", diagnostic.message, diagnostic.hint


@pytest.mark.parametrize("name", WRONG)
def test_modules_that_cannot_be_traced_are_refused(name: str, tmp_path: Path) -> None:
    lines, message, hint = WRONG[name]
    place, error, advice = mistake(written(tmp_path, **lines))
    assert place == '4:"own.py:Own"' and error.startswith(message) and advice == hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (None, "there is no file own.py", "write class Own into own.py"),
        ("class Own(\n", "own.py:1 is not valid Python: '(' was never closed", "correct the file"),
        ("class Other:\n    pass\n", "own.py has no class Own", 'write `module = "own.py:Other"`'),
        ("class Own:\n    pass\n", "own.py: Own is not a torch.nn.Module", "write `class Own(torch.nn.Module): …`"),
        ("import nowhere_at_all\nOwn = 1\n", "own.py:1: running the file fails: ModuleNotFoundError: ", ""),
    ],
)
def test_a_file_without_the_class_is_refused(text: str | None, message: str, hint: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    (tmp_path / "own.py").write_text(text) if text is not None else (tmp_path / "own.py").unlink()
    place, error, advice = mistake(path)
    assert place == '4:"own.py:Own"' and error.startswith(message) and advice.startswith(hint)


def test_a_text_that_names_no_class_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(SPEC.replace("own.py:Own", "own.py"))
    assert mistake(path)[1:] == ("`own.py` does not name a file and a class", 'write `module = "FILE.py:CLASS"`')


def test_checking_runs_no_user_code(tmp_path: Path) -> None:
    """`dsc check` and the editor find a missing class without running any line of the file."""
    path = written(tmp_path)
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\n"
    (tmp_path / "own.py").write_text(code + "class Own:\n    pass\n")
    assert mistakes_of(analyse(str(path), None, []), str(path)) == ()
    (tmp_path / "own.py").write_text(code)
    (diagnostic,) = mistakes_of(analyse(str(path), None, []), str(path))
    assert diagnostic.message == "own.py has no class Own" and not ran.exists()


def test_another_graph_is_another_segment(tmp_path: Path) -> None:
    """The segment cache depends on what a file computes, and not on its text."""
    from compiler.emit.segment_cache import key_of
    from compiler.model.layers import LAYERS, Place

    def key(**lines: str) -> tuple[object, str]:
        path = written(tmp_path, **lines)
        resolved = resolve(str(path), None, [])
        spec = with_files(resolved.spec, resolved.origins, tmp_path)
        segment = LAYERS["dense"].build(Place(spec, spec.model.layers[0].ffn))
        return segment.key, key_of(segment, KernelTarget(100), "tools")

    plain, commented, doubled = key(), key(step="y = 2  # nothing"), key(result="x * self.weight * 2")
    assert plain == commented and plain[0] != doubled[0] and plain[1] != doubled[1]
