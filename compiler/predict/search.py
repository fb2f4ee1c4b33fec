"""What is `auto` in a spec: of all plans that keep the rules, the one that fits and whose step is predicted shortest.

Every combination of the open degrees, micro-batch and recompute is a candidate. A plan is left out unseen only where a
bound says that it cannot be the best: no split of the layers or no order of the instructions makes its step short
enough, or its weights and what its forwards save do not fit. What has the least bound is looked into first, so most are
left out by a bound for all splits. The SMs that communicate are tried last, on the plans near the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any

from compiler.predict.floor import least_step_s
from compiler.predict.outline import Outline, Shared
from compiler.predict.predict import Timed, memories, timed_on
from compiler.program.lower.scheduler import Scheduler
from dsl.schema import Spec, choices
from dsl.schema.choices import Choice

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

    def _timed(self, candidate: Candidate, least: bool = False) -> Timed:
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


def _measured(candidate: Candidate, found: Timed) -> Candidate:
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
