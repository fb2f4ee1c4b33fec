"""SIGKILL in every phase of a run, for each rank and for all: nothing is left behind, no checkpoint is lost, and a
resumed run is bit-identical to an undisturbed one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.reliability.injected import COMMAND, LAUNCHER, PHASES, TRAINING
from tests.reliability.struck import WORLD, Ground

RANKS = {"first": (0,), "middle": (1,), "last": (WORLD - 1,), "all": tuple(range(WORLD))}
ACTION = r"(?:\(?[FBIWE]\d+\.\d+.*|\w+ .*|[a-z ]+)"


@pytest.mark.parametrize("which", RANKS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_kill(ground: Ground, phase: str, which: str, record_property: Callable[[str, object], None]) -> None:
    struck = ground.strike(phase, "SIGKILL", *RANKS[which])
    assert struck.code == 1, struck.said
    named = re.search(rf"^error: rank (\d) failed during ({ACTION}), step (\d+): killed by SIGKILL", struck.said, re.M)
    assert named and int(named[1]) in RANKS[which], struck.said
    if phase in TRAINING and int(named[1]) == struck.met.rank:
        assert (named[2], int(named[3])) == (struck.met.action, struck.met.step)
    assert struck.left == ()
    record_property("detected_s", struck.detected_s)
    ground.check_resumes(struck.run)
    record_property("bit_exact", 1)


@pytest.mark.parametrize("victim", [LAUNCHER, COMMAND], ids=["launcher", "command"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_supervisor(ground: Ground, phase: str, victim: int) -> None:
    """The process that watches the ranks, or the command itself: no process of the run outlives it."""
    struck = ground.strike(phase, "SIGKILL", victim)
    assert struck.code == (-9 if victim == COMMAND else 128 + 9), struck.said
    assert victim == COMMAND or "error: the supervisor of the ranks was killed by SIGKILL" in struck.said
    assert struck.left == ()
    ground.check_resumes(struck.run)
