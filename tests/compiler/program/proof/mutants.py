"""Mutants of a program: one thing dropped, doubled, swapped, moved, or changed for another of its kind.

Two mutations are left out, as they never change a result: dropping a release (the send is
drained in the end) and swapping two reductions in the order shared by all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from compiler.ir import Body, Instruction, Invocation, Message, Program
from compiler.plan.actions.chains import EXCHANGES
from runtime.contract import Reduction

T = TypeVar("T")
Posting = tuple[int, Message]
Mutation = Callable[[Program, random.Random], Program]

LISTS = ("drop", "double", "swap", "move")


class NothingToEditError(Exception):
    """The program has nothing that the mutation could change."""


def mutant(program: Program, generator: random.Random) -> tuple[str, Program]:
    """A random mutant, and the name of the mutation."""
    while True:
        name = generator.choice(sorted(MUTATIONS))
        try:
            changed = MUTATIONS[name](program, generator)
        except NothingToEditError:
            continue
        if changed != program:
            return name, changed


def edited(items: Sequence[T], edit: str, generator: random.Random, able: Sequence[int] | None = None) -> tuple[T, ...]:
    """`items` with one dropped, doubled somewhere, moved, or swapped with another (near, half of the time).

    `able`: the places from which the edited item is chosen, and with "swap" the other one too.
    """
    able = range(len(items)) if able is None else able
    result, index = list(items), _chosen(able, generator)
    if edit == "drop":
        del result[index]
    elif edit == "double":
        result.insert(generator.choice([index + 1, generator.randrange(len(items) + 1)]), items[index])
    elif edit == "move":
        result.insert(_other(index, len(items), generator), result.pop(index))
    else:
        partner = able[_other(able.index(index), len(able), generator)]
        result[index], result[partner] = result[partner], result[index]
    return tuple(result)


def _other(index: int, count: int, generator: random.Random) -> int:
    """Another place in a list, next to `index` in half of the cases."""
    near = [place for place in (index - 1, index + 1) if 0 <= place < count]
    places = near if generator.random() < 0.5 else [place for place in range(count) if place != index]
    if not places:
        raise NothingToEditError
    return generator.choice(places)


def _chosen(items: Sequence[T], generator: random.Random) -> T:
    if not items:
        raise NothingToEditError
    return generator.choice(items)


def _another(item: T, items: Sequence[T], generator: random.Random) -> T:
    return _chosen([option for option in dict.fromkeys(items) if option != item], generator)


# ---------------------------------------------------------------- invocations


def edit_invocations(program: Program, generator: random.Random, edit: str) -> Program:
    """Posts and releases go with their invocation."""
    rank = generator.randrange(len(program.invocations))
    return with_row(program, rank, edited(program.invocations[rank], edit, generator))


def exchange_actions(program: Program, generator: random.Random) -> Program:
    """Two invocations of one rank exchange their bodies and micro-batches; posts and releases stay."""
    rank = generator.randrange(len(program.invocations))
    row = list(program.invocations[rank])
    if len(row) < 2:
        raise NothingToEditError
    a = generator.randrange(len(row))
    b = _other(a, len(row), generator)
    for index, source in ((a, row[b]), (b, row[a])):
        row[index] = row[index]._replace(body=source.body, micro_batches=source.micro_batches)
    return with_row(program, rank, tuple(row))


def change_micro_batch(program: Program, generator: random.Random) -> Program:
    """An invocation runs on another micro-batch."""

    def change(invocation: Invocation) -> Invocation:
        numbers, slot = list(invocation.micro_batches), generator.randrange(len(invocation.micro_batches))
        numbers[slot] = _another(numbers[slot], range(program.num_micro_batches), generator)
        return invocation._replace(micro_batches=tuple(numbers))

    return _with_one_invocation(program, generator, change)


def change_body(program: Program, generator: random.Random) -> Program:
    """An invocation runs another body of its rank."""
    rank = generator.randrange(len(program.invocations))
    row = list(program.invocations[rank])
    index = generator.randrange(len(row))
    names = [body.name for body in program.bodies[rank]]
    row[index] = row[index]._replace(body=_another(row[index].body, names, generator))
    return with_row(program, rank, tuple(row))


def _with_one_invocation(
    program: Program, generator: random.Random, change: Callable[[Invocation], Invocation]
) -> Program:
    rank = generator.randrange(len(program.invocations))
    row = list(program.invocations[rank])
    index = generator.randrange(len(row))
    row[index] = change(row[index])
    return with_row(program, rank, tuple(row))


def with_row(program: Program, rank: int, row: tuple[Invocation, ...]) -> Program:
    return replace(program, invocations=(*program.invocations[:rank], row, *program.invocations[rank + 1 :]))


# ---------------------------------------------------------------- posts and releases


def edit_messages(program: Program, generator: random.Random, field: str, edit: str) -> Program:
    """One post or release of a rank is dropped, doubled, moved to another invocation, swapped with its neighbour, or is
    of another rank, micro-batch or stage."""
    ranks = [rank for rank, row in enumerate(program.invocations) if any(getattr(i, field) for i in row)]
    rank = _chosen(ranks, generator)
    row = program.invocations[rank]
    flat: list[tuple[int, Posting]] = [(call, entry) for call, i in enumerate(row) for entry in getattr(i, field)]
    index = generator.randrange(len(flat))
    call, (peer, message) = flat[index]
    if edit == "drop":
        del flat[index]
    elif edit == "double":
        flat.insert(index + 1, (generator.choice([call, min(call + 1, len(row) - 1)]), (peer, message)))
    elif edit == "swap":
        partner = _other(index, len(flat), generator)
        flat[index], flat[partner] = (call, flat[partner][1]), (flat[partner][0], (peer, message))
    elif edit == "move":
        flat[index] = (min(max(call + generator.choice([-2, -1, 1, 2]), 0), len(row) - 1), (peer, message))
    elif edit == "re-peer":
        flat[index] = (call, (_another(peer, range(len(program.bodies)), generator), message))
    elif generator.random() < 0.5:
        micro_batch = _another(message.micro_batch, range(program.num_micro_batches), generator)
        flat[index] = (call, (peer, message._replace(micro_batch=micro_batch)))
    else:
        actions = [posted.action for _, (_, posted) in flat]
        flat[index] = (call, (peer, message._replace(action=_another(message.action, actions, generator))))
    listed = [tuple(entry for entry_call, entry in flat if entry_call == call) for call in range(len(row))]
    return with_row(program, rank, tuple(i._replace(**{field: new}) for i, new in zip(row, listed, strict=True)))  # type: ignore[arg-type]


# ---------------------------------------------------------------- instructions


def edit_instructions(program: Program, generator: random.Random, edit: str, kinds: Sequence[str] = ()) -> Program:
    """One instruction of a body, of one of `kinds` if there are any."""

    def change(body: Body) -> tuple[Instruction, ...]:
        candidates = [index for index, i in enumerate(body.instructions) if not kinds or i.kind in kinds]
        return edited(body.instructions, edit, generator, candidates)

    return _with_one_body(program, generator, change)


def change_instruction(program: Program, generator: random.Random, change_name: str) -> Program:
    """One instruction of a body gets another peer, operand, result, parameter, slot or phase."""

    def change(body: Body) -> tuple[Instruction, ...]:
        items = list(body.instructions)
        candidates = [index for index, i in enumerate(items) if CHANGES[change_name][0](i)]
        index = _chosen(candidates, generator)
        items[index] = CHANGES[change_name][1](items[index], body, program, generator)
        return tuple(items)

    return _with_one_body(program, generator, change)


def _with_one_body(
    program: Program, generator: random.Random, change: Callable[[Body], tuple[Instruction, ...]]
) -> Program:
    places = [(rank, index) for rank, bodies in enumerate(program.bodies) for index in range(len(bodies))]
    for rank, index in generator.sample(places, len(places)):
        bodies = list(program.bodies[rank])
        try:
            bodies[index] = replace(bodies[index], instructions=change(bodies[index]))
        except NothingToEditError:
            continue
        return replace(program, bodies=(*program.bodies[:rank], tuple(bodies), *program.bodies[rank + 1 :]))
    raise NothingToEditError


def _peer(i: Instruction, _: Body, program: Program, generator: random.Random) -> Instruction:
    return replace(i, peer=_another(i.peer, range(len(program.bodies)), generator))


def _read(i: Instruction, body: Body, _: Program, generator: random.Random) -> Instruction:
    """Make the instruction read another value of its slot instead of one of its operands."""
    values = [name for instruction in body.instructions if instruction.slot == i.slot for name in instruction.reads]
    reads, index = list(i.reads), generator.randrange(len(i.reads))
    reads[index] = _another(reads[index], values, generator)
    return replace(i, reads=tuple(reads))


def _reads_swapped(i: Instruction, _: Body, __: Program, generator: random.Random) -> Instruction:
    return replace(i, reads=edited(i.reads, "swap", generator))


def _write(i: Instruction, body: Body, _: Program, generator: random.Random) -> Instruction:
    """The instruction writes its result under another value's name."""
    names = [b.name for instruction in body.instructions if instruction.slot == i.slot for b in instruction.writes]
    writes, index = list(i.writes), generator.randrange(len(i.writes))
    writes[index] = replace(writes[index], name=_another(writes[index].name, names, generator))
    return replace(i, writes=tuple(writes))


def _params(i: Instruction, _: Body, __: Program, generator: random.Random) -> Instruction:
    return replace(i, params=edited(i.params, generator.choice(["drop", "double"]), generator))


def _place(i: Instruction, _: Body, __: Program, generator: random.Random) -> Instruction:
    """A tensor is taken from the rank's own, or from the value that another tensor is in."""
    places, index = list(i.params_in), generator.randrange(len(i.params_in))
    places[index] = _another(places[index], ["", *i.params_in, *i.reads], generator)
    return replace(i, params_in=tuple(places))


def _slot(i: Instruction, body: Body, _: Program, __: random.Random) -> Instruction:
    return replace(i, slot=1 - i.slot, action=body.actions[(1 - i.slot) % len(body.actions)])


def _phase(i: Instruction, _: Body, __: Program, generator: random.Random) -> Instruction:
    return replace(i, phase=_another(i.phase, "FIW", generator))


CHANGES: dict[
    str,
    tuple[Callable[[Instruction], object], Callable[[Instruction, Body, Program, random.Random], Instruction]],
] = {
    "peer": (lambda i: i.peer >= 0, _peer),
    "operand": (lambda i: i.reads, _read),
    "operands' order": (lambda i: len(i.reads) > 1 and i.kind != "free", _reads_swapped),
    "result": (lambda i: i.writes, _write),
    "parameters": (lambda i: i.params, _params),
    "place of a tensor": (lambda i: i.params_in, _place),
    "slot": (lambda i: True, _slot),
    "phase": (lambda i: i.kind != "free", _phase),
}

# ---------------------------------------------------------------- reductions


def edit_reduces(program: Program, generator: random.Random, edit: str) -> Program:
    candidates = [index for index, collective in enumerate(program.epilogue) if collective.kind == "reduce"]
    return replace(program, epilogue=edited(program.epilogue, edit, generator, candidates))


def change_reduce(program: Program, generator: random.Random) -> Program:
    """Remove a holder or a parameter from a reduction."""
    collectives = list(program.epilogue)
    index = _chosen([index for index, collective in enumerate(collectives) if collective.bucket], generator)
    bucket, field = collectives[index].bucket, generator.choice(["holders", "replicas"])
    shorter = edited(getattr(bucket, field), "drop", generator)
    collectives[index] = replace(collectives[index], bucket=replace(bucket, **{field: shorter}))  # type: ignore[type-var]
    return replace(program, epilogue=tuple(collectives))


def edit_starts(program: Program, generator: random.Random, edit: str) -> Program:
    """A start of a rank's reductions dropped, doubled, earlier, later, or of other stages; stages of two swapped."""
    rank = _chosen([rank for rank, row in enumerate(program.reductions) if row], generator)
    row = list(program.reductions[rank])
    if edit == "swap":
        stages = edited([reduction.stages for reduction in row], edit, generator)
        row = [Reduction(reduction.after, stage_number) for reduction, stage_number in zip(row, stages, strict=True)]
    elif edit in LISTS:
        row = list(edited(row, edit, generator))
    else:
        index = generator.randrange(len(row))
        after, stages = row[index]
        if edit == "shift":
            row[index] = Reduction(max(0, after + generator.choice([-2, -1, 1])), stages)
        else:
            row[index] = Reduction(after, (max(0, stages[0] + generator.choice([-1, 1])), *stages[1:]))
    rows = list(program.reductions)
    rows[rank] = tuple(row)
    return replace(program, reductions=tuple(rows))


def _named(edit: Callable[..., Program], *rest: object) -> Mutation:
    return lambda program, generator: edit(program, generator, *rest)


TALK, EXCHANGED = ("send", "receive"), (*EXCHANGES, "zeros")

MUTATIONS: dict[str, Mutation] = {
    **{f"{edit} an invocation": _named(edit_invocations, edit) for edit in LISTS},
    **{f"{edit} an instruction": _named(edit_instructions, edit) for edit in LISTS},
    **{f"{edit} a send or receive": _named(edit_instructions, edit, TALK) for edit in LISTS},
    **{f"{edit} an exchange": _named(edit_instructions, edit, EXCHANGED) for edit in LISTS},
    **{f"{edit} a wait": _named(edit_instructions, edit, ("wait",)) for edit in LISTS},
    **{f"{edit} a free": _named(edit_instructions, edit, ("free",)) for edit in LISTS},
    **{f"change an instruction's {change}": _named(change_instruction, change) for change in CHANGES},
    **{f"{edit} a reduction": _named(edit_reduces, edit) for edit in ("drop", "double")},
    "shorten a reduction": change_reduce,
    **{
        f"{edit} the start of a reduction": _named(edit_starts, edit)
        for edit in ("drop", "double", "swap", "shift", "change")
    },
    **{f"{edit} a post": _named(edit_messages, "posts", edit) for edit in (*LISTS, "re-peer", "rename")},
    **{f"{edit} a release": _named(edit_messages, "releases", edit) for edit in (*LISTS[1:], "re-peer", "rename")},
    "exchange two actions": exchange_actions,
    "change a micro-batch": change_micro_batch,
    "change a body": change_body,
}
