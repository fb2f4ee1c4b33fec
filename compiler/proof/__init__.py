"""Proof before emission: that a program cannot hang, compute with a wrong value, or leave a gradient unreduced.

Four passes: bodies against the plan's stages, channels over all ranks, values over each rank, replicas over the plan.
"""

from __future__ import annotations

from collections import Counter

from compiler.ir import Body, Plan, Program
from compiler.proof.certificate import Certificate, ProofError
from compiler.proof.channels import check_channels
from compiler.proof.effects import Effects, Rows
from compiler.proof.lifetimes import check_values
from compiler.proof.replicas import check_holders, check_reduces
from compiler.proof.structure import EXCHANGES, check_bodies, schedule_of
from compiler.schedules.simulate import peak_activations

__all__ = ["Certificate", "Effects", "ProofError", "Rows", "prove"]


def prove(program: Program, plan: Plan, rows: int | Rows = 0, effects: Effects | None = None) -> Certificate:
    """The certificate of a program that holds in every interleaving; else ProofError, naming rank and action.

    `rows` is R, the rows a rank receives in each dispatch: one number, or as recorded, a function of
    (pipeline rank, layer as in "L17", micro-batch). Only `peak_bytes` depends on it. Programs of one plan that share
    bodies, and have one number of rows, are proven faster with one `effects`. O(instructions), at most.
    """
    known = effects if effects is not None and isinstance(rows, int) else Effects()
    schedule = schedule_of(program, plan, known)
    assert known.plan is None or known.plan is plan, "effects are of one plan"
    check_bodies(program, plan, known)
    num_messages = check_channels(program, schedule)
    memories = [check_values(program, schedule, rank, rows, known) for rank in range(schedule.num_ranks)]
    if known.plan is None:
        check_holders(plan)
        known.plan = plan
    bodies = [(rank, body) for rank, row in enumerate(program.bodies) for body in row]
    check_reduces(program, plan, trains=any(action[0] != "F" for _, body in bodies for action in body.actions))
    invoked = [Counter([invocation.body for invocation in row]) for row in program.invocations]
    counts = [(invoked[rank][body.name], *_counts(known, rank, body)) for rank, body in bodies]
    return Certificate(
        program=program.name,
        stage_placement=program.stage_placement,
        num_ranks=schedule.num_ranks,
        num_micro_batches=program.num_micro_batches,
        num_actions=sum(len(invocation.micro_batches) for row in program.invocations for invocation in row),
        num_instructions=sum(times * instructions for times, instructions, _ in counts),
        num_messages=num_messages,
        num_exchanges=sum(times * exchanges for times, _, exchanges in counts),
        num_reduces=len(program.reduces),
        peak_activations=peak_activations(schedule),
        peak_fixed_bytes=tuple(memory.peak_fixed_bytes for memory in memories),
        peak_bytes=tuple(memory.peak_bytes for memory in memories),
    )


def _counts(known: Effects, rank: int, body: Body) -> tuple[int, int]:
    """Of instructions, and of exchanges that start among them."""
    number = known.number_of(rank, body)
    if number not in known.counts:
        exchanges = sum(i.kind in EXCHANGES for i in body.instructions)
        known.counts[number] = len(body.instructions), exchanges
    return known.counts[number]
