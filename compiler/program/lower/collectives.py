"""The collectives of a program: what ranks sum over the world, and what they reduce and gather of each bucket.

The valid targets are counted before the first forward, for they normalise the loss. After the last backward the
records are summed (losses, and the load of every expert), and of logits that are clipped the largest are found. Then
the sums of each bucket's gradients end, which were started under the backward (compiler/program/lower/reductions.py),
and the squares of all gradients are summed, by which they are clipped. Where the holders of a bucket each update a
part of it, they gather the rest. Gradients that are divided are summed by the bodies that make them, and weights that
are divided are gathered by those that read them (compiler/plan/actions/sharded.py): what is left here are the same
parts on several pipeline ranks.
"""

from __future__ import annotations

from typing import TypedDict

from compiler.ir import Collective, Plan

TARGETS, RECORDS, NORM = (Collective("sum", name) for name in ("targets", "records", "norm"))
LOGITS = Collective("max", "logits")


class Collectives(TypedDict):
    """The fields of a program."""

    prologue: tuple[Collective, ...]
    epilogue: tuple[Collective, ...]
    update: tuple[Collective, ...]


def collectives_of(plan: Plan, *, trains: bool) -> Collectives:
    """The collectives of a step, or of an evaluation, which has no gradients.

    An evaluation gathers weights where it is made again with their moving average, to take it and to put it back.
    """
    reduces = (Collective("reduce", bucket.name, bucket) for bucket in plan.buckets if bucket.is_reduced)
    shared = [b for b in plan.buckets if len(b.holders) > 1 and not b.still]
    parted = [b for b in shared if plan.zero and (plan.zero < 3 or b.is_reduced)]
    gathers = tuple(Collective("gather", bucket.name, bucket) for bucket in parted)
    if not trains:
        return {"prologue": (TARGETS,), "epilogue": (RECORDS,), "update": gathers if plan.averaged else ()}
    return {
        "prologue": (TARGETS,),
        "epilogue": (RECORDS, *((LOGITS,) if plan.clips_logits else ()), *reduces, NORM),
        "update": gathers,
    }
