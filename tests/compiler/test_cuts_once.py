"""Each distinct segment of a run is cut once in a whole compilation, and the plan carries the cut."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable

import pytest

from compiler.emit import segment_cache as cache
from compiler.ir import Cut, Segment, SegmentCode
from compiler.model.segments.interpret import cut
from compiler.pipeline import compile_spec
from compiler.plan.plan import make_plan
from tests.specs.shipped import shipped

Counts = Counter[Hashable]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """How often each segment is cut from now on, whichever module asks."""
    cut_counts: Counts = Counter()

    def counted(segment: Segment) -> Cut:
        cut_counts[segment.key] += 1
        return cut(segment)

    for name, module in list(sys.modules.items()):
        if name.startswith("compiler.") and vars(module).get("cut") is cut:
            monkeypatch.setattr(module, "cut", counted)
    return cut_counts


@pytest.mark.parametrize("name", ["quickstart", "laptop-gqa"])
def test_a_compilation_cuts_each_segment_once(name: str, counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for tracing, which splits torch's graphs and compares them."""
    emitted: list[Hashable] = []

    def emit(segment: Segment, sms: int) -> SegmentCode:
        emitted.append(segment.key)
        return SegmentCode(f"{segment.kind}_{len(emitted)}", "", ())

    monkeypatch.setattr(cache, "emit", emit)
    compile_spec(shipped(f"{name}.dsc"))
    assert counts == Counter(emitted) and emitted


def test_the_plan_carries_the_cuts_by_site() -> None:
    plan = make_plan(shipped("quickstart.dsc"))
    assert plan.cuts.keys() == {use.site for use in plan.uses}
    assert all(plan.cuts[use.site] == cut(use.segment) for use in plan.uses)
    by_key = plan.cuts_by_key
    assert all(plan.cuts[use.site] is by_key[use.segment.key] for use in plan.uses), "equal segments share one"


def test_segments_of_an_earlier_plan_are_not_cut_again(counts: Counts) -> None:
    spec = shipped("quickstart.dsc")
    plan = make_plan(spec)
    counts.clear()
    assert make_plan(spec, cuts_by_key=plan.cuts_by_key).cuts == plan.cuts
    assert not counts
