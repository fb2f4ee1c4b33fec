"""`dsc replay --swap`, as an operator uses it: a device that computes wrong numbers, a transient error, a real number;
and impossible requests."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.run.faulty_device import Faulty
from tests.runtime.run.place import DENSE, FOUR_RANKS, Place, rows
from tests.runtime.run.sick import events
from tests.runtime.run.test_replay import digests

TWO = dict(FOUR_RANKS, pipeline=1, expert=1, schedule="1f1b", devices=2, model=DENSE)
CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A run `run` of eight steps on two ranks, with checkpoints of steps 3, 6 and 8."""
    place = new_place()
    place.compile(dict(TWO, more="health { not_finite = stop, spike { loss = 4, action = rollback }, window = 4 }"))
    place.dsc("train", "tiny.dsc", "--out", "run", "--steps", 8)
    return place


def with_fault(place: Place, faulty: Faulty, *words: object, code: int) -> str:
    with mock.patch.dict(os.environ, faulty.environment()):
        return place.dsc(*words, code=code).stdout


def replayed(place: Place, *words: object, code: int, faulty: Faulty | None = None) -> dict[str, Any]:
    """The JSON document of a replay, after a check of its form."""
    command = ("replay", *words, "--format", "json")
    text = with_fault(place, faulty, *command, code=code) if faulty else place.dsc(*command, code=code).stdout
    document: dict[str, Any] = json.loads(text)
    assert not faults(document, FORMS["replay"])
    return document


def test_a_device_that_errs_each_time_is_named(place: Place) -> None:
    """NaN from one device ends a run, which prints a replay command; that command names the device."""
    faulty = Faulty(device=1, step=5)
    with_fault(place, faulty, "train", "tiny.dsc", "--out", "broken", "--steps", 8, code=1)
    (met,) = events(place.folder / "broken", "bad_step")
    assert not faults({"time": "", "event": "bad_step", **met}, FORMS["event_bad_step"])
    assert met["replay"] == "dsc replay broken 5 --swap all" and len(met["prints"]) == 2
    document = replayed(place, *shlex.split(met["replay"])[2:], code=5, faulty=faulty)
    assert document["equal"] and document["verdict"] == "device", "it is reproduced on the same devices"
    (suspect,) = document["suspects"]
    assert (suspect["rank"], suspect["host"], suspect["device"]) == (1, socket.gethostname(), f"core {CORES[1]}")
    assert (place.folder / "broken" / "replay-5" / "run" / "witness" / "rank_1.jsonl").exists(), "kept, to look at"
    shutil.rmtree(place.folder / "broken" / "replay-5")
    document = replayed(place, "broken", 5, "--swap", "1,0", code=4)
    assert document["verdict"] == "transient" and document["ranks"] == [0, 1], (
        "the device is mended: gradients are sums"
    )
    assert {key: difference["run"] for key, difference in document["differs"][0]["keys"].items()}["loss"] == "nan"


def test_a_transient_error_is_distinguished_from_a_real_number(place: Place) -> None:
    once = Faulty(1, 5, 1.5, once=str(place.folder / "once"))
    with_fault(place, once, "train", "tiny.dsc", "--out", "passed", "--steps", 6, code=0)
    assert rows(place.folder / "passed")[4]["loss"] != rows(place.folder / "run")[4]["loss"]
    output = place.dsc("replay", "passed", 5, "--swap", "0,1", "--out", "why", code=4).stdout
    assert "verdict: transient: not reproduced on the devices of the run" in output
    before = digests(place.folder / "run")
    real = place.dsc("replay", "run", 5, "--swap", "all", code=0).stdout
    assert "steps 4 to 5: equal to the run, bit for bit\nverdict: real: the same bits" in real
    assert digests(place.folder / "run") == before, "nothing is left of it"


def test_a_rolled_back_attempt_is_replayed(place: Place) -> None:
    """NaN that occurred once: the discarded attempt is replayed, not the step that followed."""
    place.compile(dict(TWO, name="back", more="health { rerun = false, not_finite = rollback, back = 2 }"), "back.dsc")
    once = Faulty(0, 7, once=str(place.folder / "was nan"))
    with_fault(place, once, "train", "back.dsc", "--out", "back", "--steps", 8, code=0)
    (met,) = events(place.folder / "back", "bad_step")
    assert (met["step"], met["action"], met["to"], met["prints"]) == (7, "rollback", 4, [])
    document = replayed(place, "back", 7, "--swap", "0,1", code=4)
    (differs,) = document["differs"]
    assert differs["step"] == 7 and {difference["run"] for difference in differs["keys"].values()} == {"nan"}
    assert differs["keys"]["loss"]["replay"] == rows(place.folder / "run")[6]["loss"], "on the samples of step 7"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--swap", "0,99999"), "error: no rank and no core is numbered 99999"),
        (("--swap", "7,9"), "error: there is no rank 7: the run has ranks 0 to 1"),
        (("--swap", "1,1"), "argument --swap: '1,1': name two different ranks"),
        (("--swap", "0;1"), "argument --swap: '0;1' is neither two ranks, such as 1,3, nor all"),
        (("--swap", "0,1", "--device", "cuda"), "--device cuda"),
    ],
)
def test_invalid_exchanges_of_devices_are_refused(place: Place, words: tuple[str, ...], said: str) -> None:
    assert said in place.dsc("replay", "run", 5, *words, code=2).stderr
    assert not (place.folder / "run" / "replay-5").exists()


def test_damaged_and_missing_checkpoints(place: Place) -> None:
    """The nearest good checkpoint is used, or the first step if there is none. Only damaged ones are an error."""
    run = place.folder / "damaged"
    shutil.copytree(place.folder / "run", run)
    shard = next((run / "checkpoints" / "step-00000006").glob("shard.*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert replayed(place, run, 8, code=0)["from_step"] == 3
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    assert "damaged" in place.dsc("replay", run, 8, code=2).stderr
    assert not (run / "replay-8").exists()
    shutil.rmtree(run / "checkpoints")
    assert replayed(place, run, 4, code=0)["from_step"] == 0


def test_a_run_of_another_build_gets_no_verdict(place: Place) -> None:
    """Differences are reported, and no device is blamed."""
    run = place.folder / "other"
    shutil.copytree(place.folder / "run", run)
    spec = run / "spec.resolved"
    text = spec.read_text("utf-8")
    assert "weight_decay = 0.1" in text
    spec.write_text(text.replace("weight_decay = 0.1", "weight_decay = 0.2"), "utf-8")
    document = replayed(place, run, 5, "--swap", "0,1", code=1)
    assert document["verdict"] == "unknown" and not document["equal"] and not document["suspects"]
    assert [line.partition(":")[0] for line in document["surroundings"]] == ["build"]


def test_interrupted(place: Place) -> None:
    """Ctrl-C in a replay ends its ranks, leaves nothing in the run's folder, and exits with 130."""
    with place.started("replay", "run", 8, "--swap", "0,1") as running:
        running.wait_for_step(place.folder / "run" / "replay-8" / "swapped", 1)
        running.process.send_signal(signal.SIGINT)
        assert running.ends() == 130
    assert not (place.folder / "run" / "replay-8").exists()
    assert "\x1b" not in running.stdout() + running.stderr()


def test_a_run_folder_that_cannot_be_written(place: Place) -> None:
    assert "Not a directory" in place.dsc("replay", "run", 5, "--out", "run/metrics.jsonl/why", code=2).stderr
    assert Path(place.folder / "run" / "metrics.jsonl").is_file()
