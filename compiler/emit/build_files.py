"""The files of a build that are not code: plan.json, plan.txt, programs, manifest, and the launcher."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from compiler.decide import Lowered
from compiler.dtypes import TORCH_DTYPE
from compiler.ir import Bucket, Buffer, Communication, Message, Plan, Program, Replica, Stage, Use
from compiler.lower.estimate import Overlap
from compiler.plan.stages import block_of
from dsl.schema import Moe, Precision, Spec
from runtime.build_files import versions

ROLES = ("parameter", "compute", "linear", "accumulate", "gradients", "master", "moments", "dispatch", "combine")
_quoted = json.JSONEncoder().encode  # of a text as json.dumps has it, which looks at its options first
_WIDTH = 110  # of a line of JSON


def plan_json(spec: Spec, lowered: Lowered, overlaps: Mapping[str, Overlap]) -> str:
    """All the runtime needs to know: mesh, replica table, recipe, and which program serves which step."""
    plan, mesh = lowered.plan, lowered.plan.mesh
    table = {r.name: r for r in plan.replicas}
    data: dict[str, Any] = {
        "run": spec.name,
        "mesh": {axis: getattr(mesh, axis) for axis in ("pp", "dp", "ep", "tp", "cp")},
        "placement": str(plan.stage_placement),
        "zero": spec.parallel.zero,
        "precision": _dtypes(spec.precision),
        "model": spec.model.model_dump(mode="json"),
        "train": spec.train.model_dump(mode="json"),
        "data": spec.data.model_dump(mode="json"),
        "steps": lowered.num_steps,
        "batches": lowered.batches,
        "mtp_weight": [p.model_dump(mode="json") for p in spec.model.mtp.weight] if spec.model.mtp else None,
        "message": _message(plan),
        "edges": edges(lowered.programs.values()),
        "records": [metric for stage in plan.stages for metric, _ in stage.records],
        "moe_layers": [_moe_layer(spec, plan, stage, step) for stage in plan.stages for step in _routers(stage)],
        "stages": [[s.site for s in stage.steps if isinstance(s, Use)] for stage in plan.stages],
        "overlap": _overlap_json(overlaps),
        "memory": [memory.total for memory in lowered.memories],
        "buckets": [_bucket(b, table) for b in plan.buckets],
        "biases": [_bias(r) for r in plan.replicas if r.role == "bias"],
    }
    return pretty(data)


def _dtypes(precision: Precision) -> dict[str, str]:
    return {role: TORCH_DTYPE[getattr(precision, role)] for role in ROLES}


def _message(plan: Plan) -> dict[str, Any] | None:
    output: Buffer | None = next((s.output for s in plan.stages if s.output), None)
    return {"shape": output.shape, "dtype": output.dtype} if output else None


def edges(programs: Iterable[Program]) -> list[tuple[int, int]]:
    """The ordered pairs of pipeline ranks that talk in any of the programs: each is a channel."""
    found = {
        (rank, i.peer)
        for program in programs
        for rank, bodies in enumerate(program.bodies)
        for body in bodies
        for _, i in body.messages
        if i.kind == "send" and i.peer != rank
    }
    return sorted(found)


def _overlap_json(overlaps: Mapping[str, Overlap]) -> dict[str, Any]:
    """Predicted times of every body once, and of every program which share of its exchanges' time is hidden."""
    bodies = {name: times for overlap in overlaps.values() for name, times in overlap.bodies}
    return {
        "bodies": {
            name: {
                "ms": t.end / 1e6,
                "compute_ms": t.compute / 1e6,
                "communication_ms": t.communication / 1e6,
                "hidden": round(t.hidden, 4),
            }
            for name, t in sorted(bodies.items())
        },
        "programs": {name: {"hidden": round(o.total.hidden, 4)} for name, o in overlaps.items()},
    }


def _overlap_line(overlap: Overlap) -> str:
    """The share hidden of a whole step, then of each kind of body that exchanges anything; "" where none does."""
    kinds = ", ".join(f"{kind} {t.hidden:.0%}" for kind, t in overlap.kinds if t.communication)
    return f"  {overlap.total.hidden:.1%} of exchanges hidden under compute, predicted: {kinds}" if kinds else ""


def _routers(stage: Stage) -> list[Use]:
    return [s for s in stage.steps if isinstance(s, Use) and s.segment.kind == "router"]


def _moe_layer(spec: Spec, plan: Plan, stage: Stage, router: Use) -> dict[str, Any]:
    site = router.site.partition(".")[0]
    index = int(site[1:])
    ffn = spec.model.ffn(index) if site.startswith("L") else spec.model.ffn(spec.model.num_layers - 1)
    assert isinstance(ffn, Moe)
    rate = ffn.balance.bias_rate
    balanced = any(metric == f"sequence_loss {site}" for metric, _ in stage.records)
    return {
        "site": site,
        "name": block_of(router),
        "experts": ffn.experts,
        "sequence_loss": ffn.balance.sequence_loss if balanced else 0.0,
        "bias": dict(router.params).get("bias"),
        "bias_rate": [p.model_dump(mode="json") for p in rate] if rate is not None else None,
        **({"slots": dict(plan.slots)[tensor]} if (tensor := dict(router.params).get("slots")) else {}),
    }


def _bucket(bucket: Bucket, table: Mapping[str, Replica]) -> dict[str, Any]:
    rows = [
        {"name": r.name, "tensor": r.tensor, "shape": r.shape, "init": r.init, "decay": r.decay}
        for r in (table[name] for name in bucket.replicas)
    ]
    return {"name": bucket.name, "holders": tuple(bucket.holders), "parameters": rows}


def _bias(replica: Replica) -> dict[str, Any]:
    return {"name": replica.name, "shape": replica.shape, "holders": tuple(replica.holders)}


def _messages(ends: Sequence[tuple[int, Message]]) -> str:
    """Items of a JSON list; names of actions have no letter that JSON escapes."""
    return ", ".join([f'[{rank}, "{action}.{micro_batch}"]' for rank, (action, micro_batch) in ends]) if ends else ""


def program_json(program: Program) -> str:
    """One line an invocation: [body, micro-batches, posts, releases]."""
    ranks = [
        ",\n".join(
            f'   ["{body}", {[*micro_batches]}, [{_messages(posts)}], [{_messages(releases)}]]'
            for body, micro_batches, posts, releases in invocations
        )
        for invocations in program.invocations
    ]
    rows = ",\n".join(f"  [\n{text}\n  ]" for text in ranks)
    head = f'"schedule": {json.dumps(program.name)}, "micro_batches": {program.num_micro_batches}'
    return f'{{\n {head},\n "placement": {json.dumps(str(program.stage_placement))},\n "ranks": [\n{rows}\n ]\n}}\n'


def plan_text(spec: Spec, lowered: Lowered, overlaps: Mapping[str, Overlap]) -> str:
    """The plan as one would paste it into an issue."""
    plan = lowered.plan
    lines = [*plan_head(spec, lowered), ""]
    sizes = ", ".join(f"{n} from {s}" for s, n in lowered.batches)
    lines += [f"sequences a step: {sizes}", ""] if len(lowered.batches) > 1 else []
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


def plan_head(spec: Spec, lowered: Lowered) -> list[str]:
    """Model, mesh and steps, a line each."""
    mesh, batches = lowered.plan.mesh, [batch for _, batch in lowered.batches]
    trained = [r for r in lowered.plan.replicas if r.role == "parameter"]
    in_mtp = sum(r.num_elements for r in trained if r.name.startswith("mtp."))
    with_mtp = f", {in_mtp:,} of them of MTP alone" if in_mtp else ""
    sizes = f"{batches[0]:,}" if len(batches) == 1 else f"{batches[0]:,} to {batches[-1]:,}, {len(batches)} sizes"
    return [
        f"{spec.name}: {spec.model.name}, {sum(r.num_elements for r in trained):,} parameters{with_mtp}",
        f"mesh: {mesh.world:,} rank{'s' * (mesh.world > 1)} = pipeline {mesh.pp} · data {mesh.dp} · tensor {mesh.tp}"
        f" · context {mesh.cp}, expert {mesh.ep}, zero {spec.parallel.zero}",
        f"steps: {lowered.num_steps:,}; sequences a step: {sizes}",
    ]


def _stage_line(plan: Plan, stage: Stage) -> str:
    ranks = plan.ranks_of_stage(stage.index)
    return f"stage {stage.index} on pipeline rank {' and '.join(map(str, ranks))}: {', '.join(layers_of(stage))}"


def layers_of(stage: Stage) -> list[str]:
    """What a stage holds, in order and in few words: embed, layers 0–2, head."""
    places = list(dict.fromkeys(_place(s) for s in stage.steps))
    words: list[str] = []
    run: list[int] = []
    for place in [*places, ""]:
        if place.startswith("L") and place[1:].isdigit():
            run.append(int(place[1:]))
            continue
        if run:
            words.append(f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]}–{run[-1]}")
            run = []
        if place:
            words.append(place)
    return words


def _place(step: Use | Communication) -> str:
    head = step.site.partition(".")[0]
    return "mtp" if head.startswith("M") and head[1:].isdigit() else head


def train_py(spec: Spec) -> str:
    world = spec.parallel.pipeline * spec.parallel.data
    return f'''"""Trains this build, constructed by dsc.

torchrun --nproc-per-node {world} train.py --out RUN
"""

from pathlib import Path

from runtime.train import main

if __name__ == "__main__":
    raise SystemExit(main(build=Path(__file__).resolve().parent))
'''


def manifest(files: Mapping[str, str]) -> str:
    """sha256 of every file, and the public versions of what emitted them."""
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}
    return pretty({"versions": versions(), "files": sums})


def pretty(data: Any) -> str:
    """JSON for reading: a value that fits a line is on one line, others a line an item; keys in the order given."""
    return _value(data, 0) + "\n"


def _value(data: Any, depth: int) -> str:
    # A value that fits a line has items that do, so their texts are made first, and each of them once.
    if isinstance(data, dict):
        begin, end = "{", "}"
        items = [f"{_text(key)}: {_value(each, depth + 1)}" for key, each in data.items()]
    elif isinstance(data, (list, tuple)):
        begin, end = "[", "]"
        items = [str(each) if type(each) is int else _value(each, depth + 1) for each in data]
    else:
        return _quoted(data) if isinstance(data, str) else _text(data)
    if 3 * len(items) + depth <= _WIDTH:  # an item takes three characters at least
        line = ", ".join(items)
        if len(line) + 2 + depth <= _WIDTH and "\n" not in line:
            return begin + line + end
    pad = "\n" + " " * (depth + 1)
    return begin + pad + f",{pad}".join(items) + "\n" + " " * depth + end


@lru_cache(maxsize=None, typed=True)
def _text(scalar: str | float | None) -> str:
    return json.dumps(scalar)
