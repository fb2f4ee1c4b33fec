"""Runs tasks in worker processes, one at a time each, so that a task that hangs or breaks its device does not affect
others.

A task and its answer are one line of JSON each. A process that dies or takes too long is replaced, and its task is
answered with the reason. An interrupt (Ctrl-C) ends the processes.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import IO, Any

Task = Mapping[str, Any]
Answer = dict[str, Any]
# Messages after which the device cannot be used by this process any more.
BROKEN = ("CUDA error", "illegal", "AcceleratorError", "Triton Error", "misaligned", "launch failure")


def serve(handle: Callable[[Task], Answer]) -> int:
    """Answer tasks from stdin; other output goes to stderr. Returns 1 if the device may be broken."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        broken = False
        try:
            answer = handle(json.loads(line))
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            broken = any(word in text for word in BROKEN) and "out of memory" not in text
            traceback.print_exc()
            answer = {"failed": text[:500]}
        print(json.dumps(answer), file=stdout, flush=True)
        if broken:
            return 1
    return 0


def run(
    command: Sequence[str],
    tasks: Sequence[Task],
    workers: int,
    each_s: float,
    until: float,
    on_answer: Callable[[Task, Answer], None],
) -> None:
    """Have each task answered once, in any order, by `workers` processes of `command`, until `until` (monotonic). An
    exception in `on_answer` or an interrupt ends the run."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    lock, stopped = threading.Lock(), threading.Event()
    running: set[_Process] = set()

    def start() -> _Process | None:
        with lock:
            if stopped.is_set():
                return None
            running.add(process := _Process(command))
            return process

    def end(process: _Process) -> None:
        with lock:
            running.discard(process)
        process.end()

    def work() -> None:
        process: _Process | None = None
        try:
            while not stopped.is_set():
                try:
                    task = waiting.get_nowait()
                except queue.Empty:
                    break
                limit = min(each_s, until - time.monotonic())
                if limit <= 0:
                    answer: Answer = {"left_out": "no time was left"}
                elif process := process or start():
                    answer = process.ask(task, limit)
                    if process.ended:
                        end(process)
                        process = None
                with lock:
                    if not stopped.is_set():
                        on_answer(task, answer)
        finally:
            if process:
                end(process)

    with ThreadPoolExecutor(max(1, workers)) as pool:
        try:
            for future in as_completed([pool.submit(work) for _ in range(min(workers, len(tasks)))]):
                future.result()
        except BaseException:  # an interrupt, or an exception in `on_answer`
            with lock:
                stopped.set()
                for process in running:
                    process.process.kill()
            raise


class _Process:
    def __init__(self, command: Sequence[str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, bufsize=0, **pipes)  # type: ignore[call-overload]
        self.ended = False

    def ask(self, task: Task, limit_s: float) -> Answer:
        pipe_in, pipe_out = _pipe(self.process.stdin), _pipe(self.process.stdout)
        deadline, answer = time.monotonic() + limit_s, b""
        with suppress(BrokenPipeError):
            pipe_in.write(json.dumps(task).encode() + b"\n")
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([pipe_out], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.ended = True
                return {"failed": f"took more than {limit_s:.0f} s"}
            part = os.read(pipe_out.fileno(), 1 << 16)
            if not part:
                self.ended = True
                return {"failed": f"its process ended with code {self.process.wait()}: {self._last_words()}"}
            answer += part
        reply: Answer = json.loads(answer)
        if any(word in reply.get("failed", "") for word in BROKEN):
            self.ended = True
        return reply

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                _pipe(pipe).close()
        self.process.kill()
        self.process.wait()
        self.errors.close()

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
