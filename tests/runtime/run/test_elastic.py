"""A machine leaves and returns: the run continues on the remaining ranks, then on all, and no sample is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from compiler.predict.search import RefitError, refit_overrides
from dsl.load import alternatives, load, variants
from dsl.schema import Spec
from runtime.system.lines import read_rows
from tests.runtime.processes import wait_for
from tests.runtime.run.place import FOUR_RANKS, Place, rows, saved
from tests.runtime.run.test_torchrun import agents

SOON = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
TORCHRUN = ("--nnodes", "1:2", "--max-restarts", "9", "--rdzv-conf", SOON)


def build_for_two_nodes(place: Place) -> None:
    """Write a build for two nodes with two ranks each that saves every 20 steps."""
    spec = place.write(FOUR_RANKS | {"devices": 2, "precision": "fp64", "batch": 16})
    text = spec.read_text("utf-8").replace("cluster here { nodes = 1", "cluster here { nodes = 2")
    spec.write_text(text.replace("every = 3 steps", "every = 20 steps").replace("keep = 100", "keep = 2"), "utf-8")
    write_build(place.folder / "build" / "tiny", compile_spec(load(spec), segments=place.segments).files)


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    place = new_place()
    build_for_two_nodes(place)
    return place


def starts(run: Path) -> list[int]:
    """The number of ranks at each start of a run."""
    return [int(row["ranks"]) for row in read_rows(run / "events.jsonl").rows if row["event"] == "start"]


def test_a_machine_leaves_and_returns(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/torchrun.md says why
    run = place.folder / "run"
    words = ("--elastic", "--steps", 10**6, "--hang-timeout", 300)
    with agents(place, "run", *words, torchrun=TORCHRUN, first_hosts=True) as first:
        # if the second machine is late, the first one has begun without it
        wait_for(lambda: starts(run)[-1:] == [4], "the start of four ranks")
        before = len(rows(run))
        wait_for(lambda: len(rows(run)) > before + 25, "steps on four ranks")
        first.processes[1].send_signal(signal.SIGKILL)  # and its ranks with it
        wait_for(lambda: starts(run)[-1] == 2, "the start of two ranks")
        before = len(rows(run))
        wait_for(lambda: len(rows(run)) > before + 20, "steps on two ranks")
        first.start_another()
        wait_for(lambda: starts(run)[-1] == 4, "the start of four ranks")
        before = len(rows(run))
        wait_for(lambda: len(rows(run)) > before + 20, "steps on four ranks")
        for agent in (first.processes[0], first.processes[2]):
            agent.send_signal(signal.SIGTERM)
        first.end()
    theirs, last = rows(run), saved(run).step
    assert [row["step"] for row in theirs] == list(range(1, last + 1))
    place.dsc("train", "build/tiny", "--out", "straight", "--steps", last)
    straight = rows(place.folder / "straight")
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in straight], rel=1e-6)
    assert saved(run).meta["position"] == saved(place.folder / "straight").meta["position"], "no sample twice"


def refit(spec: Path, nodes: int, devices: int) -> Spec | tuple[str, ...]:
    """The spec changed for other devices, or its overrides if these leave degrees to the search."""

    def can_be(more: tuple[str, ...]) -> bool:
        return next(alternatives(spec, None, more), None) is not None

    overrides = refit_overrides(load(spec), nodes, devices, variants(spec), can_be)
    return overrides if any(override.endswith("auto") for override in overrides) else load(spec, None, overrides)


def test_data_ranks_change_first(place: Place) -> None:
    path = place.folder / "tiny.dsc"
    spec = load(path)
    for nodes, data, expert in ((1, 1, 1), (2, 2, 2), (4, 4, 2)):
        new_spec = refit(path, nodes, 2)
        assert isinstance(new_spec, Spec)
        p = new_spec.parallel
        assert (p.pipeline, p.data, p.expert) == (spec.parallel.pipeline, data, expert)
        assert new_spec.cluster.world == 2 * nodes
        assert (new_spec.train, new_spec.model) == (spec.train, spec.model)


def test_copies_of_shards_stay_if_they_can(place: Place) -> None:
    path = place.folder / "copies.dsc"
    keys = "pipeline = 1, expert = 1, zero = 3, shard = 2"
    path.write_text(
        f'import "tiny.dsc"\nrun copies extends tiny {{ parallel {{ {keys} }}, schedule {{ name = 1f1b }} }}'
    )
    for devices, shard in ((4, 2), (8, 2), (1, None)):
        new_spec = refit(path, 1, devices)
        assert isinstance(new_spec, Spec) and new_spec.parallel.shard == shard


def test_then_the_other_degrees() -> None:
    """Three ranks are not a multiple of two pipeline ranks, and dualpipe needs an even number of ranks."""
    overrides = refit(Path("specs/quickstart.dsc"), 1, 3)
    assert isinstance(overrides, tuple)
    assert {"parallel.pipeline=auto", "parallel.data=auto", "schedule.name=auto"} <= {*overrides}


def test_devices_without_a_plan(place: Place) -> None:
    with pytest.raises(RefitError, match="no degrees keep the rules there, with a batch of 16 sequences"):
        refit(place.folder / "tiny.dsc", 1, 7)
