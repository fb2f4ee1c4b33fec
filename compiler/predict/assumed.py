"""The assumptions of a prediction, as text. Only those that matter to the plan are listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compiler.ir import Plan
from compiler.machine.rates import Rates
from compiler.machine.rates.table import HOST, LEVELS
from compiler.machine.topology.fabric import LEAF
from compiler.machine.topology.traffic import messages_of
from compiler.plan.sharding import Crossing, crossing_of
from compiler.plan.split_blocks import balanced_rows
from compiler.predict import failures
from compiler.predict.memory import gib, memory_assumptions
from compiler.predict.prediction import CALIBRATE, RankMemory, TorchShare, seconds
from dsl.closed_forms import ramp
from dsl.closed_forms.memory import offloaded_bytes
from dsl.closed_forms.stragglers import NODE, scale_of, slowest_factor
from dsl.schema import Moe, Spec


def assumptions(
    spec: Spec,
    plan: Plan,
    rates: Sequence[Rates],
    shared: float,
    ranks: Sequence[RankMemory],
    keys: float,
    goodput: failures.Goodput | None,
    shares: Sequence[TorchShare],
) -> tuple[str, ...]:
    """The assumptions of a prediction about the plan, its step, its rates and its memory, a sentence each.

    `rates`: of each pipeline rank. `shared`: factor by which everything takes longer because ranks share cores.
    `ranks`: memories. `keys`: share of the step that a free exchange of keys would save. `goodput`: with failures.
    `shares`: of the compute that torch takes.
    """
    return (
        *plan.assumptions,
        *_of_the_step(spec, plan),
        *failures.failure_assumptions(spec, goodput),
        *_of_keys(plan, keys),
        *_of_links(spec, plan, rates[0]),
        *_of_another_cpu(rates),
        *dict.fromkeys(sentence for device_rates in rates for sentence in device_rates.assumptions),
        *_of_the_host(spec, rates),
        *_of_rates(spec, plan, rates),
        *_of_torch(shares),
        *_of_cores(rates[0], shared),
        *_of_scale(spec),
        *memory_assumptions(spec, plan, ranks),
    )


def _of_the_step(spec: Spec, plan: Plan) -> Iterator[str]:
    if any(isinstance(layers.ffn, Moe) for layers in spec.model.layers):
        yield (
            "tokens choose experts at random, and the fullest rank of each layer has its median load"
            if spec.stack.balance == "forced"
            else "all experts receive equally many tokens; `--what-if` shows steps with uneven loads"
        )
    splitting = [name for name, degree in (("tensor", plan.mesh.tp), ("context", plan.mesh.cp)) if degree > 1]
    if splitting:
        rows = max(_crossing(spec, plan, rank).rows for rank in range(plan.mesh.pp))
        names = " and ".join(splitting)
        yield f"{names} ranks exchange rows between segments: a device sends up to {gib(rows)} per step"
        if plan.mesh.tp > 1 and not spec.splits_vocabulary:
            reason = f"{plan.mesh.tp} does not divide the vocabulary of {spec.model.vocab:,}"
            yield f"each tensor rank holds the whole embedding and head, because {reason}"
    if plan.sharded:
        yield from _of_divided_state(spec, plan)
    elif spec.parallel.columns > 1:
        if spec.parallel.overlap_reduce and spec.has_hosts:
            yield "gradients are reduced while the links are free of exchanges, and this slows nothing down"
        else:
            yield "gradients are reduced after the last backward"
        if spec.parallel.zero:
            yield "weights are gathered after the update, and nothing overlaps with that"
    yield "reading data and validation take no time; checkpoints and failures count only in the goodput"


def _of_keys(plan: Plan, share: float) -> Iterator[str]:
    """Say what context ranks would gain from another way to send keys."""
    if plan.mesh.cp > 1:
        yield f"context ranks gather keys; a ring would save at most {share:.2%} of the step"


def _of_links(spec: Spec, plan: Plan, rates: Rates) -> Iterator[str]:
    """Say how messages and exchanges slow down compute."""
    messages = messages_of(rates.fabric, plan, plan.stage_placement).seconds
    if messages:
        longest = seconds(max(messages.values()))
        yield f"an action ends when its message has arrived, which takes up to {longest} and overlaps with its compute"
    p = spec.parallel
    exchanges = max(p.expert, p.expert_tensor, p.tensor, p.context) > 1 or plan.sharded
    if exchanges and not spec.sm.communication and rates.beside_share < 1:
        share = f"{1 - rates.beside_share:.0%}"
        yield f"no SMs are reserved for exchanges: while they run, they take {share} of the SMs from compute"


def _of_another_cpu(rates: Sequence[Rates]) -> Iterator[str]:
    """Say that the times are not those of this machine, and which command measures it."""
    if not all(device_rates.calibrated for device_rates in rates):
        yield (
            "times are those of a core of a small server, and a step may take several times as long on this machine: "
            f"`{CALIBRATE}` measures it in half a minute and prints the line that makes plans use the result"
        )


def _of_divided_state(spec: Spec, plan: Plan) -> Iterator[str]:
    """Say which sharded state devices send, and when."""
    largest = max((_crossing(spec, plan, rank) for rank in range(plan.mesh.pp)), key=lambda crossing: crossing.state)
    yield (
        "each micro-batch's gradients are reduced after the segment that makes them, while the next one runs: a device "
        f"sends up to {gib(largest.gradients)} per step"
    )
    if largest.weights:
        yield f"weights are gathered one segment ahead: a device sends up to {gib(largest.weights)} per step"
    else:
        yield "weights are gathered after the update, and nothing overlaps with that"
    if (copies := spec.parallel.copies) > 1:
        ranks = spec.parallel.data // copies
        yield f"every {ranks} data ranks share one of {copies} copies, whose gradients are summed once a step"


def _crossing(spec: Spec, plan: Plan, rank: int) -> Crossing:
    """The bytes that a device sends in a step of the largest batch."""
    return crossing_of(plan, rank, ramp.micro_batches(spec)[-1])


def _of_the_host(spec: Spec, rates: Sequence[Rates]) -> Iterator[str]:
    """Say how fast state moves between host and device, if the plan moves any."""
    if not spec.has_hosts or (not spec.offload and spec.train.ema is None):
        return
    slowest = min(device_rates.rate(HOST, "any", ()) for device_rates in rates)
    yield f"host and device exchange {slowest / 1e9:g} GB/s per direction, all devices and both directions at once"
    if spec.train.ema is not None:
        yield "the moving average of the weights is updated during the next step, and takes none of its time"


def _of_rates(spec: Spec, plan: Plan, rates: Sequence[Rates]) -> tuple[str, ...]:
    """Which rows stand in for classes that the plan uses and a table has no rows for."""
    notes: dict[str, None] = {}
    for device_rates in {id(device_rates): device_rates for device_rates in rates}.values():
        classes = _classes(spec, plan, device_rates)
        notes |= {note: None for key, note in device_rates.notes.items() if key in classes}
    return tuple(notes)


def _classes(spec: Spec, plan: Plan, rates: Rates) -> set[tuple[str, str]]:
    """The class and dtype of every kernel and transfer of a step."""
    rows, p = balanced_rows(spec), spec.parallel
    several = p.expert_group > 1
    links = {"message": p.pipeline > 1, "all_reduce": p.columns > 1, "dispatch": several, "combine": several}
    classes = {(f"{kind}_{level}", "any") for kind, used in links.items() for level in LEVELS if used}
    classes |= {("optimizer", "any"), ("copy", "any")} | (
        {(HOST, "any")} if offloaded_bytes(spec, spec.train.optimizer) else set()
    )
    for use in plan.uses:
        for _, cost in plan.cuts[use.site].costs:
            for op, work in cost.ops:
                kinds = {kind for kind, _ in rates.kernels_s(use.segment.kind, op, work, rows)}
                classes |= {(kind, "any") for kind in kinds} | {
                    (kind, rates.dtype_of(use.segment.kind, op, work)) for kind in kinds
                }
    return classes


def _of_cores(rates: Rates, shared: float) -> Iterator[str]:
    """Say how much longer everything takes if ranks share the cores of a node."""
    if shared > 1:
        longer = f"everything takes {shared:.2f} times as long"
        yield f"{rates.ranks_of_node} ranks share {rates.cores} cores, so {longer}"


def _of_scale(spec: Spec) -> Iterator[str]:
    """Say what the number of devices costs."""
    scale, longer = scale_of(spec.cluster), slowest_factor(spec.cluster) - 1
    if scale is not None and spec.cluster.world > NODE:
        crowded = (
            f"; links lose {scale.congestion:.0%} of their bandwidth at each layer of switches above the leaf"
            if spec.cluster.num_nodes > LEAF
            else ""
        )
        yield (
            f"a step waits for the slowest of {spec.cluster.world:,} devices, with a deviation of {scale.spread:.2%},"
            f" and takes {longer:.1%} longer than on a node{crowded}; `scale` in the cluster changes this"
        )


def _of_torch(shares: Sequence[TorchShare]) -> Iterator[str]:
    """Name the ops that torch runs on a GPU, and their share of the compute."""
    for share in shares:
        yield (
            f"torch computes {share.names}, {share.share:.0%} of the compute, priced by the FLOPs, bytes and launches "
            f"of its kernels; they need up to {gib(share.temporary_bytes)} for temporary tensors"
        )
