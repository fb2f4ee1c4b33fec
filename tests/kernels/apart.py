"""Work in processes of their own: what ends its process, or never ends, fails alone, and the rest goes on."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

Worker = tuple[Connection, BaseProcess]
_NONE = "no job"
SPAWN = multiprocessing.get_context("spawn")  # Triton's compilers have threads, which do not survive a fork


def apart(
    work: Callable[[Any], Any], jobs: Iterable[Any], processes: int, limit_s: float, log: Path
) -> Iterator[tuple[Any, Any]]:
    """(job, `work(job)`) for each job, as they are done. In the place of a result an exception if it raised one, if its
    process ended, or after `limit_s`. What the processes print goes to `log`."""
    waiting = iter(jobs)
    free: list[Worker] = []
    busy: dict[Connection, tuple[BaseProcess, Any, float]] = {}  # the job and its end; while a process starts, no job

    def start() -> None:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=_serve, args=(work, theirs, log), daemon=True)
        process.start()
        theirs.close()
        busy[ours] = process, _NONE, math.inf

    try:
        for _ in range(processes):
            start()
        while busy:
            for pipe in [pipe for pipe in wait(list(busy), timeout=1) if isinstance(pipe, Connection)]:
                process, job, _ = busy.pop(pipe)
                try:
                    result = pipe.recv()
                    free.append((pipe, process))
                except EOFError:
                    process.join()
                    assert job != _NONE, f"a process does not start: {log}"
                    result = RuntimeError(f"the compiler's process ended with {process.exitcode}")
                    start()
                if job != _NONE:
                    yield job, result
            for pipe, (process, job, end) in list(busy.items()):
                if time.monotonic() > end:
                    del busy[pipe]
                    process.kill()
                    start()
                    yield job, TimeoutError(f"the compiler takes longer than {limit_s:.0f} s")
            while free and (job := next(waiting, _NONE)) != _NONE:
                pipe, process = free.pop()
                pipe.send(job)
                busy[pipe] = process, job, time.monotonic() + limit_s
    finally:
        for process in [*(process for _, process in free), *(process for process, *_ in busy.values())]:
            process.kill()


def _serve(work: Callable[[Any], Any], pipe: Connection, log: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; who started it ends it
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    pipe.send(_NONE)  # it has started
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            result = work(job)
        except Exception as error:
            result = RuntimeError(repr(error))  # which can be sent, whatever it was
        pipe.send(result)
