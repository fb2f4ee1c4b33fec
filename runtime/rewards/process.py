"""A process of one reward (runtime/rewards/worker.py), as it is started, asked and ended, with a limit on its time."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from runtime.outcome import death_text, shortened
from runtime.rewards.errors import RewardError

DATA_BYTES = 4 << 30
START_S = 120.0  # until the file is imported: a library may take its time
MAX_ANSWER_BYTES = 64 << 20
SAID_BYTES = 4096  # of what the function prints, the last of which an error shows
# The variables of the environment that a reward sees: no key of a service, and no GPU.
PASSED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
SET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
ROOT = Path(__file__).parents[2]  # of the packages


class Process:
    """The process of a reward, which is started at once and answers questions.

    `name`: of the reward; `place`: the file or pattern that a message names; `what`: the first line that it is given;
    `folder`: where it runs; `quicker`: what to do where it takes too long.

    The kernel ends it with the thread that starts it.
    """

    def __init__(self, name: str, place: str, what: Mapping[str, Any], folder: Path | None, quicker: str) -> None:
        self.name, self.place, self.quicker = name, place, quicker
        self._said = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runtime.rewards.worker", str(DATA_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            env={name: os.environ[name] for name in PASSED if name in os.environ} | SET | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,  # it is ended with all that it has started, and Ctrl-C does not reach it
        )
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)
        self._what = what

    def begin(self) -> None:
        """Wait until it can be asked. Raises RewardError if the file or pattern is none."""
        self._answer(self._what, START_S, "to be imported", "import less")

    def values(self, question: Mapping[str, Any], seconds: float) -> list[float]:
        """A value for each completion. Raises RewardError if there is none, or none in time."""
        completions = len(question["completions"])
        hint = f"{self.quicker}, or write `seconds = {2 * seconds:g}`"
        found = self._answer(question, seconds, f"for {completions} completion{'s' * (completions != 1)}", hint)
        values: list[float] = found["values"]
        return values

    def end(self) -> None:
        """End the process, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes its pipes
            pass

    # ---------------------------------------------------------------- one question and its answer

    @property
    def _streams(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        return stdin, stdout, stderr

    def _answer(self, question: Mapping[str, Any], seconds: float, what_for: str, hint: str) -> dict[str, Any]:
        line = self._exchanged(json.dumps(question).encode() + b"\n", seconds)
        if line is None:
            self.end()
            raise self._error(f"{self.place}: takes more than {seconds:g} s {what_for}", hint)
        if not line.endswith(b"\n"):
            raise self._error(f"{self.place}: {self._death()}", "correct it")
        answer: dict[str, Any] = json.loads(line)
        if "fault" in answer:
            raise self._error(answer["fault"], answer["hint"])
        return answer

    def _exchanged(self, question: bytes, seconds: float) -> bytes | None:
        """The line that follows a question: a part of it if the process ends, None if it does not come in time."""
        stdin, stdout, stderr = self._streams
        end, line, rest = time.monotonic() + seconds, bytearray(), memoryview(question)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0 and len(line) <= MAX_ANSWER_BYTES:
                for key, _ in selector.select(left):
                    if key.fileobj is stdin:
                        try:
                            rest = rest[os.write(stdin.fileno(), rest) :]
                        except BrokenPipeError:  # it has ended: what it said is read below
                            rest = rest[:0]
                        if not rest:
                            selector.unregister(stdin)
                    elif key.fileobj is stderr:
                        if content := os.read(stderr.fileno(), 1 << 16):
                            self._said = (self._said + content)[-SAID_BYTES:]
                        else:
                            selector.unregister(stderr)
                    else:
                        content = os.read(stdout.fileno(), 1 << 20)
                        line += content
                        if not content or content.endswith(b"\n"):
                            return bytes(line)
        return None

    def _death(self) -> str:
        """How the process has ended, and the last that it printed."""
        code = self._process.wait()
        with suppress(BlockingIOError):
            self._said += os.read(self._streams[2].fileno(), 1 << 16)
        self.end()
        how = f"was {death_text(-code)}" if code < 0 else f"ended with code {code}"
        last = (self._said.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return f"its process {how}{last and ': '}{last}"

    def _error(self, fault: str, hint: str) -> RewardError:
        return RewardError(f"reward `{self.name}`: {shortened(fault, 2000)}\n = hint: {hint}")
