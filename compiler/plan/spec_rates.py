"""Spec and rate table → rates: every row at the peaks of the spec's devices and for the SMs it gives to each side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from compiler.ir.holders import Holders
from compiler.machine.rates.rates import Rates, filled
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
    peak_of,
    shipped_table,
    shipped_tables,
    with_base,
)
from compiler.machine.topology import ExpertTraffic, Fabric, NodeLinks, Nodes
from compiler.plan.spec_files import rate_table_of
from dsl.closed_forms.memory import sent_bytes
from dsl.facts.devices import reached
from dsl.facts.formats import FP8
from dsl.schema import Compressed, Machine, Model, Moe, Spec
from dsl.schema import Device as SpecDevice
from dsl.schema.precision import format_of

RATED = (*FLOPS, *MEMORY, *LINKS, "optimizer", HOST)
# Of a class without any row: shares of a peak that well-written kernels reach, and of a CPU core without a peak. Of
# links what DeepSeek measured, arXiv 2412.19437 and 2505.09343: 160 of 200 GB/s NVLink, 40 of 50 GB/s InfiniBand.
ROOFLINE_FLOPS, ROOFLINE_BYTES, ROOFLINE_LINKS = 0.5, 0.7, 0.8
CORE_FLOPS, CORE_BYTES, CORE_LINK = 5e10, 1e10, 5e8
HOST_LINK = 5.12e10  # 80% of the 64 GB/s a direction of PCIe 5.0 x16, assumed
SHIPPED_FOR = ("h800", "h100", "h200", "gb200", "b200", "a100", "mi300x")  # for devices whose name has theirs in it
OTHERWISE = "h100"
CPU = "cpu"  # one core of a small server
DTYPES = ("bf16", "e4m3", "fp32", "fp64")  # where a class has no rows in a dtype, the first of these it has


@dataclass(frozen=True)
class DeviceSplit:
    """A device of a spec, and how its SMs are split."""

    device: MeasuredDevice
    compute: float = 1.0  # share of the SMs that compute
    communication: int = 0  # SMs that communicate; 0: as many as they take


def rates_of(spec: Spec, table: RateTable | str | None = None, rank: int = 0) -> Rates:
    """The rates of the devices of a pipeline rank under the spec's recipe, SM split and routing.

    `table`: a table, or the name of a shipped one; None: that of the spec's file (compiler/plan/spec_files.py), or the
    one of the device's name, calibrated on a traced layer if there is such a one, or else the nearest.
    """
    table, precision, tensor = table or rate_table_of(spec), spec.precision, spec.parallel.tensor
    parts = [(count, node, _table_of(node.device, table), _place(spec, node)) for count, node in spec.cluster.parts]
    fabric = Fabric(tuple(Nodes(count, node.devices, _links(at, place)) for count, node, at, place in parts))
    _, node, at, place = parts[part_of(spec, rank)]
    wanted = [(kind, dtype) for kind in RATED for dtype in _dtypes(kind, spec)]
    found = {each: points_of(at, place, *each) for each in wanted}
    said: list[str] = []
    if table is None and table_for(node.device) == OTHERWISE and OTHERWISE not in node.device.name.lower():
        said.insert(0, f"device {node.device.name} has no rate table: shares of peaks as on H100")
    if node.device.bf16 is not None and node.device.hbm is None and at.device.hbm is not None:
        said.insert(0, f"device {node.device.name} states no hbm: its memory is as fast as that of {at.device.name}")
    if any(factor.carried for factor in at.factors):
        said.append("products and exchanges take as much longer in training as on H800, where a profile says it")
    if precision.scales_tensors and node.device.bf16 is not None:
        said.append("products in e4m3 with one scale a tensor are as fast as those with a scale a block")
        said.append("the scale of a tensor is that of its largest number, for which it is read once more")
    form = format_of(precision)
    if form not in (None, FP8) and form.element == FP8.element and node.device.bf16 is not None:
        said.append(f"products in {form.name} are as fast as those of other tiles in {form.element}")
    context, columns = spec.parallel.context, spec.parallel.columns
    share = spec.sequence_ranks // context  # tensor ranks that have parts of one sequence
    contexts = range(0, context * tensor, tensor)
    return Rates(
        points={each: points for each, (points, _) in found.items()},
        fabric=fabric,
        experts=experts_of(spec, fabric, rank),
        sharing={
            "tp": Holders((rank,), range(tensor), columns),
            "cp": Holders((rank,), contexts, columns),
            "sq": tuple(rank * columns + first + at for first in contexts for at in range(share)),
        },
        launch_s=_seconds(at)["launch"],
        host_read_s=_seconds(at)["host_read"] if spec.parallel.expert_group > 1 else 0.0,
        linear=precision.linear,
        plain=precision.compute,
        cores=at.device.cores if node.device.bf16 is None else None,
        ranks_of_node=node.devices,
        sms=place.device.sms if at.tiles else None,
        compute=place.compute,
        left=place.compute if place.communication else 1 - _taken(at),
        keeps=place.communication > 0,
        carried={factor.kind: factor.factor for factor in at.factors if factor.carried},
        rope=any(row.kind == "rope" for row in at.rows),
        pair=at.factor_of(PAIR),
        table=at.name,
        calibrated=at != shipped_table(CPU),
        assumptions=tuple(said),
        notes={each: note for each, (_, note) in found.items() if note},
    )


def _taken(table: RateTable) -> float:
    """The share of the SMs that exchanges take where none are kept for them: as many as they had when measured."""
    sms = max((row.sms or 0 for row in table.rows if row.kind in LINKS), default=0)
    return sms / table.device.sms if table.device.sms else 0.0


def core_rates() -> Rates:
    """Rates of one core of a laptop in FP32, with the experts on two ranks: for plans without a spec."""
    table, place = shipped_table(CPU), DeviceSplit(MeasuredDevice(name="core"))
    points = {
        (kind, dtype): points_of(table, place, kind, dtype)[0]
        for kind in RATED
        for dtype in (("fp32",) if kind in FLOPS else ("any",))
    }
    fabric, pair = Fabric((Nodes(1, 2, _links(table, place)),)), range(2)
    experts = ExpertTraffic(pair, fabric.spread(pair))
    return Rates(points, fabric, experts, _seconds(table)["launch"], table=table.name)


def _table_of(device: SpecDevice, table: RateTable | str | None) -> RateTable:
    """The given table, or the best one for a device; with its base."""
    if table is None:
        table = table_for(device)
        table = f"{table}-calibrated" if f"{table}-calibrated" in shipped_tables() else table
    return shipped_table(table) if isinstance(table, str) else with_base(table)


def table_for(device: SpecDevice) -> str:
    """The shipped table of a device: by its name; an accelerator that has none takes H100's rates at its own peaks."""
    if device.bf16 is None:
        return CPU
    return next((name for name in SHIPPED_FOR if name in device.name.lower()), OTHERWISE)


def _dtypes(kind: str, spec: Spec) -> tuple[str, ...]:
    """Dtypes in which a spec runs a class. Gate, head and attention are never in FP8 (arXiv 2412.19437 §3.3), nor are
    products of groups that are not those of experts."""
    precision = spec.precision
    if kind not in FLOPS:
        return ("any",)
    both = tuple(dict.fromkeys((precision.compute, precision.linear)))
    if kind in ("gemm", "wgrad"):
        return both
    if kind in GROUPED:
        return both if precision.high or _has_other_groups(spec.model) else (precision.linear,)
    return (precision.compute,)


def _has_other_groups(model: Model) -> bool:
    """Whether groups of heads are projected behind attention, or a module of the user's own may have such products."""
    return bool(model.customs) or any(isinstance(kind, Compressed) for _, kind in model.attentions)


def points_of(table: RateTable, place: DeviceSplit, kind: str, dtype: str) -> tuple[tuple[Point, ...], str]:
    """Shapes and rates of full tiles of a class in a dtype, and what to say where rows of another class or dtype are
    taken.
    """
    if kind == HOST and place.device.bf16 is None:  # cores copy within their memory
        kind = "copy"
    rows, shaped, note = _rows(table, kind, dtype)
    factor = table.factor_of(kind, dtype)
    if not rows:
        return ((((), _roofline(place, kind, dtype) / factor)),), note
    return tuple(
        (
            row.shape if shaped else (),
            _rate(row, table.device, place, kind, dtype)
            / factor
            / filled(row.kind, row.dtype, row.shape, _sms_of_tiles(table)),
        )
        for row in rows
    ), note


def _sms_of_tiles(table: RateTable) -> int | None:
    """The SMs over which the tiles of a row were spread; None where shapes are not told apart by tiles."""
    return table.device.sms if table.tiles else None


def part_of(spec: Spec, rank: int) -> int:
    """The part of the cluster (Cluster.parts) that a pipeline rank is on. All its data ranks are there, the rules say.

    A plan may have fewer ranks than the cluster, as when one is planned alone; what is beyond is on the last part.
    """
    return spec.cluster.part_of(min(rank * spec.parallel.columns, spec.cluster.world - 1))


def _links(table: RateTable, place: DeviceSplit) -> NodeLinks:
    return NodeLinks({kind: points_of(table, place, kind, "any")[0] for kind in LINKS}, _seconds(table))


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
    """The rows of a class in a dtype, or what comes nearest; those measured beside other work, as kernels run, first.

    A row of any dtype is one of each. Second: whether their shapes are those of the class; other classes have other
    extents.
    """
    for of, as_dtype in _nearest(kind, dtype):
        rows = tuple(r for r in table.rows if r.kind == of and as_dtype in (r.dtype, "any"))
        rows = tuple(r for r in rows if r.when == "paired") or rows
        if not rows:
            continue
        if of == kind and as_dtype in (dtype, "any"):
            return rows, True, ""
        if kind not in FLOPS and as_dtype == "any":  # what moves memory is alike
            return rows, of == kind, ""
        return rows, of == kind, f"table {table.name} has no row of {kind} in {dtype}: taken from {of} in {as_dtype}"
    said = f"table {table.name} has no row of {kind}: {_share(kind):.0%} of a peak"
    if kind == HOST:
        said = f"table {table.name} has no row of {kind}: {HOST_LINK / 1e9:g} GB/s, 80% of PCIe 5.0 x16"
    return (), False, said


def _nearest(kind: str, dtype: str) -> Iterator[tuple[str, str]]:
    classes = (kind, *INSTEAD.get(kind, ()))
    for of in classes:
        yield of, dtype
    for other in ("e4m3", *DTYPES) if dtype == "e2m1" else DTYPES:
        for of in classes:
            yield of, other


def _rate(row: RateRow, measured: MeasuredDevice, place: DeviceSplit, kind: str, dtype: str) -> float:
    """The rate of a row here: it grows with the peak, and with the SMs as far as the row's own number of them."""
    assert row.rate is not None
    here, there = peak_of(place.device, kind, dtype), peak_of(measured, row.kind, row.dtype)
    rate = row.rate * here / there if here and there else row.rate
    if kind in FLOPS:
        return rate * place.compute / (row.sms / measured.sms if row.sms and measured.sms else 1.0)
    if kind in LINKS and row.sms and place.communication:
        return rate * min(1.0, place.communication / row.sms)
    return rate


def _share(kind: str) -> float:
    """The share of a peak that a class is taken to reach where it has no row."""
    return ROOFLINE_FLOPS if kind in FLOPS else ROOFLINE_LINKS if kind in LINKS else ROOFLINE_BYTES


def _roofline(place: DeviceSplit, kind: str, dtype: str) -> float:
    if kind == HOST:
        return HOST_LINK
    peak = peak_of(place.device, kind, dtype)
    if peak is None:
        return CORE_FLOPS if kind in FLOPS else CORE_LINK if kind in LINKS else CORE_BYTES
    return peak * _share(kind) * (place.compute if kind in FLOPS else 1.0)


def _seconds(table: RateTable) -> dict[str, float]:
    """Launches and latencies; a class that has none takes another's, or nothing."""
    seconds = {row.kind: row.seconds for row in table.rows if row.seconds is not None}
    found = {
        kind: next((seconds[of] for of in (kind, *INSTEAD.get(kind, ())) if of in seconds), 0.0) for kind in SECONDS
    }
    return found


def experts_of(spec: Spec, fabric: Fabric, rank: int) -> ExpertTraffic:
    """The expert group of a pipeline rank that lies on the most nodes: groups go in step."""
    columns, group, precision = spec.parallel.columns, spec.parallel.expert_group, spec.precision
    devices = spec.cluster.parts[part_of(spec, rank)][1].devices
    alike = group * devices // gcd(group, devices)  # from here on groups lie as those before
    groups = [Holders((rank,), range(at, at + group), columns) for at in range(0, min(columns, alike), group)]
    spread, members = max(((fabric.spread(each), each) for each in groups), key=lambda one: (one[0].nodes, one[0].most))
    return ExpertTraffic(
        members,
        spread,
        copies_per_row(spec, spread.nodes),
        sent_bytes(precision.dispatch, precision),
        sent_bytes(precision.combine, precision),
    )


def copies_per_row(spec: Spec, nodes: int) -> float:
    """Copies to nodes per routed row, the own one among them: each row is one, or a token goes once to each node that
    it goes to (`route = nodes`).

    Where routing keeps a token to some groups of experts, it goes to the nodes of these groups alone.
    """
    moe = next((layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe)), None)
    if moe is None or nodes == 1:
        return 0.0
    if not spec.by_nodes:
        return 1.0
    return min(moe.top_k, reached(moe.groups, moe.top_groups, nodes)) / (moe.top_k * spec.parallel.expert_tensor)


# --- Rates of pipeline ranks: alike for all of them, or of each, where a cluster has several kinds of devices

OnRanks = Rates | Sequence[Rates]  # of all pipeline ranks, or of each


def parts_of_ranks(spec: Spec) -> tuple[int, ...]:
    """The part of the cluster (Cluster.parts) of each pipeline rank. Its data ranks are all there, the rules say."""
    return tuple(part_of(spec, rank) for rank in range(spec.parallel.pipeline))


def rank_rates(spec: Spec) -> tuple[Rates, ...]:
    """The rates of each pipeline rank; ranks on one kind of device whose expert groups lie alike share one value."""
    first = rates_of(spec)
    kinds = [(part, experts_of(spec, first.fabric, rank).spread) for rank, part in enumerate(parts_of_ranks(spec))]
    others = {kind: rates_of(spec, rank=kinds.index(kind)) for kind in dict.fromkeys(kinds) if kind != kinds[0]}
    return tuple(others.get(kind, first) for kind in kinds)


def on_ranks(rates: OnRanks, num_ranks: int) -> tuple[Rates, ...]:
    """The rates of each pipeline rank."""
    each = (rates,) * num_ranks if isinstance(rates, Rates) else tuple(rates)
    assert len(each) == num_ranks, "rates are of each pipeline rank"
    return each


def kinds_of(rates: Sequence[Rates]) -> tuple[int, ...]:
    """For each rank, the first rank with the same rates."""
    return tuple(rates.index(each) for each in rates)
