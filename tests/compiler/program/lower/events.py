"""An independent count of a body's time: two machines with queues, driven by events. It shares no code with dsc's own.

One machine runs the body's instructions; at an exchange it puts the exchange into the other's queue and continues
on, and at a wait it sleeps until the other machine has finished that exchange. Values are tracked: what is read must be
there.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from compiler.ir import Body, Instruction

Times = Mapping[tuple[str, str, str], int]


@dataclass
class Machines:
    """Both lanes of a rank, and the events to come: (time, number, what)."""

    body: Body
    times: Times
    now: int = 0
    place: int = 0
    computing: bool = False
    queue: deque[Instruction] = field(default_factory=deque)
    moving: Instruction | None = None
    finished: set[tuple[int, str, str, str]] = field(default_factory=set)
    values: set[tuple[int, str]] = field(default_factory=set)
    events: list[tuple[int, int, str]] = field(default_factory=list)
    idle_while_moving: int = 0

    def run(self, given: set[tuple[int, str]]) -> tuple[int, int]:
        """(end of the body, time in which only the communication lane is busy)."""
        self.values = set(given)
        self.proceed()
        while self.events:
            time, _, event = heapq.heappop(self.events)
            if not self.computing and self.moving is not None:
                self.idle_while_moving += time - self.now
            self.now = time
            if event == "computed":
                self.computing = False
            else:
                assert self.moving is not None
                self.finished.add(self.name(self.moving))
                self.moving = None
            self.proceed()
        assert self.place == len(self.body.instructions), "it sleeps for ever"
        return self.now, self.idle_while_moving

    def proceed(self) -> None:
        while not self.computing and self.place < len(self.body.instructions):
            i = self.body.instructions[self.place]
            if i.kind == "wait" and (i.slot, i.wait, i.phase, i.site) not in self.finished:
                break
            self.place += 1
            self.begin(i)
        if self.moving is None and self.queue:
            self.moving = self.queue.popleft()
            self.after(self.moving, "moved")

    def begin(self, i: Instruction) -> None:
        for name in i.reads:
            assert (i.slot, name) in self.values, f"{i.kind} {i.site} reads {name}, which is not there"
        if i.kind == "free":
            self.values -= {(i.slot, name) for name in i.reads}
        elif i.kind == "run":
            self.computing = True
            self.after(i, "computed")
        elif i.kind in ("counts", "dispatch", "combine"):
            self.queue.append(i)
        self.values |= {(i.slot, b.name) for b in i.writes}
        if self.moving is None and self.queue:
            self.moving = self.queue.popleft()
            self.after(self.moving, "moved")

    def after(self, i: Instruction, what: str) -> None:
        time = self.now + self.times[i.kind, i.phase, i.site]
        heapq.heappush(self.events, (time, len(self.finished) + self.place, what))

    @staticmethod
    def name(i: Instruction) -> tuple[int, str, str, str]:
        return i.slot, i.kind, i.phase, i.site


def given_to(body: Body) -> set[tuple[int, str]]:
    """The values that earlier bodies leave: they are read here and not written here."""
    written = {(i.slot, b.name) for i in body.instructions for b in i.writes}
    return {(i.slot, name) for i in body.instructions for name in i.reads} - written
