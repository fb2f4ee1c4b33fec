"""Everything that is decided before torch is imported: a plan, its schedules and programs, and their proofs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.ir import Plan, Program
from compiler.program.lower import Lowering
from compiler.program.proof import ProofFacts
from compiler.schedule.schedule import Schedule
from dsl.closed_forms.memory import DeviceBytes
from runtime.contract import Opening
from runtime.contract.names import ProgramName


@dataclass(frozen=True)
class LoweredPlan:
    """A plan with its schedules, its programs, and the proofs of the programs."""

    lowering: Lowering
    batches: tuple[tuple[int, int], ...]  # (first step, sequences of a step), ascending
    num_steps: int
    schedules: Mapping[ProgramName, Schedule]  # by program: train_8, evaluate_2
    programs: Mapping[ProgramName, Program]
    certificates: Mapping[ProgramName, ProofFacts]
    openings: tuple[Opening, ...]  # the channels of all ranks, in the order in which they are opened
    memories: tuple[DeviceBytes, ...]  # of a device of each pipeline rank, at the highest peak of any program
    micro_batch_orders: Mapping[ProgramName, tuple[int, ...]]  # of programs whose micro-batches are ordered by cost

    @property
    def plan(self) -> Plan:
        """The plan that the programs run."""
        return self.lowering.plan

    @property
    def main_schedule(self) -> Schedule:
        """The schedule of the largest batch."""
        return max((s for n, s in self.schedules.items() if n.trains), key=lambda s: s.num_micro_batches)
