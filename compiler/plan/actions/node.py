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
    """An instruction to be ordered, how long it holds its lane, and what it writes (an exchange: at its wait).

    What a device computes beside an exchange it computes on the SMs that the exchange leaves. An action that exchanges
    nothing has all SMs. In one that does, so has a segment while nothing is exchanged, unless the spec keeps SMs for
    communication: then kernels are made for the others.
    """

    instruction: Instruction
    time_ns: int  # beside an exchange
    writes: tuple[Buffer, ...]
    after: tuple[Key, ...] = ()  # nodes of its chain that go before it though it reads nothing of theirs
    faster_ns: int = 0  # by how much it is faster with all SMs
    keeps: bool = False  # whether it keeps to its share of the SMs all the time that its action takes

    @property
    def key(self) -> Key:
        """What it is called in its chain."""
        return self.instruction.kind, self.instruction.phase, self.instruction.site

    @property
    def alone_ns(self) -> int:
        """How long it takes in an action that exchanges nothing."""
        return self.time_ns - self.faster_ns

    @property
    def between_ns(self) -> int:
        """How long it takes in an action that exchanges, while nothing is exchanged."""
        return self.time_ns if self.keeps else self.alone_ns

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
