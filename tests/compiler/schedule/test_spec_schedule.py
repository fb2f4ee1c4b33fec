"""A schedule from a file may have any of the forms; one that cannot run is refused with the file's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compiler.cli.commands.common import load_spec
from compiler.pipeline import lower_spec
from compiler.plan.spec_files import schedule_of_file
from compiler.schedule import SCHEDULES
from compiler.schedule.schedule import ScheduleError
from compiler.schedule.spec_schedule import read_schedule
from compiler.schedule.torch_csv import to_torch_csv
from dsl.load import load

QUICKSTART = Path(__file__).parents[3] / "specs" / "quickstart.dsc"


def test_every_form_is_read(tmp_path: Path) -> None:
    schedule = SCHEDULES["zbv"].generate(2, 4)
    for name, text in (
        ("a", schedule.to_text()),
        ("b", "\ufeff" + schedule.to_text().replace("\n", "\r\n") + "\r\n\r\n"),
        ("c", schedule.to_json()),
        ("zbv", to_torch_csv(schedule)),
    ):
        (tmp_path / name).write_bytes(text.encode())
        assert read_schedule(tmp_path / name) == schedule


DEADLOCK = "# x ranks=2 micro_batches=2 placement=loop(1)\nF0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEADLOCK, "waits for ever"),
        ("# x ranks=1 micro_batches=1 placement=loop(1)\nB0.0 F0.0\n", "rank 0, B0.0: comes before its F"),
        ("# x ranks=1 micro_batches=1 placement=loop(1)\nF0.0\nB0.0\n", "2 lines of actions follow"),
        ("# x ranks=1 micro_batches=1\n", "is not a header"),
        ("{}", "expected one object"),
        ("", "it is empty: `dsc schedule --name 1f1b --ranks 2 --micro-batches 4` prints one"),
        (" \n\n", "it is empty"),
        (",\n", "it has no actions"),
        ("x ranks=1 micro_batches=1 placement=loop(1)\nF0.0 B0.0\n", "line 1: 'x ranks=1 micro_batches=1 placement"),
        ("hello\nthere", "neither # <name> ranks=<P> micro_batches=<N> placement=<placement>, nor JSON, nor torch's"),
        ("# x ranks=9999999 micro_batches=1 placement=loop(1)\n", "line 1: ranks=9999999 is too large: at most 512"),
        (
            "# x ranks=1 micro_batches=" + "9" * 5000 + " placement=loop(1)\nF0.0 B0.0\n",
            "line 1: micro_batches=99999999999999999999 is too large: at most 999999",
        ),
        ("# x ranks=1 micro_batches=1 placement=loop(99999)\nF0.0 B0.0\n", "expected bidirectional, v or loop(N)"),
        ("# x ranks=1 micro_batches=1 placement=loop(1)\nF1.0 B1.0\n", "its schedule has 1 stage and 1 micro-batch"),
        (
            '{"schedule":"x","ranks":' + "1" * 4000 + ',"micro_batches":1,"placement":"loop(1)","actions":[]}',
            '"ranks" is out of bounds: at most 512',
        ),
        ("\xff", "is not text in UTF-8"),
        ("# x ranks=1 micro_batches=2 placement=loop(1)\nF0.0 F0.1\n", "it has no backward"),
        ('{"schedule":"x","ranks":' + "1" * 5000 + "}", "not JSON of a schedule"),
        ('{"schedule":"a b","ranks":1,"micro_batches":1,"placement":"loop(1)","actions":[["F0.0","B0.0"]]}', "'a b'"),
        (
            '{"schedule":"\\ud800","ranks":1,"micro_batches":1,"placement":"loop(1)","actions":[["F0.0","B0.0"]]}',
            "name",
        ),
        ("# \x1b[31m ranks=1 micro_batches=1 placement=loop(1)\nF0.0 B0.0\n", "'\\x1b[31m'"),
        ("10000F0\n", "neither a loop"),
        ("0F0,1F0,1B0,0B0\n,\n", "neither a loop"),
        ("# x ranks=1 micro_batches=1 placement=loop(1)\nF0." + "9" * 6000 + "\n", "is not an action"),
        ("\n".join(f"{i}F0,{i}B0" for i in range(600)), "600 ranks are too many"),
        ("# x ranks=999999 micro_batches=999999 placement=loop(1)\n", "lines of actions follow"),
    ],
)
def test_schedules_that_cannot_run_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.schedule"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ScheduleError) as error:
        read_schedule(path)
    assert str(error.value).startswith(str(path)) and message in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 250


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ScheduleError, match=r"there is no file .*none"):
        read_schedule(tmp_path / "none")
    (tmp_path / "circle").symlink_to("circle")
    for name, message in {"circle": "is a broken link", "": "is not a regular file, but a folder"}.items():
        with pytest.raises(ScheduleError, match=message):
            read_schedule(tmp_path / name)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ScheduleError, match=f"{path} is not a regular file"):
            read_schedule(path)


def test_a_file_is_found_beside_the_link_to_a_spec(tmp_path: Path) -> None:
    """The imports and the schedule of a spec that is a symbolic link are found beside the link."""
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "there" / "spec.dsc").write_text(
        'import "base.dsc"\nrun mine extends quickstart { schedule { file = "mine.schedule" } }\n'
    )
    (tmp_path / "here" / "spec.dsc").symlink_to(tmp_path / "there" / "spec.dsc")
    (tmp_path / "here" / "base.dsc").write_text(QUICKSTART.read_text("utf-8").replace("{ name = dualpipe }", "{ }"))
    (tmp_path / "here" / "mine.schedule").write_text(SCHEDULES["zb1p"].generate(2, 4).to_text())
    chosen = load_spec(str(tmp_path / "here" / "spec.dsc"), [])
    assert chosen is not None and schedule_of_file(chosen.spec) == SCHEDULES["zb1p"].generate(2, 4)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_file_divides_state_as_its_schedule_does(tmp_path: Path, zero: int) -> None:
    """A file whose stages are on two pipeline ranks has the programs of the named schedule that wrote it."""
    named = load(QUICKSTART, overrides=[f"parallel.zero={zero}"])
    (tmp_path / "mine.schedule").write_text(SCHEDULES["dualpipe"].generate(2, 4).to_text())
    text = QUICKSTART.read_text("utf-8").replace("name = dualpipe", 'file = "mine.schedule"')
    (tmp_path / "spec.dsc").write_text(text)
    of_file, programs = load_spec(str(tmp_path / "spec.dsc"), [f"parallel.zero={zero}"]), lower_spec(named).programs
    assert of_file is not None and lower_spec(of_file.spec).programs == programs
    assert any(i.kind == "scatter" for body in programs["train_4"].bodies[0] for i in body.instructions)
