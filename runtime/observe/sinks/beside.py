"""The exporter process, as the supervisor of a run controls it."""

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
MOST_S = 2 * (DRAIN_S + LAST_TRY_S)  # includes waiting for the exporters of an earlier start
QUIET_S = 2.0  # wait without a message


class Exporters:
    """The exporters that the build of a run requests, from `begin` to `close`. If they cannot be started, the run
    continues without them."""

    def __init__(self, build: Build, run: Path) -> None:
        self._build, self._run = build, run
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the exporters, unless they are running."""
        try:
            watch = WatchFacts.from_json(self._build.files[WATCH])
        except (KeyError, FormError):  # the build was edited
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
                    start_new_session=True,  # Ctrl-C must not reach it: it ends after the ranks
                )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(tree(watch)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            tell(f"nothing is exported: {error.filename or 'the exporters'}: {error.strerror}")

    def close(self, *, waits: bool) -> None:
        """Ask the process to end. `waits`: wait until everything is exported or MOST_S; otherwise it ends by itself."""
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
                if not self._ends_within(MOST_S):  # it would end by itself, unless it is suspended
                    self._process.kill()
                    tell(f"exporters did not end within {MOST_S:g} s, and were killed: {log}")
                    return
        except KeyboardInterrupt:  # the run has finished, so its exit code stays
            tell("the last numbers are exported in the background")
            return
        if self._process.returncode:
            tell(f"some of the last numbers were not exported: {log} says why")

    def _ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None
