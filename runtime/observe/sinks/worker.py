"""The thread of an exporter: it retries what it could not send, and reports an error once."""

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
from runtime.observe.sinks.sink import Point, Sink, SinkContext, numbers
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import RunState
from runtime.system.lines import print_to_stderr
from runtime.system.outcome import printable
from runtime.system.regular_files import read_bytes, write

FILE = "exports.json"  # in the run folder: the progress of each exporter, and its key of the run
MOST_AT_ONCE = 500  # items per call
MOST_KEPT = 100_000  # waiting items of a failing exporter
LATE_S = 30.0  # until an exporter is reported as not answering; W&B itself waits 90 s or longer
RETRY_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # delays after consecutive failures
INSTALL = "pip install 'dsc-trainer[metrics]'"
ALONE = ("wandb", "mlflow")  # exporters whose libraries are not in that extra


class Worker(threading.Thread):
    """Feeds one sink. `add` never waits. `since`: start time of this start of the run."""

    def __init__(
        self, name: str, sink: Sink, run: Path, watch: WatchFacts, exports: Exports, events: Events, since: str = ""
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._sink, self._exports, self._events = sink, exports, events
        earlier = exports.entries_of(name)
        state = RunState(run, watch, since)
        self._opened = SinkContext(
            run, watch.metrics or MetricsSinks(), state, earlier.get("key"), earlier.get("step", 0)
        )
        self._queue: queue.SimpleQueue[Sequence[FollowedItem] | None] = queue.SimpleQueue()
        self._waiting: deque[FollowedItem] = deque()
        self._pending: list[Point] = []  # not sent yet
        self._dropped, self._failures = 0, 0
        self._is_open, self._is_told, self._is_given_up = False, False, False
        self._ends = threading.Event()
        self._busy_since: float | None = None  # time.monotonic() at the start of the current call of the library
        self._done: tuple[int, str] = (earlier.get("step", 0), earlier.get("time", ""))  # reached by earlier starts
        self._sent_to = self._done[1]  # latest time of all sent items

    def add(self, items: Sequence[FollowedItem]) -> None:
        """Add items, in order."""
        self._queue.put(items)

    def end(self) -> None:
        """Ask the thread to end after the added items. A failing exporter gets one more try."""
        self._ends.set()
        self._queue.put(None)

    def run(self) -> None:
        """Export until the end, or until the exporter has to be given up."""
        is_over = False
        while not is_over:
            is_over = self._next(waits=self._is_open and not self._has_work)
            works = self._try(self._work)
            if self._is_given_up:
                return
            if not works and not is_over:
                self._ends.wait(RETRY_S[min(self._failures, len(RETRY_S)) - 1])
        if self._is_open:
            self._try(self._sink.close)

    def say_if_late(self) -> None:
        """Report, once, that a call of the library takes too long. Another thread calls this regularly."""
        since = self._busy_since
        if since is not None and not self._is_told and time.monotonic() - since > LATE_S:
            self.fail(f"it has not answered for {LATE_S:g} s")

    @property
    def is_working(self) -> bool:
        """Whether the last try succeeded."""
        return not self._failures

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._pending)

    def _next(self, *, waits: bool) -> bool:
        """Take the added items; `waits`: block for the first. Return whether the end was requested."""
        try:
            items = self._queue.get(block=waits)
            while items is not None:
                self._waiting.extend(items)
                while self._failures and len(self._waiting) > MOST_KEPT:
                    self._opened.state.take(self._waiting.popleft())
                    self._dropped += 1
                items = self._queue.get_nowait()
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
        if not self._is_told:  # else it is reported when the numbers are sent
            self._events.write("export", exporter=self.name, where=printable(self._sink.destination))

    def _send(self) -> None:
        if not self._pending:
            self._pending = [self._point(self._waiting.popleft()) for _ in range(min(MOST_AT_ONCE, len(self._waiting)))]
        points = [point for point in self._pending if not self._was_sent(point.item)]
        self._sink.send(points)
        self._pending = []
        if self._is_told:
            lost = f"; {self._dropped:,} rows and events are lost" if self._dropped else ""
            self._is_told, self._dropped = False, 0
            self._events.write("export", exporter=self.name, where=f"{printable(self._sink.destination)} again{lost}")
        if points:
            rows = [point.item.step for point in points if point.item.kind == "row"]
            self._sent_to = max(self._sent_to, *(point.item.time for point in points))
            self._exports.note(self.name, step=rows[-1] if rows else None, time=self._sent_to)

    def _point(self, item: FollowedItem) -> Point:
        self._opened.state.take(item)
        return Point(item, numbers(item.fields, self._opened.state) if item.kind == "row" else {})

    def _was_sent(self, item: FollowedItem) -> bool:
        """Whether an earlier start of the run has sent the item."""
        step, time = self._done
        return bool(time) and item.time <= time and (item.kind != "row" or item.step <= step)

    def _try(self, action: Callable[[], None]) -> bool:
        """Run `action`. Return whether it succeeded. The first failure in a row is reported."""
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
        """Report why numbers are not exported: in the log always, as an event for the first failure in a row."""
        first, *_ = reason.strip().splitlines() or [""]
        print_to_stderr(f"{self.name}: {printable(reason)}")
        if not self._is_told:
            self._is_told = True
            self._events.write("export_failed", exporter=self.name, reason=printable(first))


class Exports:
    """exports.json: {"tensorboard": {"step": 57, "time": …}, "wandb": {"key": …, …}}. Write errors are ignored."""

    def __init__(self, run: Path) -> None:
        self._path, self._lock = run / FILE, threading.Lock()
        self._written_s = 0.0
        try:
            content = json.loads(read_bytes(self._path))
        except (OSError, ValueError, RecursionError):
            content = {}
        sound = isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())
        self._entries: dict[str, dict[str, Any]] = content if sound else {}

    def entries_of(self, name: str) -> dict[str, Any]:
        """Return the valid entries of an exporter."""
        kinds = {"step": int, "time": str, "key": str}
        return {k: v for k, v in self._entries.get(name, {}).items() if k in kinds and type(v) is kinds[k]}

    def note(self, name: str, **facts: Any) -> None:
        """Update entries of an exporter. The file is replaced atomically."""
        if not any(value is not None for value in facts.values()):
            return
        with self._lock:
            self._entries[name] = {**self.entries_of(name), **{k: v for k, v in facts.items() if v is not None}}
            try:
                write(self._path, json.dumps(self._entries, indent=1) + "\n")
            except OSError as error:
                if time.monotonic() - self._written_s > RETRY_S[-1]:
                    self._written_s = time.monotonic()
                    print_to_stderr(f"{self._path}: {error.strerror}")
