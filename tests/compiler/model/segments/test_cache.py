"""The cache of emitted segments: the inputs of its keys, and that only complete entries are read."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compiler.emit import segment_cache as cache
from compiler.emit.kernels import KernelTarget
from compiler.files import cache as cache_folder
from compiler.ir import EmittedCall, Input, Output, Param, RecomputedValue, Segment, SegmentCode
from compiler.model.layers import dense, gqa, moe
from compiler.model.layers.residual import StreamExit
from compiler.model.segments.printer import module_name
from compiler.plan.blocks import model_steps
from dsl.load import load
from tests import copies

ROOT = Path(__file__).parents[4]
SEGMENT = Segment(
    kind="join",
    function=moe.Join(2),
    params=(Param("w", (4, 8), "float32", stack=4),),
    inputs=(Input("h", (16, 8), "float32"), Input("order", (32,), "int64", grad=False)),
    outputs=(Output("y"),),
    constants=(("top_k", 2),),
    recompute=("swiglu",),
    remade=(RecomputedValue("x", "rmsnorm", ("h", "norm", 1e-6)),),
    stored=(("x", "float8_e4m3fn"),),
)
CHANGES: dict[str, list[dict[str, Any]]] = {
    "kind": [{"kind": "joint"}],
    "function": [
        {"function": moe.Join(3)},
        {"function": dense.FeedForward(dense.Activation(), False, False)},
        {"function": dense.FeedForward(dense.Activation("gelu"), False, False)},
        {"function": moe.JoinApart(2, StreamExit(1e-6, True, 1.0), False, False)},
        {"function": moe.JoinApart(2, StreamExit(1e-5, True, 1.0), False, False)},
        {"function": partial(gqa.products, heads=2)},
        {"function": partial(gqa.products, heads=3)},
        {"function": partial(gqa.products)},
    ],
    "params": [
        {"params": ()},
        *({"params": (replace(SEGMENT.params[0], **change),)} for change in (
            {"name": "v"}, {"shape": (8, 4)}, {"dtype": "bfloat16"}, {"stack": 0}, {"grad": False}
        )),
    ],
    "inputs": [
        {"inputs": SEGMENT.inputs[::-1]},
        *({"inputs": (replace(SEGMENT.inputs[0], **change), SEGMENT.inputs[1])} for change in (
            {"name": "x"}, {"shape": ("R", 8)}, {"dtype": "float64"}, {"grad": False}
        )),
    ],
    "outputs": [{"outputs": (Output("z"),)}, {"outputs": (Output("y", grad=False),)}, {"outputs": (Output("y"),) * 2}],
    "constants": [{"constants": (("top_k", value),)} for value in (3, 2.0, True)] + [{"constants": ()}],
    "recompute": [{"recompute": ()}, {"recompute": ("swiglu", "rmsnorm")}],
    "remade": [
        {"remade": ()},
        *({"remade": (replace(SEGMENT.remade[0], **change),)} for change in (
            {"value": "y"}, {"op": "linear"}, {"args": ("h", "norm", 1e-5)}
        )),
    ],
    "stored": [{"stored": ()}, {"stored": (("x", "bfloat16"),)}, {"stored": (("y", "float8_e4m3fn"),)}],
    "fused": [{"fused": ("join",)}, {"fused": ("join", "route")}],
}  # fmt: skip
CALLS = (
    EmittedCall("F", "swiglu", "swiglu_m8"),
    EmittedCall("W", "join", parts=("add", "linear"), saved=3, saved_row=4),
)
CODE = SegmentCode(module_name(SEGMENT), "def F():\n    ...\n", ("linear", "swiglu"), (("swiglu_m8", "# é\n"),), CALLS)
KEY = cache.key_of(SEGMENT, KernelTarget(132), "tools")
ENTRY = cache.entry(KEY, CODE)
NAME = f"segments/{KEY}.json"


def test_every_field_of_a_segment_changes_its_key() -> None:
    assert list(CHANGES) == [field.name for field in fields(Segment)], "a field of a segment that no key knows"
    changed = [replace(SEGMENT, **change) for changes in CHANGES.values() for change in changes]
    keys = [KEY, *(cache.key_of(segment, KernelTarget(132), "tools") for segment in changed)]
    assert len(set(keys)) == len(keys)
    assert cache.key_of(replace(SEGMENT), KernelTarget(132), "tools") == KEY
    others = KernelTarget(131), KernelTarget(132, (("linear_fp8", "deep_gemm"),))
    assert KEY not in {cache.key_of(SEGMENT, target, "tools") for target in others}
    assert cache.key_of(SEGMENT, KernelTarget(132), "other") != KEY


def test_segments_of_one_model_have_distinct_keys() -> None:
    for name in ("quickstart", "tiny"):
        steps = model_steps(load(ROOT / "specs" / f"{name}.dsc"))
        segments = {step.segment.key: step.segment for step in steps if hasattr(step, "segment")}
        assert len({cache.key_of(segment, KernelTarget(132), "") for segment in segments.values()}) == len(segments) > 5


@pytest.mark.parametrize("function", [lambda ops, p, h: (h,), test_segments_of_one_model_have_distinct_keys])
def test_a_function_outside_the_layers_has_no_key(function: Any) -> None:
    """A function outside the layers has no text among the sources, so its name does not identify it."""
    with pytest.raises(AssertionError, match="is not a layer's"):
        cache.key_of(replace(SEGMENT, function=function), KernelTarget(132), "tools")


def test_versions_and_sources_are_among_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {cache.tools()}
    for package in cache.PACKAGES:
        version = cache.metadata.version
        with monkeypatch.context() as patch:
            patch.setattr(cache.metadata, "version", lambda name, p=package, v=version: v(name) + "+x" * (name == p))
            digests.add(cache.tools())
    with monkeypatch.context() as patch:
        patch.setattr(cache, "sources_digest", lambda root: "other")
        digests.add(cache.tools())
    with monkeypatch.context() as patch:
        patch.setattr(cache.sys, "version_info", (3, 99, 0))
        digests.add(cache.tools())
    assert len(digests) == 3 + len(cache.PACKAGES)
    assert "torch" in cache.PACKAGES


def test_any_change_of_a_source_changes_the_digest(tmp_path: Path) -> None:
    """A file in each place is edited (also a template), one is added, one renamed."""
    for place in cache.SOURCES:
        if (ROOT / place).is_dir():
            copies.copytree(ROOT / place, tmp_path / place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / place).parent.mkdir(exist_ok=True)
            copies.copy(ROOT / place, tmp_path / place)
    before = cache.sources_digest(tmp_path)
    assert before == cache.sources_digest(ROOT)
    edited = [place if place.endswith(".py") else f"{place}/__init__.py" for place in cache.SOURCES]
    for name in (
        *edited,
        "compiler/emit/kernels/swiglu.py.j2",
        "compiler/emit/kernels/new.py.j2",
        "runtime/ops/new.py",
    ):
        path = tmp_path / name
        text = path.read_bytes() if path.exists() else None
        path.write_bytes((text or b"") + b"\n")
        assert cache.sources_digest(tmp_path) != before, name
        path.unlink() if text is None else path.write_bytes(text)
    (tmp_path / "runtime/ops/linear.py").rename(tmp_path / "runtime/ops/lineal.py")
    assert cache.sources_digest(tmp_path) != before


def imported(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports where it runs."""
    tree = ast.parse(path.read_text("utf-8"))
    checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in checking:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_sources_are_all_that_emitting_imports() -> None:
    """Layers also import planning code; only their functions are traced, and all modules of these are included."""
    todo = [
        *(ROOT / "compiler/model/segments").glob("*.py"),
        ROOT / "compiler/emit/segment_cache.py",
        *(
            path
            for place in ("compiler/emit/kernels", "compiler/model/ops", "runtime/ops")
            for path in (ROOT / place).glob("*.py")
        ),
    ]
    seen = set(todo)
    while todo:
        for name in imported(todo.pop()):
            base = ROOT / name.replace(".", "/")
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if path.is_file() and path not in seen:
                    seen.add(path)
                    todo.append(path)
    names = [path.relative_to(ROOT).as_posix() for path in seen]
    outside = [n for n in names if not any(n == place or n.startswith(f"{place}/") for place in cache.SOURCES)]
    assert len(names) > 40 and outside == []


def test_an_entry_is_read_back() -> None:
    assert cache.read(ENTRY, KEY, SEGMENT) == CODE


def test_a_damaged_entry_is_ignored() -> None:
    for index in range(len(ENTRY)):
        assert cache.read(ENTRY[:index], KEY, SEGMENT) is None, index
        digit = "0" if ENTRY[index] != "0" else "1"
        assert cache.read(ENTRY[:index] + digit + ENTRY[index + 1 :], KEY, SEGMENT) is None, index


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{}",
            "[]",
            "null",
            '{"code": 3}',
            '{"code": {}}',
            "[" * 100_000,
            '{"code": {"kernels": [["a"]]}}',
            "NaN",
        ),
        '{"code": {"kernels": [], "calls": [["F", "linear", "", [], 1e999, 0]]}}',
    ],
)
def test_invalid_entries_are_ignored(text: str) -> None:
    assert cache.read(text, KEY, SEGMENT) is None


def test_an_entry_of_another_key_or_name_is_ignored() -> None:
    """Even with a forged digest, an entry cannot name a file outside the build's segments and kernels."""
    assert cache.read(ENTRY, cache.key_of(SEGMENT, KernelTarget(7), ""), SEGMENT) is None
    for code in (replace(CODE, name="../../evil"), replace(CODE, kernels=(("../../evil", "x = 1\n"),))):
        assert cache.read(cache.entry(KEY, code), KEY, SEGMENT) is None
    assert json.loads(cache.entry(KEY, CODE))["key"] == KEY


def test_stored_entries_are_found_and_repaired(tmp_path: Path) -> None:
    folder, name = tmp_path / "deep" / "cache", NAME
    assert cache.find(folder, KEY, SEGMENT) is None
    cache_folder.store(folder, [(name, ENTRY)])
    assert cache.find(folder, KEY, SEGMENT) == CODE
    for damage in (b"", ENTRY.encode()[:-9], b"\xff\xfe", ENTRY.replace("def F", "def G").encode()):
        (folder / name).write_bytes(damage)
        assert cache.find(folder, KEY, SEGMENT) is None
        cache_folder.store(folder, [(name, ENTRY)])
        assert cache.find(folder, KEY, SEGMENT) == CODE
    before = (folder / name).stat()
    cache_folder.store(folder, [(name, ENTRY)])
    assert (folder / name).stat().st_ino == before.st_ino, "what is there already stays"
    assert [path.name for path in folder.rglob("*.json")] == [f"{KEY}.json"], "nothing is left beside it"
    assert len([*folder.rglob("*")]) == 2


def test_folders_and_too_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert cache.find(tmp_path, KEY, SEGMENT) is None
    with pytest.raises(IsADirectoryError):
        cache_folder.store(tmp_path, [(NAME, ENTRY)])
    assert [path.name for path in (tmp_path / "segments").iterdir()] == [f"{KEY}.json"], "the scratch file is gone"
    cache_folder.store(tmp_path / "other", [(NAME, ENTRY)])
    monkeypatch.setattr(cache_folder, "MAX_BYTES", len(ENTRY.encode()) - 1)
    assert cache.find(tmp_path / "other", KEY, SEGMENT) is None
