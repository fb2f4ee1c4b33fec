"""`dsc plan`: its JSON fits the schema, its text is readable, and wrong specs are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main
from compiler.predict.json import document, document_of_phases
from compiler.predict.predict import predict
from compiler.predict.prediction import Prediction
from compiler.predict.search import Candidate, Ranking
from compiler.tools.picture.drawing import Screen
from compiler.tools.report.prediction_text import count, ranges, seconds, size, span, text, text_of_phases
from dsl.load import load, resolve
from tests.compiler.cli.forms import parsed

ROOT = Path(__file__).parents[3]
SPECS = ROOT / "specs"
QUICK, SINGLE, V3 = (str(SPECS / f"{name}.dsc") for name in ("quickstart", "single-gpu", "deepseek-v3"))
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", ["quickstart", "deepseek-v3", "llama3-8b", "single-gpu"])
def test_the_document_has_its_form(name: str, capsys: Captured) -> None:
    assert main(["plan", str(SPECS / f"{name}.dsc"), "--format", "json"]) == 0
    plan = parsed(capsys.readouterr().out, "plan")
    step = plan["step"]
    rows = ("forward_s", "backward_s", "weight_s", "overlapped_s", "bubble_s", "optimizer_s")
    assert sum(step[row] for row in rows) == pytest.approx(step["seconds"])
    for rank in plan["memory"]["ranks"]:
        parts = ("weights", "gradients", "optimizer", "activations", "buffers")
        assert sum(rank[part] for part in parts) == rank["peak_bytes"]
    assert plan["memory"]["fits"] == all(r["peak_bytes"] <= r["capacity_bytes"] for r in plan["memory"]["ranks"])
    assert plan["assumptions"]


def test_v3_is_planned_though_it_does_not_train_yet(capsys: Captured) -> None:
    assert main(["plan", V3, "--format", "json"]) == 0
    plan = parsed(capsys.readouterr().out, "plan")
    counts = {"total": 671_026_419_200, "active": 37_552_297_472, "mtp": 11_610_068_224, "adapters": 0}
    assert plan["parameters"] == counts
    assert plan["cluster"] == {"name": "h800_2048", "devices": 2048, "device": "h800"}
    assert plan["memory"]["fits"]
    assert plan["cost"]["usd_per_device_hour"] == 2
    assert [layer for stage in plan["stages"] for layer in stage["layers"]] == list(range(61))
    assert plan["stages"][0]["ranks"] == plan["stages"][15]["ranks"][::-1] == [0, 15]


def test_unknown_facts_suggest_what_to_add(capsys: Captured) -> None:
    assert main(["plan", QUICK]) == 0
    output = capsys.readouterr().out
    assert "add `price = 2USD/h` to the device" in output and "add `bf16 = …TFLOPS` to the device" in output
    assert main(["plan", QUICK, "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cost"]["usd"] is None and plan["mfu"]["full"] is None
    assert main(["plan", QUICK, "-s", "cluster.node.device.price=0.5USD/h"]) == 0
    assert "$" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_asked_for(width: int, capsys: Captured) -> None:
    for name in (QUICK, V3):
        assert main(["plan", name, "--width", str(width)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert all(line == line.rstrip() for line in lines)


def test_colours_and_ascii_change_only_the_appearance() -> None:
    prediction = predict(resolve(QUICK).spec)
    plain = text(prediction, Screen(100))
    coloured = text(prediction, Screen(100, colours=True))
    assert "\x1b[" in coloured and re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert text(prediction, Screen(100, ascii=True)).isascii()


@pytest.mark.parametrize(
    ("num_plans", "head"), [(1, "no other plan keeps the rules"), (2, "among 2 plans that keep the rules")]
)
def test_the_chosen_plan_is_highlighted(num_plans: int, head: str) -> None:
    spec = resolve(QUICK).spec
    tried = [Candidate({"parallel.pipeline": 2 - n}, spec, seconds=1.0 + n, missing_bytes=0) for n in range(num_plans)]
    lines = text(predict(spec), Screen(100, colours=True), Ranking(tuple(tried))).splitlines()
    title = next(index for index, line in enumerate(lines) if head in line)
    table = lines[title + 1 : lines.index("", title)]
    assert [line.startswith("\x1b[1m") for line in table] == [row == 1 for row in range(num_plans + 1)]
    assert "the fastest that fits" in table[1]


@pytest.mark.parametrize(("spec", "memory"), [(SINGLE, 8), (V3, 60)], ids=["one rank", "ranks of nodes"])
def test_lack_of_memory_is_reported_with_rank_and_action(spec: str, memory: int, capsys: Captured) -> None:
    device = [f"cluster.node.device.{value}" for value in (f"memory={memory}GiB", "reserve=0GiB")]
    assert main(["plan", spec, *(word for value in device for word in ("-s", value))]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("memory "))
    assert "does not fit" in line and re.search(rf"\d GiB too much: .* of {memory}\.0 GiB on rank \d+ at [(FBIW]", line)


def test_a_wrong_spec_is_refused(capsys: Captured) -> None:
    assert main(["plan", QUICK, "-s", "parallel.pipeline=7"]) == 2
    assert "error" in capsys.readouterr().err
    assert main(["plan", str(SPECS / "nowhere.dsc")]) == 2
    assert main(["plan", QUICK, "-s", "nonsense=1", "--format", "json"]) == 2
    assert parsed(capsys.readouterr().out, "failure")["diagnostics"]


def test_wrong_rates_are_refused(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rates.json").write_text("{", "utf-8")
    assert main(["plan", QUICK, "--rates", str(tmp_path / "rates.json")]) == 2
    assert "rates.json:1" in capsys.readouterr().err
    assert main(["plan", QUICK, "--rates", "no-such-table"]) == 2
    assert "there is no rate table 'no-such-table': use a file, or one of " in capsys.readouterr().err
    for file in ("no/such", "no.json"):
        assert main(["plan", QUICK, "--rates", file]) == 2
        assert f"there is no file {file}" in capsys.readouterr().err
    (tmp_path / "mine").write_text("{", "utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", QUICK, "--rates", "mine"]) == 2
    assert "mine:1" in capsys.readouterr().err, "a file may have any name"
    assert main(["plan", QUICK, "--rates", "h100"]) == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.node.device.memory=40GiB", "parallel.data=64"],  # does not fit; more nodes are among its edits
        ["cluster.node.device.memory=10GiB", "parallel.pipeline=auto", "recompute=auto"],  # left open, and does not fit
    ],
)
def test_given_rates_apply_to_the_choice_and_to_edits(overrides: list[str], tmp_path: Path, capsys: Captured) -> None:
    """`--rates FILE` gives the plan of a spec that names FILE; the file that the spec itself names is not read."""

    def planned(*more: str) -> dict[str, Any]:
        arguments = [part for override in overrides for part in ("-s", override)]
        assert main(["plan", str(SPECS / "llama3-8b.dsc"), *arguments, *more, "--format", "json"]) == 0
        plan = parsed(capsys.readouterr().out, "plan")
        for edit in plan["edits"]:  # the overrides have other places in the command
            edit["settings"] = {setting["key"]: setting["value"] for setting in edit["settings"]}
        return plan

    rates = tmp_path / "rates.json"
    slow = {"class": "gemm", "factor": 3.0, "source": "a test", "date": "2025"}
    device = {"name": "slow H100", "sms": 132}
    rates.write_text(json.dumps({"name": "slow", "base": "h100", "device": device, "factors": [slow]}), "utf-8")
    named, shipped = planned("-s", f"cluster.rates={rates}"), planned()
    assert not named["memory"]["fits"] and named["edits"] and named["rates"] == "slow"
    assert planned("--rates", str(rates)) == named == planned("-s", "cluster.rates=no.json", "--rates", str(rates))
    assert named["step"]["seconds"] > 1.3 * shipped["step"]["seconds"]
    assert [edit["step_s"] for edit in named["edits"]] != [edit["step_s"] for edit in shipped["edits"]]


def test_a_plan_is_the_same_each_time() -> None:
    spec = resolve(V3).spec
    assert document(predict(spec)) == document(predict(spec))


def test_numbers_are_short() -> None:
    assert [seconds(number) for number in (19.926, 0.137, 1.25e-5, 0.0)] == [
        "19.93 s",
        "137.0 ms",
        "12.50 us",
        "0.000 s",
    ]
    assert [count(number) for number in (671_026_419_200, 180_000, 512)] == ["671.0B", "180.0K", "512"]
    assert [span(number) for number in (4.6e6, 7200, 90, 2)] == ["53.2 days", "2.00 hours", "1.50 minutes", "2.000 s"]
    assert [size(number) for number in (2**36, 3 * 2**20, 100)] == ["64.0 GiB", "3.0 MiB", "100 bytes"]
    assert ranges((0, 1, 2, 3, 7, 9, 10)) == "0–3, 7, 9, 10"


def assumed(name: str, *overrides: str) -> str:
    return "\n".join(predict(resolve(SPECS / f"{name}.dsc", None, overrides).spec).assumptions)


def test_only_assumptions_that_a_plan_uses_are_listed() -> None:
    dense, alone, moe = assumed("llama3-8b"), assumed("single-gpu"), assumed("deepseek-v3")
    assert "expert" not in dense and "grouped" not in dense and "table h100 has no row of wgrad" in dense
    assert "gradients are reduced while the links are free" in dense and "layers are split" in dense
    for words in ("layers are split", "gradients are reduced", "expert rank"):
        assert words not in alone and words in moe
    assert "all experts receive equally many tokens" in alone and "no row of grouped_gemm in bf16" in alone
    assert "the whole embedding" not in assumed("llama3-8b", "parallel.tensor=2")
    uneven = assumed("llama3-8b", "parallel.tensor=2", "model.vocab=128255")
    reason = "2 does not divide the vocabulary of 128,255"
    assert f"each tensor rank holds the whole embedding and head, because {reason}" in uneven
    assert "weights gathered" not in assumed("llama3-8b", "parallel.zero=0", "recompute=[rmsnorm, swiglu]")


def test_gradients_are_reduced_only_between_data_ranks() -> None:
    alone, several = assumed("laptop-gqa"), assumed("laptop-gqa", "parallel.pipeline=1", "parallel.data=2")
    assert "gradients are reduced" not in alone and "gradients are reduced after the last backward" in several


def test_a_dense_model_is_all_active_and_small_memory_is_in_small_units(capsys: Captured) -> None:
    assert main(["plan", str(SPECS / "laptop-gqa.dsc")]) == 0
    output = capsys.readouterr().out
    assert "1.312M parameters\npipeline 2" in output
    assert "memory of a device  MiB, at the peak; each has room for 3.7 GiB" in output
    (row,) = re.findall(r"^  0  +(.*?) [█·]", output.partition("memory of a device")[2], re.MULTILINE)
    *parts, peak = map(float, row.split())
    assert peak == pytest.approx(sum(parts), abs=0.1) and min(parts) > 0


def test_edits_to_more_nodes_are_planned_at_given_rates(capsys: Captured) -> None:
    """The fabric for such an edit has the devices of the larger cluster, not of the original one."""
    tight = ["-s", "cluster.node.device.memory=10GiB", "-s", "cluster.node.device.reserve=0GiB"]
    assert main(["plan", str(SPECS / "moe-8gpu.dsc"), *tight, "--rates", "h100", "--format", "json"]) == 0
    edits = json.loads(capsys.readouterr().out)["edits"]
    assert any(setting["key"] == "cluster.nodes" for edit in edits for setting in edit["settings"])


def test_phases_are_reported_one_by_one_and_in_total() -> None:
    first = predict(load(SPECS / "tiny.dsc", None, ["cluster.node.device.price=2USD/h"]))
    assert first.money.usd is not None
    (rank,) = first.ranks
    small = replace(first, run="tiny.wide", ranks=(replace(rank, capacity_bytes=1),))
    free = replace(first, run="tiny.free", money=replace(first.money, usd=None))

    def total(*phases: Prediction) -> dict[str, Any]:
        totals: dict[str, Any] = document_of_phases([document(phase) for phase in phases], phases)["total"]
        return totals

    def table(*phases: Prediction) -> list[list[str]]:
        lines = text_of_phases(phases, Screen(100)).splitlines()
        assert lines[0] == f"the run  {len(phases)} phases" and max(map(len, lines)) <= 100
        return [re.split("  +", line.strip()) for line in lines[1:]]

    fitting, unfitting = total(first, first), total(first, small)
    assert (fitting["steps"], fitting["fits"], unfitting["fits"]) == (10, True, False)
    assert (fitting["usd"], total(first, free)["usd"]) == (2 * first.money.usd, None)
    head, *rows = table(first, small)
    assert head == ["phase", "steps", "tokens", "time", "device-hours", "cost", "memory"]
    assert [row[:3] for row in rows] == [["tiny", "5", "320"], ["tiny.wide", "5", "320"], ["all", "10", "640"]]
    assert [row[-1] for row in rows] == ["fits", "does not fit", "does not fit"]
    assert all(row[-2].startswith("$") for row in rows)
    assert [row[-2:] for row in table(first, free)[2:]] == [["unknown", "fits"]] * 2
