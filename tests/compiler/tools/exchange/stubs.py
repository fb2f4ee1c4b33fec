"""Stand-ins for packages of other systems: modules of any name whose calls record their arguments."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

FIELDS = json.loads((Path(__file__).parent / "fields.json").read_text("utf-8"))  # read from the released packages


class Recorded:
    """Any object of another system. Records attributes and calls, which return such objects again."""

    def __init__(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        self.__dict__.update(_name=name, _arguments=arguments or {}, _set={})

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self._set.setdefault(key, Recorded(f"{self._name}.{key}"))

    def __setattr__(self, key: str, value: Any) -> None:
        self._set[key] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Recorded:
        return Recorded(self._name, kwargs | {str(index): argument for index, argument in enumerate(args)})

    def __iter__(self) -> Iterator[Recorded]:
        return iter([Recorded(f"{self._name}[0]")])

    def __getitem__(self, key: object) -> Recorded:
        return Recorded(f"{self._name}[{key}]")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all modules of the replaced packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda key: Recorded(key)  # type: ignore[method-assign]


@contextmanager
def standing_in(*packages: str) -> Iterator[None]:
    """Replace these packages with stand-ins inside the context."""
    before, finder = set(sys.modules), _Finder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in packages:
                del sys.modules[name]


def load(path: Path) -> ModuleType:
    """A module from its file."""
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls(value: Any) -> Iterator[Recorded]:
    """All calls in a value."""
    if isinstance(value, Recorded):
        if value._arguments:
            yield value
        for child in (*value._arguments.values(), *value._set.values()):
            yield from calls(child)
    elif isinstance(value, dict):
        for child in value.values():
            yield from calls(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from calls(child)
