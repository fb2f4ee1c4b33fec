"""The command line itself: behaviour if its output cannot be written; refusals name their place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiler import pipeline
from compiler.cli.commands import compile as compile_
from compiler.cli.main import main
from compiler.pipeline import CompiledBuild
from dsl.schema import Spec

ROOT = Path(__file__).parents[2]
TINY = ROOT / "specs" / "tiny.dsc"
DSC = (sys.executable, "-m", "compiler.cli.main")


def test_output_that_a_terminal_cannot_show(tmp_path: Path) -> None:
    (tmp_path / "größe.dsc").write_bytes(TINY.read_bytes())
    completed = subprocess.run(
        (*DSC, "check", str(tmp_path / "größe.dsc")),
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "gr\\xf6\\xdfe.dsc: right: run tiny; " in completed.stdout and completed.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_gives_a_one_line_error() -> None:
    with Path("/dev/full").open("w") as full:
        command = (*DSC, "check", str(TINY))
        completed = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert completed.returncode == 75
    assert completed.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_closed_stdout_is_treated_as_a_broken_pipe() -> None:
    """A closed stdout is an error, or a script would read an empty document. A command without output succeeds."""
    schedule = ("schedule", "--name", "1f1b", "--ranks", "2", "--micro-batches", "2")
    for words, code in ((("check", "--format", "json", TINY), 141), (schedule, 141), (("fmt", "--check", TINY), 0)):
        command = " ".join(map(str, (*DSC, *words))) + " >&-"
        completed = subprocess.run(command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, check=False)
        assert (completed.returncode, completed.stderr) == (code, b"")


def test_subprocesses_have_a_stdout_even_if_it_is_closed() -> None:
    """Those that train print to it; a file of theirs would take its place, or nothing at all."""
    child = "import sys; sys.exit(sys.stdout is None)"
    parent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    words = (
        sys.executable,
        "-c",
        f"from compiler.cli.main import main; main(['fmt', '--check', {str(TINY)!r}]); {parent}",
    )
    completed = subprocess.run(
        ("sh", "-c", 'exec "$@" >&-', "sh", *words), cwd=ROOT, stderr=subprocess.PIPE, check=False
    )
    assert (completed.returncode, completed.stderr) == (0, b"")


@pytest.mark.parametrize("words", [("train", "no.dsc"), ("sweep", "no.dsc", "-s", "train.seed=1,2")])
def test_commands_that_train_reopen_a_closed_stdin(words: tuple[str, ...]) -> None:
    """Its processes inherit it, so that no file of theirs takes the place of a standard stream."""
    stdin_copy = os.dup(0)
    os.close(0)
    try:
        assert main(words) == 2
        assert os.path.samestat(os.fstat(0), Path(os.devnull).stat()) and os.get_inheritable(0)
    finally:
        os.dup2(stdin_copy, 0)
        os.close(stdin_copy)


@pytest.mark.parametrize(
    ("streams", "code"), [("2>&-", 0), ("2>/dev/full", 0), (">/dev/full", 75), (">&-", 141), ("2>&1 | true", 141)]
)
def test_a_compilation_keeps_its_exit_code_without_a_reader(tmp_path: Path, streams: str, code: int) -> None:
    """The compilation keeps its own exit code if nobody reads its output, and the build exists."""
    command = " ".join((*DSC, "compile", str(TINY), "-o", str(tmp_path / "build"), streams))
    completed = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, check=False)
    assert completed.returncode == code and (tmp_path / "build" / "manifest.json").is_file()


def test_a_refusal_is_an_error_at_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = ROOT / "specs" / "deepseek-v3.dsc"
    overrides = ["-s", "precision.combine=e4m3", "-s", "parallel.route=flat"]
    assert main(["compile", str(spec), *overrides, "-o", str(tmp_path / "build")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "warning" not in err and not (tmp_path / "build").exists()
    assert "error[E1001]" in err and "precision" in err and err.count("error[") == 1


@pytest.mark.parametrize(
    ("devices", "code", "said"),
    [
        (
            "2x1",
            0,
            "on these devices: -s cluster.nodes=2 -s cluster.node.devices=1 -s parallel.data=2 -s parallel.expert=1\n",
        ),
        ("1x7", 2, "error: --on 1x7: no degrees keep the rules there, with a batch of 4 sequences\n"),
    ],
)
def test_compiling_for_other_devices_reports_the_changed_plan(
    devices: str, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[Spec]()

    def compile_one(args: object, spec: Spec, out: Path) -> int:
        compiled.append(spec)
        return 0

    monkeypatch.setattr(compile_, "_compile", compile_one)
    assert main(["compile", str(TINY), "--on", devices]) == code
    assert capsys.readouterr().err == said
    assert [(spec.cluster.world, spec.parallel.data) for spec in compiled] == ([(2, 2)] if code == 0 else [])


def test_digest_and_folder_of_a_build_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest goes to the process that asks for it, or to the user."""
    build = CompiledBuild((("manifest.json", '{"files": {}}'),), "what it is\n", "it is too large")
    monkeypatch.setattr(pipeline, "compile_spec", lambda *_: build)
    build_folder, quiet_folder, digest_file = (tmp_path / name for name in ("one", "other", "said"))
    assert main(["compile", str(TINY), "-o", str(build_folder)]) == 0
    assert capsys.readouterr() == (
        f"what it is\ndigest: {build.digest}\nbuild: {build_folder}\n",
        "warning: it is too large\n",
    )
    with digest_file.open("wb") as file:
        assert main(["compile", str(TINY), "-o", str(quiet_folder), "--digest-to", str(file.fileno())]) == 0
    assert capsys.readouterr().out == f"what it is\nbuild: {quiet_folder}\n"
    assert digest_file.read_text() == build.digest


def test_an_invalid_output_folder_is_reported_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.md").write_text("mine")
    assert main(["compile", str(TINY), "-o", str(tmp_path)]) == 2
    assert f"error: {tmp_path} is not empty and is not a build of dsc" in capsys.readouterr().err
