"""The process that prepares a run's data (runtime/data/__main__.py), as the launcher controls it. Without torch.

It is a separate process because the tokenizer's threads must not exist in the process that forks ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from runtime.contract import DataRequest
from runtime.system.outcome import EXIT_RETRY, EXIT_USAGE, death_text
from runtime.system.strict_json import tree


class UsageError(Exception):
    """The build, the data or the run folder cannot be used. The message says which, and what to do.

    `code`: EXIT_USAGE, or EXIT_RETRY if the reason is temporary. Without a message, the user was already told.
    """

    def __init__(self, message: object = "", code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.code = code


class Preparation:
    """A running preparation. It shows nothing before `may_talk`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def may_talk(self) -> None:
        """Let the process show its progress from now on."""
        self._stdin.close()

    def text_is_found(self) -> bool:
        """Wait until it is known whether the text is found, and return that."""
        assert self._process.stdout is not None
        return bool(self._process.stdout.readline())

    def read_line_unless_failed(self, stdin: FileIO) -> str:
        """Return the next line of `stdin`; "" if it ends or the preparation fails first."""
        ended = os.pidfd_open(self._process.pid)
        try:
            ready, _, _ = select.select([stdin.fileno(), ended], [], [])
            if stdin.fileno() not in ready and self._process.poll():
                return ""
            return stdin.readline().decode().strip()
        finally:
            os.close(ended)

    @property
    def has_failed(self) -> bool:
        return bool(self._process.poll())

    def kill(self) -> None:
        self._process.kill()

    def corpus(self) -> Path:
        """Wait for the process and return the folder of the prepared corpus. UsageError if it failed."""
        assert self._process.stdout is not None
        output = self._process.stdout.read()
        code = self._process.wait()
        if code in (EXIT_USAGE, EXIT_RETRY):
            raise UsageError(code=code)
        if code < 0:
            raise UsageError(f"the data could not be prepared: its process was {death_text(-code)}", EXIT_RETRY)
        if code:
            raise UsageError(f"the data could not be prepared: its process ended with code {code}")
        return Path(json.loads(output)["folder"])

    def send(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # the process has failed, and reports that itself
            while line:
                line = line[self._stdin.write(line) :]

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


@contextmanager
def start_preparation(
    request: DataRequest, data: Path, out: Path, *, cache: Path | None, resume: bool
) -> Iterator[Preparation]:
    """Start to prepare the data of a request into `out`. The process is killed if the block raises.

    data: paths of the data are relative to this folder. cache: prepared data that runs share. resume: use the data
    that the run's checkpoints name.
    """
    command = [sys.executable, "-P", "-m", "runtime.data.__main__", str(data), str(out)]
    command += ["--cache", str(cache)] if cache else []
    command += ["--resume"] if resume else []
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # so that no output is read ahead
        process_group=0,  # Ctrl-C reaches the launcher alone, which then ends this process
        preexec_fn=_die_with_parent,
    ) as process:
        preparation = Preparation(process)
        try:
            preparation.send(json.dumps(tree(request)).encode() + b"\n")
            yield preparation
        except BaseException:
            process.kill()
            raise


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
