"""The thread of an exporter: what it could not send it sends later, and what is wrong with it is said once."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.contract import MetricsSinks, WatchFacts
from runtime.observe.events import Events
from runtime.observe.sinks.sink import Opened, Point, Sink, numbers
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import RunState
from runtime.system.lines import to_stderr
from runtime.system.outcome import printable
from runtime.system.regular_files import read_bytes, write

FILE = "exports.json"  # of a run folder: how far each exporter is, and under which key it knows the run
MOST_AT_ONCE = 500  # items that are sent together
MOST_KEPT = 100_000  # items that wait for an exporter that does not work
LATE_S = 30.0  # after which it is said that an exporter does not answer: W&B alone waits 90 s, and longer in a run
RETRY_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # from one failure to the next try
INSTALL = "pip install 'dsc-trainer[metrics]'"
ALONE = ("wandb", "mlflow")  # libraries that are no part of it, by the name of their exporter


class Worker(threading.Thread):
    """Feeds one sink. `put` never waits. `since`: when this start of the run began."""

    def __init__(
        self, name: str, sink: Sink, run: Path, watch: WatchFacts, exports: Exports, events: Events, since: str = ""
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._sink, self._exports, self._events = sink, exports, events
        done = exports.of(name)
        state = RunState(run, watch, since)
        self._opened = Opened(run, watch.metrics or MetricsSinks(), state, done.get("key"), done.get("step", 0))
        self._queue: queue.SimpleQueue[Sequence[FollowedItem] | None] = queue.SimpleQueue()
        self._waiting: deque[FollowedItem] = deque()
        self._pending: list[Point] = []  # were not sent
        self._dropped, self._failures = 0, 0
        self._is_open, self._is_told, self._is_given_up = False, False, False
        self._ends = threading.Event()
        self._busy_since: float | None = None  # time.monotonic() when the library was asked for what it is at
        self._done: tuple[int, str] = (done.get("step", 0), done.get("time", ""))  # of an earlier start
        self._sent_to = self._done[1]  # the greatest time of all that was sent

    def put(self, items: Sequence[FollowedItem]) -> None:
        """Give items, in their order."""
        self._queue.put(items)

    def end(self) -> None:
        """Ask for the end, behind what was put. One more try is made of what does not work."""
        self._ends.set()
        self._queue.put(None)

    def run(self) -> None:
        """Export until the end, or until it is clear that this cannot work."""
        over = False
        while not over:
            over = self._next(waits=self._is_open and not self._has_work)
            works = self._try(self._work)
            if self._is_given_up:
                return
            if not works and not over:
                self._ends.wait(RETRY_S[min(self._failures, len(RETRY_S)) - 1])
        if self._is_open:
            self._try(self._sink.close)

    def say_if_late(self) -> None:
        """Say, once, that the library has not come back for long. For another thread to call now and then."""
        since = self._busy_since
        if since is not None and not self._is_told and time.monotonic() - since > LATE_S:
            self.fail(f"it has not answered for {LATE_S:g} s")

    @property
    def works(self) -> bool:
        """Whether it did not fail the last time."""
        return not self._failures

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._pending)

    def _next(self, *, waits: bool) -> bool:
        """Take what was put; `waits`: for the first of it. Whether the end was asked for."""
        try:
            found = self._queue.get(block=waits)
            while found is not None:
                self._waiting.extend(found)
                while self._failures and len(self._waiting) > MOST_KEPT:
                    self._opened.state.take(self._waiting.popleft())
                    self._dropped += 1
                found = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _work(self) -> None:
        if not self._is_open:
            self._open()
        while self._is_open and self._has_work:
            self._send()

    def _open(self) -> None:
        try:
            self._sink.open(self._opened)
        except ImportError as error:
            install = f"pip install {self.name}" if self.name in ALONE else INSTALL
            self.fail(f"{error.name or error} is not installed: {install}")
            self._is_given_up = True
            return
        self._is_open = True
        self._exports.note(self.name, key=self._sink.key)
        if not self._is_told:  # else it is said when the numbers are there
            self._events.write("export", exporter=self.name, where=printable(self._sink.where))

    def _send(self) -> None:
        if not self._pending:
            self._pending = [self._point(self._waiting.popleft()) for _ in range(min(MOST_AT_ONCE, len(self._waiting)))]
        points = [each for each in self._pending if not self._was_sent(each.item)]
        self._sink.send(points)
        self._pending = []
        if self._is_told:
            lost = f"; {self._dropped:,} rows and events are lost" if self._dropped else ""
            self._is_told, self._dropped = False, 0
            self._events.write("export", exporter=self.name, where=f"{printable(self._sink.where)} again{lost}")
        if points:
            rows = [each.item.step for each in points if each.item.kind == "row"]
            self._sent_to = max(self._sent_to, *(each.item.time for each in points))
            self._exports.note(self.name, step=rows[-1] if rows else None, time=self._sent_to)

    def _point(self, item: FollowedItem) -> Point:
        self._opened.state.take(item)
        return Point(item, numbers(item.fields, self._opened.state) if item.kind == "row" else {})

    def _was_sent(self, item: FollowedItem) -> bool:
        """Whether an earlier start of the run sent it."""
        step, time = self._done
        return bool(time) and item.time <= time and (item.kind != "row" or item.step <= step)

    def _try(self, action: Callable[[], None]) -> bool:
        """Do it; whether it did not fail. The first failure in a row is said."""
        self._busy_since = time.monotonic()
        try:
            action()
        except Exception as error:
            self._failures += 1
            self.fail(str(error) or type(error).__name__)
            return False
        finally:
            self._busy_since = None
        self._failures = 0
        return True

    def fail(self, reason: str) -> None:
        """Say why numbers are not exported: always in the log, and once in a row as an event."""
        first, *_ = reason.strip().splitlines() or [""]
        to_stderr(f"{self.name}: {printable(reason)}")
        if not self._is_told:
            self._is_told = True
            self._events.write("export_failed", exporter=self.name, reason=printable(first))


class Exports:
    """exports.json: {"tensorboard": {"step": 57, "time": …}, "wandb": {"key": …, …}}. What cannot be written is not."""

    def __init__(self, run: Path) -> None:
        self._path, self._lock = run / FILE, threading.Lock()
        self._written_s = 0.0
        try:
            found = json.loads(read_bytes(self._path))
        except (OSError, ValueError, RecursionError):
            found = {}
        sound = isinstance(found, dict) and all(isinstance(each, dict) for each in found.values())
        self._found: dict[str, dict[str, Any]] = found if sound else {}

    def of(self, name: str) -> dict[str, Any]:
        """What is noted of an exporter."""
        kinds = {"step": int, "time": str, "key": str}
        return {k: v for k, v in self._found.get(name, {}).items() if k in kinds and type(v) is kinds[k]}

    def note(self, name: str, **facts: Any) -> None:
        """Note something of an exporter. A reader sees the file as it was or as it will be."""
        if not any(value is not None for value in facts.values()):
            return
        with self._lock:
            self._found[name] = {**self.of(name), **{k: v for k, v in facts.items() if v is not None}}
            try:
                write(self._path, json.dumps(self._found, indent=1) + "\n")
            except OSError as error:
                if time.monotonic() - self._written_s > RETRY_S[-1]:
                    self._written_s = time.monotonic()
                    to_stderr(f"{self._path}: {error.strerror}")
