"""The page of the toolchain: in which order a spec walks through the rooms of the compiler."""

from __future__ import annotations

from pathlib import Path

from compiler.emit.segment_cache import Segments
from dsl.load import load
from tests.measure.walk import climbs, steps
from tests.test_structure import ROOMS

TINY = Path(__file__).parents[2] / "specs" / "tiny.dsc"
MOST_CLIMBS = 3


def test_a_spec_climbs_back_at_most_three_times(segments: Segments) -> None:
    modules = steps(load(str(TINY)), segments)
    assert {"compiler.plan.plan", "compiler.program.lower.lowering", "compiler.emit.emission"} <= {*modules}
    assert len(climbs(modules, ROOMS["compiler"])) <= MOST_CLIMBS
