"""The next changes of a plan that fits: other values of one key, each planned in full, the shortest step first.

A bound (`compiler/predict/floor.py`) skips changes that cannot be faster than those that are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from compiler.predict.floor import least_step_s
from compiler.predict.memory import rank_peaks
from compiler.predict.predict import scheduler_of, time_schedule
from compiler.predict.prediction import Change, RankMemory
from compiler.predict.search import Outline, SharedParts
from compiler.predict.timed_plan import TimedPlan
from compiler.predict.why import Legal, Setting, following
from compiler.schedule import SCHEDULES
from dsl.messages.diagnostics import Span
from dsl.schema import Spec, choices
from dsl.schema.choices import OPEN

MAX_SHOWN = 5
SHARD = "parallel.shard"


def next_changes(
    timed: TimedPlan,
    ranks: Sequence[RankMemory],
    legal: Legal,
    origins: Mapping[str, Span],
    report: Callable[[float], None],
) -> tuple[Change, ...]:
    """The changes of one key with the shortest steps that fit, without those that change neither time nor memory.

    `ranks` are the plan's memories. `report` is called with the share that is done.
    """
    of_plan = timed.step.seconds, min(rank.free_bytes for rank in ranks)
    shared = SharedParts(timed.plan.cuts_by_key)
    outlines = []
    for setting in settings_of(timed.spec):
        settings = (setting, *following(timed.spec, (setting,), origins))
        spec = legal(f"{key}={value}" for key, value in settings)
        if spec is None and timed.spec.parallel.shard is not None and setting[0] != SHARD:  # which may no longer divide
            settings = (*settings, (SHARD, "none"))
            spec = legal(f"{key}={value}" for key, value in settings)
        spec = None if spec is None else spec.with_files(timed.spec.files)
        if spec is not None and spec != timed.spec:
            outline = Outline(spec, shared)
            outlines.append((least_step_s(outline.model), settings, outline))
    best: list[Change] = []
    for index, (floor_s, settings, outline) in enumerate(sorted(outlines, key=itemgetter(0))):
        report(index / len(outlines))
        if len(best) == MAX_SHOWN and floor_s >= best[-1].seconds:
            break
        change = None if outline.least_missing[0] > 0 else _planned(settings, outline, timed.spec)
        if change is not None and (change.seconds, change.free_bytes) != of_plan:
            best = sorted([*best, change], key=lambda change: change.seconds)[:MAX_SHOWN]
    return tuple(best)


def _planned(settings: tuple[Setting, ...], outline: Outline, base: Spec) -> Change | None:
    """The change, planned in full; None if it does not fit."""
    spec = outline.spec
    schedule = scheduler_of(spec, outline.lowering).largest()
    free = min(rank.free_bytes for rank in rank_peaks(spec, outline.lowering, schedule))
    if free < 0:
        return None
    seconds = time_schedule(spec, outline.lowering, schedule).step.seconds
    return Change(settings, seconds, free, spec.precision == base.precision)


def settings_of(spec: Spec) -> Iterator[Setting]:
    """Other values of the keys that decide the time of a step and leave training as it is, apart from the precision."""
    for key in OPEN:
        for value in choices.values(spec, key):
            yield key, _text(value)
    yield from (("parallel.zero", str(level)) for level in range(4))
    if spec.parallel.zero >= 2:
        yield from ((SHARD, str(size)) for size in choices.shards(spec))
    yield from (("parallel.overlap_reduce", _text(overlaps)) for overlaps in (True, False))
    if spec.parallel.pipeline > 1 and spec.schedule.file is None:
        yield from (("schedule.name", name) for name in SCHEDULES)
    if spec.cluster.node.device.fp8 and spec.precision.linear != "e4m3":
        yield "precision", "fp8_block"


def _text(value: Any) -> str:
    """A value as `-s` takes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
