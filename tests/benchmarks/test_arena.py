"""The arena with fake contestants: turns, measurements, and blame for failures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.speed.arena import IDLE_S, Contestant, Record, compete
from benchmarks.speed.processes import file_parts, tree
from benchmarks.speed.serve import WARM_UP
from tests.benchmarks.fakes import BURNT_S, HELD_BYTES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    return tmp_path / "journal"


def fakes(journal: Path, steps: int = 2, **kinds: str) -> list[Contestant]:
    command = (sys.executable, "-m", "tests.benchmarks.fakes")
    return [Contestant(name, (*command, name, kind, str(journal)), steps) for name, kind in kinds.items()]


def run(journal: Path, rounds: int, steps: int = 2, limit_s: float = 600.0, **kinds: str) -> dict[str, Record]:
    before = tree(os.getpid())  # other tests of this session may keep processes: the interpreter of the kernels
    records = compete(fakes(journal, steps, **kinds), rounds, journal.parent / "logs", round_s=limit_s)
    assert tree(os.getpid()) == before, "no process is left"
    return records


def test_contestants_take_turns_in_each_round(journal: Path) -> None:
    records = run(journal, 3, a="good", b="good", c="good")
    turns = [name for name in "abc" for _ in range(WARM_UP)] + [name for name in "abcabcabc" for _ in range(2)]
    assert journal.read_text().split() == [*turns, *"abc"], "and each once more, for its memory"
    for name, record in records.items():
        assert (record.failed, len(record.rounds), record.info) == ("", 3, {"name": name})
        assert record.losses == [1.0, 2.0, 3.0, 4.0]
        assert record.peak_bytes > 1 << 20


def test_cpu_time_includes_all_threads_and_processes(journal: Path) -> None:
    records = run(journal, 2, burns="burns", parent="parent", good="good")
    for name in ("burns", "parent"):
        assert all(r.processor_s >= 2 * BURNT_S for r in records[name].rounds), (name, records[name].rounds)
    assert all(r.seconds >= 2 * BURNT_S for r in records["burns"].rounds)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("dies", "round 2: ended with exit code 7\n    out of cheese"),
        ("killed", "round 1: ended with SIGKILL"),
    ],
)
def test_a_failed_contestant_is_reported_and_the_others_continue(journal: Path, kind: str, what: str) -> None:
    records = run(journal, 3, limit_s=600.0, a="good", bad=kind, c="good")
    assert records["bad"].failed == what
    assert [len(records[name].rounds) for name in ("a", "c")] == [3, 3]
    assert not records["a"].failed and not records["c"].failed
    assert journal.read_text().split()[-2:] == ["a", "c"], "memory of those that are left"


def test_a_contestant_that_hangs_is_abandoned(journal: Path) -> None:
    records = run(journal, 3, limit_s=2.0, bad="hangs")
    assert records["bad"].failed.endswith(": sent nothing for 2 s") and len(records["bad"].rounds) < 3


def test_a_contestant_that_never_becomes_ready_is_abandoned(journal: Path) -> None:
    records = compete(fakes(journal, mute="mute"), 1, journal.parent / "logs", prepare_s=0.5)
    assert (records["mute"].failed, records["mute"].rounds) == ("preparation: sent nothing for 0.5 s", [])


def test_a_contestant_that_cannot_start_is_reported(journal: Path) -> None:
    records = compete([Contestant("no", (sys.executable, "-c", "raise SystemExit('no spec')"), 1)], 1, journal.parent)
    assert records["no"].failed == "preparation: ended with exit code 1\n    no spec"


def test_no_contestant_runs_out_of_turn(journal: Path) -> None:
    """A contestant with a spinning thread is stopped out of turn; one that cannot be stopped fails."""
    records = run(journal, 2, restless="restless", escaped="escaped", burns="burns")
    assert not records["restless"].failed and records["restless"].idle_processor_s <= IDLE_S
    assert "of CPU time during the turns of others" in records["escaped"].failed
    assert records["escaped"].failed.startswith("round ")
    assert not records["burns"].failed and len(records["burns"].rounds) == 2


def test_peak_memory_is_recorded(journal: Path) -> None:
    records = run(journal, 1, steps=1, good="good", holds="holds")
    extra_bytes = records["holds"].peak_bytes - records["good"].peak_bytes
    assert 0.9 * HELD_BYTES < extra_bytes < 1.5 * HELD_BYTES


def test_file_mappings_count_once_and_anonymous_memory_counts_apart() -> None:
    smaps = """\
7f00-7f10 r-xp 00001000 08:01 42                         /usr/lib/libtorch cpu.so
Size:                900 kB
Rss:                 500 kB
Pss:                  10 kB
Anonymous:           100 kB
7f20-7f30 rw-p 00000000 00:00 0                          [heap]
Rss:                  64 kB
Anonymous:            64 kB
7f30-7f40 rw-p 00000000 00:00 0 
Rss:                  32 kB
Anonymous:            32 kB
7f40-7f50 rw-s 00000000 00:01 7                          /dev/shm/edge (deleted)
Rss:                  16 kB
Anonymous:             0 kB
"""
    assert file_parts(smaps) == [(("/usr/lib/libtorch cpu.so", "00001000"), 400 * 1024)]
