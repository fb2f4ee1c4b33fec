"""The files and output of a run of four ranks, which are the same under torchrun."""

from __future__ import annotations

import html
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from runtime.checkpoint.publish import load as load_checkpoint
from runtime.contract import RunPlan
from runtime.run.resume import expected_shapes
from tests import progress
from tests.runtime.run.place import FOUR_RANKS, TORCHRUN, Place, bits, run, saved, untimed
from tests.runtime.run.place import rows as rows_of

STEPS, RATE, SEQUENCES, SEQUENCE, TOP_K, EXPERTS = 15, 1e-2, 8, 16, 2, 4
MOE_LAYERS = 2  # layer 1 and the MTP layer


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    place = new_place()
    place.compile(dict(FOUR_RANKS, steps=STEPS, rate=RATE))
    return place


@pytest.fixture(scope="module")
def done(place: Place) -> subprocess.CompletedProcess[str]:
    return place.dsc("train", "tiny.dsc")


@pytest.fixture(scope="module")
def folder(place: Place, done: subprocess.CompletedProcess[str]) -> Path:
    return place.folder / "runs" / "tiny"


def test_one_row_a_step(folder: Path) -> None:
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["tokens"] for row in rows] == [step * SEQUENCES * SEQUENCE for step in range(1, STEPS + 1)]
    for row in rows:
        for name in ("loss", "mtp_loss", "sequence_loss", "grad_norm", "tokens_per_s", "step_s", "imbalance"):
            assert math.isfinite(row[name]) and row[name] > 0, name
        assert row["tokens_per_s"] == pytest.approx(SEQUENCES * SEQUENCE / row["step_s"])
        assert set(row["layer_imbalance"]) == {"layers.1", "mtp.0"} and min(row["layer_imbalance"].values()) >= 1
        assert row["imbalance"] == pytest.approx(fmean(row["layer_imbalance"].values()))
        assert ("validation_loss" in row) == (row["step"] % 3 == 0)
    assert [row["rate"] for row in rows] == pytest.approx([RATE / 2, *(RATE for _ in rows[1:])])


def test_training_lowers_the_loss(folder: Path) -> None:
    """Real learning, not only finite numbers: most of the way from the uniform loss to the unigram loss."""
    rows = rows_of(folder)
    uniform, unigram = math.log(300), unigram_nats(folder)
    assert rows[0]["loss"] == pytest.approx(uniform, rel=0.01), "before training, all tokens are as likely"
    assert rows[-1]["validation_loss"] < unigram + 0.5 * (uniform - unigram)


def unigram_nats(folder: Path) -> float:
    meta = next((folder / "data").glob("*/meta.json"))
    return float(json.loads(meta.read_text("utf-8"))["unigram_nats"])


def test_every_token_is_counted(folder: Path) -> None:
    load = json.loads((folder / "load.json").read_text("utf-8"))
    assert set(load) == {"load"} and [len(row) for row in load["load"]] == [EXPERTS] * MOE_LAYERS
    assert [sum(row) for row in load["load"]] == [STEPS * SEQUENCES * SEQUENCE * TOP_K] * MOE_LAYERS


def test_checkpoints(place: Place, folder: Path) -> None:
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["LATEST", *(f"step-{step:08d}" for step in range(3, STEPS + 1, 3))]
    assert (folder / "checkpoints" / "LATEST").read_text() == f"step-{STEPS:08d}\n"
    plan = RunPlan.from_json((place.folder / "build" / "tiny" / "plan.json").read_bytes())
    assert load_checkpoint(folder / "checkpoints").shapes == expected_shapes(plan)


def test_the_spec_is_copied_into_the_run(place: Place, folder: Path) -> None:
    build = place.folder / "build" / "tiny"
    assert (folder / "spec.resolved").read_bytes() == (build / "spec.resolved").read_bytes()


def test_plain_lines(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Output that is not a terminal has no control characters, and has lines for the first and the last step."""
    assert re.fullmatch(r"[^\x00-\x09\x0b-\x1f\x7f]*", done.stdout + done.stderr)
    lines = done.stdout.splitlines()
    last = rows_of(folder)[-1]
    step_lines = [line for line in lines if line.startswith("step ")]
    assert re.match(rf"step [1-6]/{STEPS}  loss \d\.\d{{4}}  ", step_lines[0])
    unigram = unigram_nats(folder)
    assert step_lines[-1].startswith(
        f"step {STEPS}/{STEPS}  loss {last['loss']:.4f}  validation {last['validation_loss']:.4f}"
        f" (unigram {unigram:.4f})  {last['tokens_per_s']:,.0f} tokens/s  expert load {last['imbalance']:.2f}x"
    )
    assert lines[-2:] == ["report: runs/tiny/report.html", "run: runs/tiny"]


def test_the_report_names_the_final_losses(folder: Path) -> None:
    text = re.sub(r"<[^>]+>", " ", (folder / "report.html").read_text("utf-8"))
    text = re.sub(r"\s+", " ", html.unescape(text))
    rows = rows_of(folder)
    unigram = unigram_nats(folder)
    assert f"training loss, last 10 steps {sum(row['loss'] for row in rows[-10:]) / 10:.3f}" in text
    assert f"validation loss {rows[-1]['validation_loss']:.3f}" in text
    assert f"unigram cross-entropy {unigram:.3f}" in text
    assert "dualpipe, 2 ranks, 4 micro-batches" in text


def test_logs_are_quiet(folder: Path) -> None:
    logs = {path.name: path.read_text("utf-8") for path in (folder / "logs").iterdir()}
    assert logs == {f"rank_{rank}.log": "" for rank in range(4)}


# ---------------------------------------------------------------- torchrun


def test_torchrun_gives_the_same(place: Place, folder: Path) -> None:
    """torchrun works in a folder with another `runtime/`; `dsc train` can resume the run that torchrun began."""
    (place.folder / "runtime").mkdir()
    (place.folder / "runtime" / "__init__.py").write_text("raise ImportError('not this one')\n")
    command = (*TORCHRUN, "--nproc-per-node", "4", "build/tiny/train.py", "--out", "torchrun")
    theirs = place.folder / "torchrun"
    done = run((*command, "--steps", "6"), code=0, cwd=place.folder)
    assert f"step 6/6  loss {rows_of(theirs)[-1]['loss']:.4f}  validation" in done.stdout
    assert untimed(theirs) == untimed(folder)[:6]
    place.dsc("train", "tiny.dsc", "--out", "torchrun", "--resume")
    assert untimed(theirs) == untimed(folder)
    assert (theirs / "load.json").read_bytes() == (folder / "load.json").read_bytes()
    assert bits(saved(theirs)) == bits(saved(folder))


def test_a_run_resumed_with_other_programs_measures_them(place: Place) -> None:
    """The report compares each measurement only with the plan that was measured."""

    def measured(*words: object) -> tuple[dict[str, Any], str]:
        place.dsc("train", "tiny.dsc", "--out", "grown", *words)
        report = (place.folder / "grown" / "report.html").read_text("utf-8")
        return json.loads((place.folder / "grown" / "memory" / "rank_0.json").read_text("utf-8")), report

    first, report = measured("--steps", 1)
    assert first["step"] == 1 and "to the byte" in report
    second, report = measured("--steps", 2, "-s", "train.batch=16", "--resume")
    assert second["step"] == 2 and second["program"] != first["program"] and "to the byte" in report
    again, _ = measured("--steps", 3, "-s", "train.batch=16", "--resume")
    assert again == second
    wide, report = measured("--steps", 4, "-s", "train.batch=16", "-s", "precision=fp64", "--resume")
    assert wide["step"] == 4 and wide["peak"] > second["peak"] and "to the byte" in report


def test_torchrun_with_another_world_is_refused(place: Place) -> None:
    """The environment of one rank is enough to be refused."""
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = (sys.executable, "build/tiny/train.py", "--out", "two")
    done = progress.run(command, place.folder, environment)
    assert done.stderr == "error: this build is for 4 ranks: torchrun --nproc-per-node 4\n"
    assert done.returncode == 2 and not (place.folder / "two").exists()
