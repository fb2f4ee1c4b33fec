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
def copy(trained: Place, tmp_path: Path) -> Place:
    """Copy the build and the run, to be damaged."""
    for name in ("build", "runs"):
        shutil.copytree(trained.folder / name, tmp_path / name)
    return Place(tmp_path, {})


def verified(place: Place, path: str, code: int) -> dict[str, Any]:
    done = place.dsc("verify", path, "--format", "json", code=code)
    assert done.stderr == ""
    found: dict[str, Any] = parsed(done.stdout, "verify")
    assert found["whole"] == (code == 0) == (found["problems"] == []) and found["path"] == path
    assert [each for each in ("build", "checkpoint", "run") if found[each] is not None] == [found["kind"]]
    return found


def test_intact_folders_pass(trained: Place) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.folder.rglob("*")}
    build = verified(trained, "build/tiny", 0)["build"]
    assert (build["run"], build["ranks"], build["steps"]) == ("tiny", 4, 6)
    assert build["versions"] == build["installed"]
    run = verified(trained, "runs/tiny", 0)["run"]
    assert run["steps"] == run["last_step"] == 4
    assert [each["step"] for each in run["checkpoints"]] == [3, 4] and run["resumes_from"] == "step-00000004"
    assert len(run["data"]) == 1
    checkpoint = verified(trained, f"runs/tiny/checkpoints/{STEP}", 0)["checkpoint"]
    assert checkpoint["saved_by"]["build"] == build["digest"]
    assert (checkpoint["step"], checkpoint["tokens"], checkpoint["shards"]) == (3, 3 * 8 * 16, 4)
    shapes = saved(trained.folder / "runs" / "tiny", 3).shapes
    assert checkpoint["tensors"] == len(shapes) and checkpoint["parameters"] == 22736
    assert checkpoint["plan"]["mesh"]["pp"] == 2 and checkpoint["model"] == "tiny"
    said = trained.dsc("verify", "build/tiny").stdout.splitlines()
    assert said[0] == "build build/tiny: whole" and said[1].split() == ["digest", build["digest"]]
    assert {path: path.stat().st_mtime_ns for path in trained.folder.rglob("*")} == before, "nothing is written"


def test_damaged_builds(copy: Place) -> None:
    build = copy.folder / "build" / "tiny"
    (build / "stages" / "rank_1.py").write_text("pass\n")
    (build / "notes").touch()
    found = verified(copy, "build/tiny", 1)
    assert found["problems"] == [
        "build/tiny/notes is not in its manifest: remove it, or run dsc compile again",
        "build/tiny/stages/rank_1.py is not the file that was compiled; run dsc compile again",
    ]
    (build / "manifest.json").unlink()
    os.mkfifo(build / "manifest.json")
    found = verified(copy, "build/tiny", 1)
    assert found["build"]["digest"] is None and "no regular file" in found["problems"][0]


def test_damaged_checkpoints(copy: Place) -> None:
    """All bad shards are named, and the checkpoint from which the run would resume."""
    checkpoint = copy.folder / "runs" / "tiny" / "checkpoints" / "step-00000004"
    name = f"runs/tiny/checkpoints/{checkpoint.name}"
    flipped = checkpoint / "shard.1.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    os.truncate(checkpoint / "shard.2.safetensors", 100)
    (checkpoint / "shard.3.safetensors").unlink()
    problems = verified(copy, name, 1)["problems"]
    assert [problem.partition(": ")[0].rpartition("/")[2] for problem in problems] == [
        f"shard.{rank}.safetensors" for rank in (1, 2, 3)
    ]
    run = verified(copy, "runs/tiny", 1)
    assert run["problems"] == problems and run["run"]["resumes_from"] == STEP
    (checkpoint / "manifest.json").write_text("{}")
    assert verified(copy, name, 1)["checkpoint"]["step"] is None
    said = copy.dsc("verify", name, code=1).stdout
    assert said.startswith(f"checkpoint {name}: damaged\n  {name}/manifest.json: ")


def test_damaged_runs(copy: Place) -> None:
    run = copy.folder / "runs" / "tiny"
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + '{"step": \x1b[2J\n' + lines[2] + lines[3][:9], "utf-8")
    (meta,) = (run / "data").glob("*/meta.json")
    with (meta.parent / "train.bin").open("r+b") as file:
        file.write(b"\xff\xff\xff")
    found = verified(copy, "runs/tiny", 1)
    assert found["problems"] == [
        "runs/tiny/metrics.jsonl: line 2 is no JSON object",
        f"{(meta.parent / 'train.bin').relative_to(copy.folder)} is not what was written; the data is prepared again by"
        " the next run",
    ]
    assert found["run"]["steps"] == 2, "the last line is still being written"


def test_other_versions_that_saved_a_checkpoint_are_named(tmp_path: Path) -> None:
    here = {"torch": torch.__version__.partition("+")[0], "ops": library.identity()}
    for step, torch_then, words in (
        (1, here["torch"], ""),
        (2, "1.13.1", f" (saved by torch 1.13.1, here {here['torch']})"),
    ):
        assert save_all(tmp_path, step, [{"weight/head": torch.ones(2)}], meta=here | {"torch": torch_then}) == [None]
        found = verify(tmp_path / f"step-{step:08}")["checkpoint"]
        assert found["saved_by"]["torch"] == torch_then
        assert found["loads"][-1] == f"bit for bit as without a break: the same build, text, torch and ops{words}"


@pytest.mark.parametrize("name", ["empty", "file", "absent", "a\x1b[2Jb"])
def test_missing_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    done = Place(tmp_path, {}).dsc("verify", name, code=2)
    assert done.stdout == "" and done.stderr.startswith("error: ") and "\x1b" not in done.stderr


@pytest.mark.parametrize("name", ["checkpoints", "data", "metrics.jsonl", "events.jsonl", "load.json", "spec.resolved"])
@pytest.mark.parametrize("what", ["pipe", "folder or file", "bytes"])
def test_pipes_folders_and_bytes_in_place_of_run_files_are_reported(copy: Place, name: str, what: str) -> None:
    path = copy.folder / "runs" / "tiny" / name
    was_folder = path.is_dir()
    shutil.rmtree(path) if was_folder else path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "bytes" or was_folder:
        path.write_bytes(b"\xff\xfe\n")
    else:
        path.mkdir()
    found = verified(copy, "runs/tiny", 1)
    assert any(f"runs/tiny/{name}" in problem for problem in found["problems"])


def test_a_plan_that_is_a_pipe(copy: Place) -> None:
    (copy.folder / "build" / "tiny" / "plan.json").unlink()
    os.mkfifo(copy.folder / "build" / "tiny" / "plan.json")
    (problem,) = verified(copy, "build/tiny", 1)["problems"]
    assert "plan.json" in problem and "KeyError" not in problem


def test_output_without_a_reader(trained: Place) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*DSC, "verify", "runs/tiny"], cwd=trained.folder, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
