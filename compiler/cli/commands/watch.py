"""`dsc watch RUN`: follow a run in another terminal, or on a cluster whose run folder is visible here.

dsc watch runs/quickstart                 a live view until the run ends: step, loss, speed, load, memory, checkpoints
dsc watch runs/quickstart --format json   every row and event from the start, one line each
dsc watch --dashboard > dsc.json          a Grafana dashboard for the series of `metrics { prometheus }`
dsc watch --rules > dsc.rules.yml         Prometheus alert rules for the same series

If the output is not a terminal, a line is printed every 5 s. For a run that has ended, the last state is shown. If no
process holds the lock of the run folder and nothing is written for some time, the processes count as killed.

Exit codes: 0 the run finished · 1 a rank failed, or its processes were killed · 2 there is no such run · 3 the run hung
· 128 + signal: the run was asked to stop · 130 interrupted here
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from compiler.cli.commands.common import report_error
from runtime.observe.watch.dashboard import dashboard, rules
from runtime.observe.watch.follow import FollowedItem, Follower
from runtime.observe.watch.run_state import RunState, is_held
from runtime.observe.watch.view import event_line, has_blocks, line, panel
from runtime.system.outcome import printable

POLL_S = 0.25
PLAIN_EVERY_S = 5.0
SILENT_S = 10.0  # after this time without new rows, and without the lock, the processes count as killed
SILENT_STEPS = 5  # at least the time of this many steps
BETWEEN_PHASES_S = 600.0  # time to compile the next phase; meanwhile no process holds the lock
EXIT_KILLED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, nargs="?", help="run folder, written by dsc train")
    parser.add_argument("--wait", action="store_true", help="wait for a run that has not started")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")
    parser.add_argument("--dashboard", action="store_true", help="print a Grafana dashboard, and exit")
    parser.add_argument("--rules", action="store_true", help="print Prometheus alert rules, and exit")


def run(args: argparse.Namespace) -> int:
    """Follow the run to its end. Returns the exit code."""
    if args.dashboard or args.rules:
        if args.run_folder or (args.dashboard and args.rules):
            return report_error(
                "--dashboard and --rules each print one file, and take no run",
                "give only one of the three",
                args.format,
            )
        print(json.dumps(dashboard(), indent=1) if args.dashboard else rules(), end="" if args.rules else "\n")
        return 0
    if args.run_folder is None:
        return report_error("which run?", "name its folder: `dsc watch runs/quickstart`", args.format)
    folder = args.run_folder
    if not args.wait and not any((folder / name).exists() for name in ("metrics.jsonl", "events.jsonl")):
        state = "has no run" if folder.is_dir() else "does not exist"
        hint = "`dsc train` writes run folders; --wait waits for a run that has not started"
        return report_error(f"{printable(str(folder))} {state}", hint, args.format)
    return RunWatcher(folder, _view(args.format)).watch_to_end()


def _view(output_format: str) -> JsonView | PlainView | PanelView:
    if output_format == "json":
        return JsonView()
    console = Console(highlight=False)
    return PanelView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView()


class RunWatcher:
    """Follows a run and shows it in a view."""

    def __init__(self, folder: Path, view: JsonView | PlainView | PanelView) -> None:
        self.folder, self.view = folder, view
        self.state = RunState(folder)
        self.follower = Follower(folder) if isinstance(view, JsonView) else Follower.of_recent(folder)
        self.last_item_s = time.monotonic()

    def watch_to_end(self) -> int:
        """Follow the run until it ends. Returns its exit code."""
        is_first = True
        with self.view.open():
            while True:
                items = self.follower.poll()
                for item in items:
                    self.state.take(item)
                if items:
                    self.last_item_s = time.monotonic()
                code = self._exit_code_of_ended_run(is_first=is_first)
                self.view.show(items, self.state, is_first=is_first, is_last=code is not None)
                if code is not None:
                    return code
                is_first = False
                time.sleep(POLL_S)

    def _exit_code_of_ended_run(self, *, is_first: bool) -> int | None:
        """The exit code of the run if it has ended, else None."""
        state = self.state
        if state.end is not None and state.is_over:
            return _exit_code(state.end)
        if not state.counts and not state.row:
            return None
        allowed_silence_s = (
            BETWEEN_PHASES_S if state.end is not None else max(SILENT_S, SILENT_STEPS * (state.pace_s or 0.0))
        )
        allowed_silence_s = (
            0.0 if is_first and self._age_s() > allowed_silence_s else allowed_silence_s
        )  # it was silent before this command began
        if time.monotonic() - self.last_item_s < allowed_silence_s or is_held(self.folder):
            return None
        if state.end is not None:  # a phase ended, and the next one did not start
            return _exit_code(state.end)
        self.view.say("the run wrote no end, and no process holds the lock of its folder: its processes were killed")
        return EXIT_KILLED

    def _age_s(self) -> float:
        """Seconds since the run last wrote a row or an event."""
        times = [
            path.stat().st_mtime for name in ("metrics.jsonl", "events.jsonl") if (path := self.folder / name).exists()
        ]
        return time.time() - max(times, default=0.0)


def _exit_code(end: Mapping[str, Any]) -> int:
    code = end.get("exit_code")
    return code if isinstance(code, int) else EXIT_KILLED


class JsonView:
    """Prints each row and each event as a line of JSON."""

    def open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, items: Iterable[FollowedItem], state: RunState, *, is_first: bool, is_last: bool) -> None:
        for item in items:
            print(json.dumps({"kind": item.kind, "fields": item.fields}))
        sys.stdout.flush()

    def say(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr)


class PlainView:
    """Prints lines of text: for the first and the last step, for a step every few seconds, and for events."""

    def __init__(self) -> None:
        self.shown_s, self.step = -PLAIN_EVERY_S, 0

    def open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, items: Iterable[FollowedItem], state: RunState, *, is_first: bool, is_last: bool) -> None:
        for text in _event_lines(items, is_first=is_first):
            print(text)
        step, now_s = state.row.get("step", 0), time.monotonic()
        if step and step != self.step and (is_last or now_s - self.shown_s >= PLAIN_EVERY_S):
            self.shown_s, self.step = now_s, step
            print(line(state, state.last_step, left_s=None if is_last else state.left_s))
        if is_last and is_first and state.end is not None:
            print(event_line(state.end))
        sys.stdout.flush()

    def say(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr)


class PanelView:
    """The live view on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def open(self) -> AbstractContextManager[object]:
        return self.live

    def show(self, items: Iterable[FollowedItem], state: RunState, *, is_first: bool, is_last: bool) -> None:
        for text in _event_lines(items, is_first=is_first):
            self.console.print(Text(text))
        waiting = "" if state.row else "waiting for the first step"
        note = (event_line(state.end) if state.end is not None else None) or waiting
        self.live.update(panel(state, state.last_step, note=note, blocks=has_blocks(self.console)), refresh=True)

    def say(self, text: str) -> None:
        self.console.print(Text(text))


def _event_lines(items: Iterable[FollowedItem], *, is_first: bool) -> list[str]:
    """A line for each event since the last poll. Events from before the first poll are not shown."""
    if is_first:
        return []
    return [text for item in items if item.kind == "event" and (text := event_line(item.fields))]
