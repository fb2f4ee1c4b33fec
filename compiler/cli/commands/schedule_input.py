"""Turns the command line of `dsc schedule` into schedules with costs."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from compiler.cli.commands.common import progress
from compiler.cli.commands.output_files import is_file
from compiler.cli.commands.schedule_answer import Answer, ScheduleAnswer, number_text
from compiler.cli.commands.schedule_tried import ANYTHING, MAX_CHUNKS, TriedSettings, settings_of
from compiler.files.text import TextFileError, read_text
from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V
from compiler.schedule import AUTO, DEFAULT_CHUNKS, SCHEDULES
from compiler.schedule.costs import (
    ALIKE,
    MAX_CELLS,
    MAX_RANKS,
    MOST_BYTES,
    UNIT_OF_SHIPPED,
    Costs,
    costs_of_json,
    parse_costs,
    parse_time,
    shipped_cost_names,
    shipped_costs,
    with_every_pair_gaining,
)
from compiler.schedule.measure import measure
from compiler.schedule.memory import gigabytes
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.simulate import held_at_most
from compiler.schedule.torch_csv import NO_COPIES
from dsl.facts.schedules import CHUNKED, PLAIN, join_names

# --- Sizes, costs and caps of the requested schedules

Cap = Fraction | tuple[Fraction, ...]  # for every rank, or one per rank


class InputError(Exception):
    """An error in the command line. The message says what to change."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Sizes:
    """The sizes and limits of requested schedules. `costs` are per action of a model cut into `num_stages` stages; if
    that is None, per action of any schedule.

    For `auto`, costs and cap are for 1/P of the model. `held_by`: the stage placement, if it is fixed already.
    """

    num_ranks: int
    num_micro_batches: int
    chunks: int
    cap: Cap | None
    costs: Costs | None
    num_stages: int | None = None
    held_by: StagePlacement | None = None
    tried: TriedSettings = ANYTHING
    memory: Fraction | None = None  # bytes from which the caps were computed

    def cap_of(self, parts: Fraction | int) -> Cap | None:
        """The cap in activations of a schedule in which `parts` of them count as one."""
        if isinstance(self.cap, tuple):
            return tuple(cap * parts for cap in self.cap)
        return None if self.cap is None else self.cap * parts

    def with_caps(self, memory: Fraction | None) -> Sizes:
        """The sizes with the caps that follow from `memory` bytes. Raises InputError if they leave no room."""
        if memory is None:
            return self
        if self.cap is not None:
            raise InputError("a cap in activations and --memory both limit a rank: leave one of them out")
        costs = self.costs or Costs()
        try:
            costs.check(self.num_ranks, len(costs.stages))
            return replace(self, cap=costs.bytes.caps(memory, self.num_ranks), memory=memory)
        except ValueError as error:
            raise InputError(f"--memory {gigabytes(memory)}: {error}") from None

    def check_cap(self, schedule: Schedule, parts: int) -> None:
        """Raise InputError if a rank holds more than the cap, where `parts` activations count as one."""
        if self.cap is None:
            return
        costs = self.costs or Costs()
        peaks = tuple(peak / parts for peak in held_at_most(schedule, costs.keeps))
        caps = self.cap if isinstance(self.cap, tuple) else (self.cap,) * len(peaks)
        if all(peak <= cap for peak, cap in zip(peaks, caps, strict=True)):
            return
        if self.memory is not None:
            in_bytes = costs.bytes.held_bytes(peaks)
            rank = in_bytes.index(max(in_bytes))
            needed = gigabytes(in_bytes[rank])
            raise InputError(f"{schedule.name} holds {needed} on rank {rank}: use --memory {needed} or more, or auto")
        sizes = f"{schedule.num_ranks} ranks with {schedule.num_micro_batches} micro-batches"
        if isinstance(self.cap, tuple):
            counts, needed = ", ".join(map(number_text, peaks)), ",".join(f"{math.ceil(peak)}" for peak in peaks)
        else:
            counts, needed = number_text(max(peaks)), f"{math.ceil(max(peaks))}"
        edit = f"use --cap {needed} or more, or auto"
        raise InputError(f"{schedule.name} on {sizes} holds {counts} activations: {edit}")


# --- schedule input

ONE_ONLY = ("torch-csv", "megatron-layout")  # formats of a single schedule
SIZES = "--ranks 8 --micro-batches 20"
MAX_MICRO_BATCHES = 65_536
PARTS_OF_AUTO = 4  # `auto` times all other schedules, and counts as one with this many stages per rank
# Of all schedules that are compared: their steps are not made, and few are timed. If micro-batches differ, a schedule
# repeats no period, so all its steps are timed.
MAX_COMPARED_CELLS, MAX_UNEQUAL_CELLS = 8 * MAX_CELLS, MAX_CELLS // 4
MAX_CAP = 100_000_000


def answer_to(args: argparse.Namespace) -> Answer | None:
    """Return the requested schedules, or None after printing the mistakes of the spec.

    Raises InputError for mistakes of the command line.
    """
    if args.compare is not None and args.format in ONE_ONLY:
        raise InputError(f"--format {args.format} is for a single schedule: leave --compare out")  # before a search
    if args.name is not None and args.format == "megatron-layout":
        raise InputError("a layout needs the layers of a model: name a SPEC, and leave --name out")
    sizes_given = {"--ranks": args.ranks, "--micro-batches": args.micro_batches}
    missing = [option for option, value in sizes_given.items() if value is None]
    if len(missing) == len(sizes_given):
        if args.spec is None:
            _check_here(args)
        return _answer_of_spec(args) if args.spec is None or _is_spec(args.spec) else _answer_of_file(args)
    if args.spec is not None:
        options = " and ".join(option for option in sizes_given if option not in missing)
        raise InputError(
            f"{args.spec} has its own ranks and micro-batches: leave {options} out",
            "-s parallel.pipeline=8" if _is_spec(args.spec) else f"another size: dsc schedule --name {PLAIN} {SIZES}",
        )
    if missing:
        raise InputError(f"{missing[0]} is missing: give --ranks P and --micro-batches N, or a SPEC")
    if args.set:
        raise InputError(
            "-s overrides keys of a spec, and no spec is named", f"dsc schedule spec.dsc -s schedule.name={PLAIN}"
        )
    names = _names(args)
    chunks = DEFAULT_CHUNKS if args.chunks is None else args.chunks
    try:
        tried = settings_of(args, names)
    except ValueError as error:
        raise InputError(str(error)) from None
    sizes = Sizes(args.ranks, args.micro_batches, chunks, args.cap, costs_of(args), tried=tried)
    _check_sizes(args, sizes)
    sizes = sizes.with_caps(args.memory)
    if args.format == "torch-csv" and names == (AUTO,):
        sizes = _restrict_to_torch(sizes)
    if args.compare is not None:
        return _compare(names, sizes, _unit(args))
    return Answer(
        (_named_schedule(names[0], sizes),), sizes.costs, cap=sizes.cap, memory=sizes.memory, unit=_unit(args)
    )


def _restrict_to_torch(sizes: Sizes) -> Sizes:
    """Restrict `auto` to what torch supports: a V placement (no copies), only F&B pairs, and no copies to the host."""
    costs = sizes.costs or Costs()
    pairs = tuple(pair for pair in costs.pairs if pair[0] == "BF")
    return replace(sizes, costs=replace(costs.without_offload(), pairs=pairs), num_stages=sizes.num_ranks, held_by=V)


def _check_here(args: argparse.Namespace) -> None:
    """Raise InputError if schedules are named without sizes, and there is no spec here to take the sizes from."""
    from dsl.messages.diagnostics import SpecError
    from dsl.resolve.chosen import find

    if args.name is None and args.compare is None:
        return
    try:
        find()
    except SpecError as error:
        if any(item.code != "E0404" for item in error.diagnostics):
            return  # reported when the spec is loaded
        message = error.diagnostics[0].message
        raise InputError(f"--ranks and --micro-batches are missing, and {message}", SIZES) from None


def _answer_of_spec(args: argparse.Namespace) -> Answer | None:
    """The schedule of a spec's run, or several schedules of its size. Default costs are those of its plan."""
    from compiler.cli.commands.common import load_spec

    chosen = load_spec(args.spec, args.set)
    if chosen is None:
        return None
    from compiler.cli.commands.schedule_spec import run_of

    if args.chunks is not None:
        raise InputError("--chunks needs --ranks; in a spec, change `schedule.chunks`", "-s schedule.chunks=4")
    if args.copies is not None or args.placement is not None:
        raise InputError(
            "--copies and --placement need --ranks; in a spec, change `schedule.copies` and `schedule.placement`",
            "-s schedule.placement=v",
        )
    names = () if args.name is None and args.compare is None else _names(args)
    run = run_of(chosen.spec)
    if args.format == "torch-csv" and args.name is None and run.plan.stage_placement == BIDIRECTIONAL:
        raise InputError(NO_COPIES, "-s schedule.name=dualpipev")  # before a search
    given_costs = costs_of(args)
    if args.order and (given_costs is None or not given_costs.micro_batches):
        raise InputError(*run.why_no_order)
    # Given costs are per action of the schedule at hand, as without a spec; the plan's costs are for its own stages.
    plan_costs = given_costs is None
    costs, stages, unit = (run.costs(), run.num_stages, run.unit) if plan_costs else (given_costs, None, _unit(args))
    capped = args.cap is not None or args.memory is not None
    cap = args.cap if capped else run.cap
    sizes = Sizes(run.num_ranks, run.num_micro_batches, run.chunks, cap, costs, stages, tried=run.tried_settings)
    _check_sizes(args, sizes)
    sizes = sizes.with_caps(args.memory)
    if args.compare is not None:
        return _compare(names, sizes, unit)
    searched = run.name == AUTO and (given_costs is not None or capped)  # with other costs or caps than the run's
    if searched and args.name is None:
        entry = _named_schedule(AUTO, replace(sizes, held_by=run.plan.stage_placement))
    elif args.name is None:
        with searching() as progress:
            schedule = run.schedule(progress)
        entry = _entry(schedule, sizes, run.num_stages // run.num_ranks if run.name == AUTO else 1)
    else:
        entry = _named_schedule(names[0], sizes)
    layout, lanes, notes = (None, None, ()) if args.name else (run.layout, run.lanes, run.notes)
    return Answer(
        (entry,), costs, cap=sizes.cap, memory=sizes.memory, unit=unit, layout=layout, lanes=lanes, notes=notes
    )


def _is_spec(argument: str) -> bool:
    """Whether an argument is a spec (maybe a missing one), and not a schedule file."""
    return re.search(r"\.dsc(:|$)", Path(argument).name) is not None or not is_file(argument)


def _answer_of_file(args: argparse.Namespace) -> Answer:
    """The schedule in a file, checked to be valid and free of deadlocks."""
    has_search_options = args.copies is not None or args.placement is not None
    if args.name is not None or args.compare is not None or args.chunks is not None or args.set or has_search_options:
        options = "--copies, --placement" if has_search_options else "--chunks"
        raise InputError(f"{args.spec} is a schedule already: leave --name, --compare, {options} and -s out")
    from compiler.schedule.spec_schedule import read_schedule  # imports pydantic

    try:
        schedule = read_schedule(Path(args.spec))
    except ScheduleError as error:
        raise InputError(str(error)) from None
    sizes = Sizes(schedule.num_ranks, schedule.num_micro_batches, DEFAULT_CHUNKS, args.cap, costs_of(args))
    _check_sizes(args, sizes)
    sizes = sizes.with_caps(args.memory)
    return Answer((_entry(schedule, sizes),), sizes.costs, cap=sizes.cap, memory=sizes.memory, unit=_unit(args))


def costs_of(args: argparse.Namespace) -> Costs | None:
    """Build the costs from --costs, --pairs, --latency and --offload. None if the user gives none of these options."""
    text: str | None = args.costs
    if text is None and args.pairs is None and args.latency is None and args.offload is None:
        return None
    try:
        costs = Costs() if text is None else _read_costs(text)
    except TextFileError as error:  # the message names the file
        raise InputError(f"--costs {error}") from None
    except ValueError as error:
        raise InputError(f"--costs {text[:80] if text else ''}: {error}") from None
    if args.pairs:
        if [kinds for kinds, _ in costs.pairs] != ["BF"]:
            raise InputError(
                "--pairs any applies the factor of FB to all pairs: give --costs with FB and no other pair", "FB=1.8"
            )
        costs = with_every_pair_gaining(costs)
    if args.latency is not None:
        try:
            costs = replace(costs, latency=parse_time(args.latency), links=ALIKE)
        except ValueError as error:
            raise InputError(f"--latency {error}") from None
    if args.offload is not None:
        try:
            time = parse_time(args.offload)
        except ValueError as error:
            raise InputError(f"--offload {error}") from None
        costs = replace(costs, O=time, R=time)
    return costs


def _unit(args: argparse.Namespace) -> str:
    """The unit of --costs; "" if unknown."""
    return UNIT_OF_SHIPPED if args.costs in shipped_cost_names() else ""


def _read_costs(text: str) -> Costs:
    if text in shipped_cost_names():
        return shipped_costs(text)
    if os.path.lexists(text):
        return costs_of_json(read_text(Path(text), MOST_BYTES), text)
    if "=" in text:
        return parse_costs(text)
    raise ValueError(f"no such file or cost table: write F=1,I=1,W=1 or {' or '.join(shipped_cost_names())}")


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    if args.compare is not None and args.name is not None:
        raise InputError("--compare already names schedules: leave --name out")
    if args.compare is None and args.name is None:
        raise InputError(f"--name is missing: use one of {', '.join((*SCHEDULES, AUTO))}")
    names = (args.name,) if args.compare is None else tuple(dict.fromkeys(args.compare.split(",")))
    for name in names:
        if name not in SCHEDULES and name != AUTO:
            from dsl.resolve.context import suggest  # imported only on errors

            all_names = (*SCHEDULES, AUTO)
            suggestion = suggest(name, all_names)
            hint = suggestion if suggestion.startswith("did you mean") else ""
            raise InputError(f"unknown schedule {name[:40]!r}: use one of {', '.join(all_names)}", hint)
    return names


def _check_sizes(args: argparse.Namespace, sizes: Sizes) -> None:
    for option, value, limit in (
        ("--ranks", sizes.num_ranks, MAX_RANKS),
        ("--micro-batches", sizes.num_micro_batches, MAX_MICRO_BATCHES),
        ("--chunks", sizes.chunks, MAX_CHUNKS),
        *(("--cap", cap, MAX_CAP) for cap in (args.cap if isinstance(args.cap, tuple) else (args.cap,))),
    ):
        if value is not None and not 1 <= value <= limit:
            raise InputError(f"{option} {value} is out of bounds: use 1 to {limit}")
    if isinstance(args.cap, tuple) and len(args.cap) != sizes.num_ranks:
        raise InputError(
            f"--cap has {len(args.cap)} caps, and there are {sizes.num_ranks} ranks: write one for each, or one for all"
        )
    names = [name for name in (args.name, *(args.compare or "").split(",")) if name]
    if args.chunks is not None and not any(name == AUTO or SCHEDULES[name].facts.is_chunked for name in names):
        raise InputError(f"--chunks is for {join_names(CHUNKED)}: leave it out, or write --name {CHUNKED[0]}")
    parts_of_auto = PARTS_OF_AUTO + sizes.chunks - DEFAULT_CHUNKS
    parts = [parts_of_auto if name == AUTO else _parts(name, sizes.chunks) for name in names] or [1]
    unequal = sizes.costs is not None and sizes.costs.micro_batches
    max_each, max_all = (MAX_UNEQUAL_CELLS,) * 2 if unequal else (MAX_CELLS, MAX_COMPARED_CELLS)
    largest_each, largest_all = max_each // max(parts) // sizes.num_ranks, max_all // sum(parts) // sizes.num_ranks
    limit = min(largest_each, largest_all)
    if sizes.num_micro_batches > limit:
        stages = sizes.num_ranks * max(parts)
        size = f"{stages} stages" if stages > sizes.num_ranks and AUTO not in names else f"{sizes.num_ranks} ranks"
        edit = f"use --micro-batches {limit} or fewer" if limit else "use fewer ranks"
        raise InputError(
            f"{size} x {sizes.num_micro_batches} micro-batches is too large: {edit}, to finish within a minute"
            + (", or compare fewer" if largest_all < largest_each else "")
        )


# ---------------------------------------------------------------- schedules
def _named_schedule(name: str, sizes: Sizes, parts: int = 1) -> ScheduleAnswer:
    """The schedule of a name. Raises InputError if it does not exist in this size, or exceeds the cap.

    `parts`: how many of its activations, each of one stage, count as one for the cap. For `auto` the cap counts
    activations of 1/P of the model.
    """
    try:
        if name == AUTO:
            return _search(sizes)
        schedule = SCHEDULES[name].generate(sizes.num_ranks, sizes.num_micro_batches, sizes.chunks)
    except ValueError as error:  # the schedule has no such size, or nothing fits the cap
        raise InputError(str(error)) from None
    return _entry(schedule, sizes, parts)


def _search(sizes: Sizes) -> ScheduleAnswer:
    """Search for `auto`; the result is always measured. Raises ValueError if nothing fits the cap, or if costs have
    another number of stages or ranks."""
    from compiler.schedule.solver import Solution, Solver, solve_with_copies

    P, N, held_by, tried = sizes.num_ranks, sizes.num_micro_batches, sizes.held_by, sizes.tried
    stages = P if held_by is None else held_by.num_stages(P)

    def search(solver: Solver) -> Solution:
        if held_by is None:
            return solver.solve(P, N, tried.chunks, tried.copies, tried.placement)
        return solver.solve_on(held_by, P, N)

    if sizes.costs is not None and sizes.costs.micro_batches:
        return _search_unequal(sizes, sizes.costs)
    with searching() as progress:

        def report(share: float) -> None:
            progress(f"search for auto: {share:.0%}")

        solver = Solver(_recut_costs(sizes, stages), sizes.cap_of(Fraction(stages, P)), report=report)
        solution = solve_with_copies(solver, P, stages, search) if solver.costs.can_offload else search(solver)
    solution.schedule.check()
    measured = solution.measure_schedule()
    return ScheduleAnswer(AUTO, solution.schedule, measured, parts=measured.stages_a_rank, bounded=solution.searched)


def _search_unequal(sizes: Sizes, costs: Costs) -> ScheduleAnswer:
    """`auto` for micro-batches of unequal costs: the schedule searched for at their mean, or a shorter named one."""
    P, N, tried = sizes.num_ranks, sizes.num_micro_batches, sizes.tried
    mean = sum(costs.micro_batches, Fraction(0)) / len(costs.micro_batches)
    at_mean = _search(replace(sizes, costs=replace(costs, micro_batches=()).scale_times(mean))).schedule
    assert at_mean is not None
    sizes_of_all = replace(sizes, num_stages=sizes.num_stages or P)
    entries = [_entry(at_mean, sizes_of_all, at_mean.stage_placement.stages_per_rank)]
    for row in SCHEDULES.values() if sizes.held_by is None else ():
        placement = row.stage_placement(sizes.chunks)
        if row.has_size(P, N) and tried.allows(placement, P):
            schedule = replace(row.generate(P, N, sizes.chunks), name=AUTO)
            with suppress(InputError):  # it exceeds the cap
                entries.append(_entry(schedule, sizes_of_all, placement.stages_per_rank))
    best = min(entries, key=lambda entry: entry.measured.makespan)  # type: ignore[union-attr]
    return replace(best, candidates=tuple(entries))


@contextmanager
def searching() -> Iterator[Callable[[str], None]]:
    """Show progress while a search runs."""
    tell = progress("schedule")
    try:
        yield tell
    finally:
        tell("")


def _recut_costs(sizes: Sizes, stages: int) -> Costs:
    """The costs with the model cut into `stages` stages. Costs given for `auto` are for one stage per rank.

    If the model is cut so already, all weights stay, also those of smaller stages.
    """
    costs, given_stages = sizes.costs or Costs(), sizes.num_stages or sizes.num_ranks
    try:
        costs.check_cut(sizes.num_ranks, given_stages)
    except ValueError as error:
        raise InputError(str(error)) from None
    return costs if given_stages == stages else costs.recut(given_stages, stages)


def _entry(schedule: Schedule, sizes: Sizes, parts: int = 1) -> ScheduleAnswer:
    """A known schedule, measured if there are costs. Raises InputError if it exceeds the cap.

    `parts`: how many of its activations, each of one stage, count as one for the cap.
    """
    stages = schedule.num_stages
    sizes.check_cap(schedule, parts)
    if sizes.costs is None:
        return ScheduleAnswer(schedule.name, schedule)
    try:
        costs = sizes.costs if sizes.num_stages is None else sizes.costs.recut(sizes.num_stages, stages)
        cap = sizes.cap_of(parts)
        limit = tuple(map(costs.round_cap, cap)) if isinstance(cap, tuple) else cap and costs.round_cap(cap)
        return ScheduleAnswer(schedule.name, schedule, measure(schedule, costs, limit), parts=parts)
    except ValueError as error:  # the costs have weights for another number of stages
        raise InputError(str(error)) from None


def _compare(names: Sequence[str], sizes: Sizes, unit: str) -> Answer:
    """One entry for each name. Costs and cap are for 1/P of the model."""
    base = _recut_costs(sizes, sizes.num_ranks)
    entries = []
    for name in names:
        parts = 1 if name == AUTO else _parts(name, sizes.chunks)
        sizes_of_one = replace(sizes, costs=base, num_stages=sizes.num_ranks)
        try:
            entries.append(_named_schedule(name, sizes_of_one, parts))
        except InputError as error:
            entries.append(ScheduleAnswer(name, fault=str(error)))
    if all(entry.fault for entry in entries):
        raise InputError(entries[0].fault)
    cap = None if sizes.memory is not None else sizes.cap
    return Answer(tuple(entries), base, compared=True, cap=cap, memory=sizes.memory, unit=unit)


def _parts(name: str, chunks: int) -> int:
    """The stages per rank of a schedule."""
    return SCHEDULES[name].stage_placement(chunks).stages_per_rank
