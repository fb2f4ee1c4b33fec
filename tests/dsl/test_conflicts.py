"""Conflicts against brute force: the smallest set of lines, the best edits, and each edit applied to the text."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from math import inf
from pathlib import Path

import pytest

from dsl import rules
from dsl.conflict import Subject, _verified_resolutions
from dsl.conflict.nearest import distance
from dsl.conflict.search import MAX_CHANGED, LineChange, RuleProblem, RuleRow
from dsl.conflict.sheet import SpecSheet, variables
from dsl.load import analyse, check, load
from dsl.messages.diagnostics import OVERRIDE, Diagnostic, Edit, Span, text_before_value
from dsl.resolve.files import collect
from dsl.schema import Spec
from tests import copies

UI = Path(__file__).parents[1] / "ui"
PATHS = {
    "pipeline": "parallel.pipeline", "data": "parallel.data", "expert": "parallel.expert",
    "expert_tensor": "parallel.expert_tensor", "nodes": "cluster.nodes",
    "devices": "cluster.node.devices", "micro_batch": "train.micro_batch", "batch": "train.batch.end",
    "schedule": "schedule.name", "experts": "model.layers.1.ffn.experts", "groups": "model.layers.1.ffn.groups",
    "last": "model.layers.1.last",
}  # fmt: skip
KEYS = {path: key for key, path in PATHS.items()}
Numbers = Mapping[str, int | str]

TEXT = """
run random extends base {{
  model = random, cluster = random
  parallel {{ pipeline = {pipeline}, data = {data}, expert = {expert}, expert_tensor = {expert_tensor} }}
  schedule {{ name = {schedule} }}
  train {{ micro_batch = {micro_batch}, batch = {batch} }}
}}
"""
LIBRARY = """
model random extends base {{
  layers 0..0 {{ ffn dense {{ inner = 64 }} }}
  layers 1..{last} {{ ffn moe {{ experts = {experts}, groups = {groups}, top_groups = 1, top_k = 1 }} }}
}}
cluster random {{ nodes = {nodes}, node {{ devices = {devices}, device cpu {{ memory = 4GB }} }} }}
"""


def allowed(n: Numbers) -> bool:
    """The rules for these numbers, implemented independently."""
    p, d, e, b = (int(n[key]) for key in ("pipeline", "data", "expert", "micro_batch"))
    batch, experts, groups = (int(n[key]) for key in ("batch", "experts", "groups"))
    group = e * int(n["expert_tensor"])
    per_rank, remainder = divmod(batch, d * b)
    mirrored, folded = n["schedule"] == "dualpipe", n["schedule"] == "dualpipev"
    return (
        p * d == int(n["nodes"]) * int(n["devices"])
        and d % group == 0
        and experts % e == 0
        and experts % groups == 0
        and p * (2 if folded else 1) <= int(n["last"]) + 3
        and remainder == 0
        and not (mirrored and (p % 2 or per_rank % 2))
        and not ((mirrored or folded) and per_rank < 2 * p)
    )


DOMAIN: dict[str, tuple[int | str, ...]] = {
    "pipeline": (1, 2, 3, 4), "data": (1, 2, 3, 4), "expert": (1, 2, 3), "expert_tensor": (1, 2), "nodes": (1, 2, 3),
    "devices": (1, 2, 3, 4),
    "micro_batch": (1, 2), "batch": (3, 4, 6, 8, 12, 16, 24, 32), "schedule": ("1f1b", "dualpipe", "dualpipev"),
    "experts": (2, 3, 4, 6), "groups": (1, 2, 3), "last": (3,),
}  # fmt: skip


@pytest.fixture(scope="module")
def right() -> list[dict[str, int | str]]:
    """All assignments of the domain that the rules allow."""
    return [n for values in product(*DOMAIN.values()) if allowed(n := dict(zip(DOMAIN, values, strict=True)))]


def wrong(seed: int, count: int) -> Iterator[dict[str, int | str]]:
    """Random assignments, some without their own `data`, that break a rule."""
    random_ = random.Random(seed)
    while count:
        n = {key: random_.choice(values) for key, values in DOMAIN.items()}
        if random_.random() < 0.3:
            n["data"] = "auto"
        if not allowed(filled(n)):
            count -= 1
            yield n


def filled(n: Numbers) -> dict[str, int | str]:
    """Numbers with the data degree of `auto`; an impossible one if the pipeline does not divide the world."""
    world, pipeline = int(n["nodes"]) * int(n["devices"]), int(n["pipeline"])
    auto = world // pipeline if world % pipeline == 0 else world + 1
    return {**n, "data": auto if n["data"] == "auto" else n["data"]}


def written(folder: Path, n: Numbers) -> Path:
    """Write a spec with these numbers into two new files and one shared file."""
    base = (UI / "lib" / "base.dsc").read_text("utf-8")
    (folder / "base.dsc").write_text(base, encoding="utf-8")
    (folder / "library.dsc").write_text('import "base.dsc"\n' + LIBRARY.format(**n), encoding="utf-8")
    (folder / "spec.dsc").write_text('import "library.dsc"\n' + TEXT.format(**n), encoding="utf-8")
    return folder / "spec.dsc"


def applied(edits: tuple[Edit, ...], overrides: list[str]) -> list[str]:
    """Apply edits to their files. Returns the overrides with the edits of the command line."""
    for edit in sorted(edits, key=lambda edit: edit.span.start, reverse=True):
        source = edit.span.source
        text = source.text if source.name == OVERRIDE else Path(source.name).read_text("utf-8")
        new = text[: edit.span.start] + edit.text + text[edit.span.end :]
        if source.name == OVERRIDE:
            overrides = [new if override == source.text else override for override in overrides]
        else:
            Path(source.name).write_text(new, encoding="utf-8", newline="")
    return overrides


def keys_of(item: Diagnostic) -> set[str]:
    """The keys on the lines of a conflict."""
    assert item.conflict is not None
    keys = set()
    for span in item.conflict.lines:
        key = re.findall(r"(\w+)(?: = | )$", span.source.text[: span.start])[0]
        keys.add({"name": "schedule", "layers": "last"}.get(key, key))
    return keys


def matches(n: Numbers, given: Numbers, keys: set[str]) -> bool:
    return all(n[key] == given[key] for key in keys)


def test_the_rules_agree_with_the_reference(tmp_path: Path) -> None:
    random_ = random.Random(5)
    for _ in range(60):
        n = {key: random_.choice(values) for key, values in DOMAIN.items()}
        assert (not check(written(tmp_path, n))) == allowed(n)


def problem_of(path: Path) -> RuleProblem:
    """All joint rules, applied to the spec in a file."""
    view = analyse(str(path)).views[0]
    path_variables = variables(view.spec, view.context.origins, view.context.failed, ())
    rows = [
        RuleRow(
            frozenset(path for path in path_variables if any(rules.are_related(read, path) for read in reads)), rule
        )
        for reads, rule in rules.JOINT
    ]
    return RuleProblem(SpecSheet(view.spec), path_variables, rows, ())


def test_no_fewer_lines_conflict(tmp_path: Path, right: list[dict[str, int | str]]) -> None:
    """No right assignment has all lines of a conflict; one, perhaps outside the domain, has any fewer of them."""
    num_conflicts = 0
    for n in wrong(1, 120):
        items = check(written(tmp_path, n))
        for item in items:
            if item.conflict is None:
                continue
            num_conflicts += 1
            keys = keys_of(item)
            assert keys <= n.keys() - ({"data"} if n["data"] == "auto" else set())
            assert not any(matches(assignment, n, keys) for assignment in right), (n, keys)
            assert len(keys) >= 2
            for fewer in combinations(keys, len(keys) - 1):
                assert any(matches(assignment, n, set(fewer)) for assignment in right) or has_witness(
                    written(tmp_path, n), n, fewer
                )
    assert num_conflicts >= 100


def test_no_other_set_of_fewer_lines_conflicts(tmp_path: Path, right: list[dict[str, int | str]]) -> None:
    """If one conflict explains everything, no smaller set of lines is a conflict; or the set has at most two more
    lines, all of which its message is about, and no smaller set of these is a conflict."""
    num_smaller = 0
    for n in wrong(2, 60):
        items = [item for item in check(written(tmp_path, n)) if item.conflict is not None]
        if len(items) != 1:
            continue
        keys = keys_of(items[0])
        for fewer in combinations([key for key in DOMAIN if n[key] != "auto"], len(keys) - 1):
            if any(matches(assignment, n, set(fewer)) for assignment in right) or has_witness(
                written(tmp_path, n), n, fewer
            ):
                continue
            num_smaller += 1
            about_keys = about_of(items[0], n)
            assert keys <= about_keys and not {*fewer} <= about_keys, (n, keys, fewer)
            for fewest in combinations(fewer, len(keys) - 3):
                assert any(matches(assignment, n, set(fewest)) for assignment in right) or has_witness(
                    written(tmp_path, n), n, fewest
                )
    assert num_smaller < 30, "most conflicts are the smallest"


def about_of(item: Diagnostic, n: Numbers) -> set[str]:
    """The keys on the lines that a message is about."""
    batch = {"pipeline", "data", "nodes", "devices", "micro_batch", "batch", "schedule"}
    about = {
        "E0801": {"pipeline", "data", "nodes", "devices"}, "E0802": {"expert", "expert_tensor", "data"},
        "E0803": {"expert", "experts"},
        "E0804": {"pipeline", "schedule"}, "E0808": {"pipeline", "last", "schedule"}, "E0901": {"experts", "groups"},
    }.get(item.code, batch)  # fmt: skip
    return about | ({"pipeline", "nodes", "devices"} if n["data"] == "auto" and "data" in about else set())


def test_derived_values_are_traced_to_their_lines(tmp_path: Path) -> None:
    """`data = auto`: a message with the derived number names its sources, and its conflict has their lines."""
    base = (UI / "lib" / "base.dsc").read_text("utf-8")
    text = f"""{base}
cluster big extends four {{ nodes = 8, node {{ devices = 8 }} }}
model big extends base {{
  layers 0..0 {{ ffn dense {{ inner = 64 }} }}
  layers 1..3 {{ ffn moe {{ experts = 64 }} }}
}}
run big extends base {{
  model = big, cluster = big
  parallel {{ pipeline = 4, expert = 32, data = auto }}
  schedule {{ name = 1f1b }}
  train {{ batch = 1000 }}
}}
"""
    (tmp_path / "big.dsc").write_text(text, encoding="utf-8")
    first, *rest = check(tmp_path / "big.dsc", "big")
    assert first.code == "E0802" and first.conflict is not None
    assert keys_of(first) == {"pipeline", "expert", "nodes", "devices"}
    assert [note.message for note in first.notes] == ["data = 16 follows from 64 devices / 4 pipeline ranks"]
    (batch,) = (item for item in rest if item.code == "E0807")
    assert batch.notes[0].message == first.notes[0].message
    changed_keys = [{text_before_value(edit.span).strip() for edit in edits} for edits in first.conflict.resolutions]
    buys = [bool(keys & {"nodes =", "devices ="}) for keys in changed_keys]
    assert True in buys and buys == sorted(buys), "other degrees come before other machines"


def has_witness(path: Path, n: Numbers, keys: tuple[str, ...]) -> bool:
    """Whether the search finds values outside the domain that the reference allows."""
    problem = problem_of(path)
    spans = {span for span, paths in problem.lines.items() if {KEYS.get(variable) for variable in paths} & {*keys}}
    if not problem.can_hold(frozenset(spans), memory_at_stake=False):
        return False
    numbers = numbers_of(problem.sheet.spec)
    return matches(numbers, n, set(keys)) and allowed(numbers)


def numbers_of(spec: Spec) -> dict[str, int | str]:
    moe = spec.model.layers[1].ffn
    assert moe.kind == "moe"
    return {
        "pipeline": spec.parallel.pipeline, "data": spec.parallel.data, "expert": spec.parallel.expert,
        "expert_tensor": spec.parallel.expert_tensor,
        "nodes": spec.cluster.nodes, "devices": spec.cluster.node.devices, "micro_batch": spec.train.micro_batch,
        "batch": spec.train.batch.end, "schedule": str(spec.schedule.name), "experts": moe.experts,
        "groups": moe.groups, "last": spec.model.layers[1].last,
    }  # fmt: skip


def test_the_first_edits_are_the_best(tmp_path: Path, right: list[dict[str, int | str]]) -> None:
    """No right assignment that changes few lines has a lower cost, and every edit of the text makes it right."""
    num_conflicts = given_up = 0
    for n in wrong(3, 60):
        items = check(written(tmp_path, n))
        conflicts = [item.conflict for item in items if item.conflict is not None]
        if len(conflicts) != 1 or len(items) > 3:
            continue
        costs = [
            cost(assignment, n)
            for assignment in right
            if n["data"] != "auto" or filled({**assignment, "data": "auto"}) == assignment
        ]
        best = min((candidate for candidate in costs if candidate[2] <= MAX_CHANGED), default=min(costs))
        given_up += not conflicts[0].resolutions  # the search has a bound
        for number, edits in enumerate(conflicts[0].resolutions):
            path = written(tmp_path, n)
            applied(edits, [])
            assert check(path) == ()
            if number == 0:
                mended = numbers_of(load(path))
                if n["data"] == "auto":
                    mended["data"] = "auto"
                assert cost(mended, n) <= (*best[:-1], best[-1] + 1e-9), (n, mended, best)
        num_conflicts += 1
    assert num_conflicts >= 30 and given_up <= 1


def cost(new: Numbers, old: Numbers) -> tuple[bool, bool, int, bool, float]:
    """(resizes the model, changes the model, number of changed lines, changes the cluster, size of the changes)."""
    changed = [key for key in old if new[key] != old[key] and old[key] != "auto"]
    resized, bought = (bool({*changed} & keys) for keys in ({"experts", "last"}, {"nodes", "devices"}))
    size = sum(distance(PATHS[key], old[key], new[key]) for key in changed) if changed else inf
    return resized, "groups" in changed or resized, len(changed), bought, size


# ---------------------------------------------------------------- specs of tests/ui


@pytest.mark.parametrize("name", sorted(path.stem for path in UI.glob("*.dsc")))
def test_every_edit_of_a_pinned_spec_resolves_its_conflict(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each resolution, applied to the text, removes its messages and adds none. The text is then right, unless the
    conflict says that other messages stay."""
    first = (UI / f"{name}.dsc").read_bytes().split(b"\n")[0].decode(errors="replace")
    overrides = first.removeprefix("# -s ").split(" -s ") if first.startswith("# -s ") else []
    monkeypatch.chdir(UI)
    items = check(f"{name}.dsc", overrides=overrides)
    sources = collect(f"{name}.dsc").sources
    for item in items:
        stay: list[bool] = []
        for edits in item.conflict.resolutions if item.conflict is not None else ():
            top = tmp_path / "tests" / "ui"
            top.mkdir(parents=True, exist_ok=True)
            monkeypatch.chdir(top)
            for source in sources:
                Path(source.name).parent.mkdir(parents=True, exist_ok=True)
                Path(source.name).write_text(source.text, encoding="utf-8", newline="")
            after = check(f"{name}.dsc", overrides=applied(edits, overrides))
            assert {mistake.code for mistake in after} <= {mistake.code for mistake in items}
            assert item.code not in {mistake.code for mistake in after}, (item.code, edits)
            stay.append(bool(after))
            monkeypatch.chdir(UI)
        if item.conflict is not None and stay:
            assert item.conflict.leaves_others == any(stay), item
            assert ("other errors remain" in str(item)) == any(stay)


MODEL_405B = """
import "llama3-8b.dsc"
model llama3_405b extends llama3_8b {
  hidden = 16384
  attention gqa { heads = 128, kv_heads = 8, head_dim = 128, rope { theta = 500_000 } }
  layers 0..125 { ffn dense { inner = 53248 } }
}
cluster big extends h100_256 { nodes = 2048 }
run large extends pretrain {
  model = llama3_405b, cluster = big
  parallel { pipeline = 16, data = auto, zero = 1 }
  schedule { name = interleaved, chunks = 4 }
  train { micro_batch = 1, batch = 2048 }
}
"""


@pytest.mark.parametrize(
    "override",
    ["parallel.pipeline=128", "parallel.pipeline=64", "schedule.chunks=32", "train.batch=2049", "parallel.pipeline=20"],
)
def test_a_published_model_is_not_offered_with_other_layers(tmp_path: Path, override: str) -> None:
    """126 layers are 405B parameters: the edits change the run, not the model."""
    copies.copytree(UI.parents[1] / "specs", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "large.dsc"
    path.write_text(MODEL_405B, encoding="utf-8")
    items = check(path, "large", [override])
    ways = [way for item in items if item.conflict is not None for way in item.conflict.resolutions]
    assert ways, items
    edited = {text_before_value(edit.span).split()[0] for way in ways for edit in way}
    assert edited & {"pipeline", "chunks", "batch", "parallel.pipeline=", "schedule.chunks=", "train.batch="}
    assert not edited & {"layers", "heads", "kv_heads", "vocab", "hidden"}, ways


def test_nothing_is_imported_for_a_right_spec() -> None:
    code = "import sys; from dsl.load import load; load('lib/base.dsc'); print('dsl.conflict' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=UI, capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"


def test_errors_in_a_spec_of_very_many_layers_need_no_long_search(tmp_path: Path) -> None:
    """The messages are then shorter but still true: each mistake keeps the hint of its own rule."""
    base = (UI / "lib" / "base.dsc").read_text("utf-8")
    ffn = (
        "experts = 16, groups = 5, top_groups = 2, top_k = 4, inner = 4, shared = 1, score = sigmoid, normalize = true"
    )
    layers = "\n".join(f"layers {index}..{index} {{ ffn moe {{ {ffn} }} }}" for index in range(300))
    text = f"{base}model many extends base {{\n{layers}\n}}\nrun many extends base {{ model = many }}\n"
    (tmp_path / "many.dsc").write_text(text, encoding="utf-8")
    items = check(tmp_path / "many.dsc", "many")
    assert [item.code for item in items] == ["E0901"] * 300
    assert all(item.conflict is None and item.hint == "write `groups = 4`" for item in items)


def test_values_that_refer_to_other_lines_are_not_lines_of_a_conflict(tmp_path: Path) -> None:
    """`expert = parallel.pipeline` repeats another line; a `let` has the same value everywhere."""
    base = (UI / "lib" / "base.dsc").read_text("utf-8")
    lets = "let three = 3\n"
    for value, is_line in (("three", True), ("1 + 2", True), ("train.micro_batch + 1", False)):
        text = f"{base}{lets}run b extends base {{ parallel {{ expert = {value} }} }}\n"
        (tmp_path / "named.dsc").write_text(text, encoding="utf-8")
        items = [item for item in check(tmp_path / "named.dsc", "b") if item.conflict is not None]
        assert len(items) == 1 and items[0].conflict is not None
        assert (value in {span.text for span in items[0].conflict.lines}) == is_line
        assert items[0].conflict.resolutions
        for edits in items[0].conflict.resolutions:
            (tmp_path / "named.dsc").write_text(text, encoding="utf-8")
            applied(edits, [])
            assert check(tmp_path / "named.dsc", "b") == ()


def test_equally_large_changes_keep_their_order(tmp_path: Path) -> None:
    """Two changes of one line keep their order; a smaller one comes before them, a change of two lines after them."""
    problem = problem_of(written(tmp_path, next(wrong(1, 1))))
    pipeline, data = (problem.variables[f"parallel.{key}"].span for key in ("pipeline", "data"))
    assert pipeline and data
    changes = [
        LineChange({"parallel.pipeline": 8, "parallel.data": 8}, 0.5),
        *(LineChange({"parallel.pipeline": value}, 1.0) for value in (8, 2)),
        LineChange({"parallel.pipeline": 3}, 0.5),
    ]
    tried: list[Mapping[Span, str]] = []

    def again(edits: Mapping[Span, str]) -> list[Diagnostic]:
        tried.append(edits)
        return []

    subject = Subject(problem.sheet.spec, {}, (), (), (), again)
    verified = _verified_resolutions(subject, problem, changes, [], [], lambda span: (0, span.start))
    assert tried == [*({pipeline: value} for value in ("3", "8", "2")), {pipeline: "8", data: "8"}]
    assert [{edit.span: edit.text for edit in edits} for edits, _ in verified] == tried
