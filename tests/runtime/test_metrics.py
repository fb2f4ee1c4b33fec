"""metrics.jsonl: its rows, the rows that a resume moves aside, and failing disks."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.observe.metrics import MetricsWriter, check_metrics
from runtime.system import lines
from runtime.system.lines import JsonLines, read_rows, utc_now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write_steps(path: Path, steps: range, resume_step: int = 0) -> list[str]:
    """Write rows of these steps, and return the messages to the user."""
    notes: list[str] = []
    writer = JsonLines(path, resume_step, notes.append)
    for step in steps:
        writer.write({"step": step, "loss": 1 / step})
    writer.close()
    return notes


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_row_is_one_line_that_is_readable_immediately(tmp_path: Path, path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    before = utc_now()
    for step in (1, 2):
        writer.write({"step": step, "loss": 0.5, "load": [[1, 2]], "rates": {"lr": 1e-3}})
        assert len(path.read_text().splitlines()) == step
    row = json.loads(path.read_text().splitlines()[1])
    assert before <= row.pop("time") <= utc_now()
    assert row == {"step": 2, "loss": 0.5, "load": [[1, 2]], "rates": {"lr": 1e-3}}
    writer.close()


def test_times_are_utc_in_iso_8601() -> None:
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\d\dZ", utc_now())


def test_non_finite_numbers_become_null_and_are_listed(path: Path) -> None:
    writer = JsonLines(path, 0)
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


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("resume_step", [0, 1, 7, 9])
def test_a_resume_moves_later_rows_aside(path: Path, resume_step: int) -> None:
    write_steps(path, range(1, 11))
    (note,) = write_steps(path, range(resume_step + 1, 15), resume_step)
    assert steps(path) == [*range(1, 15)]
    assert steps(path.with_name("metrics.1.jsonl")) == [*range(resume_step + 1, 11)]
    span = "step 10" if resume_step == 9 else f"steps {resume_step + 1} to 10"
    assert note == f"{path}: rows of {span}, later than step {resume_step}, are now in metrics.1.jsonl"
    assert write_steps(path, range(13, 14), resume_step=12)
    assert steps(path.with_name("metrics.2.jsonl")) == [13, 14]
    assert files(path.parent) == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]


@pytest.mark.parametrize("resume_step", [10, 12])
def test_a_resume_after_the_last_row_moves_nothing(path: Path, resume_step: int) -> None:
    write_steps(path, range(1, 11))
    before = path.stat().st_ino
    assert write_steps(path, range(resume_step + 1, 15), resume_step) == []
    assert steps(path) == [*range(1, 11), *range(resume_step + 1, 15)]
    assert files(path.parent) == ["metrics.jsonl"] and path.stat().st_ino == before


DAMAGE = [
    b'{"step": 6, "lo\n',
    b"\xff\xfe\n",
    b"[6]\n",
    b'{"step": "6"}\n',
    b"\n",
    b"[" * 10_000 + b"\n",
    b"0" * (3 << 20),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
@pytest.mark.parametrize("place", [0, 5, 40])
def test_a_damaged_row_is_set_aside_and_no_other_is_lost(path: Path, damage: bytes, place: int) -> None:
    write_steps(path, range(1, 41))
    good_lines = path.read_bytes().splitlines(keepends=True)
    end = b"" if damage.endswith(b"\n") else b"\n"
    path.write_bytes(b"".join([*good_lines[:place], damage + end, *good_lines[place:]]))
    (note,) = write_steps(path, range(41, 43), resume_step=40)
    assert path.read_bytes().splitlines(keepends=True)[:40] == good_lines
    assert steps(path) == [*range(1, 43)]
    assert "damaged" in note and note.endswith("now in metrics.damaged.jsonl")
    assert path.with_name("metrics.damaged.jsonl").read_bytes().replace(b"\n", b"") == damage.replace(b"\n", b"")
    assert files(path.parent) == ["metrics.damaged.jsonl", "metrics.jsonl"]


@pytest.mark.parametrize("end", [b'{"step": 6, "lo', b'{"step": 6}'])
def test_a_last_row_without_an_end_of_line(path: Path, end: bytes) -> None:
    write_steps(path, range(1, 6))
    path.write_bytes(path.read_bytes() + end)
    notes = write_steps(path, range(7, 9), resume_step=6)
    is_row = end.endswith(b"}")
    assert steps(path) == [*range(1, 6), *([6] if is_row else []), 7, 8]
    assert notes == ([] if is_row else [f"{path}: 1 damaged line is now in metrics.damaged.jsonl"])


def test_damage_is_collected_and_rows_keep_their_bytes(path: Path) -> None:
    write_steps(path, range(1, 4))
    for broken in ("one", "two"):
        with path.open("a") as file:
            file.write(broken + "\n")
        write_steps(path, range(0), resume_step=3)
    assert path.with_name("metrics.damaged.jsonl").read_text() == "one\ntwo\n"
    assert steps(path) == [1, 2, 3]


# ---------------------------------------------------------------- files that refuse


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    path.symlink_to(tmp_path / "elsewhere")
    assert "Too many levels of symbolic links" in write_steps(path, range(1, 3))[0]
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_rows_that_never_could_be_written_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "metrics.jsonl"
    assert write_steps(path, range(1, 5)) == [
        f"{path} cannot be written (No such file or directory): training goes on, and its rows are kept in memory until"
        " they can be written",
        f"{path}: 4 rows could not be written and are lost",
    ]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipes_and_folders_are_refused_without_waiting(path: Path, make: object) -> None:
    assert callable(make)
    make(path)
    assert len(write_steps(path, range(1, 3))) == 2
    assert read_rows(path) == ([], 0)
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        check_metrics(path.parent)


class Full:
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
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    full = Full(room=70)  # two rows and a half
    monkeypatch.setattr(lines, "os", full)
    yield full


def test_rows_that_a_full_disk_refused_are_written_when_it_has_room(path: Path, disk: Full) -> None:
    notes: list[str] = []
    writer = JsonLines(path, 0, notes.append)
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.25})
        assert steps(path) == [1, 2][:step], "whole rows only"
    assert len(notes) == 1 and "No space left on device" in notes[0]
    disk.room = 10**6
    writer.write({"step": 6, "loss": 1.25})
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert notes[1:] == [f"{path} can be written again: all rows are in it"]
    disk.room = 0
    writer.write({"step": 7, "loss": 1.25})
    disk.room = 10**6
    writer.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7] and len(notes) == 4


LIMITED = """
import resource, sys
from pathlib import Path
from runtime.system.lines import JsonLines
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
lines = JsonLines(Path(sys.argv[1]), 0, print)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
for step in range(1, 9):
    lines.write({"step": step, "loss": 1.25})
print(Path(sys.argv[1]).read_bytes().count(b"\\n"))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
lines.close()
"""


def test_rows_that_the_system_refused_are_written_when_it_takes_them(path: Path) -> None:
    """A real process whose files the kernel temporarily limits to 100 bytes."""
    command = [sys.executable, "-c", LIMITED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    first_note, num_rows, second_note = done.stdout.splitlines()
    assert (
        "cannot be written (File too large)" in first_note and num_rows == "3" and "can be written again" in second_note
    )
    assert steps(path) == [*range(1, 9)]


def test_memory_for_rows_is_bounded(path: Path, disk: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_KEPT_BYTES", 1000)
    disk.room = 0
    notes: list[str] = []
    writer = JsonLines(path, 0, notes.append)
    for step in range(100, 200):
        writer.write({"step": step, "loss": 1.25})
    disk.room = 10**6
    writer.write({"step": 200, "loss": 1.25})
    writer.close()
    num_kept = 1000 // len('{"step": 100, "loss": 1.25}\n')
    assert steps(path) == [*range(201 - num_kept, 201)], "the latest"
    assert f"except the first {101 - num_kept}" in notes[-1]


def test_a_resume_on_a_full_disk_moves_rows_when_it_has_room(
    path: Path, disk: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.room = 10**6
    write_steps(path, range(1, 11))
    before = path.read_bytes()
    full = OSError(28, "No space left on device")

    def fsync(_: int) -> None:
        raise full

    monkeypatch.setattr(os, "fsync", fsync)
    notes: list[str] = []
    writer = JsonLines(path, 5, notes.append)
    writer.write({"step": 6})
    assert path.read_bytes() == before and files(path.parent) == ["metrics.jsonl"] and len(notes) == 1
    monkeypatch.undo()
    writer.write({"step": 7})
    writer.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(path.with_name("metrics.1.jsonl")) == [6, 7, 8, 9, 10]


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("rest", [b"", b": 2}\n"])
def test_a_half_line_is_one_that_no_longer_grows(path: Path, monkeypatch: pytest.MonkeyPatch, rest: bytes) -> None:
    """A line that another process is still writing gets no line end in its middle; an abandoned one does."""
    path.write_bytes(b'{"a": 1}\n{"b"')

    def write(_: float) -> None:
        with path.open("ab") as file:
            file.write(rest)

    monkeypatch.setattr(lines.time, "sleep", write)
    with path.open("rb") as file:
        assert lines._ends_in_half(file.fileno()) == (not rest)


def test_rows_are_read_as_they_come(path: Path) -> None:
    assert read_rows(path) == ([], 0)
    write_steps(path, range(1, 3))
    rows, end = read_rows(path)
    assert [row["step"] for row in rows] == [1, 2] and end == path.stat().st_size
    with path.open("ab") as file:
        file.write(b'not a row\n{"step": 3}\n{"step": 4')
    rows, end = read_rows(path, end)
    assert [row["step"] for row in rows] == [3]
    with path.open("ab") as file:
        file.write(b"}\n")
    assert read_rows(path, end).rows == [{"step": 4}]
    path.write_text('{"step": 9}\n')  # replaced by a shorter one
    assert read_rows(path, end).rows == [{"step": 9}]
