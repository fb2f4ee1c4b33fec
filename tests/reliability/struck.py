"""A real `dsc train` with an injected fault: its messages, their delay, and leftovers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.reliability.injected import Fault, Note
from tests.runtime.processes import listening, open_files, wait_for
from tests.runtime.run.place import FOUR_RANKS, Place, Running, bits, saved, untimed

STEPS = 9
WORLD = 4
HANG_TIMEOUT_S = 5


@dataclass(frozen=True)
class Struck:
    """`detected_s`: from the fault to the message about it. `left`: ports and shared memory that still exist
    after all processes have ended."""

    run: Path
    code: int
    said: str
    met: Note
    detected_s: float
    left: tuple[str, ...]


@dataclass(frozen=True)
class Ground:
    """A place with a compiled spec of four ranks, and `straight`, an undisturbed run of it."""

    place: Place

    @classmethod
    def made(cls, place: Place) -> Ground:
        place.compile(dict(FOUR_RANKS, keep=1))
        place.dsc("train", "tiny.dsc", "--out", "straight", "--steps", STEPS)
        return cls(place)

    def strike(
        self, phase: str, kind: str, *victims: int, options: Sequence[object] = (), run: Path | None = None
    ) -> Struck:
        """Train, in `run` or beside `straight`, until the fault has happened and all processes have ended."""
        name = " ".join(map(str, (phase, kind, *victims, *options)))
        run = run or self.place.folder / name
        note = run.with_name(f"{run.name}.note")
        words = ("train", "tiny.dsc", "--out", run, "--steps", STEPS, "--hang-timeout", HANG_TIMEOUT_S, *options)
        fault = mock.patch.dict(os.environ, Fault(phase, kind, victims, str(note)).environment())
        with fault, self.place.started(*words) as running:
            resources = _held_until_end(running)
            code = running.ends()
        reached = Note.read(note)
        said_ns = (self.place.folder / "stderr").stat().st_mtime_ns
        leaks = (
            *(resources & listening()),
            *(name for name in resources if name.startswith("/") and Path(name).exists()),
        )
        return Struck(run, code, running.stderr(), reached, (said_ns - reached.time_ns) / 1e9, leaks)

    def check_resumes(self, run: Path) -> None:
        """Check that `--resume` continues from the published checkpoint, bit-identical to the undisturbed run."""
        promised = [event["step"] for event in events(run) if event["event"] == "save"]
        published = (run / "checkpoints").exists() and list((run / "checkpoints").glob("step-*"))
        assert not promised or saved(run).step >= promised[-1], "a checkpoint was lost"
        assert not published or not saved(run).refused
        self.place.dsc("train", "tiny.dsc", "--out", run, "--resume", "--steps", STEPS)
        self.check_is_straight(run)

    def check_is_straight(self, run: Path) -> None:
        """Check that rows, weights, state and position of a run equal the undisturbed one."""
        straight = self.place.folder / "straight"
        assert untimed(run) == untimed(straight)
        checkpoint, expected = saved(run, STEPS), saved(straight, STEPS)
        assert bits(checkpoint) == bits(expected)
        assert {name: checkpoint.meta[name] for name in ("position", "loads")} == {
            name: expected.meta[name] for name in ("position", "loads")
        }
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["LATEST", f"step-{STEPS:08d}"]


def events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _held_until_end(running: Running) -> set[str]:
    """Ports that processes of a run listen on, and files of shared memory that they have, seen until it ends."""
    resources = set[str]()

    def ended() -> bool:
        for pid in running.seen():
            resources.update(listening(pid), (name for name in open_files(pid) if name.startswith("/dev/shm/")))
        return running.process.poll() is not None

    wait_for(ended, "the end of the command")
    return resources
