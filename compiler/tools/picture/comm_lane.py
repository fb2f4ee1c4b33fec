"""The communication during an action or a pair, read from the instructions of its body."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.ir import Instruction, Program
from compiler.plan.actions.chains import EXCHANGES
from compiler.program.lower.estimate import Times, tables_of, timed_spans
from compiler.tools.picture.drawing import ExchangeShare, Lanes


def lanes_of(program: Program, times: Times | Sequence[Times]) -> tuple[Lanes, ...]:
    """Return the exchanges of the bodies of each pipeline rank. `times`: ns from `estimate`, for all ranks or each."""
    by_body: dict[tuple[str, int], tuple[ExchangeShare, ...]] = {}  # bodies of the same name are equal on all ranks
    ranks = []
    for bodies, (kind, table) in zip(program.bodies, tables_of(times, len(program.bodies)), strict=True):
        for body in bodies:
            if (body.name, kind) not in by_body:
                by_body[body.name, kind] = shares_of(body.instructions, table)
        ranks.append(tuple((body.name, by_body[body.name, kind]) for body in bodies if by_body[body.name, kind]))
    return tuple(ranks)


def shares_of(instructions: Sequence[Instruction], times: Times) -> tuple[ExchangeShare, ...]:
    """Return the exchanges of a body, with times as shares of its duration."""
    spans = list(timed_spans(instructions, times))
    duration = max((end for _, _, end in spans), default=0)
    return tuple(
        ExchangeShare(f"{i.kind} {i.action}.{{{i.slot}}}@{i.site}", i.slot, start / duration, end / duration)
        for i, start, end in spans
        if i.kind in EXCHANGES and end > start
    )
