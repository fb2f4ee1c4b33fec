"""Pages, docstrings and comments: links lead to a heading, and named paths exist."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl.reference.pages import slug

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PACKAGES = ["dsl", "compiler", "runtime", "benchmarks", "tests"]
PATH = re.compile(r"(?<![\w./~-])(?:dsl|compiler|runtime|tests|benchmarks|specs|docs)/[\w./<>*{}-]*")
PLACEHOLDER = re.compile(r"[<>*{}]|\bNAME\b")


def headings(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    return {slug(line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment of a file."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def missing(text: str) -> list[str]:
    """Paths of the repository that a text names and that do not exist, except for patterns such as `<name>` or `*`."""
    paths = (path.rstrip(".-") for path in PATH.findall(text))
    return [path for path in paths if not PLACEHOLDER.search(path) and not (ROOT / path).exists()]


@pytest.mark.parametrize("package", PACKAGES)
def test_paths_in_docstrings_and_comments_exist(package: str) -> None:
    missing_paths = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if "golden" in path.parts or not PATH.search(path.read_text("utf-8")):
            continue
        for line, text in (*docstrings(path), *comments(path)):
            missing_paths += [f"{path.relative_to(ROOT)}:{line} {name}" for name in missing(text)]
    assert not missing_paths, "\n".join(missing_paths)


PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_heading(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for target in targets:
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists() and linked.is_relative_to(ROOT), target
        assert not anchor or anchor in headings(linked), target
    used = set(re.findall(r"\[(E\d{4})\]", text))
    assert used <= set(re.findall(r"^\[(E\d{4})\]:", text, re.MULTILINE)) or page.name != "keys.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_pages_exist(page: Path) -> None:
    """Paths between backquotes exist, except for files that an example of docs/extending.md makes."""
    text = page.read_text("utf-8")
    new_files = set(re.findall(r"^New file `([^`]+)`", text, re.MULTILINE))
    code = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    paths = {path for snippet in code for path in missing(snippet)}
    assert paths <= new_files, sorted(paths - new_files)


def test_missing_paths_are_found() -> None:
    assert missing("see runtime/contract.py.") == ["runtime/contract.py"]
    assert missing("dsl/load.py, specs/<name>.dsc, tests/ui/*.dsc, tests/ui/NAME.dsc; build/runtime/none.py") == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    for page in DOCS.rglob("*.md"):
        assert page.parent.name == "adr" or page.name == "README.md" or f"({page.relative_to(DOCS)})" in index, page
