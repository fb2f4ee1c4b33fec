"""A small corpus on disk, and a `prepare` that takes only the settings that a test varies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.contract import DataRecipe, DataRequest, TrainedTokenizer
from runtime.data.prepare import PreparedFolder, prepare

WORDS = (
    "while",
    "return",
    "yield",
    "lambda",
    "import",
    "global",
    "assert",
    "raise",
    "class",
    "def",
    "self",
    "None",
    "in",
)

CORPUS = DataRecipe("corpus/**/*.txt", TrainedTokenizer(320), 0.2)  # of the folder below


@pytest.fixture
def spec_folder(tmp_path: Path) -> Path:
    """A folder with `corpus/`: 24 texts of 30 to 53 lines, all with different words and digits."""
    corpus = tmp_path / "spec" / "corpus"
    (corpus / "deep").mkdir(parents=True)
    for i in range(24):
        lines = (f"{WORDS[(i + j) % 13]} {WORDS[i * j % 11]}({i * j}) # {chr(0x4E00 + j)}" for j in range(30 + i))
        (corpus / ("deep" if i % 3 else ".") / f"text{i:02}.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "spec"


@pytest.fixture
def prepared(spec_folder: Path, tmp_path: Path) -> Callable[..., PreparedFolder]:
    def run(out: Path = tmp_path / "data", *, vocab: int = 400, seed: int = 7, **data: Any) -> PreparedFolder:
        request = DataRequest(replace(CORPUS, **data), vocab, seed)
        return prepare(request, spec_folder, out, lambda phase, done, total: None)

    return run
