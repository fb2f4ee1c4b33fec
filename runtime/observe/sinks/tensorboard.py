"""TensorBoard event files in `tensorboard/` of the run folder: a scalar for each number of a row.

Each start of the run writes a new file. Discarded steps are purged, which TensorBoard does after a START.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.observe.sinks.sink import Point, SinkContext
from runtime.observe.watch.run_state import seconds_of

FOLDER = "tensorboard"


class TensorBoard:
    """Writes event files; needs tensorboard, but not TensorFlow."""

    def __init__(self) -> None:
        self.destination = ""
        self.key: str | None = None

    def open(self, opened: SinkContext) -> None:
        """Open a file. OSError if the folder cannot be written."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        folder = opened.run / FOLDER
        self._writer = EventFileWriter(str(folder), filename_suffix=".dsc")
        self.destination = str(folder)
        self._last = opened.step
        if opened.step:  # later steps may have been written without being noted
            self._purge(opened.step)

    def send(self, points: Sequence[Point]) -> None:
        """Write the numbers of rows, and purges."""
        for item, values in points:
            if item.kind == "row":
                if item.step <= self._last:
                    self._purge(item.step - 1)
                self._last = item.step
                scalars = [self._summaries.Summary.Value(tag=name, simple_value=n) for name, n in values.items()]
                summary = self._summaries.Summary(value=scalars)
                self._write(step=item.step, wall_time=seconds_of(item.time) or 0.0, summary=summary)
        self._writer.flush()

    def _purge(self, step: int) -> None:
        """Make readers ignore steps after `step` in earlier files."""
        session = self._events.SessionLog
        self._write(step=step + 1, session_log=session(status=session.START))

    def _write(self, **fields: Any) -> None:
        self._writer.add_event(self._events.Event(**fields))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
