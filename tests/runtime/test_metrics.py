"""metrics.jsonl: what is written, what a resume keeps, and disks that refuse."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import metrics
from runtime.metrics import Metrics, read_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write_steps(path: Path, steps: range, resume_step: int = 0) -> None:
    writer = Metrics(path, resume_step)
    for step in steps:
        writer.write({"step": step, "loss": 1 / step})
    writer.close()


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_one_object_a_step_there_as_soon_as_written(path: Path) -> None:
    writer = Metrics(path)
    for step in (1, 2):
        writer.write({"step": step, "loss": 0.5, "load": [[1, 2]], "rates": {"lr": 1e-3}})
        assert len(path.read_text().splitlines()) == step
    assert json.loads(path.read_text().splitlines()[1]) == {
        "step": 2,
        "loss": 0.5,
        "load": [[1, 2]],
        "rates": {"lr": 1e-3},
    }
    writer.close()


def test_what_is_not_finite_is_null_and_said(path: Path) -> None:
    writer = Metrics(path)
    writer.write({"step": 1, "loss": math.nan, "norms": {"head": [1.0, -math.inf]}})
    writer.close()
    line = path.read_text()
    assert "NaN" not in line and "Infinity" not in line
    assert json.loads(line) == {
        "step": 1,
        "loss": None,
        "norms": {"head": [1.0, None]},
        "not_finite": {"loss": "nan", "norms.head.1": "-inf"},
    }


@pytest.mark.parametrize("resume_step", [0, 1, 7, 10, 12])
def test_a_resume_cuts_what_came_after_it(path: Path, resume_step: int) -> None:
    write_steps(path, range(1, 11))
    write_steps(path, range(resume_step + 1, 15), resume_step)
    assert steps(path) == [*range(1, min(resume_step, 10) + 1), *range(resume_step + 1, 15)]


@pytest.mark.parametrize(
    "torn", [b'{"step": 6, "lo', b'{"step": 6}', b"\xff\xfe\n", b"[6]\n", b'{"step": "6"}\n', b"\n"]
)
def test_a_resume_cuts_a_torn_row(path: Path, torn: bytes) -> None:
    write_steps(path, range(1, 6))
    path.write_bytes(path.read_bytes() + torn)
    write_steps(path, range(6, 8), resume_step=100)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]


def test_a_link_is_not_followed(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    path.symlink_to(tmp_path / "elsewhere")
    write_steps(path, range(1, 3))
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert "Too many levels of symbolic links" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "metrics.jsonl"
    write_steps(path, range(1, 5))
    expected = f"{path} cannot be written, training goes on without it: No such file or directory\n"
    assert capsys.readouterr().err == expected


class FullAfter:
    """`os` with a disk of `room` bytes, which fills in the middle of a row and can be freed."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        part = data[: self.room]
        self.room -= len(part)
        return os.write(file, part)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FullAfter]:
    full = FullAfter(room=70)  # two rows and a half
    monkeypatch.setattr(metrics, "os", full)
    yield full


def test_a_full_disk_is_reported_once_and_leaves_whole_rows(
    path: Path, disk: FullAfter, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Metrics(path)
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.25})
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert steps(path) == [1, 2]
    disk.room = 10**6
    writer.write({"step": 6, "loss": 1.25})
    writer.close()
    assert steps(path) == [1, 2, 6]


def test_rows_are_read_as_they_come(path: Path) -> None:
    assert read_rows(path) == ([], 0)
    write_steps(path, range(1, 3))
    rows, at = read_rows(path)
    assert [row["step"] for row in rows] == [1, 2] and at == path.stat().st_size
    with path.open("ab") as file:
        file.write(b'not a row\n{"step": 3}\n{"step": 4')
    rows, at = read_rows(path, at)
    assert [row["step"] for row in rows] == [3]
    with path.open("ab") as file:
        file.write(b"}\n")
    assert read_rows(path, at)[0] == [{"step": 4}]
