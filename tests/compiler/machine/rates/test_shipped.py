"""Every op of every shipped model has a rate, in each precision that a spec may name and on each class of device."""

from __future__ import annotations

from math import isfinite

import pytest

from compiler.ir import Cost
from compiler.machine.rates.table import shipped_table_names
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rates_of
from dsl.load import load
from dsl.messages.diagnostics import SpecError
from dsl.schema import Spec
from dsl.schema.precision import BUILT_IN
from tests.specs.shipped import RUNS, SPECS

MODELS = tuple(dict.fromkeys((file, run) for file, run in RUNS if "/" not in file))
ROWS = 4096


def costs_of(spec: Spec) -> set[tuple[str, str, Cost]]:
    """Kind of segment, op and work of all ops of a plan, each once."""
    plan = make_plan(spec)
    return {
        (use.segment.kind, op, work)
        for use in plan.uses
        for _, cost in plan.cuts[use.site].costs
        for op, work in cost.ops
    }


@pytest.mark.parametrize(("file", "run"), MODELS)
def test_every_op_has_a_rate(file: str, run: str) -> None:
    planned = []
    for precision in BUILT_IN:
        try:
            spec = load(SPECS / file, run, (f"precision={precision}",))
        except SpecError:
            continue  # a rule refuses it, with its reason
        planned.append(precision)
        costs = costs_of(spec)
        for table in shipped_table_names():
            rates = rates_of(spec, table)
            for variant in (rates.beside_exchange, rates.without_exchange):
                assert all(isfinite(variant.kernel_s(kind, op, work, ROWS)) for kind, op, work in costs)
    assert "bf16" in planned
