"""First pass, over bodies: each holds exactly the instructions its stage needs, with the operands its stage says, in
their order, and ends every exchange it starts.

It leaves to the later passes only *when* things happen. A body is looked at once, however often it is invoked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from compiler.ir import Body, Communication, Instruction, Plan, Program, Stage
from compiler.proof.certificate import ProofError
from compiler.proof.effects import Effects, Waits
from compiler.proof.operands import Cuts, operands, runs, steps_of
from compiler.schedules.schedule import Schedule, ScheduleError
from runtime.actions import Action, Pair, Step, actions_of, parse_step

Key: TypeAlias = tuple[str, str, str, str]  # (kind, phase, site, value or what is waited for)

PHASES = {"F": "F", "B": "IW", "I": "I", "W": "W"}
EXCHANGES = ("counts", "dispatch", "combine")


def schedule_of(program: Program, plan: Plan, known: Effects | None = None) -> Schedule:
    """The schedule a program carries out, legal (each F, then B or I…W, once, on the placement's rank) on the plan.

    `known` has the actions of programs that were read before.
    """
    actions = {} if known is None else known.actions
    num_ranks = len(program.bodies)
    if len(program.invocations) != num_ranks or plan.mesh.pp != num_ranks:
        raise ProofError(
            f"{num_ranks} ranks have bodies, {len(program.invocations)} invocations, and the plan has {plan.mesh.pp}"
        )
    steps = tuple(tuple(_steps(program, rank, actions)) for rank in range(num_ranks))
    needed, held = program.stage_placement, plan.stage_placement
    schedule = Schedule(program.name, num_ranks, program.num_micro_batches, needed, steps)
    try:
        schedule.check()
    except ScheduleError as error:
        raise ProofError(str(error)) from None
    if needed.num_stages(num_ranks) != len(plan.stages):
        raise ProofError(f"placement {needed} on {num_ranks} ranks does not fit {len(plan.stages)} stages")
    if not held.supports(needed, num_ranks):
        raise ProofError(f"a {needed} program runs stages that a {held} plan does not store there")
    return schedule


def check_bodies(program: Program, plan: Plan, known: Effects) -> None:
    """Raise ProofError unless every body holds what its actions need, and nothing else; of those `known` to, again."""
    cuts = plan.cuts
    for rank, bodies in enumerate(program.bodies):
        names = [body.name for body in bodies]
        if len(set(names)) < len(names):
            raise ProofError(f"rank {rank}: two bodies have one name")
        if set(names) != {invocation.body for invocation in program.invocations[rank]}:
            raise ProofError(f"rank {rank}: there is a body that nothing invokes")
        for body in bodies:
            number = known.number_of(rank, body)
            if number in known.right:
                continue
            _check_labels(rank, body)
            for slot, action in enumerate(body.actions):
                stage = plan.stages[int(action[1:])]
                steps = steps_of(stage)
                own = [i for i in body.instructions if i.slot == slot and i.kind != "free"]
                _check_counts(f"rank {rank}, {action}", own, _needs(stage, PHASES[action[0]], cuts))
                for i in own:
                    has = (i.reads, i.params, i.weights, i.writes if i.kind not in EXCHANGES else ())
                    if has != operands(i, stage, steps, cuts):
                        raise ProofError(f"rank {rank}, {action}: {_name(i)} has other operands than its stage says")
            waits_of(rank, body)
            known.right.add(number)


def waits_of(rank: int, body: Body) -> Waits:
    """Index of each exchange's start → that of the wait which ends it: exactly one, later, with the same operands."""
    started: dict[tuple[int, Key], int] = {}
    ends: Waits = {}
    for index, instruction in enumerate(body.instructions):
        kind = instruction.wait or instruction.kind
        where = (instruction.slot, (kind, instruction.phase, instruction.site, ""))
        if instruction.kind in EXCHANGES:
            if where in started:
                raise ProofError(
                    f"rank {rank}, {instruction.action}: {_name(instruction)} starts again before its wait"
                )
            started[where] = index
        elif instruction.kind == "wait":
            start = started.pop(where, None)
            if start is None or body.instructions[start].reads != instruction.reads:
                raise ProofError(
                    f"rank {rank}, {instruction.action}: {_name(instruction)} has no start with its operands"
                )
            ends[start] = index
    for start in started.values():
        late = body.instructions[start]
        raise ProofError(f"rank {rank}, {late.action}: {_name(late)} is never waited for")
    return ends


def _steps(program: Program, rank: int, known: dict[tuple[str, int], Action]) -> Iterator[Step]:
    """What the invocations of a rank are of, from the texts of its bodies' actions; each action is read once."""
    texts = {body.name: body.actions for body in reversed(program.bodies[rank])}
    for invocation in program.invocations[rank]:
        name, micro_batches = invocation.body, invocation.micro_batches
        of = texts.get(name, ())
        if len(of) != len(micro_batches) or len(of) not in (1, 2):
            raise ProofError(f"rank {rank}, {name}: no body of this name takes {len(micro_batches)} micro-batches")
        taken = []
        for key in zip(of, micro_batches, strict=True):
            if key not in known:
                known[key] = _action(rank, name, *key)
            taken.append(known[key])
        yield taken[0] if len(taken) == 1 else Pair(*taken)


def _action(rank: int, name: str, text: str, micro_batch: int) -> Action:
    try:
        (action,) = actions_of(parse_step(f"{text}.0"))
        return Action(action.kind, action.stage, micro_batch)
    except ValueError as error:
        raise ProofError(f"rank {rank}, {name}: {error}") from None


def _needs(stage: Stage, phases: str, cuts: Cuts) -> frozenset[Key]:
    """What an action of a stage must hold, each exactly once."""
    once: list[Key] = []
    if "F" in phases:
        once += [("load", "F", buffer.name, buffer.name) for buffer in stage.loads]
        once += [("record", "F", metric, value) for metric, value in stage.records]
    if "I" in phases:
        once += [("constant", "I", constant, f"d_{value}") for value, constant in stage.tangents]
    for phase, comes, goes in (("F", stage.input, stage.output), ("I", stage.output, stage.input)):
        if phase in phases:
            once += [("receive", phase, "", "")] if comes else []
            once += [("send", phase, "", "")] if goes else []
    for step in stage.steps:
        for phase in phases:
            if isinstance(step, Communication):
                once += _exchange_keys(step, phase)
            elif runs(step, phase, cuts):
                once.append(("run", phase, step.site, ""))
    return frozenset(once)


def _exchange_keys(step: Communication, phase: str) -> list[Key]:
    if phase == "W":
        return []
    kinds = ("counts", step.kind) if (step.kind, phase) == ("dispatch", "F") else (step.kind,)
    starts = [(kind, phase, step.site, "") for kind in kinds]
    return [*starts, *(("wait", phase, step.site, kind) for kind in kinds)]


def _key(instruction: Instruction) -> Key:
    detail = instruction.wait
    if instruction.kind in ("load", "constant"):
        detail = " ".join(buffer.name for buffer in instruction.writes)
    if instruction.kind == "record":
        detail = " ".join(instruction.reads)
    return (instruction.kind, instruction.phase, instruction.site, detail)


def _check_labels(rank: int, body: Body) -> None:
    for instruction in body.instructions:
        if not 0 <= instruction.slot < len(body.actions) or instruction.action != body.actions[instruction.slot]:
            raise ProofError(
                f"rank {rank}, {instruction.action}: {_name(instruction)} is in slot {instruction.slot} of {body.name}"
            )


def _check_counts(where: str, own: list[Instruction], needs: frozenset[Key]) -> None:
    counts = Counter(_key(instruction) for instruction in own)
    for key in sorted(needs | counts.keys()):
        if key not in needs:
            raise ProofError(f"{where}: {_text(key)} does not belong to it")
        if counts[key] != 1:
            raise ProofError(f"{where}: {_text(key)} runs {counts[key]} times instead of once")


def _name(instruction: Instruction) -> str:
    return _text(_key(instruction))


def _text(key: Key) -> str:
    kind, phase, site, detail = key
    return " ".join(word for word in (kind, detail if kind == "wait" else "", f"{phase} {site}".strip()) if word)
