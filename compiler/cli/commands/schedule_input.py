"""The command line of `dsc schedule` → the schedules that it asks for, with their costs."""

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
from compiler.cli.commands.schedule_answer import Answer, ScheduleAnswer, shown
from compiler.cli.commands.schedule_tried import ANYTHING, MAX_CHUNKS, TriedSettings, tried_of
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
    any_pairs,
    costs_of_json,
    parse_costs,
    parse_time,
    shipped,
    shipped_names,
)
from compiler.schedule.measure import measure
from compiler.schedule.memory import gigabytes
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.simulate import held_at_most
from compiler.schedule.torch_csv import NO_COPIES
from dsl.facts.schedules import CHUNKED, PLAIN, in_words

# --- What `dsc schedule` asks schedules for: their sizes and costs, and what a rank may hold, in activations or bytes

Cap = Fraction | tuple[Fraction, ...]  # of every rank, or one for each


class InputError(Exception):
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
    tried: TriedSettings = ANYTHING
    memory: Fraction | None = None  # the bytes from which the caps come

    def cap_of(self, parts: Fraction | int) -> Cap | None:
        """The cap in activations of which so many are one that it counts."""
        if isinstance(self.cap, tuple):
            return tuple(each * parts for each in self.cap)
        return None if self.cap is None else self.cap * parts

    def within(self, memory: Fraction | None) -> Sizes:
        """The sizes with the caps that so many bytes leave; `InputError` where they leave no room."""
        if memory is None:
            return self
        if self.cap is not None:
            raise InputError("a cap in activations and --memory both say what a rank may hold: leave one of them out")
        costs = self.costs or Costs()
        try:
            costs.check(self.num_ranks, len(costs.stages))
            return replace(self, cap=costs.bytes.caps(memory, self.num_ranks), memory=memory)
        except ValueError as error:
            raise InputError(f"--memory {gigabytes(memory)}: {error}") from None

    def check_cap(self, schedule: Schedule, parts: int) -> None:
        """`InputError` where a rank holds more than the cap of activations that have so many parts."""
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
            raise InputError(f"{schedule.name} holds {needed} on rank {rank}: use --memory {needed} or more, or auto")
        sizes_said = f"{schedule.num_ranks} ranks with {schedule.num_micro_batches} micro-batches"
        if isinstance(self.cap, tuple):
            held, needed = ", ".join(map(shown, of_ranks)), ",".join(f"{math.ceil(each)}" for each in of_ranks)
        else:
            held, needed = shown(max(of_ranks)), f"{math.ceil(max(of_ranks))}"
        edit = f"use --cap {needed} or more, or auto"
        raise InputError(f"{schedule.name} on {sizes_said} holds {held} activations: {edit}")


# --- schedule input

ONE_ONLY = ("torch-csv", "megatron-layout")  # formats that say one schedule
SIZES = "--ranks 8 --micro-batches 20"
MAX_MICRO_BATCHES = 65_536
# `auto` tries all the others, which takes about as long as a schedule of so many stages a rank; of many ranks, whose
# steps are run together (schedules/rounds.py), as one of fewer.
PARTS_OF_AUTO, MANY_RANKS, PARTS_OF_MANY = 8, 256, 2
MAX_CAP = 100_000_000


def answer_to(args: argparse.Namespace) -> Answer | None:
    """Return what the command line asks for. Return None if the spec has mistakes, which have been printed then.

    InputError for mistakes of the command line itself.
    """
    if args.compare is not None and args.format in ONE_ONLY:
        raise InputError(f"--format {args.format} is of one schedule: leave --compare out")  # before a search
    if args.name is not None and args.format == "megatron-layout":
        raise InputError("a layout is of a model's layers: name a SPEC, and leave --name out")
    sizes_given = {"--ranks": args.ranks, "--micro-batches": args.micro_batches}
    missing = [option for option, value in sizes_given.items() if value is None]
    if len(missing) == len(sizes_given):
        if args.spec is None:
            _check_here(args)
        return _of_spec(args) if args.spec is None or _is_spec(args.spec) else _of_file(args)
    if args.spec is not None:
        given = " and ".join(option for option in sizes_given if option not in missing)
        raise InputError(
            f"{args.spec} says how many ranks and micro-batches there are: leave {given} out",
            "-s parallel.pipeline=8" if _is_spec(args.spec) else f"another size: dsc schedule --name {PLAIN} {SIZES}",
        )
    if missing:
        raise InputError(
            f"{missing[0]} is missing: a schedule has --ranks P and --micro-batches N, or is that of a SPEC"
        )
    if args.set:
        raise InputError("-s changes a spec, and there is none", f"dsc schedule spec.dsc -s schedule.name={PLAIN}")
    names = _names(args)
    chunks = DEFAULT_CHUNKS if args.chunks is None else args.chunks
    try:
        tried = tried_of(args, names)
    except ValueError as error:
        raise InputError(str(error)) from None
    sizes = Sizes(args.ranks, args.micro_batches, chunks, args.cap, costs_of(args), tried=tried)
    _check_sizes(args, sizes)
    sizes = sizes.within(args.memory)
    if args.format == "torch-csv" and names == (AUTO,):
        sizes = _in_torch(sizes)
    if args.compare is not None:
        return _compared(names, sizes, _unit(args))
    return Answer((_named(names[0], sizes),), sizes.costs, cap=sizes.cap, memory=sizes.memory, unit=_unit(args))


def _in_torch(sizes: Sizes) -> Sizes:
    """What `auto` searches for torch: a V, for it has no copies, with no pairs but F&B, and all on the device."""
    costs = sizes.costs or Costs()
    pairs = tuple(pair for pair in costs.pairs if pair[0] == "BF")
    return replace(sizes, costs=replace(costs.on_device(), pairs=pairs), num_stages=sizes.num_ranks, held_by=V)


def _check_here(args: argparse.Namespace) -> None:
    """Say which sizes are missing where schedules are named, and no spec is here of which they would be."""
    from dsl.messages.diagnostics import SpecError
    from dsl.resolve.chosen import find

    if args.name is None and args.compare is None:
        return
    try:
        find()
    except SpecError as error:
        if any(item.code != "E0404" for item in error.diagnostics):
            return  # told where it is loaded
        here = error.diagnostics[0].message
        raise InputError(f"--ranks and --micro-batches are missing, and {here}", SIZES) from None


def _of_spec(args: argparse.Namespace) -> Answer | None:
    """The schedule of a spec's run, or several schedules of its sizes; the costs are its plan's if none are given."""
    from compiler.cli.commands.common import load_spec

    chosen = load_spec(args.spec, args.set)
    if chosen is None:
        return None
    from compiler.cli.commands.schedule_spec import run_of

    if args.chunks is not None:
        raise InputError("--chunks goes with --ranks: of a spec, change `schedule.chunks`", "-s schedule.chunks=4")
    if args.copies is not None or args.placement is not None:
        raise InputError(
            "--copies and --placement go with --ranks: of a spec, change `schedule.copies` and `schedule.placement`",
            "-s schedule.placement=v",
        )
    names = () if args.name is None and args.compare is None else _names(args)
    run = run_of(chosen.spec)
    if args.format == "torch-csv" and args.name is None and run.plan.stage_placement == BIDIRECTIONAL:
        raise InputError(NO_COPIES, "-s schedule.name=dualpipev")  # before a search
    given = costs_of(args)
    if args.order and (given is None or not given.micro_batches):
        raise InputError(*run.why_no_order)
    # what is given is of the schedule at hand, as without a spec; the plan's costs are of the stages that it has
    costs, stages, unit = (run.costs(), run.num_stages, run.unit) if given is None else (given, None, _unit(args))
    capped = args.cap is not None or args.memory is not None
    cap = args.cap if capped else run.cap
    sizes = Sizes(run.num_ranks, run.num_micro_batches, run.chunks, cap, costs, stages, tried=run.tried)
    _check_sizes(args, sizes)
    sizes = sizes.within(args.memory)
    if args.compare is not None:
        return _compared(names, sizes, unit)
    searched = run.name == AUTO and (given is not None or capped)  # not for what the run would take
    if searched and args.name is None:
        entry = _named(AUTO, replace(sizes, held_by=run.plan.stage_placement))
    elif args.name is None:
        with searching() as progress:
            schedule = run.schedule(progress)
        entry = _entry(schedule, sizes, run.num_stages // run.num_ranks if run.name == AUTO else 1)
    else:
        entry = _named(names[0], sizes)
    layout, lanes, notes = (None, None, ()) if args.name else (run.layout, run.lanes, run.notes)
    return Answer(
        (entry,), costs, cap=sizes.cap, memory=sizes.memory, unit=unit, layout=layout, lanes=lanes, notes=notes
    )


def _is_spec(argument: str) -> bool:
    """Whether it is one, or meant to be, and not the file of a schedule."""
    return re.search(r"\.dsc(:|$)", Path(argument).name) is not None or not is_file(argument)


def _of_file(args: argparse.Namespace) -> Answer:
    """The schedule of a file, checked: a legal one that cannot hang."""
    of_auto = args.copies is not None or args.placement is not None
    if args.name is not None or args.compare is not None or args.chunks is not None or args.set or of_auto:
        others = "--copies, --placement" if of_auto else "--chunks"
        raise InputError(f"{args.spec} is a schedule already: leave --name, --compare, {others} and -s out")
    from compiler.schedule.spec_schedule import read_schedule  # it knows specs, and brings pydantic

    try:
        schedule = read_schedule(Path(args.spec))
    except ScheduleError as error:
        raise InputError(str(error)) from None
    sizes = Sizes(schedule.num_ranks, schedule.num_micro_batches, DEFAULT_CHUNKS, args.cap, costs_of(args))
    _check_sizes(args, sizes)
    sizes = sizes.within(args.memory)
    return Answer((_entry(schedule, sizes),), sizes.costs, cap=sizes.cap, memory=sizes.memory, unit=_unit(args))


def costs_of(args: argparse.Namespace) -> Costs | None:
    """--costs with --pairs, --latency and --offload; None where nothing is said of costs."""
    text: str | None = args.costs
    if text is None and args.pairs is None and args.latency is None and args.offload is None:
        return None
    try:
        costs = Costs() if text is None else _read_costs(text)
    except TextFileError as error:  # it names the file
        raise InputError(f"--costs {error}") from None
    except ValueError as error:
        raise InputError(f"--costs {text[:80] if text else ''}: {error}") from None
    if args.pairs:
        if [kinds for kinds, _ in costs.pairs] != ["BF"]:
            raise InputError(
                "--pairs any gives all pairs the factor of FB: give --costs with FB and no other pair", "FB=1.8"
            )
        costs = any_pairs(costs)
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
    """The unit of --costs where it is known."""
    return UNIT_OF_SHIPPED if args.costs in shipped_names() else ""


def _read_costs(text: str) -> Costs:
    if text in shipped_names():
        return shipped(text)
    if os.path.lexists(text):
        return costs_of_json(read_text(Path(text), MOST_BYTES), text)
    if "=" in text:
        return parse_costs(text)
    raise ValueError(f"no such file, and no table of that name: write F=1,I=1,W=1 or {' or '.join(shipped_names())}")


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    if args.compare is not None and args.name is not None:
        raise InputError("--compare has the names: leave --name out")
    if args.compare is None and args.name is None:
        raise InputError(f"--name is missing: use one of {', '.join((*SCHEDULES, AUTO))}")
    names = (args.name,) if args.compare is None else tuple(dict.fromkeys(args.compare.split(",")))
    for name in names:
        if name not in SCHEDULES and name != AUTO:
            from dsl.resolve.context import suggest  # only where something is wrong

            every = (*SCHEDULES, AUTO)
            meant = suggest(name, every)
            hint = meant if meant.startswith("did you mean") else ""
            raise InputError(f"unknown schedule {name[:40]!r}: use one of {', '.join(every)}", hint)
    return names


def _check_sizes(args: argparse.Namespace, sizes: Sizes) -> None:
    for option, value, most in (
        ("--ranks", sizes.num_ranks, MAX_RANKS),
        ("--micro-batches", sizes.num_micro_batches, MAX_MICRO_BATCHES),
        ("--chunks", sizes.chunks, MAX_CHUNKS),
        *(("--cap", each, MAX_CAP) for each in (args.cap if isinstance(args.cap, tuple) else (args.cap,))),
    ):
        if value is not None and not 1 <= value <= most:
            raise InputError(f"{option} {value} is out of bounds: use 1 to {most}")
    if isinstance(args.cap, tuple) and len(args.cap) != sizes.num_ranks:
        raise InputError(
            f"--cap has {len(args.cap)} caps, and there are {sizes.num_ranks} ranks: write one for each, or one for all"
        )
    names = [name for name in (args.name, *(args.compare or "").split(",")) if name]
    if args.chunks is not None and not any(name == AUTO or SCHEDULES[name].facts.is_chunked for name in names):
        raise InputError(f"--chunks is for {in_words(CHUNKED)}: leave it out, or write --name {CHUNKED[0]}")
    of_auto = (PARTS_OF_MANY if sizes.num_ranks >= MANY_RANKS else PARTS_OF_AUTO) + sizes.chunks - 2
    parts = [of_auto if name == AUTO else _parts(name, sizes.chunks) for name in names] or [1]
    most = MAX_CELLS // sum(parts) // sizes.num_ranks
    if sizes.num_micro_batches > most:
        stages = sizes.num_ranks * max(parts)
        what = f"{stages} stages" if stages > sizes.num_ranks and AUTO not in names else f"{sizes.num_ranks} ranks"
        edit = f"use --micro-batches {most} or fewer" if most else "use fewer ranks"
        raise InputError(
            f"{what} x {sizes.num_micro_batches} micro-batches is too large: {edit}, which take less than a minute"
            + (", or compare fewer" if len(names) > 1 else "")
        )


# ---------------------------------------------------------------- schedules
def _named(name: str, sizes: Sizes, parts: int = 1) -> ScheduleAnswer:
    """The schedule of a name, checked; `InputError` for a size it does not have, or one that the cap does not hold.

    The cap counts activations of so many `parts`, each that of one of its stages, and of `auto` those of 1/P.
    """
    try:
        if name == AUTO:
            return _searched(sizes)
        schedule = SCHEDULES[name].generate(sizes.num_ranks, sizes.num_micro_batches, sizes.chunks)
    except ValueError as error:  # a size this schedule does not have, a cap that nothing fits
        raise InputError(str(error)) from None
    schedule.check()
    return _entry(schedule, sizes, parts)


def _searched(sizes: Sizes) -> ScheduleAnswer:
    """`auto`, always measured. ValueError for a cap that nothing fits, and for weights of other numbers."""
    from compiler.schedule.solver import Solution, Solver, solved_with_copies

    P, N, held_by, tried = sizes.num_ranks, sizes.num_micro_batches, sizes.held_by, sizes.tried
    stages = P if held_by is None else held_by.num_stages(P)

    def search(solver: Solver) -> Solution:
        if held_by is None:
            return solver.solve(P, N, tried.chunks, tried.copies, tried.placement)
        return solver.solve_on(held_by, P, N)

    if sizes.costs is not None and sizes.costs.micro_batches:
        return _searched_unequal(sizes, sizes.costs)
    with searching() as progress:

        def report(share: float) -> None:
            progress(f"search for auto: {share:.0%}")

        solver = Solver(_cut(sizes, stages), sizes.cap_of(Fraction(stages, P)), report=report)
        found = solved_with_copies(solver, P, stages, search) if solver.costs.offloads else search(solver)
    found.schedule.check()
    measured = found.measured()
    return ScheduleAnswer(AUTO, found.schedule, measured, parts=measured.stages_a_rank, bounded=found.searched)


def _searched_unequal(sizes: Sizes, costs: Costs) -> ScheduleAnswer:
    """`auto` where micro-batches have weights: searched for at their mean, or if one is shorter, a named schedule."""
    P, N, tried = sizes.num_ranks, sizes.num_micro_batches, sizes.tried
    mean = sum(costs.micro_batches, Fraction(0)) / len(costs.micro_batches)
    found = _searched(replace(sizes, costs=replace(costs, micro_batches=()).longer(mean))).schedule
    assert found is not None
    of_all = replace(sizes, num_stages=sizes.num_stages or P)
    entries = [_entry(found, of_all, found.stage_placement.stages_per_rank)]
    for row in SCHEDULES.values() if sizes.held_by is None else ():
        placement = row.stage_placement(sizes.chunks)
        if row.has(P, N) and tried.takes(placement, P):
            schedule = replace(row.generate(P, N, sizes.chunks), name=AUTO)
            with suppress(InputError):  # it holds too much
                entries.append(_entry(schedule, of_all, placement.stages_per_rank))
    best = min(entries, key=lambda entry: entry.measured.makespan)  # type: ignore[union-attr]
    return replace(best, candidates=tuple(entries))


@contextmanager
def searching() -> Iterator[Callable[[str], None]]:
    """What is being done, on a terminal, until it is done."""
    tell = progress("schedule")
    try:
        yield tell
    finally:
        tell("")


def _cut(sizes: Sizes, stages: int) -> Costs:
    """Costs where the model is cut into so many stages; what is given for `auto` is of as many as there are ranks."""
    costs, had = sizes.costs or Costs(), sizes.num_stages or sizes.num_ranks
    try:
        costs.check(sizes.num_ranks, had)
    except ValueError as error:
        raise InputError(str(error)) from None
    return costs.recut(had, stages)


def _entry(schedule: Schedule, sizes: Sizes, parts: int = 1) -> ScheduleAnswer:
    """A schedule that is not searched for here, measured where there are costs; `InputError` where it holds too much.

    The cap counts activations of so many `parts`, each that of one of its stages.
    """
    stages = schedule.num_stages
    sizes.check_cap(schedule, parts)
    if sizes.costs is None:
        return ScheduleAnswer(schedule.name, schedule)
    try:
        costs = sizes.costs if sizes.num_stages is None else sizes.costs.recut(sizes.num_stages, stages)
        cap = sizes.cap_of(parts)
        most = tuple(map(costs.in_parts, cap)) if isinstance(cap, tuple) else cap and costs.in_parts(cap)
        return ScheduleAnswer(schedule.name, schedule, measure(schedule, costs, most), parts=parts)
    except ValueError as error:  # weights of another number of stages
        raise InputError(str(error)) from None


def _compared(names: Sequence[str], sizes: Sizes, unit: str) -> Answer:
    """One entry for each name. Costs are those of 1/P of the model, and the cap counts activations of that much."""
    base = _cut(sizes, sizes.num_ranks)
    entries = []
    for name in names:
        parts = 1 if name == AUTO else _parts(name, sizes.chunks)
        of_one = replace(sizes, costs=base, num_stages=sizes.num_ranks)
        try:
            entries.append(_named(name, of_one, parts))
        except InputError as error:
            entries.append(ScheduleAnswer(name, fault=str(error)))
    if all(entry.fault for entry in entries):
        raise InputError(entries[0].fault)
    cap = None if sizes.memory is not None else sizes.cap
    return Answer(tuple(entries), base, compared=True, cap=cap, memory=sizes.memory, unit=unit)


def _parts(name: str, chunks: int) -> int:
    """Into how many stages a schedule cuts the model's share of a rank."""
    return SCHEDULES[name].stage_placement(chunks).stages_per_rank
