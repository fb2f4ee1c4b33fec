"""Pages whose commands a test types in, in order; they must print what the page shows.

In a ```console block, lines after `$ ` are commands, followed by their exact output, except lines `…` that
stand for any lines. In a ```console about block, numbers may differ. A block of another language is a file if the
text before it ends with its name and a colon, as `train.dsc`:
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import progress

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w/.-]+)`:\s*$")  # at the end of the text before a file
ANY_LINES = "…"
HOME = "/home/you"  # on a page, the home of its reader
LONG_WORK = re.compile(r"^compile: .*\n", re.MULTILINE)  # printed if it takes some seconds, as on a busy machine
EXIT_DIFFERS = ("dsc diff", "dsc fmt --check")


@dataclass(frozen=True)
class Step:
    """A command with the output that is shown, or a file with its text."""

    command: str
    shown: tuple[str, ...]
    about: bool = False
    file: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression of the outputs that the page shows."""
        parts = []
        for line in self.shown:
            if line == ANY_LINES:
                parts.append(r"(?:.*\n)*?")
                continue
            text = re.escape(line)
            parts.append((re.sub(r"\d(?:[\d,]|\\\.)*", r"[\\d,.]+(?:e-\\d+)?", text) if self.about else text) + "\n")
        return "".join(parts)

    @property
    def exit_code(self) -> int:
        if any(line.startswith("error") for line in self.shown):
            return 1 if self.command.startswith("dsc doctor") else 2
        return int(self.command.startswith(EXIT_DIFFERS))


def steps(page: str) -> Iterator[Step]:
    """The commands and files of a page, in order."""
    for block in FENCE.finditer(page):
        kind, about, body = block[1], block[2] == "about", block[3]
        name = NAMED.search(page[: block.start()])
        if kind == "console":
            assert body.startswith("$ ")
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, *output = part.removesuffix("\n").split("\n")
                yield Step(command, tuple(output), about)
        elif name:
            yield Step("", (body,), file=name[1])


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a new user whose home has the commands `dsc` and `python`."""
    (home / "bin").mkdir()
    for name, module in (("dsc", "-m compiler.cli.main "), ("python", "")):
        (home / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n', "utf-8")
        (home / "bin" / name).chmod(0o755)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    set_anew = {"HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)}
    return os.environ | set_anew | {"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "COLUMNS": "120"} | more


def type_in(what: Iterable[Step], home: Path, variables: dict[str, str]) -> None:
    """Do each step, starting in the home folder. Commands must print what is shown."""
    folder = home
    for step in what:
        if step.file:
            (folder / step.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / step.file).write_text(step.shown[0], "utf-8")
            continue
        script = f"exec 2>&1\n{step.command}\ncode=$?\npwd > ~/pwd\nexit $code"
        run = progress.run(["bash", "-c", script], folder, variables)
        folder = Path((home / "pwd").read_text("utf-8").strip())
        assert run.returncode == step.exit_code, f"$ {step.command}\n{run.stdout}"
        output = LONG_WORK.sub("", run.stdout).replace(str(home), HOME)
        assert re.fullmatch(step.pattern, output), f"$ {step.command}\n{run.stdout}"
