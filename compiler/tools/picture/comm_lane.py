"""The communication during an action or a pair, read from the instructions of its body."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.ir import Instruction, Program
from compiler.plan.actions.chains import EXCHANGES
from compiler.program.lower.estimate import Times, held, tables_of
from compiler.tools.picture.drawing import ExchangeShare, Lanes


def lanes_of(program: Program, times: Times | Sequence[Times]) -> tuple[Lanes, ...]:
    """Exchanges of the bodies of each pipeline rank. `times`: nanoseconds from `estimate`, for all ranks or each."""
    by_body: dict[tuple[str, int], tuple[ExchangeShare, ...]] = {}  # one name is one body, on whatever rank of a kind
    ranks = []
    for bodies, (kind, table) in zip(program.bodies, tables_of(times, len(program.bodies)), strict=True):
        for body in bodies:
            if (body.name, kind) not in by_body:
                by_body[body.name, kind] = shares_of(body.instructions, table)
        ranks.append(tuple((body.name, by_body[body.name, kind]) for body in bodies if by_body[body.name, kind]))
    return tuple(ranks)


def shares_of(instructions: Sequence[Instruction], times: Times) -> tuple[ExchangeShare, ...]:
    """Times as shares of the whole."""
    spans = list(held(instructions, times))
    whole = max((end for _, _, end in spans), default=0)
    return tuple(
        ExchangeShare(f"{i.kind} {i.action}.{{{i.slot}}}@{i.site}", i.slot, start / whole, end / whole)
        for i, start, end in spans
        if i.kind in EXCHANGES and end > start
    )
