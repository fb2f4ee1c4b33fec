"""A build replaces an earlier build, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.emit.folder import check_place, write_build

OLD = {"spec.resolved": "old\n", "stages/rank_0.py": "old\n"}
NEW = {"spec.resolved": "new\n", "plan.txt": "new\n"}


def write(folder: Path, files: dict[str, str]) -> None:
    manifest = json.dumps({"files": dict.fromkeys(files, "")})
    write_build(folder, [*files.items(), ("manifest.json", manifest)])


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_a_build_replaces_another_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "build"
    write(folder, OLD)
    (folder / "stages" / "__pycache__").mkdir()
    (folder / "stages" / "__pycache__" / "rank_0.cpython-311.pyc").touch()
    write(folder, NEW)
    assert names(folder) == {*NEW, "manifest.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["build"]


def test_an_empty_folder_is_taken_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", OLD)
    write(tmp_path / "link", NEW)
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "real") == {*NEW, "manifest.json"}
    (tmp_path / "dangling").symlink_to("not_yet")
    write(tmp_path / "dangling", NEW)
    assert names(tmp_path / "not_yet") == {*NEW, "manifest.json"}


@pytest.mark.parametrize("name", ["notes.md", "run/metrics.jsonl", ".git/HEAD"])
def test_files_that_are_not_of_the_build_are_never_removed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "build"
    write(folder, OLD)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    with pytest.raises(OSError, match=f"contains files that are not part of its build, {name}: move them elsewhere"):
        write(folder, NEW)
    assert (folder / name).read_text() == "mine" and names(folder) == {*OLD, "manifest.json", name}


@pytest.mark.parametrize("manifest", ['{"name": "an extension"}', '{"files": ["code.js"]}', "[]", "no json", ""])
def test_a_foreign_manifest_does_not_mark_a_build(manifest: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "code.js").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty and is not a build of dsc"):
        write(tmp_path, NEW)
    assert names(tmp_path) == {"manifest.json", "code.js"}


def test_files_and_the_current_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file is a file: choose another"):
        check_place(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="file is a file, not a folder: choose another"):
        check_place(tmp_path / "file" / "below")
    write(tmp_path / "build", OLD)
    for inside in ("build", "build/stages"):
        monkeypatch.chdir(tmp_path / inside)
        with pytest.raises(FileExistsError, match="is or contains the current folder"):
            check_place(tmp_path / "build")
