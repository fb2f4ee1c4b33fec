"""docs/laptop-to-cluster.md, typed in by a machine: one spec from four processes to 32 GPUs, as far as CPUs show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.typed import ROOT, environment, steps, type_in

PAGE = (ROOT / "docs" / "laptop-to-cluster.md").read_text("utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home of a reader who did every step of the page, on a machine without GPUs."""
    home = tmp_path_factory.mktemp("home")
    type_in(steps(PAGE), home, environment(home, CUDA_VISIBLE_DEVICES=""))
    return home


def test_the_run_continued_with_fewer_ranks(home: Path) -> None:
    rows = [json.loads(line) for line in (home / "runs/laptop/metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[39]["loss"] < rows[19]["loss"] < rows[0]["loss"] - 0.5


def test_the_build_contains_the_described_files(home: Path) -> None:
    build = home / "build" / "nodes"
    assert "<svg" in (build / "report.html").read_text("utf-8") and (build / "stages" / "rank_0.py").is_file()
    assert "auto" not in (build / "spec.resolved").read_text("utf-8")
    assert (home / "launch" / "nodes" / "job.sbatch").is_file()


def test_the_page_and_the_readme_agree_on_gpus() -> None:
    assert "**Nothing of dsc has run on a GPU yet.**" in PAGE
    assert "On GPUs nothing has been run yet." in (ROOT / "README.md").read_text("utf-8")
    assert "No GPU has run these yet." in (ROOT / "docs" / "kernels.md").read_text("utf-8")
