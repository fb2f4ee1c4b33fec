"""Faults in a run's surroundings do not affect training: rows and weights equal an undisturbed run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests import progress
from tests.reliability.struck import STEPS, Ground, events
from tests.runtime.run.place import DSC, ended, rows
from tests.runtime.run.test_saves import small_disk

CLOCK = Path(__file__).with_name("clock.c")
RANK = 0
DAY_S = 86400


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    with small_disk(tmp_path / "disk", "8m"):
        yield tmp_path / "disk"


def test_a_clock_that_jumps(ground: Ground, tmp_path: Path) -> None:
    """By a day, forwards and back, again and again, for all processes of the run."""
    shim = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(CLOCK), "-ldl"], check=True)
    run = tmp_path / "run"
    words = (*DSC, "train", "tiny.dsc", "--out", str(run), "--steps", str(STEPS), "--hang-timeout", "300")
    ended(progress.run(words, ground.place.folder, os.environ | {"LD_PRELOAD": str(shim)}), 0)
    times = [datetime.fromisoformat(record["time"]).timestamp() for record in (*events(run), *rows(run))]
    assert max(times) - min(times) > DAY_S, "the clock has jumped"
    ground.check_is_straight(run)


def test_logs_on_a_full_disk(ground: Ground, disk: Path, tmp_path: Path) -> None:
    """A rank prints more than the disk of the logs takes."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "logs").symlink_to(disk)
    struck = ground.strike("F", "talk", RANK, run=run)
    assert (struck.code, struck.left) == (0, ()), struck.said
    assert (run / "logs" / "rank_0.log").stat().st_size > 7 << 20
    ground.check_is_straight(run)


def test_a_disk_that_is_full_for_a_while(ground: Ground, disk: Path) -> None:
    """For three steps, in which a save is due: it fails and is reported, rows and events are written later."""
    struck = ground.strike("F", "full disk", RANK, run=disk / "run")
    assert (struck.code, struck.left) == (0, ()), struck.said
    assert "step 6 was not saved, the run goes on to its next save: " in struck.said
    kinds = [event["event"] for event in events(struck.run)]
    assert kinds.count("save_failed") == 1 and kinds.count("save") == 2 and kinds[-1] == "end"
    ground.check_is_straight(struck.run)
