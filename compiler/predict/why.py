"""Edits that would make a plan fit: candidates are planned, and only what then fits is said, the fastest first.

A candidate changes one key, or one more where one is not enough: what is computed again, micro-batch, owners of the
optimizer, schedule, precision, degrees, and the number of nodes. What surely lacks memory is left out by a bound
(Outline.missing_as_split). How many are planned whole is bounded, and nothing is drawn by lot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import get_args

from compiler.plan.spec_files import schedule_of_file
from compiler.predict.memory import rank_memories
from compiler.predict.predict import TimedPlan, timed_on
from compiler.predict.prediction import RankMemory
from compiler.predict.search import Outline, Shared
from compiler.program.lower.scheduler import Scheduler
from compiler.schedule import AUTO, SCHEDULES
from compiler.schedule.schedule import Schedule
from compiler.schedule.solver import default_cap
from dsl.closed_forms import ramp
from dsl.messages.diagnostics import Span
from dsl.schema import Spec
from dsl.schema.run import Recompute

MAX_SHOWN = 5
ENOUGH = 2  # edits that fit: where there are so many of one key, no two keys are tried
MAX_PLANNED = 7  # edits of one key that are planned whole
MAX_PAIRS, MOST_PAIRS = 4, 15  # edits of two keys that are tried, and where nothing has been found yet
MAX_NEAREST = 3  # edits that are planned whole to find the nearest, where none fits
MAX_SEARCHES = 3  # edits with which the schedule is searched for: some seconds each
MARGIN = 0.1  # of a device: what is expected to lack more is not worth planning whole
# Cheap ones first: norms and activations cost next to nothing, the products of attention and of experts the most.
CHEAP = ("rmsnorm", "swiglu", "hyper", "mla_up")
DEAR = ("router", "shared", "qkv", "up", "dense", "attention", "experts", "logits")
WHOLE = "layer"
RECOMPUTE, DATA, NODES = "recompute", "parallel.data", "cluster.nodes"
OF_WORLD = ("parallel.pipeline", NODES)  # what decides how many data ranks there are
Setting = tuple[str, str]  # key, value: as `-s` takes them
Legal = Callable[[Iterable[str]], Spec | None]  # what more overrides make of the spec: dsl.load.variants
assert {*CHEAP, *DEAR, WHOLE} == set(get_args(Recompute))


@dataclass(frozen=True, slots=True)
class Way:
    """An edit with which everything fits, and what it costs."""

    settings: tuple[Setting, ...]
    seconds: float  # of a step
    change: float  # of the step, as a share of that without the edit
    free_bytes: int  # on the fullest device
    num_devices: int
    more_devices: bool  # than without the edit
    exact: bool  # whether values are as precise as without the edit
    ops: frozenset[str]  # that are computed again

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as the command line takes them."""
        return tuple(f"{key}={value}" for key, value in self.settings)


@dataclass(frozen=True, slots=True)
class Nearest:
    """An edit with which less is lacking, where with none that was tried all fits."""

    settings: tuple[Setting, ...]
    lacking_bytes: int  # of its fullest device
    pp_rank: int  # of that device
    num_devices: int


@dataclass(frozen=True, slots=True)
class FittingEdits:
    """Edits with which everything fits; where there are none, what comes nearest, if anything does."""

    fit: tuple[Way, ...] = ()
    nearest: Nearest | None = None


@dataclass(frozen=True)
class _TriedCandidate:
    """A legal candidate with what it surely lacks, in bytes; below 0 where it may fit."""

    settings: tuple[Setting, ...]
    outline: Outline
    least: int

    @property
    def spec(self) -> Spec:
        return self.outline.spec

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for key, _ in self.settings)

    @property
    def others(self) -> frozenset[Setting]:
        """All but what is computed again."""
        return frozenset(setting for setting in self.settings if setting[0] != RECOMPUTE)


def ways_to_fit(
    found: TimedPlan,
    ranks: Sequence[RankMemory],
    legal: Legal,
    origins: Mapping[str, Span],
    opened: Collection[str] = (),
) -> FittingEdits:
    """Edits with which a plan that does not fit does: the fastest first, then those of less precision, then those with
    more devices; or the edit with which it lacks least.

    `ranks`: its memories. `opened`: keys that are `auto`, of which all degrees and micro-batches were tried, and some
    of what can be computed again. Empty where everything fits, or nothing tried helps.
    """
    if all(rank.fits for rank in ranks):
        return FittingEdits()
    looking = _Looking(found, ranks, legal, origins)
    for ladder in ladders(found.spec, opened):
        looking.climb(ladder)
    looking.recompute()
    looking.plan_likely()
    if len(looking.found) < ENOUGH:
        looking.put_together()
    looking.lighten()
    order = sorted(
        (way for _, way in looking.found),
        key=lambda way: (way.more_devices, not way.exact, way.seconds, len(way.settings)),
    )
    return FittingEdits(tuple(order[:MAX_SHOWN]), None if order else looking.nearest())


def ladders(spec: Spec, opened: Collection[str]) -> Iterator[list[Setting]]:
    """Values of one key, the least change first."""
    p, precision = spec.parallel, spec.precision
    of_file = spec.schedule.file is not None  # it is of one size
    yield [("parallel.zero", str(level)) for level in range(p.zero + 1, 4)]
    sizes = [spec.train.micro_batch // by for by in (2, 4, 8, 16, 32) if spec.train.micro_batch % by == 0]
    yield from ([[("train.micro_batch", str(size)) for size in sizes]] if "train.micro_batch" not in opened else [])
    if precision.name in ("fp32", "fp64"):
        yield [("precision", "bf16")]
    elif precision.name != "bf16":
        yield [("precision.moments", "bf16")] if precision.moments in ("fp32", "fp64") else []
    if spec.schedule.name == AUTO and p.pipeline > 1:
        cap = spec.schedule.cap or default_cap(p.pipeline)
        half = f"[{', '.join(str(each // 2) for each in cap)}]" if isinstance(cap, tuple) else str(cap // 2)
        yield [("schedule.cap", half)]
    if not of_file and p.pipeline > 1:
        yield from (
            [("schedule.name", name)]
            for name, row in reversed(SCHEDULES.items())
            if name != spec.schedule.name and not row.facts.holds_all
        )
    for key, now in (("parallel.expert", p.expert), ("parallel.pipeline", p.pipeline)):
        fixed = of_file if key == "parallel.pipeline" else p.placement is not None  # a file is of one size
        if key not in opened and not fixed:
            yield [(key, str(now * by)) for by in (2, 4)]
            yield [(key, str(now // by)) for by in (2, 4) if now % by == 0]
    if not spec.cluster.more:
        yield [(NODES, str(spec.cluster.nodes * by)) for by in (2, 4)]


class _Looking:
    """What has been tried, and what was found to fit."""

    def __init__(
        self,
        base: TimedPlan,
        ranks: Sequence[RankMemory],
        legal: Legal,
        origins: Mapping[str, Span],
    ) -> None:
        self.base, self.legal, self.given = base, legal, schedule_of_file(base.spec)
        span = origins.get(DATA)
        self.data_is_written = span is not None and span.text != "auto"
        self.shared = Shared(base.plan.cuts_by_key)
        self.least, _ = Outline(base.spec, self.shared).missing_as_split
        self.lacks = max(rank.peak_bytes - rank.capacity_bytes for rank in ranks)
        self.margin = int(MARGIN * min(rank.capacity_bytes for rank in ranks))
        self.tried: list[_TriedCandidate] = []  # of one key, that lack less than the plan does
        self.less: list[_TriedCandidate] = []  # of any number of keys
        self.planned: dict[frozenset[Setting], int] = {}  # what those that were planned whole lack
        self.fullest: dict[frozenset[Setting], int] = {}  # and the pipeline rank that lacks it
        self.failed: list[tuple[frozenset[Setting], frozenset[str]]] = []  # of those that lack: others, ops
        self.searches = 0  # for schedules
        self.seen: dict[frozenset[Setting], _TriedCandidate | None] = {}
        self.found: list[tuple[_TriedCandidate, Way]] = []

    def expected(self, tried: _TriedCandidate) -> int:
        """What it lacks, or is expected to: the bound is as kind to it as it is to the plan that does not fit."""
        lacks = self.planned.get(frozenset(tried.settings))
        return tried.least + max(0, self.lacks - self.least) if lacks is None else lacks

    def is_likely(self, tried: _TriedCandidate) -> bool:
        """Whether it is worth planning whole."""
        return tried.least <= 0 and self.expected(tried) <= self.margin

    def is_hopeless(self, tried: _TriedCandidate) -> bool:
        """Whether it lacks memory for sure: by the bound, or as one that computes no less again lacks it."""
        return tried.least > 0 or any(tried.others == others and _ops(tried) <= ops for others, ops in self.failed)

    # ------------------------------------------------------------ candidates

    def climb(self, ladder: Iterable[Setting]) -> None:
        """Try values of a key until one seems to be enough, or makes it worse; those that break rules are passed."""
        for setting in ladder:
            tried = self.attempt((setting,))
            if tried is not None and (tried.least >= self.least or self.expected(tried) <= 0):
                break

    def recompute(self) -> None:
        """Ops computed again: of the cheap ones as few as may do, then dearer ones besides; or else whole layers."""
        now = self.base.spec.recompute
        cheap, dear = (
            tuple(op for op in ops if op not in now and self.legal((f"{RECOMPUTE}={_list((*now, op))}",)) is not None)
            for ops in (CHEAP, DEAR)
        )
        likely = {cheap} if cheap and self._is_recomputed(cheap) else set()
        for size in range(len(cheap) - 1, 0, -1):  # what lacks memory with all of them lacks it with fewer
            likely = {
                part
                for part in combinations(cheap, size)
                if all(more in likely for more in combinations(cheap, size + 1) if set(part) < set(more))
                and self._is_recomputed(part)
            }
        for count in range(1, len(dear) + 1):
            if self._is_recomputed((*cheap, *dear[:count])):
                return
        if WHOLE not in now:
            self.attempt(((RECOMPUTE, _list([WHOLE])),))

    def _is_recomputed(self, more: Sequence[str]) -> bool:
        tried = self.attempt(((RECOMPUTE, _list((*self.base.spec.recompute, *more))),))
        return tried is not None and self.is_likely(tried)

    def attempt(self, settings: Sequence[Setting]) -> _TriedCandidate | None:
        """A candidate, if it keeps the rules and has not been seen; it is kept where it lacks less than the plan."""
        if frozenset(settings) in self.seen:
            return None
        self.seen[frozenset(settings)] = None
        whole = (*settings, *self._following(settings))
        spec = self.legal(f"{key}={value}" for key, value in whole)
        if spec is None or (self.given is not None and not self._is_of_file(spec)):
            return None
        spec = spec.with_files(self.base.spec.files)
        outline = Outline(spec, self.shared)
        tried = _TriedCandidate(whole, outline, outline.missing_as_split[0])
        self.seen[frozenset(settings)] = tried
        if tried.least < self.least:
            self.less.append(tried)
            self.tried += [tried] if len(settings) == 1 else []
        return tried

    def _following(self, settings: Sequence[Setting]) -> tuple[Setting, ...]:
        """Where data ranks are a number in the spec: the number that the edit leaves."""
        values = {key: int(value) for key, value in settings if key in OF_WORLD}
        if not values or not self.data_is_written:
            return ()
        spec = self.base.spec
        p, nodes = spec.parallel, values.get(NODES, spec.cluster.nodes)
        ranks = values.get("parallel.pipeline", p.pipeline) * p.tensor * p.context
        return ((DATA, str(max(1, nodes * spec.cluster.node.devices // ranks))),)

    def _is_of_file(self, spec: Spec) -> bool:
        """Whether the schedule's file has this size."""
        assert self.given is not None
        same = ramp.micro_batches(spec)[-1] == self.given.num_micro_batches
        return same and spec.parallel.pipeline == self.given.num_ranks

    # ------------------------------------------------------------ planned whole

    def plan_likely(self) -> None:
        """Plan what probably fits; what computes more again than one that fits is left out. Else, what may fit."""
        likely = sorted((tried for tried in self.tried if self.is_likely(tried)), key=lambda each: len(_ops(each)))
        turns = Counter[frozenset[str]]()
        order = []  # of each key the first, then the second of each
        for tried in sorted(likely, key=lambda each: each.keys != {RECOMPUTE}):
            order.append((turns[tried.keys], tried))
            turns[tried.keys] += 1
        for _, tried in sorted(order, key=lambda each: each[0])[:MAX_PLANNED]:
            if not any(tried.keys == {RECOMPUTE} and _ops(tried) > ops for ops in self._enough()):
                self.look(tried)
        if not self.found:
            rest = [tried for tried in self.tried if frozenset(tried.settings) not in self.planned]
            for tried in sorted(rest, key=self.expected)[: MAX_PLANNED - len(self.planned)]:
                self.look(tried)

    def _enough(self) -> list[frozenset[str]]:
        return [way.ops for _, way in self.found if way.settings[0][0] == RECOMPUTE]

    def look(self, tried: _TriedCandidate) -> bool:
        """Whether it fits; it is then among what was found."""
        spec = tried.spec
        if self.is_hopeless(tried) or (spec.schedule.name == AUTO and self.searches >= MAX_SEARCHES):
            return False
        schedule, ranks = self.plan_whole(tried)
        if self.planned[frozenset(tried.settings)] > 0:
            self.failed.append((tried.others, _ops(tried)))
            return False
        seconds = timed_on(spec, tried.outline.lowering, schedule).step.seconds
        same = spec.precision == self.base.spec.precision
        change = seconds / self.base.step.seconds - 1
        free = min(rank.capacity_bytes - rank.peak_bytes for rank in ranks)
        world, more = spec.cluster.world, spec.cluster.world > self.base.spec.cluster.world
        way = Way(tried.settings, seconds, change, free, world, more, same, _ops(tried))
        self.found.append((tried, way))
        return True

    def plan_whole(self, tried: _TriedCandidate) -> tuple[Schedule, tuple[RankMemory, ...]]:
        """Its schedule and memories; what it lacks is then known."""
        spec, key = tried.spec, frozenset(tried.settings)
        self.searches += spec.schedule.name == AUTO
        schedule = Scheduler(spec, tried.outline.lowering).largest()
        ranks = rank_memories(spec, tried.outline.lowering, schedule)
        fullest = max(ranks, key=lambda rank: rank.peak_bytes - rank.capacity_bytes)
        self.planned[key], self.fullest[key] = fullest.peak_bytes - fullest.capacity_bytes, fullest.pp_rank
        return schedule, ranks

    def nearest(self) -> Nearest | None:
        """What lacks least of all that was tried, planned whole; None where nothing lacks less than the plan."""
        for _ in range(MAX_NEAREST):
            best = min(self.less, key=self.expected, default=None)
            if best is None or frozenset(best.settings) in self.planned:
                break
            if best.spec.schedule.name == AUTO and self.searches >= MAX_SEARCHES:
                break
            self.plan_whole(best)
        planned = [tried for tried in self.less if frozenset(tried.settings) in self.planned]
        best = min(planned, key=self.expected, default=None)
        if best is None or self.expected(best) >= self.lacks:
            return None
        key = frozenset(best.settings)
        return Nearest(best.settings, self.planned[key], self.fullest[key], best.spec.cluster.world)

    # ------------------------------------------------------------ several keys

    def put_together(self) -> None:
        """Edits of two keys, the likeliest first; if none is enough, of as many as it takes."""
        parts = [tried for tried in self.tried if self.planned.get(frozenset(tried.settings), 1) > 0]
        pairs = [pair for pair in combinations(parts, 2) if not pair[0].keys & pair[1].keys]
        pairs.sort(key=lambda pair: sum(self.expected(each) for each in pair))  # what both gain together
        for count, pair in enumerate(pairs[:MOST_PAIRS]):
            if self.found and count >= MAX_PAIRS:
                break
            both = self.attempt(_merged(pair))
            if both is not None and self.look(both) and len(self.found) >= ENOUGH:
                return
        if not self.found:
            self._pile(parts)

    def lighten(self) -> None:
        """Leave out of edits the dear ops that need not be computed again."""
        for at, (tried, way) in enumerate(self.found):
            for op in (op for op in DEAR if op in way.ops and op not in self.base.spec.recompute):
                fewer = tuple((k, _list(_without(v, op)) if k == RECOMPUTE else v) for k, v in way.settings)
                other = self.attempt(tuple(setting for setting in fewer if setting[0] != DATA))
                gap = self.planned[frozenset(way.settings)] - tried.least  # of the bound, here and so perhaps there
                if other is not None and other.least + gap <= 0 and self.look(other):
                    tried, way = self.found[at] = self.found.pop()

    def _pile(self, parts: Sequence[_TriedCandidate]) -> None:
        """One edit upon another, each time the one that gains most alone, until all fits."""
        pile: list[_TriedCandidate] = []
        for part in sorted(parts, key=self.expected):
            if any(part.keys & each.keys for each in pile):
                continue
            settings = _merged([*pile, part])
            tried = self.attempt(settings) or self.seen[frozenset(settings)]
            if tried is not None:
                pile.append(part)
                if self.look(tried):
                    return


def _merged(several: Iterable[_TriedCandidate]) -> tuple[Setting, ...]:
    """The settings of several edits; how many data ranks there are follows again."""
    return tuple(setting for tried in several for setting in tried.settings if setting[0] != DATA)


def _ops(tried: _TriedCandidate) -> frozenset[str]:
    return frozenset(tried.spec.recompute)


def _without(ops: str, op: str) -> list[str]:
    return [each for each in ops.strip("[]").split(", ") if each != op]


def _list(ops: Iterable[str]) -> str:
    return f"[{', '.join(ops)}]"
