"""docs/predictions.md equals what the program predicts, and the predictions meet the goals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.predictions import FIXED, PAGE, ROOT, of_v3, page, predictions, rows_of
from compiler.predict.prediction import Prediction
from dsl.load import resolve
from dsl.schema import Spec

TABLES = json.loads(FIXED.read_text("utf-8"))["tables"]


@pytest.fixture(scope="module")
def fixed() -> Any:
    return json.loads(FIXED.read_text("utf-8"))


@pytest.fixture(scope="module")
def v3(fixed: Any) -> Spec:
    return resolve(ROOT / fixed["run"], overrides=fixed["overrides"]).spec


@pytest.fixture(scope="module")
def v3_rows(fixed: Any, v3: Spec) -> dict[str, Prediction]:
    return predictions(fixed, v3)


def test_the_tables_of_v3_are_current(fixed: Any, v3: Spec, v3_rows: dict[str, Prediction]) -> None:
    assert PAGE.read_text("utf-8").startswith(of_v3(fixed, v3, v3_rows) + "\n"), "run: python -m benchmarks.predictions"


def test_the_page_is_current(bless: bool) -> None:
    current = page()
    if bless:
        PAGE.write_text(current, "utf-8")
    assert PAGE.read_text("utf-8") == current, "run: python -m benchmarks.predictions"


def test_the_guarantees_match_the_page() -> None:
    """The sentence of docs/guarantees.md has the numbers of the page's first row."""
    row = next(line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| step |"))
    _, _, _, alone_s, alone, _, _, calibrated, *_ = (cell.strip() for cell in row.split("|"))
    guarantees = " ".join((ROOT / "docs" / "guarantees.md").read_text("utf-8").split())
    assert f"the step is {alone_s} s, {alone.removeprefix('-')} too short" in guarantees
    assert f"the predicted step is {calibrated.removeprefix('+')} too long" in guarantees


@pytest.mark.parametrize("table", TABLES, ids=[table["name"] for table in TABLES])
def test_predictions_meet_their_goals(table: dict[str, Any], fixed: Any, v3_rows: dict[str, Prediction]) -> None:
    prediction = v3_rows[table["name"]]
    assert [list(row.layers) for row in prediction.stages] == fixed["layers"]
    rows = rows_of(fixed, prediction)
    published = fixed["published"]
    missed = [row for row, goal in table["within"].items() if abs(rows[row] / published[row] - 1) > goal]
    assert missed == table.get("missed", []), "the page shows them; predictions.json says why"
    interval = prediction.step.interval
    assert interval is not None and interval.low_s <= published["seconds"] <= interval.high_s
    assert prediction.fits and all(rank.peak_bytes < 79.1 * 2**30 for rank in prediction.ranks)
    assert sum(value for row, value in rows.items() if row != "seconds") == pytest.approx(rows["seconds"])
