"""First pass, over bodies: each has exactly the instructions that its stage needs, with the operands of its stage in
order, and waits for every exchange that it starts.

The later passes check only *when* things happen. Each body is checked once, however often it is invoked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import TypeAlias

from compiler.ir import Body, Buffer, Communication, Instruction, Plan, Program, Stage, Use
from compiler.ir.names import gradient_of
from compiler.program.proof.certificate import ProofError
from compiler.program.proof.operands import Operands, has_work, needs_gather, needs_scatter, operands, steps_of
from compiler.schedule.schedule import Schedule, ScheduleError
from runtime.contract.actions import Action, Pair, Step, actions_of, parse_step

Key: TypeAlias = tuple[str, str, str, str]  # (kind, phase, site, value or kind of the awaited exchange)
Waits: TypeAlias = dict[int, int]  # index of each exchange's start in a body -> that of the wait which ends it

PHASES = {"F": "F", "B": "IW", "I": "I", "W": "W"}
COPIES = {"O": "to_host", "R": "from_host"}
EXCHANGES = (
    *("counts", "dispatch", "combine"),
    *("gather_rows", "scatter_rows", "gather_sequences", "scatter_sequences", "gather_choices"),
    *("gather", "scatter"),
)


class Bodies:
    """The bodies of programs by number, with facts about each that are found once for all programs.

    Bodies that differ only in their peers share a number, unless a peer is the rank itself.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Body, int]] = {}  # by identity, which is unique while the body is kept here
        self._alike: dict[Hashable, int] = {}  # by everything but the peers
        self._waits: dict[int, Waits] = {}
        self._counts: dict[int, tuple[int, int]] = {}

    def number(self, rank: int, body: Body) -> int:
        """The number of a body on a rank."""
        entry = self._numbers.get(id(body))
        if entry is None:
            content = body.name, body.actions, tuple([_key_without_peer(rank, i) for i in body.instructions])
            entry = self._numbers[id(body)] = body, self._alike.setdefault(content, len(self._alike))
        return entry[1]

    def waits(self, rank: int, body: Body) -> Waits:
        """The wait of each exchange. Raises ProofError if one has none."""
        number = self.number(rank, body)
        if number not in self._waits:
            self._waits[number] = waits_of(rank, body)
        return self._waits[number]

    def counts(self, rank: int, body: Body) -> tuple[int, int]:
        """The numbers of instructions, and of exchanges that start among them."""
        number = self.number(rank, body)
        if number not in self._counts:
            self._counts[number] = len(body.instructions), sum(i.kind in EXCHANGES for i in body.instructions)
        return self._counts[number]


def _key_without_peer(rank: int, instruction: Instruction) -> Hashable:
    """All of an instruction but its peer. Bodies share most instructions without a peer: identity stands for these."""
    i = instruction
    if i.peer < 0:
        return id(i)
    fields = i.kind, i.slot, i.action, i.phase, i.site, i.wait, i.reads, i.writes
    return *fields, i.params, i.weights, i.params_in, i.weights_in, i.peer == rank


class Structure:
    """The first pass, over the programs of one plan. Each body is checked once."""

    def __init__(self, plan: Plan) -> None:
        self.bodies = Bodies()
        self._plan = plan
        self._right: set[int] = set()  # numbers of bodies
        self._actions: dict[tuple[str, int], Action] = {}  # by text and micro-batch

    def schedule_of(self, program: Program) -> Schedule:
        """The schedule of a program, checked to be legal on the plan.

        Each F must run once on the rank of its placement, and then B, or I and W. Raises ProofError otherwise.
        """
        plan, num_ranks, invoked = self._plan, len(program.bodies), len(program.invocations)
        if invoked != num_ranks or plan.mesh.pp != num_ranks:
            raise ProofError(f"{num_ranks} ranks have bodies, {invoked} invocations, and the plan has {plan.mesh.pp}")
        steps = tuple(tuple(self._steps(program, rank)) for rank in range(num_ranks))
        needed, stored = program.stage_placement, plan.stage_placement
        schedule = Schedule(program.name, num_ranks, program.num_micro_batches, needed, steps)
        try:
            schedule.check()
        except ScheduleError as error:
            raise ProofError(str(error)) from None
        if needed.num_stages(num_ranks) != len(plan.stages):
            raise ProofError(f"placement {needed} on {num_ranks} ranks does not fit {len(plan.stages)} stages")
        if not stored.supports(needed, num_ranks):
            raise ProofError(f"a {needed} program runs stages that a {stored} plan does not store there")
        return schedule

    def check(self, program: Program) -> None:
        """Raise ProofError unless every body has exactly the instructions that its actions need."""
        for rank, bodies in enumerate(program.bodies):
            names = [body.name for body in bodies]
            if len(set(names)) < len(names):
                raise ProofError(f"rank {rank}: two bodies have one name")
            if set(names) != {invocation.body for invocation in program.invocations[rank]}:
                raise ProofError(f"rank {rank}: a body is never invoked, or an invoked one is missing")
            for body in bodies:
                number = self.bodies.number(rank, body)
                if number not in self._right:
                    self._check_body(rank, body)
                    self._right.add(number)

    def _check_body(self, rank: int, body: Body) -> None:
        _check_labels(rank, body)
        for slot, action in enumerate(body.actions):
            stage = self._plan.stages[action.stage]
            steps = steps_of(stage)
            of_slot = [i for i in body.instructions if i.slot == slot and i.kind != "free"]
            if action.kind in COPIES:
                _check_copy(f"rank {rank}, {action}", of_slot, COPIES[action.kind], saved_values(stage, self._plan))
                continue
            _check_counts(f"rank {rank}, {action}", of_slot, _needs(stage, PHASES[action.kind], self._plan))
            for i in of_slot:
                writes = i.writes if i.kind not in EXCHANGES else ()
                actual = (i.reads, i.params, i.weights, writes, i.params_in, i.weights_in)
                if actual != operands(i, stage, steps, self._plan):
                    raise ProofError(f"rank {rank}, {action}: {_name(i)} has other operands than its stage says")
            _check_scatters(f"rank {rank}, {action}", of_slot)
        self.bodies.waits(rank, body)

    def _steps(self, program: Program, rank: int) -> Iterator[Step]:
        """The steps that the invocations of a rank run, parsed from the actions of its bodies."""
        texts = {body.name: body.actions for body in reversed(program.bodies[rank])}
        for invocation in program.invocations[rank]:
            name, micro_batches = invocation.body, invocation.micro_batches
            actions = texts.get(name, ())
            if len(actions) != len(micro_batches) or len(actions) not in (1, 2):
                raise ProofError(f"rank {rank}, {name}: no body of this name takes {len(micro_batches)} micro-batches")
            step_actions = []
            for key in zip(actions, micro_batches, strict=True):
                if key not in self._actions:
                    self._actions[key] = _action(rank, name, *key)
                step_actions.append(self._actions[key])
            yield step_actions[0] if len(step_actions) == 1 else Pair(*step_actions)


def waits_of(rank: int, body: Body) -> Waits:
    """Index of each exchange's start → index of its wait: exactly one, later, with the same operands."""
    started: dict[tuple[int, Key], int] = {}
    ends: Waits = {}
    for index, instruction in enumerate(body.instructions):
        kind = instruction.wait or instruction.kind
        key = (instruction.slot, (kind, instruction.phase, instruction.site, ""))
        if instruction.kind in EXCHANGES:
            if key in started:
                raise ProofError(
                    f"rank {rank}, {instruction.action}: {_name(instruction)} starts again before its wait"
                )
            started[key] = index
        elif instruction.kind == "wait":
            start = started.pop(key, None)
            if start is None or body.instructions[start].reads != instruction.reads:
                raise ProofError(
                    f"rank {rank}, {instruction.action}: {_name(instruction)} has no start with its operands"
                )
            ends[start] = index
    for start in started.values():
        late = body.instructions[start]
        raise ProofError(f"rank {rank}, {late.action}: {_name(late)} is never waited for")
    return ends


def _action(rank: int, name: str, text: str, micro_batch: int) -> Action:
    try:
        (action,) = actions_of(parse_step(f"{text}.0"))
        return Action(action.kind, action.stage, micro_batch)
    except ValueError as error:
        raise ProofError(f"rank {rank}, {name}: {error}") from None


def _needs(stage: Stage, phases: str, plan: Plan) -> frozenset[Key]:
    """The instructions that an action of a stage must have, each exactly once."""
    needs: list[Key] = []
    if "F" in phases:
        needs += [("load", "F", buffer.name, buffer.name) for buffer in stage.loads]
        needs += [("record", "F", metric, value) for metric, value in stage.records]
        needs += [("tell", "F", name, value) for name, value in stage.tells]
    if "I" in phases:
        needs += [("constant", "I", constant, gradient_of(value)) for value, constant in stage.tangents]
    for phase, arriving, leaving in (("F", stage.input, stage.output), ("I", stage.output, stage.input)):
        if phase in phases:
            needs += [("receive", phase, "", "")] if arriving else []
            needs += [("send", phase, "", "")] if leaving else []
    for step in stage.steps:
        for phase in _phases_of(step, phases):
            if isinstance(step, Communication):
                keys = _exchange_keys(step, phase)
                # a backward that dispatches again uses the counts of the forward
                needs += keys if phase in phases else [key for key in keys if "counts" not in key]
            elif has_work(step, phase, plan.cuts):
                needs.append(("run", phase, step.site, ""))
                needs += _start_and_wait("gather", phase, step.site) if needs_gather(step, phase, plan) else []
                if phase == "W" and needs_scatter(step, plan):
                    needs += [("zeros", "W", step.site, ""), *_start_and_wait("scatter", "W", step.site)]
    return frozenset(needs)


def _phases_of(step: Use | Communication, phases: str) -> str:
    """The phases of a step that an action runs; a backward may recompute the forward first."""
    return f"F{phases}" if step.is_repeated and "I" in phases else phases


def _exchange_keys(step: Communication, phase: str) -> list[Key]:
    if phase == "W":
        return []
    if step.moves_rows:
        moved = step.outputs if phase == "F" else step.returned
        return _start_and_wait(step.rows_kind(phase), phase, step.site) if moved else []
    kinds = ("counts", step.kind) if (step.kind, phase) == ("dispatch", "F") else (step.kind,)
    return [key for kind in kinds for key in _start_and_wait(kind, phase, step.site)]


def _start_and_wait(kind: str, phase: str, site: str) -> list[Key]:
    """The start and the wait of an exchange."""
    return [(kind, phase, site, ""), ("wait", phase, site, kind)]


def saved_values(stage: Stage, plan: Plan) -> tuple[Buffer, ...]:
    """The values that a forward of a stage keeps for the backward: those it reads and does not recompute.

    Loaded data is not among them, nor are integers, which count and place rows.
    """
    steps = steps_of(stage)

    def operands_of(phases: str) -> list[tuple[str, Operands]]:
        keys = sorted(_needs(stage, phases, plan))
        needed = [Instruction(k, 0, "", p, site, wait=w if k == "wait" else "") for k, p, site, w in keys]  # type: ignore[arg-type]
        return [(i.kind, operands(i, stage, steps, plan)) for i in needed]

    backward = [parts for _, parts in operands_of("IW")]
    read = {name for parts in backward for name in parts.reads}
    read -= {buffer.name for parts in backward for buffer in parts.writes}
    written = [b for kind, parts in operands_of("F") if kind not in ("load", *EXCHANGES) for b in parts.writes]
    return tuple(sorted((b for b in written if b.name in read and "int" not in b.dtype), key=lambda b: b.name))


def _check_copy(location: str, instructions: list[Instruction], kind: str, saved: tuple[Buffer, ...]) -> None:
    """Check that an O or R has exactly one instruction, which copies the values that a forward of its stage saved."""
    _check_counts(location, instructions, frozenset({(kind, "F", "", "")}))
    (copy,) = instructions
    names = tuple(buffer.name for buffer in saved)
    wanted = (names, ()) if kind == "to_host" else ((), saved)
    if (copy.reads, copy.writes) != wanted or copy.params or copy.weights or copy.params_in or copy.weights_in:
        raise ProofError(f"{location}: {kind} has other operands than a forward of its stage saves")


def _check_scatters(location: str, instructions: list[Instruction]) -> None:
    """Check that gradients are scattered after the W that adds to them. Other checks ensure that each is there once."""
    added: set[str] = set()
    for i in instructions:
        if (i.kind, i.phase) == ("run", "W"):
            added.add(i.site)
        elif i.kind == "scatter" and i.site not in added:
            raise ProofError(f"{location}: {_name(i)} starts before its gradients are added")


def _key(instruction: Instruction) -> Key:
    detail = instruction.wait
    if instruction.kind in ("load", "constant"):
        detail = " ".join(buffer.name for buffer in instruction.writes)
    if instruction.kind in ("record", "tell"):
        detail = " ".join(instruction.reads)
    return (instruction.kind, instruction.phase, instruction.site, detail)


def _check_labels(rank: int, body: Body) -> None:
    for instruction in body.instructions:
        if not 0 <= instruction.slot < len(body.actions) or instruction.action != body.actions[instruction.slot]:
            raise ProofError(
                f"rank {rank}, {instruction.action}: {_name(instruction)} is in slot {instruction.slot} of {body.name}"
            )


def _check_counts(location: str, instructions: list[Instruction], needs: frozenset[Key]) -> None:
    counts = Counter(_key(instruction) for instruction in instructions)
    for key in sorted(needs | counts.keys()):
        if key not in needs:
            raise ProofError(f"{location}: {_text(key)} does not belong to it")
        if counts[key] != 1:
            raise ProofError(f"{location}: {_text(key)} runs {counts[key]} times instead of once")


def _name(instruction: Instruction) -> str:
    return _text(_key(instruction))


def _text(key: Key) -> str:
    kind, phase, site, detail = key
    return " ".join(word for word in (kind, detail if kind == "wait" else "", f"{phase} {site}".strip()) if word)
