"""All that a device holds: the interval around the planned tensors, its terms, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.plan.split_blocks import held_rows
from compiler.predict.device_memory import nccl_bytes, uneven_bytes
from compiler.predict.memory import rank_memories, worst_held_rows
from compiler.predict.predict import memories, predict_timed_plan, time_plan
from compiler.predict.prediction import DeviceMemory, MemoryTerm, Prediction
from compiler.program.lower.opening_order import opening_order
from dsl.load import resolve
from runtime.contract.mesh import Opening, most_ctas
from tests.specs.shipped import SPECS

VERDICTS = ("does not fit", "may not fit", "fits")
terms = st.builds(lambda low, width: MemoryTerm("term", low, low + width), st.integers(0, 2**36), st.integers(0, 2**36))


@cache
def predicted(name: str, *overrides: str) -> Prediction:
    timed = time_plan(resolve(SPECS / name, overrides=overrides).spec)
    return predict_timed_plan(timed, memories(timed))


@given(st.integers(0, 2**40), st.lists(terms, max_size=5))
def test_the_interval_lies_within_the_sums_of_all_ends(peak: int, of_device: list[MemoryTerm]) -> None:
    device = DeviceMemory(0, 2**40, peak, tuple(of_device))
    low, high = (peak + sum(getattr(term, end) for term in of_device) for end in ("low", "high"))
    rounding = len(of_device) + 1
    assert low - rounding <= device.low_bytes <= device.expected_bytes <= device.high_bytes <= high + rounding
    if len(of_device) < 2:
        assert abs(device.low_bytes - low) <= rounding and abs(device.high_bytes - high) <= rounding


def test_deepseek_v3_fits_at_the_upper_end_of_its_interval() -> None:
    """As its run did, on devices of 80 GB."""
    prediction = predicted("deepseek-v3.dsc")
    assert prediction.verdict == "fits" and len(prediction.devices_memory) == 16
    for device in prediction.devices_memory:
        assert device.peak_bytes < device.low_bytes < device.high_bytes <= device.memory_bytes


def test_libraries_take_nothing_on_cpus() -> None:
    prediction = predicted("quickstart.dsc")
    assert prediction.devices_memory == () and prediction.fullest_device is None
    assert prediction.verdict == "fits" and not any("besides its tensors" in line for line in prediction.assumptions)


@pytest.mark.parametrize("name", ["moe-8gpu.dsc", "deepseek-v3.dsc"])
def test_more_memory_never_makes_the_verdict_worse(name: str) -> None:
    prediction, seen = predicted(name), []
    device = prediction.fullest_device
    assert device is not None
    for size in sorted({device.low_bytes - 1, device.low_bytes, device.high_bytes - 1, device.high_bytes, 2**40}):
        seen.append(
            replace(
                prediction,
                devices_memory=tuple(replace(other, memory_bytes=size) for other in prediction.devices_memory),
                ranks=tuple(replace(rank, capacity_bytes=size - 6 * 2**30) for rank in prediction.ranks),
            ).verdict
        )
    assert seen[0] == "does not fit" and seen[1] == "may not fit" and seen[-1] == "fits"
    assert seen == sorted(seen, key=VERDICTS.index)


def openings_of(name: str, *overrides: str) -> tuple[tuple[Opening, ...], int]:
    timed = time_plan(resolve(SPECS / name, overrides=overrides).spec)
    openings = opening_order(timed.plan, [timed.lowering.program(timed.schedule)])
    return openings, nccl_bytes(timed.spec, timed.plan, 0, openings)


def test_communicators_take_memory_for_the_thread_blocks_that_they_may_use() -> None:
    """By hand, for pipeline rank 0 of DeepSeek-V3 with 20 SMs for communication.

    It has two channels of messages and two of counts with one thread block; two of rows with five; two of gradients
    with three; and the world with 24. Rows and counts go to 7 peers on the node, or over the network.
    """
    openings, num_bytes = openings_of("deepseek-v3.dsc")
    assert sorted(opening.kind for opening in openings if 0 in opening.ranks) == sorted(
        ["edge", "edge", "counts", "counts", "expert", "expert", "reduce", "reduce", "world"]
    )
    pair, ring, peer, network = 544 / 24, 688 / 24, 3_280_000_000 / 7 / 32 / 2**20, 512 / 32
    by_hand = 2 * pair + (5 + 1) * (7 * peer + network) + 2 * 3 * ring + 24 * ring
    assert num_bytes / 2**20 == pytest.approx(by_hand, rel=1e-3)
    _, fewer = openings_of("deepseek-v3.dsc", "sm.communication=10")
    assert fewer < num_bytes


def test_counts_have_one_thread_block_even_if_no_sms_are_reserved() -> None:
    """Eight devices of a node: rows go to 7 peers on 32 channels, counts on one; gradients and the world have 24."""
    assert [most_ctas(kind, 0) for kind in ("edge", "counts", "expert", "reduce")] == [0, 1, 0, 0]
    openings, num_bytes = openings_of("moe-8gpu.dsc", "sm.communication=0")
    rings = sum(opening.kind in ("reduce", "world") for opening in openings)
    by_hand = (32 + 1) * 7 * (3_280_000_000 / 7 / 32 / 2**20) + rings * 688
    assert num_bytes / 2**20 == pytest.approx(by_hand, rel=1e-3)


def test_one_device_has_no_communicators() -> None:
    one = ("parallel.expert=1", "parallel.data=1", "cluster.node.devices=1")
    openings, num_bytes = openings_of("moe-8gpu.dsc", *one)
    assert openings == () and num_bytes == 0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_uneven_experts_are_bounded_by_the_line_to_the_worst_case(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak with more rows, which a ledger counts, is at most what the share of the worst case says."""
    spec = resolve(SPECS / "moe-8gpu.dsc").spec
    timed = time_plan(spec)
    even, worst = held_rows(spec), worst_held_rows(spec)

    def counted(rows: int) -> int:
        return rank_memories(spec, timed.lowering, timed.schedule, rows=lambda *_: rows)[0].peak_bytes

    rank = replace(memories(timed)[0], peak_bytes=counted(even), worst_bytes=counted(worst))
    monkeypatch.setattr("compiler.predict.device_memory.UNEVEN_WITH_BIAS", share * (worst - even) / even)
    monkeypatch.setattr("compiler.predict.device_memory.UNEVEN_WITH_LOSS", share * (worst - even) / even)
    more = counted(even + int(share * (worst - even)))
    assert 0 < more - rank.peak_bytes <= uneven_bytes(spec, rank) + 1
