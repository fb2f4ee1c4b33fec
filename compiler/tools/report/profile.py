"""The profile of a run: times that its ranks measured (runtime/run/profile.py), and the FLOPs and bytes of each op.

    {"version": 1, "steps": 5, "device": "cpu", "gemm_flops_s": null, "ranks": [{"rank": 0, …, "rows": [{…}]}]}

docs/profiling.md describes the fields.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiler.ir import Cost, Plan
from compiler.model.segments.interpret import interpret
from compiler.model.segments.node_costs import works_of
from compiler.model.segments.printer import module_name
from compiler.plan.plan import make_plan
from compiler.plan.read_files import load_with_files
from compiler.plan.spec_files import rate_table_of
from dsl.schema import Spec
from runtime.system.regular_files import read_bytes, write

VERSION = 1
MAX_BYTES = 1 << 30  # largest profile of a rank that is read
_OPS = {"cat": "cat2"}  # torch function that segments call → op

Document = dict[str, Any]


def write_run_profile(run: Path) -> Document:
    """Join the profiles of the ranks in `run`/profile, and write and return `run`/profile.json. Raises OSError if a
    profile is missing."""
    spec = load_with_files(run / "spec.resolved")
    plan = make_plan(spec)
    paths = [run / "profile" / f"rank_{rank}.json" for rank in range(plan.mesh.world)]
    ranks = [json.loads(read_bytes(path, MAX_BYTES)) for path in paths]
    work = _OpWork(plan)
    for rank in ranks:
        work.add_to(rank)
    document = {
        "version": VERSION,
        "steps": ranks[0]["steps"],
        "device": ranks[0].pop("device"),
        "gemm_flops_s": _gemm_rate(spec),
        "ranks": ranks,
    }
    write(run / "profile.json", json.dumps(document, indent=1) + "\n")
    return document


def _gemm_rate(spec: Spec) -> float | None:
    """Return the highest rate of a matrix product, in FLOP/s, in the rate table that the spec names."""
    table, dtype = rate_table_of(spec), spec.precision.compute
    rates = [row.rate for row in table.rows if row.kind == "gemm" and row.dtype == dtype] if table else []
    return max((rate for rate in rates if rate), default=None)


class _OpWork:
    """The FLOPs and bytes of the ops of each emitted segment, computed by the rules of ops."""

    def __init__(self, plan: Plan) -> None:
        segments = {module_name(use.segment): use.segment for use in plan.uses}
        self._ops: defaultdict[tuple[str, str, str], list[Cost]] = defaultdict(list)
        for name, segment in segments.items():
            for function, node, works in works_of(interpret(segment)):
                self._ops[name, function, node.op] += [cost for _, cost in works]
        self._sites = {
            name: sorted({use.site.block for use in plan.uses if module_name(use.segment) == name}) for name in segments
        }

    def add_to(self, rank: Document) -> None:
        """Add `flops` and `bytes`, summed over all calls, to the rows of a rank that are ops of a segment."""
        called: Counter[tuple[str, str, str]] = Counter()
        for row in rank["rows"]:
            if row["kind"] == "python":
                called[row["place"], row["segment"], row["function"]] += row["calls"]
        for row in rank["rows"]:
            costs = self._ops.get((row["segment"], row["function"], _base(row["name"])))
            if row["kind"] == "op" and costs:
                times = called[row["place"], row["segment"], row["function"]]
                rows = self._rows(row["segment"], rank["received"])
                row["flops"] = round(times * sum(cost.flops + cost.flops_row * rows for cost in costs))
                row["bytes"] = round(times * sum(cost.bytes + cost.bytes_row * rows for cost in costs))

    def _rows(self, segment: str, received: Mapping[str, tuple[int, int]]) -> float:
        """Return the mean number of rows that a call of a segment received."""
        counts = [received[site] for site in self._sites[segment] if site in received]
        calls = sum(calls for calls, _ in counts)
        return sum(rows for _, rows in counts) / calls if calls else 0.0


def _base(name: str) -> str:
    """Return the name, in the rules of ops, of the op that an emitted call runs."""
    return _OPS.get(name, name.removesuffix("_"))
