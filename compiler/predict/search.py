"""The search for the values of `auto` in a spec: the legal plan that fits and has the shortest predicted step.

Every combination of the open degrees, micro-batches and recompute is a candidate. A candidate is skipped only if a
bound shows that it cannot be the best: no split of the layers and no order of the instructions makes its step short
enough, or its weights and saved activations do not fit. Candidates with the lowest bound come first, so that most of
the others are skipped by a bound that holds for all splits. SMs for communication are tried last, on plans near the
best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any

from compiler.ir import Cut
from compiler.ir.stage_placement import StagePlacement
from compiler.plan.blocks import CutModel, cut_model
from compiler.plan.layer_runs import Moments, stage_placement_of_spec
from compiler.plan.plan import plan_of
from compiler.plan.spec_rates import rank_rates
from compiler.plan.splitting import Splitting, moments_on
from compiler.predict.floor import least_step_s
from compiler.predict.memory import rank_peaks
from compiler.predict.memory_state import missing_anywhere, missing_with
from compiler.predict.predict import predict, time_schedule
from compiler.predict.timed_plan import TimedPlan
from compiler.program.lower import Lowering
from compiler.program.lower.scheduler import QUICK_EFFORT, Scheduler
from compiler.schedule import AUTO
from compiler.schedule.schedule import Schedule
from dsl.closed_forms import ramp
from dsl.closed_forms.stragglers import slowest_factor
from dsl.messages.diagnostics import plural
from dsl.schema import Spec, choices
from dsl.schema.choices import Choice

# --- A partly planned spec: the parts of a plan that a search needs, the cheap ones first
#
# Most candidates of a search lack memory. This shows as soon as the blocks, or their split, are known: long before the
# table of the holders of each parameter.


@dataclass(frozen=True)
class SharedParts:
    """Parts that many outlines share, each made once: cuts by the key of a segment, and moments of schedules."""

    cuts: dict[Hashable, Cut] = field(default_factory=dict)
    moments: dict[Hashable, Moments] = field(default_factory=dict)

    def cut(self, spec: Spec, *, alike: bool) -> CutModel:
        """The cut model of a spec, with shared cuts."""
        model = cut_model(spec, self.cuts, alike=alike)
        self.cuts.update(model.cuts_by_key)
        return model

    def moments_on(self, spec: Spec, placement: StagePlacement, num_ranks: int, within: bool) -> Moments:
        """The moments of each rank at which it holds most under the spec's schedule."""
        key = spec.schedule, ramp.micro_batches(spec)[-1], placement, num_ranks, within
        if key not in self.moments:
            self.moments[key] = moments_on(spec, placement, num_ranks, within)
        return self.moments[key]


@dataclass(frozen=True)
class Outline:
    """The plan of a spec, whose parts are made on first use."""

    spec: Spec
    shared: SharedParts

    @cached_property
    def model(self) -> CutModel:
        """The model, in which one layer stands for all that differ from it only in names."""
        return self.shared.cut(self.spec, alike=True)

    @cached_property
    def least_missing(self) -> tuple[int, int | None]:
        """A lower bound of the bytes that the fullest device lacks, and its pipeline rank.

        The bound is below 0 if the plan may fit. The rank is None if the bound holds for any split of the layers.
        """
        anywhere = self.missing_anywhere
        return (anywhere, None) if anywhere > 0 else self.missing_as_split

    @cached_property
    def missing_anywhere(self) -> int:
        """A lower bound of the bytes that the fullest device lacks with any split of the layers."""
        return missing_anywhere(self._splitting.least_holding, self._splitting.placement)

    @cached_property
    def missing_as_split(self) -> tuple[int, int]:
        """A lower bound of the bytes that the fullest device lacks with the planned split, and its pipeline rank.

        It counts weights, gradients and optimizer state, and what a micro-batch of each stage keeps for its backward,
        times the micro-batches that the schedule has in flight.
        """
        splitting = self._splitting
        return missing_with(splitting.least_holding, splitting.placement, splitting.runs)

    @cached_property
    def lowering(self) -> Lowering:
        """The full plan on its devices."""
        return Lowering(plan_of(self.shared.cut(self.spec, alike=False), self._splitting.runs), rank_rates(self.spec))

    @cached_property
    def _splitting(self) -> Splitting:
        placement = stage_placement_of_spec(self.spec)
        num_stages = placement.num_stages(self.spec.parallel.pipeline)
        return Splitting(self.model, num_stages, placement, self.shared.moments_on)


# --- search

SMS, RECOMPUTE = "sm.communication", "recompute"
NEAR = 1.05  # other numbers of SMs are tried for plans whose step is at most this multiple of the shortest that fits
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal plan, and its result in the search."""

    choice: Choice
    spec: Spec
    bound_s: float = 0.0  # lower bound of a step
    seconds: float | None = None  # of a step; None if the bound was enough
    missing_bytes: int | None = None  # that its fullest device lacks; 0 if it fits, None if memory was not computed
    rank: int | None = None  # pipeline rank of that device; None if `missing_bytes` is a bound for any split

    @property
    def fits(self) -> bool:
        """Whether it is known to fit."""
        return self.missing_bytes == 0


@dataclass(frozen=True)
class Ranking:
    """The candidates of a search: those that fit by time, then slower ones, then those that lack memory.

    `best` fits if any candidate does.
    """

    candidates: tuple[Candidate, ...]
    unexamined: int = 0  # structures that were not examined, if the search was cut
    is_cut: bool = False  # whether the search ended before it had examined all
    is_interrupted: bool = False  # whether a KeyboardInterrupt ended it

    @property
    def best(self) -> Candidate:
        """The fastest candidate that fits or, if none fits, the one that lacks least."""
        return self.candidates[0]

    def why(self, candidate: Candidate) -> str:
        """Why a candidate lost."""
        if candidate is self.best:
            return "the fastest that fits" if candidate.fits else "lacks the least memory"
        if candidate.missing_bytes:
            lacks = f"{candidate.missing_bytes / GIB:.1f} GiB"
            return f"lacks at least {lacks}" if candidate.rank is None else f"lacks {lacks} on rank {candidate.rank}"
        assert self.best.seconds is not None, "every candidate that may be faster was timed"
        seconds = candidate.bound_s if candidate.seconds is None else candidate.seconds
        slower = f"{seconds / self.best.seconds - 1:.1%} slower"
        if slower == "0.0% slower":
            return "no faster"
        return slower if candidate.seconds is not None else f"at least {slower}"


Report = Callable[[float, Candidate | None], None]  # (share of the structures that is done, best that fits so far)


def search(
    spec: Spec,
    opened: Sequence[str],
    structures: Iterable[tuple[Choice, Spec]],
    report: Report = lambda share, best: None,
    is_over: Callable[[], bool] = lambda: False,
    keeps_on_interrupt: bool = False,
) -> Ranking:
    """Rank every plan of `structures` (dsl.load.alternatives) with every value of the other open keys.

    `spec` has the first values of the open keys. As soon as a plan fits, the search ends early if `is_over` says so or,
    with `keeps_on_interrupt`, at a KeyboardInterrupt.
    """
    examined = _ExaminedCandidates()
    structured = [Candidate(choice, structure) for choice, structure in structures]
    left, is_cut, is_interrupted = len(structured), False, False
    try:
        for left in _examine(examined, structured, spec, opened):
            report(1 - left / len(structured), examined.best_candidate)
            if is_over() and examined.best_candidate is not None:
                is_cut = True
                break
    except KeyboardInterrupt:
        if not keeps_on_interrupt or examined.best_candidate is None:
            raise
        is_cut = is_interrupted = True
    if examined.best_candidate is None:
        examined.find_nearest()
    candidates = tuple(sorted(examined.candidates, key=_order))
    return Ranking(candidates, left if is_cut else 0, is_cut, is_interrupted)


def _examine(
    examined: _ExaminedCandidates, structured: Sequence[Candidate], spec: Spec, opened: Sequence[str]
) -> Iterator[int]:
    """Examine the candidates, and yield after each step how many of `structured` are left."""
    opens_recompute = RECOMPUTE in opened
    least = [
        _with_value(candidate, RECOMPUTE, choices.values(candidate.spec, RECOMPUTE)[-1])
        if opens_recompute
        else candidate
        for candidate in structured
    ]
    bounds = examined.bounds_s(spec)
    waiting = [(examined.floor_s(candidate.spec), index, 0) for index, candidate in enumerate(least)]
    heapify(waiting)
    while waiting:
        yield len(waiting)
        bound_s, index, num_bounds = heappop(waiting)
        least[index] = replace(least[index], bound_s=bound_s)
        if num_bounds < len(bounds) and bound_s < examined.best:
            if num_bounds == 0:
                if all(
                    examined.cannot_fit(candidate)
                    for candidate in (_holding_least(structured[index]) if opens_recompute else (structured[index],))
                ):
                    continue
                least[index] = next(
                    tried
                    for tried in _recomputing_more(least[index], opens_recompute)
                    if not examined.cannot_fit(tried)
                )
            heappush(waiting, (max(bound_s, bounds[num_bounds](least[index])), index, num_bounds + 1))
            continue
        for tried in _recomputing_more(least[index], opens_recompute):
            if not examined.look_into(tried).missing_bytes:
                break  # it fits or is too slow, and recomputing more is slower
    if SMS in opened:
        near = examined.best * NEAR
        for candidate in [
            candidate for candidate in examined.candidates if candidate.fits and (candidate.seconds or 0) <= near
        ]:
            for count in choices.values(spec, SMS):
                if count != candidate.spec.sm.communication:
                    yield 0
                    variant = _with_value(candidate, SMS, count)
                    examined.look_into(replace(variant, bound_s=examined.bound_s(variant)))


class _ExaminedCandidates:
    """The candidates that were examined, and the shortest step of those that fit."""

    def __init__(self) -> None:
        self.candidates: list[Candidate] = []
        self.best_candidate: Candidate | None = None  # the fastest that fits
        self._shared = SharedParts()
        self._searched: dict[Hashable, Schedule] = {}  # by choice
        self._last: Outline | None = None  # mostly asked for again at once

    def look_into(self, candidate: Candidate) -> Candidate:
        """Examine a candidate's memory and time as far as it may be the best; returns it with the results."""
        examined = self._look(candidate)
        self.candidates.append(examined)
        if examined.fits and examined.seconds is not None and examined.seconds < self.best:
            self.best_candidate = examined
        return examined

    @property
    def best(self) -> float:
        """The shortest step of those that fit; infinite if none does."""
        return math.inf if self.best_candidate is None else self.best_candidate.seconds or 0.0

    def cannot_fit(self, candidate: Candidate) -> bool:
        """Whether a candidate surely does not fit; if so, it counts as examined."""
        missing = self._missing(candidate)
        self.candidates += [missing] if missing is not None else []
        return missing is not None

    def floor_s(self, spec: Spec) -> float:
        """A lower bound of a step for any split of its layers."""
        return least_step_s(self._outline(spec).model)

    def bounds_s(self, spec: Spec) -> list[Callable[[Candidate], float]]:
        """Lower bounds of a step with the planned split of its layers, the cheapest first."""
        return [self.any_schedule_s, self.bound_s] if spec.schedule.name == AUTO else [self.bound_s]

    def any_schedule_s(self, candidate: Candidate) -> float:
        """A lower bound of a step with any schedule that a search may find."""
        scheduler = Scheduler(candidate.spec, self._outline(candidate.spec).lowering)
        return scheduler.least_searched_s(max(1.0, slowest_factor(candidate.spec.cluster)))

    def bound_s(self, candidate: Candidate) -> float:
        """A lower bound of a step with the planned split of its layers, and with its schedule."""
        return self._time_candidate(candidate, least=True).step.seconds

    def find_nearest(self) -> None:
        """If nothing fits: measure the candidate with the least bound until a measured one lacks least."""
        while self.candidates:
            nearest = min(self.candidates, key=_order)
            if nearest.seconds is not None:
                return
            self.candidates.remove(nearest)
            if nearest.rank is None:
                missing, rank = self._outline(nearest.spec).missing_as_split
                self.candidates.append(replace(nearest, missing_bytes=missing, rank=rank))
            else:
                self.candidates.append(_measure_candidate(nearest, self._time_candidate(nearest)))

    def _outline(self, spec: Spec) -> Outline:
        if self._last is None or self._last.spec is not spec:
            self._last = Outline(spec, self._shared)
        return self._last

    def _time_candidate(self, candidate: Candidate, least: bool = False) -> TimedPlan:
        spec, lowering = candidate.spec, self._outline(candidate.spec).lowering
        return time_schedule(spec, lowering, self._schedule(candidate), least)

    def _schedule(self, candidate: Candidate) -> Schedule:
        """The schedule of a candidate. One that is searched for is kept, as a bound and a look need the same."""
        scheduler = Scheduler(candidate.spec, self._outline(candidate.spec).lowering, effort=QUICK_EFFORT)
        if candidate.spec.schedule.name != AUTO:
            return scheduler.largest()
        key = (*candidate.choice.items(),)
        if key not in self._searched:
            self._searched[key] = scheduler.largest()
        return self._searched[key]

    def _missing(self, candidate: Candidate) -> Candidate | None:
        """The candidate with the bytes that it surely lacks; None if it may fit."""
        missing, rank = self._outline(candidate.spec).least_missing
        return replace(candidate, missing_bytes=missing, rank=rank) if missing > 0 else None

    def _look(self, candidate: Candidate) -> Candidate:
        if candidate.bound_s >= self.best:
            return candidate
        lacking = self._missing(candidate)
        if lacking is not None:
            return lacking
        plan = self._time_candidate(candidate)
        if plan.step.seconds > self.best * NEAR:
            return replace(candidate, seconds=plan.step.seconds)
        return _measure_candidate(candidate, plan)


def _measure_candidate(candidate: Candidate, plan: TimedPlan) -> Candidate:
    """The candidate with the time of its step and what its fullest device lacks."""
    fullest = min(rank_peaks(plan.spec, plan.lowering, plan.schedule), key=lambda rank: rank.free_bytes)
    missing = max(0, -fullest.free_bytes)
    return replace(candidate, seconds=plan.step.seconds, missing_bytes=missing, rank=fullest.pp_rank)


def _recomputing_more(candidate: Candidate, opened: bool) -> Iterator[Candidate]:
    """The candidate and, if recompute is open, those that recompute more, the least first."""
    yield candidate
    if opened:
        values = choices.values(candidate.spec, RECOMPUTE)
        for recompute in reversed(values[: values.index(candidate.spec.recompute)]):
            yield _with_value(candidate, RECOMPUTE, recompute)


def _holding_least(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with the two values of recompute that keep least: whole layers, and all ops.

    Ops keep less than layers if weight gradients are deferred.
    """
    layers, ops, *_ = choices.values(candidate.spec, RECOMPUTE)
    yield from (_with_value(candidate, RECOMPUTE, recompute) for recompute in (layers, ops))


def _with_value(candidate: Candidate, path: str, value: Any) -> Candidate:
    """The candidate with another value of an open key."""
    spec = candidate.spec
    changed: dict[str, Any] = {RECOMPUTE: value}
    if path == SMS:
        changed = {"sm": spec.sm.model_copy(update={"communication": value})}
    return Candidate({**candidate.choice, path: value}, spec.model_copy(update=changed), candidate.bound_s)


def _order(candidate: Candidate) -> tuple[int, float]:
    """Sort key: candidates that fit by time, then those that are too slow by time, then those that lack memory."""
    if candidate.missing_bytes:
        return 2, candidate.missing_bytes
    return int(not candidate.fits), candidate.bound_s if candidate.seconds is None else candidate.seconds


# --- The plans that a search tried, as a table and as JSON: the best first, and for each of the others why it lost

MOST_SHOWN = 12
SHORT = {"sm.communication": "SMs"}  # column heads; other keys show the last part of their path


def table(ranking: Ranking) -> Iterator[tuple[str, ...]]:
    """The column heads, then one row per plan: the values of the open keys, the time of a step, and why it lost."""
    paths = tuple(ranking.best.choice)
    yield (*(SHORT.get(path, path.rpartition(".")[2]) for path in paths), "step", "")
    for candidate in ranking.candidates[:MOST_SHOWN]:
        values = (_word(candidate.choice[path]) for path in paths)
        step = "" if candidate.seconds is None else f"{candidate.seconds:#.4g} s"
        yield (*values, step, ranking.why(candidate))


def line_of(candidate: Candidate) -> str:
    """A plan in a line: `19.32 s with pipeline 16, expert 64`."""
    values = (f"{SHORT.get(path, path.rpartition('.')[2])} {_word(value)}" for path, value in candidate.choice.items())
    return f"{candidate.seconds:#.4g} s with {', '.join(values)}"


def cut_of(ranking: Ranking) -> str:
    """What a search left out; "" if it examined all plans."""
    left = (
        f"{plural(ranking.unexamined, 'plan')} not examined"
        if ranking.unexamined
        else "other values of sm.communication not tried"
    )
    return f"the search was {'interrupted' if ranking.is_interrupted else 'cut'}: {left}" if ranking.is_cut else ""


def document(ranking: Ranking) -> list[dict[str, Any]]:
    """One row per plan, the best first. `seconds` and `missing_bytes` are null if a bound was enough."""
    return [
        {
            "values": {path: _value(value) for path, value in candidate.choice.items()},
            "seconds": candidate.seconds,
            "at_least_s": candidate.bound_s,
            "fits": _fits(candidate),
            "missing_bytes": candidate.missing_bytes,
            "why": ranking.why(candidate),
        }
        for candidate in ranking.candidates
    ]


def _fits(candidate: Candidate) -> bool | None:
    return None if candidate.missing_bytes is None else candidate.fits


def _value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else f"{value:,}"


# --- A run on other devices than its spec names, with as much of its plan as they allow
#
# The batch stays, and with it the samples of each step. The first attempts change only the data ranks, with as many
# expert ranks as divide them. If that breaks a rule or does not fit, the search chooses the degrees, and then the
# schedule too.

Legal = Callable[[tuple[str, ...]], Spec | None]  # the spec with more overrides, or None if it breaks a rule
CanBe = Callable[[tuple[str, ...]], bool]  # whether some values of the keys that the overrides open keep the rules


class RefitError(Exception):
    """The run has no plan for these devices."""


ONE_COPY = "parallel.shard=none"


def refit_overrides(spec: Spec, nodes: int, devices: int, legal: Legal, can_be: CanBe) -> tuple[str, ...]:
    """Overrides `-s` that fit a spec to `nodes` nodes of `devices` devices each. Raises RefitError.

    They may set degrees to `auto`, so that the search finds the fastest plan that fits.
    """
    if spec.cluster.more is not None:
        raise RefitError("the cluster has nodes of several kinds, and it is unknown which of them are left")
    cluster = (f"cluster.nodes={nodes}", f"cluster.node.devices={devices}")
    for degrees in _degree_overrides(spec, nodes * devices):
        changed = legal((*cluster, *degrees))
        if changed is not None and predict(changed).fits:
            return (*cluster, *degrees)
    copies = (ONE_COPY,) if spec.parallel.shard is not None else ()
    opened = (*cluster, *(f"parallel.{name}=auto" for name in ("pipeline", "data", "expert")), *copies)
    for overrides in (opened, (*opened, *_overrides_to_search_schedule(spec))):
        if can_be(overrides):
            return overrides
    raise RefitError(f"no degrees keep the rules there, with a batch of {spec.train.batch.end} sequences")


def _overrides_to_search_schedule(spec: Spec) -> tuple[str, ...]:
    """Overrides that leave the order of forwards and backwards to the search."""
    schedule = spec.schedule
    dropped = [key for key in ("chunks", "file") if getattr(schedule, key) is not None]
    return ("schedule.name=auto", *(f"schedule.{key}=none" for key in dropped))


def _degree_overrides(spec: Spec, world: int) -> Iterator[tuple[str, ...]]:
    """Overrides that change only the data ranks, and the expert ranks as far as necessary."""
    p = spec.parallel
    data, remainder = divmod(world, prod((p.pipeline, p.tensor, p.context)))
    if remainder or not data:
        return
    for expert in range(p.expert, 0, -1):
        if p.expert % expert == 0:
            degrees = f"parallel.data={data}", f"parallel.expert={expert}"
            yield degrees
            if p.shard is not None:
                yield *degrees, ONE_COPY
