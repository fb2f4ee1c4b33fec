"""`-o FILE` of all commands: refused before the work, written atomically, and never over an input."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from compiler.cli.commands import calibrate
from compiler.cli.commands.common import load_spec
from compiler.cli.commands.output_files import refuse_output, write
from compiler.cli.main import main
from compiler.machine.rates.table import TABLES
from compiler.predict.traced_layer import TracedPair
from dsl.schema import Spec
from tests import copies

ROOT = Path(__file__).parents[3]
TRACE = TABLES.parent / "traces" / "deepseek-pair.json"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a spec, a schedule, a load and a trace."""
    monkeypatch.chdir(tmp_path)
    copies.copy(ROOT / "specs" / "tiny.dsc", "spec.dsc")
    copies.copy(TRACE, "trace.json")
    copies.copy(TABLES / "cpu.json", "table.json")
    Path("load.json").write_text('{"load": [[1, 2, 3, 4]]}')
    assert main(["schedule", "--name", "1f1b", "--ranks", "2", "--micro-batches", "2", "-o", "mine.schedule"]) == 0
    return tmp_path


COMMANDS = {
    "plan": ["plan", "spec.dsc"],
    "schedule": ["schedule", "mine.schedule"],
    "place": ["place", "load.json", "--devices", "2"],
    "calibrate": ["calibrate", "spec.dsc", "--trace", "trace.json", "--table", "table.json"],
}
READ = {
    "plan": ["spec.dsc", "./spec.dsc", "other.dsc"],
    "schedule": ["mine.schedule", "spec.dsc"],
    "place": ["load.json", "spec.dsc"],
    "calibrate": ["spec.dsc", "trace.json", "table.json"],
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_input_files_are_not_overwritten(command: str, folder: Path, capsys: Captured) -> None:
    os.link("spec.dsc", "name.of.spec")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for output in (*READ[command], *(["name.of.spec"] if command == "plan" else [])):
        assert main([*COMMANDS[command], "-o", output]) == 2
        stderr = capsys.readouterr().err
        assert stderr.startswith(
            f"error: {output.removeprefix('./')} cannot be written: it is an input file or a spec"
        ), stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_unwritable_output_is_reported_before_the_work(
    command: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("it has begun")

    for name in ("plan.load_phases", "schedule.answer_to", "place.place_all", "calibrate._measure_machine"):
        monkeypatch.setattr(f"compiler.cli.commands.{name}", work)
    words = ["calibrate", "spec.dsc"] if command == "calibrate" else COMMANDS[command]
    (folder / "circle").symlink_to("circle")
    Path("read-only").touch(0o444)
    for name in ("none/out.json", ".", "circle", "read-only", "x" * 300, "a\0b"):
        assert main([*words, "-o", name]) == 2
        stderr = capsys.readouterr().err
        printed_name = name.replace("\0", "\N{SYMBOL FOR NULL}")
        assert stderr.startswith(f"error: {printed_name} cannot be written: ") and "Errno" not in stderr
    assert not [path for path in folder.iterdir() if path.name.startswith(".dsc-")]


def test_output_follows_links_and_keeps_permissions(folder: Path) -> None:
    Path("real").write_text("old")
    Path("real").chmod(0o600)
    Path("link").symlink_to("real")
    write(Path("link"), b"new")
    assert Path("link").is_symlink() and Path("real").read_text() == "new"
    assert Path("real").stat().st_mode & 0o777 == 0o600
    before = os.umask(0o027)
    try:
        write(Path("fresh"), b"")
    finally:
        os.umask(before)
    assert Path("fresh").stat().st_mode & 0o777 == 0o640


def test_a_full_disk_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Path("out").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    assert main(["plan", "spec.dsc", "-o", "out"]) == 2
    assert capsys.readouterr().err == "error: out cannot be written: No space left on device\n"
    assert Path("out").read_text() == "old" and not list(folder.glob(".dsc-*"))


def test_a_pipe_without_a_reader_is_refused(folder: Path, capsys: Captured) -> None:
    os.mkfifo("pipe")
    for command in ("plan", "schedule"):
        assert main([*COMMANDS[command], "-o", "pipe"]) == 2
        assert capsys.readouterr().err.endswith("pipe cannot be written: nobody reads this pipe\n")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(Path("pipe").read_bytes()))
    reader.start()
    handle = os.open("pipe", os.O_WRONLY)  # waits for the reader
    try:
        write(Path("pipe"), b"x" * 200_000)  # more than a pipe holds
    finally:
        os.close(handle)
    reader.join()
    assert received == [b"x" * 200_000]
    assert main(["plan", "spec.dsc", "-o", "/dev/null"]) == 0


def test_names_with_a_run_suffix_count_as_their_file(folder: Path) -> None:
    refuse_output(Path("out"), "spec.dsc:tiny", None, "F=1,I=1", "x" * 5000)
    with pytest.raises(FileExistsError):
        refuse_output(Path("mine.schedule"), "mine.schedule:run")


# ---------------------------------------------------------------- the line that calibrate prints


@pytest.mark.parametrize("out", ["rates.json", "tables/rates.json", "../rates.json", "/far/rates.json"])
def test_the_printed_path_is_relative_to_the_spec(
    out: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is right whichever folder the command runs in: the spec with the printed line loads that table."""
    spec = tmp_path / "specs" / "spec.dsc"
    spec.parent.mkdir()
    copies.copy(ROOT / "specs" / "tiny.dsc", spec)
    place = Path(f"{tmp_path}{out}") if out.startswith("/") else spec.parent / out
    place.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path.parent)

    def measured(device: str, given: Spec, plan: object) -> object:
        from compiler.machine.rates import read_table

        return read_table(TABLES / "cpu.json")

    monkeypatch.setattr(calibrate, "_measure_machine", measured)
    assert main(["calibrate", os.path.relpath(spec), "-o", os.path.relpath(place)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("plan with it:  cluster one { rates = ")
    named = line.partition('"')[2].rpartition('"')[0]
    assert named == (out if not out.startswith("/") else "../far/rates.json")
    text = spec.read_text()
    assert "cluster one {" in text
    spec.write_text(text.replace("cluster one {", line.removeprefix("plan with it:  ").removesuffix(" }") + "\n"))
    chosen = load_spec(str(spec), [])
    assert chosen is not None and chosen.spec.cluster.rates == named


def test_far_from_the_spec_the_path_is_absolute(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folder / "a" / "b" / "c"
    deep.mkdir(parents=True)
    shutil.move("spec.dsc", deep / "spec.dsc")
    monkeypatch.setattr(calibrate, "_measure_machine", lambda *_: calibrate.read_table(folder / "table.json"))
    assert main(["calibrate", str(deep / "spec.dsc"), "-o", "out.json"]) == 0
    assert f'{{ rates = "{folder}/out.json" }}' in capsys.readouterr().out
    assert main(["calibrate", "-o", "out.json"]) == 0, "without a spec, it will be in one that is not known"
    stdout = capsys.readouterr().out
    assert f'cluster … {{ rates = "{folder}/out.json" }}' in stdout
    rows = len(calibrate.read_table(folder / "table.json").rows)
    assert f"{rows} rows, 0 class factors" in stdout


def test_an_imported_cluster_is_named_by_its_file(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path("spec.dsc").read_text()
    start = text.index("cluster one")
    (folder / "lib").mkdir()
    Path("lib/one.dsc").write_text(text[start:])
    Path("spec.dsc").write_text('import "lib/one.dsc"\n' + text[:start])
    monkeypatch.setattr(calibrate, "_measure_machine", lambda *_: calibrate.read_table(folder / "table.json"))
    assert main(["calibrate", "spec.dsc", "-o", "out.json"]) == 0
    assert 'cluster one { rates = "../out.json" }  in lib/one.dsc\n' in capsys.readouterr().out
    extended = re.sub("cluster += one", "cluster = mine", Path("spec.dsc").read_text())
    Path("spec.dsc").write_text(extended + "\ncluster mine extends one { nodes = 1 }\n")
    assert main(["calibrate", "spec.dsc", "-o", "out.json"]) == 0
    assert 'cluster mine { rates = "out.json" }\n' in capsys.readouterr().out, "not where most of its keys are"


def test_classes_missing_in_a_trace_are_reported(folder: Path, capsys: Captured) -> None:
    gemm = {"classes": ("gemm",), "ms": 1.0}
    trace = TracedPair.model_validate(
        {"name": "t", "layer": "L0", "layers": 1, "span_ms": 1.0, "busy_ms": 1.0, "classes": (gemm,), "source": "s",
         "date": "2025"}
    )  # fmt: skip
    Path("trace.json").write_text(trace.model_dump_json(by_alias=True))
    assert main(["calibrate", "spec.dsc", "--trace", "trace.json", "-o", "out.json"]) == 0
    captured = capsys.readouterr()
    assert ": not in the trace, or not run by its layer L0; " in captured.err
    missing = captured.err.partition("note: ")[2].partition(": not in the trace")[0].split(", ")
    assert "gemm" not in missing and {"wgrad", "norm", "attention"} <= set(missing)
    assert "out.json: 0 rows, 1 class factor\n" in captured.out
