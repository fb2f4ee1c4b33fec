"""Reads a build folder: the plan, the programs, and the emitted modules of one pipeline rank.

The folder is a package of its own name, so that `stages/rank_0.py` can say `from ..segments import …` and several
builds can live in one process. Every file is checked against `manifest.json` before anything of it runs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime.certificate import CertificateError, label, recheck


class BuildError(RuntimeError):
    """The build folder is not what `dsc compile` wrote."""


@dataclass(frozen=True)
class Call:
    """One invocation of a body: micro-batches, receives to post before it, sends to release after it."""

    body: str
    micro_batches: tuple[int, ...]
    posts: tuple[tuple[int, str], ...]  # (pipeline rank, message)
    releases: tuple[tuple[int, str], ...]
    label: str  # "F3.0", "(F3.7|B4.2)"


@dataclass(frozen=True)
class Program:
    """Calls of one pipeline rank for a number of micro-batches."""

    name: str
    num_micro_batches: int
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Build:
    folder: Path
    plan: Mapping[str, Any]
    digest: str  # of the manifest: names this build

    @staticmethod
    def open(folder: Path) -> Build:
        """Verify the manifest and the certificates, and read the plan. Raises BuildError naming what is wrong."""
        try:
            text = (folder / "manifest.json").read_bytes()
        except OSError as error:
            raise BuildError(f"{folder} holds no build (manifest.json: {error.strerror}); run dsc compile") from None
        try:
            digests = dict(json.loads(text)["files"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BuildError(f"{folder} is not what dsc compile wrote: manifest.json; compile it again") from None
        for name, entry in digests.items():
            path = folder / name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != entry:
                raise BuildError(f"{path} is not the file that was compiled; run dsc compile again")
        try:
            recheck(folder, digests)
        except CertificateError as error:
            raise BuildError(f"{folder} is not what was proven: {error}; run dsc compile again") from None
        plan = json.loads((folder / "plan.json").read_text("utf-8"))
        return Build(folder, plan, hashlib.sha256(text).hexdigest())

    def programs(self, pipeline_rank: int) -> dict[str, Program]:
        """Every program of the build, by file name without suffix: train_8, evaluate_2."""
        return {p.stem: _program(json.loads(p.read_text("utf-8")), pipeline_rank) for p in self._program_files()}

    def _program_files(self) -> list[Path]:
        return sorted((self.folder / "program").glob("*.json"))

    def bodies(self, pipeline_rank: int) -> Mapping[str, Callable[..., None]]:
        return self.module(f"stages.rank_{pipeline_rank}").BODIES

    def module(self, name: str) -> ModuleType:
        package = f"dsc_build_{self.digest[:16]}"
        if package not in sys.modules:
            root = ModuleType(package)
            root.__path__ = [str(self.folder)]
            sys.modules[package] = root
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the build folder stays as it was written
        try:
            return importlib.import_module(f"{package}.{name}")
        finally:
            sys.dont_write_bytecode = before


def _program(data: Mapping[str, Any], rank: int) -> Program:
    calls = tuple(
        Call(
            body=body,
            micro_batches=tuple(micro_batches),
            posts=tuple((source, message) for source, message in posts),
            releases=tuple((destination, message) for destination, message in releases),
            label=label(body, micro_batches),
        )
        for body, micro_batches, posts, releases in data["ranks"][rank]
    )
    return Program(data["schedule"], data["micro_batches"], calls)
