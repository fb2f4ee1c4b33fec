"""Shared by the pages of all studies: formatting, and the description of the runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from textwrap import fill

from benchmarks.studies.records import Record, Results
from benchmarks.studies.study import ROOT, Study, tenth, window_of
from dsl.load import resolve


@dataclass(frozen=True)
class Written:
    """A page and its picture, with their paths."""

    page: Path
    text: str
    picture: Path
    svg: str

    def write(self) -> None:
        """Write both files."""
        self.page.write_text(self.text, "utf-8")
        self.picture.write_text(self.svg, "utf-8")


def paragraph(text: str) -> str:
    """Wrap text to the width of a page, ignoring its line breaks."""
    return fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with text in the first column and numbers in the others."""
    lines = [head, ("---", *["--:"] * (len(head) - 1)), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in lines)


def spread(values: Sequence[float], digits: int) -> str:
    """The mean over seeds, with the minimum and maximum in brackets."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} – {max(values):.{digits}f})"


def losses(records: Sequence[Record]) -> list[float]:
    """The mean loss of the last tenth of each run."""
    return [record.last_loss for record in records]


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean of curves, point by point."""
    return [statistics.fmean(points) for points in zip(*curves, strict=True)]


def last_steps(results: Results) -> int:
    """The number of steps in the last tenth of a curve."""
    window = window_of(results.steps)
    return window * tenth(results.steps // window)


def tokens_of(study: Study) -> int:
    """Tokens of a step."""
    train = resolve(study.spec, None, study.overrides).spec.train
    return train.batch.end * train.sequence


def trained(study: Study, results: Results) -> str:
    """The description of the runs: model, data, machine and date."""
    spec = resolve(study.spec, None, study.overrides).spec
    train, about, day = spec.train, results.about, date.fromisoformat(results.about["date"])
    return f"""
        Each run trains the model of [the quickstart](../specs/quickstart.dsc) without its MTP block on one rank
        ([study.dsc](../{study.spec.relative_to(ROOT).as_posix()})): {results.steps:,} steps of {train.batch.end}
        sequences of {train.sequence} tokens, {results.steps * tokens_of(study):,} tokens of the source files of Python
        {about["python"]}. The seed decides the initial weights and the samples. Measured on {day.day} {day:%B %Y} on
        one thread of a processor ({about["processor"]}), with torch {about["torch"]}.
    """
