"""Proof before emission: that a program cannot hang, compute with a wrong value, or leave a gradient unreduced.

Four passes: bodies against the plan's stages, channels over all ranks, values over each rank, replicas over the plan.
"""

from __future__ import annotations

from compiler.ir import Plan, Program
from compiler.proof.certificate import Certificate, ProofError
from compiler.proof.channels import check_channels
from compiler.proof.replicas import check_replicas
from compiler.proof.structure import EXCHANGES, check_bodies, schedule_of
from compiler.proof.values import Rows, check_values
from compiler.schedules.simulate import peak_activations
from runtime.actions import actions_of

__all__ = ["Certificate", "ProofError", "Rows", "prove"]


def prove(program: Program, plan: Plan, rows: int | Rows = 0) -> Certificate:
    """The certificate of a program that holds in every interleaving; else ProofError, naming rank and action.

    `rows` is R, the rows a rank receives in each dispatch: one number, or as recorded, a function of
    (pipeline rank, layer as in "L17", micro-batch). Only `peak_bytes` depends on it. O(instructions).
    """
    schedule = schedule_of(program, plan)
    check_bodies(program, plan)
    num_messages = check_channels(program, schedule)
    recorded = rows if callable(rows) else lambda rank, layer, micro_batch: rows
    memories = [check_values(program, schedule, rank, recorded) for rank in range(schedule.num_ranks)]
    steps = [step for row in schedule.actions for step in row]
    check_replicas(program, plan, trains=any(action.kind != "F" for step in steps for action in actions_of(step)))
    lists = [
        {body.name: body.instructions for body in bodies}[invocation.body]
        for bodies, row in zip(program.bodies, program.invocations, strict=True)
        for invocation in row
    ]
    return Certificate(
        program=program.name,
        placement=program.placement,
        num_ranks=schedule.num_ranks,
        num_micro_batches=program.num_micro_batches,
        num_actions=sum(len(actions_of(step)) for step in steps),
        num_instructions=sum(len(instructions) for instructions in lists),
        num_messages=num_messages,
        num_exchanges=sum(i.kind in EXCHANGES for instructions in lists for i in instructions),
        num_reduces=len(program.reduces),
        peak_activations=peak_activations(schedule),
        peak_fixed_bytes=tuple(memory.peak_fixed_bytes for memory in memories),
        peak_bytes=tuple(memory.peak_bytes for memory in memories),
    )
