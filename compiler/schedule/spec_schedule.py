"""Schedule files: read in any of their forms, and checked for legality and against the spec."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from compiler.files.text import TextFileError, read_text
from compiler.schedule.costs import MAX_CELLS, MAX_RANKS, Costs
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.simulate import simulate
from compiler.schedule.torch_csv import from_torch_csv
from dsl.closed_forms import ramp
from dsl.facts.layout import expand_layout
from dsl.facts.schedules import PLAIN
from dsl.schema import Spec
from runtime.contract.actions import actions_of

MAX_BYTES = 32 << 20


def read_schedule(path: Path) -> Schedule:
    """Read a schedule in the notation, as JSON, or as torch's CSV. Raises ScheduleError if it cannot run."""
    try:
        text = read_text(path, MAX_BYTES).replace("\r\n", "\n")
    except TextFileError as error:
        raise ScheduleError(str(error)) from None
    try:
        schedule = _parse_schedule(text, path.stem)
        _check(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule


def schedule_for(spec: Spec, path: Path) -> Schedule:
    """The schedule in the file that a spec names.

    Raises ScheduleError if it cannot be read, cannot run, or has other sizes than the run.
    """
    schedule = read_schedule(path)
    if schedule.num_ranks != spec.parallel.pipeline:
        raise ScheduleError(f"{path} is for {schedule.num_ranks} ranks, but pipeline = {spec.parallel.pipeline}")
    largest, data = ramp.micro_batches(spec)[-1], spec.parallel.data
    if schedule.num_micro_batches != largest:
        sequences = largest * data * spec.train.micro_batch
        raise ScheduleError(
            f"{path} is for {schedule.num_micro_batches} micro-batches, but the largest step, of {sequences:,} "
            f"sequences, has {largest} on each data rank"
        )
    stages = schedule.num_stages
    if stages > spec.model.num_layers + 2:
        raise ScheduleError(f"{path} has {stages} stages, too many for {spec.model.num_layers} layers")
    layout = expand_layout(spec.parallel.layout or "|" * (stages - 1)).count("|") + 1
    if layout != stages:
        raise ScheduleError(f"{path} has {stages} stages, but the layout has {layout}")
    return schedule


def _parse_schedule(text: str, name: str) -> Schedule:
    first = text.lstrip()[:1]
    if not first:
        raise ScheduleError(f"it is empty: `dsc schedule --name {PLAIN} --ranks 2 --micro-batches 4` prints one")
    if first == "#":
        return Schedule.from_text(text.rstrip() + "\n")
    if first == "{":
        return Schedule.from_json(text)
    if first not in ',("' and not first.isdigit():  # a cell of torch's CSV begins with one of these
        raise ScheduleError(
            f"line 1: {text.lstrip().splitlines()[0][:80]!r} does not begin a schedule: it is neither "
            "# <name> ranks=<P> micro_batches=<N> placement=<placement>, nor JSON, nor torch's CSV"
        )
    return from_torch_csv(text, re.sub("[^A-Za-z0-9._+-]", "", name)[:64] or "csv")


def _check(schedule: Schedule) -> None:
    """Raise ScheduleError unless a schedule is legal, within bounds, free of deadlock, and has backwards."""
    if schedule.num_ranks > MAX_RANKS:
        raise ScheduleError(f"{schedule.num_ranks} ranks are too many: at most {MAX_RANKS}")
    try:
        stages = schedule.num_stages
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    if stages * schedule.num_micro_batches > MAX_CELLS:
        limit = f"at most {MAX_CELLS // stages} micro-batches for this many stages"
        raise ScheduleError(f"{stages} stages x {schedule.num_micro_batches} micro-batches is too large: {limit}")
    schedule.check()
    simulate(schedule, Costs(O=Fraction(0), R=Fraction(0)))
    kinds = {action.kind for steps in schedule.actions for step in steps for action in actions_of(step)}
    if kinds == {"F"}:
        raise ScheduleError("it has no backward: in training, every F needs a B, or an I and a W")
