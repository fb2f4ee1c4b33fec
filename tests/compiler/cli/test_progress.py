"""Progress messages of commands: updated in place on a terminal, occasional lines in a log."""

from __future__ import annotations

import io
import re
import sys
from threading import Event, active_count

import pytest

from compiler.cli.commands import common, plan
from compiler.cli.commands.common import progress
from compiler.cli.main import main
from tests.compiler.cli.test_schedule import QUICK, Terminal


class Log(io.StringIO):
    """A stream that records its text, and signals complete lines."""

    def __init__(self) -> None:
        super().__init__()
        self.said = Event()

    def write(self, text: str) -> int:
        done = super().write(text)
        if text.endswith("\n"):
            self.said.set()
        return done


def test_on_a_terminal_each_message_replaces_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    tell = progress("plan")
    for text in ("one", "two", ""):
        tell(text)
    assert terminal.getvalue() == "\r\x1b[Kplan: one\r\x1b[Kplan: two\r\x1b[K"


def test_a_log_repeats_a_long_step_without_news(monkeypatch: pytest.MonkeyPatch) -> None:
    log, before = Log(), active_count()
    monkeypatch.setattr(sys, "stderr", log)
    tell = progress("plan", (0.0, 1e6))
    tell("one")
    assert log.said.wait(60)
    tell("two")  # not printed: the next line is not due yet
    tell("")
    tell("")
    assert log.getvalue() == "plan: one\n" and active_count() == before
    log.said.clear()
    tell("three")  # starts again
    assert log.said.wait(60)
    tell("")
    assert log.getvalue() == "plan: one\nplan: three\n"


def test_an_error_during_the_work_ends_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread outlives the command, and an error does not follow progress text on the same line."""

    def fails(_: object) -> int:
        tell = progress("plan", (1e6,))
        tell("one")
        return common.report_error("the disk is full") if sys.stderr.isatty() else 1 // 0

    monkeypatch.setattr(plan, "run", fails)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["plan", "any.dsc"]) == common.EXIT_SPEC
    assert terminal.getvalue().startswith("\r\x1b[Kplan: one\r\x1b[K") and "one" not in terminal.getvalue()[15:]
    before = active_count()
    monkeypatch.setattr(sys, "stderr", Log())
    with pytest.raises(ZeroDivisionError):
        main(["plan", "any.dsc"])
    assert active_count() == before


def test_repeated_messages_show_the_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    tell = progress("compile", (0.0, 0.05))
    tell("one")
    while log.getvalue().count("\n") < 3:
        assert log.said.wait(60)
        log.said.clear()
    tell("two")
    while "two" not in log.getvalue():
        assert log.said.wait(60)
        log.said.clear()
    tell("")
    first, *again, last = [line for line in log.getvalue().splitlines() if not line.startswith("compile: two, ")]
    assert (first, last) == ("compile: one", "compile: two") and len(again) >= 2
    assert all(re.fullmatch(r"compile: one, for \d+ s so far", line) for line in again)


def test_short_work_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := Log())
    tell = progress("plan", (1e6,))
    tell("one")
    tell("")
    assert log.getvalue() == ""


def test_a_closed_stderr_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    tell = progress("plan", (0.0,))
    tell("one")
    tell("")


def test_plan_reports_what_it_searches_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts: list[str] = []
    for module in (common, plan):
        monkeypatch.setattr(module, "progress", lambda command: texts.append)
    words = ("-s", "train.micro_batch=auto", "-s", "cluster.node.device.memory=100MB")
    assert main(["plan", QUICK, *words, "--format", "json"]) == 0
    assert texts[0].startswith("looking for the best of ")
    lacking = [text for text in texts if text.endswith("looking for edits that make it fit")]
    assert [bool(re.match(r"\d.* [MG]iB too much on pipeline rank \d:", text)) for text in lacking] == [True]
    assert texts.count("") == 2 and texts[-1] == ""
    capsys.readouterr()
