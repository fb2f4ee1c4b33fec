"""Paths and keys in string literals of modules exist in the schema, so that renaming a key cannot go unnoticed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest

from dsl import rules
from dsl.conflict import nearest, weakest
from dsl.conflict.sheet import VARIABLES, SpecSheet, check_variables, variables
from dsl.load import analyse, load
from dsl.reference import blocks, find, keys
from dsl.reference.keys import without_kinds
from dsl.schema import BUILT_IN, Moe, Node, Parallel, Spec, StrictModel
from dsl.schema.paths import check_key, check_path

ROOT = Path(__file__).parents[2]
UI = ROOT / "tests" / "ui"
TOP = "|".join(sorted(Spec.model_fields))
PATH = re.compile(rf"(?:{TOP})\.[a-z0-9_.*]*[a-z0-9_*]")
# Strings that look like a path and are not: files, and figures of `dsc diff` and of a rate table.
NO_PATHS = {
    "kernels.json",  # a file of a build
    "train.py",
    "train.dsc",
    "schedule.txt",
    "schedule.csv",
    "cluster.rates.rows",
    "schedule.actions",
    "schedule.batch_sizes",
    "metrics.jsonl",
}
NO_PATHS |= {f"schedule.{figure}" for figure in ("bubble", "micro_batches", "stages", "steps")}
PUBLISHED = "compiler/tools/weights/"  # names of published tensors and files begin with `model.` too
# Identifiers in dsl/conflict that are not keys: choices, words of a batch, a unit, and the wildcard for a name.
NO_KEYS = {"dualpipe", "zbv", "auto", "byte", "from", "to", "any"}


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """(file, string) of each string literal in the modules of a folder, docstrings included."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield str(file.relative_to(ROOT)), node.value


# ---------------------------------------------------------------- paths


def test_a_path_missing_in_the_schema_is_refused() -> None:
    for right in (
        "parallel.zero",
        "model.layers.*.ffn.experts",
        "model.layers.3.last",
        "train.batch.to",
        "cluster.more",
        "data.sources.web.weight",
    ):
        assert check_path(right) == right
    wrong_paths = ("parallel.zeros", "model.layers.*.experts", "train.batch.until", "x", "data.tokenizer.vocabulary")
    for wrong in (*wrong_paths, "data.sources.web.wait"):
        with pytest.raises(LookupError, match="the schema has no"):
            check_path(wrong)
    with pytest.raises(LookupError, match="Moe has no field `n_experts`"):
        check_key(Moe, "n_experts")
    with pytest.raises(LookupError, match=r"no variables: parallel\.zeros"):
        check_variables({"parallel.zero": 1, "parallel.zeros": 2})


@pytest.mark.parametrize(
    ("cls", "name"), [("Parallel", "expert"), ("Moe", "top_groups"), ("LayerRange", "last"), ("Gqa", "kv_heads")]
)
def test_a_renamed_key_fails_where_conflicts_are_imported(cls: str, name: str) -> None:
    """A renamed key fails at import, not in a search that omits the variable and then gives a false message."""
    rename = f"from dsl.schema import {cls}; fields = {cls}.__pydantic_fields__; fields['new'] = fields.pop({name!r})"
    process = subprocess.run(
        [sys.executable, "-c", f"{rename}; import dsl.conflict"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 1 and "LookupError" in process.stderr and name in process.stderr.splitlines()[-1], (
        process.stderr
    )


@pytest.mark.parametrize("folder", ["dsl", "compiler"])
def test_every_text_that_looks_like_a_path_exists_in_the_schema(folder: str) -> None:
    schema_paths = {without_kinds(path) for path in (*keys(), *(block.path for block in blocks()))}
    schema_paths |= {
        f"{path}.{word}"
        for path in schema_paths
        for word in ("name", "kind", "start", "end", "from", "to", "first", "last")
    }
    covered = set()
    for file, text in texts(ROOT / folder):
        if PATH.fullmatch(text) and text not in NO_PATHS and not str(file).startswith(PUBLISHED):
            path = without_kinds(re.sub(r"\.(\*|[0-9]+)(?=\.|$)", "", text))
            assert path in schema_paths or path == "data.tokenizer.vocab", f"{file}: {text}"
            covered.add(text)
    assert len(covered) > 20


def test_every_key_named_by_conflicts_exists() -> None:
    """Keys that conflicts name are in the schema; keys of layers and heads are named by the end of their path."""
    fields = {name for cls in classes(Spec) for name in cls.model_fields}
    for file, text in texts(ROOT / "dsl" / "conflict"):
        if re.fullmatch(r"\.?[a-z][a-z_]*", text):
            assert text.removeprefix(".") in fields | NO_KEYS, f"{file}: {text}"


def test_every_variable_has_its_place_in_both_orders() -> None:
    assert {*nearest.ORDER} == {*weakest.ORDER} == VARIABLES
    assert {*nearest.BOUNDS} < VARIABLES


def test_every_variable_occurs_in_some_spec() -> None:
    """Each listed variable has a value in some spec."""
    variable_names: set[str] = set()
    for name, override in (("quickstart.dsc", ()), ("laptop-gqa.dsc", ()), ("llama3-8b.dsc", ("schedule.chunks=2",))):
        overrides = (*override, *(["schedule.name=interleaved"] if override else []))
        view = analyse(str(ROOT / "specs" / name), None, overrides).views[0]
        for path in variables(view.spec, view.context.origins, (), ()):
            variable_names.add(path if path in VARIABLES else path.rpartition(".")[2])
    assert variable_names == VARIABLES


def test_findings_refer_to_existing_paths() -> None:
    """Each rule is broken by a spec of tests/ui; a finding whose path does not exist would be placed at its block."""
    codes: set[str] = set()
    for file in sorted(UI.glob("*.dsc")):
        for view in analyse(str(file)).views:
            for _, finding in rules.broken_rules(view.spec, view.context.failed):
                codes.add(finding.code)
                for path in (finding.path, *(path for _, path in finding.notes)):
                    check_path(path)
    assert len(codes) > 30


# ---------------------------------------------------------------- copies


def classes(cls: type[Node], found: set[type[Node]] | None = None) -> set[type[Node]]:
    """A class of the schema and the classes of its fields."""
    found = found if found is not None else set()
    if cls not in found:
        found.add(cls)
        todo: list[Any] = [info.annotation for info in cls.model_fields.values()]
        while todo:
            annotation = todo.pop()
            if isinstance(annotation, type) and issubclass(annotation, Node):
                classes(annotation, found)
            elif isinstance(annotation, UnionType) or get_args(annotation):
                todo += get_args(annotation)
    return found


def test_a_copy_with_an_unknown_field_is_refused() -> None:
    spec = load(ROOT / "specs" / "tiny.dsc")
    assert spec.parallel.model_copy(update={"zero": 1}).zero == 1
    for cls in classes(Spec):
        with pytest.raises(TypeError, match=f"{cls.__name__} has no field zeros"):
            cls.model_construct(zeros=1)
    with pytest.raises(TypeError, match="Parallel has no field zeros"):
        spec.parallel.model_copy(update={"zeros": 1})
    with pytest.raises(TypeError, match="Precision has no field master_dtype"):
        BUILT_IN["bf16"].model_copy(update={"master_dtype": "fp32"})
    with pytest.raises(LookupError, match="Parallel has no field `zeros`"):
        SpecSheet(spec).set_value("parallel.zeros", 1)
    assert Parallel.model_construct(data=2).data == 2


def test_no_module_copies_models_that_are_less_strict() -> None:
    """Models that are copied by field name derive from StrictModel: pydantic's own copies accept any name."""
    assert issubclass(Node, StrictModel)
    for folder in ("dsl", "compiler"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = file.read_text("utf-8")
            if file != ROOT / "dsl" / "schema" / "base.py" and "(BaseModel)" in text:
                assert "model_copy" not in text and "model_construct" not in text, file


def test_a_key_is_shown_as_an_override_if_it_can_be_overridden() -> None:
    """Blocks and keys of layer ranges are not shown as overrides; paths of a named block have its name."""
    overrides = {
        key: dict(topic.facts).get("override", ()) for key in keys() for topic in find(key) if topic.name == key
    }
    blocks = {key for key in overrides if any(inner_key.startswith(f"{key}.") for inner_key in overrides)}
    assert not [key for key in blocks - {"model", "cluster", "precision"} if overrides[key]]
    assert not [key for key in overrides if key.startswith("model.layers.") and overrides[key]]
    without_override = [key for key in overrides if key not in blocks and ".layers." not in key and not overrides[key]]
    assert {"train.seed", "parallel.pipeline"}.isdisjoint(without_override) and len(without_override) < 10, (
        without_override
    )
    assert overrides["data.sources.weight"] == ("-s data.sources.web.weight=0.7",)
    assert overrides["train.seed"][0].startswith("-s train.seed=")


@pytest.mark.parametrize("micro_batch", [1, 3, 64, 4096])
def test_data_ranks_that_are_tried_leave_room_for_the_batch(micro_batch: int) -> None:
    """If memory matters, at most the largest possible number; each has enough micro-batches for its ranks."""
    for pipeline, nodes in ((1, 1), (4, 2), (16, 1)):
        chosen = {"parallel.pipeline": pipeline, "train.micro_batch": micro_batch, "cluster.nodes": nodes}
        largest, *rest = weakest.weakest_values(
            "parallel.data", weakest.ChoiceView({}, {}, chosen, memory_at_stake=True)
        )
        micro_batches = weakest.MOST_NEEDED * pipeline
        assert largest * micro_batches * micro_batch <= weakest.MAX_BATCH
        assert largest * pipeline <= weakest.MAX_NODES * nodes and rest == [1][: largest > 1]
        assert weakest.weakest_values("parallel.data", weakest.ChoiceView({}, {}, chosen, memory_at_stake=False)) == (
            1,
        )
