"""What a rank holds at its peak: every value by name, and what it is there for.

kept      made by other segments and kept for the backward: inputs of segments, rows that were received
saved     made by a forward for its backward
deferred  made by a backward for the weight gradients behind it, which other actions run
gradient  of activations, in the action that runs
buffer    sent or received by the exchanges of the action that runs, or staged by them (memory.py)
message   posted, received or sent between pipeline ranks, until it is known to have arrived
inside    within one segment for a moment
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compiler.ir import Plan, Program
from compiler.ir.names import is_gradient
from compiler.predict.prediction import HeldTensor
from compiler.program.proof.effects import LiveMemory, Storage, is_staged
from compiler.program.proof.lifetimes import RankValues
from compiler.program.proof.structure import EXCHANGES
from compiler.schedule.schedule import Schedule

NAMELESS = {"message": "between pipeline ranks", "inside": "of the segment that runs"}
_LAYER = re.compile(r"^(d_)?[LM]\d+_")


@dataclass(frozen=True)
class Peak:
    """The peak of the values of one rank; `buffers`: what exchanges of the action send and receive, and messages under
    way."""

    bytes: int
    buffers: int
    held: tuple[HeldTensor, ...]  # values of one name in any layer and micro-batch together, the largest first


class _PeakMemory(LiveMemory):
    """A memory that knows the storages live at its peak; a message that was posted is none until it is received."""

    def __init__(self, num_bytes: int, live: Iterable[Storage]) -> None:
        super().__init__(bytes=num_bytes, peak_bytes=num_bytes)
        self.live = {id(storage): storage for storage in live}
        self.at_peak, self.inside = tuple(self.live.values()), 0

    def hold(self, storage: Storage) -> None:
        self.live.setdefault(id(storage), storage)
        super().hold(storage)

    def drop(self, storage: Storage) -> None:
        if storage.holders == 1:
            self.live.pop(id(storage), None)
        super().drop(storage)

    def add(self, fixed_bytes: int, bytes: int) -> None:
        self._note(bytes, 0)
        super().add(fixed_bytes, bytes)

    def touch(self, fixed_bytes: int, bytes: int) -> None:
        self._note(bytes, bytes)
        super().touch(fixed_bytes, bytes)

    def _note(self, bytes: int, inside: int) -> None:
        if self.bytes + bytes > self.peak_bytes:
            self.at_peak, self.inside = tuple(self.live.values()), inside


def peak_of(values: RankValues, program: Program, schedule: Schedule, top: int, kinds: Mapping[str, str]) -> Peak:
    """What is live at the peak of a rank that is at its beginning; it comes in the rank's invocation number `top`.

    `kinds`: what `saved_and_deferred` gives.
    """
    steps = list(zip(program.invocations[values.rank], schedule.actions[values.rank], strict=True))
    for invocation, step in steps[:top]:
        values.invoke(invocation, step)
    invocation, step = steps[top]
    spaces = values.spaces()
    before = {id(storage): storage for space in spaces.values() for storage in space.held}
    watch = _PeakMemory(values.memory.bytes, before.values())
    values.watch(invocation, step, spaces, watch)

    instructions = values.bodies[invocation.body][0].instructions
    exchanges = [i for i in instructions if (i.wait or i.kind) in EXCHANGES]
    exchanged = {name for i in exchanges for name in (*i.reads, *(buffer.name for buffer in i.writes))}

    def kind(storage: Storage) -> str:
        if not storage.name:
            return "message"
        if is_staged(storage.name) or (id(storage) not in before and storage.name in exchanged):
            return "buffer"
        if is_gradient(storage.name):
            return "deferred" if id(storage) in before else "gradient"
        return kinds.get(storage.name, "kept")

    named, held = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for storage in watch.at_peak:
        named[kind(storage), storage.name] += storage.bytes
    for (of, name), size in named.items():
        held[of, _LAYER.sub(r"\1", name) or NAMELESS[of]] += size
    held["message", NAMELESS["message"]] += watch.peak_bytes - watch.inside - sum(s.bytes for s in watch.at_peak)
    held["inside", NAMELESS["inside"]] += watch.inside
    rows = sorted(held.items(), key=lambda row: (-row[1], row[0]))
    return Peak(
        bytes=watch.peak_bytes,
        buffers=sum(size for (of, _), size in rows if of in ("buffer", "message")),
        held=tuple(HeldTensor(name, size, of) for (of, name), size in rows if size),
    )


def saved_and_deferred(plan: Plan) -> dict[str, str]:
    """The values that segments make beyond inputs and outputs, by name: whether they are saved or deferred."""
    found: dict[str, str] = {}
    for site, cut in plan.cuts.items():
        prefix = site.replace(".", "_")
        found |= {f"{prefix}_{buffer.name}": "saved" for buffer in cut.saved}
        found |= {f"{prefix}_{buffer.name}": "deferred" for buffer in cut.deferred}
    return found
