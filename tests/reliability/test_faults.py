"""Faults of ranks in real runs: each is named with its rank and action, soon, nothing is left, and a resume ends with
the bits of a run that nothing disturbed."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

import pytest

from runtime.system.lines import read_rows
from tests.reliability.injected import FAULTS
from tests.reliability.struck import HANG_TIMEOUT_S, Ground
from tests.runtime.run.place import untimed

RANK = 2
FAILS = {  # fault → message
    "SIGSEGV": "killed by SIGSEGV",
    "abort": "killed by SIGABRT",
    "SIGBUS": "killed by SIGBUS",
    "exception": "ValueError: no such expert",
    "EIO": r"OSError: \[Errno 5\] Input/output error",
    "ENOSPC": r"OSError: \[Errno 28\] No space left on device",
    "out of memory": "RuntimeError: .*(alloc|memory).*",
    "_exit(0)": r"left with exit code 0 before its end",
    "_exit(7)": r"left with exit code 7 before its end",
}
AT = ("B", "reduce")
Record = Callable[[str, object], None]


@pytest.mark.parametrize("phase", AT)
@pytest.mark.parametrize("kind", FAILS)
def test_a_failure(ground: Ground, kind: str, phase: str, record_property: Record) -> None:
    struck = ground.strike(phase, kind, RANK)
    assert struck.code == 1, struck.said
    action = re.escape(struck.met.action)
    line = rf"^error: rank {RANK} failed during {action}, step {struck.met.step}: {FAILS[kind]}"
    assert re.search(line, struck.said, re.MULTILINE), struck.said
    assert struck.left == ()
    record_property("detected_s", struck.detected_s)
    ground.check_resumes(struck.run)


@pytest.mark.parametrize("phase", AT)
def test_a_stopped_rank(ground: Ground, phase: str, record_property: Record) -> None:
    struck = ground.strike(phase, "SIGSTOP", RANK)
    assert struck.code == 3, struck.said
    line = rf"^error: rank {RANK} hung during {re.escape(struck.met.action)}, step {struck.met.step}: .* is stopped"
    assert re.search(line, struck.said, re.MULTILINE), struck.said
    assert struck.left == () and struck.detected_s > HANG_TIMEOUT_S
    record_property("hang_after_timeout_s", struck.detected_s - HANG_TIMEOUT_S)
    ground.check_resumes(struck.run)


@pytest.mark.parametrize("phase", AT)
@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT"])
def test_a_rank_that_is_asked_to_stop(ground: Ground, kind: str, phase: str) -> None:
    struck = ground.strike(phase, kind, RANK)
    assert struck.code == 128 + {"SIGTERM": 15, "SIGINT": 2}[kind]
    assert f"stopped: rank {RANK} received {kind}; go on with --resume\n" in struck.said
    assert struck.left == ()
    ground.check_resumes(struck.run)


@pytest.mark.parametrize("phase", AT)
def test_a_slow_rank_is_no_hang(ground: Ground, phase: str) -> None:
    struck = ground.strike(phase, "slow", RANK)
    assert (struck.code, struck.left) == (0, ()), struck.said
    assert untimed(struck.run) == untimed(ground.place.folder / "straight")


@pytest.mark.parametrize("phase", AT)
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_a_restart_recovers(ground: Ground, kind: str, phase: str, record_property: Record) -> None:
    """From the fault to the first step after it; of a hang, from its timeout on."""
    struck = ground.strike(phase, kind, RANK, options=("--restarts", 1))
    assert struck.code == 0, struck.said
    assert untimed(struck.run) == untimed(ground.place.folder / "straight")
    after = [datetime.fromisoformat(row["time"]).timestamp() for row in read_rows(struck.run / "metrics.jsonl").rows]
    recovered_s = next(time for time in after if time > struck.met.time_ns / 1e9 + 0.2) - struck.met.time_ns / 1e9
    record_property("recovered_s", recovered_s - (HANG_TIMEOUT_S if kind == "SIGSTOP" else 0))


def test_every_fault_occurs() -> None:
    assert FAULTS.keys() == {*FAILS, "slow", "talk"} - {"SIGSEGV", "SIGBUS"}
