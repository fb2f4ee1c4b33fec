"""Plans whose replica table has other slices than the segments use are rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from compiler.ir import Plan, Replica
from compiler.plan.plan import make_plan
from compiler.program.proof import ProofError
from compiler.program.proof.replicas import check_holders
from runtime.contract.slices import Slice
from tests.runtime.step.specs import spec

Rows = list[Replica]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan with experts in two slices each, and two tensor ranks."""
    return make_plan(spec(1, 2, 2, 2, of="qwen", schedule="1f1b", tensor=2, expert_tensor=2))


def rows_of(plan: Plan, name: str) -> Rows:
    return [row for row in plan.replicas if row.name == name]


def with_rows(plan: Plan, rows: Rows) -> Plan:
    """The plan with other rows of the parameters that `rows` are of."""
    names = {row.name for row in rows}
    return replace(plan, replicas=(*(row for row in plan.replicas if row.name not in names), *rows))


def swapped(rows: Rows) -> Rows:
    """The two slices exchanged."""
    return [replace(row, slice=partner.slice) for row, partner in zip(rows, rows[::-1], strict=True)]


def crossed(rows: Rows) -> Rows:
    """The gate of one slice with the up of the other: all of the tensor, in slices of the right shape."""
    (gate, up), (other_gate, other_up) = (row.slice.ranges for row in rows if row.slice)
    return [replace(rows[0], slice=Slice(0, (gate, other_up))), replace(rows[1], slice=Slice(0, (other_gate, up)))]


def elsewhere(rows: Rows) -> Rows:
    """One slice on the ranks of another expert."""
    columns = range(rows[1].holders.columns.start ^ 2, rows[1].holders.width, rows[1].holders.columns.step)
    return [rows[0], replace(rows[1], holders=replace(rows[1].holders, columns=columns))]


def lost(rows: Rows) -> Rows:
    return rows[:1]


def whole(rows: Rows) -> Rows:
    return [replace(rows[0], slice=None)]


def beside(rows: Rows) -> Rows:
    """An unsliced parameter of an expert on the ranks of its slice and of a slice of the next expert."""
    columns = [column + 1 for column in rows[0].holders.columns]
    return [replace(rows[0], holders=replace(rows[0].holders, columns=range(columns[0], columns[-1] + 1)))]


def once(rows: Rows) -> Rows:
    return [replace(rows[0], holders=rows[0].holders.alike(1))]


UP, QKV = "layers.1.ffn.experts.5.up", "layers.1.attention.qkv"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((UP, fault) for fault in (swapped, crossed, elsewhere, lost, whole)),
        *((QKV, fault) for fault in (swapped, lost, whole)),
    ],
)
def test_other_slices_are_rejected(plan: Plan, name: str, fault: Callable[[Rows], Rows]) -> None:
    check_holders(plan)
    with pytest.raises(ProofError, match=f"(hold|reduce) {name}"):
        check_holders(with_rows(plan, fault(rows_of(plan, name))))


@pytest.mark.parametrize("fault", [beside, once])
def test_unsliced_parameters_of_an_expert_are_with_its_slices(fault: Callable[[Rows], Rows]) -> None:
    biased = make_plan(spec(1, 2, 4, 2, of="everything", schedule="1f1b", expert_tensor=2))
    check_holders(biased)
    name = "layers.1.ffn.experts.1.down_bias"
    assert [*rows_of(biased, name)[0].holders] == [0, 1]
    with pytest.raises(ProofError, match=f"reduce {name}"):
        check_holders(with_rows(biased, fault(rows_of(biased, name))))
