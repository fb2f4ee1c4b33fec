"""The file and the class or function that a spec names, looked at without running anything. No torch."""

from __future__ import annotations

import ast
from pathlib import Path

from compiler.files.text import TextFileError, python_of, read_text

MAX_BYTES = 4 << 20  # of a file; parsing one takes a hundred times its bytes


class ModuleError(Exception):
    """A module that cannot be a layer, or a file without the function of a reward; `hint`: what mends it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def split(text: str) -> tuple[str, str]:
    """(file, class) of `layers.py:Mixer`. ModuleError where it is not of this form."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ModuleError(f"`{text}` does not name a file and a class", 'write `module = "FILE.py:CLASS"`')
    return file, name


def source_of(text: str, folder: Path) -> tuple[Path, str, str]:
    """(path, class, source) of a module that a spec of `folder` names. ModuleError where file or class is not there.

    The source is parsed, and not run.
    """
    file, name = split(text)
    source, body = _read(file, folder, f"class {name}")
    if not _binds(body, name):
        classes = [statement.name for statement in body if isinstance(statement, ast.ClassDef)]
        hint = f'write `module = "{file}:{classes[-1]}"`' if classes else f"write `class {name}(torch.nn.Module): …`"
        raise ModuleError(f"{file} has no class {name}", hint)
    return folder / file, name, source


def reward_source(file: str, function: str, folder: Path) -> str:
    """The source of a file of rewards that a spec of `folder` names. ModuleError where file or function is not there.

    The source is parsed, and not run.
    """
    source, body = _read(file, folder, f"function {function}")
    if not (function.isidentifier() and function.isascii() and _binds(body, function)):
        functions = [each.name for each in body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
        hint = f'write `function = "{functions[-1]}"`' if functions else f"write `def {function}(…): …` into {file}"
        raise ModuleError(f"{file} has no function {function}", hint)
    return source


def _read(file: str, folder: Path, wanted: str) -> tuple[str, list[ast.stmt]]:
    """The text of a file, and its statements. `wanted`: what it is to have."""
    try:
        source = read_text(folder / file, MAX_BYTES, file)
    except TextFileError as error:
        raise ModuleError(f"{error}", f"write {wanted} into {file}") from None
    try:
        return source, python_of(source).body
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        raise ModuleError(f"{file}{line} is no Python: {error.msg}", "correct the file") from None


def _binds(body: list[ast.stmt], name: str) -> bool:
    """Whether a file may bind a name."""
    return not {name, "*"}.isdisjoint(found for statement in body for found in _bound(statement))


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement of a file may bind; those of inner statements too."""
    found: list[str] = []
    for node in ast.walk(statement):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.append(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [(alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return found
