"""`dsc compile` and `dsc train` as users type them: the spec, build and folder that they use, and refusals."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from runtime.build.build import Build, BuildError
from runtime.data.readers import SUFFIXES
from tests import forks, progress
from tests.runtime.run.place import DSC, FOUR_RANKS, ONE_RANK, Place, rows, run, saved, spec_text


def made(path: Path) -> tuple[int, int]:
    """(inode, modification time)."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


# ---------------------------------------------------------------- one folder, from the first command


def test_compile_and_train(place: Place) -> None:
    """Commands without an argument use the folder's only spec; a stale build is recompiled, a fresh one is not."""
    spec = place.write(ONE_RANK)
    place.folder.joinpath("tiny-model.dsc").write_text("model other { vocab = 300 }\n")  # no run block
    manifest = place.folder / "build" / "tiny" / "manifest.json"
    metrics = place.folder / "runs" / "tiny" / "metrics.jsonl"

    done = place.dsc("compile", anew=True)
    assert done.stdout.endswith("build: build/tiny\n") and "schedule: 1f1b, 8 micro-batches" in done.stdout
    compiled = made(manifest)
    done = place.dsc("train", "--steps", 2)
    assert "proven" not in done.stdout and made(manifest) == compiled, "compiled once"
    assert "torchrun" not in done.stdout, "one node needs nothing else"
    assert [row["step"] for row in rows(metrics.parent)] == [1, 2]
    assert saved(metrics.parent).step == 2, "the last step is always saved"

    trained = metrics.read_bytes()
    done = place.dsc("train", code=2)
    message = "error: runs/tiny holds an earlier run: go on with --resume, or name another folder with --out\n"
    assert done.stderr == message and "report: " not in done.stdout
    assert metrics.read_bytes() == trained

    spec.write_text(spec_text(dict(ONE_RANK, rate="1e-3")), "utf-8")
    done = place.dsc("train", "--out", "again", "-s", "train.steps=3", "-s", "train.seed=7")
    assert "proven" in done.stdout and made(manifest) != compiled, "the spec has changed"
    assert [row["rate"] for row in rows(place.folder / "again")] == [0.5e-3, 1e-3, 1e-3]
    assert rows(place.folder / "again")[0]["loss"] != rows(metrics.parent)[0]["loss"], "the seed has changed"


def test_a_build_that_was_changed_is_refused(place: Place) -> None:
    """Only proven builds run: an edited file is named, and nothing runs."""
    build = place.compile(ONE_RANK)
    with (build / "stages" / "rank_0.py").open("a") as file:
        file.write("\n")
    for argument in ("tiny.dsc", "build/tiny"):
        done = place.dsc("train", argument, code=2)
        assert (
            done.stderr
            == "error: build/tiny/stages/rank_0.py is not the file that was compiled; run dsc compile again\n"
        )
    (build / "manifest.json").write_text("{")
    assert place.dsc("train", "build/tiny", code=2).stderr.startswith("error: build/tiny is not what dsc compile wrote")
    assert not (place.folder / "runs").exists()


def test_a_change_of_any_file_of_a_build_is_noticed(place: Place) -> None:
    build = place.compile(ONE_RANK)
    files = [path for path in build.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert {"plan.json", "train.py", "rank_0.py", "train_8.json"} <= {path.name for path in files}
    for path in files:
        text = path.read_bytes()
        path.write_bytes(text + b" ")
        with pytest.raises(BuildError, match=re.escape(f"{path} is not the file that was compiled")):
            Build.open(build)
        path.unlink()
        with pytest.raises(BuildError, match=re.escape(str(path))):
            Build.open(build)
        path.write_bytes(text)
    assert Build.open(build).folder == build


# ---------------------------------------------------------------- which spec, which build


@pytest.fixture(scope="module")
def shop(new_place: Callable[[], Place]) -> Place:
    """Two compiled runs in one file, in a folder whose path has spaces and that contains a user's `runtime/`."""
    place = new_place()
    place.folder = place.folder / "my specs"
    place.compile(dict(ONE_RANK, name="first"), "both.dsc")
    place.compile(dict(ONE_RANK, name="second", rate="1e-3"), "both.dsc")
    second = (place.folder / "both.dsc").read_text()
    first = spec_text(dict(ONE_RANK, name="first")).partition("cluster here")[0]
    (place.folder / "both.dsc").write_text(first + second, "utf-8")
    for package in ("runtime", "compiler", "dsl"):
        (place.folder / package).mkdir()
        (place.folder / package / "__init__.py").write_text("raise ImportError('not this one')\n")
    return place


def test_one_run_of_several(shop: Place) -> None:
    done = shop.dsc("train", code=2)
    assert "both.dsc has several runs" in done.stderr
    assert "`both.dsc:first`, `both.dsc:second`" in done.stderr.replace(f"{shop.folder}/", "")
    done = shop.dsc("train", "both.dsc:second", "--steps", 1)
    assert done.stdout.endswith("report: runs/second/report.html\nrun: runs/second\n")
    assert [row["rate"] for row in rows(shop.folder / "runs" / "second")] == [0.5e-3]
    assert "no run `third`" in shop.dsc("train", "both.dsc:third", code=2).stderr


def test_a_build_from_elsewhere(shop: Place, tmp_path: Path) -> None:
    """A build is sufficient; its data is found in --data, and nothing is written beside the spec."""
    before = sorted(shop.folder.rglob("*"))
    words = (shop.folder / "build" / "first", "--data", shop.folder, "--steps", 1, "--out", "run of mine")
    done = shop.dsc("train", *words, cwd=tmp_path, anew=True)
    assert done.stdout.endswith("run: run of mine\n")
    assert saved(tmp_path / "run of mine").step == 1
    assert sorted(shop.folder.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run of mine"]


def test_a_spec_from_elsewhere(shop: Place, tmp_path: Path) -> None:
    """A spec in another folder finds its data beside it; build and run go to the current folder."""
    before = sorted(shop.folder.rglob("*"))
    build = tmp_path / "build" / "first"
    files = tuple((str(p.relative_to(b)), p.read_text()) for b in [shop.folder / "build/first"] for p in b.rglob("*.*"))
    write_build(build, files)
    compiled = made(build / "manifest.json")
    shop.dsc("train", shop.folder / "both.dsc:first", "--steps", 1, cwd=tmp_path)
    assert made(build / "manifest.json") == compiled
    assert saved(tmp_path / "runs" / "first").step == 1
    assert sorted(shop.folder.rglob("*")) == before


def test_missing_data_is_reported(shop: Place, tmp_path: Path) -> None:
    done = shop.dsc("train", shop.folder / "build" / "first", cwd=tmp_path, code=2)
    missing = f"error: data source 'corpus/*.py': no {', '.join(SUFFIXES)} file found in {tmp_path}/corpus"
    hint = f" = hint: paths of the spec start at {tmp_path}; `--data DIR` names another folder"
    assert done.stderr == f"{missing}\n{hint}\n"
    assert "report: " not in done.stdout


# ---------------------------------------------------------------- errors outside the spec, found before compiling


def test_missing_data_is_reported_instead_of_compiling(place: Place) -> None:
    place.write(dict(ONE_RANK, source="away/*.py"))
    done = place.dsc("train", code=2)
    assert done.stderr.startswith("error: data source 'away/*.py': no .txt") and done.stderr.count("\n") == 2
    assert done.stdout == "" and not (place.folder / "build").exists()


def test_a_used_run_folder_is_reported_instead_of_compiling(place: Place) -> None:
    place.write(ONE_RANK)
    (place.folder / "runs" / "tiny" / "checkpoints" / "step-00000003").mkdir(parents=True)
    done = place.dsc("train", code=2)
    message = "error: runs/tiny holds an earlier run: go on with --resume, or name another folder with --out\n"
    assert done.stderr == message and done.stdout == ""
    assert not (place.folder / "build").exists()


def test_an_unwritable_build_prepares_no_data(place: Place) -> None:
    place.write(ONE_RANK)
    (place.folder / "build").mkdir()
    (place.folder / "build" / "tiny").write_text("mine")
    done = place.dsc("train", code=2)
    assert done.stderr == "error: build/tiny is a file: choose another folder with -o\n"
    assert not (place.folder / "runs").exists()


def test_data_errors_after_the_compiler_has_started(place: Place) -> None:
    """The text exists, and is too short for the tokenizer."""
    (place.folder / "few").mkdir()
    for name in "ab":
        (place.folder / "few" / f"{name}.py").write_text(f"{name} = 1\n")
    place.write(dict(ONE_RANK, source="few/*.py"))
    done = place.dsc("train", code=2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "the training text yields" in errors[0]
    assert not list((place.folder / "runs").rglob(".building-*"))


def test_lines_of_compiler_and_data_are_not_mixed(place: Place) -> None:
    """Compiler and data preparation run concurrently; their lines are printed in order."""
    place.write(ONE_RANK)
    log = place.folder / "both"
    log.touch()
    process = forks.start("compiler.cli.main", ["train", "--steps", "1"], place.folder, log, log)
    assert progress.end(process, lambda: log.stat().st_size) == 0
    text = log.read_text("utf-8")
    named = ["tiny:", "mesh:", "proven:", "build:", "data: find text", "data: train tokenizer", "data: encode text"]
    line_numbers = [next(i for i, line in enumerate(text.splitlines()) if line.startswith(n)) for n in named]
    assert line_numbers == sorted(line_numbers), text


# ---------------------------------------------------------------- immediate refusals


@pytest.mark.parametrize("command", ["compile", "train"])
def test_no_spec_or_several(command: str, tmp_path: Path) -> None:
    (tmp_path / "model.dsc").write_text("model other { vocab = 300 }\n")
    done = run((*DSC, command), 2, tmp_path)
    assert "there is no spec here: a .dsc file with a run block" in done.stderr
    for name in ("a.dsc", "b.dsc"):
        (tmp_path / name).write_text(spec_text(FOUR_RANKS))
    done = run((*DSC, command), 2, tmp_path)
    assert "there are several specs here" in done.stderr and "a.dsc" in done.stderr and "b.dsc" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.dsc", "b.dsc", "model.dsc"]


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = spec_text(FOUR_RANKS).replace("pipeline = 2", "pipelin = 2").replace("seed = 1", "seed = 1GB")
    (tmp_path / "tiny.dsc").write_text(text)
    for command in ("compile", "train"):
        done = run((*DSC, command), 2, tmp_path)
        assert done.stderr.count("error[E") == 2 and "did you mean" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.dsc"]


REFUSED = {
    "override of a build": (("-s", "train.seed=2"), "error: build/tiny is compiled already: -s needs the spec\n"),
    "a batch to skip in a new run": (
        ("--skip-batch", "--out", "new"),
        "error: --skip-batch skips the bad batches of an earlier run: it needs --resume\n",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_build_is_refused(shop: Place, name: str) -> None:
    words, message = REFUSED[name]
    build = shop.folder / "build" / "first"
    done = shop.dsc("train", build, *words, code=2)
    assert done.stderr == message.replace("build/tiny", str(build))
    assert not (shop.folder / "new").exists()


@pytest.mark.parametrize("steps", ["0", "-1", "1e3", "many"])
def test_steps_that_are_not_a_number(steps: str, tmp_path: Path) -> None:
    done = run((*DSC, "train", f"--steps={steps}"), 2, tmp_path)
    assert "is not a number of steps: an integer from 1" in done.stderr and "Traceback" not in done.stderr


def test_a_run_folder_in_use_is_refused(place: Place) -> None:
    place.compile(ONE_RANK)
    busy = place.folder / "busy"
    with place.started("train", "--out", busy, "--steps", 10**6) as running:
        running.wait_for_step(busy, 4)  # with a checkpoint, so that only the lock keeps a second run out
        done = place.dsc("train", "--out", busy, "--steps", 10**6, "--resume", code=75)
        assert done.stderr.endswith(f"error: another run is using {busy}\n")
        done = place.dsc("train", "--out", busy, "--steps", 10**6, code=75)  # while it runs, it is not an earlier run
        assert done.stderr.endswith(f"error: another run is using {busy}\n")
    assert json.loads((busy / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_two_runs_at_once_in_one_folder_train_once(place: Place) -> None:
    """Both find the folder empty when they start; the second to get it is refused, whether the first is done or not."""
    place.compile(ONE_RANK)
    command = ("train", "--out", "same", "--steps", 2)
    first, second = sorted(place.at_once(command, command), key=lambda done: done.returncode)
    assert first.returncode == 0 and second.returncode in (2, 75), (first, second)
    assert re.search("holds an earlier run|another run is using", second.stderr)
    assert len(rows(place.folder / "same")) == 2 and not (place.folder / "same" / "metrics.1.jsonl").exists()
    events = (place.folder / "same" / "events.jsonl").read_text("utf-8")
    assert events.count('"event": "start"') == 1


def test_a_run_folder_without_a_name(tmp_path: Path) -> None:
    done = run((*DSC, "train", "--out", ""), 2, tmp_path)
    assert "the run folder has no name" in done.stderr and not any(tmp_path.iterdir())
    done = run((*DSC, "train", "--out", os.fsdecode(b"x\xff")), 2, tmp_path)
    assert r"x\udcff cannot be a run folder: its name is not text in UTF-8" in done.stderr
    assert "Traceback" not in done.stderr and not any(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", ""])
def test_invalid_hang_timeouts_are_refused(seconds: str, tmp_path: Path) -> None:
    done = run((*DSC, "train", f"--hang-timeout={seconds}"), 2, tmp_path)
    assert "is not a number of seconds above 0; `none` waits forever" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_hang_timeout(shop: Place, tmp_path: Path) -> None:
    words = (shop.folder / "build" / "first", "--data", shop.folder, "--steps", 1, "--out", tmp_path / "run")
    shop.dsc("train", *words, "--hang-timeout", "none")
    assert saved(tmp_path / "run").step == 1


def test_a_report_that_cannot_be_written_changes_no_exit_code(shop: Place, tmp_path: Path) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    words = (shop.folder / "build" / "first", "--data", shop.folder, "--steps", 1, "--out", tmp_path / "run")
    done = shop.dsc("train", *words)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("data: ")]
    assert len(errors) == 1 and errors[0].endswith(
        "/run/report.html is a folder, but the report is written there: move it away"
    )
    assert done.stdout.endswith(f"report: dsc report {tmp_path}/run\nrun: {tmp_path}/run\n")
    assert saved(tmp_path / "run").step == 1


def test_a_spec_of_several_nodes_is_reported_to_run_on_one_machine(place: Place) -> None:
    """A spec for several nodes, and its build, print a line about one machine (one node: `test_compile_and_train`)."""
    text = spec_text(dict(ONE_RANK, pipeline=2, schedule="dualpipe", devices=1)).replace("nodes = 1", "nodes = 2")
    place.write(ONE_RANK)
    (place.folder / "tiny.dsc").write_text(text)
    build = compile_spec(load(place.folder / "tiny.dsc"), segments=place.segments)
    write_build(place.folder / "build" / "tiny", build.files)
    message = "cluster here has 2 nodes, but dsc train starts all ranks on this machine; to start them on 2 nodes: "
    message += "dsc compile, then on each torchrun --nnodes 2 --nproc-per-node 1 … build/tiny/train.py --out"
    done = place.dsc("train", "--steps", 1, "--out", "a")
    assert done.stdout.startswith(f"{message} a (docs/torchrun.md)\n")
    done = place.dsc("train", "build/tiny", "--steps", 1, "--out", "b")
    assert done.stdout.startswith(f"{message} b (docs/torchrun.md)\n")


@pytest.mark.parametrize(
    ("program", "streams"),
    [
        ((*DSC, "train"), "<&- >&- 2>&-"),
        ((*DSC, "train"), ">/dev/full 2>/dev/full"),
        ((sys.executable, "-P", "-m", "runtime.run.train"), "2>&-"),
    ],
)
def test_training_does_not_depend_on_who_reads(
    shop: Place, tmp_path: Path, program: tuple[str, ...], streams: str
) -> None:
    words = (*program, str(shop.folder / "build" / "first"), "--data", str(shop.folder), "--steps", "2", "--out")
    run(("sh", "-c", f'exec "$@" {streams}', "sh", *words, str(tmp_path / "run")), 0, tmp_path)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert saved(tmp_path / "run").step == 2
    assert (tmp_path / "run" / "report.html").is_file() == (program[-1] == "train")  # dsc writes it
    assert (tmp_path / "run" / "logs" / "rank_0.log").read_text() == ""


def test_the_console_script_equals_the_module() -> None:
    """The console script beside this Python."""
    script = Path(sys.executable).with_name("dsc")
    listed = run((str(script), "--help"), 0, Path("/"))
    assert listed.stdout == run((*DSC, "--help"), 0, Path("/")).stdout
    assert "train" in listed.stdout


@pytest.mark.parametrize("name", ["quickstart", "tiny"])
def test_shipped_specs_train(place: Place, name: str) -> None:
    """The repository's laptop specs train unchanged, on the text that they name."""
    spec = Path(__file__).parents[3] / "specs" / f"{name}.dsc"
    place.dsc("train", spec, "--steps", 1, "--out", "run")
    assert [row["step"] for row in rows(place.folder / "run")] == [1]
