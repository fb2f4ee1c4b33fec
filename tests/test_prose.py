"""Prose: how docstrings begin, where the links of pages lead, how long the README is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dsl.reference.pages import slug

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
FRAGMENT = re.compile(r"(Of|As|The same|Whose|In which|What of)\b")  # none of these begins a statement


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 120


def headings(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    return {slug(line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("package", ["dsl", "compiler", "runtime", "benchmarks", "tests"])
def test_no_docstring_begins_as_a_fragment(package: str) -> None:
    """A docstring begins with a subject and a verb, or is a noun phrase that stands alone."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if "golden" in path.parts:  # emitted
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and FRAGMENT.match(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.body[0].lineno} {text.splitlines()[0]}")
    assert not found, "\n".join(found)


PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_heading(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for target in targets:
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        other = (page.parent / path).resolve() if path else page
        assert other.exists() and other.is_relative_to(ROOT), target
        assert not anchor or anchor in headings(other), target
    used = set(re.findall(r"\[(E\d{4})\]", text))
    assert used <= set(re.findall(r"^\[(E\d{4})\]:", text, re.MULTILINE)) or page.name != "keys.md"


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    for page in DOCS.rglob("*.md"):
        assert page.parent.name == "adr" or page.name == "README.md" or f"({page.relative_to(DOCS)})" in index, page
