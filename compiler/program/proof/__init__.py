"""Proof, before emission, that a program cannot hang, compute with a wrong value, or leave a gradient unreduced.

Five passes check the bodies against the plan's stages, the channels of all ranks, the values of each rank, the
replicas of the plan, and the collectives of the world.
"""

from __future__ import annotations

from collections import Counter

from compiler.ir import BucketCollective, Plan, Program
from compiler.ir.expert_placement import ReceivedRows
from compiler.program.proof.certificate import ProofError, ProofFacts
from compiler.program.proof.channels import check_channels
from compiler.program.proof.collectives import check_collectives, check_reductions
from compiler.program.proof.effects import Effects, Rows
from compiler.program.proof.lifetimes import check_values
from compiler.program.proof.replicas import check_holders
from compiler.program.proof.structure import Structure
from compiler.schedule.simulate import peak_activations

__all__ = ["ProofError", "ProofFacts", "Prover", "Rows", "prove"]


class Prover:
    """Proves the programs of one plan. Parts that programs have in common are checked once.

    `rows` is the number of rows that a rank receives in each dispatch, or a `ReceivedRows` that also counts the rows it
    forwards. It is one value, or a function of (pipeline rank, layer as in "L17", micro-batch) for recorded rows. Only
    `peak_bytes` depends on it.
    """

    def __init__(self, plan: Plan, rows: int | ReceivedRows | Rows = 0) -> None:
        self._plan, self._rows = plan, rows
        self._structure = Structure(plan)
        self._effects = Effects(self._structure.bodies)
        self._holders_are_right = False
        # Lists of collectives that were found right, by whether a program trains.
        self._right_lists: dict[bool, tuple[tuple[BucketCollective, ...], ...]] = {}

    def prove(self, program: Program) -> ProofFacts:
        """Prove a program for every interleaving of its ranks; returns its certificate.

        Raises ProofError with the rank and the action at fault. Takes O(instructions) time at most.
        """
        schedule = self._structure.schedule_of(program)
        self._structure.check(program)
        num_messages = check_channels(program, schedule)
        memories = [
            check_values(program, schedule, rank, self._rows, self._effects) for rank in range(schedule.num_ranks)
        ]
        if not self._holders_are_right:
            check_holders(self._plan)
            self._holders_are_right = True
        bodies = [(rank, body) for rank, row in enumerate(program.bodies) for body in row]
        trains = any(action.kind != "F" for _, body in bodies for action in body.actions)
        lists = program.prologue, program.epilogue, program.update
        if self._right_lists.get(trains) != lists:
            check_collectives(program, self._plan, trains)
            self._right_lists[trains] = lists
        check_reductions(program, self._plan, trains)
        invoked = [Counter([invocation.body for invocation in row]) for row in program.invocations]
        counts = [(invoked[rank][body.name], *self._structure.bodies.counts(rank, body)) for rank, body in bodies]
        return ProofFacts(
            program=program.name,
            stage_placement=program.stage_placement,
            num_ranks=schedule.num_ranks,
            num_micro_batches=program.num_micro_batches,
            num_actions=sum(invoked[rank][body.name] * len(body.actions) for rank, body in bodies),
            num_instructions=sum(times * instructions for times, instructions, _ in counts),
            num_messages=num_messages,
            num_exchanges=sum(times * exchanges for times, _, exchanges in counts),
            num_collectives=len(program.collectives),
            peak_activations=peak_activations(schedule),
            peak_fixed_bytes=tuple(memory.peak_fixed_bytes for memory in memories),
            peak_bytes=tuple(memory.peak_bytes for memory in memories),
        )


def prove(program: Program, plan: Plan, rows: int | ReceivedRows | Rows = 0) -> ProofFacts:
    """Prove a single program: see `Prover`."""
    return Prover(plan, rows).prove(program)
