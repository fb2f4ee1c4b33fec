"""The processes that commands start: the compiler and the launcher of the ranks for `dsc train`, and processes that
verify or convert a trained model.

They end with this process, however it ends. SIGINT and SIGTERM are passed on to them. No torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any, Self

from runtime.system.outcome import death_text
from runtime.system.streams import tell

Running = subprocess.Popen[bytes]


class OutputLines:
    """Prints the lines of a command, and of the processes that it starts, to the streams of this process."""

    descriptor: int | None = None  # the file descriptor that the processes write to

    def tell(self, text: str) -> None:
        """Print a line. A closed pipe or a full disk is ignored."""
        tell(text)

    def warn(self, text: str) -> None:
        """Print a warning, which replaces the progress line on a terminal."""
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        with suppress(OSError):
            print(f"{clear}{text}", file=sys.stderr, flush=True)


class CapturedOutput(OutputLines):
    """Passes each line to `show` at once, and keeps it: for Python sessions, whose streams processes cannot use."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.lines = list[str]()
        self._show = show

    def tell(self, text: str) -> None:
        os.write(self._writing, text.encode(errors="replace") + b"\n")

    warn = tell

    def __enter__(self) -> Self:
        reading, self._writing = os.pipe()
        self.descriptor = self._writing
        self._reader = Thread(target=self._read, args=(reading,))
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._writing)
        self._reader.join()

    def _read(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))
                self._show(self.lines[-1])


OWN_STREAMS = OutputLines()
NAMES = {  # by module
    "compiler.cli.main": "the compiler",
    "runtime.run.train": "the supervisor of the ranks",
    "runtime.run.evaluate": "the supervisor of the ranks",
    "runtime.state.huggingface": "the process that reads and writes weights",
}


def call(command: Sequence[str], *, output: OutputLines = OWN_STREAMS, quiet: bool = False) -> int:
    """Run `python -P -m COMMAND` and return its exit code. quiet: drop its stdout."""
    with _start(command, output=output, quiet=quiet) as process, _forwarding(process) as received:
        return _code(process, received, output)


def ask(command: Sequence[str], request: str, progress: Callable[[str], None]) -> tuple[int, Any]:
    """Send a request to a process on its stdin. Returns its exit code, and its result or None.

    The process prints lines of JSON: {"done": 3, "total": 7} now and then, and {"result": …} at the end. `progress` is
    called with the finished share.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=_die_with_parent,
    ) as process:
        assert process.stdout is not None
        result = None
        with _forwarding(process) as received:
            _tell(process, request)
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                result = message.get("result", result)
                if "total" in message:
                    progress(f"{100 * message['done'] // max(message['total'], 1)}%")
            progress("")
            return _code(process, received, OWN_STREAMS), result


def run_compiler(compiler: Sequence[str], *, output: OutputLines = OWN_STREAMS, quiet: bool = False) -> tuple[int, str]:
    """Run a compilation. Returns its exit code, and the digest of the build it wrote. quiet: drop its stdout."""
    with _compiling(compiler, output, quiet) as (process, digest), _forwarding(process) as received:
        return _code(process, received, output), _line(digest)


def call_both(
    compiler: Sequence[str], launcher: Sequence[str], parts: str, *, output: OutputLines = OWN_STREAMS
) -> tuple[int, bool]:
    """Run the compiler and the launcher in parallel.

    The launcher reads `parts` as one line from its standard input, and the digest of the build as another line when the
    compiler has ended. If one of the two fails, the other is stopped. Returns the exit code of the one that failed, or
    else of the launcher; and whether the compiler ended, so that ranks may have started.
    """
    with (
        _compiling(compiler, output) as (compiling, digest),
        _start(launcher, output=output, stdin=subprocess.PIPE) as launching,
        _forwarding(compiling, launching) as received,
    ):
        _tell(launching, parts)
        built = False
        if _first_to_end(compiling, launching) is launching:
            compiling.terminate()
            compiling.wait()
            if output is OWN_STREAMS and sys.stderr.isatty():
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clear its progress line
        elif code := _code(compiling, received, output):
            launching.terminate()
            return code, built
        else:
            built = True
            _tell(launching, _line(digest))
        return _code(launching, received, output), built


@contextmanager
def _compiling(command: Sequence[str], output: OutputLines, quiet: bool = False) -> Iterator[tuple[Running, int]]:
    """Start a compilation. Yields its process, and the descriptor to which it writes the digest of its build."""
    digest_reader, digest_writer = os.pipe()
    try:
        words = [*command, "--digest-to", str(digest_writer)]
        with _start(words, output=output, quiet=quiet, descriptors=(digest_writer,)) as process:
            os.close(digest_writer)
            digest_writer = -1
            yield process, digest_reader
    finally:
        for descriptor in (digest_reader, digest_writer):
            if descriptor >= 0:
                os.close(descriptor)


def _line(descriptor: int) -> str:
    """Return the output of a process that has ended."""
    return os.read(descriptor, 4096).decode().strip()


@contextmanager
def _start(
    command: Sequence[str],
    *,
    output: OutputLines,
    stdin: int | None = None,
    quiet: bool = False,
    descriptors: Sequence[int] = (),
) -> Iterator[Running]:
    """Start a process that ends with this one. It has ended when the context exits. quiet: drop its stdout."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=stdin,
        stdout=subprocess.DEVNULL if quiet else output.descriptor,
        stderr=output.descriptor,
        pass_fds=descriptors,
        preexec_fn=_die_with_parent,
    ) as process:
        yield process


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def _forwarding(*processes: Running) -> Iterator[set[int]]:
    """Pass SIGINT and SIGTERM on to processes. Yields the set of received signals. Only the main thread can do this."""
    received: set[int] = set()
    if current_thread() is not main_thread():
        yield received
        return

    def forward(number: int, _: FrameType | None) -> None:
        received.add(number)
        for process in processes:
            process.send_signal(number)

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _first_to_end(*processes: Running) -> Running:
    """Wait for a process to end and return it. If several have ended, return the first of the arguments."""
    descriptors = {os.pidfd_open(process.pid): process for process in processes}
    poll = select.poll()
    try:
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll()}
        return next(process for descriptor, process in descriptors.items() if descriptor in ended)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _tell(process: Running, line: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the process has ended, and has printed the reason
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def _code(process: Running, received: set[int], output: OutputLines) -> int:
    """Return the exit code of a process: 128 + signal after a kill, which is reported if the signal is not
    `received`.

    It is 128 + signal, too, if a received signal came too late to end the process: the command must not go on to its
    next process.
    """
    code = process.wait()
    if not code and received:
        return 128 + min(received)
    if code >= 0:
        return code
    if -code not in received:
        assert isinstance(process.args, list)
        name = NAMES.get(process.args[3], process.args[3])
        output.warn(f"error: {name} was {death_text(-code)}")
    return 128 - code
