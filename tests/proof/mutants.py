"""Mutants of a program: one thing swapped, dropped, doubled or moved.

Left out are two that never change a result, so that they say nothing about the proof: a release dropped (the send is
drained in the end) and two reductions swapped (in the one order that all ranks share).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from compiler.ir import Body, Invocation, Message, Program

T = TypeVar("T")
Listed = tuple[tuple[int, Message], ...]


def mutant(program: Program, generator: random.Random) -> tuple[str, Program]:
    """One random mutant and the name of what was done to the program."""
    name = generator.choice(sorted(MUTATIONS))
    return name, MUTATIONS[name](program, generator)


def swapped(items: Sequence[T], a: int, b: int) -> tuple[T, ...]:
    result = list(items)
    result[a], result[b] = result[b], result[a]
    return tuple(result)


def edited(items: Sequence[T], how: str, generator: random.Random) -> tuple[T, ...]:
    """`items` with one dropped, doubled somewhere, or swapped with another (a neighbour, half of the time)."""
    index = generator.randrange(len(items))
    if how == "drop":
        return (*items[:index], *items[index + 1 :])
    if how == "double":
        place = generator.choice([index + 1, generator.randrange(len(items) + 1)])
        return (*items[:place], items[index], *items[place:])
    near = [other for other in (index - 1, index + 1) if 0 <= other < len(items)]
    others = [other for other in range(len(items)) if other != index]
    other = generator.choice(near if generator.random() < 0.5 else others) if others else index
    return swapped(items, index, other)


def edited_row(rows: Sequence[tuple[T, ...]], how: str, generator: random.Random) -> tuple[tuple[T, ...], ...]:
    rank = generator.randrange(len(rows))
    return (*rows[:rank], edited(rows[rank], how, generator), *rows[rank + 1 :])


def edit_invocations(program: Program, generator: random.Random, how: str) -> Program:
    return replace(program, invocations=edited_row(program.invocations, how, generator))


def edit_instructions(program: Program, generator: random.Random, how: str) -> Program:
    rank = generator.randrange(len(program.bodies))
    bodies: list[Body] = list(program.bodies[rank])
    index = generator.randrange(len(bodies))
    body = bodies[index]
    bodies[index] = replace(body, instructions=edited(body.instructions, how, generator))
    return replace(program, bodies=(*program.bodies[:rank], tuple(bodies), *program.bodies[rank + 1 :]))


def edit_reduces(program: Program, generator: random.Random, how: str) -> Program:
    return replace(program, reduces=edited(program.reduces, how, generator))


def exchange_micro_batches(program: Program, generator: random.Random) -> Program:
    """Two invocations of one rank take each other's body and micro-batches; posts and releases stay."""
    rank = generator.randrange(len(program.invocations))
    row = list(program.invocations[rank])
    a, b = generator.sample(range(len(row)), 2)
    for here, there in ((a, row[b]), (b, row[a])):
        row[here] = replace(row[here], body=there.body, micro_batches=there.micro_batches)
    return replace(program, invocations=(*program.invocations[:rank], tuple(row), *program.invocations[rank + 1 :]))


def edit_messages(program: Program, generator: random.Random, field: str, how: str) -> Program:
    """Drop, double, swap or move one post or release of a rank, within the rank's whole list of them."""
    ranks = [rank for rank, row in enumerate(program.invocations) if sum(len(getattr(i, field)) for i in row) > 1]
    rank = generator.choice(ranks)
    row = program.invocations[rank]
    flat = [(at, entry) for at, invocation in enumerate(row) for entry in getattr(invocation, field)]
    index = generator.randrange(len(flat))
    at, entry = flat[index]
    if how == "drop":
        del flat[index]
    elif how == "double":
        flat.insert(index + 1, (generator.choice([at, min(at + 1, len(row) - 1)]), entry))
    elif how == "swap":
        other = generator.choice([k for k in (index - 1, index + 1) if 0 <= k < len(flat)])
        (at_b, entry_b) = flat[other]
        flat[index], flat[other] = (at, entry_b), (at_b, entry)
    else:
        flat[index] = (min(max(at + generator.choice([-2, -1, 1, 2]), 0), len(row) - 1), entry)
    return replace(
        program, invocations=(*program.invocations[:rank], _with(row, field, flat), *program.invocations[rank + 1 :])
    )


def _with(
    row: tuple[Invocation, ...], field: str, flat: list[tuple[int, tuple[int, Message]]]
) -> tuple[Invocation, ...]:
    entries: list[Listed] = [tuple(entry for where, entry in flat if where == at) for at in range(len(row))]
    changes = [{field: listed} for listed in entries]
    return tuple(replace(invocation, **change) for invocation, change in zip(row, changes, strict=True))  # type: ignore[arg-type]


def _named(edit: Callable[..., Program], *rest: str) -> Callable[[Program, random.Random], Program]:
    return lambda program, generator: edit(program, generator, *rest)


MUTATIONS: dict[str, Callable[[Program, random.Random], Program]] = {
    **{f"{how} an invocation": _named(edit_invocations, how) for how in ("swap", "drop", "double")},
    **{f"{how} an instruction": _named(edit_instructions, how) for how in ("swap", "drop", "double")},
    **{f"{how} a reduction": _named(edit_reduces, how) for how in ("drop", "double")},
    **{f"{how} a post": _named(edit_messages, "posts", how) for how in ("swap", "drop", "double", "move")},
    **{f"{how} a release": _named(edit_messages, "releases", how) for how in ("swap", "double", "move")},
    "exchange two micro-batches": exchange_micro_batches,
}
