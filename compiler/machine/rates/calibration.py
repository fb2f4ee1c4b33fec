"""The ops of a spec as tasks for `runtime.observe.calibrate`, and its measurements as a rate table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compiler.ir import Cost, Plan, Use
from compiler.machine.rates.rates import Rates
from compiler.machine.rates.table import FLOPS, MeasuredDevice, RateRow, RateTable, shape_at
from compiler.model.ops import GRADIENTS, RULES, Tensor, kernel_class
from compiler.model.ops.rule import statistics_dtype
from compiler.model.segments.interpret import interpret
from compiler.model.segments.node_costs import costs
from compiler.model.segments.split import phases

# Larger calls are left out: on a CPU they would take seconds, or more memory than a rank has.
MOST_FLOPS, MOST_BYTES = 2 * 10**11, 2 * 10**9
CALLED = {*RULES, *GRADIENTS}  # without the casts inside ops
LEAST_SHARE = 0.1  # the least share of a measured time that counts as work, not as launch


@dataclass(frozen=True)
class CalibrationTask:
    """An op of the model to measure, and the row of the rate table that it belongs to."""

    op: str
    kind: str  # class
    dtype: str
    shape: tuple[int, ...]
    work: float  # FLOPs or bytes
    args: tuple[Any, ...]  # as runtime.observe.calibrate takes them
    count: int = 0  # how often a micro-batch runs it


def tasks_of(plan: Plan, rates: Rates, rows: int) -> tuple[tuple[CalibrationTask, ...], int]:
    """Every op of a plan once, with `rows` received rows, and the number of ops that were too large to measure."""
    uses = [step for stage in plan.stages for step in stage.steps if isinstance(step, Use)]
    segments = {use.segment.key: use.segment for use in uses}
    num_uses = Counter(use.segment.key for use in uses)
    counts: Counter[CalibrationTask] = Counter()
    large = 0
    for key, segment in segments.items():
        joint = interpret(replace(segment, fused=()))  # on a CPU a fused op calls its parts
        nodes = [(phase, joint.nodes[index]) for index, phase in phases(joint).items()]
        for phase, cost in costs(joint):
            for (op, work), node in zip(
                cost.ops, [node for node_phase, node in nodes if node_phase == phase], strict=True
            ):
                assert op == node.op, (op, node.op)
                if op not in CALLED:
                    continue
                if _flops(work, rows) > MOST_FLOPS or work.bytes + work.bytes_row * rows > MOST_BYTES:
                    large += 1
                    continue
                kind = kernel_class(op)
                dtype = rates.dtype_of(segment.kind, op, work) if kind in FLOPS else "any"
                amount = _flops(work, rows) if kind in FLOPS else work.bytes + work.bytes_row * rows
                tensors = {name: _set_rows(tensor, rows) for name, tensor in joint.tensors.items()}
                args = _arguments(op, node.args, node.outputs, tensors)
                counts[CalibrationTask(op, kind, dtype, shape_at(work.shape, rows), float(amount), args)] += num_uses[
                    key
                ]
    return tuple(replace(task, count=count) for task, count in counts.items()), large


def _flops(work: Cost, rows: int) -> int:
    return work.flops + work.flops_row * rows


def _set_rows(tensor: Tensor, rows: int) -> Tensor:
    return Tensor(tuple(rows if extent == "R" else extent for extent in tensor.shape), tensor.dtype)


def _arguments(op: str, args: Sequence[Any], outputs: Sequence[str], tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """The arguments of a call of the op. A weight gradient also takes the buffer it adds to, but no constants."""
    names = _names(op)[: len(args)]  # the last arguments may be left out
    bounds = _bounds(names, args, tensors)
    values = [
        _tensor(tensors[arg], name, bounds) if isinstance(arg, str) else arg
        for name, arg in zip(names, args, strict=True)
        if isinstance(arg, str) or not op.endswith("_wgrad")
    ]
    gradients = [tensors[output] for output in outputs if op.endswith("_wgrad")]
    return (
        *(_tensor(replace(gradient, dtype=statistics_dtype(gradient.dtype)), "", bounds) for gradient in gradients),
        *values,
    )


def _names(op: str) -> tuple[str, ...]:
    if op in RULES:
        return RULES[op].args
    return tuple(read if isinstance(read, str) else f"{read.argument}.{read.dim}" for read in GRADIENTS[op].reads)


def _bounds(names: Sequence[str], args: Sequence[Any], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Upper bounds of the indices that an op reads, by the argument that holds them."""
    by_name = dict(zip(names, args, strict=True))

    def extent(name: str, dim: int) -> int:
        return int(tensors[by_name[name]].shape[dim])

    bounds = {}
    if "tokens" in by_name:
        bounds["tokens"] = int(by_name["w.0"]) if "w.0" in by_name else extent("w", 0)
    if "targets" in by_name:
        bounds["targets"] = extent("logits", 1)
    if "expert" in by_name:
        bounds["expert"] = int(by_name["num_experts"]) if "num_experts" in by_name else extent("logits", 1)
    if "offsets" in by_name:
        bounds["offsets"] = extent("x" if "x" in by_name else "d_y", 0)
    return bounds


_HOLDS = {"tokens": "below", "targets": "below", "expert": "choices", "offsets": "ends"}


def _tensor(tensor: Tensor, name: str, bounds: Mapping[str, int]) -> tuple[tuple[str, Any], ...]:
    """Shape, dtype and contents of an operand, as hashable pairs."""
    pairs: tuple[tuple[str, Any], ...] = (("shape", tensor.shape), ("dtype", tensor.dtype))
    if name in _HOLDS:
        pairs += (("holds", _HOLDS[name]), ("bound", bounds[name]))
    return (*pairs, ("holds", "order")) if name == "order" else pairs


def job(
    tasks: Sequence[CalibrationTask], device: str, processes: int, transfers: int, budget_s: float
) -> dict[str, Any]:
    """The JSON document that runtime.observe.calibrate takes."""
    return {
        "device": device,
        "processes": processes,
        "transfers": transfers,
        "budget_s": budget_s,
        "tasks": [
            {"op": task.op, "args": [dict(arg) if isinstance(arg, tuple) else arg for arg in task.args]}
            for task in tasks
        ],
    }


# ---------------------------------------------------------------- measurements


def table_of(
    measured: Mapping[str, Any], tasks: Sequence[CalibrationTask], device: MeasuredDevice, source: str, date: str
) -> RateTable:
    """The rate table of a measurement. Ops of the same class, dtype and shape share a row with their joint rate."""
    condition = "paired" if (device.cores or 1) > 1 else "lone"
    common = {"when": condition, "source": source, "date": date}
    launch_s = measured["launch_s"]
    work: defaultdict[tuple[str, str, tuple[int, ...]], float] = defaultdict(float)
    seconds: defaultdict[tuple[str, str, tuple[int, ...]], float] = defaultdict(float)
    for task, took_s in zip(tasks, measured["ops_s"], strict=True):
        key = (task.kind, task.dtype, task.shape)
        work[key] += task.count * task.work
        seconds[key] += task.count * max(took_s - launch_s, LEAST_SHARE * took_s)
    rows = [
        {"class": kind, "dtype": dtype, "shape": shape, "rate": _figures(amount / seconds[kind, dtype, shape])}
        for (kind, dtype, shape), amount in sorted(work.items())
        if amount
    ]
    rows += [
        {"class": "copy", "rate": _figures(measured["copy_bytes"])},
        {"class": "optimizer", "rate": _figures(measured["optimizer_bytes"])},
        {"class": "launch", "seconds": _figures(launch_s)},
    ]
    for name, kinds, latency in _LINKS:
        rows += _link_rows(measured.get(name, ()), kinds, latency)
    checked = tuple(RateRow.model_validate({**row, **common}) for row in rows)
    return RateTable(name="measured", device=device, rows=checked)


_LINKS = (
    ("all_to_all", ("dispatch_node", "combine_node"), "exchange_node"),
    ("message", ("message_node",), "latency_node"),
    ("all_reduce", ("all_reduce_node",), ""),
)


def _link_rows(points: Sequence[Sequence[float]], kinds: Sequence[str], latency: str) -> list[dict[str, Any]]:
    """Rows of a link: the smallest transfer's time is the latency, and larger transfers give rates beyond it."""
    if not points:
        return []
    (_, least_s), *larger = points
    rows: list[dict[str, Any]] = [{"class": latency, "seconds": _figures(least_s)}] if latency else []
    for kind in kinds:
        for size, took_s in larger:
            # `size` holds for an all-reduce too: each of two ranks sends half of the buffer twice.
            rate = size / max(took_s - least_s, LEAST_SHARE * took_s)
            rows.append({"class": kind, "shape": (2, int(size)), "rate": _figures(rate)})
    return rows


def _figures(value: float) -> float:
    return float(f"{value:.4g}")
