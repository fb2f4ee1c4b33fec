"""Rows go to their experts' ranks and back: where they lie there, by every transport, against what was sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ir.received_rows import even_rows, most_rows
from runtime.comm.rows import Layout, Rows
from runtime.comm.transport import Exchange
from tests.runtime import exchanges
from tests.training.processes import run_module

counts = st.integers(1, 4).flatmap(
    lambda experts: st.lists(st.lists(st.integers(0, 20), min_size=experts, max_size=experts), min_size=1, max_size=4)
)


@pytest.mark.parametrize("world", [3])
def test_every_transport(tmp_path: Path, world: int) -> None:
    run_module("tests.runtime.exchanges", tmp_path, world)


@pytest.mark.parametrize("alignment", exchanges.ALIGNMENTS)
@pytest.mark.parametrize("seed", range(4))
def test_one_rank(alignment: int, seed: int) -> None:
    exchanges.check(Exchange(None, 1, alignment), seed, 1, 0)


def test_one_rank_without_padding_keeps_its_tensors() -> None:
    exchange = Exchange(None, 1)
    exchange.start_counts("counts", torch.tensor([2, 0, 1]))
    route, _ = exchange.wait_counts("counts")
    rows = torch.randn(3, 2)
    exchange.start("dispatch", [rows], route, forward=True)
    assert exchange.wait("dispatch")[0] is rows


@settings(deadline=None)
@given(counts, st.sampled_from([1, 2, 8]))
def test_layout(counts: list[list[int]], alignment: int) -> None:
    """Rows by expert, then by source, each expert padded; and back again, gather(scatter(x)) = x."""
    layout = Layout(tuple(map(tuple, counts)), alignment)
    sent = [[f"{source} {expert}"] * n for source, of in enumerate(counts) for expert, n in enumerate(of)]
    numbered = {name: number for number, name in enumerate(sorted({name for rows in sent for name in rows}), 1)}
    packed = torch.tensor([numbered[name] for rows in sent for name in rows], dtype=torch.float64)
    here = Rows(layout.empty(packed), layout.of_sources, layout)
    here.fill(Rows(packed, layout.of_sources))
    rows, ends = list[int](), list[int]()
    for expert in range(len(counts[0])):
        for source in range(len(counts)):
            rows += [numbered[f"{source} {expert}"]] * counts[source][expert] if counts[source][expert] else []
        rows += [0] * (-len(rows) % alignment)
        ends.append(len(rows))
    assert here.tensor.tolist() == rows and layout.ends == ends and layout.num_rows == len(rows)
    assert torch.equal(here.packed(), packed)


@given(st.integers(0, 300), st.integers(1, 6), st.sampled_from([1, 2, 8, 128]), st.randoms(use_true_random=False))
def test_rows_that_are_planned(rows: int, experts: int, alignment: int, random: object) -> None:
    """Even loads are padded to what is planned for times, and no load to more than is planned for memory."""

    def padded(loads: list[int]) -> int:
        return Layout((tuple(loads),), alignment).num_rows

    even = [rows // experts + (expert < rows % experts) for expert in range(experts)]
    assert even_rows(rows, experts, alignment) == padded(even)
    assert even_rows(rows, experts, 1) == most_rows(rows, experts, 1) == rows
    loads = [0] * experts
    for _ in range(rows):
        loads[random.randrange(experts)] += 1  # type: ignore[attr-defined]
    bound = most_rows(rows, experts, alignment)
    assert padded(loads) <= bound <= rows + (alignment - 1) * experts
    worst = [1 if rows >= experts else int(expert < rows) for expert in range(experts)]
    worst[0] += rows - sum(worst)
    assert padded(worst) == bound or worst[0] % alignment != 1 % alignment
