"""Every block of docs/language.md is a valid spec, or has the error that the page states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsl.load import check
from tests import copies

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "language.md").read_text("utf-8")
BLOCKS = re.findall(r"^```dsc(?: error (E\d{4}))?\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) == len(re.findall(r"^```dsc", PAGE, re.MULTILINE)) >= 5


@pytest.mark.parametrize(("code", "text"), BLOCKS)
def test_blocks_are_valid_or_have_the_stated_error(code: str, text: str, tmp_path: Path) -> None:
    copies.copytree(ROOT / "specs", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "shown.dsc"
    path.write_text(text, "utf-8")
    mistakes = check(path)
    assert [item.code for item in mistakes] == ([code] if code else []), "\n\n".join(map(str, mistakes))
