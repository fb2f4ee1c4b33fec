"""How a launch ended, in words a person can act on: which rank, during which action, why, and which log to read."""

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
    """An error whose message says all that a person needs: it is shown without a traceback, and printable.

    `of_peer`: another rank has the cause, and says it.
    """

    def __init__(self, message: str, *, of_peer: bool = False) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))
        self.of_peer = of_peer


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that was alive when a hang was found: what it was doing, for how long, and where in the code."""

    rank: int
    step: int
    action: str
    for_s: float
    state: str  # of the process: "running", "sleeping", "stopped", …
    where: str  # innermost Python frame, or ""

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"rank {self.rank}: {self.state} in {self.action}, step {self.step}, for {self.for_s:.1f} s{where}"


@dataclass(frozen=True)
class Outcome:
    """The end of a launch. `rank`, `step`, `action` and `log` name what failed or hung first, or who was stopped.

    | kind | meaning | exit code |
    |---|---|---|
    | finished | every rank came to its end | 0 |
    | failed | a rank raised, exited or was killed by a signal | 1 |
    | hung | no rank changed its action for the given time | 3 |
    | stopped | asked to end by SIGINT or SIGTERM, and every rank did after a whole step | 128 + signal |
    | killed | asked a second time: the ranks were killed | 128 + signal |

    (EXIT_USAGE and EXIT_RETRY are of runs that could not begin.)
    """

    kind: Kind
    reason: str = ""
    rank: int | None = None
    step: int = 0
    action: str = ""
    log: Path | None = None
    detail: str = ""  # last lines of the traceback
    signal: int = 0  # of stopped and killed
    waiting: tuple[Waiting, ...] = ()  # of hung, and where a rank is missing

    @property
    def ok(self) -> bool:
        return self.kind == "finished"

    @property
    def exit_code(self) -> int:
        return {"finished": 0, "failed": 1, "hung": 3}.get(self.kind, 128 + self.signal)

    def __str__(self) -> str:
        """One line, then details indented. Control characters of whatever ranks wrote are shown, not sent."""
        if self.rank is None:
            head = f"{self.kind}: {self.reason}" if self.reason else self.kind
        else:
            head = f"rank {self.rank} {self.kind} during {self.action}, step {self.step}: {self.reason}"
        lines = [head, *(f"  {line}" for line in self.detail.splitlines()), *(f"  {w}" for w in self.waiting)]
        if self.log is not None:
            lines.append(f"  log: {self.log}")
        return "\n".join(printable(line) for line in lines)


def printable(text: str) -> str:
    """`text` on one line without control characters, which are written as escapes: safe for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shortened(text: str, most: int = 120) -> str:
    """`text` made printable, its middle left out where it is longer than `most` characters."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) :]}"


def refusal_code(error: Exception) -> int:
    """Exit code for an error that kept a run from beginning: EXIT_RETRY where it may pass, as a full disk does."""
    return EXIT_RETRY if isinstance(error, OSError) and error.errno in _PASSING else EXIT_USAGE


def oom_kills_so_far() -> int:
    """Processes killed for want of memory since boot, in any memory group."""
    match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def death_text(signal: int, *, out_of_memory: bool | None = None) -> str:
    """What a signal that killed a process means.

    `out_of_memory`: whether the kernel counted such a kill meanwhile, None where nobody looked.
    """
    name = signals.Signals(signal).name if signal in set(signals.Signals) else f"signal {signal}"
    if signal != signals.SIGKILL:
        return f"killed by {name}"
    if out_of_memory is None:
        return "killed by SIGKILL, from outside or by the kernel for want of memory"
    if out_of_memory:
        return "killed by SIGKILL, likely out of memory (the kernel counted an out-of-memory kill)"
    return "killed by SIGKILL from outside (the kernel counted no out-of-memory kill)"
