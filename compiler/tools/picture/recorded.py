"""The times of a run's trace: when every action ran, and how long actions take.

Reads `trace/rank_<r>.jsonl`, with one line per traced step: {"step": 3, "program": "train_8", "of": digest of the
build's programs, "actions": [["F0.0", start, end], …]}. Times are in µs of a clock that the ranks share.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from compiler.files.text import TextFileError, read_text
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.weights import as_weight
from runtime.build.run_copy import PROGRAM
from runtime.contract.actions import Action, actions_of
from runtime.contract.names import ProgramName

WARM_UP = 4  # the first 1/WARM_UP of a run's traced steps is left out, while caches and allocators warm up
MOST_BYTES = 1 << 30  # largest trace that is read

Span = tuple[float, float]  # µs


class TraceError(ValueError):
    """A trace cannot be read, or belongs to another schedule."""


class OrderError(ValueError):
    """A rank ran other actions than planned, or in another order."""


@dataclass(frozen=True)
class RecordedTimes:
    """Medians over steps and devices of a pipeline rank. `samples`: all durations in µs, by pipeline rank and position
    in its order."""

    num_steps: int
    spans: tuple[tuple[Span, ...], ...]
    samples: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def makespan(self) -> float:
        """µs."""
        return max(rank[-1][1] for rank in self.spans if rank)


Line = dict[str, Any]


def read_trace(run: Path, world: int) -> list[dict[int, Line]]:
    """Return the traced steps of each world rank. Raises TraceError with the path of a missing or damaged file.

    An incomplete last line, as a killed run may leave, is ignored.
    """
    ranks = []
    for rank in range(world):
        path = run / "trace" / f"rank_{rank}.jsonl"
        try:
            complete, _, _ = read_text(path, MOST_BYTES).rpartition("\n")
        except TextFileError as error:
            raise TraceError(f"the run has no readable trace: {error}") from None
        texts = complete.split("\n") if complete else []
        ranks.append({line["step"]: line for line in (_line(path, i, t) for i, t in enumerate(texts, 1))})
    return ranks


def steps_of_current_programs(run: Path, trace: Sequence[Mapping[int, Line]]) -> tuple[list[dict[int, Line]], int]:
    """Keep the steps of a trace that ran the run's last programs, and count all other steps.

    A run that was resumed with another plan has steps of both. If the run folder has no digest, all steps are kept.
    """
    path = run / PROGRAM
    if not path.exists():
        return [dict(rank) for rank in trace], 0
    wanted = read_text(path, 1000).strip()
    if not re.fullmatch("[0-9a-f]{64}", wanted, re.ASCII):
        raise TraceError(f"{path} is not a digest: the steps of the last plan cannot be identified")
    traced = [{step: line for step, line in rank.items() if line.get("of") == wanted} for rank in trace]
    other_steps = {step for rank in trace for step, line in rank.items() if line.get("of") != wanted}
    if other_steps and not traced[0]:
        raise TraceError(
            f"no step of the present plan was traced yet, only {len(other_steps):,} of the plan before the resume;"
            " steps 1 to 32, 64, 128, 256, … are traced"
        )
    return traced, len(other_steps)


def programs_of(trace: Sequence[Mapping[int, Line]]) -> tuple[str, ...]:
    """Return the names of the programs in a trace, the one with most micro-batches last."""
    names = {line["program"] for line in trace[0].values()}
    return tuple(sorted(names, key=lambda name: (ProgramName(name).trains, num_micro_batches(name), name)))


def num_micro_batches(program: str) -> int:
    """Return 8 for train_8. Raises TraceError for any other name."""
    number = program.rpartition("_")[2]
    if not (number.isascii() and number.isdigit() and len(number) < 7):
        raise TraceError(f"{program[:40]!r} is not the name of a program")
    return int(number)


def measure(schedule: Schedule, trace: Sequence[Mapping[int, Line]], program: str) -> RecordedTimes:
    """Align the steps that all ranks traced. World ranks are pipeline-major: a pipeline rank has consecutive ones.

    Raises OrderError with the rank and the first action that differs from the plan, TraceError if no step is complete.
    """
    copies = len(trace) // schedule.num_ranks
    steps = [step for step, line in trace[0].items() if line["program"] == program and all(step in r for r in trace)]
    if not steps:
        raise TraceError(f"no step of {program} was traced by every rank")
    steps = steps[math.ceil(len(steps) / WARM_UP) if len(steps) >= WARM_UP else 0 :]
    planned = [[str(step) for step in steps_of_rank] for steps_of_rank in schedule.actions]
    spans: list[list[list[Span]]] = [[[] for _ in rank] for rank in planned]
    for step in steps:
        begin = min(line["actions"][0][1] for rank in trace for line in [rank[step]] if line["actions"])
        for world_rank, lines in enumerate(trace):
            rank = world_rank // copies
            ran = lines[step]["actions"]
            _check_order(rank, step, planned[rank], [label for label, _, _ in ran])
            for place, (_, start, end) in zip(spans[rank], ran, strict=True):
                place.append((start - begin, end - begin))
    return RecordedTimes(
        num_steps=len(steps),
        spans=tuple(tuple(_medians(place) for place in rank) for rank in spans),
        samples=tuple(tuple(tuple(end - start for start, end in place) for place in rank) for rank in spans),
    )


def fit_costs(schedule: Schedule, measured: RecordedTimes) -> Costs:
    """Fit costs in ms to the medians: a time per kind of action, a weight per stage, a time per kind of pair.

    The fit is least squares of logarithms. Kinds that did not run are filled in, with I and W as halves of B. Latency
    is the median delay of messages that a rank waited for. Numbers are rounded to the resolution of a µs clock.
    """
    stages = schedule.num_stages
    lone: dict[tuple[str, int], list[float]] = {}
    for steps, samples in zip(schedule.actions, measured.samples, strict=True):
        for step, times in zip(steps, samples, strict=True):
            if isinstance(step, Action):
                lone.setdefault((step.kind, step.stage), []).extend(times)
    medians = {key: max(1e-3, statistics.median(times) / 1000) for key, times in sorted(lone.items())}
    kinds, weights = _factors(medians, stages)
    cost_of = {kind: _exact(time) for kind, time in kinds.items()}
    backward = (
        cost_of.get("B", cost_of.get("I", Fraction(0)) + cost_of.get("W", Fraction(0)))
        or cost_of.get("F", Fraction(1)) * 2
    )
    costs = Costs(
        F=cost_of.get("F", backward / 2),
        I=cost_of.get("I", _exact(float(backward / 2))),
        W=cost_of.get("W", _exact(float(backward / 2))),
        B=cost_of.get("B"),
        latency=_latency(schedule, measured),
        stages=tuple(Fraction(str(round(weight, 4))) for weight in weights) if stages > 1 else (),
    )
    pairs = _pairs(schedule, measured, costs)
    return Costs(costs.F, costs.I, costs.W, costs.B, pairs, costs.latency, costs.stages)


def json_of_costs(costs: Costs) -> str:
    """Return the table that `dsc schedule --costs FILE` reads. Times are in ms."""
    table: dict[str, Any] = {kind: float(costs.lone_time(kind)) for kind in "FIW"}
    if costs.B is not None:
        table["B"] = float(costs.B)
    table["pairs"] = {kinds: float(time) for kinds, time in costs.pairs}
    table["latency"] = float(costs.latency)
    if costs.stages:
        table["stages"] = [float(as_weight(weight).F) for weight in costs.stages]  # the same for all kinds
    return json.dumps(table, indent=2) + "\n"


# ---------------------------------------------------------------- parts


def _line(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise TraceError(f"{path}:{number} is not JSON") from None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int) or not isinstance(line.get("program"), str):
        raise TraceError(f"{path}:{number} is not a line of a trace")
    actions = line.get("actions")
    if not isinstance(actions, list) or not all(map(_is_span, actions)):
        raise TraceError(f'{path}:{number}: "actions" must be a list of [label, start, end]')
    if any(later[1] < earlier[2] for earlier, later in pairwise(actions)):
        raise TraceError(f"{path}:{number}: actions overlap in time")
    return line


def _is_span(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[0], str):
        return False
    return all(type(time) in (int, float) and 0 <= time < 1e18 for time in value[1:]) and value[1] <= value[2]


def _check_order(rank: int, step: int, planned: Sequence[str], ran: Sequence[str]) -> None:
    if list(planned) == list(ran):
        return
    place = next((i for i, (a, b) in enumerate(zip(planned, ran, strict=False)) if a != b), min(len(planned), len(ran)))
    first, second = (labels[place] if place < len(labels) else "nothing" for labels in (planned, ran))
    raise OrderError(f"rank {rank}, step {step}: {second[:40]} ran where {first} was planned, at position {place}")


def _medians(spans: Sequence[Span]) -> Span:
    """Return the median start and the median end. As each start is before its end, so is the median start."""
    return statistics.median(start for start, _ in spans), statistics.median(end for _, end in spans)


def _factors(medians: Mapping[tuple[str, int], float], stages: int) -> tuple[dict[str, float], list[float]]:
    """Fit time(kind, stage) ≈ kind · weight by least squares of logarithms. The mean logarithm of the weights is 0."""
    kinds = dict.fromkeys(sorted({kind for kind, _ in medians}), 0.0)
    weights = [0.0] * stages
    logs = {key: math.log(time) for key, time in medians.items()}
    for _ in range(50):
        for kind in kinds:
            kinds[kind] = statistics.fmean(v - weights[stage] for (k, stage), v in logs.items() if k == kind)
        for stage in range(stages):
            residuals = [v - kinds[kind] for (kind, s), v in logs.items() if s == stage]
            weights[stage] = statistics.fmean(residuals) if residuals else 0.0
    mean = statistics.fmean(weights)
    return {kind: math.exp(v + mean) for kind, v in kinds.items()}, [math.exp(v - mean) for v in weights]


def _pairs(schedule: Schedule, measured: RecordedTimes, costs: Costs) -> tuple[tuple[str, Fraction], ...]:
    by_kinds: dict[str, list[float]] = {}
    for rank, (steps, samples) in enumerate(zip(schedule.actions, measured.samples, strict=True)):
        for step, times in zip(steps, samples, strict=True):
            actions = actions_of(step)
            if len(actions) == 2:
                kinds = "".join(sorted(action.kind for action in actions))
                lone = sum(costs.lone_time(action.kind) for action in actions)
                weighted = sum(costs.step_time(action, rank) for action in actions)
                by_kinds.setdefault(kinds, []).extend(time / 1000 * float(lone / weighted) for time in times)
    return tuple((kinds, _exact(max(1e-3, statistics.median(times)))) for kinds, times in sorted(by_kinds.items()))


def _latency(schedule: Schedule, measured: RecordedTimes) -> Fraction:
    """Return the median ms from the end of a step to the start of the step that waited for its message."""
    ends: dict[tuple[bool, int, int], float] = {}
    for steps, spans in zip(schedule.actions, measured.spans, strict=True):
        for step, (_, end) in zip(steps, spans, strict=True):
            ends |= {(a.kind == "F", a.stage, a.micro_batch): end for a in actions_of(step) if a.kind != "W"}
    delays = []
    for rank, (steps, spans) in enumerate(zip(schedule.actions, measured.spans, strict=True)):
        for k, (step, (start, _)) in enumerate(zip(steps, spans, strict=True)):
            before = spans[k - 1][1] if k else 0.0
            arrivals = []
            for a in actions_of(step):
                stage = a.stage + (-1 if a.kind == "F" else 1)
                sender = (a.kind == "F", stage, a.micro_batch)
                if a.kind != "W" and sender in ends:
                    owner = schedule.rank_of(stage, a.micro_batch)
                    arrivals += [ends[sender]] if owner != rank else []
            if arrivals and max(arrivals) > before:
                delays.append(max(0.0, start - max(arrivals)))
    return _exact(statistics.median(delays) / 1000) if delays else Fraction(0)


def _exact(ms: float) -> Fraction:
    return Fraction(f"{ms:.4f}")
