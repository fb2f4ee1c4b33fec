"""A rate table → the table as the software that a spec plans would measure it (`stack`, dsl/schema/stack.py)."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.machine.rates.table import EXCHANGES, LAUNCH, MEMORY, RateRow, RateTable
from dsl.schema import Spec
from dsl.schema.stack import TRANSPORTS

# RMSNorm of torch over that of cuDNN, time of forward and backward: the mean of three shapes on H200, GB200 and GB300
# (github.com/NVIDIA/cudnn-frontend at 3929da2, benchmark/norms, 2026-02).
EAGER_TIME = 1.98
EAGER_LAUNCHES = 2  # kernels of an op that is not fused: one for each pass
# Gap between two kernels in a graph over that of launches in a row: 0.5 of 0.9 µs (NVIDIA, Getting Started with CUDA
# Graphs, 2019-09, on a V100).
GRAPH_GAP = 0.5 / 0.9


def table_of_stack(table: RateTable, spec: Spec) -> tuple[RateTable, tuple[str, ...]]:
    """The table for the stack of a spec, and sentences on what it assumes."""
    launches = launches_of(spec)
    rows, transports = list[RateRow](), list[str]()
    for kind in dict.fromkeys(row.kind for row in table.rows):
        of_kind = tuple(row for row in table.rows if row.kind == kind)
        if kind in EXCHANGES:
            by = _transport(of_kind, spec.stack.transport)
            transports += [by] if by else []
            of_kind = tuple(row.model_copy(update={"by": None}) if row.by else row for row in of_kind if row.by == by)
        rows += [_of_launches(row, launches) for row in of_kind]
    factors = tuple(factor for factor in table.factors if not (factor.by_host and launches == "graphs"))
    changed = table.model_copy(update={"rows": tuple(rows), "factors": factors})
    return (table if changed == table else changed), tuple(_sentences(spec, table, transports))


def launches_of(spec: Spec) -> str:
    """How the kernels of a spec are launched: eager, compiled or graphs."""
    return spec.stack.launches or ("graphs" if spec.kernels.graphs else "compiled")


def _transport(rows: tuple[RateRow, ...], wanted: str | None) -> str | None:
    """The transport whose rows count: the wanted one if it has some, else the table's own, else the fastest."""
    names = {row.by for row in rows}
    return wanted if wanted in names else next(name for name in (None, *TRANSPORTS) if name in names)


def _of_launches(row: RateRow, launches: str) -> RateRow:
    if launches == "eager" and row.kind in MEMORY and row.rate is not None:
        return row.model_copy(update={"rate": row.rate / EAGER_TIME})
    if row.kind == LAUNCH and row.seconds is not None and launches != "compiled":
        return row.model_copy(update={"seconds": row.seconds * (EAGER_LAUNCHES if launches == "eager" else GRAPH_GAP)})
    return row


def _sentences(spec: Spec, table: RateTable, transports: list[str]) -> Iterator[str]:
    """What the plan assumes of the software."""
    yield {
        "eager": "ops run one by one, as in torch without a compiler",
        "compiled": "kernels are fused, and launched by a host that keeps ahead of the device",
        "graphs": "kernels are fused, and replayed as CUDA graphs",
    }[launches_of(spec)]
    if transports and spec.parallel.expert_group > 1:
        used = " and ".join(dict.fromkeys(transports))
        wanted = spec.stack.transport
        missing = f", as table {table.name} has no row by {wanted}" if wanted not in (None, *transports) else ""
        yield f"exchanges between expert ranks are as fast as by {used}{missing}"
