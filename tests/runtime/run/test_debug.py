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

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.controller_fd, terminal_fd = pty.openpty()
        self.initial_settings = termios.tcgetattr(self.controller_fd)
        self.unread = ""
        self.process = subprocess.Popen(
            [*DSC, *map(str, arguments)],
            cwd=folder,
            stdin=terminal_fd,
            stdout=terminal_fd,
            stderr=terminal_fd,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal_fd)

    def read_until(self, text: str) -> str:
        """Wait for `text`. Returns the unread output up to and including it."""
        while text not in self.unread:
            assert self._read(), f"no {text!r} in {self.unread!r}"
        before, _, self.unread = self.unread.partition(text)
        return before + text

    def _read(self) -> bool:
        """Wait for output and read it. Returns False if all writers have closed the other end."""
        watch = Watch(self.process.pid)
        while not select.select([self.controller_fd], [], [], 1.0)[0]:
            watch.look(what=f"after {self.unread!r}")
        try:
            data = os.read(self.controller_fd, 65536)
        except OSError:
            return False
        self.unread += data.decode().replace("\r\n", "\n")
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self.controller_fd, text.encode())

    def wait_for_exit(self) -> int:
        """Read all output until the process has ended. Returns the exit code."""
        while self._read():
            pass
        return progress.end(self.process)

    def processes(self) -> list[int]:
        pids = [self.process.pid]
        for pid in pids:
            pids += children(pid)
        return pids


@contextmanager
def terminal(folder: Path, *arguments: object) -> Iterator[Terminal]:
    opened = Terminal(folder, *arguments)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            os.killpg(opened.process.pid, 9)
            progress.end(opened.process)
        os.close(opened.controller_fd)


def with_breakpoint(place: Place, settings: dict[str, object], rank: int, statement: str) -> Path:
    """Compile a build, and insert a statement after the first one of `F0` in the module of a pipeline rank."""
    build = place.compile(settings)
    stage = build / "stages" / f"rank_{rank}.py"
    text = stage.read_text("utf-8")
    offset = text.index("\n    v = c.values(", text.index("\ndef F0(")) + 1
    offset = text.index("\n", offset) + 1
    stage.write_text(f"{text[:offset]}    {statement}\n{text[offset:]}", "utf-8")
    return build


def test_a_breakpoint_opens_pdb_in_the_terminal_and_the_run_goes_on(place: Place) -> None:
    with_breakpoint(place, ONE_RANK, 0, "print('forward of', a); a == 0 and breakpoint(); v.seen = a; del v.seen")
    with terminal(place.folder, "train", "build/tiny", "--debug", "--steps", 1) as opened_terminal:
        printed = opened_terminal.read_until(PROMPT)
        assert "edited: build/tiny/stages/rank_0.py is not the file that was compiled\n" in printed
        assert "debug: rank 0 of 1 has the terminal; nothing hangs, and no checkpoint is saved\n" in printed
        assert "forward of 0\n" in printed
        assert f"> {place.folder}/build/tiny/stages/rank_0.py(" in printed and "breakpoint(); v.seen = a" in printed
        opened_terminal.type("p a, sorted(vars(v))\n")
        assert "(0, [])" in opened_terminal.read_until(PROMPT)
        opened_terminal.type("n\nn\np v.tokens.shape\n")
        opened_terminal.read_until("torch.Size([16])")
        opened_terminal.read_until(PROMPT)
        opened_terminal.type("c\n")
        opened_terminal.read_until("forward of 7\n")
        assert opened_terminal.wait_for_exit() == 0, opened_terminal.unread
        assert "Traceback" not in opened_terminal.unread
    run = place.folder / "runs" / "tiny-debug"
    assert [row["step"] for row in rows(run)] == [1]
    assert not (run / "checkpoints").exists() and not (run / "report.html").exists()
    assert "rank_0.py is not the file that was compiled" in (run / "debug.txt").read_text("utf-8")


def test_an_edited_build_trains_only_with_debug(place: Place) -> None:
    with_breakpoint(place, ONE_RANK, 0, "pass")
    assert "is not the file that was compiled" in place.dsc("train", "build/tiny", code=2).stderr


def test_a_debug_run_and_another_run_do_not_share_a_folder(place: Place) -> None:
    with_breakpoint(place, ONE_RANK, 0, "pass")
    place.dsc("train", "build/tiny", "--debug", "--steps", 1)
    run = place.folder / "runs" / "tiny-debug"
    result = place.dsc("train", "tiny.dsc", "--out", run, code=2)
    assert "build/tiny/stages/rank_0.py is not" in result.stderr
    place.compile(ONE_RANK)
    result = place.dsc("train", "tiny.dsc", "--out", "runs/tiny-debug", code=2)
    assert result.stderr == "error: runs/tiny-debug holds a debug run: name another folder with --out\n"
    place.dsc("train", "tiny.dsc", "--steps", 1)
    result = place.dsc("train", "build/tiny", "--debug", "--out", "runs/tiny", code=2)
    assert "runs/tiny holds a run: name another folder for the debug run" in result.stderr


@pytest.mark.parametrize("keys", ["q\n", "\x03"])
def test_leaving_the_debugger_of_one_rank_ends_all_ranks(place: Place, keys: str) -> None:
    """Quitting the debugger, or Ctrl-C at its prompt, ends all ranks and restores the terminal."""
    with_breakpoint(place, FOUR_RANKS, 1, "breakpoint()")
    with terminal(
        place.folder, "train", "build/tiny", "--debug", "--debug-rank", 3, "--hang-timeout", 1
    ) as opened_terminal:
        opened_terminal.read_until(PROMPT)
        started = opened_terminal.processes()
        assert len(started) == 6, "the command, the launcher, four ranks"
        # The hang timeout would have passed by then, but --debug turns it off.
        polls_before = polls(started[1])
        wait_for(lambda: polls(started[1]) > polls_before + 20, "20 more polls of the launcher")
        opened_terminal.type("p c.rank\n")
        opened_terminal.read_until("1\n")
        opened_terminal.read_until(PROMPT)
        opened_terminal.type(keys)
        assert opened_terminal.wait_for_exit() == (0 if keys == "q\n" else 130), opened_terminal.unread
        assert "the debugger was left, and the run has ended\n" in opened_terminal.unread
        assert "Traceback" not in opened_terminal.unread and "failed" not in opened_terminal.unread
        wait_for(lambda: all(map(is_gone, started)), "the end of every process")
        assert termios.tcgetattr(opened_terminal.controller_fd) == opened_terminal.initial_settings
    run = place.folder / "runs" / "tiny-debug"
    assert not (run / "checkpoints").exists() and rows(run) == []
    assert "had the terminal" in (run / "logs" / "rank_3.log").read_text("utf-8")


def test_options_that_debug_excludes_are_refused(place: Place) -> None:
    place.compile(ONE_RANK)
    for words, message in (
        (("--debug-rank", 1), "--debug-rank 1: the last rank of this build is 0"),
        (("--resume",), "--debug starts at step 1"),
        (("--profile",), "--debug starts at step 1"),
        (("--debug-rank", "x"), "'x' is not a rank"),
    ):
        assert message in place.dsc("train", "build/tiny", "--debug", *words, code=2).stderr
    assert not (place.folder / "runs").exists()
