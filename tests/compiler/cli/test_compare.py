"""`dsc compare`: figures match the rows, differences match the specs; curves are plotted over tokens and time."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.cli.main import main
from compiler.tools.report.compared import ComparedRun, _curves, names_of, points_over
from dsl.canonical import canonical
from dsl.load import load
from tests.compiler.cli.forms import parsed

SPEC = Path(__file__).parents[3] / "specs" / "tiny.dsc"
Captured = pytest.CaptureFixture[str]
MakeRun = Callable[..., Path]


def rows_of(steps: int, tokens: int, slope: float) -> list[dict[str, Any]]:
    """Rows of a run with a linear loss and steps of half a second."""
    return [
        {
            "step": step,
            "time": f"2026-01-01T00:{step // 60:02}:{step % 60:02}.000Z",
            "loss": 6 - slope * step,
            "grad_norm": 1.0,
            "rate": 1e-3,
            "tokens": tokens * step,
            "tokens_per_s": 2.0 * tokens,
            "step_s": 0.5,
        }
        for step in range(1, steps + 1)
    ]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run folder with such rows, of the tiny spec with overrides."""

    def made(name: str, *overrides: str, steps: int = 40, tokens: int = 64, slope: float = 0.01) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(steps, tokens, slope)))
        (folder / "spec.resolved").write_text(canonical(load(SPEC, overrides=list(overrides))), "utf-8")
        return folder

    return made


def test_figures_match_the_metrics_rows(make_run: MakeRun, capsys: Captured) -> None:
    long, short = make_run("long", slope=0.02), make_run("short", steps=25)
    assert main(["compare", str(long), str(short), "--format", "json"]) == 0
    document = parsed(capsys.readouterr().out, "compare")
    assert document["common_tokens"] == 25 * 64
    first, second = document["runs"]
    assert (first["steps"], first["tokens"], first["trained_s"]) == (40, 2560, 20.0)
    assert first["loss"] == statistics.fmean(6 - 0.02 * step for step in range(31, 41))
    assert first["loss_at"] == statistics.fmean(6 - 0.02 * step for step in range(16, 26))
    assert second["loss"] == second["loss_at"] == statistics.fmean(6 - 0.01 * step for step in range(16, 26))
    assert first["validation_loss"] is first["goodput"] is None and first["tokens_per_s"] == 128
    assert document["differences"] == [] and main(["compare", str(long), str(short)]) == 0
    assert "Their specs do not differ." in capsys.readouterr().out


def test_differences_have_the_value_of_every_run(make_run: MakeRun, capsys: Captured) -> None:
    runs = [make_run("a"), make_run("b", "train.seed=7"), make_run("c", "train.seed=7", "model.hidden=32")]
    assert main(["compare", *map(str, runs), "--format", "json"]) == 0
    values = {
        difference["path"]: difference["values"]
        for difference in parsed(capsys.readouterr().out, "compare")["differences"]
    }
    assert values["train.seed"] == ["1", "7", "7"]
    assert values["model.hidden"] == ["16", "16", "32"]


def test_the_page_has_a_curve_per_run_and_escapes_their_text(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("plain"), make_run("<script>x", slope=0.03), *(make_run(f"r{i}", slope=i / 500) for i in range(9))]
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), "--format", "html", "-o", str(page)]) == 0
    text = page.read_text("utf-8")
    assert "<script" not in text and "&lt;script&gt;x" in text
    charts = {re.search('aria-label="([^"]*)"', svg)[1]: svg for svg in text.split("<svg")[1:]}  # type: ignore[index]
    for title in (
        "Training loss, nats per token, over thousand tokens",
        "Training loss, nats per token, over seconds trained",
    ):
        assert charts[title].count("<path") == len(runs)
    assert not any(title.startswith("Validation") for title in charts)
    assert main(["compare", *map(str, runs), "--format", "html", "-o", str(page)]) == 0
    assert page.read_text("utf-8") == text


def test_the_page_marks_what_differs_from_the_first_run(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a"), make_run("b", "train.seed=7"), make_run("c")]
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), "--format", "html", "-o", str(page)]) == 0
    cells = re.findall("<tr><th>train.seed</th>(.*)</tr>", page.read_text("utf-8"))
    assert [re.findall(">(.*?)</td>", row) for row in cells] == [["1", "7", "1"]]
    assert re.findall('class="(.*?)"', cells[0]) == ["number", "number total", "number"]


def test_axes_fit_the_plotted_values() -> None:
    """Losses are far from 0, and parts of a thousand tokens are marked."""
    runs = [ComparedRun(name, Path(name), tuple(rows_of(40, 64, 0.01)), 0, None, None) for name in "ab"]
    chart = _curves(runs, "loss", "Training loss", "tokens")
    assert chart is not None and chart.title == "Training loss, nats per token, over thousand tokens"
    losses = [float(label) for _, label in chart.y_ticks]
    assert 5.5 < min(losses) < max(losses) <= 6.0
    assert {"0.5", "1.0", "2.5"} <= {label for _, label in chart.x_ticks}
    assert [curve.name for curve in chart.curves] == ["a", "b"]
    assert _curves(runs, "validation_loss", "Validation loss", "tokens") is None


def test_curves_are_plotted_over_tokens_or_time(make_run: MakeRun) -> None:
    rows = rows_of(3, 10, 1.0)
    assert points_over(rows, "loss", "tokens") == ((10, 5), (20, 4), (30, 3))
    assert points_over(rows, "loss", "time") == ((0.5, 5), (1.0, 4), (1.5, 3))
    rows[1]["step_s"] = None
    assert points_over(rows, "loss", "time") == ((0.5, 5), (0.5, 4), (1.0, 3))


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=6, unique_by=tuple))
def test_names_of_runs_are_distinct(folders: list[list[str]]) -> None:
    paths = [Path("/", *parts) for parts in folders]
    names = names_of(paths)
    assert len(set(names)) == len(names)
    assert all(str(path).endswith(name.removeprefix("/")) for path, name in zip(paths, names, strict=True))


def test_folders_without_a_run_are_refused_and_damaged_rows_counted(
    make_run: MakeRun, tmp_path: Path, capsys: Captured
) -> None:
    good, damaged = make_run("good"), make_run("other")
    (empty := tmp_path / "empty").mkdir()
    assert main(["compare", str(good), str(empty), str(tmp_path / "none")]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert main(["compare", str(good), str(empty)]) == 2
    assert f"error: {empty} holds no run that can be compared" in capsys.readouterr().err
    assert main(["compare", str(good), f"{good}/."]) == 2
    assert "a comparison needs at least two runs" in capsys.readouterr().err
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write("no row\n{half")
    (damaged / "spec.resolved").unlink()
    assert main(["compare", str(good), str(damaged)]) == 0
    stdout = capsys.readouterr().out
    assert "other: 1 damaged lines" in stdout and "other: its spec.resolved is missing or damaged" in stdout
    assert main(["compare", str(good), str(damaged), "-o", str(good / "metrics.jsonl")]) == 2
    assert "it is an input" in capsys.readouterr().err
