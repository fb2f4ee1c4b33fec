"""The time and memory of generating completions, in a run that learns from rewards.

A rollout has as many rounds as the longest completion has tokens, times the sequences that share a slot. A round is a
forward of one token per slot through all stages in turn. It takes at least the time to read the weights and the KV
caches. Each prompt is read once before the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from compiler.ir.dtypes import ITEMSIZE, TORCH_DTYPE
from compiler.machine.rates import Rates
from compiler.plan.plan import make_plan
from compiler.predict.prediction import GenerationTime, RankMemory
from compiler.predict.times import step_times
from compiler.program.lower import Lowering
from compiler.schedule.one_f_one_b import forward_only
from compiler.schedule.simulate import simulate
from dsl.schema import Gqa, Mla, Spec


def generation_of(spec: Spec, lowering: Lowering, ranks: Sequence[RankMemory], slower: float) -> GenerationTime | None:
    """Predict the generation time of a step of the largest batch, with completions of the maximum length.

    Returns None if the run generates nothing. `ranks`: memories of pipeline ranks. `slower`: the factor by which
    everything takes longer because ranks share cores.
    """
    if (grpo := spec.train.grpo) is None:
        return None
    train = spec.train
    of_column = train.batch.end // spec.parallel.data
    slots = min(of_column, grpo.slots or of_column)
    rounds = grpo.completion * ceil(of_column / slots)
    caches = _cache_bytes(spec, lowering, slots)
    micro_batch_s = _forward_s(spec, lowering)
    rows_s = _forward_s(*_of_rows(spec, slots, lowering.rates))
    reading = [
        (rank.weights + cache * (grpo.prompt + grpo.completion / 2) / train.sequence) / rates.memory_bytes
        for rank, cache, rates in zip(ranks, caches, lowering.rates, strict=True)
    ]
    prompts = of_column * grpo.prompt / (train.micro_batch * train.sequence)
    round_s = max(rows_s, sum(reading))
    seconds = slower * (rounds * round_s + prompts * micro_batch_s)
    return GenerationTime(
        seconds=seconds / grpo.iterations,
        rounds=rounds,
        round_s=slower * round_s,
        slots=slots,
        tokens=train.batch.end * grpo.completion,
        cache_bytes=max(caches),
        fits=all(
            rank.weights + rank.gradients + rank.optimizer + cache <= rank.capacity_bytes
            for rank, cache in zip(ranks, caches, strict=True)
        ),
    )


def _of_rows(spec: Spec, rows: int, rates: Sequence[Rates]) -> tuple[Spec, Lowering]:
    """The spec with micro-batches of `rows` sequences of one token, and its plan."""
    short = spec.model_copy(update={"train": spec.train.model_copy(update={"sequence": 1, "micro_batch": rows})})
    return short, Lowering(make_plan(short), rates)


def _forward_s(spec: Spec, lowering: Lowering) -> float:
    """Seconds of one micro-batch through all stages."""
    schedule = forward_only(lowering.plan.stage_placement, lowering.plan.mesh.pp, 1)
    return float(simulate(schedule, step_times(lowering, schedule)).makespan) / 1000


def _cache_bytes(spec: Spec, lowering: Lowering, slots: int) -> list[int]:
    """Bytes of KV caches on a device of each pipeline rank: one row per token of a sequence in each slot."""
    plan, num_bytes = lowering.plan, [0] * lowering.plan.mesh.pp
    for stage in plan.stages:
        rank = plan.stage_placement.rank_of(plan.mesh.pp, 1, stage.index, 0)
        for layer in {step.site.layer for step in stage.steps if step.site.layer is not None}:
            width = _width(spec.model.attention_of(layer))
            num_bytes[rank] += slots * spec.train.sequence * width * ITEMSIZE[TORCH_DTYPE[spec.precision.compute]]
    return num_bytes


def _width(attention: object) -> int:
    """Elements that the cache of one layer keeps per token."""
    if isinstance(attention, Mla):
        return attention.heads * (attention.head_dim.nope + attention.head_dim.value) + attention.head_dim.rope
    assert isinstance(attention, Gqa), "a rule of specs ensures this"
    return 2 * attention.kv_heads * attention.head_dim
