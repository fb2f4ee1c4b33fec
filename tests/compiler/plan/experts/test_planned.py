"""Plans of a spec with a placement file follow the file, and only the degrees of the file are tried."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.cli.main import main
from compiler.ir.expert_placement import ExpertPlacement, LayerPlacement, to_text
from compiler.plan.experts.layer_search import place_layer
from compiler.plan.experts.layout import ExpertLayout, PlacementError, default_placement, moves
from compiler.plan.experts.placement_file import layer_placement, read_placement
from compiler.plan.experts.spec_placement import layers_with_experts
from compiler.plan.plan import make_plan
from compiler.plan.read_files import with_files
from compiler.plan.spec_files import expert_placement_of
from dsl.load import load as load_spec

ROOT = Path(__file__).parents[4]
QUICK = ROOT / "specs" / "quickstart.dsc"
Shown = pytest.CaptureFixture[str]
NAMED = 'parallel.placement="placement.json"'


def shifted(ranks: int, experts: int, load: Any = None) -> LayerPlacement:
    """Experts assigned to the ranks round-robin."""
    physical = np.arange(experts).reshape(-1, ranks).T.reshape(-1)
    return layer_placement("", physical, ranks, (), None if load is None else np.asarray(load, dtype=float))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.dsc").write_text(QUICK.read_text("utf-8"), "utf-8")
    return tmp_path


def write(folder: Path, ranks: int, load: Callable[[int], Any] = lambda experts: None) -> Path:
    """A placement file for a number of expert ranks, with the load it was made for."""
    layers = []
    for name, ffn in layers_with_experts(load_spec(QUICK)):
        shifted_ranks = shifted(ranks, ffn.experts, load(ffn.experts))
        layers.append(LayerPlacement(name, shifted_ranks.devices, shifted_ranks.moves, shifted_ranks.load))
    (folder / "placement.json").write_text(to_text(layers), "utf-8")
    return folder / "placement.json"


def plan(capsys: Shown, *settings: str) -> Any:
    sets = [word for setting in settings for word in ("-s", setting)]
    assert main(["plan", "quick.dsc", *sets, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: Shown, *settings: str) -> str:
    sets = [word for setting in settings for word in ("-s", setting)]
    assert main(["plan", "quick.dsc", *sets]) == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------- assumptions


def test_the_plan_names_the_file(folder: Path, capsys: Shown) -> None:
    write(folder, 2)
    plain, placed = plan(capsys), plan(capsys, NAMED)
    assert "expert e of E is on expert rank e // (E / expert)" in plain["assumptions"]
    assert "experts are on the expert ranks that placement.json names" in placed["assumptions"]
    assert not any("expert e of E" in assumption or "busiest" in assumption for assumption in placed["assumptions"])
    assert placed["step"]["seconds"] >= plain["step"]["seconds"]  # the router sorts rows by one more table
    assert main(["plan", "quick.dsc", "-s", NAMED]) == 0
    assert "experts are on the expert ranks that placement.json names" in capsys.readouterr().out


def test_balance_under_the_load_of_the_file(folder: Path) -> None:
    """Balance by hand: even experts have load 3, odd ones 1; the file alternates ranks, the default cuts in halves."""
    write(folder, 2, lambda experts: [3 if e % 2 == 0 else 1 for e in range(experts)])
    spec = with_files(load_spec("quick.dsc", overrides=[NAMED]), {}, folder)
    placement = expert_placement_of(spec)
    assert placement is not None
    (assumption,) = placement.evenness
    assert (
        "1.500 and 1.500 times the mean" in assumption
        and "with experts in order it would be 1.000 and 1.000" in assumption
    )
    assert assumption in make_plan(spec).assumptions
    rows = placement.layers
    for index, layer in enumerate(rows.values()):  # one worse layer, twice as busy as the others
        even = [2.0] * layer.num_experts
        heavy = [8.0 if e % 2 == 0 else 0.0 for e in range(layer.num_experts)]
        rows = rows | {layer.layer: LayerPlacement(layer.layer, layer.devices, (), tuple(even if index else heavy))}
    worst, share = 2.0, (2 * 2 + (len(rows) - 1)) / (2 + len(rows) - 1)
    (assumption,) = ExpertPlacement(rows).evenness
    assert f"gets {worst:.3f} and {share:.3f} times the mean" in assumption


def test_a_load_without_tokens_gives_no_balance(folder: Path) -> None:
    write(folder, 2, lambda experts: [0] * experts)
    placement = expert_placement_of(with_files(load_spec("quick.dsc", overrides=[NAMED]), {}, folder))
    assert placement is not None and placement.evenness == ()


def test_little_of_a_run_is_moved(folder: Path, capsys: Shown) -> None:
    """The best placement of some layers moves many experts; a placement within the tolerance moves fewer."""
    random = np.random.default_rng(1)
    rows = [random.integers(1, 1000, ffn.experts).astype(float) for _, ffn in layers_with_experts(load_spec(QUICK))]
    (folder / "load.json").write_text(json.dumps({"load": [row.tolist() for row in rows]}), "utf-8")
    assert main(["place", "load.json", "quick.dsc", "--format", "json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    layout = ExpertLayout(16, 2, 1, 2)
    current = default_placement(layout)
    counts = []
    for row, layer in zip(rows, layers, strict=True):
        steady, best = (
            place_layer(row, layout, current=current, steady=is_steady).physical for is_steady in (True, False)
        )
        assert layer["physical_to_logical"] == steady.tolist()
        assert len(layer["moves"]) == len(moves(current, steady, layout)) <= len(moves(current, best, layout))
        counts.append(len(moves(current, best, layout)) - len(layer["moves"]))
    assert sum(counts) > 0


def test_dsc_plan_reports_the_balance_of_dsc_place(folder: Path, capsys: Shown) -> None:
    """The balance that the file gives for its placement."""
    random = np.random.default_rng(3)
    rows = [random.integers(1, 1000, ffn.experts).tolist() for _, ffn in layers_with_experts(load_spec(QUICK))]
    (folder / "load.json").write_text(json.dumps({"load": rows}), "utf-8")
    assert main(["place", "load.json", "quick.dsc", "-o", "placement.json", "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    worst = max(layer["balance"]["device"] for layer in answer["layers"])
    before = max(layer["before"]["device"] for layer in answer["layers"])
    (assumption,) = (line for line in plan(capsys, NAMED)["assumptions"] if "busiest" in line)
    assert f"gets {worst:.3f} and {answer['overall']['after']:.3f} times" in assumption
    assert f"would be {before:.3f} and {answer['overall']['before']:.3f};" in assumption


# ---------------------------------------------------------------- the load in the file


def test_a_load_reads_back(folder: Path) -> None:
    path = write(folder, 2, lambda experts: [0.5 * e for e in range(experts)])
    layers = read_placement(path)
    assert all(layer.load == tuple(0.5 * e for e in range(layer.num_experts)) for layer in layers.values())
    assert to_text(tuple(layers.values())) == path.read_text("utf-8")
    whole_numbers = write(folder, 2, lambda experts: range(experts)).read_text("utf-8")
    assert '"load": [0, 1, 2, 3' in whole_numbers


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (3, "`load` must be the tokens of each of its 16 experts"),
        ([1, 2], "`load` must be the tokens of each of its 16 experts"),
        ([], "`load` must be the tokens of each of its 16 experts"),
        ([-1, *[1] * 15], "`load`: -1 tokens"),
        (["1", *[1] * 15], '`load`: "1" is not a number'),
        ([True, *[1] * 15], "`load`: true is not a number"),
        ([1e300, *[1] * 15], "`load`: 1e.300 tokens"),
        ([[1], *[1] * 15], r"`load`: \[1\] is not a number"),
    ],
)
def test_invalid_loads_are_refused(folder: Path, load: Any, message: str) -> None:
    path = write(folder, 2)
    document = json.loads(path.read_text("utf-8"))
    document["layers"][0]["load"] = load
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(PlacementError, match=message):
        read_placement(path)


# ---------------------------------------------------------------- degrees that are open


@pytest.mark.parametrize("ranks", [2, 4])
def test_only_degrees_of_the_file_are_tried(folder: Path, capsys: Shown, ranks: int) -> None:
    write(folder, ranks)
    degrees = "parallel.expert=auto", "parallel.pipeline=1"
    assert {
        choice["values"]["parallel.expert"] for choice in plan(capsys, *degrees, "schedule.name=1f1b")["choices"]
    } > {2}
    document = plan(capsys, *degrees, "schedule.name=1f1b", NAMED)
    assert document["parallel"]["expert"] == ranks
    assert {choice["values"]["parallel.expert"] for choice in document["choices"]} == {ranks}


def test_other_degrees_stay_open_beside_the_placement(folder: Path, capsys: Shown) -> None:
    """Data ranks must be a multiple of the file's, so the longest pipelines are left out."""
    write(folder, 4)
    document = plan(capsys, "parallel.expert=4", "parallel.pipeline=auto", "schedule.name=1f1b", NAMED)
    assert document["parallel"]["pipeline"] == 1
    capsys.readouterr()
    degrees = ["-s", "parallel.expert=auto", "-s", "parallel.pipeline=auto"]
    assert main(["check", "quick.dsc", *degrees, "-s", NAMED]) == 0  # though the first choice is expert = 2
    assert main(["check", "quick.dsc", "-s", "parallel.expert=2", "-s", NAMED]) == 2


def test_refused_if_no_choice_has_the_degree_of_the_file(folder: Path, capsys: Shown) -> None:
    write(folder, 8)
    errors = refused(capsys, "parallel.expert=auto", NAMED)
    message = "placement.json is for expert = 8, but no choice for `auto` gives that degree"
    assert "error[P0101]" in errors and message in errors
    assert "--> -s:1:20" in errors


def test_a_file_of_another_model_is_refused_for_every_degree(folder: Path, capsys: Shown) -> None:
    path = write(folder, 2)
    document = json.loads(path.read_text("utf-8"))
    document["layers"].pop()
    path.write_text(json.dumps(document), "utf-8")
    assert "mtp.0 is missing" in refused(capsys, "parallel.expert=auto", NAMED)
    path.unlink()
    assert "there is no file placement.json" in refused(capsys, "parallel.expert=auto", NAMED)


def test_a_model_without_experts_keeps_its_own_message(folder: Path, capsys: Shown) -> None:
    write(folder, 2)
    path = os.path.relpath(ROOT / "specs" / "llama3-8b.dsc")
    (folder / "quick.dsc").write_text(f'import "{path}"\nrun mine extends pretrain {{ }}\n', "utf-8")
    assert "error[E0816]: no layer has experts" in refused(capsys, "parallel.expert=auto", NAMED)


def test_no_edit_asks_for_another_degree(folder: Path, capsys: Shown) -> None:
    """More expert ranks are among the edits of a plan that does not fit, but not with a placement file for two."""
    write(folder, 2)
    small = "cluster.node.device.memory=110MB"
    plain_keys = {edit["key"] for way in plan(capsys, small)["edits"] for edit in way["settings"]}
    placed_keys = {edit["key"] for way in plan(capsys, small, NAMED)["edits"] for edit in way["settings"]}
    assert placed_keys and "parallel.expert" not in placed_keys and plain_keys
