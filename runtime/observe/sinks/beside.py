"""The process of the exporters, as the supervisor of a run has it beside itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from runtime.build.build import Build
from runtime.build.run_copy import WATCH
from runtime.contract import WatchFacts
from runtime.observe.sinks.sink import DRAIN_S, LAST_TRY_S
from runtime.system.lines import utc_now
from runtime.system.regular_files import open_regular
from runtime.system.streams import tell
from runtime.system.strict_json import FormError, tree

LOG = "exporters.log"
MOST_S = 2 * (DRAIN_S + LAST_TRY_S)  # it may wait for the exporters of an earlier start first
QUIET_S = 2.0  # that nobody is told what is waited for


class Exporters:
    """The exporters that the build of a run asks for, from `begin` to `close`. Where they cannot be started, the run
    goes on without."""

    def __init__(self, build: Build, run: Path) -> None:
        self._build, self._run = build, run
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start them, unless they are there."""
        try:
            watch = WatchFacts.from_json(self._build.files[WATCH])
        except (KeyError, FormError):  # of an edited build
            return
        if watch.metrics is None or self._process is not None:
            return
        run = self._run
        try:
            (run / "logs").mkdir(parents=True, exist_ok=True)
            log_file = open_regular(run / "logs" / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(log_file, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "runtime.observe.sinks", str(run), utc_now()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # Ctrl-C is for the ranks: it ends when they have
                )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(tree(watch)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            tell(f"nothing is exported: {error.filename or 'the exporters'}: {error.strerror}")

    def close(self, *, waits: bool) -> None:
        """Ask for the end. `waits`: until all is exported, or until it takes too long; the process ends by itself."""
        if self._process is None:
            return
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if not waits:
            return
        log = self._run / "logs" / LOG
        try:
            if not self._ends_within(QUIET_S):
                tell("exporting the last numbers")
                if not self._ends_within(MOST_S):  # it ends by itself, unless it is stopped
                    self._process.kill()
                    tell(f"exporters did not end within {MOST_S:g} s, and were killed: {log}")
                    return
        except KeyboardInterrupt:  # the run has come to its end, and that is what its exit code says
            tell("the last numbers are exported in the background")
            return
        if self._process.returncode:
            tell(f"some of the last numbers were not exported: {log} says why")

    def _ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None
