"""The processes that commands start: for `dsc train` the compiler and the launcher of the ranks, and those that verify
or convert what was trained.

They end with this process, however it ends; SIGINT and SIGTERM are passed on to them. No torch.
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
from types import FrameType
from typing import Any

from runtime.system.outcome import death_text

Running = subprocess.Popen[bytes]
NAMES = {  # by module
    "compiler.cli.main": "the compiler",
    "runtime.run.train": "the supervisor of the ranks",
    "runtime.run.evaluate": "the supervisor of the ranks",
    "runtime.state.huggingface": "the process that reads and writes weights",
}


def call(command: Sequence[str], *, quiet: bool = False) -> int:
    """Run `python -P -m COMMAND` to its end; its exit code. quiet: drop its stdout."""
    with _started(command, quiet=quiet) as process, _forwarding(process) as asked:
        return _code(process, asked)


def ask(command: Sequence[str], request: str, tell: Callable[[str], None]) -> tuple[int, Any]:
    """Give a process a request on its stdin; its exit code, and its result, None where it has none.

    It prints lines of JSON: {"done": 3, "total": 7} now and then, of which `tell` shows the share, and {"result": …}.
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
        with _forwarding(process) as asked:
            _tell(process, request)
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            for line in process.stdout:
                said = json.loads(line)
                result = said.get("result", result)
                if "total" in said:
                    tell(f"{100 * said['done'] // max(said['total'], 1)}%")
            tell("")
            return _code(process, asked), result


def compiled(compiler: Sequence[str], quiet: bool) -> tuple[int, str]:
    """Run a compilation to its end; its exit code, and the digest of the build it wrote. quiet: drop its stdout."""
    with _compiling(compiler, quiet) as (process, digest), _forwarding(process) as asked:
        return _code(process, asked), _line(digest)


def call_both(compiler: Sequence[str], launcher: Sequence[str], parts: str) -> tuple[int, bool]:
    """Run two commands at once, and the launcher alone when the compiler is done.

    The launcher reads `parts` as one line from its standard input, and the digest of the build as another line when the
    compiler is done. If one of the two fails, the other is ended. Returns the exit code of the one that failed, or else
    of the launcher; and whether the compiler came to its end, so that there may be a run.
    """
    with (
        _compiling(compiler) as (compiling, digest),
        _started(launcher, subprocess.PIPE) as launching,
        _forwarding(compiling, launching) as asked,
    ):
        _tell(launching, parts)
        built = False
        if _first_to_end(compiling, launching) is launching:
            compiling.terminate()
            compiling.wait()
            if sys.stderr.isatty():
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # what it was doing
        elif code := _code(compiling, asked):
            launching.terminate()
            return code, built
        else:
            built = True
            _tell(launching, _line(digest))
        return _code(launching, asked), built


@contextmanager
def _compiling(command: Sequence[str], quiet: bool = False) -> Iterator[tuple[Running, int]]:
    """A compilation, and the descriptor on which it says the digest of its build."""
    said, saying = os.pipe()
    try:
        with _started([*command, "--digest-to", str(saying)], None, quiet, (saying,)) as process:
            os.close(saying)
            saying = -1
            yield process, said
    finally:
        for descriptor in (said, saying):
            if descriptor >= 0:
                os.close(descriptor)


def _line(descriptor: int) -> str:
    """What a process that has ended has said."""
    return os.read(descriptor, 4096).decode().strip()


@contextmanager
def _started(
    command: Sequence[str], stdin: int | None = None, quiet: bool = False, descriptors: Sequence[int] = ()
) -> Iterator[Running]:
    """A process that ends with this one, and that has ended afterwards. quiet: its stdout leads nowhere."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=stdin,
        stdout=subprocess.DEVNULL if quiet else None,
        pass_fds=descriptors,
        preexec_fn=_die_with_parent,
    ) as process:
        yield process


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def _forwarding(*processes: Running) -> Iterator[set[int]]:
    """Pass SIGINT and SIGTERM on; the set has what came."""
    asked: set[int] = set()

    def forward(number: int, _: FrameType | None) -> None:
        asked.add(number)
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_to_end(*processes: Running) -> Running:
    """The process that ends first; if several have ended, the first given."""
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
    with suppress(BrokenPipeError):  # it has ended, and has said why
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def _code(process: Running, asked: set[int]) -> int:
    """The exit code of a process that ends: 128 + signal after a kill, which is reported if nobody asked for it."""
    code = process.wait()
    if code >= 0:
        return code
    if -code not in asked:
        _say_death(process, -code)
    return 128 - code


def _say_death(process: Running, number: int) -> None:
    assert isinstance(process.args, list)
    what = NAMES.get(process.args[3], process.args[3])
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    with suppress(OSError):
        print(f"{clear}error: {what} was {death_text(number)}", file=sys.stderr, flush=True)
