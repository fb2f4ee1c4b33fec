"""Schedules to and from the CSV of torch.distributed.pipelining, with torch's own reader and writer as the judge."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from compiler.schedule import SCHEDULES
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.spec_schedule import read_schedule
from compiler.schedule.torch_csv import from_torch_csv, to_torch_csv
from runtime.contract.actions import actions_of

SIZES = [
    (name, P, N)
    for name in ("gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev")
    for P, N in ((1, 2), (2, 4), (4, 8), (4, 9))
]


def generated(name: str, ranks: int, micro_batches: int) -> Schedule:
    return SCHEDULES[name].generate(ranks, micro_batches)


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SIZES)
def test_torch_reads_and_writes_the_csv(name: str, ranks: int, micro_batches: int, tmp_path: Path) -> None:
    schedule = generated(name, ranks, micro_batches)
    path = tmp_path / "a.csv"
    path.write_text(to_torch_csv(schedule))
    with path.open(newline="") as file:
        rows = [[torch_schedules._Action.from_str(cell) for cell in row] for row in csv.reader(file)]
    stages = {a.stage for steps in schedule.actions for step in steps for a in actions_of(step)}
    torch_schedules._validate_schedule(dict(enumerate(rows)), ranks, len(stages), micro_batches)
    written = tmp_path / "b.csv"
    with written.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert read_schedule(written).actions == schedule.actions
    if ranks > 1:  # on one rank a V is a loop
        assert read_schedule(path).stage_placement == schedule.stage_placement


def test_waits_and_communication_of_torch_are_left_out() -> None:
    text = "0F0,0SEND_F0,0UNSHARD,,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD,\n\n"
    schedule = from_torch_csv(text)
    schedule.check()
    assert schedule.to_text() == "# csv ranks=2 micro_batches=1 placement=loop(1)\nF0.0 B0.0\nF1.0 B1.0\n"


def test_pairs_that_torch_lacks_are_written_in_sequence() -> None:
    text = "# mine ranks=1 micro_batches=2 placement=loop(1)\n(F0.0|F0.1) I0.0 (W0.0|I0.1) W0.1\n"
    assert to_torch_csv(Schedule.from_text(text)) == "0F0,0F1,0I0,0W0,0I1,0W1\n"


def test_both_ways_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="use dualpipev"):
        to_torch_csv(generated("dualpipe", 2, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "line 1: '0X0' is not an action of torch"),
        ("0F0\n0F0;1\n", "line 2: '0F0;1' is not an action"),
        ("(0F0;0B1;0F2)OVERLAP_F_B\n", "is not an action"),
        ("0F0\n2F0\n", "neither a loop"),
        ("1F0\n0F0\n", "neither a loop"),
        ("0F99999999\n", "is not an action"),
        (",,\n", "it has no actions"),
        ('"0F0\n', "line 1: not CSV"),
    ],
)
def test_invalid_csv_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        from_torch_csv(text)
    assert message in str(error.value)
