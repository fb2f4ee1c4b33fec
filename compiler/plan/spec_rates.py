"""Spec and rate table → rates: every row, scaled to the peaks of the spec's devices and to its split of SMs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from compiler.ir.holders import Holders
from compiler.machine.rates.rates import Rates, tile_efficiency
from compiler.machine.rates.table import (
    FLOPS,
    GROUPED,
    HOST,
    INSTEAD,
    LINKS,
    MEMORY,
    PAIR,
    SECONDS,
    MeasuredDevice,
    Point,
    RateRow,
    RateTable,
    merge_base,
    peak_of,
    shipped_table,
    shipped_table_names,
)
from compiler.machine.topology import ExpertTraffic, Fabric, NodeLinks, NodeRun
from compiler.model.ops import kernel_class
from compiler.model.ops.implementations import OPS_OF, PLANNED_AS, stated_choices, torch_ops
from compiler.plan.spec_files import rate_table_of
from compiler.plan.stack_rates import table_of_stack
from dsl.closed_forms.loads import load_by_chance
from dsl.closed_forms.memory import sent_bytes
from dsl.closed_forms.stragglers import scale_of
from dsl.facts.devices import most_nodes_of_token
from dsl.facts.formats import FP8
from dsl.schema import Compressed, Machine, Model, Moe, Spec
from dsl.schema import Device as SpecDevice
from dsl.schema.kernels import LIBRARY_NAMES
from dsl.schema.precision import format_of

RATED = (*FLOPS, *MEMORY, *LINKS, "optimizer", HOST)
# For a class without rows: the share of the peak that well-written kernels reach. The share of links is what DeepSeek
# measured, arXiv 2412.19437 and 2505.09343: 160 of 200 GB/s NVLink, 40 of 50 GB/s InfiniBand.
ROOFLINE_FLOPS, ROOFLINE_BYTES, ROOFLINE_LINKS = 0.5, 0.7, 0.8
# FP32 without tensor cores over BF16, H100 data sheet: 67 of 989 TFLOPS; and the share of it that large products reach.
FP32_OVER_BF16, ROOFLINE_PRODUCTS = 0.068, 0.8
CORE_FLOPS, CORE_BYTES, CORE_LINK = 5e10, 1e10, 5e8  # likewise, rates of a CPU core, which states no peak
HOST_LINK = 5.12e10  # assumed: 80% of the 64 GB/s per direction of PCIe 5.0 x16
# Tables for devices whose name contains that of the table; the first that matches.
SHIPPED_FOR = ("h800", "h100", "h200", "gb300", "gb200", "b300", "b200", "a100", "mi300x")
OTHERWISE = "h100"
CPU = "cpu"  # one core of a small server
DTYPES = ("bf16", "e4m3", "fp32", "fp64")  # if a class has no rows in a dtype, the first of these in which it has some


@dataclass(frozen=True)
class DeviceSplit:
    """A device of a spec, and how its SMs are split."""

    device: MeasuredDevice
    compute: float = 1.0  # share of the SMs that compute
    communication: int = 0  # SMs that communicate; 0: none reserved, exchanges take what they need


def rates_of(spec: Spec, table: RateTable | str | None = None, rank: int = 0) -> Rates:
    """The rates of the devices of a pipeline rank under the spec's precision, SM split and routing.

    `table`: a table, or the name of a shipped one. None stands for the one that the spec names
    (compiler/plan/spec_files.py), or else for the shipped table of the device's name, if possible the calibrated one,
    or the nearest.
    """
    table, precision, tensor = table or rate_table_of(spec), spec.precision, spec.parallel.tensor
    stacked = [table_of_stack(_table_of(node.device, table), spec) for _, node in spec.cluster.parts]
    parts = [
        (count, node, part_table, _place(spec, node))
        for (count, node), (part_table, _) in zip(spec.cluster.parts, stacked, strict=True)
    ]
    scale = scale_of(spec.cluster)
    congestion = scale.congestion if scale else 0.0
    fabric = Fabric(
        tuple(
            NodeRun(count, node.devices, _links(part_table, place, congestion))
            for count, node, part_table, place in parts
        )
    )
    _, node, part_table, place = parts[part_of(spec, rank)]
    wanted = [(kind, dtype) for kind in RATED for dtype in _dtypes(kind, spec)]
    # With one scale for each tensor, a weight gradient is the same product as the others.
    product_of = {"wgrad": "gemm", "grouped_wgrad": "grouped_gemm"} if precision.scales_tensors else {}
    rated_points = {
        (kind, dtype): points_of(part_table, place, product_of.get(kind, kind), dtype) for kind, dtype in wanted
    }
    notes: list[str] = []
    is_unknown = table is None and table_for(node.device) == OTHERWISE and OTHERWISE not in node.device.name.lower()
    if is_unknown:
        notes.insert(0, f"device {node.device.name} has no rate table: it reaches the same shares of its peaks as H100")
    if node.device.bf16 is not None and node.device.hbm is None and part_table.device.hbm is not None:
        notes.insert(
            0, f"device {node.device.name} states no hbm: its memory is as fast as that of {part_table.device.name}"
        )
    if any(factor.carried for factor in part_table.factors):
        notes.append("products and exchanges slow down in training as much as on H800, where they were profiled")
    if precision.scales_tensors and node.device.bf16 is not None:
        notes.append("products in e4m3 with one scale per tensor are as fast as those with one scale per block")
        notes.append("the scale of a tensor is that of its largest number, for which it is read once more")
    form = format_of(precision)
    if form not in (None, FP8) and form.element == FP8.element and node.device.bf16 is not None:
        notes.append(f"products in {form.name} are as fast as those with other tiles in {form.element}")
    notes += stacked[part_of(spec, rank)][1] if node.device.bf16 is not None else ()
    by_library, unmeasured = _library_points(spec, part_table, place)
    notes += unmeasured
    context, columns = spec.parallel.context, spec.parallel.columns
    share = spec.sequence_ranks // context  # tensor ranks that have parts of one sequence
    contexts = range(0, context * tensor, tensor)
    route = "network" if spec.routes_by_nodes else "node"
    return Rates(
        points={key: points for key, (points, _) in rated_points.items()},
        fabric=fabric,
        experts=experts_of(spec, fabric, rank),
        sharing={
            "tp": Holders((rank,), range(tensor), columns),
            "cp": Holders((rank,), contexts, columns),
            "sq": tuple(rank * columns + first + offset for first in contexts for offset in range(share)),
        },
        tensor_share=1 / tensor if spec.stack.tensor == "chunked" else 1.0,
        load=load_by_chance(spec, 0.5) if spec.stack.balance == "forced" else 1.0,
        launch_s=_seconds(part_table)["launch"],
        host_read_s=_seconds(part_table)[f"host_read_{route}"] if spec.parallel.expert_group > 1 else 0.0,
        linear=precision.linear,
        plain=precision.compute,
        cores=part_table.device.cores if node.device.bf16 is None else None,
        ranks_of_node=node.devices,
        sms=place.device.sms if part_table.tiles else None,
        product_share=place.compute,
        beside_share=place.compute if place.communication else 1 - _exchange_share(_table_of(node.device, table)),
        keeps_share=place.communication > 0,
        library_points=by_library,
        carried={factor.kind: factor.factor for factor in part_table.factors if factor.carried},
        is_traced=any(not factor.carried for factor in part_table.factors),
        borrowed=_borrowed(part_table, [(product_of.get(kind, kind), dtype) for kind, dtype in wanted], is_unknown),
        runs_kernels=node.device.bf16 is not None,
        torch_ops=torch_ops(spec),
        fp32_flops=FP32_OVER_BF16 * ROOFLINE_PRODUCTS * (node.device.bf16 or 1.0),
        rope=any(row.kind == "rope" for row in part_table.rows),
        pair=part_table.factor_of(PAIR),
        table=part_table.name,
        calibrated=part_table != shipped_table(CPU),
        assumptions=tuple(notes),
        notes={key: note for key, (_, note) in rated_points.items() if note},
    )


def _borrowed(table: RateTable, wanted: Iterable[tuple[str, str]], is_unknown: bool) -> frozenset[str]:
    """The classes that have only rows of another device in some dtype; all if the spec's device `is_unknown`."""
    rows = [(kind, _rows(table, kind, dtype)[0]) for kind, dtype in wanted]
    return frozenset(kind for kind, found in rows if is_unknown or (found and all(row.scaled_from for row in found)))


def _exchange_share(table: RateTable) -> float:
    """The share of the SMs that exchanges take if none are reserved: as many as they had when they were measured."""
    sms = max((row.sms or 0 for row in table.rows if row.kind in LINKS), default=0)
    return sms / table.device.sms if table.device.sms else 0.0


def core_rates() -> Rates:
    """Rates of one CPU core in FP32, with the experts on two ranks, for plans without a spec."""
    table, place = shipped_table(CPU), DeviceSplit(MeasuredDevice(name="core"))
    points = {
        (kind, dtype): points_of(table, place, kind, dtype)[0]
        for kind in RATED
        for dtype in (("fp32",) if kind in FLOPS else ("any",))
    }
    fabric, pair = Fabric((NodeRun(1, 2, _links(table, place)),)), range(2)
    experts = ExpertTraffic(pair, fabric.spread(pair))
    return Rates(points, fabric, experts, _seconds(table)["launch"], table=table.name)


def _table_of(device: SpecDevice, table: RateTable | str | None) -> RateTable:
    """The given table, or the best one for a device, merged with its base."""
    if table is None:
        table = table_for(device)
        table = f"{table}-calibrated" if f"{table}-calibrated" in shipped_table_names() else table
    return shipped_table(table) if isinstance(table, str) else merge_base(table)


def table_for(device: SpecDevice) -> str:
    """The shipped table of a device, by its name. An accelerator without one takes H100's rates at its own peaks."""
    if device.bf16 is None:
        return CPU
    return next((name for name in SHIPPED_FOR if name in device.name.lower()), OTHERWISE)


def _dtypes(kind: str, spec: Spec) -> tuple[str, ...]:
    """The dtypes in which a spec runs a class.

    Gate, head and attention are never in FP8 (arXiv 2412.19437 §3.3), nor are grouped products other than those of
    experts.
    """
    precision = spec.precision
    if kind not in FLOPS:
        return ("any",)
    dtypes = tuple(dict.fromkeys((precision.compute, precision.linear)))
    if kind in ("gemm", "wgrad"):
        return dtypes
    if kind in GROUPED:
        return dtypes if precision.high or _has_other_groups(spec.model) else (precision.linear,)
    return (precision.compute,)


def _has_other_groups(model: Model) -> bool:
    """Whether attention projects its output by groups of heads, or a custom module may have grouped products."""
    return bool(model.customs) or any(isinstance(kind, Compressed) for _, kind in model.attentions)


def points_of(table: RateTable, place: DeviceSplit, kind: str, dtype: str) -> tuple[tuple[Point, ...], str]:
    """Shapes and full-tile rates of a class in a dtype, and a note if rows of another class or dtype stand in."""
    if kind == HOST and place.device.bf16 is None:  # CPU cores copy within their memory
        kind = "copy"
    rows, shaped, note = _rows(table, kind, dtype)
    if not rows:
        return ((((), _roofline(place, kind, dtype) / table.factor_of(kind, dtype))),), note
    points = _points(table, place, kind, dtype, rows)
    return (points if shaped else tuple(((), rate) for _, rate in points)), note


def _points(table: RateTable, place: DeviceSplit, kind: str, dtype: str, rows: Sequence[RateRow]) -> tuple[Point, ...]:
    """Shapes and full-tile rates of rows that stand for a class in a dtype."""
    factor, sms = table.factor_of(kind, dtype), _sms_of_tiles(table)
    return tuple(
        (
            row.shape,
            _rate(row, table.device, place, kind, dtype)
            / factor
            / tile_efficiency(row.kind, row.dtype, row.shape, sms),
        )
        for row in rows
    )


def _library_points(
    spec: Spec, table: RateTable, place: DeviceSplit
) -> tuple[dict[tuple[str, str], tuple[Point, ...]], list[str]]:
    """Rates of the libraries that a run names, by op and dtype, and a note for each key without rows of its library."""
    points: dict[tuple[str, str], tuple[Point, ...]] = {}
    notes = []
    for key, library in stated_choices(spec.kernels).items():
        if library not in LIBRARY_NAMES or place.device.bf16 is None:
            continue
        before = len(points)
        for op in (PLANNED_AS.get(op, op) for op in OPS_OF[key]):
            kind = kernel_class(op)
            for dtype in _dtypes(kind, spec):
                if rows := [row for row in table.rows if (row.by, row.kind, row.dtype) == (library, kind, dtype)]:
                    points[op, dtype] = _points(table, place, kind, dtype, rows)
        if len(points) == before:
            notes.append(
                f"{key.replace('_', ' ')} by {library} takes as long as by the kernels of the build: "
                f"table {table.name} has no row by {library}"
            )
    return points, notes


def _sms_of_tiles(table: RateTable) -> int | None:
    """The SMs over which the tiles of a row were spread; None if the table does not model tiles."""
    return table.device.sms if table.tiles else None


def part_of(spec: Spec, rank: int) -> int:
    """The part of the cluster (`Cluster.parts`) of a pipeline rank. The rules ensure that all its data ranks are on it.

    Ranks beyond the cluster's devices count as being on its last part.
    """
    return spec.cluster.part_of(min(rank * spec.parallel.columns, spec.cluster.world - 1))


def _links(table: RateTable, place: DeviceSplit, congestion: float = 0.0) -> NodeLinks:
    points = {kind: points_of(table, place, kind, "any")[0] for kind in LINKS}
    return NodeLinks(points, _seconds(table), congestion)


def _place(spec: Spec, node: Machine) -> DeviceSplit:
    device, sms = node.device, spec.sm.communication
    peaks = MeasuredDevice(
        name=device.name,
        sms=device.sms,
        bf16=device.bf16,
        fp8=device.fp8,
        fp4=device.fp4,
        hbm=device.hbm,
        nvlink=node.nvlink,
        nic=node.nic,
    )
    return DeviceSplit(peaks, 1 - sms / device.sms if device.sms else 1.0, sms)


def _rows(table: RateTable, kind: str, dtype: str) -> tuple[tuple[RateRow, ...], bool, str]:
    """(rows of a class in a dtype or the nearest stand-in, whether their shapes apply, a note on the stand-in).

    Rows that were measured beside other work, as kernels run, are preferred. A row of dtype "any" counts for each
    dtype. Shapes do not apply if the rows are of another class, whose shapes have other extents.
    """
    for row_kind, as_dtype in _nearest(kind, dtype):
        rows = tuple(r for r in table.rows if r.kind == row_kind and as_dtype in (r.dtype, "any") and r.by is None)
        rows = tuple(r for r in rows if r.when == "paired") or rows
        if not rows:
            continue
        is_own = row_kind == kind
        if is_own and as_dtype in (dtype, "any"):
            return rows, True, ""
        if kind not in FLOPS and as_dtype == "any":  # memory-bound kernels are alike
            return rows, is_own, ""
        note = f"table {table.name} has no row of {kind} in {dtype}: rows of {row_kind} in {as_dtype} stand in"
        return rows, is_own, note
    note = f"table {table.name} has no row of {kind}: {_share(kind):.0%} of the peak is assumed"
    if kind == HOST:
        note = f"table {table.name} has no row of {kind}: {HOST_LINK / 1e9:g} GB/s is assumed, 80% of PCIe 5.0 x16"
    return (), False, note


def _nearest(kind: str, dtype: str) -> Iterator[tuple[str, str]]:
    classes = (kind, *INSTEAD.get(kind, ()))
    for name in classes:
        yield name, dtype
    for stand_in in ("e4m3", *DTYPES) if dtype == "e2m1" else DTYPES:
        for name in classes:
            yield name, stand_in


def _rate(row: RateRow, measured: MeasuredDevice, place: DeviceSplit, kind: str, dtype: str) -> float:
    """The rate of a row on a device of the spec: scaled by the peaks, and by the SMs relative to the row's."""
    assert row.rate is not None
    peak, row_peak = peak_of(place.device, kind, dtype), peak_of(measured, row.kind, row.dtype)
    rate = row.rate * peak / row_peak if peak and row_peak else row.rate
    if kind in FLOPS:
        return rate * place.compute / (row.sms / measured.sms if row.sms and measured.sms else 1.0)
    if kind in LINKS and row.sms and place.communication:
        return rate * min(1.0, place.communication / row.sms)
    return rate


def _share(kind: str) -> float:
    """The share of the peak that a class without rows is assumed to reach."""
    return ROOFLINE_FLOPS if kind in FLOPS else ROOFLINE_LINKS if kind in LINKS else ROOFLINE_BYTES


def _roofline(place: DeviceSplit, kind: str, dtype: str) -> float:
    if kind == HOST:
        return HOST_LINK
    peak = peak_of(place.device, kind, dtype)
    if peak is None:
        return CORE_FLOPS if kind in FLOPS else CORE_LINK if kind in LINKS else CORE_BYTES
    return peak * _share(kind) * (place.compute if kind in FLOPS else 1.0)


def _seconds(table: RateTable) -> dict[str, float]:
    """Seconds of launches and latencies. A class without a row takes that of its stand-in, or 0."""
    seconds = {row.kind: row.seconds for row in table.rows if row.seconds is not None}
    times = {kind: next((seconds[k] for k in (kind, *INSTEAD.get(kind, ())) if k in seconds), 0.0) for kind in SECONDS}
    return times


def experts_of(spec: Spec, fabric: Fabric, rank: int) -> ExpertTraffic:
    """The expert group of a pipeline rank that spans the most nodes, as groups wait for the slowest."""
    columns, group, precision = spec.parallel.columns, spec.parallel.expert_group, spec.precision
    devices = spec.cluster.parts[part_of(spec, rank)][1].devices
    alike = group * devices // gcd(group, devices)  # from here on the spreads of groups repeat
    groups = [Holders((rank,), range(first, first + group), columns) for first in range(0, min(columns, alike), group)]
    spread, members = max(
        ((fabric.spread(holders), holders) for holders in groups),
        key=lambda entry: (entry[0].nodes, entry[0].max_members),
    )
    return ExpertTraffic(
        members,
        spread,
        copies_per_row(spec, spread.nodes),
        sent_bytes(precision.dispatch, precision),
        sent_bytes(precision.combine, precision),
    )


def copies_per_row(spec: Spec, nodes: int) -> float:
    """Copies that are sent to nodes per routed row, including the sender's node.

    Each row is one copy, or with `route = nodes` a token is sent once to each of its nodes. If routing limits a token
    to some groups of experts, these are only the nodes of its groups.
    """
    moe = next((layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe)), None)
    if moe is None or nodes == 1:
        return 0.0
    if not spec.routes_by_nodes or spec.stack.transport == "nccl":
        return 1.0
    return min(moe.top_k, most_nodes_of_token(moe.groups, moe.top_groups, nodes)) / (
        moe.top_k * spec.parallel.expert_tensor
    )


# --- Rates of pipeline ranks: one value for all, or one for each if a cluster has several kinds of devices

OnRanks = Rates | Sequence[Rates]  # for all pipeline ranks, or for each


def parts_of_ranks(spec: Spec) -> tuple[int, ...]:
    """The part of the cluster (`Cluster.parts`) of each pipeline rank."""
    return tuple(part_of(spec, rank) for rank in range(spec.parallel.pipeline))


def rank_rates(spec: Spec) -> tuple[Rates, ...]:
    """The rates of each pipeline rank. Ranks with equal devices and equal spreads of expert groups share one value."""
    first = rates_of(spec)
    kinds = [(part, experts_of(spec, first.fabric, rank).spread) for rank, part in enumerate(parts_of_ranks(spec))]
    other_rates = {kind: rates_of(spec, rank=kinds.index(kind)) for kind in dict.fromkeys(kinds) if kind != kinds[0]}
    return tuple(other_rates.get(kind, first) for kind in kinds)


def rates_by_rank(rates: OnRanks, num_ranks: int) -> tuple[Rates, ...]:
    """The rates of each pipeline rank."""
    per_rank = (rates,) * num_ranks if isinstance(rates, Rates) else tuple(rates)
    assert len(per_rank) == num_ranks, "there are rates for each pipeline rank"
    return per_rank


def kinds_of(rates: Sequence[Rates]) -> tuple[int, ...]:
    """For each rank, the first rank with the same rates."""
    return tuple(rates.index(entry) for entry in rates)
