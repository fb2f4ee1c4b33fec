"""Runs `python -m MODULE` in a fork of a process that has imported torch, since the import takes seconds of CPU time.

Processes that it starts with `python -m` are forks too. Forks inherit the modules; everything else is as after an
`exec`: descriptors, environment, working directory, signals, output, exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn, TypeAlias
from unittest import mock

from tests import progress

ROOT = Path(__file__).parents[1]
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
READ_AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "KMP_", "ATEN_", "TORCH", "TRITON", "CUDA", "DSC_")
# Variables that are not the caller's environment: pytest's name of the test, and a folder that torch sets when it
# first traces. A server that was started before that would else never be forked again.
NOT_GIVEN = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
RUNS_FIRST = "FORKS_RUN_FIRST"  # a module whose `install` each fork calls before its own module: tests/reliability
MAX_DESCRIPTOR = 1 << 16
AT_IMPORT = dict(os.environ)  # before any test changes a variable: a server has none of those changes


def environment(now: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process started with these variables."""
    return {name: value for name, value in now.items() if name not in NOT_GIVEN} | FIXED


def run(module: str, words: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -P -m module word …` to its end."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        process = start(module, words, cwd, Path(out.name), Path(err.name))

        def said() -> tuple[str, str]:
            return (Path(out.name).read_text("utf-8", "replace"), Path(err.name).read_text("utf-8", "replace"))

        def printed_bytes() -> int:
            return sum(os.fstat(file.fileno()).st_size for file in (out, err))

        try:
            code = progress.end(process, printed_bytes)
        except progress.HangError as error:
            progress.kill(process.pid)
            raise progress.HangError(f"{error}: {module} {' '.join(words)}\n{''.join(said())}") from None
        return subprocess.CompletedProcess([module, *words], code, *said())


def start(module: str, words: Sequence[str], cwd: Path, out: Path, err: Path) -> Started:
    """Start `python -P -m module word …` with its output in files; in an environment that the server's libraries have
    not read, as a new process."""
    env = environment()
    context, at_first = server()
    if _read_at_import(env) != at_first:
        return start_anew(module, words, cwd, out, err, env)
    process = context.Process(target=_begin, args=(module, words, cwd, env, str(out), str(err)), name=module)
    process.start()
    return Fork(process)


def start_anew(
    module: str, words: Sequence[str], cwd: Path, out: Path, err: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -P -m module word …` as a user does, in a process that imports everything itself."""
    with out.open("wb") as to_out, err.open("wb") as to_err:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words], cwd=cwd, stdout=to_out, stderr=to_err, env=env
        )


@cache
def server() -> tuple[ForkServerContext, dict[str, str]]:
    """A process that has imported what commands and ranks need, and forks; and the variables its libraries may read."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.forks_preload"])
    at_first = environment(AT_IMPORT)
    with mock.patch.dict(os.environ, at_first, clear=True):
        forkserver.ensure_running()
    return context, _read_at_import(at_first)


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_IMPORT)}


class Fork:
    """A process of the server, with the methods of Popen that tests use."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired([self.process.name], timeout)
        return self.process.exitcode


Started: TypeAlias = Fork | subprocess.Popen[bytes]


# ---------------------------------------------------------------- in the fork


def _begin(module: str, words: Sequence[str], cwd: Path, env: Mapping[str, str], out: str, err: str) -> NoReturn:
    """Run a module as `python -m` does, with its output in files."""
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    _as_main(module, words, env)


def _as_main(module: str, words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run a module as a new interpreter does, and end the process as one does."""
    atexit._clear()
    gc.freeze()  # files opened by the parent are not this process's to close
    os.environ.clear()
    os.environ.update(env)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    sys.argv = [module, *words]
    sys.modules.pop(module, None)
    if first := env.get(RUNS_FIRST):
        importlib.import_module(first).install()
    subprocess._fork_exec = _fork_or_exec  # type: ignore[attr-defined]
    code, interrupted = 1, False
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exception(error)
        interrupted = isinstance(error, KeyboardInterrupt)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        code = code or 120  # as Python ends that cannot flush
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _stream(number: int, mode: str) -> Any:
    """A standard stream as a non-interactive interpreter opens it; None if the descriptor is closed."""
    try:
        raw: Any = open(number, f"{mode}b", closefd=False)  # noqa: SIM115
    except OSError:
        return None
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace" if number == 2 else "strict", line_buffering=number == 2)


EXEC: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


def _fork_or_exec(  # as of _posixsubprocess
    args: Sequence[str | bytes],
    executables: Sequence[bytes],
    close_fds: bool,
    kept: Sequence[int],
    cwd: str | bytes | None,
    env: Sequence[bytes] | None,
    *more: Any,
) -> int:
    """Fork to run a Python module, if the environment variables that its libraries read at import are the same."""
    words = [os.fsdecode(word) for word in args]
    variables = dict(os.environ)
    if env is not None:
        variables = {
            os.fsdecode(name): os.fsdecode(value) for name, _, value in (entry.partition(b"=") for entry in env)
        }
    if words[:3] != [sys.executable, "-P", "-m"] or _read_at_import(variables) != _read_at_import(os.environ):
        return EXEC(args, executables, close_fds, kept, cwd, env, *more)
    stdin, _, _, stdout, _, stderr, _, failed, _, session, group = more[:11]
    preexec = more[15]
    pid = os.fork()
    if pid:
        return pid
    try:
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            if descriptor >= 0:
                os.dup2(descriptor, number)
        for descriptor in set(kept) - {failed}:
            os.set_inheritable(descriptor, True)
        if cwd is not None:
            os.chdir(cwd)
        if session:
            os.setsid()
        if group >= 0:
            os.setpgid(0, group)
        if preexec is not None:
            preexec()
        open_fds = [0, 1, 2, *sorted(set(kept) - {failed}), MAX_DESCRIPTOR] if close_fds else []
        for before, after in pairwise(open_fds):
            os.closerange(before + 1, after)
        if not close_fds:
            os.close(failed)
        _as_main(words[3], words[4:], variables)
    finally:
        os._exit(255)
