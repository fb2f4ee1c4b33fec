"""`dsc verify` on the files of real commands, first intact, then damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint.verify import verify
from runtime.ops.native import library
from tests.compiler.cli.forms import parsed
from tests.runtime.faulty_files import save_all
from tests.runtime.run.place import DSC, FOUR_RANKS, Place, saved

STEP = "step-00000003"


@pytest.fixture(scope="module")
def trained(new_place: Callable[[], Place]) -> Place:
    """A build for four ranks, and a run of four steps."""
    place = new_place()
    place.compile(FOUR_RANKS)
    place.dsc("train", "tiny.dsc", "--steps", 4)
    return place


@pytest.fixture
def damaged(trained: Place, tmp_path: Path) -> Place:
    """A copy of the build and the run, which a test damages."""
    for name in ("build", "runs"):
        shutil.copytree(trained.folder / name, tmp_path / name)
    return Place(tmp_path, {})


def verified(place: Place, path: str, code: int) -> dict[str, Any]:
    done = place.dsc("verify", path, "--format", "json", code=code)
    assert done.stderr == ""
    document: dict[str, Any] = parsed(done.stdout, "verify")
    assert document["whole"] == (code == 0) == (document["problems"] == []) and document["path"] == path
    assert [kind for kind in ("build", "checkpoint", "run") if document[kind] is not None] == [document["kind"]]
    return document


def test_intact_folders_are_whole_and_are_not_written_to(trained: Place) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.folder.rglob("*")}
    build = verified(trained, "build/tiny", 0)["build"]
    assert (build["run"], build["ranks"], build["steps"]) == ("tiny", 4, 6)
    assert build["versions"] == build["installed"]
    run = verified(trained, "runs/tiny", 0)["run"]
    assert run["steps"] == run["last_step"] == 4
    assert [checkpoint["step"] for checkpoint in run["checkpoints"]] == [3, 4] and run[
        "resumes_from"
    ] == "step-00000004"
    assert len(run["data"]) == 1
    checkpoint = verified(trained, f"runs/tiny/checkpoints/{STEP}", 0)["checkpoint"]
    assert checkpoint["saved_by"]["build"] == build["digest"]
    assert (checkpoint["step"], checkpoint["tokens"], checkpoint["shards"]) == (3, 3 * 8 * 16, 4)
    shapes = saved(trained.folder / "runs" / "tiny", 3).shapes
    assert checkpoint["tensors"] == len(shapes) and checkpoint["parameters"] == 22736
    assert checkpoint["plan"]["mesh"]["pp"] == 2 and checkpoint["model"] == "tiny"
    printed = trained.dsc("verify", "build/tiny").stdout.splitlines()
    assert printed[0] == "build build/tiny: whole" and printed[1].split() == ["digest", build["digest"]]
    assert {path: path.stat().st_mtime_ns for path in trained.folder.rglob("*")} == before, "nothing is written"


def test_every_changed_or_added_file_of_a_build_is_named(damaged: Place) -> None:
    build = damaged.folder / "build" / "tiny"
    (build / "stages" / "rank_1.py").write_text("pass\n")
    (build / "notes").touch()
    document = verified(damaged, "build/tiny", 1)
    assert document["problems"] == [
        "build/tiny/notes is not in its manifest: remove it, or run dsc compile again",
        "build/tiny/stages/rank_1.py is not the file that was compiled; run dsc compile again",
    ]


def test_a_build_whose_manifest_is_a_pipe_has_no_digest(damaged: Place) -> None:
    manifest = damaged.folder / "build" / "tiny" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    document = verified(damaged, "build/tiny", 1)
    assert document["build"]["digest"] is None and "no regular file" in document["problems"][0]


LAST = "runs/tiny/checkpoints/step-00000004"


def test_every_damaged_shard_is_named_and_the_checkpoint_from_which_the_run_resumes(damaged: Place) -> None:
    checkpoint = damaged.folder / LAST
    flipped = checkpoint / "shard.1.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    os.truncate(checkpoint / "shard.2.safetensors", 100)
    (checkpoint / "shard.3.safetensors").unlink()
    problems = verified(damaged, LAST, 1)["problems"]
    assert [problem.partition(": ")[0].rpartition("/")[2] for problem in problems] == [
        f"shard.{rank}.safetensors" for rank in (1, 2, 3)
    ]
    run = verified(damaged, "runs/tiny", 1)
    assert run["problems"] == problems and run["run"]["resumes_from"] == STEP


def test_a_checkpoint_without_a_manifest_has_no_step(damaged: Place) -> None:
    (damaged.folder / LAST / "manifest.json").write_text("{}")
    assert verified(damaged, LAST, 1)["checkpoint"]["step"] is None
    printed = damaged.dsc("verify", LAST, code=1).stdout
    assert printed.startswith(f"checkpoint {LAST}: damaged\n  {LAST}/manifest.json: ")


def test_a_line_of_the_metrics_that_is_not_json_is_named_except_an_unfinished_last_one(damaged: Place) -> None:
    metrics = damaged.folder / "runs" / "tiny" / "metrics.jsonl"
    lines = metrics.read_text("utf-8").splitlines(keepends=True)
    metrics.write_text(lines[0] + '{"step": \x1b[2J\n' + lines[2] + lines[3][:9], "utf-8")
    document = verified(damaged, "runs/tiny", 1)
    assert document["problems"] == ["runs/tiny/metrics.jsonl: line 2 is no JSON object"]
    assert document["run"]["steps"] == 2, "the last line is still being written"


def test_changed_tokens_of_a_run_are_named(damaged: Place) -> None:
    (tokens,) = (damaged.folder / "runs" / "tiny" / "data").glob("*/train.bin")
    with tokens.open("r+b") as file:
        file.write(b"\xff\xff\xff")
    assert verified(damaged, "runs/tiny", 1)["problems"] == [
        f"{tokens.relative_to(damaged.folder)} is not what was written; the data is prepared again by the next run"
    ]


def test_the_version_of_torch_that_saved_a_checkpoint_is_named_if_it_differs(tmp_path: Path) -> None:
    current = {"torch": torch.__version__.partition("+")[0], "ops": library.identity()}
    for step, torch_then, words in (
        (1, current["torch"], ""),
        (2, "1.13.1", f" (saved by torch 1.13.1, here {current['torch']})"),
    ):
        assert save_all(tmp_path, step, [{"weight/head": torch.ones(2)}], meta=current | {"torch": torch_then}) == [
            None
        ]
        checkpoint = verify(tmp_path / f"step-{step:08}")["checkpoint"]
        assert checkpoint["saved_by"]["torch"] == torch_then
        assert checkpoint["loads"][-1] == f"bit for bit as without a break: the same build, text, torch and ops{words}"


@pytest.mark.parametrize("name", ["empty", "file", "absent", "a\x1b[2Jb"])
def test_a_path_that_is_not_a_build_run_or_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    done = Place(tmp_path, {}).dsc("verify", name, code=2)
    assert done.stdout == "" and done.stderr.startswith("error: ") and "\x1b" not in done.stderr


@pytest.mark.parametrize("name", ["checkpoints", "data", "metrics.jsonl", "events.jsonl", "load.json", "spec.resolved"])
@pytest.mark.parametrize("what", ["pipe", "folder or file", "bytes"])
def test_pipes_folders_and_bytes_in_place_of_run_files_are_reported(damaged: Place, name: str, what: str) -> None:
    path = damaged.folder / "runs" / "tiny" / name
    was_folder = path.is_dir()
    shutil.rmtree(path) if was_folder else path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "bytes" or was_folder:
        path.write_bytes(b"\xff\xfe\n")
    else:
        path.mkdir()
    document = verified(damaged, "runs/tiny", 1)
    assert any(f"runs/tiny/{name}" in problem for problem in document["problems"])


def test_a_plan_that_is_a_pipe_is_the_only_problem_of_its_build(damaged: Place) -> None:
    (damaged.folder / "build" / "tiny" / "plan.json").unlink()
    os.mkfifo(damaged.folder / "build" / "tiny" / "plan.json")
    (problem,) = verified(damaged, "build/tiny", 1)["problems"]
    assert "plan.json" in problem and "KeyError" not in problem


def test_verify_ends_if_nothing_reads_its_output(trained: Place) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*DSC, "verify", "runs/tiny"], cwd=trained.folder, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
