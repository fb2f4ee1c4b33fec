"""Training with a placement: losses, gradients and weights equal plain autograd wherever the experts are; resuming with
a new placement; and refusals.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.emit.segment_cache import Segments
from compiler.ir.expert_placement import ExpertPlacement
from compiler.pipeline import lower_spec
from compiler.plan.experts.placement_file import layer_placement
from compiler.plan.experts.spec_placement import layers_with_experts, layout_of
from compiler.plan.plan import make_plan, slots_of
from compiler.plan.read_files import with_files
from compiler.plan.spec_files import with_expert_placement
from dsl.load import load as load_spec
from dsl.messages.diagnostics import SpecError
from dsl.schema import Spec
from tests.runtime.run.place import FOUR_RANKS, Place, bits, saved
from tests.runtime.step.specs import MOE, spec
from tests.runtime.step.test_differential import check
from tests.runtime.step.test_nodes import on_nodes


def scattered(chosen: Spec, seed: int = 0) -> tuple[Spec, ExpertPlacement]:
    """A random placement of the experts, different in every layer."""
    random, layers, owners = np.random.default_rng(seed), {}, {}
    for name, ffn in layers_with_experts(chosen):
        physical = random.permutation(ffn.experts)
        layers[name] = layer_placement(name, physical, chosen.parallel.expert, ())
        place = np.argsort(physical) // (ffn.experts // chosen.parallel.expert)
        owners[name] = tuple(place.tolist())
    parallel = chosen.parallel.model_copy(update={"placement": "placement.json"})
    placement = ExpertPlacement(layers)
    assert placement.owners == owners and placement.num_ranks == chosen.parallel.expert
    return with_expert_placement(chosen.model_copy(update={"parallel": parallel}), placement), placement


@pytest.mark.parametrize(
    ("model", "schedule", "pp", "ep", "dp", "zero"),
    [("v3", "dualpipe", 2, 2, 2, 1), ("v3", "1f1b", 1, 4, 4, 0), ("qwen", "zbv", 2, 2, 2, 0)],
)
def test_training_equals_autograd(
    tmp_path: Path, segments: Segments, model: str, schedule: str, pp: int, ep: int, dp: int, zero: int
) -> None:
    run_spec, placement = scattered(spec(pp, ep, dp, 2 * pp, 5, zero, model, schedule))
    assert any(owners != tuple(sorted(owners)) for owners in placement.owners.values())
    check(tmp_path, segments, {"placed": run_spec}, pp * dp)


def test_experts_are_held_where_the_placement_says() -> None:
    run_spec, placement = scattered(spec(2, 2, 4, 4), seed=3)
    plan = make_plan(run_spec)
    expert_ranks = {replica.name: {rank % 4 % 2 for rank in replica.holders} for replica in plan.replicas}
    for layer, owners in placement.owners.items():
        for expert, owner in enumerate(owners):
            assert (
                expert_ranks[f"{layer}.ffn.experts.{expert}.up"]
                == expert_ranks[f"{layer}.ffn.experts.{expert}.down"]
                == {owner}
            )
    for tensor, slots in plan.slots:
        owners = placement.owners[tensor.removesuffix(".ffn.router.slots")]
        assert sorted(slots) == list(range(len(slots)))
        assert [slot // (len(slots) // 2) for slot in slots] == list(owners)
    lower_spec(run_spec)  # and the proof accepts it


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_each_slice_of_an_expert_has_its_own_place(slices: int) -> None:
    """The places are on consecutive ranks of the owner; all ranks have equally many places."""
    owners = (2, 0, 1, 0, 2, 1)
    first, local = slots_of(owners, slices), len(owners) // 3
    places = [[place + local * part for part in range(slices)] for place in first]
    assert sorted(place for rank_places in places for place in rank_places) == list(range(len(owners) * slices))
    for owner, rank_places in zip(owners, places, strict=True):
        assert [place // local for place in rank_places] == [owner * slices + part for part in range(slices)]
    assert first[1] < first[3] and first[2] < first[5] and first[0] < first[4], "in their order on a rank"


def test_an_expert_rank_may_be_several_devices() -> None:
    """Two nodes of two devices, which have two expert ranks of two devices, or one group's four."""
    split, joined = (on_nodes(spec(1, ep, 4, 2, expert_tensor=4 // ep), 2) for ep in (2, 4))
    layouts = [layout_of(run_spec, MOE, None, None, None, None) for run_spec in (split, joined)]
    assert [(layout.devices, layout.nodes) for layout in layouts] == [(2, 2), (4, 2)]


# ---------------------------------------------------------------- from a run to its next resume


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Place:
    """A run of three steps, and a placement made by hand in which two experts of a layer are exchanged."""
    place = Place(tmp_path_factory.mktemp("placed"), segments)
    place.compile(FOUR_RANKS)
    place.dsc("train", "tiny.dsc", "--steps", 3)
    return place


def swapped(folder: Path) -> None:
    """The file from `dsc place`, with experts 0 and 3 of layers.1 exchanged."""
    path = folder / "placement.json"
    document = json.loads(path.read_text("utf-8"))
    document["layers"][0]["devices"] = [[3, 1], [2, 0]]
    document["layers"][0]["moves"] = ["expert 0: device 0 → device 1", "expert 3: device 1 → device 0"]
    path.write_text(json.dumps(document), "utf-8")


def test_a_run_resumes_with_a_placement(place: Place) -> None:
    folder, run = place.folder, place.folder / "runs" / "tiny"
    output = place.dsc("place", run, "-o", "placement.json").stdout
    assert "2 layers  4 experts in 2 groups on 2 devices" in output and "written  placement.json" in output
    swapped(folder)
    before, text = saved(run), (folder / "tiny.dsc").read_text()
    (folder / "tiny.dsc").write_text(text.replace("data = auto,", 'data = auto, placement = "placement.json",'))
    done = place.dsc("train", "tiny.dsc", "--steps", 6, "--resume")
    assert "going on from" in done.stdout + done.stderr and "experts.layers.1" in done.stdout + done.stderr
    assert saved(run).step == 6 and before.step == 3
    assert saved(run, 3).shapes == saved(run).shapes  # names refer to logical experts
    assert bits(saved(run, 3)) == bits(before)
    assert load_spec(run / "spec.resolved").parallel.placement == "placement.json"
    assert "[3, 1]" in (run / "placement.json").read_text()
    assert "all layers" in place.dsc("place", run).stdout
    assert (run / "report.html").is_file()  # made from the run's own file
    (folder / "tiny.dsc").write_text(text)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda layers: layers.pop(), "mtp.0 is missing, but it has experts to place"),
        (lambda layers: layers[0].update(layer="layers.0"), "layers.1 is missing"),
        (lambda layers: layers.append(layers[0] | {"layer": "layers.9"}), "the model has no experts in layers.9"),
        (
            lambda layers: layers[0].update(devices=[[0, 1, 2, 3, 4], [5, 6, 7, 0, 1]]),
            "layers.1: expert 0 is on device 0 and on device 1, but a run trains one replica of each expert",
        ),
        (lambda layers: layers[0].update(devices=[list(range(8))]), "layers.1 is placed on 1 devices, but expert = 2"),
        (lambda layers: layers[0].update(devices=[[0], [1]]), "layers.1 has 2 experts, but the model has 8"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, edit: Callable[[Any], Any], message: str) -> None:
    run_spec, placement = scattered(spec(2, 2, 2, 4))
    document = json.loads(placement.text)
    edit(document["layers"])
    (tmp_path / "placement.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(SpecError) as error:
        with_files(run_spec, {}, tmp_path)
    (mistake,) = error.value.diagnostics
    assert mistake.code == "P0101" and f"placement.json: {message}" in mistake.message


def test_commands_report_a_missing_placement(place: Place) -> None:
    for command in ("check", "compile"):
        errors = place.dsc(command, "tiny.dsc", "-s", 'parallel.placement="gone.json"', code=2).stderr
        assert "error[P0101]: there is no file gone.json" in errors and "--> -s:1:20" in errors
