"""What a module of a user's own may not do, seen while it runs on tensors without numbers; and its first values."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.model.modules.named import ModuleError

FILLED = {"ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero_": 0}
FILLED_BY_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1}
COPIED = {"clone": 0, "_to_copy": 0, "copy_": 1}  # which argument a copy is of
BY_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


class FirstValues(TorchDispatchMode):
    """The number that each tensor is filled with while a module is made; None for those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self._filled: dict[int, float | None] = {}  # by storage

    def constant(self, tensor: Tensor) -> float | None:
        """The one number in a tensor; None where it has several, or nobody knows."""
        return self._filled.get(_storage(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, made = func._schema.name.partition("::")[2], result if isinstance(result, Tensor) else None
        if made is None or (isinstance(args, tuple) and _is_view(func)):
            return result
        number: float | None = FILLED.get(name)
        if name in FILLED_BY_ARGUMENT and isinstance(args[FILLED_BY_ARGUMENT[name]], int | float):
            number = args[FILLED_BY_ARGUMENT[name]]
        if name in COPIED:
            number = self.constant(args[COPIED[name]])
        self._filled[_storage(made)] = number
        return result


class Watch(TorchDispatchMode):
    """Refuses random numbers, and writing into what is not the forward's own. `given`: tensors by what they are."""

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._given = {_storage(tensor): what for what, tensor in given.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ModuleError(f"forward draws random numbers: {func}", "leave it out: no step of a run draws any")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
            if written and (what := self._given.get(_storage(value))):
                raise ModuleError(f"forward writes into {what}: {func}", "compute a new tensor in its place")
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class At:
    """Turns what goes wrong in a user's code into a ModuleError that names the line of the file."""

    def __init__(self, path: Path, doing: str) -> None:
        self._path, self._doing = path, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or not isinstance(error, (Exception, SystemExit)):
            return
        place = _line(traceback.extract_tb(tb), self._path)
        if isinstance(error, ModuleError):
            raise ModuleError(f"{place}{error}", error.hint) from None
        if isinstance(error, BY_NUMBERS):
            message = f"{place}a shape, or which way forward goes, depends on numbers in tensors: {error.func}"
            raise ModuleError(message, "use ops of one shape: torch.where, masks, sums") from None
        said = str(error).strip().split("\n")[0][:300]
        raise ModuleError(f"{place}{self._doing} fails: {type(error).__name__}: {said}", "correct the file") from None


def _line(frames: Iterable[traceback.FrameSummary], path: Path) -> str:
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path.name}:{lines[-1]}: " if lines else ""
