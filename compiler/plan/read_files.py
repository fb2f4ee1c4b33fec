"""Reads the files that a spec names: schedule, expert placement, rates, initial checkpoint, custom modules, rewards.

Every command that plans, checks or reports uses this module, and so does the editor. Each kind of file has a row in
`KINDS`, whose function reads the file and checks it against the spec. Mistakes are reported at the place in the spec
that names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.files.text import TextFileError, read_text
from compiler.plan.spec_files import SpecFiles, files_of
from dsl.closed_forms import ramp
from dsl.facts.schedules import DEFAULT
from dsl.load import Analysis, load
from dsl.messages.diagnostics import Diagnostic, Span, SpecError
from dsl.schema import Spec
from runtime.contract.options import run_name

if TYPE_CHECKING:
    from compiler.ir.module import SpecModules
    from compiler.machine.rates.table import RateTable


class _FileError(Exception):
    """A file that cannot be read, or that does not fit its spec."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Kind:
    """A kind of file that a spec may name."""

    field: str  # of SpecFiles
    key: str  # of the spec, whose value is the path
    code: str  # of mistakes in the file
    read: Callable[[Spec, Path, Sequence[str]], object]  # takes the spec, the path, and the keys that are `auto`
    copied: bool = True  # whether a build has a copy; if not, it records what it needs to know about the file


def _schedule(spec: Spec, path: Path, opened: Sequence[str]) -> object:
    from compiler.schedule.schedule import ScheduleError
    from compiler.schedule.spec_schedule import schedule_for

    try:
        return schedule_for(spec, path)
    except ScheduleError as error:
        sizes = f"--ranks {spec.parallel.pipeline} --micro-batches {ramp.micro_batches(spec)[-1]}"
        hint = f"`dsc schedule --name {DEFAULT} {sizes}` prints a schedule of this run's size"
        raise _FileError(str(error), hint) from None


def _expert_placement(spec: Spec, path: Path, opened: Sequence[str]) -> object:
    from compiler.plan.experts.layout import PlacementError  # imports numpy
    from compiler.plan.experts.spec_placement import expert_placement_for

    try:
        return expert_placement_for(spec, path, any_degree="parallel.expert" in opened)
    except PlacementError as error:
        raise _FileError(str(error), error.hint or "`dsc place RUN -o FILE` writes one") from None


def _rate_table(spec: Spec, path: Path, opened: Sequence[str]) -> object:
    from compiler.machine.rates.table import RateError, read_table

    try:
        return read_table(path)
    except RateError as error:
        raise _FileError(str(error), "`dsc calibrate -o rates.json` writes one for this machine") from None


def _initial(spec: Spec, path: Path, opened: Sequence[str]) -> object:
    from compiler.plan.initial import InitialError, initial_weights_for  # imports all layers

    try:
        return initial_weights_for(spec, path)
    except InitialError as error:
        raise _FileError(str(error), error.hint) from None


KINDS = (
    Kind("schedule", "schedule.file", "S0101", _schedule),
    Kind("expert_placement", "parallel.placement", "P0101", _expert_placement),
    Kind("rate_table", "cluster.rates", "R0101", _rate_table),
    Kind("initial", "train.initial", "W0101", _initial, copied=False),
)


def with_files(
    spec: Spec,
    origins: Mapping[str, Span],
    folder: Path,
    opened: Sequence[str] = (),
    table: RateTable | None = None,
    runs: Collection[str] = (),
) -> Spec:
    """The spec in `folder` with the files that it names. Raises SpecError with all mistakes in them.

    `opened`: keys that are `auto`. `table`: rate table that replaces the one that the spec names. `runs`: runs of the
    spec's file, whose folders need not exist yet; `missing_initial_run` reports those that are needed now.
    """
    files, mistakes = _read(spec, origins, folder, opened, table, runs=runs)
    modules, of_modules = _modules(spec, origins, folder)
    rewards, of_rewards = _rewards(spec, origins, folder)
    if all_mistakes := (*mistakes, *of_modules, *of_rewards):
        raise SpecError(all_mistakes)
    return spec.with_files(replace(files, modules=modules, rewards=rewards or None))


def missing_initial_run(spec: Spec, origins: Mapping[str, Span]) -> tuple[Diagnostic, ...]:
    """The mistakes of a run that is about to start, if it needs the folder of another run that is not there yet."""
    begins = spec.train.initial
    if begins is None or files_of(spec).initial is not None:
        return ()
    hint = f"train run `{Path(begins).name}` of this file first"
    return (Diagnostic("W0101", f"there is no folder {begins} yet", origins.get("train.initial"), hint),)


def load_with_files(path: Path) -> Spec:
    """The spec in the spec.resolved of a build or run, with the files next to it. Raises SpecError."""
    spec = load(path)
    files, mistakes = _read(spec, {}, path.parent, kinds=[kind for kind in KINDS if kind.copied])
    if mistakes:
        raise SpecError(mistakes)
    rewards, wrong = _rewards(spec, {}, path.parent)
    if wrong:
        raise SpecError(wrong)
    modules = _recorded_modules(path) if spec.model.customs else None
    return spec.with_files(replace(files, modules=modules, rewards=rewards or None))


def mistakes_of(analysis: Analysis, file: str) -> tuple[Diagnostic, ...]:
    """The mistakes in files that the runs of an analysed spec file name. The spec file itself has none.

    No code in these files runs. The folder of another run of the spec file need not exist yet.
    """
    views = [view for view in analysis.views if hasattr(view.spec, "train")]
    folder, runs = Path(file).parent, {run_name(view.spec.name) for view in views}
    mistakes = [
        _read(view.spec, view.context.origins, folder, tuple(view.context.chosen), runs=runs)[1] for view in views
    ]
    mistakes += [_modules(view.spec, view.context.origins, folder, run=False)[1] for view in views]
    mistakes += [_rewards(view.spec, view.context.origins, folder)[1] for view in views]
    return tuple(dict.fromkeys(mistake for file_mistakes in mistakes for mistake in file_mistakes))


def _modules(
    spec: Spec, origins: Mapping[str, Span], folder: Path, run: bool = True
) -> tuple[SpecModules | None, tuple[Diagnostic, ...]]:
    """The modules that a spec names, and the mistakes in them.

    With `run`, their files are executed to trace them at the run's sizes; otherwise only their source is checked.
    """
    if not spec.model.customs:
        return None, ()
    if (read_before := files_of(spec).modules) is not None:
        return read_before, ()
    from compiler.model.layers.custom import wanted_modules
    from compiler.model.modules.named import ModuleError, source_of
    from compiler.model.modules.source import ModuleFiles

    modules, mistakes = ModuleFiles(folder), []
    for path, wanted in wanted_modules(spec).items():
        try:
            if run:
                modules.module(wanted)
            else:
                source_of(wanted.text, folder)
        except ModuleError as error:
            mistakes.append(Diagnostic("M0101", str(error), origins.get(path), error.hint))
    return modules, tuple(mistakes)


def _rewards(spec: Spec, origins: Mapping[str, Span], folder: Path) -> tuple[dict[str, str], tuple[Diagnostic, ...]]:
    """By name of a reward, the text of the file that a spec names for it; and the mistakes in these files."""
    from compiler.model.modules.named import ModuleError, reward_source

    texts, mistakes = {}, []
    for reward in spec.train.grpo.rewards if spec.train.grpo else ():
        try:
            if reward.file is not None:
                texts[reward.name] = reward_source(reward.file, reward.function, folder)
        except ModuleError as error:
            span = origins.get(f"train.grpo.rewards.{reward.name}.file")
            mistakes.append(Diagnostic("M0102", str(error), span, error.hint))
    return texts, tuple(mistakes)


def _recorded_modules(path: Path) -> SpecModules:
    """The modules of the build or run to which a spec.resolved belongs."""
    from compiler.model.modules.named import ModuleError
    from compiler.model.modules.source import FILE, MAX_BYTES, from_json

    try:
        return from_json(read_text(path.parent / FILE, MAX_BYTES))
    except TextFileError as error:
        raise SpecError([Diagnostic("M0101", str(error))]) from None
    except ModuleError as error:
        raise SpecError([Diagnostic("M0101", f"{path.parent / FILE}: {error}")]) from None


def _read(
    spec: Spec,
    origins: Mapping[str, Span],
    folder: Path,
    opened: Sequence[str] = (),
    table: RateTable | None = None,
    kinds: Sequence[Kind] = KINDS,
    runs: Collection[str] = (),
) -> tuple[SpecFiles, tuple[Diagnostic, ...]]:
    read: dict[str, object] = {}
    mistakes: list[Diagnostic] = []
    for kind in kinds:
        path = attrgetter(kind.key)(spec)
        if path is None or (kind.field == "rate_table" and table is not None):
            continue
        if kind.field == "initial" and Path(path).name in runs and not (folder / path).exists():
            continue
        if opened and kind.field == "schedule":
            message = "a schedule file is for one size, so keys that decide the size cannot be auto"
            place = origins.get(opened[0])
            mistakes.append(Diagnostic(kind.code, message, place, "write the number, or name a schedule"))
            continue
        try:
            read[kind.field] = kind.read(spec, folder / path, opened)
        except _FileError as error:
            mistakes.append(Diagnostic(kind.code, str(error), origins.get(kind.key), error.hint))
    return SpecFiles(**({"rate_table": table} | read)), tuple(mistakes)  # type: ignore[arg-type]
