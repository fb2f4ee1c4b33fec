"""Finds the file and the class or function that a spec names, by parsing the file without running it. No torch."""

from __future__ import annotations

import ast
from pathlib import Path

from compiler.files.text import TextFileError, python_of, read_text

MAX_BYTES = 4 << 20  # largest file; parsing takes about a hundred times its size in memory


class ModuleError(Exception):
    """Raised for a module that cannot be a layer, or a file without the reward function. `hint`: how to fix it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def split(text: str) -> tuple[str, str]:
    """Split `layers.py:Mixer` into (file, class). Raises ModuleError for any other form."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ModuleError(f"`{text}` does not name a file and a class", 'write `module = "FILE.py:CLASS"`')
    return file, name


def source_of(text: str, folder: Path) -> tuple[Path, str, str]:
    """Return (path, class, source) of a module that a spec in `folder` names.

    The source is parsed, not run. Raises ModuleError if the file or the class does not exist.
    """
    file, name = split(text)
    source, body = _read(file, folder, f"class {name}")
    if not _binds(body, name):
        classes = [statement.name for statement in body if isinstance(statement, ast.ClassDef)]
        hint = f'write `module = "{file}:{classes[-1]}"`' if classes else f"write `class {name}(torch.nn.Module): …`"
        raise ModuleError(f"{file} has no class {name}", hint)
    return folder / file, name, source


def reward_source(file: str, function: str, folder: Path) -> str:
    """Return the source of the rewards file that a spec in `folder` names.

    The source is parsed, not run. Raises ModuleError if the file or the function does not exist.
    """
    source, body = _read(file, folder, f"function {function}")
    if not (function.isidentifier() and function.isascii() and _binds(body, function)):
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
        hint = f'write `function = "{functions[-1]}"`' if functions else f"write `def {function}(…): …` into {file}"
        raise ModuleError(f"{file} has no function {function}", hint)
    return source


def _read(file: str, folder: Path, wanted: str) -> tuple[str, list[ast.stmt]]:
    """Return the text of a file and its statements. `wanted`: the definition it must contain, for the hint."""
    try:
        source = read_text(folder / file, MAX_BYTES, file)
    except TextFileError as error:
        raise ModuleError(f"{error}", f"write {wanted} into {file}") from None
    try:
        return source, python_of(source).body
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        raise ModuleError(f"{file}{line} is not valid Python: {error.msg}", "correct the file") from None


def _binds(body: list[ast.stmt], name: str) -> bool:
    """Whether a file may bind a name, directly or by a star import."""
    return not {name, "*"}.isdisjoint(bound for statement in body for bound in _bound(statement))


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement may bind, including those of nested statements."""
    names: list[str] = []
    for node in ast.walk(statement):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return names
