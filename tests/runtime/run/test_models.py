"""Runs of models that lack some part of DeepSeek-V3: their files, their resumes, and what they do not show."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable

import pytest

from tests.runtime.run.place import DENSE, FOUR_RANKS, ONE_RANK, SOFTMAX, Place, bits, rows, saved, untimed

MODELS = {
    "dense": dict(ONE_RANK, model=DENSE, pipeline=2, devices=2),
    "softmax": dict(FOUR_RANKS, model=SOFTMAX, zero=1),
}


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest, new_place: Callable[[], Place]) -> tuple[str, Place]:
    """A run `straight` of six steps, with its output in `stdout`."""
    place = new_place()
    place.compile(MODELS[request.param])
    (place.folder / "stdout").write_text(place.dsc("train", "--out", "straight").stdout)
    return request.param, place


def test_resuming_is_bit_exact(trained: tuple[str, Place]) -> None:
    """`broken` has three steps, then three more."""
    name, place = trained
    place.dsc("train", "--out", "broken", "--steps", 3)
    assert "going on from" in place.dsc("train", "--out", "broken", "--resume").stdout
    straight, broken = (place.folder / run for run in ("straight", "broken"))
    assert [row["step"] for row in untimed(broken)] == [1, 2, 3, 4, 5, 6]
    assert untimed(broken) == untimed(straight)
    early, late = bits(saved(broken, 3)), bits(saved(broken, 6))
    assert late == bits(saved(straight, 6))
    assert {name.partition("/")[0] for name in late} == {"weight", "moment1", "moment2"}, "there is no bias"
    assert not [name for name in late if early[name] == late[name]]
    if name == "softmax":
        assert (straight / "load.json").read_bytes() == (broken / "load.json").read_bytes()


def test_rows_have_only_values_of_the_model(trained: tuple[str, Place]) -> None:
    name, place = trained
    for row in rows(place.folder / "straight"):
        assert ("validation_loss" in row) == (row["step"] % 3 == 0)
        assert {"mtp_loss", "sequence_loss", "validation_mtp_loss"}.isdisjoint(row)
        assert ("imbalance" in row) == (name == "softmax")
    losses = [row["loss"] for row in rows(place.folder / "straight")]
    assert losses[-1] < losses[0] - 0.05


def test_only_experts_have_a_load(trained: tuple[str, Place]) -> None:
    name, place = trained
    path = place.folder / "straight" / "load.json"
    if name == "dense":
        assert not path.exists()
        return
    assert [sum(row) for row in json.loads(path.read_text("utf-8"))["load"]] == [6 * 8 * 16 * 2] * 2


def test_the_report_shows_only_parts_of_the_model(trained: tuple[str, Place]) -> None:
    name, place = trained
    before = (place.folder / "straight" / "report.html").read_bytes()
    assert place.dsc("report", "straight").stdout == "report: straight/report.html\n"
    assert (place.folder / "straight" / "report.html").read_bytes() == before
    text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", before.decode(), flags=re.DOTALL))
    assert "Learning rate" in text and "multi-token" not in text.lower()
    for words in ("expert load", "busiest expert", "experts"):
        assert (words in text.lower()) == (name == "softmax"), words
    if name == "softmax":
        assert "layers.0" in text and "layers.1" in text


def test_the_plain_lines_show_a_load_only_where_there_are_experts(trained: tuple[str, Place]) -> None:
    name, place = trained
    lines = [line for line in (place.folder / "stdout").read_text().splitlines() if line.startswith("step 6/6")]
    assert lines and ("expert load" in lines[0]) == (name == "softmax")
