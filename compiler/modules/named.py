"""The file and the class that a spec names a module by, looked at without running anything. No torch."""

from __future__ import annotations

import ast
from pathlib import Path


class ModuleError(Exception):
    """A module that cannot be a layer; `hint`: what mends it."""

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
    path = folder / file
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ModuleError(f"{file} cannot be read: {reason}", f"write class {name} into {file}") from None
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ModuleError(f"{file}{line} is no Python: {said}", "correct the file") from None
    names = list(dict.fromkeys(found for statement in body for found in _bound(statement)))
    if name not in names and "*" not in names:
        classes = [statement.name for statement in body if isinstance(statement, ast.ClassDef)]
        hint = f'write `module = "{file}:{classes[-1]}"`' if classes else f"write `class {name}(torch.nn.Module): …`"
        raise ModuleError(f"{file} has no class {name}", hint)
    return path, name, source


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
