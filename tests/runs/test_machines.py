"""A run on two machines that share no memory and no folder but those of the data and of the run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.build import compile_spec, write_build
from dsl.load import load
from tests.runs.machines import machines, why_not
from tests.runs.place import FOUR_RANKS, LIMIT_S, Place, bits, saved, untimed
from tests.runtime.processes import is_gone

STEPS = 9
REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"this host allows no namespaces: {REASON}")


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A build of two nodes with two ranks each, and `straight`, a run of it on one machine, by the same transport."""
    place = new_place()
    spec = place.write(FOUR_RANKS | {"devices": 2})
    spec.write_text(spec.read_text("utf-8").replace("cluster here { nodes = 1", "cluster here { nodes = 2"), "utf-8")
    write_build(place.folder / "build" / "tiny", compile_spec(load(spec), segments=place.segments).files)
    place.dsc("train", "build/tiny", "--out", "straight", "--steps", STEPS, "--transport", "gloo")
    return place


def test_two_machines_train_as_one(place: Place, tmp_path: Path) -> None:
    """Every weight has the bits of one machine's, by the interface that was found, and no rank is left."""
    with machines(tmp_path / "host") as both:
        shutil.copytree(place.folder / "corpus", both.folder / "shared" / "corpus")
        words = ("--build-path", "/mnt/own/build", "--run-folder", "/mnt/shared/run", "--data", "/mnt/shared")
        place.dsc("launch", "torchrun", "build/tiny", "--out", "files", "--steps", STEPS, *words)
        for name in ("a", "b"):
            shutil.copytree(place.folder / "build" / "tiny", both.folder / name / "build")
            shutil.copy(place.folder / "files" / "node.sh", both.folder / name)
        started = [both.start(i, "bash", "/mnt/own/node.sh", both.addresses[0], str(i)) for i in range(2)]
        try:
            codes = [process.wait(LIMIT_S) for process in started]
        except subprocess.TimeoutExpired:
            codes = []
        finally:
            for process in started:
                process.kill()  # and, with it, all processes of its machine
                process.wait()
        assert codes == [0, 0], both.output(0) + both.output(1)
        shared = both.folder / "shared"
        of_a, of_b = (set((shared / f"namespaces-{name}").read_text().split()) for name in ("a", "b"))
        assert len(of_a) == len(of_b) == 4 and not of_a & of_b
    assert all(is_gone(process.pid) for process in started)
    run = shared / "run"
    assert untimed(run) == untimed(place.folder / "straight")
    assert bits(saved(run)) == bits(saved(place.folder / "straight"))
    (start,) = (
        each for each in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if each["event"] == "start"
    )
    assert start["transport"] == "gloo" and start["ranks"] == 4
