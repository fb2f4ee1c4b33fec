"""Imports the emitted modules of a build from the bytes that were verified, whatever its folder holds by then.

A build is a package of its own name, so that `stages/rank_0.py` can say `from ..segments import …` and several builds
can live in one process. A module has the path of its file, and `linecache` the text that runs: tracebacks, pdb, and
Triton, which reads the source of a kernel, show this text.
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
        """The module `name` below the package: `stages.rank_0`. Raises whatever its code raises."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return importlib.import_module(f"{self.package}.{name}")

    def name_of(self, path: Path) -> str | None:
        """The name below the package of the module whose file this is; None where it is no file of the build."""
        try:
            file = path.relative_to(self.folder).as_posix()
        except ValueError:
            return None
        return file.removesuffix(".py").replace("/", ".") if file in self.sources else None

    # ---- what the import system asks

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
        """Whether it is the build, or a folder of modules in it; these hold no code."""
        folder = self._file(fullname)
        return not folder or any(file.startswith(f"{folder}/") for file in self.sources)

    def get_source(self, fullname: str) -> str | None:
        """The text of a module; None of a folder."""
        source = self.sources.get(self._file(fullname) + ".py")
        return None if source is None else source.decode("utf-8")

    def exec_module(self, module: ModuleType) -> None:
        if self.is_package(module.__name__):
            return
        path, text = str(module.__file__), self.get_source(module.__name__)
        assert text is not None, module
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # no time: never read again
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))

    def _file(self, fullname: str) -> str:
        """stages/rank_0, of dsc_build_0123.stages.rank_0; "" of the package itself."""
        return fullname.partition(".")[2].replace(".", "/")


def module_at(path: Path) -> ModuleType | None:
    """The module of a build whose file is at `path`, imported; None where no build that is in use has it."""
    for finder in sys.meta_path:
        if isinstance(finder, BuildModules) and (name := finder.name_of(path)):
            return finder.load(name)
    return None
