"""The templates of docs/extending.md, and copies of the project into which they are written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests import copies

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"
TABLE = ROOT / "docs" / "architecture.md"
TEMPLATE = re.compile(
    r"^(?:New file|In) `(?P<path>[^`\n]+)`"
    r"(?:, (?P<how>above|below|in the place of) (?P<which>the|each) line[ \n]`(?P<anchor>[^\n]+)`)?:\n\n"
    r"```\w*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`((?:dsl|compiler|runtime|specs|tests|docs|benchmarks)/[^`]+\.\w+)`")


@dataclass(frozen=True)
class Template:
    """A piece of text and its place: a new file, or next to a line of an existing file."""

    path: str
    text: str
    how: str = ""  # above, below or in the place of the line
    anchor: str = ""  # without its indentation
    each: bool = False  # whether there are several such lines

    def write(self, folder: Path) -> None:
        """Write the text into a copy of the project."""
        path = folder / self.path
        if not self.anchor:
            assert not path.exists(), f"{self.path} is there already"
            path.write_text(self.text, "utf-8")
            return
        lines = path.read_text("utf-8").splitlines(keepends=True)
        anchors = [index for index, line in enumerate(lines) if line.strip() == self.anchor]
        assert anchors and self.each == (len(anchors) > 1), f"{self.path} has {len(anchors)} lines {self.anchor}"
        for row in reversed(anchors):
            begin, end = {"above": (row, row), "below": (row + 1, row + 1), "in the place of": (row, row + 1)}[self.how]
            lines[begin:end] = [self.text]
        path.write_text("".join(lines), "utf-8")


@dataclass(frozen=True)
class Extension:
    """A section of the page: its extension, and the templates."""

    title: str
    prose: str
    templates: tuple[Template, ...]

    @property
    def files(self) -> set[str]:
        """The files that the templates write or change."""
        return {template.path for template in self.templates}


def extension(title: str) -> Extension:
    """The section of that heading."""
    parts = PAGE.read_text("utf-8").split("\n## ")
    (text,) = (part for part in parts if part.partition("\n")[0] == title)
    templates = tuple(
        Template(match["path"], match["text"], match["how"] or "", match["anchor"] or "", match["which"] == "each")
        for match in TEMPLATE.finditer(text)
    )
    return Extension(title, FENCED.sub("", text), templates)


def files_of_table(kind: str, name: str) -> set[str]:
    """The files that the table "One place each" has for a kind of thing, where it is called `name`."""
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", TABLE.read_text("utf-8").partition("## One place each")[2], re.M)
    (places,) = (files for label, files in rows if label == kind)
    return {path.replace("<name>", name) for path in FILE.findall(places)}


class Copy:
    """A copy of the project's files with extensions in it, in which commands and scripts of the copy run."""

    def __init__(self, folder: Path, *added: Extension) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file() and not name.startswith(("tests/golden/", "benchmarks/results/")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
                copies.let_write(folder / name)
                # Copy the bytecode too, which is valid by size and time. Else each command compiles everything.
                if name.endswith(".py") and (bytecode := Path(cache_from_source(str(ROOT / name)))).is_file():
                    (folder / name).parent.joinpath(bytecode.parent.name).mkdir(exist_ok=True)
                    shutil.copy2(bytecode, cache_from_source(str(folder / name)))
        for template in (template for addition in added for template in addition.templates):
            template.write(folder)

    def run(self, *words: str, code: int = 0) -> str:
        """The output of Python with these arguments, run in the copy instead of the project."""
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        process = subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == code, f"{' '.join(words)}\n{process.stdout}\n{process.stderr}"
        return process.stdout or process.stderr

    def dsc(self, *words: str, code: int = 0) -> str:
        """The output of a dsc command."""
        return self.run("-m", "compiler.cli.main", *words, code=code)
