"""Calibration on one traced layer: factors by which each kernel class takes longer than its table says.

`dsc calibrate --trace FILE` runs `calibrate_table` on a user's trace. The shipped table h800-calibrated was made
with it from DeepSeek's public profile of one pair. docs/rates.md has the format. No training step is an input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from compiler.ir import Communication, Cut, Plan, Stage, Use
from compiler.machine.rates.rates import Rates
from compiler.machine.rates.table import (
    CLASSES,
    FLOPS,
    LEAST_FACTOR,
    MAX_TEXT,
    MOST_FACTOR,
    PAIR,
    SECONDS,
    TABLES,
    Date,
    Factor,
    RateError,
    RateRow,
    RateTable,
    TableModel,
    Text,
    merge_base,
    parse_model,
    peak_of,
    read_text,
    shipped_table,
    shipped_table_names,
)
from compiler.model.ops import kernel_class
from compiler.plan.actions.chains import EXCHANGES, Chains
from compiler.plan.actions.lanes import end_of
from compiler.plan.actions.order import jobs_of
from compiler.plan.actions.search import best_order
from compiler.plan.spec_rates import rates_of
from dsl.schema import Spec
from runtime.contract.names import Site

TRACES = TABLES.parent / "traces"
CALIBRATED = "-calibrated"  # suffix of a calibrated table's name
FAR = 0.05  # how far the sum of the classes' times may be from the trace's busy time

Ms = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Phase = Literal["F", "I", "W"]


class ClassTime(TableModel):
    """Joint time of some kernel classes in one layer, in ms, over the forward and both parts of the backward."""

    classes: Annotated[tuple[str, ...], Field(min_length=1, max_length=len(CLASSES))]
    ms: Ms


class BandwidthShare(TableModel):
    """The share of the memory's peak bandwidth that kernels of a class reach."""

    kind: Annotated[str, Field(alias="class")]
    share: Annotated[float, Field(gt=0, le=1)]


class PhaseTime(TableModel):
    """Time of a layer's exchanges in a phase, or of a part of its compute.

    Parts are only compared with predictions, not used for calibration, as they include waits of their kernels.
    """

    phase: Phase
    part: Literal["", "attention", "mlp"] = ""  # attention ends with the router, mlp is the rest
    ms: Ms


class TracedPair(TableModel):
    """One traced pair: a forward and a backward of `layers` equal layers, in milliseconds."""

    name: Text
    layer: Annotated[str, Field(pattern=r"^L[0-9]{1,4}$")]  # a layer of the spec that is like the traced ones
    layers: Annotated[int, Field(ge=1, le=1000)]
    span_ms: Ms  # from the first kernel to the last
    busy_ms: Ms  # in which compute kernels run
    gaps_ms: Annotated[float, Field(ge=0, le=1e6)] = 0.0  # between compute kernels, without waits
    classes: Annotated[tuple[ClassTime, ...], Field(min_length=1, max_length=len(CLASSES))]
    shares: Annotated[tuple[BandwidthShare, ...], Field(max_length=len(CLASSES))] = ()
    exchanges: Annotated[tuple[PhaseTime, ...], Field(max_length=3)] = ()
    parts: Annotated[tuple[PhaseTime, ...], Field(max_length=6)] = ()
    source: Text
    date: Date

    @model_validator(mode="after")
    def _consistent(self) -> TracedPair:
        named = [kind for entry in self.classes for kind in entry.classes]
        if wrong := [
            kind for kind in (*named, *(s.kind for s in self.shares)) if kind not in CLASSES or kind in SECONDS
        ]:
            raise ValueError(f"there is no kernel class {wrong[0][:40]!r}")
        if twice := [kind for kind, count in Counter(named).items() if count > 1]:
            raise ValueError(f"class {twice[0]} is in two entries of `classes`")
        if alone := [share.kind for share in self.shares if share.kind not in named]:
            raise ValueError(f"`shares` has {alone[0]}, and no entry of `classes` has it")
        total = sum(entry.ms for entry in self.classes) * self.layers
        if abs(total - self.busy_ms) > FAR * self.busy_ms:
            sums = f"the classes sum to {total:.1f} ms for {self.layers} layers"
            raise ValueError(f"{sums}, but busy_ms = {self.busy_ms}")
        if self.busy_ms + self.gaps_ms > self.span_ms:
            raise ValueError("busy_ms and gaps_ms add up to more than span_ms")
        phases = [exchange.phase for exchange in self.exchanges]
        if len(set(phases)) < len(phases) or "W" in phases or any(exchange.part for exchange in self.exchanges):
            raise ValueError("`exchanges` may have one time for phase F and one for phase I, without parts")
        return self


@dataclass(frozen=True)
class LayerTimes:
    """Predicted seconds of a layer."""

    classes: Mapping[str, float]  # by class, over F, I and W
    moved_bytes: Mapping[str, float]  # bytes by class of memory-bound kernels
    parts: Mapping[tuple[str, str], float]  # by (phase, part)
    exchanges: Mapping[str, float]  # by phase, without host reads
    latency: Mapping[str, float]  # the part of `exchanges` that does not depend on bytes
    launches: int


def read_trace(path: Path, display_name: str = "") -> TracedPair:
    """Read a trace. Raises RateError, which names the file and the key."""
    return parse_model(TracedPair, read_text(path, display_name), display_name or str(path))


def shipped_trace(name: str) -> TracedPair:
    """A trace that comes with dsc."""
    return read_trace(TRACES / f"{name}.json")


def layer_times(plan: Plan, cuts: Mapping[str, Cut], rates: Rates, layer: str) -> LayerTimes:
    """Predicted times of a layer, from the nodes that plans are timed with. Raises RateError without that layer."""
    stage = next((stage for stage in plan.stages if any(_site(step) == layer for step in stage.steps)), None)
    if stage is None:
        raise RateError(f"the spec has no layer {layer}")
    classes: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, float] = defaultdict(float)
    parts: defaultdict[tuple[str, str], float] = defaultdict(float)
    exchanges: defaultdict[str, float] = defaultdict(float)
    latency: defaultdict[str, float] = defaultdict(float)
    launches = 0
    chains = Chains(stage, cuts, rates)
    for node in (*chains.chain("F"), *chains.chain("B")):
        instruction = node.instruction
        if Site(instruction.site).block == layer and instruction.kind in EXCHANGES:
            host_s = rates.host_read_s if instruction.kind == "counts" else 0.0  # a trace has the time of kernels
            exchanges[instruction.phase] += node.time_ns * 1e-9 - host_s
            latency[instruction.phase] += rates.fabric.exchange_s(rates.experts, True, (), 0)
    for use in _uses(stage, layer):
        part = "attention" if use.segment.kind in ("attention", "router") else "mlp"
        for phase, cost in cuts[use.site].costs:
            for op, work in cost.ops:
                for kind, time_s in rates.kernels_s(use.segment.kind, op, work, chains.rows):
                    classes[kind] += time_s
                    parts[phase, part] += time_s
                parts[phase, part] += rates.launch_s
                moved[kernel_class(op)] += work.bytes + work.bytes_row * chains.rows
                launches += 1
    return LayerTimes(classes, moved, parts, exchanges, latency, launches)


def calibrate_table(table: RateTable, trace: TracedPair, spec: Spec, plan: Plan, cuts: Mapping[str, Cut]) -> RateTable:
    """The table with the factors of a trace of `spec`, which has the given plan and cuts.

    A result with a base has only what differs from it: `merge_base` gives the rows and factors that rates are made
    from. Raises RateError if the trace and the spec do not match.
    """
    rates = rates_of(spec, table)
    times = layer_times(plan, cuts, rates, trace.layer)
    factors: dict[str, float] = {}
    for entry in trace.classes:
        factors |= _of_classes(entry, trace, table, times)
    predicted, latency = sum(times.exchanges.values()), sum(times.latency.values())
    if trace.exchanges and predicted:
        measured = sum(exchange.ms for exchange in trace.exchanges) * 1e-3
        phases = {exchange.phase for exchange in trace.exchanges}
        predicted = sum(time_s for phase, time_s in times.exchanges.items() if phase in phases)
        latency = sum(time_s for phase, time_s in times.latency.items() if phase in phases)
        if measured <= latency or predicted <= latency:
            raise RateError(f"trace {trace.name}: its exchanges are shorter than their latency")
        factors |= dict.fromkeys(_exchange_classes(rates), (measured - latency) / (predicted - latency))
    common = {"source": trace.source, "date": trace.date}

    def factor_of(kind: str, factor: float) -> Factor:
        dtype = _dtype_of(rates, kind)
        return _factor(trace, kind, dtype, table.factor_of(kind, dtype) * factor)

    scaled = tuple(factor_of(kind, factor) for kind, factor in factors.items())
    gap_s = float(f"{trace.gaps_ms * 1e-3 / trace.layers / times.launches:.4g}")
    fields = {"class": "launch", "seconds": gap_s, "when": "paired", **common}
    launch = (RateRow.model_validate(fields),) if gap_s else ()
    if table.name in shipped_table_names() and table == shipped_table(
        table.name
    ):  # the result needs no copy of its rows
        rows, base = launch, table.name
    else:
        rows, base = (*launch, *(row for row in table.rows if not launch or row.kind != "launch")), None
        traced_kinds = {(factor.kind, factor.dtype) for factor in scaled}
        scaled += tuple(factor for factor in table.factors if (factor.kind, factor.dtype) not in traced_kinds)
    result = RateTable(
        name=f"{table.name[: MAX_TEXT - len(CALIBRATED)]}{CALIBRATED}",
        base=base,
        device=table.device,
        rows=rows,
        factors=scaled,
    )
    span_s = pair_s(plan, cuts, rates_of(spec, result), trace)
    if span_s is None:
        return result
    pair = _factor(trace, PAIR, "any", trace.span_ms * 1e-3 / span_s)
    return result.model_copy(update={"factors": (*(factor for factor in result.factors if factor.kind != PAIR), pair)})


def pair_s(plan: Plan, cuts: Mapping[str, Cut], rates: Rates, trace: TracedPair) -> float | None:
    """Predicted seconds of the traced pair over two lanes; None if no stage has the traced layers."""
    for stage in plan.stages:
        sites = {_site(step) for step in stage.steps}
        if trace.layer in sites and len(sites) == trace.layers:
            chains = Chains(stage, cuts, rates)
            jobs = jobs_of([chains.chain("F"), chains.chain("B")])
            return end_of(jobs, best_order(jobs)) * 1e-9
    return None


def uncalibrated_classes(table: RateTable, spec: Spec, plan: Plan, cuts: Mapping[str, Cut]) -> tuple[str, ...]:
    """The classes of a plan's kernels and exchanges for which a table has no factor."""
    uses = [step for stage in plan.stages for step in stage.steps if isinstance(step, Use)]
    used = {kernel_class(op) for use in uses for _, cost in cuts[use.site].costs for op, _ in cost.ops}
    rates = rates_of(spec, table)
    if rates.rope and "attention" in used:
        used.add("rope")
    if spec.parallel.expert_group > 1:
        used |= set(_exchange_classes(rates))
    scaled = {factor.kind for factor in merge_base(table).factors}
    return tuple(kind for kind in CLASSES if kind in used - scaled)


def _exchange_classes(rates: Rates) -> tuple[str, str]:
    """The classes of the exchanges that a layer waits for."""
    place = "network" if rates.experts.spread.nodes > 1 else "node"
    return f"dispatch_{place}", f"combine_{place}"


def _factor(trace: TracedPair, kind: str, dtype: str, factor: float) -> Factor:
    if not LEAST_FACTOR <= factor <= MOST_FACTOR:
        raise RateError(
            f"trace {trace.name}: {kind} takes {factor:.3g} times as long as the table says, which is not between "
            f"{LEAST_FACTOR:g} and {MOST_FACTOR:g}: are its times those of one layer, in ms?"
        )
    common = {"source": trace.source, "date": trace.date}
    return Factor.model_validate({"class": kind, "dtype": dtype, "factor": float(f"{factor:.5g}"), **common})


def _dtype_of(rates: Rates, kind: str) -> str:
    """The dtype of the kernels of a class in a layer."""
    if kind not in FLOPS:
        return "any"
    return rates.plain if kind in ("attention", "attention_backward") else rates.linear


def _of_classes(entry: ClassTime, trace: TracedPair, table: RateTable, times: LayerTimes) -> dict[str, float]:
    """Factors of the classes of an entry: from the share of the peak if it is known, else from the remaining time."""
    left_s, unknown = entry.ms * 1e-3, []
    factors = {}
    shares = {share.kind: share.share for share in trace.shares}
    for kind in entry.classes:
        hbm = peak_of(table.device, kind, "any")
        if kind not in shares or not times.classes.get(kind):
            unknown.append(kind)
            continue
        if hbm is None:
            raise RateError(f"trace {trace.name} has shares of the peak bandwidth, but table {table.name} has no `hbm`")
        measured_s = times.moved_bytes[kind] / (shares[kind] * hbm)
        factors[kind] = measured_s / times.classes[kind]
        left_s -= measured_s
    predicted = sum(times.classes.get(kind, 0.0) for kind in unknown)
    if not predicted:
        return factors
    if left_s <= 0:
        raise RateError(f"trace {trace.name}: the shares of {', '.join(shares)} leave no time for {', '.join(unknown)}")
    return factors | dict.fromkeys(unknown, left_s / predicted)


def _site(step: Use | Communication) -> str:
    return step.site.block


def _uses(stage: Stage, layer: str) -> list[Use]:
    return [step for step in stage.steps if isinstance(step, Use) and _site(step) == layer]
