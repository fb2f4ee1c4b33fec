"""A run on two machines that share no memory, and only the folders of the data and the run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from runtime.comm.collective import name_of
from runtime.comm.transport import Channel
from runtime.contract import RunPlan
from tests import progress
from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.processes import is_gone
from tests.runtime.run.machines import machines, why_not
from tests.runtime.run.place import FOUR_RANKS, Place, bits, saved, untimed

STEPS = 9
# Ranks 0 and 1 are on the first machine. In the first case, each machine is a pipeline rank with its own expert group;
# in the second, they share an expert group, and rows take two hops. The counts are the channels of all ranks within
# machines, and between them.
SPECS = {
    "pipeline": (FOUR_RANKS, Counter(memory=8, gloo=20)),
    "experts": (FOUR_RANKS | dict(pipeline=1, expert=4, schedule="1f1b", zero=1), Counter(memory=8, gloo=16)),
}
REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"this host allows no namespaces: {REASON}")


@pytest.fixture(params=SPECS)
def place(request: pytest.FixtureRequest, new_place: Callable[[], Place]) -> Place:
    """A build for two nodes with two ranks each, and `straight`, a run of it on one machine."""
    place = new_place()
    spec = place.write(SPECS[request.param][0] | {"devices": 2})
    spec.write_text(spec.read_text("utf-8").replace("cluster here { nodes = 1", "cluster here { nodes = 2"), "utf-8")
    write_build(place.folder / "build" / "tiny", compile_spec(load(spec), segments=place.segments).files)
    place.dsc("train", "build/tiny", "--out", "straight", "--steps", STEPS)
    return place


def events(run: Path, name: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "events.jsonl").read_text("utf-8").splitlines())
    return [row for row in rows if row["event"] == name]


def test_two_machines_train_as_one(place: Place, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """All weights are bit-identical to one machine's, over the detected interface, and no rank is left. Ranks on one
    machine share memory, which all ranks of `straight` do: so bits do not depend on the transport of sums."""
    with machines(tmp_path / "host") as pair:
        shutil.copytree(place.folder / "corpus", pair.folder / "shared" / "corpus")
        words = ("--build-path", "/mnt/own/build", "--run-folder", "/mnt/shared/run", "--data", "/mnt/shared")
        place.dsc("launch", "torchrun", "build/tiny", "--out", "files", "--steps", STEPS, *words)
        for name in ("a", "b"):
            shutil.copytree(place.folder / "build" / "tiny", pair.folder / name / "build")
            shutil.copy(place.folder / "files" / "node.sh", pair.folder / name)
        started = [pair.start(i, "bash", "/mnt/own/node.sh", pair.addresses[0], str(i)) for i in range(2)]
        try:
            codes = [progress.end(process) for process in started]
        except progress.HangError:
            codes = []
        finally:
            for process in started:
                process.kill()  # and all processes of its machine with it
                process.wait()
        assert codes == [0, 0], pair.output(0) + pair.output(1)
        shared = pair.folder / "shared"
        of_a, of_b = (set((shared / f"namespaces-{name}").read_text().split()) for name in ("a", "b"))
        assert len(of_a) == len(of_b) == 4 and not of_a & of_b
    assert all(is_gone(process.pid) for process in started)
    run = shared / "run"
    assert untimed(run) == untimed(place.folder / "straight")
    assert bits(saved(run)) == bits(saved(place.folder / "straight"))
    assert [event["transport"] for event in events(place.folder / "straight", "start")] == ["memory"]
    (start,) = events(run, "start")
    assert start["transport"] == "memory and gloo" and start["ranks"] == 4
    check_channels(place, events(run, "channels"), SPECS[request.node.callspec.params["place"]][1])


def check_channels(place: Place, said: list[dict[str, Any]], counts: Counter[str]) -> None:
    """Check the channels that each rank reports: those of the plan, over memory if all ranks are on one machine."""
    plan = RunPlan.from_json((place.folder / "build" / "tiny" / "plan.json").read_bytes())
    assert sorted(event["rank"] for event in said) == [0, 1, 2, 3]
    for event in said:
        expected: dict[str, list[str]] = {"memory": [], "gloo": []}
        for opening in plan.openings:
            if (ranks := opening.channel_of(plan.mesh, event["rank"])) is not None:
                carrier = "memory" if len({rank // 2 for rank in ranks}) == 1 else "gloo"
                expected[carrier].append(name_of(Channel(opening.kind, ranks)))
        assert {carrier: event[carrier] for carrier in expected} == expected
        assert faults(event, FORMS["event_channels"]) == []
    assert sum((Counter({carrier: len(event[carrier]) for carrier in counts}) for event in said), Counter()) == counts
