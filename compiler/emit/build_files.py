"""The files of a build besides segments, stages and kernels: plan.json, plan.txt, programs, manifest, launcher."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from compiler.emit import data_recipe, recipe
from compiler.emit.kernels import reason
from compiler.emit.kernels.calls import KernelCall, use_of
from compiler.emit.quantised import WeightQuantisation
from compiler.ir import (
    Bucket,
    Buffer,
    Communication,
    EmittedCall,
    Message,
    Plan,
    Program,
    Replica,
    SegmentCode,
    Stage,
    Use,
)
from compiler.ir.expert_placement import most_rows
from compiler.model.layers import attention
from compiler.model.layers.qk_clip import projections
from compiler.plan.parameters import num_experts
from compiler.plan.plan import HELD
from compiler.plan.split_blocks import balanced_rows, sent_rows
from compiler.plan.stages import block_of, clips_logits
from compiler.predict.memory_state import kept_elements
from compiler.predict.planned_step import PURPOSES, PlannedStep
from compiler.predict.predict import devices_of
from compiler.program.lower.estimate import Overlap
from compiler.program.lowered import LoweredPlan
from dsl.closed_forms.memory import update_bytes
from dsl.schema import Compressed, Gqa, Mla, Moe, Optimizer, Spec
from runtime import contract
from runtime.build.files import versions
from runtime.contract.names import DataName, MessageName, ParameterName, ProgramName, RecordName, Site
from runtime.contract.options import run_name
from runtime.system.strict_json import pretty

# --- watch.json: the predictions of a step that are shown when watching the run
DIGITS = 6  # significant digits of a predicted number


def watch_json(spec: Spec, planned: PlannedStep) -> str:
    """Return the text of watch.json. `planned`: the prediction of a step of the spec."""
    step, within, devices = planned.step, spec.train.within, devices_of(spec)
    peaks = [count * device.bf16 for count, device in devices if device.bf16 is not None]
    links = (
        contract.LinkTraffic(level.name, purpose, moved)
        for level in planned.network.levels
        for purpose, moved in zip(PURPOSES, level.moved, strict=True)
        if moved
    )
    return contract.WatchFacts(
        run=run_name(spec.name),
        model=spec.model.name,
        cluster=spec.cluster.name,
        devices=planned.network.num_devices,
        phase=within.number if within else 1,
        phases=within.phases if within else 1,
        flops_per_token=_round(planned.flops.causal),
        peak_flops=float(sum(peaks)) if len(peaks) == len(devices) else None,
        mfu=_round(planned.mfu.causal * step.seconds / planned.seconds) if planned.mfu else None,
        step_s=_round(planned.seconds),
        tokens=step.tokens,
        bubble=_round(min(1.0, step.mean.bubble_s / planned.seconds)),
        memory_bytes=tuple(rank.peak_bytes for rank in planned.ranks),
        capacity_bytes=tuple(rank.capacity_bytes for rank in planned.ranks),
        links=tuple(links),
        metrics=contract.MetricsSinks(**spec.metrics.model_dump()) if spec.metrics else None,
        calibrated=planned.calibrated,
    ).to_json()


def _round(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


# --- build files
Quantised = tuple[contract.QuantisedTensor, ...]


def plan_json(
    spec: Spec, lowered: LoweredPlan, overlaps: Mapping[ProgramName, Overlap], quantised: Quantised = ()
) -> str:
    """Return the text of plan.json: mesh, replica table, recipe, and the program of each step."""
    return pretty(contract_plan(spec, lowered, overlaps, quantised))


def contract_plan(
    spec: Spec, lowered: LoweredPlan, overlaps: Mapping[ProgramName, Overlap], quantised: Quantised = ()
) -> contract.RunPlan:
    """The plan in the form that the runtime reads. `quantised`: the weights that products read quantised."""
    plan = lowered.plan
    table = {r.key: r for r in plan.replicas}
    return contract.RunPlan(
        run=spec.name,
        mesh=plan.mesh,
        cluster=recipe.cluster(spec),
        communication_sms=spec.sm.communication,
        placement=str(plan.stage_placement),
        zero=spec.parallel.zero,
        precision=recipe.precision(spec.precision),
        row_alignment=spec.row_alignment,
        model=recipe.model(spec.model),
        train=recipe.train(spec),
        optimizer=recipe.optimizer_state(spec),
        data=data_recipe.data(spec.data),
        steps=lowered.num_steps,
        batches=lowered.batches,
        mtp_weight=recipe.phases(spec.model.mtp.weight) if spec.model.mtp else None,
        message=_message(plan),
        openings=lowered.openings,
        records=tuple(metric for stage in plan.stages for metric, _ in stage.records if not metric.is_largest),
        moe_layers=tuple(_moe_layer(spec, plan, stage, step) for stage in plan.stages for step in _routers(stage)),
        indexers=tuple(
            _indexer(spec, Site(metric.place))
            for stage in plan.stages
            for metric, _ in stage.records
            if metric.kind == "index_loss"
        ),
        stages=tuple(tuple(s.site for s in stage.steps if isinstance(s, Use)) for stage in plan.stages),
        overlap=_overlap(overlaps),
        memory=tuple(memory.total for memory in lowered.memories),
        buckets=tuple(_bucket(b, table, spec.train.optimizer) for b in plan.buckets),
        frozen=tuple(_bucket(b, table, spec.train.optimizer) for b in plan.frozen),
        adapter=recipe.adapter(spec.adapter),
        biases=tuple(contract.Bias(*_named_tensor(r)) for r in plan.replicas if r.role == "bias"),
        tables=tuple(
            contract.ExpertTable(*_named_tensor(r), num_experts(spec.model, r.name))
            for r in plan.replicas
            if r.role == "table"
        ),
        quantised=quantised,
        host=recipe.host(spec, lowered.memories),
        sequence_part=_largest_part(plan, "cp"),
        choices_part=_largest_part(plan, "sq"),
        clipped=tuple(_clipped_attention(spec, use) for use in plan.uses if clips_logits(use)),
    )


def _largest_part(plan: Plan, axis: str) -> int:
    """Bytes of the largest tensor that a rank contributes to an exchange over a mesh axis."""
    steps = (step for stage in plan.stages for step in stage.steps if isinstance(step, Communication))
    parts = (min(b.fixed_bytes for b in (*step.sizes, *step.outputs)) for step in steps if step.axis == axis)
    return max(parts, default=0)


def _message(plan: Plan) -> contract.StageMessage | None:
    output: Buffer | None = next((s.output for s in plan.stages if s.output), None)
    if output is None:
        return None
    return contract.StageMessage(tuple(extent for extent in output.shape if isinstance(extent, int)), output.dtype)


def _overlap(overlaps: Mapping[ProgramName, Overlap]) -> contract.OverlapTimes:
    """Predicted times of each distinct body, and for each program the share of exchange time that is hidden."""
    bodies = {name: times for overlap in overlaps.values() for name, times in overlap.bodies}
    return contract.OverlapTimes(
        bodies={
            name: contract.BodyTimes(t.end / 1e6, t.compute / 1e6, t.communication / 1e6, round(t.hidden, 4))
            for name, t in sorted(bodies.items())
        },
        programs={name: contract.ProgramTimes(round(o.total.hidden, 4)) for name, o in overlaps.items()},
    )


def _overlap_line(overlap: Overlap) -> str:
    """The hidden share of exchanges in a whole step, then for each kind of body with exchanges; "" if there are
    none."""
    kinds = ", ".join(f"{kind} {t.hidden:.0%}" for kind, t in overlap.kinds if t.communication)
    return f"  {overlap.total.hidden:.1%} of exchanges hidden under compute, predicted: {kinds}" if kinds else ""


def _routers(stage: Stage) -> list[Use]:
    return [s for s in stage.steps if isinstance(s, Use) and s.segment.kind == "router"]


def _layer_of(spec: Spec, site: Site) -> int:
    """The layer of a site; for the MTP block, the last layer."""
    return spec.model.num_layers - 1 if site.layer is None else site.layer


def _indexer(spec: Spec, site: Site) -> contract.PlannedIndexer:
    attention = spec.model.attention_of(_layer_of(spec, site))
    assert isinstance(attention, Mla | Compressed) and attention.indexer
    return contract.PlannedIndexer(site, attention.indexer.loss)


def _moe_layer(spec: Spec, plan: Plan, stage: Stage, router: Use) -> contract.MoeLayer:
    site = Site(router.site.block)
    ffn = spec.model.ffn(_layer_of(spec, site))
    assert isinstance(ffn, Moe)
    params = dict(router.params)
    rate = None if spec.adapter or spec.train.only else ffn.balance.bias_rate
    balanced = any(metric == RecordName.of("sequence_loss", site) for metric, _ in stage.records)
    sent = sent_rows(spec, ffn)
    return contract.MoeLayer(
        site=site,
        name=block_of(router),
        experts=ffn.experts,
        sent_rows=sent,
        held_rows=most_rows(sent, ffn.experts // spec.parallel.expert, spec.row_alignment),
        sequence_loss=ffn.balance.sequence_loss if balanced else 0.0,
        bias=params.get("bias"),
        bias_rate=recipe.phases(rate) if rate is not None else None,
        slots=dict(plan.slots)[params["slots"]] if params.get("slots") else None,
        replays=ffn.top_k if DataName(router.inputs[-1]).router else None,
    )


def _clipped_attention(spec: Spec, use: Use) -> contract.ClippedAttention:
    """The attention of a block with QK-clip, and the rows of weights of its queries and keys."""
    name, model, layer = block_of(use), spec.model, use.site.layer
    sizes = model.attention_of_mtp if layer is None else model.attention_of(layer)
    assert isinstance(sizes, Mla | Gqa), "only MLA and GQA return logits"
    key_heads, head_rows = projections(sizes)
    rows = tuple(
        contract.ClippedRows(f"{name}.{attention.PARAMETERS[weight]}", first, heads, parts)
        for weight, first, heads, parts in head_rows
    )
    return contract.ClippedAttention(name, max(heads for _, _, heads, _ in head_rows), key_heads, rows)


def _bucket(bucket: Bucket, table: Mapping[str, Replica], optimizer: Optimizer) -> contract.PlannedBucket:
    by_matrix = optimizer.unit == "matrix"
    parameters = tuple(
        contract.HeldParameter(
            *(r.name, r.tensor, r.shape, r.init, r.decay, r.uniform, r.slice),
            matrices=r.matrices if by_matrix and not r.slice else (),
            mean=r.mean,
        )
        for r in (table[name] for name in bucket.replicas)
    )
    held_by = bucket.name, tuple(bucket.holders), bucket.stages
    return contract.PlannedBucket(*held_by, parameters, bucket.owners, bucket.sites, bucket.is_of_rest, bucket.is_still)


def _named_tensor(replica: Replica) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return replica.name, replica.shape, tuple(replica.holders)


def program_json(program: Program, order: tuple[int, ...] = ()) -> str:
    """Return the text of a program file: the calls of each pipeline rank. `order`: micro-batches by cost."""
    ranks = tuple(
        tuple([contract.Call(body, ks, _ends(posts), _ends(releases)) for body, ks, posts, releases in invocations])
        for invocations in program.invocations
    )
    placement = str(program.stage_placement)
    prologue, epilogue, update = (
        tuple(contract.Collective(collective.kind, collective.name) for collective in listed)
        for listed in (program.prologue, program.epilogue, program.update)
    )
    count = program.num_micro_batches
    lists = prologue, epilogue, update, program.reductions, order
    return contract.RunProgram(program.name, count, placement, ranks, *lists).to_json()


def _ends(messages: Sequence[tuple[int, Message]]) -> tuple[tuple[int, MessageName], ...]:
    return tuple([(rank, MessageName.of(*message)) for rank, message in messages]) if messages else ()


def plan_text(spec: Spec, lowered: LoweredPlan, overlaps: Mapping[ProgramName, Overlap]) -> str:
    """Return the text of plan.txt, a summary of the plan for people."""
    plan = lowered.plan
    lines = [*plan_head(spec, lowered), ""]
    sizes = ", ".join(f"{n} from {s}" for s, n in lowered.batches)
    lines += [f"sequences per step: {sizes}", ""] if len(lowered.batches) > 1 else []
    lines += [_stage_line(plan, stage) for stage in plan.stages]
    for name, certificate in lowered.certificates.items():
        overlap = _overlap_line(overlaps[name])
        lines += [
            "",
            f"{name}: {lowered.programs[name].name}",
            *(f"  {line}" for line in str(certificate).splitlines()),
            *([overlap] if overlap else []),
        ]
    lines += ["", *(f"assumed: {a}" for a in plan.assumptions)]
    return "\n".join(lines) + "\n"


def plan_head(spec: Spec, lowered: LoweredPlan) -> list[str]:
    """One line each for model, mesh and steps."""
    mesh, batches = lowered.plan.mesh, [batch for _, batch in lowered.batches]
    replicas = [r for r in lowered.plan.replicas if r.role in HELD]
    trained = sum(r.num_elements for r in replicas if r.role == "parameter")
    total = sum(r.num_elements for r in replicas)
    in_mtp = sum(r.num_elements for r in replicas if ParameterName(r.name).part == "mtp")
    with_mtp = f", {in_mtp:,} of them only in MTP" if in_mtp else ""
    trained_in = "in adapters" if spec.adapter else "in indexers"
    of_adapters = f"; trained: {trained:,} {trained_in}" if trained < total else ""
    sizes = f"{batches[0]:,}" if len(batches) == 1 else f"{batches[0]:,} to {batches[-1]:,}, {len(batches)} sizes"
    slices = f" · expert_tensor {mesh.etp}" if mesh.etp > 1 else ""
    copies = f", one copy for every {mesh.dp // mesh.copies} data ranks" if mesh.copies > 1 else ""
    return [
        f"{spec.name}: {spec.model.name}, {total:,} parameters{with_mtp}{of_adapters}",
        f"mesh: {mesh.world:,} rank{'s' * (mesh.world > 1)} = pipeline {mesh.pp} · data {mesh.dp} · tensor {mesh.tp}"
        f" · context {mesh.cp}, expert {mesh.ep}{slices}, zero {spec.parallel.zero}{copies}",
        f"steps: {lowered.num_steps:,}; sequences per step: {sizes}",
    ]


def _stage_line(plan: Plan, stage: Stage) -> str:
    ranks = plan.ranks_of_stage(stage.index)
    return f"stage {stage.index} on pipeline rank {' and '.join(map(str, ranks))}: {', '.join(layers_of(stage))}"


def layers_of(stage: Stage) -> list[str]:
    """Return the parts of a stage, in order and abbreviated: embed, layers 0–2, head."""
    blocks = dict.fromkeys(step.site.block for step in stage.steps)
    words: list[str] = []
    run: list[int] = []
    for site in (*map(Site, blocks), None):
        if site is not None and site.layer is not None:
            run.append(site.layer)
            continue
        if run:
            words.append(f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]}–{run[-1]}")
            run = []
        if site is not None:
            words.append("mtp" if site.predicts_ahead else site)
    return list(dict.fromkeys(words))


def train_py(spec: Spec) -> str:
    world = spec.parallel.pipeline * spec.parallel.columns
    return f'''"""Trains this build, constructed by dsc.

torchrun --nproc-per-node {world} train.py --out RUN
"""

from pathlib import Path

from runtime.run.train import main

if __name__ == "__main__":
    raise SystemExit(main(build=Path(__file__).resolve().parent))
'''


def manifest(files: Mapping[str, str]) -> str:
    """Return the text of the manifest: sha256 of every file, and the versions of dsc and its dependencies."""
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}
    return pretty(contract.BuildManifest(versions(), sums))


# --- kernels.json: the kernel of each op of each segment and the ops fused into it, and the kernels that quantise
# weights and run the optimizer


def kernels_json(
    spec: Spec,
    plan: Plan,
    segments: Mapping[object, SegmentCode],
    quantised: Mapping[str, WeightQuantisation],
    updates: Sequence[tuple[KernelCall, str | None]],
    graphs: contract.GraphCalls | None,
) -> str:
    """Return the text of kernels.json, with segments in model order. Bytes are those for `balanced_rows` received rows.

    `quantised`: the op and kernel that quantise each weight. `updates`: the call of each row of the optimizer with its
    kernel file, or None. Bytes moved by the optimizer are those of the pipeline rank that updates most.
    """
    used = Counter(use.segment.key for use in plan.uses)
    first = {use.segment.key: use for use in reversed(plan.uses)}
    rows, (optimizer, *rest) = balanced_rows(spec), _steps(spec, plan, updates)
    return pretty(
        contract.KernelList(
            rows=rows,
            unfused=tuple(spec.unfused),
            segments=tuple(
                contract.SegmentKernels(
                    segment=segments[key].name,
                    kind=first[key].segment.kind,
                    site=first[key].site,
                    uses=count,
                    ops=tuple(_op(call, rows) for call in segments[key].calls),
                )
                for key, count in used.items()
            ),
            quantised=_weights(quantised),
            optimizer=optimizer,
            rest=rest[0] if rest else None,
            graphs=graphs,
        )
    )


def _op(call: EmittedCall, rows: int) -> contract.EmittedOp:
    saved = call.saved + call.saved_row * rows if call.parts else None
    return contract.EmittedOp(call.function, call.op, call.kernel or None, call.reason or None, call.parts, saved)


def _weights(quantised: Mapping[str, WeightQuantisation]) -> tuple[contract.QuantisedWeights, ...]:
    """The ops and kernels that quantise weights, with the number of weights of each, in model order."""
    calls = Counter((m.op, m.kernel.name if m.kernel else None, m.reason) for m in quantised.values())
    return tuple(contract.QuantisedWeights(op, kernel, why, count) for (op, kernel, why), count in calls.items())


def _steps(
    spec: Spec, plan: Plan, updates: Sequence[tuple[KernelCall, str | None]]
) -> Iterator[contract.OptimizerStep]:
    """The elements and bytes that each row of the optimizer updates, on the device that updates most."""
    counts = kept_elements(spec, plan)
    for (call, kernel), row, owned in zip(
        updates, spec.train.optimizer.rows, (counts.owned, counts.owned_by_rest), strict=False
    ):
        elements = max(owned.values(), default=0)
        why = None if kernel else reason(call.op, call.arguments)
        yield contract.OptimizerStep(call.op, kernel, why, elements, elements * update_bytes(spec.precision, row))


# --- launches.json: the calls of kernels that ranks make


def launches_json(
    plan: Plan,
    segments: Mapping[object, SegmentCode],
    quantised: Mapping[str, WeightQuantisation],
    updates: Sequence[tuple[KernelCall, str | None]],
) -> str:
    """Return the text of launches.json, with segments in model order. Arguments as in `kernels_json`."""
    callers: dict[contract.KernelUse, dict[str, None]] = {}  # call → the segments that make it
    for use in plan.uses:
        code = segments[use.segment.key]
        quantisations = [quantised[tensor] for _, tensor in use.params if tensor in quantised]
        weights = [use_of(row.kernel.name, row.call) for row in quantisations if row.kernel]
        for call in (*code.uses, *weights):
            callers.setdefault(call, {})[code.name] = None
    calls = [replace(call, segments=tuple(names)) for call, names in callers.items()]
    return pretty(contract.LaunchList((*calls, *(use_of(kernel, call) for call, kernel in updates if kernel))))
