"""FLOPs of training on a token, by the definition that DeepSeek-V3's published MFU comes out exactly with.

Three forwards of the main model, since a backward is two, and two forwards of a product whose weight is not trained;
counted from the ops of its segments, so that what a layer computes is what MFU is of. The definition is not all the
work that a device does:

- Products of activations with weights count, those of the gates (`linear_wide`) do not. No other op of a forward does
  but the attention core: norms, activations and the embedding, which is looked up, are left out.
- The attention core is q·k and the weights' sum of values: over the keys that an op computes for (`causal`, half of
  the sequence), and over twice as many (`full`), as if nothing were masked.
- A delta rule counts in full: no part of its products is masked.
- The MTP block is left out, and what a backward computes again counts once, as do products in eight bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from compiler.ir import Communication, Segment, Use
from compiler.ir.dtypes import ITEMSIZE, TORCH_DTYPE
from compiler.machine.rates import Rates
from compiler.model.ops import kernel_class
from compiler.model.segments.interpret import interpret, works_of
from compiler.plan.actions.chains import Node
from compiler.plan.actions.order import jobs_of
from compiler.plan.blocks import CutModel, chains_of
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.predict.prediction import Flops, Generation, RankMemory
from compiler.predict.times import step_times
from compiler.program.lower import Lowering
from compiler.schedule.one_f_one_b import forward_only
from compiler.schedule.simulate import simulate
from dsl.closed_forms import stages
from dsl.closed_forms.stages import may_overlap
from dsl.schema import Gqa, Mla, Spec

PRODUCTS, CORE, STATES, GATE = ("gemm", "grouped_gemm"), "attention", "delta_rule", "linear_wide"
CHOOSING = ("select_keys", "indexer_loss")  # work of an indexer, of which the definition knows the products of weights
FORWARDS = 3  # a backward is two


def flops_per_token(steps: Iterable[Use | Communication], tokens: int) -> Flops:
    """FLOPs of one token. `steps`: those of a model whose micro-batch has so many tokens."""
    products = core = rows = 0
    found: dict[Hashable, tuple[tuple[int, int], int]] = {}  # by the key of a segment; core: of a forward
    for step in steps:
        if isinstance(step, Communication):
            rows = int(step.sizes[0].shape[0]) if step.kind == "dispatch" else rows
        elif not step.site.startswith("M"):
            key = step.segment.key
            if key not in found:
                found[key] = _forward(step.segment)
            (fixed, by_row), of_core = found[key]
            products += fixed + by_row * rows
            core += of_core
    return Flops((products + FORWARDS * core) / tokens, (products + 2 * FORWARDS * core) / tokens)


def _forward(segment: Segment) -> tuple[tuple[int, int], int]:
    """The FLOPs of the products of a segment, forward and backward, with those of a received row; and of a forward of
    its attention core.

    Fusion, storage and recompute change no forward of this definition, so the segment is taken without them.
    """
    plain = replace(segment, recompute=(), remade=(), stored=(), fused=())
    fixed = by_row = core = 0
    frozen = {param.name for param in segment.params if not param.grad}
    for phase, node, works in works_of(interpret(plain)):
        for op, work in works if phase == "F" and node.op != GATE else ():
            if kernel_class(op) in PRODUCTS:
                times = FORWARDS - (node.reads[1] in frozen)
                fixed, by_row = fixed + times * work.flops, by_row + times * work.flops_row
            fixed += FORWARDS * work.flops if kernel_class(op) == STATES else 0
            core += work.flops if kernel_class(op) == CORE and op not in CHOOSING else 0
    return (fixed, by_row), core


# --- What the completions of a step take, in a run that learns from rewards
#
# A rollout takes as many rounds as the longest completion has tokens, times the sequences that share a slot. A round is
# one forward of a row for each slot through all stages, one after the other; where it is short, it takes as long as
# reading the weights and what attention has seen. Before them each prompt is read once.


def generation_of(spec: Spec, lowering: Lowering, ranks: Sequence[RankMemory], slower: float) -> Generation | None:
    """Predict what completions take of a step of the largest batch, if each is as long as it may be. None without any.

    `ranks`: memories of pipeline ranks. `slower`: by how much all takes longer because ranks share cores.
    """
    if (grpo := spec.train.grpo) is None:
        return None
    train = spec.train
    of_column = train.batch.end // spec.parallel.data
    slots = min(of_column, grpo.slots or of_column)
    rounds = grpo.completion * ceil(of_column / slots)
    caches = _cache_bytes(spec, lowering, slots)
    whole = _forward_s(spec, lowering)
    rows = _forward_s(*_of_rows(spec, slots, lowering.rates))
    reading = [
        (rank.weights + seen * (grpo.prompt + grpo.completion / 2) / train.sequence) / rates.memory_bytes
        for rank, seen, rates in zip(ranks, caches, lowering.rates, strict=True)
    ]
    prompts = of_column * grpo.prompt / (train.micro_batch * train.sequence)
    round_s = max(rows, sum(reading))
    seconds = slower * (rounds * round_s + prompts * whole)
    return Generation(
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
    """The spec of a micro-batch of so many rows that see nothing before them, and its plan."""
    short = spec.model_copy(update={"train": spec.train.model_copy(update={"sequence": 1, "micro_batch": rows})})
    return short, Lowering(make_plan(short), rates)


def _forward_s(spec: Spec, lowering: Lowering) -> float:
    """Seconds of one micro-batch through all stages."""
    schedule = forward_only(lowering.plan.stage_placement, lowering.plan.mesh.pp, 1)
    return float(simulate(schedule, step_times(lowering, schedule)).makespan) / 1000


def _cache_bytes(spec: Spec, lowering: Lowering, slots: int) -> list[int]:
    """Bytes of keys and values on a device of each pipeline rank: of each slot, as many rows as a sequence has."""
    plan, found = lowering.plan, [0] * lowering.plan.mesh.pp
    for stage in plan.stages:
        rank = plan.stage_placement.rank_of(plan.mesh.pp, 1, stage.index, 0)
        layers = {use.site.partition(".")[0] for use in stage.steps if use.site[0] == "L"}
        for layer in layers:
            width = _width(spec.model.attention_of(int(layer[1:])))
            found[rank] += slots * spec.train.sequence * width * ITEMSIZE[TORCH_DTYPE[spec.precision.compute]]
    return found


def _width(attention: object) -> int:
    """Numbers that are kept of a token by one layer."""
    if isinstance(attention, Mla):
        return attention.heads * (attention.head_dim.nope + attention.head_dim.value) + attention.head_dim.rope
    assert isinstance(attention, Gqa), "a rule of specs"
    return 2 * attention.kv_heads * attention.head_dim


# --- What a step takes at least, however its layers are split over stages: known before they are
#
# The pipeline ranks share the work of every micro-batch, so the one that has most has the mean of it at least. None of
# its actions is shorter than what it has for either lane, nor than the way of the hidden state through its blocks, on
# which compute and exchanges wait for each other. Overlapped actions are no shorter than their lanes.

NS = 10**9
Work = tuple[int, int, int]  # nanoseconds: of compute, of exchanges, and of the longest way through


def least_step_s(model: CutModel) -> float:
    """Seconds that a step of the largest batch takes at least on the devices of the model's spec."""
    spec = model.spec
    kinds = list({id(rates): rates for rates in rank_rates(spec)}.values())
    on_kinds = [_works(rates, model) for rates in kinds]
    forward, backward = (
        [sum(min(on[kind][at][k] for on in on_kinds) for at in range(len(model.blocks))) for k in range(3)]
        for kind in "FB"
    )
    if may_overlap(spec.schedule):
        lanes = max(forward[0] + backward[0], forward[1] + backward[1])
        whole = lanes * min(1.0, *(rates.pair for rates in kinds))
    else:
        whole = max(forward) + max(backward)
    return stages.micro_batches(spec)[-1] * whole / spec.parallel.pipeline / NS


def _works(rates: Rates, model: CutModel) -> Mapping[str, Sequence[Work]]:
    """What the blocks of a model have to do in a forward and in a backward on one kind of device."""
    found: dict[tuple[int, str], Work] = {}
    result: dict[str, list[Work]] = {"F": [], "B": []}
    before = ""
    for block, shared in zip(model.blocks, chains_of(rates, model), strict=True):
        for kind, works in result.items():
            if (id(shared), kind) not in found:
                ends = (before, block.output) if kind == "F" else (f"d_{block.output}", f"d_{before}")
                found[id(shared), kind] = _work(shared.of(kind), *ends)
            works.append(found[id(shared), kind])
        before = block.output
    return result


def _work(nodes: Sequence[Node], source: str, target: str) -> Work:
    """The work of a chain; its longest way is from what reads one value to what makes another."""
    jobs, held = jobs_of([nodes]), [node for node in nodes if node.ordered]
    ways: list[int | None] = []
    for node, time, earlier in zip(held, jobs.least, jobs.after, strict=True):
        before = [way for way in (ways[other] for other in earlier) if way is not None]
        reads = [0] if source in node.instruction.reads else []
        ways.append(max((*before, *reads)) + time if before or reads else None)
    makes = [way or 0 for node, way in zip(held, ways, strict=True) if any(b.name == target for b in node.writes)]
    return jobs.total(exchange=False), jobs.total(exchange=True), max(makes, default=0)
