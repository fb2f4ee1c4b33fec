"""Adjacent calls in DeepSeek-V3's program: no pair could be one kernel, and bytes are counted by hand."""

from __future__ import annotations

import re

import pytest

from benchmarks.side_by_side import SHOWN_GB, V3, Pair, kept, pairs, section, text

T, D, LAYERS, MOES = 4096, 7168, 61 + 1, 58 + 1


@pytest.fixture(scope="module")
def found() -> list[Pair]:
    return pairs(V3)


def test_stored_pairs_match_the_program(found: list[Pair]) -> None:
    listed, least = kept()
    assert listed == [pair for pair in found if pair.bytes >= least * 1e9], "run it with --out, then the page again"


def test_every_pair_has_a_reason(found: list[Pair]) -> None:
    """Above a GB; a pair that has none is refused."""
    assert {pair.reason for pair in found if pair.bytes >= 1e9} >= {"between", "apart", "operand of a product"}
    assert all(pair.reason for pair in found if pair.bytes >= 1e9)
    fusable = Pair("dense", "F", "quantise", "requantise", "beside", 2 * 10**9)
    with pytest.raises(AssertionError, match="one kernel could do both"):
        section([fusable])


def test_bytes_equal_those_counted_by_hand(found: list[Pair]) -> None:
    by_functions = {(p.segment, p.functions, p.first, p.second): p for p in found}
    tensor = T * D * 2
    gradient = by_functions["attention", "I W", "sum_rmsnorm_again_quantise_dgrad_add", "rmsnorm_wgrad"]
    assert gradient.stand == "apart"
    assert gradient.bytes == LAYERS * (3 * tensor + 2 * 4 * T), "x is read again; dy and rstd are written and read"
    moved = by_functions["router", "F", "add_rmsnorm_quantise_wide", "route_permute_fp8"]
    assert (moved.stand, moved.bytes) == ("between", MOES * 2 * (T * D + 4 * T * D // 128)), (
        "written and read, with scales"
    )
    queries = by_functions["attention", "I", "rmsnorm_dgrad", "quantise_both"]
    assert (queries.stand, queries.bytes) == ("beside", LAYERS * 2 * T * 1536 * 2)


def test_the_output_has_a_line_for_each_pair(found: list[Pair]) -> None:
    lines = text(found, 1.0).splitlines()
    assert len(lines) == 1 + sum(pair.bytes >= 1e9 for pair in found)
    assert lines[1].split()[1:] == [
        found[0].stand,
        found[0].segment,
        found[0].functions,
        found[0].first,
        "→",
        found[0].second,
        *f"({found[0].reason})".split(),
    ]


def test_the_section_counts_every_pair_of_a_reason() -> None:
    listed, _ = kept()
    rows = re.findall(r"^\| ([a-z' ]+) \| (\d+) \| ([\d.]+) \|", section(listed), re.MULTILINE)
    groups = {reason: [pair for pair in listed if pair.reason == reason] for reason in {pair.reason for pair in listed}}
    totals = {reason: sum(pair.bytes for pair in group) / 1e9 for reason, group in groups.items()}
    assert {name for name, _, _ in rows} == {reason for reason, total in totals.items() if total >= SHOWN_GB}
    for name, count, gb in rows:
        assert int(count) == len(groups[name]) and float(gb) == pytest.approx(totals[name], abs=0.06)
