"""What `dsc schedule` asks schedules for: their sizes and costs, and what a rank may hold, in activations or bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from compiler.cli.commands.schedule_answer import shown
from compiler.cli.commands.schedule_tried import ANYTHING, Tried
from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.memory import gigabytes
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import held_at_most

Cap = Fraction | tuple[Fraction, ...]  # of every rank, or one for each


class WrongError(Exception):
    """The command line asks for what is not there; the message says what to change."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Sizes:
    """What schedules are asked for. `costs` are those of one of `num_stages` stages, or if None of any action.

    For `auto` they are those of 1/P of the model, and so is the cap; `held_by` is the stage placement that the ranks
    have, if they have one already.
    """

    num_ranks: int
    num_micro_batches: int
    chunks: int
    cap: Cap | None
    costs: Costs | None
    num_stages: int | None = None
    held_by: StagePlacement | None = None
    tried: Tried = ANYTHING
    memory: Fraction | None = None  # the bytes from which the caps come

    def cap_of(self, parts: Fraction | int) -> Cap | None:
        """The cap in activations of which so many are one that it counts."""
        if isinstance(self.cap, tuple):
            return tuple(each * parts for each in self.cap)
        return None if self.cap is None else self.cap * parts

    def within(self, memory: Fraction | None) -> Sizes:
        """The sizes with the caps that so many bytes leave; `WrongError` where they leave no room."""
        if memory is None:
            return self
        if self.cap is not None:
            raise WrongError("a cap in activations and --memory both say what a rank may hold: leave one of them out")
        costs = self.costs or Costs()
        try:
            costs.check(self.num_ranks, len(costs.stages))
            return replace(self, cap=costs.bytes.caps(memory, self.num_ranks), memory=memory)
        except ValueError as error:
            raise WrongError(f"--memory {gigabytes(memory)}: {error}") from None

    def check_cap(self, schedule: Schedule, parts: int) -> None:
        """`WrongError` where a rank holds more than the cap of activations that have so many parts."""
        costs = self.costs or Costs()
        of_ranks = tuple(each / parts for each in held_at_most(schedule, costs.keeps))
        if self.cap is None:
            return
        caps = self.cap if isinstance(self.cap, tuple) else (self.cap,) * len(of_ranks)
        if all(held <= most for held, most in zip(of_ranks, caps, strict=True)):
            return
        if self.memory is not None:
            in_bytes = costs.bytes.held(of_ranks)
            rank = in_bytes.index(max(in_bytes))
            needed = gigabytes(in_bytes[rank])
            raise WrongError(f"{schedule.name} holds {needed} on rank {rank}: use --memory {needed} or more, or auto")
        sizes_said = f"{schedule.num_ranks} ranks with {schedule.num_micro_batches} micro-batches"
        if isinstance(self.cap, tuple):
            held, needed = ", ".join(map(shown, of_ranks)), ",".join(f"{math.ceil(each)}" for each in of_ranks)
        else:
            held, needed = shown(max(of_ranks)), f"{math.ceil(max(of_ranks))}"
        edit = f"use --cap {needed} or more, or auto"
        raise WrongError(f"{schedule.name} on {sizes_said} holds {held} activations: {edit}")
