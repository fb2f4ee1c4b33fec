"""docs/published-memory.md shows the stored plans, these equal the plans of their specs, and the goals are met."""

from __future__ import annotations

import pytest

from benchmarks.published.memory.__main__ import PAGE, SOURCES
from benchmarks.published.memory.page import FAR, MEDIAN, page, sources
from benchmarks.published.memory.rows import (
    FOLDER,
    GIB,
    PeakGroup,
    PlannedPeak,
    PublishedPeak,
    all_peaks,
    groups,
    planned,
    stored,
    summary,
)
from benchmarks.published.memory.stacks import DIFFERENCES
from compiler.predict.predict import memories, predict_timed_plan, time_plan
from dsl.load import resolve

PEAKS = tuple(all_peaks())


def test_the_page_is_current(bless: bool) -> None:
    if bless:
        PAGE.write_text(page(), "utf-8")
        SOURCES.write_text(sources(), "utf-8")
    assert PAGE.read_text("utf-8") == page(), "run: python -m benchmarks.published.memory"
    assert SOURCES.read_text("utf-8") == sources(), "run: python -m benchmarks.published.memory"


def test_every_peak_is_planned_and_every_difference_is_used() -> None:
    assert len({run.name for _, run in PEAKS}) == len(PEAKS) and set(stored()) == {run.name for _, run in PEAKS}
    assert {name for group in groups() for name in group.differences} == set(DIFFERENCES)


@pytest.mark.parametrize(("group", "run"), PEAKS, ids=[run.name for _, run in PEAKS])
def test_stored_plans_equal_plans(group: PeakGroup, run: PublishedPeak) -> None:
    assert planned(group, run) == stored()[run.name], "run: python -m benchmarks.published.memory"


def test_goals_are_met() -> None:
    errors = summary(stored())
    assert errors.median_error <= MEDIAN and abs(errors.worst[1]) <= FAR


def test_a_run_that_was_out_of_memory_does_not_fit() -> None:
    """FlagPerf, Llama 3 8B over 8 data ranks; with two pipeline ranks it ran, on 76 of 80 GiB."""
    verdicts = []
    halves = f'parallel.layout="E{"t" * 16}|{"t" * 16}L"'
    for overrides in ([], ["parallel.pipeline=2", halves]):
        timed = time_plan(resolve(FOLDER / "flagperf.dsc", "a800", overrides).spec)
        verdicts.append(predict_timed_plan(timed, memories(timed)).verdict)
    assert verdicts == ["does not fit", "fits"]


def test_a_published_device_lies_in_an_interval_of_whole_gib() -> None:
    run, plan = PublishedPeak("a", "a", 76.0), PlannedPeak(70.0, 1.0, 4.5)
    assert plan.is_hit(run) and not PlannedPeak(70.0, 0.9, 4.5).is_hit(run)
    assert plan.off(run) == pytest.approx(71 / 76 - 1)


def test_whole_attention_weights_and_masks_are_kept() -> None:
    """By hand: 5 bytes of each attention weight (arXiv 2205.05198, §4.1), of 3 layers and 7 micro-batches."""
    group, run = next((group, run) for group, run in PEAKS if run.name == "zb-1.5b-1f1b")
    weights = 3 * 7 * 6 * 24 * 1024**2
    assert stored()[run.name].tensors * GIB > 5 * weights
    fused = resolve(FOLDER.parent / "zero-bubble.dsc", "small").spec
    of_fused = max(memory.peak_bytes for memory in memories(time_plan(fused)))
    masks_of_hidden = 2 * 3 * 7 * 6 * 1024 * 2304
    more = planned(group, run).tensors * GIB - of_fused
    assert more == pytest.approx(5 * weights + masks_of_hidden, rel=0.02)


def test_differences_of_one_run_by_hand() -> None:
    """torchtitan, 8 devices, a micro-batch of 2 × 8,192 tokens."""
    spec = resolve(FOLDER / "llama3.dsc", overrides=["train.micro_batch=2", "train.batch=16"], run="selective").spec
    memory = memories(time_plan(spec))[0]
    tokens, vocab, parameters = 2 * 8192, 128256, 8_030_261_248
    by_hand = {
        "eager loss": 10 * tokens * vocab,
        "kept products": 2 * (14336 - 1024 - 4096) * tokens * 32,
        "FP32 weights": -2 * parameters // 8,
        "root unit": 2 * vocab * 4096,
    }
    assert {name: DIFFERENCES[name].bytes(spec, memory) for name in by_hand} == by_hand
