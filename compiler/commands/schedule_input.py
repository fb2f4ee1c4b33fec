"""The command line of `dsc schedule` → the schedules that it asks for, with their costs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compiler.commands.schedule_formats import Answer, Entry
from compiler.schedules import AUTO, DEFAULT_CHUNKS, SCHEDULES
from compiler.schedules.costs import Costs, any_pairs, costs_of_json, parse_costs, parse_time, shipped, shipped_names
from compiler.schedules.measure import measure
from compiler.schedules.placement import BIDIRECTIONAL, num_stages
from compiler.schedules.schedule import Schedule, ScheduleError
from compiler.schedules.simulate import peak_activations

# Bounds before work: the largest published pipelines have 16 to 64 ranks; a million actions take a few seconds.
MAX_RANKS = 512
MAX_MICRO_BATCHES = 65_536
MAX_CELLS = 2**19  # stages x micro-batches; each is a forward and a backward
MAX_CHUNKS = 64
MAX_CAP = 100_000_000
MAX_TABLE_BYTES = 1 << 20


class WrongError(Exception):
    """The command line asks for what is not there; the message says what to change."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class _Sizes:
    """What schedules are asked for. `costs` are those of one of `num_stages` stages, or if None of any action."""

    num_ranks: int
    num_micro_batches: int
    chunks: int
    cap: int | None
    costs: Costs | None
    num_stages: int | None = None


def answer_to(args: argparse.Namespace) -> Answer | None:
    """What the command line asks for; None after the mistakes of a spec have been printed. `WrongError` for its own."""
    if args.ranks is None and args.micro_batches is None:
        return _of_spec(args) if args.spec is None or _is_spec(args.spec) else _of_file(args)
    for value, option in ((args.ranks, "--ranks"), (args.micro_batches, "--micro-batches")):
        if value is None:
            raise WrongError(
                f"{option} is missing: a schedule has --ranks P and --micro-batches N, or is that of a SPEC"
            )
    if args.spec is not None:
        raise WrongError(
            f"{args.spec} says how many ranks and micro-batches there are: leave --ranks and --micro-batches out"
        )
    if args.set:
        raise WrongError("-s changes a spec, and there is none", "dsc schedule spec.dsc -s schedule.name=1f1b")
    names = _names(args)
    chunks = DEFAULT_CHUNKS if args.chunks is None else args.chunks
    sizes = _Sizes(args.ranks, args.micro_batches, chunks, args.cap, costs_of(args))
    _check_sizes(args, sizes)
    if args.compare:
        return _compared(names, sizes, "")
    schedule = _generated(names[0], sizes)
    return Answer((_entry(schedule, sizes),), sizes.costs)


def _of_spec(args: argparse.Namespace) -> Answer | None:
    """The schedule of a spec's run, or several schedules of its sizes; the costs are its plan's if none are given."""
    from compiler.commands.common import load_spec

    chosen = load_spec(args.spec, args.set)
    if chosen is None:
        return None
    from compiler.commands.schedule_spec import run_of

    if args.chunks is not None:
        raise WrongError("--chunks goes with --ranks: of a spec, change `schedule.chunks`", "-s schedule.chunks=4")
    run = run_of(chosen.spec, chosen.own)
    given = costs_of(args)
    # what is given is of the schedule at hand, as without a spec; the plan's costs are of the stages that it has
    costs, stages, unit = (run.costs(), run.num_stages, run.unit) if given is None else (given, None, "")
    cap = run.cap if args.cap is None else args.cap
    sizes = _Sizes(run.num_ranks, run.num_micro_batches, run.chunks, cap, costs, stages)
    _check_sizes(args, sizes)
    if args.compare:
        return _compared(_names(args), sizes, unit)
    searched = run.name == AUTO and (given is not None or args.cap is not None)  # not for what the run would take
    if args.name is None and not searched:
        schedule = run.schedule()
        _check_cap(schedule, sizes)
    else:
        schedule = _generated(AUTO if args.name is None else _names(args)[0], sizes)
    layout, lanes = (None, None) if args.name else (run.layout, run.lanes)
    return Answer((_entry(schedule, sizes),), costs, unit=unit, layout=layout, lanes=lanes)


def _is_spec(argument: str) -> bool:
    """Whether it is one, or meant to be, and not the file of a schedule."""
    return re.search(r"\.dsc(:|$)", Path(argument).name) is not None or not Path(argument).is_file()


def _of_file(args: argparse.Namespace) -> Answer:
    """The schedule of a file, checked: a legal one that cannot hang."""
    if args.name is not None or args.compare is not None or args.chunks is not None or args.set:
        raise WrongError(f"{args.spec} is a schedule already: leave --name, --compare, --chunks and -s out")
    from compiler.schedules.own import read_schedule  # it knows specs, and brings pydantic

    try:
        schedule = read_schedule(Path(args.spec))
    except ScheduleError as error:
        raise WrongError(str(error)) from None
    sizes = _Sizes(schedule.num_ranks, schedule.num_micro_batches, DEFAULT_CHUNKS, args.cap, costs_of(args))
    _check_sizes(args, sizes)
    _check_cap(schedule, sizes)
    return Answer((_entry(schedule, sizes),), sizes.costs)


def costs_of(args: argparse.Namespace) -> Costs | None:
    """--costs with --pairs and --latency; None where nothing is said of costs."""
    text: str | None = args.costs
    if text is None and args.pairs is None and args.latency is None:
        return None
    try:
        costs = Costs() if text is None else _read_costs(text)
    except ValueError as error:
        raise WrongError(f"--costs {text[:80] if text else ''}: {error}") from None
    if args.pairs:
        if [kinds for kinds, _ in costs.pairs] != ["BF"]:
            raise WrongError(
                "--pairs any gives all pairs the factor of FB: give --costs with FB and no other pair", "FB=1.8"
            )
        costs = any_pairs(costs)
    if args.latency is not None:
        try:
            costs = replace(costs, latency=parse_time(args.latency))
        except ValueError as error:
            raise WrongError(f"--latency {error}") from None
    return costs


def _read_costs(text: str) -> Costs:
    if text in shipped_names():
        return shipped(text)
    path = Path(text)
    if len(text) > 255 or not path.is_file():
        if "=" in text:
            return parse_costs(text)
        raise ValueError(
            f"no such file, and no table of that name: write F=1,I=1,W=1 or {' or '.join(shipped_names())}"
        )
    with path.open("rb") as file:
        data = file.read(MAX_TABLE_BYTES + 1)
    if len(data) > MAX_TABLE_BYTES:
        raise ValueError(f"a table of costs has at most {MAX_TABLE_BYTES} bytes")
    return costs_of_json(data.decode("utf-8"))  # UnicodeDecodeError is a ValueError


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    if args.compare is not None and args.name is not None:
        raise WrongError("--compare has the names: leave --name out")
    if args.compare is None and args.name is None:
        raise WrongError(f"--name is missing: use one of {', '.join((*SCHEDULES, AUTO))}")
    names = (args.name,) if args.compare is None else tuple(dict.fromkeys(args.compare.split(",")))
    for name in names:
        if name not in SCHEDULES and name != AUTO:
            raise WrongError(f"unknown schedule {name[:40]!r}: use one of {', '.join((*SCHEDULES, AUTO))}")
    return names


def _check_sizes(args: argparse.Namespace, sizes: _Sizes) -> None:
    for option, value, most in (
        ("--ranks", sizes.num_ranks, MAX_RANKS),
        ("--micro-batches", sizes.num_micro_batches, MAX_MICRO_BATCHES),
        ("--chunks", sizes.chunks, MAX_CHUNKS),
        ("--cap", sizes.cap, MAX_CAP),
    ):
        if value is not None and not 1 <= value <= most:
            raise WrongError(f"{option} {value} is out of bounds: use 1 to {most}")
    chunked = any(
        name in SCHEDULES and SCHEDULES[name].chunked for name in (args.name, *(args.compare or "").split(","))
    )
    if args.chunks is not None and not chunked:
        raise WrongError("--chunks is for interleaved: leave it out, or write --name interleaved")
    stages = sizes.num_ranks * (sizes.chunks if chunked else 1)
    if stages * sizes.num_micro_batches > MAX_CELLS:
        raise WrongError(
            f"{stages} {'stages' if chunked else 'ranks'} x {sizes.num_micro_batches} micro-batches is too large:"
            f" use --micro-batches {MAX_CELLS // stages} or fewer"
        )


# ---------------------------------------------------------------- schedules


def _generated(name: str, sizes: _Sizes) -> Schedule:
    """The schedule of a name, checked; `WrongError` for a size it does not have, or one that the cap does not hold."""
    P, N, cap = sizes.num_ranks, sizes.num_micro_batches, sizes.cap
    try:
        if name == AUTO:
            from compiler.solver import solve

            searched = solve(P, N, _of_one_rank(sizes), cap).schedule
            searched.check()
            return searched
        schedule = SCHEDULES[name].generate(P, N, sizes.chunks)
    except ValueError as error:  # a size this schedule does not have, a cap that nothing fits
        raise WrongError(str(error)) from None
    schedule.check()
    _check_cap(schedule, sizes)
    return schedule


def _check_cap(schedule: Schedule, sizes: _Sizes) -> None:
    if sizes.cap is not None and (held := max(peak_activations(schedule))) > sizes.cap:
        sizes_said = f"{schedule.num_ranks} ranks with {schedule.num_micro_batches} micro-batches"
        raise WrongError(f"{schedule.name} on {sizes_said} holds {held} activations: use --cap {held} or more, or auto")


def _of_one_rank(sizes: _Sizes) -> Costs:
    """Costs where the model is cut into as many stages as there are ranks."""
    costs = sizes.costs or Costs()
    return costs if sizes.num_stages is None else costs.recut(sizes.num_stages, sizes.num_ranks)


def _entry(schedule: Schedule, sizes: _Sizes) -> Entry:
    """A schedule, measured where there are costs, or where it was searched for by some."""
    costs = Costs() if sizes.costs is None and schedule.name == AUTO else sizes.costs
    if costs is None:
        return Entry(schedule.name, schedule)
    stages = num_stages(schedule.placement, schedule.num_ranks)
    try:
        costs = costs if sizes.num_stages is None else costs.recut(sizes.num_stages, stages)
        return Entry(schedule.name, schedule, measure(schedule, costs, sizes.cap))
    except ValueError as error:  # weights of another number of stages
        raise WrongError(str(error)) from None


def _compared(names: Sequence[str], sizes: _Sizes, unit: str) -> Answer:
    """One entry for each name. Costs are those of 1/P of the model, and the cap counts activations of that much."""
    base = _of_one_rank(sizes)
    entries = []
    for name in names:
        cap = None if sizes.cap is None else sizes.cap * _parts(name, sizes.chunks)
        own = replace(sizes, costs=base, num_stages=sizes.num_ranks, cap=cap)
        try:
            entries.append(_entry(_generated(name, own), own))
        except WrongError as error:
            entries.append(Entry(name, fault=str(error)))
    if all(entry.fault for entry in entries):
        raise WrongError(entries[0].fault)
    return Answer(tuple(entries), base, compared=True, cap=sizes.cap, unit=unit)


def _parts(name: str, chunks: int) -> int:
    """Into how many stages a schedule cuts the model's share of a rank."""
    placement = BIDIRECTIONAL if name == AUTO else SCHEDULES[name].placement(chunks)
    return 1 if placement == BIDIRECTIONAL else num_stages(placement, 1)
