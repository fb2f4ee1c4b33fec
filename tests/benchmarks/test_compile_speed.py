"""docs/compile-speed.md shows the stored measurements, which name existing functions."""

from __future__ import annotations

import json

from benchmarks.compile_speed import NUM_SIZES, PAGE, PARTS, RESULTS, SPECS, V3, function_of, page
from dsl.closed_forms import ramp
from dsl.load import resolve

FOUND = json.loads(RESULTS.read_text("utf-8"))


def test_the_page_matches_the_results() -> None:
    assert PAGE.read_text("utf-8") == page(FOUND)
    assert list(FOUND["compiled"]) == list(SPECS) == list(FOUND["parts"])


def test_the_measured_functions_exist() -> None:
    assert all(callable(function_of(module, name)[2]) for _, module, name in PARTS[1:-1])
    for parts in FOUND["parts"].values():
        assert {label for label, _, _ in PARTS} < set(parts["cold"])
        assert abs(sum(parts["cold"].values()) - 2 * parts["cold"]["whole"]) < 1e-6


def test_the_page_says_how_many_sizes_v3_has() -> None:
    file, *words = V3
    assert len(ramp.micro_batches(resolve(file, None, words[1::2]).spec)) == NUM_SIZES
