"""Extension points are where docs/extending.md states: its examples, in these files only, run end to end in a copy."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler.schedule import MAKERS
from compiler.schedule.schedule import Schedule
from dsl.facts.schedules import FACTS
from runtime.contract.actions import Pair
from tests.extending import ROOT, Copy, extension, files_of_table

NAMED_IN = ("dsl/facts/schedules.py", "compiler/schedule/__init__.py")  # a schedule's own file has its name too
SCHEDULE, OP, OPTION = "A new schedule", "A new op with a kernel", "A new option of attention"
SPEC = """\
import "specs/tiny.dsc"

run mine extends tiny {
  cluster   = two
  precision = fp64
  parallel  { pipeline = 2 }
  train     { steps = 3, micro_batch = 1, batch = 6 }
  data      { source = "words.txt", tokenizer = train(512), validation = 0% }
}
cluster two extends one { node { devices = 2 } }

run plain extends mine { model = plain, precision = fp32, train { steps = 6, rate { constant at 1e-2 } } }
run grouped extends plain { model = grouped }
model plain {
  vocab = 512, hidden = 16, init_std = 0.02, norm_eps = 1e-6
  attention gqa { heads = 4, kv_heads = 2, head_dim = 8, qk_norm = true, rope { theta = 10_000 } }
  layers 0..3 { ffn dense { inner = 32 } }
}
model grouped extends plain { GROUPED }
"""
MINE = "mine.dsc:mine"
WORDS = " ".join(f"{left} {right}" for left in range(300) for right in ("and", "or", "not", left * left, left**3))


@pytest.mark.parametrize(
    ("title", "kind", "name"),
    [(SCHEDULE, "schedule", "eager"), (OP, "op with a kernel", "squared_relu"), (OPTION, "option of attention", "gqa")],
)
def test_the_table_names_the_files_of_the_page(title: str, kind: str, name: str) -> None:
    assert extension(title).files == files_of_table(kind, name)


def copy_of(folder: Path, *titles: str) -> Copy:
    copy = Copy(folder, *map(extension, titles))
    changed = "attention gqa { shared_kv = true }" if OPTION in titles else ""
    (folder / "mine.dsc").write_text(SPEC.replace("GROUPED", changed), "utf-8")
    (folder / "words.txt").write_text(WORDS, "utf-8")
    return copy


def losses(copy: Copy, spec: str, *settings: str) -> list[float]:
    """The losses of a run of three steps in real processes."""
    run = f"run-{len(list(copy.folder.glob('run-*')))}"
    changes = (word for setting in settings for word in ("-s", setting))
    copy.dsc("train", spec, "--out", run, "--cache", "shared", *changes)
    lines = (copy.folder / run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_new_schedule(tmp_path: Path) -> None:
    """It is drawn, compiled, proven and trained, to the losses of 1f1b; rules and the explanations go by its row."""
    copy = copy_of(tmp_path, SCHEDULE)
    order = Schedule.from_text(copy.dsc("schedule", "--name", "eager", "--ranks", "2", "--micro-batches", "6"))
    assert sum(isinstance(step, Pair) for steps in order.actions for step in steps) == 3 + 5
    assert "2 for eager, dualpipe and dualpipev" in copy.dsc("explain", "E0805")
    few = copy.dsc("check", MINE, "-s", "schedule.name=eager", "-s", "train.batch=3", code=2)
    assert "E0805" in few and "eager over 2 ranks needs 4 micro-batches" in few
    assert losses(copy, MINE, "schedule.name=eager") == losses(copy, MINE, "schedule.name=1f1b")
    copy.run(
        "-m",
        "pytest",
        "-q",
        "-x",
        "tests/compiler/schedule/test_family.py",
        "-k",
        "facts or eager and not 11 and not 16",
    )
    copy.run("-m", "pytest", "-q", "-x", "tests/compiler/cli/test_schedule.py")


def test_a_new_option_of_attention_and_an_op_with_a_kernel(tmp_path: Path) -> None:
    """The option is parsed, shown and counted; the gradients of its segment equal autograd. The op's kernel
    is interpreted against its reference; through the option, the op is traced, checked and trained."""
    copy = copy_of(tmp_path, OPTION, OP)
    assert "shared_kv" in copy.dsc("explain", "model.attention.gqa.shared_kv")
    output = copy.dsc("show", "mine.dsc:grouped", "model.attention")
    assert "shared_kv = true" in output and "shared_kv" in copy.dsc(
        "diff", "mine.dsc:grouped", "mine.dsc:plain", code=1
    )
    copy.run("-m", "tests.extended", "shared_kv")
    copy.run("-m", "pytest", "-q", "-x", "tests/specs/test_counts.py", "-k", "random_models")

    layer = tmp_path / "compiler" / "model" / "layers" / "gqa.py"
    used = layer.read_text("utf-8").replace(
        "(kv_T, kv_T) if sizes.shared_kv", "(kv_T, ops.squared_relu(kv_T)) if sizes.shared_kv"
    )
    layer.write_text(used, "utf-8")
    test_files = (
        "tests/compiler/emit/kernels/test_squared_relu.py",
        "tests/runtime/ops/test_rules.py",
        "tests/runtime/ops/test_ops.py",
    )
    copy.run("-m", "pytest", "-q", "-x", *test_files, "-k", "squared_relu or every_op_of_emitted_code")
    copy.run("-m", "tests.extended", "squared_relu")
    first, *_, last = losses(copy, "mine.dsc:grouped")
    assert last < first
    kernels = json.loads(copy.dsc("inspect", "build/grouped", "--kernels", "--format", "json"))["kernels"]
    (kernel,) = (kernel for kernel in kernels if kernel["kernel"] == "squared_relu_n16_float32")
    assert kernel["ops"] == ["squared_relu", "squared_relu_dgrad"]


def strings(path: Path) -> Iterator[str]:
    """The string literals of a module, if it has any of FACTS."""
    source = path.read_text("utf-8")
    if not any(fact in source for fact in FACTS):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_schedule_is_named_in_its_rows_and_its_file() -> None:
    for package in ("dsl", "compiler", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            names = {text for text in strings(path) if text in FACTS}
            module = file.removesuffix(".py").replace("/", ".")
            own_names = {name for name, maker in MAKERS.items() if maker.__module__ == module}
            assert file in NAMED_IN or names <= own_names, f"{file} names {sorted(names - own_names)}"
