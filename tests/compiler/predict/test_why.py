"""Edits that make a plan fit: each is applied as shown, and everything fits afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from compiler.cli.main import main
from compiler.plan.read_files import with_files
from compiler.predict.predict import memories, predict, time_plan
from compiler.predict.search import Outline, SharedParts
from compiler.predict.why import (
    MAX_SEARCHES,
    MAX_SHOWN,
    FittingEdit,
    FittingEdits,
    NearestEdit,
    Setting,
    _EditSearch,
    _TriedCandidate,
    fitting_edits,
    ladders,
)
from compiler.predict.why_shown import lines_of, misfit_of
from compiler.schedule import SCHEDULES
from dsl.load import resolve, variants
from dsl.messages.diagnostics import Edit, Source, Span
from dsl.schema import choices
from dsl.text.edits import apply
from tests import copies
from tests.compiler.cli.forms import parsed

ROOT = Path(__file__).parents[3]
SPECS = ROOT / "specs"
MEMORY = "cluster.node.device.memory"
# What does not fit in each spec, and the edit that is shown first.
RESERVE = "cluster.node.device.reserve=0GiB"  # so that `memory` is what a plan may use
CASES = {
    "llama on small devices": ("llama3-8b", [f"{MEMORY}=40GiB", RESERVE], "recompute = [rmsnorm]"),
    "v3 without recompute": (
        "deepseek-v3",
        ["recompute=[]", RESERVE],
        "recompute = [swiglu, mla_up]",
    ),  # as published, without norms
    "experts on small devices": ("moe-8gpu", [f"{MEMORY}=16GiB", RESERVE], "train.micro_batch = 1"),
    "several keys": ("moe-8gpu", [f"{MEMORY}=12GiB", RESERVE], "offload = [moments, master]"),
    "all state sharded": ("moe-8gpu", [f"{MEMORY}=16GiB", RESERVE, "parallel.zero=3"], "parallel.zero = 1"),
    "on a CPU": ("quickstart", [f"{MEMORY}=110MiB"], "train.micro_batch = 1"),
}


def ways(name: str, overrides: list[str], **more: Any) -> tuple[FittingEdit, ...]:
    path = SPECS / f"{name}.dsc"
    resolved = resolve(path, None, overrides)
    timed_plan = time_plan(resolved.spec)
    return fitting_edits(
        timed_plan, memories(timed_plan), variants(path, None, overrides), resolved.origins, **more
    ).fit


@pytest.mark.parametrize("case", CASES)
def test_each_edit_fits_with_the_stated_time_and_memory(case: str) -> None:
    name, overrides, first = CASES[case]
    before = predict(resolve(SPECS / f"{name}.dsc", None, overrides).spec)
    assert not before.fits
    fitting = ways(name, overrides)
    assert 0 < len(fitting) <= MAX_SHOWN and " = ".join(fitting[0].settings[0]) == first
    for way in fitting:
        spec = resolve(SPECS / f"{name}.dsc", None, [*overrides, *way.overrides]).spec
        after = predict(spec)
        assert after.fits
        assert after.step.seconds == pytest.approx(way.seconds) == pytest.approx(before.step.seconds * (1 + way.change))
        assert min(rank.capacity_bytes - rank.peak_bytes for rank in after.ranks) == way.free_bytes >= 0
        assert after.num_devices == way.num_devices
    assert len({way.settings for way in fitting}) == len(fitting)
    order = [(way.needs_more_devices, not way.is_exact, way.seconds) for way in fitting]
    assert order == sorted(order), "the fastest first, those that cost more than time behind"


def test_edits_recompute_no_unneeded_op() -> None:
    """Every costly op in an edit is needed: without it there is too little memory."""
    overrides = [f"{MEMORY}=14GiB"]
    for way in ways("moe-8gpu", overrides):
        settings = dict(way.settings)
        ops = settings.pop("recompute").strip("[]").split(", ")
        for op in set(ops) & {"router", "shared", "dense", "attention", "experts"}:
            fewer = ", ".join(op_name for op_name in ops if op_name != op)
            remaining = [f"{key}={value}" for key, value in settings.items()]
            spec = resolve(SPECS / "moe-8gpu.dsc", None, [*overrides, *remaining, f"recompute=[{fewer}]"]).spec
            assert not predict(spec).fits


@pytest.mark.parametrize(
    "overrides", [[f"{MEMORY}=15GiB"], [f"{MEMORY}=13GiB"], [f"{MEMORY}=16GiB", "parallel.zero=3"]]
)
def test_no_zero_offload_or_recompute_of_auto_alone_is_faster(overrides: list[str]) -> None:
    """The first edit is as fast as each of these that fits, which are planned here one by one."""
    path = SPECS / "moe-8gpu.dsc"
    legal = variants(path, None, [*overrides, RESERVE])
    base = legal(())
    assert base is not None
    settings = [
        *(f"parallel.zero={level}" for level in range(4)),
        *(f"offload={state}" for state in ("[moments]", "[moments, master]")),
        *(f"recompute=[{', '.join(ops)}]" for ops in choices.values(base, "recompute")),
    ]
    alone = {setting: predict(spec) for setting in settings if (spec := legal((setting,))) is not None}
    seconds = {setting: plan.step.seconds for setting, plan in alone.items() if plan.fits}
    edits = ways("moe-8gpu", [*overrides, RESERVE])
    assert edits[0].seconds <= min(seconds.values()) * (1 + 1e-9)
    recomputed = [edit.seconds for edit in edits if [key for key, _ in edit.settings] == ["recompute"]]
    of_auto = min(time for setting, time in seconds.items() if setting.startswith("recompute"))
    assert min(recomputed) <= of_auto * (1 + 1e-9), "what `recompute = auto` chooses is listed, or something faster"


def test_every_edit_that_may_fit_is_planned_before_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a search that plans nothing by itself, the only edit that fits is still found."""
    looking = looking_at("moe-8gpu", f"{MEMORY}=15GiB", RESERVE)
    for ladder in ladders(looking.base.spec, ()):
        looking.climb(ladder)
    fits = ("offload", "[moments, master]")
    tried: list[tuple[Setting, ...]] = []

    def try_in_full(candidate: _TriedCandidate) -> bool:
        tried.append(candidate.settings)
        looking.fitting += [cast(Any, (candidate, None))] if fits in candidate.settings else []
        return fits in candidate.settings

    monkeypatch.setattr(looking, "try_in_full", try_in_full)
    looking.plan_rest()
    assert tried[-1] == (fits,) and len(tried) == len({*tried})


def test_fewer_copies_may_fit() -> None:
    """Copies take memory, so an edit may let more data ranks share one."""
    given = ["parallel.pipeline=1", "parallel.zero=3", "parallel.shard=8"]
    edits = ways("llama3-8b", [*given, f"{MEMORY}=46GiB"])
    assert any(edit.settings[0][0] == "parallel.shard" for edit in edits)


def test_a_plan_that_fits_needs_no_edit() -> None:
    assert ways("llama3-8b", []) == ()


def test_keys_that_are_auto_are_left_to_the_search() -> None:
    spec = resolve(SPECS / "qwen3-30b-a3b.dsc", None, ["train.micro_batch=2"]).spec
    keys = {"parallel.pipeline", "parallel.expert", "train.micro_batch"}
    assert keys <= {key for ladder in ladders(spec, ()) for key, _ in ladder}
    for key in keys:
        assert key not in {edited for ladder in ladders(spec, (key,)) for edited, _ in ladder}


@pytest.mark.parametrize(
    ("given", "lighter"),
    [
        (["precision=fp32"], [("precision", "bf16")]),
        (["precision=fp64"], [("precision", "bf16")]),
        (["precision=bf16"], []),
    ],
)
def test_only_wide_values_are_narrowed(given: list[str], lighter: list[tuple[str, str]]) -> None:
    spec = resolve(SPECS / "quickstart.dsc", None, given).spec
    edits = [setting for ladder in ladders(spec, ()) for setting in ladder]
    assert [setting for setting in edits if setting[0].startswith("precision")] == lighter


def test_edits_can_fit_where_the_search_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Edits add to what was chosen for `auto`; once applied, the search continues from them to a plan that fits."""
    spec = str(SPECS / "llama3-8b.dsc")
    arguments = ["-s", f"{MEMORY}=10GiB", "-s", "recompute=auto", "-s", "parallel.pipeline=auto"]
    assert main(["plan", spec, *arguments, "--format", "json"]) == 0
    edits = json.loads(capsys.readouterr().out)["edits"]
    assert edits
    for edit in edits:
        applied = [part for setting in edit["settings"] for part in ("-s", f"{setting['key']}={setting['value']}")]
        assert main(["plan", spec, *arguments, *applied, "--format", "json"]) == 0
        after = json.loads(capsys.readouterr().out)
        assert after["memory"]["fits"] and after["step"]["seconds"] <= edit["step_s"] * (1 + 1e-9)


def test_data_ranks_that_are_written_follow() -> None:
    fitting = ways("llama3-8b", [f"{MEMORY}=36GiB", "parallel.data=64"])
    larger = [dict(way.settings) for way in fitting if way.needs_more_devices]
    assert larger == [{"cluster.nodes": "128", "parallel.data": "256"}]


def test_a_schedule_of_a_file_keeps_its_size(tmp_path: Path) -> None:
    for folder in ("models", "clusters"):
        copies.copytree(SPECS / folder, tmp_path / folder)
    text = (SPECS / "llama3-8b.dsc").read_text("utf-8").replace("name = 1f1b", 'file = "mine.schedule"')
    (tmp_path / "a.dsc").write_text(text, "utf-8")
    (tmp_path / "mine.schedule").write_text(SCHEDULES["1f1b"].generate(4, 8).to_text(), "utf-8")
    overrides = [f"{MEMORY}=40GiB"]
    resolved = resolve(tmp_path / "a.dsc", None, overrides)
    timed_plan = time_plan(with_files(resolved.spec, resolved.origins, tmp_path))
    legal = variants(tmp_path / "a.dsc", None, overrides)
    fitting = fitting_edits(timed_plan, memories(timed_plan), legal, resolved.origins).fit
    assert fitting
    for way in fitting:
        spec = legal(way.overrides)
        assert spec is not None and spec.schedule.file == "mine.schedule"
        assert predict(with_files(spec, {}, tmp_path)).fits


def looking_at(name: str, *overrides: str) -> _EditSearch:
    """A search that has not tried anything yet."""
    path = SPECS / f"{name}.dsc"
    resolved = resolve(path, None, overrides)
    timed_plan = time_plan(resolved.spec)
    return _EditSearch(timed_plan, memories(timed_plan), variants(path, None, overrides), resolved.origins)


def test_edits_are_combined_with_one_value_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits are combined, the one that gains most alone first, with at most one per key."""
    looking = looking_at("laptop-gqa")
    tried: list[tuple[Setting, ...]] = []

    def look(candidate: _TriedCandidate) -> bool:
        tried.append(candidate.settings)
        return False

    monkeypatch.setattr(looking, "try_in_full", look)
    edits: list[Setting] = [
        ("train.micro_batch", "1"),
        ("train.micro_batch", "2"),
        ("parallel.zero", "3"),
        ("recompute", "[rmsnorm]"),
    ]
    outline = Outline(looking.base.spec, SharedParts())
    looking._combine_until_fit([_TriedCandidate((edit,), outline, least) for least, edit in enumerate(edits)])
    assert tried == [(edits[0],), (edits[0], edits[2]), (edits[0], edits[2], edits[3])]


def test_schedules_are_searched_for_with_a_few_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = looking_at("laptop-gqa")
    of_auto = resolve(SPECS / "laptop-gqa.dsc", None, ["schedule.name=auto"]).spec
    outline = Outline(of_auto, SharedParts())
    planned: list[_TriedCandidate] = []

    def plan_whole(tried: _TriedCandidate) -> Any:
        planned.append(tried)
        looking.searches += 1
        looking.planned[frozenset(tried.settings)] = 1
        return None, ()

    monkeypatch.setattr(looking, "plan_whole", plan_whole)
    for number in range(MAX_SEARCHES + 2):
        assert not looking.try_in_full(_TriedCandidate((("parallel.zero", str(number)),), outline, -1))
    assert len(planned) == MAX_SEARCHES


# ---------------------------------------------------------------- shown


def test_the_edits_of_the_document_can_be_made_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies.copytree(SPECS, tmp_path / "specs")
    monkeypatch.chdir(tmp_path / "specs")
    cluster = Path("clusters/h100.dsc")
    cluster.write_text(cluster.read_text("utf-8").replace("79.1GiB", "24GiB, reserve = 0GiB"), "utf-8")
    spec = Path("moe-8gpu.dsc")  # in FP32, so that less precise values are an edit, too
    spec.write_text(spec.read_text("utf-8").replace("precision = bf16", "precision = fp32"), "utf-8")
    assert main(["plan", "moe-8gpu.dsc", "--format", "json"]) == 0
    edits = parsed(capsys.readouterr().out, "plan")["edits"]
    assert [edit["settings"][0]["key"] for edit in edits] == ["train.micro_batch", "recompute", "precision"]
    assert [edit["exact"] for edit in edits] == [True, True, False]
    source = Source("moe-8gpu.dsc", Path("moe-8gpu.dsc").read_text("utf-8"))
    assert [edit["settings"][0]["replaces"] for edit in edits] == [True, False, True]
    for edit in (edit for edit in edits if edit["settings"][0]["replaces"]):
        (place,) = edit["settings"]
        assert place["file"] == "moe-8gpu.dsc"
        start, end = (
            source.line_starts[place[line] - 1] + place[column] - 1
            for line, column in (("line", "column"), ("end_line", "end_column"))
        )
        Path("other.dsc").write_text(apply(source.text, [Edit(Span(source, start, end), place["value"])]), "utf-8")
        after = predict(resolve("other.dsc").spec)
        assert after.fits and after.step.seconds == pytest.approx(edit["step_s"])


def test_the_text_names_the_place_of_edits(capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(SPECS / "llama3-8b.dsc")
    assert main(["plan", spec, "-s", f"{MEMORY}=40GiB", "-s", RESERVE, "--width", "100"]) == 0
    output = capsys.readouterr().out
    assert "why it does not fit" in output and "pipeline rank 0 holds 42.6 GiB at B0.0, 2.6 GiB more than" in output
    assert "1. recompute = [rmsnorm]" in output
    line_number = next(
        number for number, line in enumerate(Path(spec).read_text("utf-8").splitlines(), 1) if line.startswith("run ")
    )
    assert f"add `recompute = [rmsnorm]` at {spec}:{line_number}:" in " ".join(output.split())
    assert main(["plan", spec]) == 0
    assert "why it does not fit" not in capsys.readouterr().out


def test_reports_that_no_edit_fits() -> None:
    resolved = resolve(SPECS / "llama3-8b.dsc", None, [f"{MEMORY}=40GiB", RESERVE])
    timed_plan = time_plan(resolved.spec)
    ranks = memories(timed_plan)
    nothing = fitting_edits(timed_plan, ranks, lambda overrides: None, resolved.origins)
    assert nothing == FittingEdits()
    lines = list(lines_of(misfit_of(timed_plan, ranks, nothing, resolved.origins), 60))
    assert lines[-1] == ("none of the edits that dsc tried makes it fit", False)
    assert max(len(line) for line, _ in lines) <= 60


def test_the_nearest_edit_is_reported_with_the_memory_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    """With the edit, the plan lacks exactly the reported memory on that rank, and less than without the edit."""
    sizes = ["train.sequence=65536", "train.micro_batch=1", "train.batch=16"]
    spec, sizes_and_keys = str(SPECS / "moe-8gpu.dsc"), [*sizes, "precision=fp32", f"{MEMORY}=11GiB", RESERVE]
    words = [spec, *(word for override in sizes_and_keys for word in ("-s", override))]
    assert main(["plan", *words, "--format", "json"]) == 0
    plan = parsed(capsys.readouterr().out, "plan")
    assert plan["edits"] == [] and len(plan["nearest"]["settings"]) > 1, "one upon another"
    near = NearestEdit(
        tuple((setting["key"], setting["value"]) for setting in plan["nearest"]["settings"]),
        plan["nearest"]["lacking_bytes"],
        plan["nearest"]["pp_rank"],
        plan["nearest"]["devices"],
    )
    after = predict(resolve(spec, None, [*sizes_and_keys, *(f"{key}={value}" for key, value in near.settings)]).spec)
    lacking = [rank.peak_bytes - rank.capacity_bytes for rank in after.ranks]
    assert near.lacking_bytes == max(lacking) == lacking[near.pp_rank] > 0 and near.num_devices == after.num_devices
    before = max(rank["peak_bytes"] - rank["capacity_bytes"] for rank in plan["memory"]["ranks"])
    assert near.lacking_bytes < before
    assert main(["plan", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"({near.lacking_bytes:,} bytes) on pipeline rank {near.pp_rank}" in text
    assert all(f"{key} = {value}" in text for key, value in near.settings)


@pytest.mark.parametrize(("num_devices", "more"), [(2, ""), (16, " on 16 devices")])
def test_the_text_of_the_nearest_edit_states_the_lacking_memory(num_devices: int, more: str) -> None:
    settings = (("parallel.pipeline", "8"), ("train.micro_batch", "1"))
    timed_plan, nearest = (
        time_plan(resolve(SPECS / "laptop-gqa.dsc").spec),
        NearestEdit(settings, 3 * 2**29, 5, num_devices),
    )
    assert timed_plan.spec.cluster.world == 2
    last, before = reversed(misfit_of(timed_plan, memories(timed_plan), FittingEdits((), nearest), {}).lines[-2:])
    assert before == "none of the edits that dsc tried makes it fit"
    lacking = f"the closest still lacks 1.5 GiB (1,610,612,736 bytes) on pipeline rank 5{more}: "
    assert last == lacking + "parallel.pipeline = 8, train.micro_batch = 1"


def test_layers_are_split_only_for_edits_that_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edits are those of a search that splits the layers for every edit."""
    overrides = [f"{MEMORY}=100MiB", "parallel.pipeline=4", "parallel.data=auto", "parallel.expert=1"]
    splits, bound = list[Outline](), Outline.__dict__["missing_as_split"]
    missing = bound.func

    def counted(outline: Outline) -> tuple[int, int]:
        splits.append(outline)
        return cast(tuple[int, int], missing(outline))

    monkeypatch.setattr(bound, "func", counted)
    found, num_splits = ways("quickstart", overrides), len(splits)
    monkeypatch.setattr(_EditSearch, "_least_lacking_bytes", lambda self, outline: outline.missing_as_split[0])
    assert ways("quickstart", overrides) == found != ()
    assert 0 < num_splits < len(splits) - num_splits
