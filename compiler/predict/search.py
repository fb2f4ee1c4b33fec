"""What is `auto` in a spec: of all plans that keep the rules, the one that fits and whose step is predicted shortest.

Every combination of the open degrees, micro-batch and recompute is a candidate. A plan is left out unseen only where a
bound says that it cannot be the best: no split of the layers or no order of the instructions makes its step short
enough, or its weights and what its forwards save do not fit. What has the least bound is looked into first, so most are
left out by a bound for all splits. The SMs that communicate are tried last, on the plans near the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any

from compiler.ir import Cut
from compiler.lower import Lowering
from compiler.lower.scheduler import Scheduler
from compiler.plan import make_plan
from compiler.plan.blocks import cut_model
from compiler.plan.holding import kept_bytes, moments_of
from compiler.predict.floor import least_step_s
from compiler.predict.memory_state import device_of, rank_states
from compiler.predict.predict import Timed, memories, timed_on
from compiler.predict.times import twins_of
from compiler.rates.rank_rates import rank_rates
from compiler.schedules import AUTO, stand_in
from dsl import choices, ramp
from dsl.choices import Choice
from dsl.schema import Spec

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
    rank: int | None = None  # the pipeline rank of that device

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
            return f"lacks {candidate.missing_bytes / GIB:.1f} GiB on rank {candidate.rank}"
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
    seen, again = _Seen(), RECOMPUTE in opened
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


class _Seen:
    """What has been looked into, and the shortest step of what fits."""

    def __init__(self) -> None:
        self.candidates: list[Candidate] = []
        self.best = math.inf
        self._cuts: dict[Hashable, Cut] = {}  # by the key of a segment: most plans share them
        self._last: tuple[Spec, Lowering] | None = None  # what has just been planned is mostly looked into next

    def look_into(self, candidate: Candidate) -> Candidate:
        """The candidate with its memory and its time, each only as far as it may be the best."""
        found = self._look(candidate)
        self.candidates.append(found)
        if found.fits and found.seconds is not None:
            self.best = min(self.best, found.seconds)
        return found

    def lacks(self, candidate: Candidate) -> bool:
        """Whether it surely does not fit; then it is seen."""
        missing = self._missing(candidate, self._lowering(candidate.spec))
        self.candidates += [missing] if missing is not None else []
        return missing is not None

    def floor_s(self, spec: Spec) -> float:
        """What a step takes at least, however its layers are split."""
        model = cut_model(spec, self._cuts)
        self._cuts |= {use.segment.key: model.cuts[use.site] for block in model.blocks for use in block.uses}
        return least_step_s(model)

    def bound_s(self, candidate: Candidate) -> float:
        """What a step takes at least, with layers split as they are planned."""
        return self._timed(candidate.spec, self._lowering(candidate.spec), least=True).step.seconds

    def find_nearest(self) -> None:
        """Look into what surely lacks least until it is known to lack least. For where nothing fits."""
        while self.candidates:
            nearest = min(self.candidates, key=_order)
            if nearest.seconds is not None:
                return
            self.candidates.remove(nearest)
            self.candidates.append(_measured(nearest, self._timed(nearest.spec, self._lowering(nearest.spec))))

    def _lowering(self, spec: Spec) -> Lowering:
        """The plan of a spec on its devices. A segment that an earlier plan has is not cut again."""
        if self._last is None or self._last[0] is not spec:
            plan = make_plan(spec, cuts_by_key=self._cuts)
            self._cuts |= plan.cuts_by_key
            self._last = spec, Lowering(plan, rank_rates(spec))
        return self._last[1]

    def _timed(self, spec: Spec, lowering: Lowering, least: bool = False) -> Timed:
        return timed_on(spec, lowering, Scheduler(spec, lowering, effort=EFFORT).largest(), least)

    def _missing(self, candidate: Candidate, lowering: Lowering) -> Candidate | None:
        rank, missing = least_missing(candidate.spec, lowering)
        return replace(candidate, missing_bytes=missing, rank=rank) if missing > 0 else None

    def _look(self, candidate: Candidate) -> Candidate:
        if candidate.bound_s >= self.best:
            return candidate
        spec = candidate.spec
        lowering = self._lowering(spec)
        lacking = self._missing(candidate, lowering)
        if lacking is not None:
            return lacking
        found = self._timed(spec, lowering)
        if found.step.seconds > self.best * NEAR:
            return replace(candidate, seconds=found.step.seconds)
        return _measured(candidate, found)


def _measured(candidate: Candidate, found: Timed) -> Candidate:
    """The candidate with the time of its step and what its fullest device lacks."""
    fullest = max(memories(found), key=lambda rank: rank.peak_bytes - rank.capacity_bytes)
    missing = max(0, fullest.peak_bytes - fullest.capacity_bytes)
    return replace(candidate, seconds=found.step.seconds, missing_bytes=missing, rank=fullest.pp_rank)


def least_missing(spec: Spec, lowering: Lowering) -> tuple[int, int]:
    """The pipeline rank whose device surely lacks most, and the bytes; below 0 where it may fit.

    It holds its weights and their kind all the time, and what forwards keep until it is used: as much as one
    micro-batch of a stage keeps, for as many of them as its schedule has under way.
    """
    plan = lowering.plan
    held: dict[int, tuple[int, int]] = {}  # by stage: what a micro-batch keeps there from F on, and from I on
    for stage, twins in twins_of(plan.stages).items():
        if twins[0] not in held:
            chains = lowering.chains(twins[0], 0)  # what is kept does not depend on the device
            held[twins[0]] = kept_bytes(chains, "F"), kept_bytes(chains, "I")
        held[stage] = held[twins[0]]
    if spec.schedule.name == AUTO:
        schedule = stand_in(plan.stage_placement, plan.mesh.pp, ramp.micro_batches(spec)[-1], prompt=False)
    else:
        schedule = Scheduler(spec, lowering).largest()
    missing = []
    moments = moments_of(schedule, within=False)
    for rank, state in enumerate(rank_states(spec, plan)):
        stages = plan.stages_of(rank)
        most = max(
            sum(under_way * held[s][0] + late * held[s][1] for s, (_, under_way, late) in zip(stages, one, strict=True))
            for one in moments[rank]
        )
        missing.append((state.total + most - device_of(spec, plan, rank).memory, rank))
    most, rank = max(missing, key=lambda each: (each[0], -each[1]))
    return rank, most


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
