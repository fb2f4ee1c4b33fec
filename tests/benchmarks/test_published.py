"""docs/published-runs.md shows the stored results, these equal the predictions, and the goals are met."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks.published.__main__ import PAGE
from benchmarks.published.page import BIAS, FAR, INSIDE, MEDIANS, far_off, medians_of, page
from benchmarks.published.rows import Published, all_runs, predicted, reasons, stored, summary
from dsl.load import resolve

RUNS = tuple(all_runs())
BUILT = tuple(run for run in RUNS if not run.is_searched)
SEARCHED = tuple(run for run in RUNS if run.is_searched)


def test_the_page_is_current(bless: bool) -> None:
    if bless:
        PAGE.write_text(page(), "utf-8")
    assert PAGE.read_text("utf-8") == page(), "run: python -m benchmarks.published"


def test_every_run_is_planned() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS) and set(stored()) == {run.name for run in RUNS}


@pytest.mark.parametrize("run", BUILT, ids=[run.name for run in BUILT])
def test_stored_results_equal_predictions(run: Published) -> None:
    prediction, stored_result = astuple(predicted(run)), astuple(stored()[run.name])
    assert prediction == stored_result, "run: python -m benchmarks.published"


@pytest.mark.parametrize("run", SEARCHED, ids=[run.name for run in SEARCHED])
def test_stored_results_of_searched_runs_equal_predictions(run: Published) -> None:
    assert astuple(predicted(run)) == astuple(stored()[run.name]), "run: python -m benchmarks.published"


def test_goals_are_met() -> None:
    figures = summary(RUNS, stored())
    assert abs(figures.bias) <= BIAS
    assert all(error <= MEDIANS[generation] for generation, error in medians_of(stored()).items())
    assert INSIDE[0] <= figures.inside <= INSIDE[1]


def test_runs_with_large_errors_have_a_reason() -> None:
    far = far_off(stored())
    assert far, "the goals may be raised"
    for run in far:
        assert any(run.name.startswith(start) for start in reasons()), f"{run.name} is off by more than {FAR:.0%}"


def test_errors_are_relative_to_published_tokens_per_second() -> None:
    """By hand, of one run: tokens of its spec over the predicted step, over the published tokens per second."""
    run = next(run for run in RUNS if run.name == "llmc-124M")
    spec, result = resolve("benchmarks/published/llmc.dsc", "of_124m").spec, stored()["llmc-124M"]
    tokens = spec.train.batch.end * spec.train.sequence / spec.cluster.world
    assert result.tokens_gpu == pytest.approx(tokens, rel=1e-3)
    assert result.off(run) == pytest.approx(tokens / result.step_s / 218453.33 - 1, abs=1e-3)
    assert result.is_hit(run) == (result.low_s <= tokens / 218453.33 <= result.high_s)


def test_stored_figures_have_four_digits() -> None:
    for result in stored().values():
        assert all(float(f"{figure:.4g}") == figure for figure in astuple(result) if isinstance(figure, float))
