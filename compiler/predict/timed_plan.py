"""A plan with its timed step, before memory and cost are computed."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir import Plan
from compiler.machine.rates import Rates
from compiler.predict.prediction import StepPrediction, Tail
from compiler.predict.times import StepTimes
from compiler.program.lower import Lowering
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline
from dsl.schema import Spec


@dataclass(frozen=True)
class TimedPlan:
    """The step of a plan's largest batch, timed on the devices of a spec."""

    spec: Spec
    lowering: Lowering
    schedule: Schedule
    timeline: Timeline  # in milliseconds
    shared: float  # factor by which everything takes longer because ranks share cores
    slowest: float  # factor by which everything takes longer because it waits for the slowest device
    step: StepPrediction
    times: StepTimes
    tails: tuple[Tail, ...]  # of each pipeline rank

    @property
    def slowdown(self) -> float:
        """The factor of both."""
        return self.shared * self.slowest

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.lowering.plan

    @property
    def rates(self) -> tuple[Rates, ...]:
        """The rates of each pipeline rank."""
        return self.lowering.rates
