"""Imports the emitted modules of a build from the verified bytes, not from its folder.

Each build is a package with its own name, so that `stages/rank_0.py` can write `from ..segments import …` and several
builds can be loaded in one process. A module has the path of its file, and `linecache` has the executed text: so
tracebacks, pdb, and Triton, which reads the source of kernels, use this text.
"""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, eq=False)
class BuildModules(MetaPathFinder, InspectLoader):
    """Finder and loader of one build. `sources`: path in the folder → bytes of the Python files."""

    package: str
    folder: Path
    sources: Mapping[str, bytes]

    def load(self, name: str) -> ModuleType:
        """Import the module `name` of the package: `stages.rank_0`. Raises the exceptions of its code."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return importlib.import_module(f"{self.package}.{name}")

    def name_of(self, path: Path) -> str | None:
        """Return the name in the package of the module with this file; None if it is no file of the build."""
        try:
            file = path.relative_to(self.folder).as_posix()
        except ValueError:
            return None
        return file.removesuffix(".py").replace("/", ".") if file in self.sources else None

    # ---- interface of the import system

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.package:
            return None
        if self.is_package(fullname):
            return ModuleSpec(fullname, self, origin=str(self.folder / self._file(fullname)), is_package=True)
        file = self._file(fullname) + ".py"
        if file not in self.sources:
            return None
        spec = ModuleSpec(fullname, self, origin=str(self.folder / file))
        spec.has_location = True  # so that the module has a __file__
        return spec

    def is_package(self, fullname: str) -> bool:
        """Whether the name is the build or a folder of it. Packages have no code."""
        folder = self._file(fullname)
        return not folder or any(file.startswith(f"{folder}/") for file in self.sources)

    def get_source(self, fullname: str) -> str | None:
        """Return the text of a module; None for a package."""
        source = self.sources.get(self._file(fullname) + ".py")
        return None if source is None else source.decode("utf-8")

    def exec_module(self, module: ModuleType) -> None:
        if self.is_package(module.__name__):
            return
        path, text = str(module.__file__), self.get_source(module.__name__)
        assert text is not None, module
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # no time: never re-read
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))

    def _file(self, fullname: str) -> str:
        """Return stages/rank_0 for dsc_build_0123.stages.rank_0; "" for the package itself."""
        return fullname.partition(".")[2].replace(".", "/")


def module_at(path: Path) -> ModuleType | None:
    """Import the module of a loaded build whose file is at `path`; None if there is none."""
    for finder in sys.meta_path:
        if isinstance(finder, BuildModules) and (name := finder.name_of(path)):
            return finder.load(name)
    return None
