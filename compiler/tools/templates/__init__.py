"""The specs that `dsc init` writes: the starter and every shipped spec, each as one file without imports."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsl.messages.diagnostics import SpecError
from dsl.resolve.files import read
from dsl.text.edits import Edit, apply
from dsl.text.parser import parse
from dsl.text.syntax import Import

STARTER = "starter"
HERE = Path(__file__).parent
SHIPPED = (HERE / "specs", HERE.parents[2] / "specs")  # in a wheel, in a clone


def names() -> tuple[str, ...]:
    """Return the names of all templates, the starter first."""
    return (STARTER, *sorted(path.stem for folder in SHIPPED for path in folder.glob("*.dsc")))


def template(name: str, target: Path) -> str:
    """Return the text of a template for the file `target`, whose name is in the commands of its comments.

    The run of the starter is named after the file. Raises SpecError if the installation is damaged.
    """
    if name == STARTER:
        text = inline_imports(HERE / f"{STARTER}.dsc")
        return text.replace(f"{STARTER}.dsc", target.name).replace(STARTER, run_name(target))
    path = next(folder / f"{name}.dsc" for folder in SHIPPED if (folder / f"{name}.dsc").exists())
    return inline_imports(path).replace(f"specs/{name}.dsc", target.name)


def run_name(file: Path) -> str:
    """Return a run name for a file: `my-run.dsc` → my_run. `train` is changed, as it would read as the block."""
    name = re.sub(r"[^0-9A-Za-z_]+", "_", file.stem).strip("_")[:40]
    return name if re.match("[A-Za-z_]", name) and name != "train" else f"run_{name}" if name[:1].isdigit() else "first"


def inline_imports(path: Path) -> str:
    """Return the text of a spec in which imports are replaced by the imported text, once each. Comments are kept."""
    return _inline_imports(path, set())


def _inline_imports(path: Path, seen: set[str]) -> str:
    seen.add(os.path.realpath(path))
    source, mistakes = read(str(path))
    parsed = parse(source)
    if mistakes or parsed.diagnostics:
        raise SpecError((*mistakes, *parsed.diagnostics))
    imports = [statement for statement in parsed.document.body if isinstance(statement, Import)]
    edits = []
    for statement in imports:
        imported = path.parent / statement.path.value
        text = "" if os.path.realpath(imported) in seen else _inline_imports(imported, seen).strip("\n")
        before = "" if source.text[: statement.span.start].endswith("\n\n") or not text else "\n"
        edits.append(Edit(statement.span, f"{before}{text}\n" if text else ""))
    return apply(source.text, edits)
