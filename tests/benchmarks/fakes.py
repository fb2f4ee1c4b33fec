"""Contestants for the tests of the arena: `python -m tests.benchmarks.fakes NAME KIND JOURNAL --wire R,W`.

Each writes its name into the journal at every step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.speed.serve import WARM_UP, serve
from tests.runtime.processes import wait_for

BURNT_S = 0.05  # of the processor, in a step
HELD_BYTES = 64 << 20


def main() -> None:
    name, kind, journal, _, wire = sys.argv[1:]
    taken = 0

    def step() -> float:
        nonlocal taken
        taken += 1
        with Path(journal).open("a") as stream:
            print(name, file=stream)
        KINDS[kind](taken)
        return float(taken)

    if kind == "mute":
        signal.pause()
    if kind == "restless":  # a thread that never rests
        threading.Thread(target=_spin, daemon=True).start()
    if kind == "escaped":  # a process that is in no group of the contestant's
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    serve(wire, step, {"name": name})


def _spin() -> None:
    while True:
        pass


def _dies(step: int) -> None:
    if step > WARM_UP + 2:
        print("out of cheese", flush=True)
        os._exit(7)


def _killed(step: int) -> None:
    if step > WARM_UP:
        os.kill(os.getpid(), 9)


def _hangs(step: int) -> None:
    if step > WARM_UP + 2:
        signal.pause()


def _burns(_: int) -> None:
    until = time.process_time() + BURNT_S
    while time.process_time() < until:
        pass


def _holds(step: int) -> None:
    if step > WARM_UP:
        HELD.clear()
        HELD.append(b"x" * HELD_BYTES)


def _parent(_: int) -> None:
    code = f"import time\nwhile time.process_time() < {BURNT_S}: pass\nimport sys; sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    wait_for(lambda: _used_s(child.pid) >= BURNT_S, "the work of a child")
    CHILDREN.append(child)  # keep the process alive, so that the arena can read its CPU time


def _used_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)


HELD: list[bytes] = []
CHILDREN: list[subprocess.Popen[bytes]] = []
KINDS: dict[str, Callable[[int], None]] = {
    "good": lambda _: None,
    "mute": lambda _: None,
    "restless": lambda _: None,
    "escaped": lambda _: None,
    "dies": _dies,
    "killed": _killed,
    "hangs": _hangs,
    "burns": _burns,
    "holds": _holds,
    "parent": _parent,
}

if __name__ == "__main__":
    main()
