"""An instruction of a chain before it is ordered: how long it holds its lane, and what must go before it."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir import Buffer, Instruction

EXCHANGES = (
    *("counts", "dispatch", "combine"),
    *("gather_rows", "scatter_rows", "gather_sequences", "scatter_sequences", "gather_choices"),
    *("gather", "scatter"),
)
Key = tuple[str, str, str]  # kind, phase and site of an instruction


@dataclass(frozen=True)
class Node:
    """An instruction to be ordered, how long it holds its lane, and what it writes (an exchange: at its wait)."""

    instruction: Instruction
    time_ns: int
    writes: tuple[Buffer, ...]
    after: tuple[Key, ...] = ()  # nodes of its chain that go before it though it reads nothing of theirs

    @property
    def key(self) -> Key:
        """What it is called in its chain."""
        return self.instruction.kind, self.instruction.phase, self.instruction.site

    @property
    def exchanges(self) -> bool:
        """Whether it starts an exchange, on the communication lane."""
        return self.instruction.kind in EXCHANGES

    @property
    def ordered(self) -> bool:
        """Whether it holds a lane. What does not stands beside what it serves, wherever that goes."""
        return self.exchanges or self.instruction.kind == "run"


def nanoseconds(time_s: float) -> int:
    """Whole nanoseconds: sums of them are exact, so orders do not hang on how floats round."""
    return round(time_s * 1e9)
