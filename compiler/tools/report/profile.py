"""The profile of a run: what its ranks measured (runtime/run/profile.py), with the work of each op from the op rules.

    {"version": 1, "steps": 5, "device": "cpu", "gemm_flops_s": null, "ranks": [{"rank": 0, …, "rows": [{…}]}]}

docs/profiling.md says what each field is.
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
MOST_BYTES = 1 << 30  # of what a rank left
_TORCH = {"cat": "cat2"}  # ops that segments call by torch's names

Document = dict[str, Any]


def write_run_profile(run: Path) -> Document:
    """Join what the ranks of a run left in `run`/profile, and leave it in `run`/profile.json. OSError if it is not
    there."""
    spec = load_with_files(run / "spec.resolved")
    plan = make_plan(spec)
    paths = [run / "profile" / f"rank_{rank}.json" for rank in range(plan.mesh.world)]
    ranks = [json.loads(read_bytes(path, MOST_BYTES)) for path in paths]
    work = _OpWork(plan)
    for rank in ranks:
        work.give(rank)
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
    """The best of a core's or device's products by the spec's own rate table, FLOP/s."""
    table, dtype = rate_table_of(spec), spec.precision.compute
    rates = [row.rate for row in table.rows if row.kind == "gemm" and row.dtype == dtype] if table else []
    return max((rate for rate in rates if rate), default=None)


class _OpWork:
    """FLOPs and bytes of the ops of every emitted segment."""

    def __init__(self, plan: Plan) -> None:
        segments = {module_name(use.segment): use.segment for use in plan.uses}
        self._ops: defaultdict[tuple[str, str, str], list[Cost]] = defaultdict(list)
        for name, segment in segments.items():
            for function, node, works in works_of(interpret(segment)):
                self._ops[name, function, node.op] += [cost for _, cost in works]
        self._sites = {
            name: sorted({use.site.block for use in plan.uses if module_name(use.segment) == name}) for name in segments
        }

    def give(self, rank: Document) -> None:
        """Add `flops` and `bytes`, of all its calls, to the rows of a rank that are ops of a segment."""
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
        """Rows that a call of a segment received, in the mean."""
        found = [received[site] for site in self._sites[segment] if site in received]
        calls = sum(calls for calls, _ in found)
        return sum(rows for _, rows in found) / calls if calls else 0.0


def _base(name: str) -> str:
    """The op of the rules that an emitted call is of."""
    return _TORCH.get(name, name.removesuffix("_"))
