"""Plan and schedules → programs: one body per distinct action or pair and rank, invoked as the schedule says.

`Lowering` is the stages of a plan on the devices of its pipeline ranks. Whatever needs their instructions (programs,
predicted times, the costs that a schedule is searched by, memory) asks one `Lowering`, which makes each chain and each
body once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compiler.ir import Body, Buffer, Instruction, Kind, Plan, Program
from compiler.plan.actions.chains import Chains
from compiler.plan.actions.order import finish, interleave
from compiler.plan.actions.order_cache import Orders
from compiler.plan.rank_rates import OnRanks, kinds_of, on_ranks
from compiler.plan.spec_rates import core_rates
from compiler.program.lower.collectives import Collectives, collectives_of
from compiler.program.lower.invocations import Call, invocations_of
from compiler.program.lower.reductions import reductions_of
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import Action, Step, actions_of, is_copy

Peers = tuple[tuple[int, int], ...]  # of each slot: the pipeline ranks of the stages before and after its own


class Lowering:
    """The stages of a plan on the devices of its pipeline ranks. It owns their chains and bodies, each made once."""

    def __init__(self, plan: Plan, rates: OnRanks | None = None, orders: Orders | None = None) -> None:
        """`rates`: of all pipeline ranks, or of each; None: those of a core.

        On another kind of device the instructions of a body go in another order. `orders` finds these orders.
        """
        self.plan = plan
        self.rates = on_ranks(rates or core_rates(), plan.mesh.pp)
        self.kinds = kinds_of(self.rates)  # of devices: for each rank the first one on the same kind
        self.orders = orders or Orders()
        self._chains: dict[tuple[int, int], Chains] = {}  # by stage and kind of device
        self._bodies: dict[tuple[str, int], Body] = {}  # by name and kind of device, without peers
        self._on_ranks: dict[tuple[str, int, Peers], Body] = {}
        self._of_kind: dict[bool, Collectives] = {}  # by whether a program trains

    def chains(self, stage: int, rank: int) -> Chains:
        """The chains of a stage on the device of a pipeline rank."""
        kind = self.kinds[rank]
        if (stage, kind) not in self._chains:
            plan, rates = self.plan, self.rates[kind]
            self._chains[stage, kind] = Chains(plan.stages[stage], plan.cuts, rates, plan.sharded)
        return self._chains[stage, kind]

    def program(self, schedule: Schedule, evaluate: bool = False) -> Program:
        """The program of a schedule on the plan's stages. `evaluate`: forwards keep nothing for a backward."""
        assert schedule.num_ranks == len(self.rates), "a schedule is of the plan's pipeline ranks"
        names = _Names(evaluate)
        calls = [[names.call(step) for step in steps] for steps in schedule.actions]
        bodies = tuple(self._rank_bodies(schedule, calls[rank], rank) for rank in range(schedule.num_ranks))
        return Program(
            name="evaluate" if evaluate else schedule.name,
            num_micro_batches=schedule.num_micro_batches,
            stage_placement=schedule.stage_placement,
            bodies=bodies,
            invocations=invocations_of(bodies, calls),
            message=next((stage.output for stage in self.plan.stages if stage.output), None),
            **self._collectives(not evaluate),
            reductions=() if evaluate else reductions_of(self.plan, schedule.actions),
        )

    def _collectives(self, trains: bool) -> Collectives:
        """The collectives of all programs that train, or of all that do not: one value, which a proof looks at once."""
        if trains not in self._of_kind:
            self._of_kind[trains] = collectives_of(self.plan, trains=trains)
        return self._of_kind[trains]

    def _rank_bodies(self, schedule: Schedule, calls: Sequence[Call], rank: int) -> tuple[Body, ...]:
        """The bodies of a rank, by name."""
        found: dict[str, Body] = {}
        peers_of: dict[str, Peers] = {}
        turn = schedule.turn
        ways = [(name, tuple([k >= turn for k in micro_batches])) for name, micro_batches in calls]
        # Whom a body talks to depends on the directions alone.
        for (name, _), step in dict(zip(ways, schedule.actions[rank], strict=True)).items():
            peers = tuple(_neighbours(schedule, action) for action in actions_of(step))
            assert peers_of.setdefault(name, peers) == peers, f"{name} on rank {rank} has more than one pair of peers"
            if name not in found:
                found[name] = self._body_on(step, name, rank, peers)
        return tuple(found[name] for name in sorted(found))

    def _body_on(self, step: Step, name: str, rank: int, peers: Peers) -> Body:
        """A body between other ranks. Ranks of both directions have bodies that differ in whom they talk to alone."""
        key = name, self.kinds[rank], peers
        if key not in self._on_ranks:
            if key[:2] not in self._bodies:
                self._bodies[key[:2]] = self._body(step, name, rank)
            self._on_ranks[key] = _between(self._bodies[key[:2]], peers)
        return self._on_ranks[key]

    def _body(self, step: Step, name: str, rank: int) -> Body:
        actions = tuple(f"{action.kind}{action.stage}" for action in actions_of(step))
        if isinstance(step, Action) and is_copy(step):
            return Body(name, actions, copy_instructions(step, self.chains(step.stage, rank).saved()))
        chains = [(self.chains(action.stage, rank), action.kind) for action in actions_of(step)]
        order = interleave([of_stage.of(kind) for of_stage, kind in chains], self.orders)
        evaluates = name.startswith(EVALUATION)
        read_later = [frozenset() if evaluates else of_stage.read_later(kind) for of_stage, kind in chains]
        return Body(name, actions, finish(order, actions, read_later))


def copy_instructions(action: Action, saved: Sequence[Buffer]) -> tuple[Instruction, ...]:
    """The instructions of an O or an R."""
    if action.kind == "R":
        return (Instruction("from_host", 0, action.body, "F", writes=tuple(saved)),)
    names = tuple(buffer.name for buffer in saved)
    kinds: tuple[Kind, ...] = ("to_host", "free") if names else ("to_host",)  # an embedding saves nothing
    return tuple(Instruction(kind, 0, action.body, "F", reads=names) for kind in kinds)


EVALUATION = "E"  # begins the names of the bodies that evaluate: E0 is F0, and keeps nothing


def body_name(step: Step, evaluate: bool = False) -> str:
    """The name of the body of a step: F0, F0_B1, E0."""
    names = [f"{action.kind}{action.stage}" for action in actions_of(step)]
    return "_".join(name.replace("F", EVALUATION) if evaluate else name for name in names)


class _Names:
    """The names of bodies; each is put together once, however many micro-batches it is called for."""

    def __init__(self, evaluate: bool) -> None:
        self._evaluate = evaluate
        self._names: dict[tuple[str | int, ...], str] = {}  # by kinds and stages

    def call(self, step: Step) -> Call:
        """The body of a step, and its micro-batches."""
        key: tuple[str | int, ...]
        micro_batches: tuple[int, ...]
        if isinstance(step, Action):
            key, micro_batches = (step.kind, step.stage), (step.micro_batch,)
        else:
            a, b = step.first, step.second
            key, micro_batches = (a.kind, a.stage, b.kind, b.stage), (a.micro_batch, b.micro_batch)
        if key not in self._names:
            self._names[key] = body_name(step, self._evaluate)
        return self._names[key], micro_batches


def _between(body: Body, peers: Peers) -> Body:
    """The body with its peers: forwards come from the first of a slot's peers, backwards from the second."""

    def of(i: Instruction) -> Instruction:
        if i.kind not in ("send", "receive"):
            return i
        before, after = peers[i.slot]
        return replace(i, peer=before if (i.kind == "receive") == (i.phase == "F") else after)

    return replace(body, instructions=tuple(map(of, body.instructions)))


def _neighbours(schedule: Schedule, action: Action) -> tuple[int, int]:
    """The pipeline ranks of the stages before and after an action's; -1 where there is none."""

    def rank(stage: int) -> int:
        return schedule.rank_of(stage, action.micro_batch) if 0 <= stage < schedule.num_stages else -1

    return rank(action.stage - 1), rank(action.stage + 1)
