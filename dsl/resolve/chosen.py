"""Choose a file, a run and a phase: `SPEC`, `SPEC:RUN`, `SPEC:RUN.PHASE`, `SPEC:RUN.2`."""

from __future__ import annotations

from pathlib import Path

from dsl.messages.diagnostics import Diagnostic, SpecError
from dsl.resolve import phases
from dsl.resolve.context import suggest
from dsl.resolve.files import Definitions, collect, is_run_name
from dsl.resolve.phases import SEPARATOR


def find(folder: str | Path = ".") -> Path:
    """Return the only spec in a folder, a `.dsc` file with a run block. Raises SpecError if there is none or
    several."""
    names = sorted(path for path in Path(folder).glob("*.dsc") if path.is_file())
    specs = [path for path in names if runs_of(collect(str(path)))]
    if len(specs) == 1:
        return specs[0]
    if specs:
        names_text = ", ".join(str(path) for path in specs)
        raise SpecError(
            [Diagnostic("E0404", f"there are several specs here: {names_text}", hint=f"name one: `{specs[0]}`")]
        )
    message = "there is no spec here: a .dsc file with a run block"
    raise SpecError(
        [Diagnostic("E0404", message, hint="name a spec, change to its folder, or write one with `dsc init`")]
    )


def split(path: str, run: str | None = None) -> tuple[str, str | None]:
    """Split `SPEC:RUN` or `SPEC:RUN.PHASE` into file and run, unless a file has that whole name."""
    head, colon, name = path.rpartition(":")
    if run is None and colon and is_run_name(name) and not Path(path).exists():
        return head, name
    return path, run


def runs_of(definitions: Definitions) -> tuple[str, ...]:
    """Names of the runs that a file itself defines, without those of its imports."""
    return tuple(dict.fromkeys(name for kind, name in definitions.of_first_file if kind == "run"))


def runs_in(path: str | Path) -> tuple[str, ...]:
    """Names of the runs in a file, without those of its imports."""
    return runs_of(collect(str(path)))


def phases_in(path: str | Path, run: str | None = None) -> tuple[str, ...]:
    """Names of the phases of a run, which `load` accepts as runs; for a run without phases, its own name.

    Empty if the run is unknown: `load` reports why.
    """
    file, run = split(str(path), run)
    return phases_of(collect(file), file, run)


def phases_of(definitions: Definitions, file: str, run: str | None) -> tuple[str, ...]:
    """All phases of a run, by the names that `choose` returns; if `run` names one phase, only this one."""
    name = choose(definitions, file, run)
    if not name:
        return ()
    return (name,) if run is not None and SEPARATOR in run else phases.phases_of(definitions, name)


def choose(definitions: Definitions, file: str, run: str | None) -> str:
    """Return the name of the chosen run, or of a phase of it; "" if there is none, which is reported."""
    runs = runs_of(definitions)
    if run is not None:
        owner = phases.run_of(definitions, run)
        if ("run", owner) in definitions.blocks:
            names = phases.phases_of(definitions, owner)
            number = run.removeprefix(f"{owner}{SEPARATOR}")
            numbered = names[int(number) - 1 :][:1] if number.isdecimal() and int(number) else ()
            if run in names or numbered:
                return run if run in names else numbered[0]
            phases.report_unknown(definitions, file, run)
            return ""
        if definitions.broken or definitions.damaged:
            return ""  # it may be in the part that could not be read
        definitions.complain("E0404", f"{file} has no run `{run}`", None, suggest(run, runs, "run"))
        return ""
    if len(runs) == 1:
        return runs[0]
    if runs:
        names_text = ", ".join(f"`{file}:{name}`" for name in runs)
        definitions.complain("E0404", f"{file} has several runs", None, f"name one: {names_text}")
    elif not definitions.broken and not definitions.damaged:
        hint = "add `run pretrain { model = …, cluster = … }`"
        definitions.complain("E0404", f"{file} has no run block", None, hint)
    return ""
