"""Chains of real stages: four layers of DeepSeek-V3, and small runs with experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from compiler.ir import Cut, Plan
from compiler.lower.chains import Chains, Node
from compiler.plan import make_plan
from compiler.rates import Rates, rates_of
from compiler.schedules.schedule import Schedule
from dsl.schema import Spec
from runtime.actions import Pair, actions_of
from tests.specs.shipped import shipped

Planned = tuple[Plan, Mapping[str, Cut], Rates]


def planned_stages(spec: Spec) -> Planned:
    plan = make_plan(spec)
    return plan, plan.cuts, rates_of(spec)


def pair_kinds(schedule: Schedule) -> frozenset[str]:
    """The kinds of pairs in a schedule, each in alphabetical order."""
    steps = {step for row in schedule.actions for step in row}
    return frozenset("".join(sorted(a.kind for a in actions_of(step))) for step in steps if isinstance(step, Pair))


@cache
def deepseek_v3() -> Planned:
    return planned_stages(shipped("deepseek-v3.dsc", "pretrain"))


@cache
def small() -> Planned:
    return planned_stages(shipped("quickstart.dsc", "quickstart"))


def chain(planned: Planned, stage: int, kind: str) -> list[Node]:
    plan, cuts, rates = planned
    return Chains(plan.stages[stage], cuts, rates, -1, -1).of(kind)
