"""Studies: runs are trained once and kept, failures are reported, and pages show the numbers of their runs."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.studies import balance, fp8
from benchmarks.studies.pages import last_steps
from benchmarks.studies.records import Record, Results, last, read_results, results_path, write_results
from benchmarks.studies.study import ROOT, Study, Variant, window_of
from benchmarks.studies.training import Trainings
from dsl.load import resolve
from dsl.schema import Moe
from tests import copies

STEPS = 10


# ---------------------------------------------------------------- training


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Three variants that train (one with another program), one that fails, and two that are refused."""
    folder = tmp_path_factory.mktemp("study")
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "again")
    for number in range(8):
        text = " ".join(words[(i * (number + 3) + i // 7) % len(words)] for i in range(2000))
        (folder / f"{number}.txt").write_text(text, "utf-8")
    copies.copy(ROOT / "specs" / "tiny.dsc", folder)
    (folder / "study.dsc").write_text(
        f"""import "tiny.dsc"
run study extends tiny {{
  train {{ steps = {STEPS}, validate {{ every = 5 steps, batches = 1 }} }}
  data  {{ source = "*.txt", tokenizer = train(300), validation = 20% }}
}}
""",
        "utf-8",
    )
    wide = ("precision=fp8_block", "model.attention.query_rank=16", "model.attention.kv_rank=16")
    variants = (
        balance.NOTHING,
        Variant("both", "both", "both", ()),
        Variant("cut", "cut", "cut", wide, "benchmarks.studies.accumulator"),
        Variant("wrong", "wrong", "wrong", ("precision=unheard",)),
        Variant("refused", "refused", "refused", ("precision=bf16", "precision.combine=fp32")),
        Variant("failing", "failing", "failing", ("train.batch=8",)),
    )
    return Study("tiny", variants, (1,), folder / "study.dsc", ("model.vocab=300", "model.mtp=none"))


def test_runs_are_trained_once(tiny: Study, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainings = Trainings(tiny, tmp_path / "results.json", tmp_path / "work", 1)
    failing = next(run for run in tiny.runs() if run.variant.name == "failing")
    (tmp_path / "work" / "failing-1").mkdir(parents=True)
    (tmp_path / "work" / "failing-1" / "digest").write_text(tiny.digest(failing), "ascii")
    (tmp_path / "work" / "failing-1" / "run").write_text("where the folder of the run belongs", "utf-8")
    results, failed = trainings.complete()
    assert failed == ["failing-1"] and list(results.runs) == ["both-1", "cut-1", "none-1"]
    assert list(results.refused) == ["wrong", "refused"]
    assert results.refused["wrong"] == "there is no precision `unheard`"
    for record in results.runs.values():
        load = record.loads["layers.1"]
        assert sum(load) == 4 * 16 * 2, "the tokens of the last tenth, one step, each of which chooses two"
        assert record.imbalance["layers.1"][-1] == pytest.approx(max(load) / fmean(load), abs=1e-6)
        assert len(record.loss) == len(record.imbalance["layers.1"]) == STEPS
        assert record.loss[-1] < record.loss[0] and record.validation_loss is not None
    assert results.runs["both-1"].loss != results.runs["none-1"].loss
    assert [path.name for path in (tmp_path / "work").glob("*-1")] == ["failing-1"], "for its log"
    assert read_results(tmp_path / "results.json", tiny) == results

    capfd.readouterr()
    trains = replace(tiny, variants=tiny.variants[:3])
    again, failed = Trainings(trains, tmp_path / "results.json", tmp_path / "work", 1).complete()
    assert not failed and again.runs == results.runs and not again.refused
    assert capfd.readouterr().err == "tiny: 0 runs of 10 steps to train\n"


def test_a_run_of_another_spec_has_no_result(tiny: Study, tmp_path: Path) -> None:
    """A run with more steps or a changed variant is a different run."""
    trains, path = replace(tiny, variants=tiny.variants[:2]), tmp_path / "results.json"
    records = {run.name: record(run.variant.name, 1, digest=trains.digest(run)) for run in trains.runs()}
    write_results(path, Results("tiny", STEPS, {}, dict(records)))
    assert Trainings(trains, path, tmp_path, 1).complete()[0].runs == records
    longer = Trainings(replace(trains, overrides=(*trains.overrides, "train.steps=20")), path, tmp_path, 0)
    assert [run.name for run, _ in longer.missing(read_results(path, trains))] == ["none-1", "both-1"]
    variant = replace(trains.variants[1], overrides=("train.batch=8",))
    changed = Trainings(replace(trains, variants=(trains.variants[0], variant)), path, tmp_path, 0)
    assert [run.name for run, _ in changed.missing(read_results(path, trains))] == ["both-1"]
    results = replace(changed, only=("none",)).complete()[0]
    assert list(results.runs) == ["none-1"], "the other run was not trained again, and its old rows are not a result"


# ---------------------------------------------------------------- figures


def record(variant: str, seed: int, **more: Any) -> Record:
    """A run of 100 steps in 50 windows; the losses of the last five are 4, 5, 6, 7 and 8."""
    curve = [9.0] * 45 + [4.0, 5.0, 6.0, 7.0, 8.0]
    fields = {
        "digest": "0",
        "loss": curve,
        "validation_loss": 5.5,
        "imbalance": {"layers.1": [1.5] * 50, "layers.2": [3.0] * 45 + [2.0, 2.5] * 2 + [2.25]},
        "loads": {"layers.1": [30, 10, 10, 10], "layers.2": [10, 10, 10, 10]},
    }
    return Record(variant=variant, seed=seed, **(fields | more))


def results_of(study: Study) -> Results:
    """Every run of a study, with a different loss for each seed."""
    facts = {"date": "2000-01-02", "processor": "A Processor", "python": "3", "torch": "1"}
    records = {
        run.name: record(run.variant.name, run.seed, loss=[loss * (1 + run.seed / 100) for loss in record("", 0).loss])
        for run in study.runs()
    }
    return Results(study.name, 100, facts, records)


def test_figures_average_the_last_tenth_of_the_steps() -> None:
    run = record("none", 1)
    assert run.last_loss == 6.0 and last(run.loss) == 6.0
    assert balance.imbalance(run) == pytest.approx((1.5 + 2.25) / 2)
    assert (balance.together(run), balance.idle(run)) == ((2 + 1) / 2, (10 / 15 + 1) / 2)
    results = results_of(balance.STUDY)
    assert last_steps(results) == 10 and window_of(1000) == 20 and window_of(49) == 1
    assert last_steps(replace(results, steps=1000)) == 100


def test_chance_imbalance_equals_enumeration() -> None:
    """Two experts of four, one token: of the mean, half a token, the busiest always has twice as much."""
    moe = resolve(ROOT / "specs" / "tiny.dsc").spec.model.layers[1].ffn
    assert isinstance(moe, Moe) and (moe.experts, moe.groups, moe.top_groups, moe.top_k) == (4, 2, 1, 2)
    assert balance.chance(moe, 1, 50).step == 2.0
    many_tokens = balance.chance(moe, 4000, 10)
    assert 1.0 < many_tokens.together < many_tokens.step < 1.1


def flat(text: str) -> str:
    """A page as one line."""
    return " ".join(text.split())


def test_differences_compare_runs_of_the_same_seed() -> None:
    results = results_of(fp8.STUDY)
    results.runs["fp8_block-2"] = record("fp8_block", 2, loss=[loss * 1.02 * 1.001 for loss in record("", 0).loss])
    differences = fp8.differences(results, fp8.RECIPE)
    assert {seed: round(difference, 9) for seed, difference in differences.items()} == {1: 0.0, 2: 0.001, 3: 0.0}
    text = flat(fp8.page(fp8.STUDY, results))
    assert "| fp8_block | 6.1220 (6.0600 – 6.1800) | +0.03% ± 0.03% | +0.00% | +0.10% | +0.00% |" in text
    assert (
        "with different seeds are 1.98% apart" in text
        and text.count("is within 0.25% of bf16, the goal.") == 1
        and "Not measured" not in text
    )
    results.runs["fp8_block-2"] = record("fp8_block", 2, loss=[loss * 1.02 * 1.01 for loss in record("", 0).loss])
    assert "not within 0.25% of bf16, the goal. But a standard error is up to 0.33%" in flat(
        fp8.page(fp8.STUDY, results)
    )
    for seed in (1, 2, 3):
        curve = [loss * (1 + seed / 100) * 1.01 for loss in record("", 0).loss]
        results.runs[f"fp8_block-{seed}"] = record("fp8_block", seed, loss=curve)
    assert "is not within 0.25% of bf16, the goal. One run" in flat(fp8.page(fp8.STUDY, results))


def test_the_page_compares_parts_of_the_recipe_with_the_whole() -> None:
    """The page calls a difference visible or not by its standard error, and makes no statement about one seed."""
    results = results_of(fp8.STUDY)
    for seed, factor in ((1, 1.01), (2, 1.02), (3, 1.03)):
        curve = [loss * (1 + seed / 100) * factor for loss in record("", 0).loss]
        results.runs[f"fp8_no_master-{seed}"] = record("fp8_no_master", seed, loss=curve)
    results.runs.pop("fp8_no_promotion-1")
    text = flat(fp8.page(fp8.STUDY, results))
    assert "| fp8_block, no FP32 master weights | +2.00% ± 0.58% | +1.00% | +2.00% | +3.00% |" in text
    assert "no promotion | +0.00% ± 0.00% | | +0.00% | +0.00% |" in text
    assert "More than twice their standard error: no master. Not visible at this size, less than" in text
    assert "twice their standard error: 128×128 tiles, no promotion. ## What" in text
    results.runs.pop("fp8_no_promotion-2")
    assert "standard error: 128×128 tiles. ## What" in flat(fp8.page(fp8.STUDY, results))


def test_a_page_lists_missing_variants() -> None:
    results = results_of(fp8.STUDY)
    for name in ("fp8_block", "mxfp8"):
        results.runs = {run: result for run, result in results.runs.items() if result.variant != name}
    results.refused["mxfp8"] = "there is no precision `mxfp8`"
    text = fp8.page(fp8.STUDY, results)
    assert "- mxfp8: there is no precision `mxfp8`\n" in text and "- fp8_block: not trained yet\n" in text
    assert "is not measured yet." in text and "| mxfp8 |" not in text


def test_rows_of_the_balance_page() -> None:
    text = balance.page(balance.STUDY, results_of(balance.STUDY))
    row = "1.88 (1.88 – 1.88) | 1.50 (1.50 – 1.50) | 0.83 (0.83 – 0.83) | 6.120 (6.060 – 6.180) | 5.500 (5.500 – 5.500)"
    assert f"| both | {row} |" in text
    assert "| nothing: layers.2 | 3.00 | 3.00 |" in text and "| nothing | 6.060 (+0.00%) |" in text


def test_pictures_are_svg_with_a_curve_for_each_variant() -> None:
    for study, module, curves in ((balance.STUDY, balance, 4 * 4), (fp8.STUDY, fp8, len(fp8.STUDY.variants))):
        drawn = module.written(results_of(study)).svg
        root = ET.fromstring(drawn)
        paths = [element for element in root.iter() if element.tag.endswith("path")]
        assert len(paths) == curves and len({path.get("d") for path in paths}) >= 1
        labels = {element.text for element in root.iter() if element.tag.endswith("text")}
        assert {variant.label for variant in study.variants} <= labels


# ---------------------------------------------------------------- stored results


@pytest.mark.parametrize("module", [balance, fp8], ids=["balance", "fp8"])
def test_the_page_is_current(module: Any, bless: bool) -> None:
    study_page = module.written(read_results(results_path(module.STUDY), module.STUDY))
    if bless:
        study_page.write()
    command = f"python -m benchmarks.studies {module.STUDY.name} --page"
    assert study_page.page.read_text("utf-8") == study_page.text, f"run: {command}"
    assert study_page.picture.read_text("utf-8") == study_page.svg, f"run: {command}"


@pytest.mark.parametrize("study", [balance.STUDY, fp8.STUDY], ids=["balance", "fp8"])
def test_names_and_labels_of_variants_are_unique(study: Study) -> None:
    assert len({variant.name for variant in study.variants}) == len(study.variants)
    assert len({variant.label for variant in study.variants}) == len(study.variants)
    assert read_results(results_path(study), study).runs.keys() <= {run.name for run in study.runs()}
