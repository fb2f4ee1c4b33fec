"""What a prediction takes for granted, for people: only what this plan makes use of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compiler.ir import Plan
from compiler.machine.rates import Rates
from compiler.machine.rates.table import HOST, LEVELS
from compiler.machine.topology.traffic import messages_of
from compiler.plan.sharding import Crossing, crossing_of
from compiler.plan.split_blocks import balanced_rows
from compiler.predict import failures
from compiler.predict.memory import gib, memory_assumptions
from compiler.predict.prediction import CALIBRATE, RankMemory, seconds
from dsl.closed_forms import ramp
from dsl.closed_forms.memory import offloaded_bytes
from dsl.schema import Moe, Spec


def assumptions(
    spec: Spec,
    plan: Plan,
    rates: Sequence[Rates],
    shared: float,
    ranks: Sequence[RankMemory],
    keys: float,
    goodput: failures.Goodput | None,
) -> tuple[str, ...]:
    """List what a prediction assumes of the plan, its step, the rates it used and its memory.

    `rates`: of each pipeline rank. `shared`: by how much all is longer, since ranks share cores. `ranks`: memories.
    `keys`: the share of the step that a free exchange of keys would save. `goodput`: beside failures.
    """
    return (
        *plan.assumptions,
        *_of_the_step(spec, plan),
        *failures.assumed(spec, goodput),
        *_of_keys(plan, keys),
        *_of_links(spec, plan, rates[0]),
        *_of_another_cpu(rates),
        *dict.fromkeys(said for one in rates for said in one.assumptions),
        *_of_the_host(spec, rates),
        *_of_rates(spec, plan, rates),
        *_of_cores(rates[0], shared),
        *memory_assumptions(spec, plan, ranks),
    )


def _of_the_step(spec: Spec, plan: Plan) -> Iterator[str]:
    if any(isinstance(layers.ffn, Moe) for layers in spec.model.layers):
        yield "every expert gets as many tokens as every other"
    splitting = [name for name, degree in (("tensor", plan.mesh.tp), ("context", plan.mesh.cp)) if degree > 1]
    if splitting:
        rows = max(_crossing(spec, plan, rank).rows for rank in range(plan.mesh.pp))
        who = " and ".join(splitting)
        yield f"{who} ranks exchange rows between segments: a device sends up to {gib(rows)} a step"
        if plan.mesh.tp > 1 and not spec.splits_vocabulary:
            words = f"{spec.model.vocab:,} words do not divide by {plan.mesh.tp}"
            yield f"each tensor rank has all of the embedding and of the head: {words}"
    if plan.sharded:
        yield from _of_divided_state(spec, plan)
    elif spec.parallel.columns > 1:
        under = spec.parallel.overlap_reduce and spec.has_hosts
        beside = (
            "in the time that exchanges leave the links, and slow nothing down" if under else "behind the last backward"
        )
        yield f"gradients are reduced {beside}"
        if spec.parallel.zero:
            yield "weights are gathered behind the update, beside nothing"
    yield "reading data and validation take no time; checkpoints and failures take it from the goodput alone"


def _of_keys(plan: Plan, share: float) -> Iterator[str]:
    """Say what context ranks would gain if they sent keys in another way."""
    if plan.mesh.cp > 1:
        yield f"context ranks gather keys; a ring would save {share:.2%} of the step if all of it were hidden"


def _of_links(spec: Spec, plan: Plan, rates: Rates) -> Iterator[str]:
    """Say what messages and exchanges take from compute."""
    messages = messages_of(rates.fabric, plan, plan.stage_placement).seconds
    if messages:
        most = seconds(max(messages.values()))
        yield f"an action ends when its message is at the next rank: up to {most}, less what it computes beside it"
    p = spec.parallel
    exchanges = max(p.expert, p.expert_tensor, p.tensor, p.context) > 1 or plan.sharded
    if exchanges and not spec.sm.communication and rates.left < 1:
        yield f"no SMs are kept for exchanges: they take {1 - rates.left:.0%} of them from what is computed beside"


def _of_another_cpu(rates: Sequence[Rates]) -> Iterator[str]:
    """Say that times are not those of this machine, and which command measures it."""
    if not all(one.calibrated for one in rates):
        yield (
            "times are those of a core of a small server; a step may take several times as long on this machine: "
            f"`{CALIBRATE}` measures it in half a minute, and prints the line that makes plans use it"
        )


def _of_divided_state(spec: Spec, plan: Plan) -> Iterator[str]:
    """Say what devices send of the state that they divide, and when."""
    most = max((_crossing(spec, plan, rank) for rank in range(plan.mesh.pp)), key=lambda one: one.state)
    yield (
        "each micro-batch's gradients are summed behind the segment that makes them, beside the next one: a device "
        f"sends up to {gib(most.gradients)} a step"
    )
    if most.weights:
        yield f"weights are gathered one segment ahead: a device sends up to {gib(most.weights)} a step"
    else:
        yield "weights are gathered after the update, beside nothing"


def _crossing(spec: Spec, plan: Plan, rank: int) -> Crossing:
    """What a device sends in a step of the largest batch."""
    return crossing_of(plan, rank, ramp.micro_batches(spec)[-1])


def _of_the_host(spec: Spec, rates: Sequence[Rates]) -> Iterator[str]:
    """Say how fast state goes between host and device, where a plan moves any."""
    if not spec.has_hosts or (not spec.offload and spec.train.ema is None):
        return
    slowest = min(one.rate(HOST, "any", ()) for one in rates)
    yield f"host and device exchange {slowest / 1e9:g} GB/s a direction, all devices and both directions at once"
    if spec.train.ema is not None:
        yield "the moving average of the weights is updated under the next step, and takes none of its time"


def _of_rates(spec: Spec, plan: Plan, rates: Sequence[Rates]) -> tuple[str, ...]:
    """What stands in for the classes that a table has no rows of, of the classes that the plan has kernels of."""
    found: dict[str, None] = {}
    for one in {id(one): one for one in rates}.values():
        asked = _classes(spec, plan, one)
        found |= {note: None for key, note in one.notes.items() if key in asked}
    return tuple(found)


def _classes(spec: Spec, plan: Plan, rates: Rates) -> set[tuple[str, str]]:
    """Class and dtype of every kernel and transfer of a step."""
    rows, p = balanced_rows(spec), spec.parallel
    several = p.expert_group > 1
    links = {"message": p.pipeline > 1, "all_reduce": p.columns > 1, "dispatch": several, "combine": several}
    found = {(f"{kind}_{level}", "any") for kind, used in links.items() for level in LEVELS if used}
    found |= {("optimizer", "any"), ("copy", "any")} | (
        {(HOST, "any")} if offloaded_bytes(spec, spec.train.optimizer) else set()
    )
    for use in plan.uses:
        for _, cost in plan.cuts[use.site].costs:
            for op, work in cost.ops:
                of = {kind for kind, _ in rates.kernels_s(use.segment.kind, op, work, rows)}
                found |= {(kind, "any") for kind in of} | {
                    (kind, rates.dtype_of(use.segment.kind, op, work)) for kind in of
                }
    return found


def _of_cores(rates: Rates, shared: float) -> Iterator[str]:
    """Say how much longer everything takes where ranks share the cores of a node."""
    if shared > 1:
        longer = f"everything takes {shared:.2f} times as long"
        yield f"{rates.ranks_of_node} ranks share {rates.cores} cores, so that {longer}"
