"""How a launch ended, for users: which rank, during which action, why, and which log to read."""

from __future__ import annotations

import errno
import re
import signal as signals
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["finished", "stopped", "killed", "failed", "hung"]

EXIT_USAGE = 2  # the build, the data or the command line is wrong: the same command fails again
EXIT_RETRY = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class ReportedError(RuntimeError):
    """An error whose message is complete: it is shown without a traceback, and made printable.

    `of_peer`: the cause is another rank, which reports it. `slowdown`: if the run should go on without the device of
    this rank, how many times as long it takes as others; else 0.
    """

    def __init__(self, message: str, *, of_peer: bool = False, slowdown: float = 0.0) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))
        self.of_peer, self.slowdown = of_peer, slowdown


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that was alive when a hang was detected: its action, for how long, and its position in the code."""

    rank: int
    step: int
    action: str
    for_s: float
    state: str  # of the process: "running", "sleeping", "stopped", …
    where: str  # innermost Python frame, or ""

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"rank {self.rank}: {self.state} in {self.action}, step {self.step}, for {self.for_s:.1f} s{place}"


@dataclass(frozen=True)
class Outcome:
    """The end of a launch. `rank`, `step`, `action` and `log` describe the rank that failed or hung first.

    | kind | meaning | exit code |
    |---|---|---|
    | finished | every rank finished | 0 |
    | failed | a rank raised, exited or was killed by a signal | 1 |
    | hung | no rank changed its action for the given time | 3 |
    | stopped | after SIGINT or SIGTERM, every rank ended after a whole step | 128 + signal |
    | killed | after a second signal, the ranks were killed | 128 + signal |

    (EXIT_USAGE and EXIT_RETRY are for runs that could not start.)
    """

    kind: Kind
    reason: str = ""
    rank: int | None = None
    step: int = 0
    action: str = ""
    log: Path | None = None
    detail: str = ""  # last lines of the traceback
    signal: int = 0  # for stopped and killed
    waiting: tuple[Waiting, ...] = ()  # for hung, and for lost ranks
    slowdown: float = 0.0  # of a rank without whose device the run should go on, else 0

    @property
    def ok(self) -> bool:
        return self.kind == "finished"

    @property
    def exit_code(self) -> int:
        return {"finished": 0, "failed": 1, "hung": 3}.get(self.kind, 128 + self.signal)

    def __str__(self) -> str:
        """Return one line, then indented details. Control characters are escaped."""
        if self.rank is None:
            head = f"{self.kind}: {self.reason}" if self.reason else self.kind
        else:
            head = f"rank {self.rank} {self.kind} during {self.action}, step {self.step}: {self.reason}"
        lines = [head, *(f"  {line}" for line in self.detail.splitlines()), *(f"  {w}" for w in self.waiting)]
        if self.log is not None:
            lines.append(f"  log: {self.log}")
        return "\n".join(printable(line) for line in lines)


def printable(text: str) -> str:
    """Return `text` on one line with escaped control characters: safe for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shorten(text: str, max_characters: int = 120) -> str:
    """Return `text` made printable, without its middle if it is longer than `max_characters` characters."""
    text = printable(text)
    return text if len(text) <= max_characters else f"{text[: max_characters // 2]}…{text[-(max_characters // 2) :]}"


def refusal_code(error: Exception) -> int:
    """Return the exit code for an error before a run: EXIT_RETRY if it is temporary, such as a full disk."""
    return EXIT_RETRY if isinstance(error, OSError) and error.errno in _PASSING else EXIT_USAGE


def oom_kills_so_far() -> int:
    """Return the number of out-of-memory kills since boot, in any memory group."""
    match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def death_text(signal: int, *, out_of_memory: bool | None = None) -> str:
    """Describe the signal that killed a process.

    `out_of_memory`: whether the kernel counted an out-of-memory kill meanwhile; None if unknown.
    """
    name = signals.Signals(signal).name if signal in set(signals.Signals) else f"signal {signal}"
    if signal != signals.SIGKILL:
        return f"killed by {name}"
    if out_of_memory is None:
        return "killed by SIGKILL, from outside or by the kernel for want of memory"
    if out_of_memory:
        return "killed by SIGKILL, likely out of memory (the kernel counted an out-of-memory kill)"
    return "killed by SIGKILL from outside (the kernel counted no out-of-memory kill)"
