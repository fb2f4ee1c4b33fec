"""Edits that make a plan fit. Candidates are planned, and only those that fit are reported, the fastest first.

A candidate changes one key, or more if one is not enough: recompute, micro-batch, ZeRO, offload, deferred weight
gradients, schedule, precision, degrees, and the number of nodes. Less ZeRO is tried beside another edit: it holds more,
and takes less communication. A bound (`Outline.missing_as_split`) rules out
candidates that surely lack memory. The number of candidates that are planned in full is limited, and nothing is random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import prod
from typing import get_args

from compiler.plan.holding import schedule_on
from compiler.plan.layer_runs import stage_placement_of_spec
from compiler.plan.spec_files import schedule_of_file
from compiler.predict.memory import rank_peaks
from compiler.predict.predict import time_schedule
from compiler.predict.prediction import RankMemory
from compiler.predict.search import Outline, SharedParts
from compiler.predict.timed_plan import TimedPlan
from compiler.program.lower.scheduler import QUICK_EFFORT, Scheduler
from compiler.schedule import AUTO, SCHEDULES
from compiler.schedule.schedule import Schedule, max_deferred_gradients
from compiler.schedule.solver import default_cap
from dsl.closed_forms import ramp
from dsl.messages.diagnostics import Span
from dsl.schema import Spec, choices
from dsl.schema.choices import values
from dsl.schema.run import Recompute

MAX_SHOWN = 5
ENOUGH = 2  # edits of one key that fit: with so many, pairs of keys are not tried
MAX_PLANNED = 7  # edits of one key that are planned in full
MAX_PAIRS, MOST_PAIRS = 4, 15  # edits of two keys that are tried, once one fits and while none does
MAX_NEAREST = 3  # edits that are planned in full to find the nearest, if none fits
MAX_LESS_SHARDED = 4  # edits that are planned in full with less of the state sharded
MAX_SEARCHES = 3  # edits whose schedule is searched for, which takes a second each
MARGIN = 0.1  # of a device's memory: an edit that is expected to lack more is not planned in full
# In ascending cost: norms and activations cost almost nothing, the products of attention and of experts the most.
CHEAP = ("rmsnorm", "swiglu", "hyper", "mla_up")
DEAR = ("router", "shared", "qkv", "up", "dense", "attention", "experts", "logits")
WHOLE_LAYER = "layer"
RECOMPUTE, DATA, NODES, ZERO = "recompute", "parallel.data", "cluster.nodes", "parallel.zero"
AXES = ("parallel.pipeline", "parallel.tensor", "parallel.context")  # with NODES they decide the number of data ranks
Setting = tuple[str, str]  # key and value of an override `-s`
Legal = Callable[[Iterable[str]], Spec | None]  # the spec with more overrides, None if it breaks a rule: dsl.load
assert {*CHEAP, *DEAR, WHOLE_LAYER} == set(get_args(Recompute))


@dataclass(frozen=True, slots=True)
class FittingEdit:
    """An edit with which everything fits, and its cost."""

    settings: tuple[Setting, ...]
    seconds: float  # of a step
    change: float  # of the step's time, as a share of the time without the edit
    free_bytes: int  # on the fullest device
    num_devices: int
    needs_more_devices: bool  # whether it needs more devices than the spec has
    is_exact: bool  # whether values keep their precision
    ops: frozenset[str]  # that are recomputed

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as the command line takes them."""
        return tuple(f"{key}={value}" for key, value in self.settings)


@dataclass(frozen=True, slots=True)
class NearestEdit:
    """The edit that lacks least memory, if no edit that was tried makes everything fit."""

    settings: tuple[Setting, ...]
    lacking_bytes: int  # on the fullest device
    pp_rank: int  # pipeline rank of that device
    num_devices: int


@dataclass(frozen=True, slots=True)
class FittingEdits:
    """Edits with which everything fits or, if there are none, the nearest edit."""

    fit: tuple[FittingEdit, ...] = ()
    nearest: NearestEdit | None = None


@dataclass(frozen=True)
class _TriedCandidate:
    """A legal candidate, with a lower bound of the memory it lacks."""

    settings: tuple[Setting, ...]
    outline: Outline
    least_lacking_bytes: int  # bytes; below 0 if it may fit

    @property
    def spec(self) -> Spec:
        return self.outline.spec

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for key, _ in self.settings)

    @property
    def settings_but_recompute(self) -> frozenset[Setting]:
        """All settings but `recompute`."""
        return frozenset((key, value) for key, value in self.settings if key != RECOMPUTE)


def fitting_edits(
    timed: TimedPlan,
    ranks: Sequence[RankMemory],
    legal: Legal,
    origins: Mapping[str, Span],
    opened: Collection[str] = (),
) -> FittingEdits:
    """Edits that make a plan fit: the fastest first, then those of lower precision, then those with more devices.

    If no edit is enough, the result has the one that lacks least. It is empty if the plan fits, or if no edit that was
    tried helps. `ranks` are the plan's memories. `opened` are keys that are `auto`: the search has tried all of their
    degrees and micro-batches, and some of the ops to recompute.
    """
    if all(rank.fits for rank in ranks):
        return FittingEdits()
    search = _EditSearch(timed, ranks, legal, origins)
    all_ladders = [*ladders(timed.spec, opened)]
    for ladder in all_ladders:
        search.climb(ladder)
    search.recompute()
    search.plan_likely()
    if len(search.fitting) < ENOUGH:
        search.combine_edits()
    search.recompute_as_auto()
    search.drop_costly_ops()
    search.shard_less([search.recomputes_of_auto(), *all_ladders])
    search.plan_rest()
    order = sorted(
        (edit for _, edit in search.fitting),
        key=lambda edit: (edit.needs_more_devices, not edit.is_exact, edit.seconds, len(edit.settings)),
    )
    return FittingEdits(tuple(order[:MAX_SHOWN]), None if order else search.nearest())


def ladders(spec: Spec, opened: Collection[str]) -> Iterator[list[Setting]]:
    """For each key that may help, its settings to try, the smallest change first."""
    p, precision = spec.parallel, spec.precision
    of_file = spec.schedule.file is not None  # a schedule file has one size
    yield [(ZERO, str(level)) for level in range(p.zero + 1, 4)]
    if p.copies > 1:
        yield [("parallel.shard", str(size)) for size in choices.shards(spec) if size > p.data // p.copies]
    sizes = [spec.train.micro_batch // factor for factor in (2, 4, 8, 16, 32) if spec.train.micro_batch % factor == 0]
    yield from ([[("train.micro_batch", str(size)) for size in sizes]] if "train.micro_batch" not in opened else [])
    if precision.name in ("fp32", "fp64"):
        yield [("precision", "bf16")]
    elif precision.name != "bf16":
        yield [("precision.moments", "bf16")] if precision.moments in ("fp32", "fp64") else []
    if spec.schedule.name == AUTO and p.pipeline > 1:
        cap = spec.schedule.cap or default_cap(p.pipeline)
        half = f"[{', '.join(str(limit // 2) for limit in cap)}]" if isinstance(cap, tuple) else str(cap // 2)
        yield [("schedule.cap", half)]
    if spec.has_hosts:
        away = [("moments",), ("moments", "master")]
        yield [("offload", _list(state)) for state in away if set(state) > set(spec.offload)]
    if p.pipeline > 1:
        at_once = max_deferred_gradients(schedule_on(spec, stage_placement_of_spec(spec), p.pipeline))
        fewer = dict.fromkeys(at_once * quarters // 4 for quarters in (3, 2, 1, 0))
        yield [("schedule.deferred", str(limit)) for limit in fewer if limit < at_once]
    if not of_file and p.pipeline > 1:
        yield from (
            [("schedule.name", name)]
            for name, row in reversed(SCHEDULES.items())
            if name != spec.schedule.name and not row.facts.holds_all
        )
    for key, degree in (("parallel.expert", p.expert), ("parallel.pipeline", p.pipeline)):
        fixed = of_file if key == "parallel.pipeline" else p.placement is not None  # files fix these degrees
        if key not in opened and not fixed:
            yield [(key, str(degree * factor)) for factor in (2, 4)]
            yield [(key, str(degree // factor)) for factor in (2, 4) if degree % factor == 0]
    if not spec.cluster.more:
        yield [(NODES, str(spec.cluster.nodes * factor)) for factor in (2, 4)]


def following(spec: Spec, settings: Iterable[Setting], origins: Mapping[str, Span]) -> tuple[Setting, ...]:
    """The number of data ranks that follows from other degrees or nodes, if the spec states that number."""
    values, span = dict(settings), origins.get(DATA)
    if span is None or span.text == "auto" or not values.keys() & {*AXES, NODES}:
        return ()
    ranks = prod(int(values.get(axis, getattr(spec.parallel, axis.rpartition(".")[2]))) for axis in AXES)
    devices = int(values.get(NODES, spec.cluster.nodes)) * spec.cluster.node.devices
    return ((DATA, str(max(1, devices // ranks))),)


class _EditSearch:
    """The state of the search: candidates that were tried, and edits that fit."""

    def __init__(
        self,
        base: TimedPlan,
        ranks: Sequence[RankMemory],
        legal: Legal,
        origins: Mapping[str, Span],
    ) -> None:
        self.base, self.legal, self.from_file = base, legal, schedule_of_file(base.spec)
        self.origins = origins
        self.shared = SharedParts(base.plan.cuts_by_key)
        self.least_lacking_bytes, _ = Outline(base.spec, self.shared).missing_as_split
        self.lacking_bytes = -min(rank.free_bytes for rank in ranks)
        self.margin = int(MARGIN * min(rank.capacity_bytes for rank in ranks))
        self.single_edits: list[_TriedCandidate] = []  # edits of one key that lack less than the plan does
        self.helpful: list[_TriedCandidate] = []  # the same, of any number of keys
        self.planned: dict[frozenset[Setting], int] = {}  # planned in full: the bytes that it lacks
        self.fullest: dict[frozenset[Setting], int] = {}  # and the pipeline rank that lacks them
        self.failed: list[
            tuple[frozenset[Setting], frozenset[str]]
        ] = []  # settings but `recompute`, and ops, of those that lack memory
        self.searches = 0  # searches for a schedule so far
        self.attempted: dict[frozenset[Setting], _TriedCandidate | None] = {}
        self.fitting: list[tuple[_TriedCandidate, FittingEdit]] = []

    def expected_lacking_bytes(self, tried: _TriedCandidate) -> int:
        """Bytes that a candidate lacks or, unplanned, is expected to: the bound's error is taken from the base plan."""
        lacks = self.planned.get(frozenset(tried.settings))
        return (
            tried.least_lacking_bytes + max(0, self.lacking_bytes - self.least_lacking_bytes)
            if lacks is None
            else lacks
        )

    def is_likely(self, tried: _TriedCandidate) -> bool:
        """Whether a candidate is worth planning in full."""
        return tried.least_lacking_bytes <= 0 and self.expected_lacking_bytes(tried) <= self.margin

    def is_hopeless(self, tried: _TriedCandidate) -> bool:
        """Whether a candidate surely lacks memory: by the bound, or because one that recomputes more lacks it too."""
        return tried.least_lacking_bytes > 0 or any(
            tried.settings_but_recompute == settings and _ops(tried) <= ops for settings, ops in self.failed
        )

    # ------------------------------------------------------------ candidates

    def climb(self, ladder: Iterable[Setting]) -> None:
        """Try settings of a key until one seems to be enough or does not help, skipping those that break rules."""
        for setting in ladder:
            tried = self.attempt((setting,))
            if tried is not None and (
                tried.least_lacking_bytes >= self.least_lacking_bytes or self.expected_lacking_bytes(tried) <= 0
            ):
                break

    def recompute(self) -> None:
        """Try to recompute as few cheap ops as are enough, then costlier ones as well, and last whole layers."""
        base = self.base.spec.recompute
        cheap, dear = (
            tuple(op for op in ops if op not in base and self.legal((f"{RECOMPUTE}={_list((*base, op))}",)) is not None)
            for ops in (CHEAP, DEAR)
        )
        likely = {cheap} if cheap and self._is_likely_with(cheap) else set()
        for size in range(len(cheap) - 1, 0, -1):  # a set that lacks memory lacks it with fewer ops too
            likely = {
                part
                for part in combinations(cheap, size)
                if all(larger in likely for larger in combinations(cheap, size + 1) if set(part) < set(larger))
                and self._is_likely_with(part)
            }
        for count in range(1, len(dear) + 1):
            if self._is_likely_with((*cheap, *dear[:count])):
                return
        if WHOLE_LAYER not in base:
            self.attempt(((RECOMPUTE, _list([WHOLE_LAYER])),))

    def _is_likely_with(self, ops: Sequence[str]) -> bool:
        tried = self.attempt(((RECOMPUTE, _list((*self.base.spec.recompute, *ops))),))
        return tried is not None and self.is_likely(tried)

    def attempt(self, settings: Sequence[Setting]) -> _TriedCandidate | None:
        """The candidate of some settings; None if they break a rule or were tried before.

        It is kept for later if it lacks less than the plan.
        """
        if frozenset(settings) in self.attempted:
            return None
        self.attempted[frozenset(settings)] = None
        all_settings = (*settings, *following(self.base.spec, settings, self.origins))
        spec = self.legal(f"{key}={value}" for key, value in all_settings)
        if spec is None or (self.from_file is not None and not self._fits_file(spec)):
            return None
        spec = spec.with_files(self.base.spec.files)
        outline = Outline(spec, self.shared)
        tried = _TriedCandidate(all_settings, outline, self._least_lacking_bytes(outline))
        self.attempted[frozenset(settings)] = tried
        if tried.least_lacking_bytes < self.least_lacking_bytes:
            self.helpful.append(tried)
            self.single_edits += [tried] if len(settings) == 1 else []
        return tried

    def _least_lacking_bytes(self, outline: Outline) -> int:
        """A lower bound of what a candidate lacks. Its layers are split only if it may help, as that takes longest."""
        anywhere = outline.missing_anywhere
        return anywhere if anywhere > 0 and anywhere >= self.least_lacking_bytes else outline.missing_as_split[0]

    def _fits_file(self, spec: Spec) -> bool:
        """Whether the schedule file has the spec's number of micro-batches and ranks."""
        assert self.from_file is not None
        same_count = ramp.micro_batches(spec)[-1] == self.from_file.num_micro_batches
        return same_count and spec.parallel.pipeline == self.from_file.num_ranks

    # ------------------------------------------------------------ planned in full

    def plan_likely(self) -> None:
        """Plan candidates that probably fit, but none that recomputes more than one that fits; else any that may."""
        likely = sorted(
            (tried for tried in self.single_edits if self.is_likely(tried)), key=lambda tried: len(_ops(tried))
        )
        turns = Counter[frozenset[str]]()
        order = []  # the first candidate of each key, then the second of each, …
        for tried in sorted(likely, key=lambda tried: tried.keys != {RECOMPUTE}):
            order.append((turns[tried.keys], tried))
            turns[tried.keys] += 1
        for _, tried in sorted(order, key=lambda entry: entry[0])[:MAX_PLANNED]:
            if not any(tried.keys == {RECOMPUTE} and _ops(tried) > ops for ops in self._fitting_ops()):
                self.try_in_full(tried)
        if not self.fitting:
            unplanned = [tried for tried in self.single_edits if frozenset(tried.settings) not in self.planned]
            for tried in sorted(unplanned, key=self.expected_lacking_bytes)[: MAX_PLANNED - len(self.planned)]:
                self.try_in_full(tried)

    def recompute_as_auto(self) -> None:
        """Plan what `recompute = auto` tries and what is likely to fit, least recomputation first, until it fits."""
        candidates = (self._candidate((setting,)) for setting in self.recomputes_of_auto())
        for tried in (tried for tried in candidates if tried is not None and self.is_likely(tried)):
            if any(_ops(tried) >= fitting for fitting in self._fitting_ops()) or self.try_in_full(tried):
                return

    def recomputes_of_auto(self) -> list[Setting]:
        """The values of `recompute = auto` besides the plan's own, those that recompute least first."""
        base = self.base.spec.recompute
        wanted = (tuple(dict.fromkeys((*base, *ops))) for ops in reversed(values(self.base.spec, RECOMPUTE)))
        return [(RECOMPUTE, _list(ops)) for ops in wanted if ops != base]

    def plan_rest(self) -> None:
        """While nothing fits, plan every edit of one key that may fit, before `nearest` says that none does."""
        for tried in sorted(self.single_edits, key=self.expected_lacking_bytes):
            if self.fitting:
                return
            if frozenset(tried.settings) not in self.planned:
                self.try_in_full(tried)

    def shard_less(self, steps: Sequence[Sequence[Setting]]) -> None:
        """Try less sharding by ZeRO, which saves communication, with the first step of each ladder that may be enough.

        `steps`: the ladders of single keys, and recompute as `auto` tries it.
        """
        for level in range(1, self.base.spec.parallel.zero):
            likely = []
            for ladder in steps:
                lowered = (self._candidate(((ZERO, str(level)), setting)) for setting in ladder if setting[0] != ZERO)
                likely += [*islice((tried for tried in lowered if tried is not None and self.is_likely(tried)), 1)]
            if any([self.try_in_full(tried) for tried in likely[:MAX_LESS_SHARDED]]):
                return

    def _candidate(self, settings: Sequence[Setting]) -> _TriedCandidate | None:
        """The candidate of some settings, tried before or not; None if they break a rule or were planned in full."""
        tried = self.attempt(settings) or self.attempted[frozenset(settings)]
        return None if tried is None or frozenset(tried.settings) in self.planned else tried

    def _fitting_ops(self) -> list[frozenset[str]]:
        return [edit.ops for _, edit in self.fitting if edit.settings[0][0] == RECOMPUTE]

    def try_in_full(self, tried: _TriedCandidate) -> bool:
        """Plan a candidate in full; returns whether it fits, and if so adds it to `fitting`."""
        spec = tried.spec
        if self.is_hopeless(tried) or (spec.schedule.name == AUTO and self.searches >= MAX_SEARCHES):
            return False
        schedule, free = self.plan_whole(tried)
        if self.planned[frozenset(tried.settings)] > 0:
            self.failed.append((tried.settings_but_recompute, _ops(tried)))
            return False
        seconds = time_schedule(spec, tried.outline.lowering, schedule).step.seconds
        exact = spec.precision == self.base.spec.precision
        change = seconds / self.base.step.seconds - 1
        world, more_devices = spec.cluster.world, spec.cluster.world > self.base.spec.cluster.world
        edit = FittingEdit(tried.settings, seconds, change, free, world, more_devices, exact, _ops(tried))
        self.fitting.append((tried, edit))
        return True

    def plan_whole(self, tried: _TriedCandidate) -> tuple[Schedule, int]:
        """The schedule of a candidate, and the free bytes of its fullest device. Records those that it lacks in
        `planned`."""
        spec, key = tried.spec, frozenset(tried.settings)
        self.searches += spec.schedule.name == AUTO
        schedule = Scheduler(spec, tried.outline.lowering, effort=QUICK_EFFORT).largest()
        fullest = min(rank_peaks(spec, tried.outline.lowering, schedule), key=lambda rank: rank.free_bytes)
        self.planned[key], self.fullest[key] = -fullest.free_bytes, fullest.pp_rank
        return schedule, fullest.free_bytes

    def nearest(self) -> NearestEdit | None:
        """The tried candidate that lacks least, planned in full; None if none lacks less than the plan."""
        for _ in range(MAX_NEAREST):
            best = min(self.helpful, key=self.expected_lacking_bytes, default=None)
            if best is None or frozenset(best.settings) in self.planned:
                break
            if best.spec.schedule.name == AUTO and self.searches >= MAX_SEARCHES:
                break
            self.plan_whole(best)
        planned = [tried for tried in self.helpful if frozenset(tried.settings) in self.planned]
        best = min(planned, key=self.expected_lacking_bytes, default=None)
        if best is None or self.expected_lacking_bytes(best) >= self.lacking_bytes:
            return None
        key = frozenset(best.settings)
        return NearestEdit(best.settings, self.planned[key], self.fullest[key], best.spec.cluster.world)

    # ------------------------------------------------------------ several keys

    def combine_edits(self) -> None:
        """Try edits of two keys, the likeliest first; if none is enough, of as many as it takes."""
        parts = [tried for tried in self.single_edits if self.planned.get(frozenset(tried.settings), 1) > 0]
        pairs = [pair for pair in combinations(parts, 2) if not pair[0].keys & pair[1].keys]
        pairs.sort(key=lambda pair: sum(self.expected_lacking_bytes(tried) for tried in pair))  # the gain of both
        for count, pair in enumerate(pairs[:MOST_PAIRS]):
            if self.fitting and count >= MAX_PAIRS:
                break
            merged = self.attempt(_merge_settings(pair))
            if merged is not None and self.try_in_full(merged) and len(self.fitting) >= ENOUGH:
                return
        if not self.fitting:
            self._combine_until_fit(parts)

    def drop_costly_ops(self) -> None:
        """Remove costly ops from edits that fit without recomputing them."""
        for index, (tried, edit) in enumerate(self.fitting):
            for op in (op for op in DEAR if op in edit.ops and op not in self.base.spec.recompute):
                fewer = tuple((k, _list(_without(v, op)) if k == RECOMPUTE else v) for k, v in edit.settings)
                trial = self.attempt(tuple(setting for setting in fewer if setting[0] != DATA))
                # The error of the bound is also assumed of `trial`.
                gap = self.planned[frozenset(edit.settings)] - tried.least_lacking_bytes
                if trial is not None and trial.least_lacking_bytes + gap <= 0 and self.try_in_full(trial):
                    tried, edit = self.fitting[index] = self.fitting.pop()

    def _combine_until_fit(self, parts: Sequence[_TriedCandidate]) -> None:
        """Combine edits, those that gain most alone first, until everything fits."""
        pile: list[_TriedCandidate] = []
        for part in sorted(parts, key=self.expected_lacking_bytes):
            if any(part.keys & piled.keys for piled in pile):
                continue
            settings = _merge_settings([*pile, part])
            tried = self.attempt(settings) or self.attempted[frozenset(settings)]
            if tried is not None:
                pile.append(part)
                if self.try_in_full(tried):
                    return


def _merge_settings(several: Iterable[_TriedCandidate]) -> tuple[Setting, ...]:
    """The settings of several edits, without the number of data ranks, which `attempt` derives again."""
    return tuple((key, value) for tried in several for key, value in tried.settings if key != DATA)


def _ops(tried: _TriedCandidate) -> frozenset[str]:
    return frozenset(tried.spec.recompute)


def _without(ops: str, op: str) -> list[str]:
    return [name for name in ops.strip("[]").split(", ") if name != op]


def _list(ops: Iterable[str]) -> str:
    return f"[{', '.join(ops)}]"
