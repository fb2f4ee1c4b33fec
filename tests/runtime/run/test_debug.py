"""`dsc train --debug` as a person uses it: an edited build, a terminal, `breakpoint()`, and commands typed there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import progress
from tests.progress import Watch, children
from tests.runtime.processes import is_gone, polls, wait_for
from tests.runtime.run.place import DSC, FOUR_RANKS, ONE_RANK, Place, rows

PROMPT = "(Pdb) "


class Terminal:
    """A pseudo-terminal in which `dsc` runs in the foreground."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(self.ours)
        self.said = ""
        self.process = subprocess.Popen(
            [*DSC, *map(str, words)],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def until(self, text: str) -> str:
        """Wait for `text`. Returns the output up to and including it."""
        while text not in self.said:
            assert self._read(), f"no {text!r} in {self.said!r}"
        said, _, self.said = self.said.partition(text)
        return said + text

    def _read(self) -> bool:
        """Wait for output and read it. Returns False if all writers have closed the other end."""
        watch = Watch(self.process.pid)
        while not select.select([self.ours], [], [], 1.0)[0]:
            watch.look(what=f"behind {self.said!r}")
        try:
            data = os.read(self.ours, 65536)
        except OSError:
            return False
        self.said += data.decode().replace("\r\n", "\n")
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def ends(self) -> int:
        """Read all output. Returns the exit code."""
        while self._read():
            pass
        return progress.end(self.process)

    def processes(self) -> list[int]:
        found = [self.process.pid]
        for pid in found:
            found += children(pid)
        return found


@contextmanager
def terminal(folder: Path, *words: object) -> Iterator[Terminal]:
    opened = Terminal(folder, *words)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            os.killpg(opened.process.pid, 9)
            progress.end(opened.process)
        os.close(opened.ours)


def with_breakpoint(place: Place, settings: dict[str, object], rank: int, statement: str) -> Path:
    """A build with a statement inserted after the first one of a pipeline rank's body."""
    build = place.compile(settings)
    stage = build / "stages" / f"rank_{rank}.py"
    text = stage.read_text("utf-8")
    at = text.index("\n    v = c.values(", text.index("\ndef F0(")) + 1
    at = text.index("\n", at) + 1
    stage.write_text(f"{text[:at]}    {statement}\n{text[at:]}", "utf-8")
    return build


def test_one_rank_at_a_breakpoint(place: Place) -> None:
    with_breakpoint(place, ONE_RANK, 0, "print('forward of', a); a == 0 and breakpoint(); v.seen = a; del v.seen")
    assert "is not the file that was compiled" in place.dsc("train", "build/tiny", code=2).stderr
    with terminal(place.folder, "train", "build/tiny", "--debug", "--steps", 1) as typed:
        said = typed.until(PROMPT)
        assert "edited: build/tiny/stages/rank_0.py is not the file that was compiled\n" in said
        assert "debug: rank 0 of 1 has the terminal; nothing hangs, and no checkpoint is saved\n" in said
        assert "forward of 0\n" in said
        assert f"> {place.folder}/build/tiny/stages/rank_0.py(" in said and "breakpoint(); v.seen = a" in said
        typed.type("p a, sorted(vars(v))\n")
        assert "(0, [])" in typed.until(PROMPT)
        typed.type("n\nn\np v.tokens.shape\n")
        typed.until("torch.Size([16])")
        typed.until(PROMPT)
        typed.type("c\n")
        typed.until("forward of 7\n")
        assert typed.ends() == 0, typed.said
        assert "Traceback" not in typed.said
    run = place.folder / "runs" / "tiny-debug"
    assert [row["step"] for row in rows(run)] == [1]
    assert not (run / "checkpoints").exists() and not (run / "report.html").exists()
    assert "rank_0.py is not the file that was compiled" in (run / "debug.txt").read_text("utf-8")
    done = place.dsc("train", "tiny.dsc", "--out", run, code=2)
    assert "build/tiny/stages/rank_0.py is not" in done.stderr
    place.compile(ONE_RANK)
    done = place.dsc("train", "tiny.dsc", "--out", "runs/tiny-debug", code=2)
    assert done.stderr == "error: runs/tiny-debug holds a debug run: name another folder with --out\n"
    place.dsc("train", "tiny.dsc", "--steps", 1)
    done = place.dsc("train", "build/tiny", "--debug", "--out", "runs/tiny", code=2)
    assert "runs/tiny holds a run: name another folder for the debug run" in done.stderr


@pytest.mark.parametrize("leave", ["q\n", "\x03"])
def test_one_of_four_ranks(place: Place, leave: str) -> None:
    """Quitting the debugger, or Ctrl-C at its prompt, ends all ranks and restores the terminal."""
    with_breakpoint(place, FOUR_RANKS, 1, "breakpoint()")
    with terminal(place.folder, "train", "build/tiny", "--debug", "--debug-rank", 3, "--hang-timeout", 1) as typed:
        typed.until(PROMPT)
        started = typed.processes()
        assert len(started) == 6, "the command, the launcher, four ranks"
        looked = polls(started[1])
        wait_for(lambda: polls(started[1]) > looked + 20, "looks of the launcher, past the hang timeout, which is off")
        typed.type("p c.rank\n")
        typed.until("1\n")
        typed.until(PROMPT)
        typed.type(leave)
        assert typed.ends() == (0 if leave == "q\n" else 130), typed.said
        assert "the debugger was left, and the run has ended\n" in typed.said
        assert "Traceback" not in typed.said and "failed" not in typed.said
        wait_for(lambda: all(map(is_gone, started)), "the end of every process")
        assert termios.tcgetattr(typed.ours) == typed.before
    run = place.folder / "runs" / "tiny-debug"
    assert not (run / "checkpoints").exists() and rows(run) == []
    assert "had the terminal" in (run / "logs" / "rank_3.log").read_text("utf-8")


def test_options_that_exclude_debug(place: Place) -> None:
    place.compile(ONE_RANK)
    for words, said in (
        (("--debug-rank", 1), "--debug-rank 1: this build has 1 ranks, the last is 0"),
        (("--resume",), "--debug starts at step 1"),
        (("--profile",), "--debug starts at step 1"),
        (("--debug-rank", "x"), "'x' is not a rank"),
    ):
        assert said in place.dsc("train", "build/tiny", "--debug", *words, code=2).stderr
    assert not (place.folder / "runs").exists()
