"""`dsc compile` with cached traces of segments: the same build, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main
from compiler.emit import segment_cache as cache
from compiler.emit.kernels import KernelTarget
from compiler.emit.segment_cache import emit
from compiler.ir import Segment, SegmentCode
from compiler.tools import training
from compiler.tools.training import Training
from runtime.build.files import CACHE

SPEC = Path(__file__).parents[3] / "specs" / "tiny.dsc"
Traced = list[str]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entries(build: Path) -> list[Path]:
    return sorted((build / CACHE / "segments").glob("*.json"))


@pytest.fixture(scope="module")
def codes() -> dict[object, SegmentCode]:
    return {}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, codes: dict[object, SegmentCode]) -> Traced:
    """The kinds of the segments that a compilation traces, in order; `compile_to` clears it.

    A segment that an earlier test traced counts too, but its code is taken from `codes`.
    """
    kinds: Traced = []

    def counted(segment: Segment, target: KernelTarget) -> SegmentCode:
        kinds.append(segment.kind)
        if (segment.key, target) not in codes:
            codes[segment.key, target] = emit(segment, target)
        return codes[segment.key, target]

    monkeypatch.setattr(cache, "emit", counted)
    return kinds


@pytest.fixture
def compile_to(tmp_path: Path, traced: Traced, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Compile into a folder, which must succeed. Returns its path."""
    monkeypatch.chdir(tmp_path)

    def run(out: str, *words: str) -> Path:
        traced.clear()
        assert main(["compile", str(SPEC), "-o", out, *words]) == 0
        return tmp_path / out

    return run


def test_a_build_is_the_same_with_and_without_a_cache(compile_to: Callable[..., Path], traced: Traced) -> None:
    build = compile_to("build")
    first, num = files(build), len(traced)
    assert (build / CACHE / "orders").is_dir()
    assert num == len(entries(build)) == len(list((build / "segments").glob("*.py"))) > 5
    assert files(compile_to("build")) == first and traced == []
    without = {name: data for name, data in first.items() if not name.startswith("cache/")}
    assert files(compile_to("other", "--no-cache")) == without and len(traced) == num
    assert not [name for name in json.loads(first["manifest.json"])["files"] if name.startswith("cache/")]


def test_only_changed_segments_are_traced(compile_to: Callable[..., Path], traced: Traced) -> None:
    before = entries(compile_to("build"))
    compile_to("build", "-s", "train.seed=7")
    assert traced == []
    build = compile_to("build", "-s", "model.vocab=530")
    assert sorted(traced) == ["embed", "head", "mtp_input"]
    assert len(entries(build)) == len(before), "a build keeps only the entries of its own segments"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda _: b"{", id="cut"),
        pytest.param(lambda _: b"\xff", id="not UTF-8"),
        pytest.param(lambda data: data.replace(b"Forward", b"Backward"), id="edited"),
    ],
)
def test_a_damaged_entry_is_traced_again(
    damage: Callable[[bytes], bytes], compile_to: Callable[..., Path], traced: Traced
) -> None:
    build = compile_to("build")
    intact, entry = files(build), entries(build)[2]
    damaged = damage(entry.read_bytes())
    assert damaged != entry.read_bytes()
    entry.write_bytes(damaged)
    assert files(compile_to("build")) == intact and len(traced) == 1


def test_an_entry_under_the_name_of_another_is_traced_again(compile_to: Callable[..., Path], traced: Traced) -> None:
    build = compile_to("build")
    intact, (first, second, *_) = files(build), entries(build)
    second.write_bytes(first.read_bytes())
    assert files(compile_to("build")) == intact and len(traced) == 1


def test_builds_share_the_entries_of_a_cache_folder(
    compile_to: Callable[..., Path], traced: Traced, tmp_path: Path
) -> None:
    first_build = files(compile_to("one", "--cache", "shared"))
    shared = files(tmp_path / "shared" / "segments")
    assert len(shared) == len(traced) > 5 and not (tmp_path / "one" / "cache").exists()
    assert files(compile_to("two", "--cache", "shared")) == first_build and traced == []
    compile_to("three", "--cache", "shared", "-s", "model.vocab=530")
    assert len(traced) == 3 and len(files(tmp_path / "shared" / "segments")) == len(shared) + 3
    assert files(compile_to("one", "--cache", "shared")) == first_build and traced == [], (
        "entries of other builds are kept"
    )


def test_a_cache_that_is_a_file_is_refused_before_tracing(
    tmp_path: Path, traced: Traced, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("mine")
    assert main(["compile", str(SPEC), "-o", "build", "--cache", "notes"]) == 2
    assert capsys.readouterr().err == "error: notes is a file: choose a folder with --cache\n"
    assert traced == [] and [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_build_succeeds_if_the_cache_cannot_be_written(
    compile_to: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = entries(compile_to("known"))[0].name
    (tmp_path / "shared" / "segments" / name).mkdir(parents=True)
    capsys.readouterr()
    build = compile_to("build", "--cache", "shared")
    assert "warning: nothing is cached in shared: " in capsys.readouterr().err and (build / "manifest.json").is_file()


def test_foreign_files_in_the_cache_of_a_build_are_kept(
    compile_to: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    build = compile_to("build")
    notes = build / CACHE / "notes.json"
    notes.write_text("mine")
    assert main(["compile", str(SPEC), "-o", "build"]) == 2
    assert f"contains files that are not part of its build, {CACHE}/notes.json" in capsys.readouterr().err
    assert notes.read_text() == "mine"


def test_train_passes_the_cache_folder_to_compile(tmp_path: Path) -> None:
    def command(cache: Path | None) -> list[str]:
        chosen: Any = Namespace(argument=str(SPEC))
        return training._compiler(Training(cache=cache), chosen, tmp_path / "build")

    assert "--cache" not in command(None)
    assert command(tmp_path / "shared")[-2:] == ["--cache", str(tmp_path / "shared")]


def test_concurrent_compilations_fill_one_cache_and_a_later_one_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from compiler.cli.main import main; code = main(sys.argv[1:])\n"
        "print('torch' in sys.modules); sys.exit(code)"
    )

    def started(out: str) -> subprocess.Popen[str]:
        words = ["compile", str(SPEC), "-o", out, "--cache", "shared"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-c", code, *words]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    compilers = [started("one"), started("two")]
    assert [compiler.communicate()[0].splitlines()[-1] for compiler in compilers] == ["True", "True"]
    third = started("three")
    assert third.communicate()[0].splitlines()[-1] == "False" and third.returncode == 0
    assert files(tmp_path / "one") == files(tmp_path / "two") == files(tmp_path / "three")
    assert all(path.endswith(".json") for path in files(tmp_path / "shared")), "nothing is left half written"
