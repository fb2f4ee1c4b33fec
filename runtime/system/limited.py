"""A process with limits for untrusted code: a reward of the user, a pattern, a chat template.

Such code may run forever, fill memory, print, fork or exit. `LimitedProcess` starts `python -P -m MODULE DATA_BYTES
[FOLDER]`, sends questions and limits the time. That module runs `serve`, which limits the memory and answers.

Standard input has a line of JSON for each question, and standard output one for each answer: an object, or {"fault":
reason, "hint": what to do}, after which the process ends. The first question has the code. Its output goes to standard
error, and its standard input is empty.

The code runs behind a boundary (runtime/system/boundary.py): it has no network and no files of the user. Where the
kernel allows none, it has the rights of the run. The first line of standard output, which is written before the code is
read, says why: {"open": reason}, with "" for a boundary.

The process that is started is the outer one. It waits for the one that runs the code, and then kills everything that it
has started: a process that leaves its session and its parent becomes a child of the outer one (PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from runtime.system import boundary
from runtime.system.limits import cap, end_with_parent, ends_with_parent_by, memory_limit_message, take_orphans
from runtime.system.outcome import death_text

Object = Mapping[str, Any]
Answer = Callable[[Object], Object]
MAX_ANSWER_BYTES = 64 << 20
SAID_BYTES = 4096  # kept output of the code; an error shows the last line
MAX_REASON = 2000  # characters of a reason
END_S = 5.0  # for the outer process to end its children
# Environment variables that the process gets: no credentials, and no GPU.
PASSED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
SET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
ROOT = Path(__file__).parents[2]  # of the packages


class FaultError(Exception):
    """The code cannot answer. The message is the reason; `hint` says what to do."""

    def __init__(self, fault: str, hint: str) -> None:
        super().__init__(fault)
        self.hint = hint


class LateError(Exception):
    """An answer does not arrive in time."""


class DeadError(Exception):
    """The process has ended. The message says how, and its last output line."""


# ---------------------------------------------------------------- the parent process
class LimitedProcess:
    """The process of a module, started immediately. It ends with the thread that started it.

    `folder`: the working folder, which the code can read; None for an empty one. `no_boundary`: why the code has the
    rights of this process, "" if it has not; None before the first answer.
    """

    no_boundary: str | None = None

    def __init__(self, module: str, data_bytes: int, folder: Path | None = None) -> None:
        self._stderr = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(data_bytes), *([str(folder.absolute())] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            env={name: os.environ[name] for name in PASSED if name in os.environ} | SET | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,  # Ctrl-C does not reach it
        )
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)

    def answer(self, question: Object, seconds: float) -> dict[str, Any]:
        """Return the answer to a question. Raises FaultError, LateError or DeadError; the last two end the process."""
        end = time.monotonic() + seconds
        if self.no_boundary is None:
            self.no_boundary = str(self._reply(b"", seconds).get("open", ""))
        return self._reply(json.dumps(question).encode() + b"\n", end - time.monotonic())

    def _reply(self, question: bytes, seconds: float) -> dict[str, Any]:
        """Send a line, and return the object in the next line of the process."""
        line = self._exchange(question, seconds)
        if line is None:
            self.close()
            raise LateError
        if len(line) > MAX_ANSWER_BYTES:
            self.close()
            raise DeadError(f"its process wrote an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        if not line.endswith(b"\n"):
            raise DeadError(self._death())
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            self.close()
            raise DeadError("its process wrote an invalid answer")
        if "fault" in reply:
            raise FaultError(str(reply["fault"])[:MAX_REASON], str(reply.get("hint", ""))[:MAX_REASON])
        return reply

    def close(self) -> None:
        """End the process and its children."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes its pipes
            pass

    @property
    def _streams(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        return stdin, stdout, stderr

    def _exchange(self, question: bytes, seconds: float) -> bytes | None:
        """Send a question. Return the next line: a part of it if the process ends, None after the time limit."""
        stdin, stdout, stderr = self._streams
        end, line, unsent = time.monotonic() + seconds, bytearray(), memoryview(question)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            while (remaining_s := end - time.monotonic()) > 0:
                for key, _ in selector.select(remaining_s):
                    if key.fileobj is stdin:
                        try:
                            unsent = unsent[os.write(stdin.fileno(), unsent) :]
                        except BrokenPipeError:  # the process has ended: its output is read below
                            unsent = unsent[:0]
                        if not unsent:
                            selector.unregister(stdin)
                    elif key.fileobj is stderr:
                        if content := os.read(stderr.fileno(), 1 << 16):
                            self._stderr = (self._stderr + content)[-SAID_BYTES:]
                        else:
                            selector.unregister(stderr)
                    else:
                        content = os.read(stdout.fileno(), 1 << 20)
                        line += content
                        if not content or content.endswith(b"\n") or len(line) > MAX_ANSWER_BYTES:
                            return bytes(line)
        return None

    def _death(self) -> str:
        """Return how the process ended, and its last output line."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # its pipe is closed, but it is still running
            self.close()
            return "its process closed its answers"
        with suppress(BlockingIOError):
            self._stderr += os.read(self._streams[2].fileno(), 1 << 16)
        self.close()
        ending = f"was {death_text(-code)}" if code < 0 else f"ended with code {code}"
        last = (self._stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return f"its process {ending}{last and ': '}{last}"


# ---------------------------------------------------------------- the limited process
def serve(arguments: Sequence[str], begin: Callable[[Object], Answer]) -> int:
    """Answer the questions of standard input until it ends. Return the exit code. `arguments`: those that
    LimitedProcess passes. `begin`: takes the first question, and returns the function that answers the others. A
    FaultError ends the process."""
    data_bytes, folder = int(arguments[0]), Path(arguments[1]) if arguments[1:] else None
    cap(resource.RLIMIT_CORE, 0)
    no_boundary = _fork_under_guard(boundary.Limits(data_bytes), folder)
    end_with_parent()
    cap(resource.RLIMIT_DATA, data_bytes)
    questions, answers = _private_streams()
    own_pid = os.getpid()

    def say(answer: Object) -> None:
        if os.getpid() != own_pid:  # a fork made by the code has returned here
            os._exit(0)
        sys.stdout.flush()
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    try:
        say({"open": no_boundary})  # before the code, which could write it
        answer = begin(json.loads(questions.readline()))
        say({})
        for line in questions:
            say(answer(json.loads(line)))
    except KeyboardInterrupt:
        return 1
    except MemoryError:
        say({"fault": memory_limit_message(data_bytes), "hint": "hold less"})
        return 1
    except FaultError as fault:
        say({"fault": f"{fault}"[:MAX_REASON], "hint": fault.hint})
        return 1
    return 0


def _private_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Return streams for questions and answers that the code's input and output cannot reach."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    return questions, answers


def _fork_under_guard(limits: boundary.Limits, folder: Path | None) -> str:
    """Fork, and return in the child, behind a boundary or else with the reason why there is none. The parent waits for
    the end of the child or for SIGTERM, kills all remaining descendants, and ends with the child's status."""
    ends_with_parent_by(signal.SIGTERM)
    take_orphans()
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    reading, report = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        boundary.enter(limits, folder, report)
        return ""
    os.close(report)
    with os.fdopen(reading, "rb") as pipe:
        reported = pipe.read()
    if reported != boundary.CLOSED:
        os.waitpid(child, 0)
        child = os.fork()
        if not child:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return reported.decode("utf-8", "replace") or "the process that makes it ends"
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # so the asking process notices when the child closes its own
        os.dup2(nowhere, descriptor)
    status = None
    while status is None and signal.sigwait(awaited) == signal.SIGCHLD:
        status = _reap(child)
    while True:  # children of killed processes become ours
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, ended_status = os.wait()
        except ChildProcessError:
            break
        status = ended_status if pid == child else status
    code = os.waitstatus_to_exitcode(status or 0)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _reap(child: int) -> int | None:
    """Reap ended processes. Return the status of the child, if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status


def _children() -> list[int]:
    """Return the children of this process, also on kernels without CONFIG_PROC_CHILDREN."""
    pids = []
    for folder in Path("/proc").glob("[1-9]*"):
        with suppress(OSError):  # the process has ended
            if int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                pids.append(int(folder.name))
    return pids
