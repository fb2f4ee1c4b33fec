"""What is `auto` in a spec: of all plans that keep the rules, the one that fits and whose step is predicted shortest.

Every combination of the open degrees, micro-batch and recompute is a candidate. A plan is left out unseen only where a
bound says that it cannot be the best: no split of the layers or no order of the instructions makes its step short
enough, or its weights and what its forwards save do not fit. What has the least bound is looked into first, so most are
left out by a bound for all splits. The SMs that communicate are tried last, on the plans near the best.
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
from compiler.predict.memory_state import missing_anywhere, missing_with
from compiler.predict.predict import TimedPlan, memories, predict, timed_on
from compiler.program.lower import Lowering
from compiler.program.lower.scheduler import Scheduler
from dsl.closed_forms import ramp
from dsl.schema import Spec, choices
from dsl.schema.choices import Choice

# --- A spec as far as it has been planned: what a search asks of a plan, the cheap parts before the dear ones
#
# Most plans that a search tries lack memory, which is known once there are blocks, or a split of them: long before
# there is a table of who holds which parameter.


@dataclass(frozen=True)
class Shared:
    """What many outlines have, each made once: cuts, by the key of a segment, and the moments of schedules."""

    cuts: dict[Hashable, Cut] = field(default_factory=dict)
    moments: dict[Hashable, Moments] = field(default_factory=dict)

    def cut(self, spec: Spec, *, alike: bool) -> CutModel:
        """The model of a spec."""
        model = cut_model(spec, self.cuts, alike=alike)
        self.cuts.update(model.cuts_by_key)
        return model

    def moments_on(self, spec: Spec, placement: StagePlacement, num_ranks: int, within: bool) -> Moments:
        """The fullest moments of each rank under the spec's schedule."""
        key = spec.schedule, ramp.micro_batches(spec)[-1], placement, num_ranks, within
        if key not in self.moments:
            self.moments[key] = moments_on(spec, placement, num_ranks, within)
        return self.moments[key]


@dataclass(frozen=True)
class Outline:
    """The plan of a spec; each part is made when it is first asked for."""

    spec: Spec
    shared: Shared

    @cached_property
    def model(self) -> CutModel:
        """The model, in which the first layer stands for all that differ from it in names alone."""
        return self.shared.cut(self.spec, alike=True)

    @cached_property
    def least_missing(self) -> tuple[int, int | None]:
        """Bytes that the fullest device surely lacks, below 0 where it may fit; and its pipeline rank, None where it
        lacks them on any split of the layers."""
        anywhere = missing_anywhere(self._splitting.least_holding, self._splitting.placement)
        return (anywhere, None) if anywhere > 0 else self.missing_as_split

    @cached_property
    def missing_as_split(self) -> tuple[int, int]:
        """Bytes that the fullest device surely lacks with layers split as they are planned, and its pipeline rank.

        It holds its weights and their kind all the time, and what forwards keep until it is used: as much as one
        micro-batch of a stage keeps, for as many of them as its schedule has under way.
        """
        splitting = self._splitting
        return missing_with(splitting.least_holding, splitting.placement, splitting.runs)

    @cached_property
    def lowering(self) -> Lowering:
        """The plan on its devices."""
        return Lowering(plan_of(self.shared.cut(self.spec, alike=False), self._splitting.runs), rank_rates(self.spec))

    @cached_property
    def _splitting(self) -> Splitting:
        placement = stage_placement_of_spec(self.spec)
        num_stages = placement.num_stages(self.spec.parallel.pipeline)
        return Splitting(self.model, num_stages, placement, self.shared.moments_on)


# --- search

SMS, RECOMPUTE = "sm.communication", "recompute"
NEAR = 1.05  # plans for which other numbers of SMs are tried, as a multiple of the shortest step that fits
EFFORT = 0.02  # of the search for the schedule `auto` of a plan that may be the best: some tenths of a second
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that keeps the rules, and how it did."""

    choice: Choice
    spec: Spec
    bound_s: float = 0.0  # its step takes at least as long
    seconds: float | None = None  # of a step; None where the bound was enough
    missing_bytes: int | None = None  # what its fullest device lacks; 0: it fits; None: it was not looked into
    rank: int | None = None  # the pipeline rank of that device; None: it lacks at least so much on any split of layers

    @property
    def fits(self) -> bool:
        """Whether it is known to fit."""
        return self.missing_bytes == 0


@dataclass(frozen=True)
class Ranking:
    """What was found: first what fits, by time; then what does not; then what was left out. `best` fits if any does."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The fastest that fits, or what lacks least."""
        return self.candidates[0]

    def why(self, candidate: Candidate) -> str:
        """Why a candidate lost."""
        if candidate is self.best:
            return "the fastest that fits" if candidate.fits else "lacks least"
        if candidate.missing_bytes:
            lacks = f"{candidate.missing_bytes / GIB:.1f} GiB"
            return f"lacks at least {lacks}" if candidate.rank is None else f"lacks {lacks} on rank {candidate.rank}"
        assert self.best.seconds is not None, "what is no slower has been looked into"
        seconds = candidate.bound_s if candidate.seconds is None else candidate.seconds
        slower = f"{seconds / self.best.seconds - 1:.1%} slower"
        if slower == "0.0% slower":
            return "no faster"
        return slower if candidate.seconds is not None else f"at least {slower}"


def search(
    spec: Spec,
    opened: Sequence[str],
    structures: Iterable[tuple[Choice, Spec]],
    report: Callable[[float], None] = lambda share: None,
) -> Ranking:
    """Every plan of `structures` (dsl.load.alternatives), with every value of the other open keys, ranked.

    `spec` has first values of the open keys. `report` is told which share of the structures has been looked into.
    """
    seen, again = _SeenSteps(), RECOMPUTE in opened
    found = [Candidate(choice, one) for choice, one in structures]
    least = [_with(each, RECOMPUTE, choices.values(each.spec, RECOMPUTE)[-1]) if again else each for each in found]
    waiting = [(seen.floor_s(each.spec), at, False) for at, each in enumerate(least)]
    heapify(waiting)
    while waiting:
        bound_s, at, is_split = heappop(waiting)
        report(1 - len(waiting) / len(found))
        least[at] = replace(least[at], bound_s=bound_s)
        if not is_split and bound_s < seen.best:
            if not all(seen.lacks(each) for each in (_holding_least(found[at]) if again else (found[at],))):
                heappush(waiting, (seen.bound_s(least[at]), at, True))
            continue
        for recompute in reversed(choices.values(least[at].spec, RECOMPUTE)) if again else (None,):
            tried = _with(least[at], RECOMPUTE, recompute) if again else least[at]
            if not seen.look_into(tried).missing_bytes:
                break  # it fits, or is too slow: what computes more again is slower
    if SMS in opened:
        near = seen.best * NEAR
        for candidate in [each for each in seen.candidates if each.fits and (each.seconds or 0) <= near]:
            for count in choices.values(spec, SMS):
                if count != candidate.spec.sm.communication:
                    other = _with(candidate, SMS, count)
                    seen.look_into(replace(other, bound_s=seen.bound_s(other)))
    if not math.isfinite(seen.best):
        seen.find_nearest()
    return Ranking(tuple(sorted(seen.candidates, key=_order)))


class _SeenSteps:
    """What has been looked into, and the shortest step of what fits."""

    def __init__(self) -> None:
        self.candidates: list[Candidate] = []
        self.best = math.inf
        self._shared = Shared()
        self._last: Outline | None = None  # what has just been planned is mostly looked into next

    def look_into(self, candidate: Candidate) -> Candidate:
        """The candidate with its memory and its time, each only as far as it may be the best."""
        found = self._look(candidate)
        self.candidates.append(found)
        if found.fits and found.seconds is not None:
            self.best = min(self.best, found.seconds)
        return found

    def lacks(self, candidate: Candidate) -> bool:
        """Whether it surely does not fit; then it is seen."""
        missing = self._missing(candidate)
        self.candidates += [missing] if missing is not None else []
        return missing is not None

    def floor_s(self, spec: Spec) -> float:
        """What a step takes at least, however its layers are split."""
        return least_step_s(self._outline(spec).model)

    def bound_s(self, candidate: Candidate) -> float:
        """What a step takes at least, with layers split as they are planned."""
        return self._timed(candidate, least=True).step.seconds

    def find_nearest(self) -> None:
        """Look into what surely lacks least until it is known to lack least. For where nothing fits."""
        while self.candidates:
            nearest = min(self.candidates, key=_order)
            if nearest.seconds is not None:
                return
            self.candidates.remove(nearest)
            if nearest.rank is None:
                missing, rank = self._outline(nearest.spec).missing_as_split
                self.candidates.append(replace(nearest, missing_bytes=missing, rank=rank))
            else:
                self.candidates.append(_measured(nearest, self._timed(nearest)))

    def _outline(self, spec: Spec) -> Outline:
        if self._last is None or self._last.spec is not spec:
            self._last = Outline(spec, self._shared)
        return self._last

    def _timed(self, candidate: Candidate, least: bool = False) -> TimedPlan:
        spec, lowering = candidate.spec, self._outline(candidate.spec).lowering
        return timed_on(spec, lowering, Scheduler(spec, lowering, effort=EFFORT).largest(), least)

    def _missing(self, candidate: Candidate) -> Candidate | None:
        """The candidate with what it surely lacks; None where it may fit."""
        missing, rank = self._outline(candidate.spec).least_missing
        return replace(candidate, missing_bytes=missing, rank=rank) if missing > 0 else None

    def _look(self, candidate: Candidate) -> Candidate:
        if candidate.bound_s >= self.best:
            return candidate
        lacking = self._missing(candidate)
        if lacking is not None:
            return lacking
        found = self._timed(candidate)
        if found.step.seconds > self.best * NEAR:
            return replace(candidate, seconds=found.step.seconds)
        return _measured(candidate, found)


def _measured(candidate: Candidate, found: TimedPlan) -> Candidate:
    """The candidate with the time of its step and what its fullest device lacks."""
    fullest = max(memories(found), key=lambda rank: rank.peak_bytes - rank.capacity_bytes)
    missing = max(0, fullest.peak_bytes - fullest.capacity_bytes)
    return replace(candidate, seconds=found.step.seconds, missing_bytes=missing, rank=fullest.pp_rank)


def _holding_least(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with the most computed again: layers keep least of a forward, ops less of it where weight gradients
    are put off."""
    layers, ops, *_ = choices.values(candidate.spec, RECOMPUTE)
    yield from (_with(candidate, RECOMPUTE, each) for each in (layers, ops))


def _with(candidate: Candidate, path: str, value: Any) -> Candidate:
    """The candidate with another value of an open key."""
    spec = candidate.spec
    changed: dict[str, Any] = {RECOMPUTE: value}
    if path == SMS:
        changed = {"sm": spec.sm.model_copy(update={"communication": value})}
    return Candidate({**candidate.choice, path: value}, spec.model_copy(update=changed), candidate.bound_s)


def _order(candidate: Candidate) -> tuple[int, float]:
    """What fits, then what is slower than the best that fits, each by its time; then what lacks memory."""
    if candidate.missing_bytes:
        return 2, candidate.missing_bytes
    return int(not candidate.fits), candidate.bound_s if candidate.seconds is None else candidate.seconds


# --- The plans that a search tried, for people and for programs: the best first, each other with why it lost

MOST_SHOWN = 12
SHORT = {"sm.communication": "SMs"}  # heads of columns; else the last part of the path


def table(ranking: Ranking) -> Iterator[tuple[str, ...]]:
    """Heads, then a row a plan: the values that were open, seconds of a step, and why it lost."""
    paths = tuple(ranking.best.choice)
    yield (*(SHORT.get(path, path.rpartition(".")[2]) for path in paths), "step", "")
    for candidate in ranking.candidates[:MOST_SHOWN]:
        values = (_word(candidate.choice[path]) for path in paths)
        step = "" if candidate.seconds is None else f"{candidate.seconds:#.4g} s"
        yield (*values, step, ranking.why(candidate))


def document(ranking: Ranking) -> list[dict[str, Any]]:
    """A row a plan, the best first. `seconds` and `missing_bytes` are null where a bound was enough."""
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


# --- A run on other devices than its spec names: as much of its plan as they allow
#
# The batch stays, and with it the samples of each step. First the data ranks change alone, with as many of the expert
# ranks as divide them; where that breaks a rule or does not fit, the degrees are left to the search; then the schedule.

Legal = Callable[[tuple[str, ...]], Spec | None]  # the spec with more overrides, or None where it breaks a rule
CanBe = Callable[[tuple[str, ...]], bool]  # whether any values of the keys that more overrides open keep the rules


class RefitError(Exception):
    """No plan of the run is for these devices."""


def refitted(spec: Spec, nodes: int, devices: int, legal: Legal, can_be: CanBe) -> tuple[str, ...]:
    """Overrides of the spec, as of `-s`, for `nodes` nodes of `devices` devices each. Raises RefitError.

    They may open degrees with `auto`: the fastest plan that fits is for the search to find.
    """
    if spec.cluster.more is not None:
        raise RefitError("the cluster has nodes of several kinds, and which of them are left is not known")
    there = (f"cluster.nodes={nodes}", f"cluster.node.devices={devices}")
    for kept in _kept(spec, nodes * devices):
        found = legal((*there, *kept))
        if found is not None and predict(found).fits:
            return (*there, *kept)
    opened = (*there, *(f"parallel.{name}=auto" for name in ("pipeline", "data", "expert")))
    for overrides in (opened, (*opened, *_searched_schedule(spec))):
        if can_be(overrides):
            return overrides
    raise RefitError(f"no degrees keep the rules there, with a batch of {spec.train.batch.end} sequences")


def _searched_schedule(spec: Spec) -> tuple[str, ...]:
    """Overrides that leave the order of forwards and backwards to the search."""
    schedule = spec.schedule
    dropped = [key for key in ("chunks", "file") if getattr(schedule, key) is not None]
    return ("schedule.name=auto", *(f"schedule.{key}=none" for key in dropped))


def _kept(spec: Spec, world: int) -> Iterator[tuple[str, ...]]:
    """Overrides that change the data ranks alone, and expert ranks as far as they must."""
    p = spec.parallel
    data, rest = divmod(world, prod((p.pipeline, p.tensor, p.context)))
    if rest or not data:
        return
    for expert in range(p.expert, 0, -1):
        if p.expert % expert == 0:
            yield f"parallel.data={data}", f"parallel.expert={expert}"
