"""Starts the ranks of a test, which are modules beside it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest import mock

from tests import progress

ROOT = Path(__file__).parents[2]
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run_module(module: str, folder: Path, world: int, *more: str) -> None:
    """`python -m module FOLDER WORLD …`, one thread a rank; its output where it fails.

    The process is a fork of one that has imported torch, which takes two seconds. It is a new one where the environment
    changed since that one began, for what is imported may have read it.
    """
    words = [str(folder), str(world), *more]
    context, at_first = server()
    if environment() == at_first:
        code, said = run_fork(context, module, words)
    else:
        done = progress.run([sys.executable, "-m", module, *words], Path.cwd(), environment())
        code, said = done.returncode, done.stdout + done.stderr
    assert code == 0, said


def environment() -> dict[str, str]:
    """The environment of what is started now."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | FIXED


@cache
def server() -> tuple[ForkServerContext, dict[str, str]]:
    """A process that has imported torch and the runtime, and forks; and the environment that it began with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "safetensors.torch", "runtime.trainer"])
    with mock.patch.dict(os.environ, FIXED):
        forkserver.ensure_running()
        return context, environment()


class Fork:
    """A process of the server, with what progress.end asks of one."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.process, self.pid = process, process.pid

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired([self.process.name], timeout)
        return self.process.exitcode


def run_fork(context: ForkServerContext, module: str, words: Sequence[str]) -> tuple[int, str]:
    """The exit code of a module that a fork runs, and what it printed."""
    with tempfile.NamedTemporaryFile() as out:
        process = context.Process(target=_as_main, args=(module, words, Path.cwd(), out.name), name=module)
        process.start()

        def printed_bytes() -> int:
            return os.fstat(out.fileno()).st_size

        try:
            code = progress.end(Fork(process), printed_bytes)
        except progress.HangError as error:
            progress.kill(process.pid)
            raise progress.HangError(f"{error}: {module} {' '.join(words)}\n{Path(out.name).read_text()}") from None
        return code, Path(out.name).read_text("utf-8", "replace")


def _as_main(module: str, words: Sequence[str], cwd: Path, out: str) -> None:
    """Run a module as `python -m` does, with its output in a file."""
    os.chdir(cwd)
    said = os.open(out, os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
