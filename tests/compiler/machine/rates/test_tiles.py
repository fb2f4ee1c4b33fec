"""The share of full tiles that shapes reach: by hand, by brute force, and on the shipped tables."""

from __future__ import annotations

from itertools import product as every

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.machine.rates import shipped_table
from compiler.machine.rates.rates import BLOCK, SPLITS, STEP, TILES, tile_efficiency
from compiler.plan.spec_rates import rates_of
from tests.specs.shipped import shipped

EXTENT = st.integers(1, 20_000)


def counted(m: int, n: int, k: float, tile: tuple[int, int], sms: int) -> float:
    """The work divided by the capacity of all SMs until the last one ends, counted tile by tile."""
    tiles = sum(1 for _ in every(range(0, m, tile[0]), range(0, n, tile[1])))
    waves = -(-tiles // sms)
    return m * n * k / (waves * sms * tile[0] * tile[1] * (k + STEP))


def test_by_hand() -> None:
    """4096 x 4096 on 108 SMs: 1024 tiles of 128 x 128 need 10 waves; with halves of the sum, 2048 need 19."""
    share = 2048 / (19 * 108) * 4096 / (4096 + STEP)
    assert share > 1024 / (10 * 108) * 8192 / (8192 + STEP)
    assert tile_efficiency("gemm", "bf16", (4096, 4096, 8192), 108) == pytest.approx(share)
    assert tile_efficiency("attention", "bf16", (8192, 1024, 16, 64, 64), 108) == pytest.approx(1024 / (1024 + BLOCK))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(8, 20_000), st.sampled_from([108, 132, 148]))
def test_the_share_without_a_split_equals_counting(m: int, n: int, k: int, sms: int) -> None:
    best = max(counted(m, n, k, tile, sms) for tile in TILES)
    share = tile_efficiency("gemm", "bf16", (m, n, k), sms)
    assert best <= share * (1 + 1e-12) and share <= 1
    assert share <= best * max(SPLITS)


@given(EXTENT, EXTENT, EXTENT, st.sampled_from([108, 132, 304]))
def test_more_to_sum_up_is_never_slower_and_sides_are_alike(m: int, n: int, k: int, sms: int) -> None:
    share = tile_efficiency("gemm", "bf16", (m, n, k), sms)
    assert tile_efficiency("gemm", "bf16", (m, n, 2 * k), sms) >= share
    assert tile_efficiency("gemm", "bf16", (n, m, k), sms) == pytest.approx(share)
    assert tile_efficiency("grouped_gemm", "bf16", (1, m, n, k), sms) == share


def test_unknown_shapes_and_devices_count_as_full() -> None:
    assert tile_efficiency("gemm", "bf16", (), 132) == tile_efficiency("gemm", "bf16", (64, 64, 64), None) == 1
    assert tile_efficiency("norm", "any", (64, 64), 132) == tile_efficiency("gemm", "e4m3", (64, 64, 64), 132) == 1


@pytest.mark.parametrize(
    ("table", "shape", "fastest"),
    [("a100", (1024, 10240, 5120), 271.2e12), ("h100", (2048, 2048, 13312), 794.5e12)],
)
def test_no_product_is_faster_than_the_fastest_that_was_found(
    table: str, shape: tuple[int, ...], fastest: float
) -> None:
    """The best rate of a search (ml-engineering's mamf-finder) exceeds the table's for its shape, with any factor."""
    rates = rates_of(shipped("llama3-8b.dsc"), table)
    device, spec = shipped_table(table).device, 989e12
    assert device.bf16 is not None
    rate = rates.rate("gemm", "bf16", shape) * device.bf16 / spec
    assert 0.5 * fastest < rate < fastest / 1.1291 * 1.05


def test_a_row_gives_its_own_rate() -> None:
    rates, table = rates_of(shipped("llama3-8b.dsc")), shipped_table("h100")
    (row,) = (row for row in table.rows if (row.kind, row.dtype) == ("gemm", "bf16"))
    assert row.rate is not None and rates.rate("gemm", "bf16", row.shape) == pytest.approx(row.rate / 1.1291)


def test_small_micro_batches_and_few_tokens_of_an_expert_are_slower() -> None:
    rates = rates_of(shipped("llama3-8b.dsc"))
    for small, large in (((100, 4096, 4096), (8192, 4096, 4096)), ((8192, 4096, 128), (8192, 4096, 8192))):
        assert rates.rate("gemm", "bf16", small) < 0.9 * rates.rate("gemm", "bf16", large)
    assert rates.rate("grouped_gemm", "bf16", (64, 40, 4096, 4096)) < 0.5 * rates.rate(
        "gemm", "bf16", (8192, 4096, 4096)
    )
