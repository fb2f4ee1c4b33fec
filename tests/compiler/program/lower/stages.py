"""Chains of real stages: four layers of DeepSeek-V3, and small runs with experts."""

from __future__ import annotations

from functools import cache

from compiler.plan.actions.chains import ChainNode
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rates_of
from compiler.program.lower import Lowering
from compiler.schedule.schedule import Schedule
from dsl.schema import Spec
from runtime.contract.actions import Pair, actions_of
from tests.specs.shipped import shipped


def lowering_of(spec: Spec) -> Lowering:
    """The stages of a spec's plan, all on the device of its first pipeline rank."""
    return Lowering(make_plan(spec), rates_of(spec))


def pair_kinds(schedule: Schedule) -> frozenset[str]:
    """The kinds of pairs in a schedule, the two of a pair in alphabetical order."""
    steps = {step for row in schedule.actions for step in row}
    return frozenset("".join(sorted(a.kind for a in actions_of(step))) for step in steps if isinstance(step, Pair))


@cache
def deepseek_v3() -> Lowering:
    return lowering_of(shipped("deepseek-v3.dsc", "pretrain"))


@cache
def small() -> Lowering:
    return lowering_of(shipped("quickstart.dsc", "quickstart"))


def chain(lowering: Lowering, stage: int, kind: str) -> list[ChainNode]:
    return lowering.chains(stage, 0).chain(kind)
