"""Which calls of segments a rank replays as CUDA graphs (`kernels.graphs`), and why it launches the others' kernels.

A graph has fixed addresses and shapes. Rows of experts have neither: their number is read on the host, and their memory
is allocated for each exchange. Gathered weights, sharded gradients and values that return from the host are in new
memory each time, and are too large to copy. All else that a segment reads keeps its address, or is small enough to be
copied to one that does (runtime/step/graphs.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compiler.ir import Body, Instruction, Program
from compiler.ir.dtypes import has_rows
from runtime.contract import GraphCalls, PlainCalls

ROWS = "they read or write rows of experts"
SHARDED = "their weights or gradients are sharded over data ranks"
ON_HOST = "they read values that return from host memory"


@dataclass(frozen=True)
class Replays:
    """The calls that ranks replay. `moving`: values without a fixed address, with the reason."""

    moving: Mapping[str, str]

    @classmethod
    def of(cls, bodies: Iterable[Body]) -> Replays:
        """The replays of a build. `bodies`: those of all ranks and programs."""
        moving: dict[str, str] = {}
        for instruction in (i for body in bodies for i in body.instructions):
            if instruction.kind == "from_host":
                moving |= {written.name: ON_HOST for written in instruction.writes}
            elif instruction.kind == "wait" and instruction.wait in ("dispatch", "combine"):
                moving |= {written.name: ROWS for written in instruction.writes}
        return cls(moving)

    def has(self, instruction: Instruction) -> bool:
        """Whether an instruction is a call of a segment that is replayed."""
        return instruction.kind == "run" and self.why_not(instruction) is None

    def why_not(self, run: Instruction) -> str | None:
        """Why a call of a segment is not replayed; None if it is."""
        if any(run.params_in) or any(run.weights_in):
            return SHARDED
        if any(has_rows(written.shape) for written in run.writes):
            return ROWS
        return next((self.moving[name] for name in run.reads if name in self.moving), None)

    def count(self, program: Program) -> GraphCalls:
        """The calls of segments in a program, on all pipeline ranks of a column."""
        reasons = Counter[str | None]()
        for bodies, invocations in zip(program.bodies, program.invocations, strict=True):
            by_name = {body.name: body for body in bodies}
            times = Counter(invocation.body for invocation in invocations)
            for name, count in times.items():
                for run in (i for i in by_name[name].instructions if i.kind == "run"):
                    reasons[self.why_not(run)] += count
        replayed = reasons.pop(None, 0)
        return GraphCalls(replayed, tuple(PlainCalls(why or "", calls) for why, calls in sorted(reasons.items())))
