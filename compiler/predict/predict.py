"""`predict`: the time of a step, its cost, and whether it fits, from a spec. One model for all specs, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from compiler.ir import Communication, Plan, Program, Use
from compiler.machine.rates import Rates
from compiler.machine.topology import ExpertTraffic
from compiler.plan.blocks import model_steps
from compiler.plan.parameters import count_parameters
from compiler.plan.plan import HELD, make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.predict.assumed import assumptions
from compiler.predict.device_memory import device_assumptions, device_memories
from compiler.predict.failures import Goodput, goodput_of
from compiler.predict.flops import flops_per_token
from compiler.predict.generation import generation_of
from compiler.predict.interval import interval_of
from compiler.predict.memory import rank_memories, rank_peaks
from compiler.predict.memory_state import saved_bytes
from compiler.predict.prediction import (
    Flops,
    Interval,
    Prediction,
    RankMemory,
    StageRow,
    StepPrediction,
    Tail,
    TokenExchange,
    WholeRun,
    energy_of,
    money_of,
)
from compiler.predict.rank_use import RankUse, use_of
from compiler.predict.step import step_of
from compiler.predict.tail import groups_of, reduce_seconds, tail_of, works_of
from compiler.predict.timed_plan import TimedPlan
from compiler.predict.times import StepTimes, exposed_reductions, lane_seconds, step_times
from compiler.predict.torch_share import torch_shares
from compiler.program.lower import Lowering
from compiler.program.lower.scheduler import QUICK_EFFORT, Scheduler
from compiler.program.lower.twins import twins_of
from compiler.schedule import AUTO
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline, simulate
from dsl.closed_forms import ramp
from dsl.closed_forms.stragglers import slowest_factor
from dsl.schema import Device, Moe, Spec
from runtime.contract.weights import is_adapter

TRILLION = 10**12


def time_plan(spec: Spec, rates: Rates | None = None) -> TimedPlan:
    """The timed plan of a spec's largest batch. `rates`: as for `predict`."""
    lowering = Lowering(make_plan(spec), rates or rank_rates(spec))
    return time_schedule(spec, lowering, scheduler_of(spec, lowering).largest())


def scheduler_of(spec: Spec, lowering: Lowering, progress: Callable[[str], None] = lambda _: None) -> Scheduler:
    """Makes the schedules of a spec. `progress` is called with lines about a search.

    The schedule of a long search is shorter than that of a quick one, and may hold more activations. If it does not
    fit, and that of a quick search does, all searches are quick.
    """
    scheduler = Scheduler(spec, lowering, progress)
    if spec.schedule.name != AUTO or _fits(spec, lowering, scheduler.largest()):
        return scheduler
    quick = Scheduler(spec, lowering, progress, QUICK_EFFORT)
    return quick if _fits(spec, lowering, quick.largest()) else scheduler


def _fits(spec: Spec, lowering: Lowering, schedule: Schedule) -> bool:
    return all(rank.fits for rank in rank_peaks(spec, lowering, schedule))


def time_schedule(spec: Spec, lowering: Lowering, schedule: Schedule, least: bool = False) -> TimedPlan:
    """The timed plan of a schedule on the stages of the spec's plan.

    `least`: instead, a lower bound for any order of the instructions of its actions.
    """
    plan, rates = lowering.plan, lowering.rates
    times = step_times(lowering, schedule, least)
    timeline = simulate(schedule, times)
    reduce_s = rates[0].fabric.reduce_s
    groups = [groups_of(plan, rank) for rank in range(plan.mesh.pp)]
    of_ranks = zip(groups, works_of(spec, plan, groups), rates, strict=True)
    tails = [
        tail_of(spec, plan.mesh, rank_groups, work, reduce_s, device_rates)
        for rank_groups, work, device_rates in of_ranks
    ]
    if plan.overlap_reduce and spec.has_hosts:  # a CPU core that reduces gradients cannot compute
        seconds = reduce_seconds(spec, groups, reduce_s)
        remaining = exposed_reductions(plan, schedule, times, timeline, seconds)
        tails = [replace(tail, reduction_s=remaining_s) for tail, remaining_s in zip(tails, remaining, strict=True)]
    shared, slowest = (
        core_sharing_factor(rates[0], plan, schedule, times, timeline, tails),
        slowest_factor(spec.cluster),
    )
    if shared * slowest > 1:
        times, tails = times.longer(shared * slowest), [tail.longer(shared * slowest) for tail in tails]
        timeline = simulate(schedule, times)
    step = step_of(schedule, timeline, tails, spec.train.batch.end * spec.train.sequence)
    return TimedPlan(spec, lowering, schedule, timeline, shared, slowest, step, times, tuple(tails))


def interval_of_plan(timed: TimedPlan, use: RankUse) -> Interval | None:
    """The interval of a timed step; None if its rates are those of another CPU. `use`: of the busiest rank."""
    if not _are_calibrated(timed.rates):
        return None
    return interval_of(timed.step.seconds, use, timed.rates[use.pp_rank])


def memories(plan: TimedPlan, program: Program | None = None) -> tuple[RankMemory, ...]:
    """The memory of each pipeline rank of a timed plan. `program`: of its schedule, if it was made before."""
    return rank_memories(plan.spec, plan.lowering, plan.schedule, plan.timeline, program=program)


def predict(spec: Spec, rates: Rates | None = None) -> Prediction:
    """Predict a run at its largest batch.

    `rates`: rates of all devices; None for those of the spec's table, or the best known for each kind of device. The
    spec must have passed its checks. It may be one that cannot be trained yet.
    """
    plan = time_plan(spec, rates)
    return predict_timed_plan(plan, memories(plan))


def _undivided_steps(spec: Spec, steps: Sequence[Use | Communication]) -> Sequence[Use | Communication]:
    """The steps of the model without tensor and context ranks, which do not change the FLOPs of a token."""
    if spec.parallel.tensor == spec.parallel.context == 1:
        return steps
    parallel = spec.parallel.model_copy(update={"tensor": 1, "context": 1})
    return model_steps(spec.model_copy(update={"parallel": parallel}))


def predict_timed_plan(timed_plan: TimedPlan, ranks: tuple[RankMemory, ...]) -> Prediction:
    """The full prediction of a timed plan. `ranks`: its memories."""
    spec, plan, rates, use = timed_plan.spec, timed_plan.plan, timed_plan.rates, use_of(timed_plan)
    step = replace(timed_plan.step, interval=interval_of_plan(timed_plan, use))
    steps = [step for stage in plan.stages for step in stage.steps]
    flops = flops_per_token(_undivided_steps(spec, steps), spec.train.micro_batch * spec.train.sequence)
    generation = generation_of(spec, timed_plan.lowering, ranks, timed_plan.slowdown)
    generation_s = generation.seconds if generation else 0.0
    hours = (step.seconds + generation_s) / step.tokens * TRILLION * plan.mesh.world / 3600
    counts = count_parameters(spec, steps)
    whole_run = whole_run_of(spec, step, generation_s)
    p, devices = spec.parallel, devices_of(spec)
    peak, prices = sum(n * (d.bf16 or 0) for n, d in devices), [d.price for _, d in devices]
    price = None if None in prices else sum(n * (d.price or 0) for n, d in devices) / plan.mesh.world
    goodput, shares = _goodput(timed_plan, step.seconds + generation_s), torch_shares(spec, plan, rates[0])
    devices_memory = device_memories(spec, plan, timed_plan.lowering.program(timed_plan.schedule), ranks)
    return Prediction(
        run=spec.name,
        model=spec.model.name,
        cluster=spec.cluster.name,
        num_devices=plan.mesh.world,
        device=" and ".join(dict.fromkeys(device.name for _, device in devices)),
        degrees=(
            ("pipeline", p.pipeline), ("expert", p.expert), ("data", p.data), ("tensor", p.tensor),
            ("context", p.context), ("expert_tensor", p.expert_tensor),
        ),
        stage_placement=plan.stage_placement,
        rates=" and ".join(dict.fromkeys(device_rates.table for device_rates in rates)),
        parameters=counts.total,
        active_parameters=counts.active,
        mtp_parameters=counts.mtp,
        adapter_parameters=sum(replica.num_elements for replica in plan.replicas if is_adapter(replica.name)),
        flops=flops,
        step=step,
        use=use,
        mfu=mfu_of(flops, step, peak) if all(device.bf16 for _, device in devices) else None,
        device_hours_per_trillion_tokens=hours,
        money=money_of(price, hours, whole_run, plan.mesh.world),
        energy=energy_of([(n, device.name) for n, device in devices], hours),
        whole_run=whole_run,
        ranks=ranks,
        stages=stage_rows(timed_plan.lowering),
        exchange=exchange_of(spec, rates[0].experts),
        assumptions=(
            *assumptions(spec, plan, rates, timed_plan.shared, ranks, share_of_keys(timed_plan), goodput, shares),
            *device_assumptions(devices_memory),
        ),
        torch=shares,
        goodput=goodput,
        generation=generation,
        calibrated=_are_calibrated(rates),
        devices_of_node=max(node.devices for _, node in spec.cluster.parts),
        devices_memory=devices_memory,
    )  # fmt: skip


def _are_calibrated(rates: Sequence[Rates]) -> bool:
    """Whether all rates belong to the spec's devices."""
    return all(device_rates.calibrated for device_rates in rates)


def _goodput(timed_plan: TimedPlan, step_s: float) -> Goodput | None:
    """The goodput of a run whose steps take `step_s` seconds, and its best interval of checkpoints."""
    spec, plan = timed_plan.spec, timed_plan.plan
    copied = max(saved_bytes(spec, plan))
    return goodput_of(spec, plan, step_s, max(device_rates.host_time_s(copied) for device_rates in timed_plan.rates))


def share_of_keys(plan: TimedPlan) -> float:
    """The share of the step that context ranks spend in exposed exchanges of keys and values.

    It bounds the gain of any other way to send keys, such as a ring.
    """
    spec, step = plan.spec, plan.step.seconds
    if spec.parallel.context == 1:
        return 0.0
    alone = tuple(replace(rates, sharing={**rates.sharing, "cp": (rank,)}) for rank, rates in enumerate(plan.rates))
    free = time_schedule(spec, Lowering(plan.plan, alone), plan.schedule).step.seconds
    return max(0.0, 1 - free / step)  # orders come from a search, so a plan with exchanges may be faster by chance


def devices_of(spec: Spec) -> list[tuple[int, Device]]:
    """(number of devices, device) of each kind."""
    return [(nodes * node.devices, node.device) for nodes, node in spec.cluster.parts]


def core_sharing_factor(
    rates: Rates, plan: Plan, schedule: Schedule, times: StepTimes, timeline: Timeline, tails: Sequence[Tail]
) -> float:
    """The factor by which a step takes longer because the ranks of a node share cores; 1 if each has its own device.

    Cores also copy messages, so a rank occupies a core whenever it does not wait.
    """
    if rates.cores is None:
        return 1.0
    busy = [
        float(sum(times.step_time(step, rank) for step in steps)) / 1000 + tails[rank].seconds
        for rank, steps in enumerate(schedule.actions)
    ]
    alone_s = float(timeline.makespan) / 1000 + max(tail.seconds for tail in tails)
    return rates.makespan_on_shared_cores(alone_s, busy * plan.mesh.columns) / alone_s


def mfu_of(flops: Flops, step: StepPrediction, peak: float) -> Flops:
    """The share of all devices' BF16 peak, whatever the dtype: the published definition (arXiv 2505.09343, table 4)."""
    peak_of_step = step.seconds * peak
    return Flops(flops.causal * step.tokens / peak_of_step, flops.full * step.tokens / peak_of_step)


def whole_run_of(spec: Spec, step: StepPrediction, generation_s: float = 0.0) -> WholeRun:
    """The whole run. A smaller batch saves the time of its micro-batches on the busiest rank, but none of the bubble.

    `generation_s`: seconds per step that generate completions, in addition to the step.
    """
    growth = ramp.ramp_of_spec(spec)
    busiest = max(rank.busy_s for rank in step.ranks) / step.num_micro_batches
    quantum = spec.parallel.data * spec.train.micro_batch
    seconds = sum(
        count * (generation_s + step.seconds - (step.num_micro_batches - batch / quantum) * busiest)
        for batch, count in growth.phases(spec.train.tokens)
    )
    return WholeRun(spec.train.tokens, growth.steps_for(spec.train.tokens), seconds)


def stage_rows(lowering: Lowering) -> tuple[StageRow, ...]:
    """The layers, ranks, times and parameters of each stage. Times are those on its first rank."""
    plan, rows = lowering.plan, []
    twins = twins_of(plan.stages)
    lanes: dict[tuple[int, int], tuple[float, float]] = {}
    for stage in plan.stages:
        sites = [step.site for step in stage.steps if isinstance(step, Use)]
        layers = tuple(dict.fromkeys(site.layer for site in sites if site.layer is not None))
        block_names = tuple(OTHERS[block] for block in dict.fromkeys(site.block for site in sites) if block in OTHERS)
        ranks = plan.ranks_of_stage(stage.index)
        twin = twins[stage.index][0], lowering.kinds[ranks[0]]
        if twin not in lanes:
            lanes[twin] = lane_seconds(lowering, *twin)
        uses = [step for step in stage.steps if isinstance(step, Use)]
        by_name = {name: param for use in uses for param, (_, name) in zip(use.segment.params, use.params, strict=True)}
        elements = sum(prod(param.shape) for param in by_name.values() if param.role in HELD)
        rows.append(StageRow(stage.index, ranks, layers, block_names, *lanes[twin], elements))
    return tuple(rows)


OTHERS: Mapping[str, str] = {"embed": "embedding", "head": "head", "M0": "mtp.0"}


def exchange_of(spec: Spec, experts: ExpertTraffic) -> TokenExchange | None:
    """Bytes that one token moves to the experts of a layer and back; None for a model without experts."""
    moe = next((layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe)), None)
    if moe is None:
        return None
    hidden, copies = spec.model.hidden, max(1, round(experts.network_copies * moe.top_k))
    return TokenExchange(hidden * experts.dispatch_bytes, hidden * experts.combine_bytes, copies)
