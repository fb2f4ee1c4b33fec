"""The one way in which the files that a spec names are read into its value: schedule, placement of experts, rates, the
checkpoint that its weights begin with, modules of its own, and rewards.

Every command that plans, checks or reports comes here, and so does the editor. A kind of file is a row of `KINDS`; its
module reads the file and holds it to the spec. What is wrong with it is said at the place that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.files.text import TextFileError, read_text
from compiler.plan.parameters import model_parameters, stored
from compiler.plan.spec_files import SpecFiles, files_of
from dsl.closed_forms import ramp
from dsl.facts.schedules import DEFAULT
from dsl.load import Analysis, load
from dsl.messages.diagnostics import Diagnostic, Span, SpecError
from dsl.schema import Spec
from runtime.checkpoint.shard_manifest import BASE, CheckpointError, digest, find_manifest
from runtime.contract import Initial
from runtime.contract.names import StoredName
from runtime.contract.options import run_name

if TYPE_CHECKING:
    from compiler.ir.module import SpecModules
    from compiler.machine.rates.table import RateTable


# --- The checkpoint that a spec's weights begin with, held to its model. Only the manifest is read: no torch

MAX_SHOWN = 6
MAX_CONTEXT = 1 << 40
INDEXER = ".attention.indexer."  # in the names of its parameters


class InitialError(ValueError):
    """A checkpoint that is not one of this model."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def initial_weights_for(spec: Spec, path: Path) -> Initial:
    """The checkpoint at `path`, with its digest. Raises InitialError if a parameter of the model is not in it: but for
    indexers, of which a checkpoint may have none where they are trained. They then begin at random."""
    assert spec.train.initial is not None
    if spec.model.customs:
        message = "a model with modules of its own begins at random: what a checkpoint has of them is not looked at"
        raise InitialError(message, "remove `initial`; `dsc train --resume` goes on with a run")
    try:
        found, manifest = find_manifest(path)
    except CheckpointError as error:
        raise InitialError(str(error), "name a checkpoint, or a folder of checkpoints, or a run") from None
    if BASE in manifest.meta:
        message = f"{found} has adapters alone, not the weights that they are beside"
        raise InitialError(message, "merge them: `dsc export hf`, then `dsc import hf` of what that writes")
    held = {entry.name: entry.shape for shard in manifest.shards for entry in shard.entries}
    wanted = {stored(each): each.shape for each in model_parameters(spec.model)}
    if spec.adapter is None and not any(INDEXER in name for name in held):
        wanted = {name: shape for name, shape in wanted.items() if INDEXER not in name}
    wrong = [f"{StoredName(name).name} is missing" for name in wanted if name not in held]
    wrong += [
        f"{StoredName(name).name} is {_extents(held[name])}, in the model {_extents(shape)}"
        for name, shape in wanted.items()
        if name in held and held[name] != shape
    ]
    if wrong:
        more = f" and {len(wrong) - MAX_SHOWN:,} more" if len(wrong) > MAX_SHOWN else ""
        message = f"{found} is of another model: {', '.join(wrong[:MAX_SHOWN])}{more}"
        raise InitialError(message, "`dsc verify` says what the checkpoint has, `dsc show` what the model is")
    model_type, context = once_published(manifest.meta)
    return Initial(spec.train.initial, digest(manifest), model_type, context)


def once_published(meta: Mapping[str, Any]) -> tuple[str, int]:
    """The type and the tokens of a sequence of the published model that a checkpoint was imported from, or whose
    training it is; "" and 0 if it is of none."""
    found = meta.get("published")
    if not isinstance(found, dict):
        found = meta
        for key in ("plan", "train", "initial"):
            found = found.get(key) if isinstance(found, Mapping) else None
    found = found if isinstance(found, Mapping) else {}
    model_type, context = found.get("model_type"), found.get("context")
    return (
        model_type if isinstance(model_type, str) and model_type.replace("_", "").isalnum() else "",
        context if type(context) is int and 0 <= context <= MAX_CONTEXT else 0,
    )


def _extents(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{extent:,}" for extent in shape)


# --- read files


class _FileError(Exception):
    """A file that cannot be read, or does not fit its spec."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Kind:
    """A kind of file. `read` takes the spec, the path, and the keys of the spec that are `auto`."""

    field: str  # of SpecFiles
    key: str  # of the spec: where the path is written
    code: str  # of what is wrong with it
    read: Callable[[Spec, Path, Sequence[str]], object]
    copied: bool = True  # whether a build has a copy; else it has all that it needs to know of the file


def _schedule(spec: Spec, path: Path, opened: Sequence[str]) -> object:
    from compiler.schedule.schedule import ScheduleError
    from compiler.schedule.spec_schedule import schedule_for

    try:
        return schedule_for(spec, path)
    except ScheduleError as error:
        sizes = f"--ranks {spec.parallel.pipeline} --micro-batches {ramp.micro_batches(spec)[-1]}"
        hint = f"`dsc schedule --name {DEFAULT} {sizes}` prints one of this run's sizes"
        raise _FileError(str(error), hint) from None


def _expert_placement(spec: Spec, path: Path, opened: Sequence[str]) -> object:
    from compiler.plan.experts.layout import PlacementError  # with numpy
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
    """The spec of `folder` with the files that it names; SpecError with all that is wrong with them.

    `opened`: keys that are `auto`. `table`: of rates, in the place of the one that the spec names. `runs`: of the file,
    whose folders need not be there yet to begin with: `to_come` says so where they have to be.
    """
    files, mistakes = _read(spec, origins, folder, opened, table, runs=runs)
    modules, of_modules = _modules(spec, origins, folder)
    rewards, of_rewards = _rewards(spec, origins, folder)
    if found := (*mistakes, *of_modules, *of_rewards):
        raise SpecError(found)
    return spec.with_files(replace(files, modules=modules, rewards=rewards or None))


def to_come(spec: Spec, origins: Mapping[str, Span]) -> tuple[Diagnostic, ...]:
    """What is wrong with a run that is to begin, if it needs a folder that another run of its file has not left yet."""
    begins = spec.train.initial
    if begins is None or files_of(spec).initial is not None:
        return ()
    hint = f"train run `{Path(begins).name}` of this file first"
    return (Diagnostic("W0101", f"there is no folder {begins} yet", origins.get("train.initial"), hint),)


def load_with_files(path: Path) -> Spec:
    """The run of the spec.resolved of a build or of a run, with the files that lie beside it. SpecError."""
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
    """What is wrong with the files that the runs of an analysed file name; the file itself has no mistakes. Nothing in
    them is run. The folder that another run of the file will leave need not be there."""
    views = [view for view in analysis.views if hasattr(view.spec, "train")]
    folder, runs = Path(file).parent, {run_name(view.spec.name) for view in views}
    found = [_read(view.spec, view.context.origins, folder, tuple(view.context.chosen), runs=runs)[1] for view in views]
    found += [_modules(view.spec, view.context.origins, folder, run=False)[1] for view in views]
    found += [_rewards(view.spec, view.context.origins, folder)[1] for view in views]
    return tuple(dict.fromkeys(mistake for each in found for mistake in each))


def _modules(
    spec: Spec, origins: Mapping[str, Span], folder: Path, run: bool = True
) -> tuple[SpecModules | None, tuple[Diagnostic, ...]]:
    """The modules that a spec names, and what is wrong with them. `run`: their files, to trace them at the run's sizes;
    else they are looked at alone."""
    if not spec.model.customs:
        return None, ()
    if (given := files_of(spec).modules) is not None:
        return given, ()
    from compiler.model.layers.custom import all_wanted
    from compiler.model.modules.named import ModuleError, source_of
    from compiler.model.modules.source import ModuleFiles

    modules, mistakes = ModuleFiles(folder), []
    for path, wanted in all_wanted(spec).items():
        try:
            if run:
                modules.module(wanted)
            else:
                source_of(wanted.text, folder)
        except ModuleError as error:
            mistakes.append(Diagnostic("M0101", str(error), origins.get(path), error.hint))
    return modules, tuple(mistakes)


def _rewards(spec: Spec, origins: Mapping[str, Span], folder: Path) -> tuple[dict[str, str], tuple[Diagnostic, ...]]:
    """The texts of the files of rewards that a spec names, by the name of the reward, and what is wrong with them."""
    from compiler.model.modules.named import ModuleError, reward_source

    texts, mistakes = {}, []
    for each in spec.train.grpo.rewards if spec.train.grpo else ():
        try:
            if each.file is not None:
                texts[each.name] = reward_source(each.file, each.function, folder)
        except ModuleError as error:
            at = origins.get(f"train.grpo.rewards.{each.name}.file")
            mistakes.append(Diagnostic("M0102", str(error), at, error.hint))
    return texts, tuple(mistakes)


def _recorded_modules(path: Path) -> SpecModules:
    """The modules of the build or run that a spec.resolved is of."""
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
            message = "a schedule's file is of one size: what it is for cannot be auto"
            place = origins.get(opened[0])
            mistakes.append(Diagnostic(kind.code, message, place, "write the number, or name a schedule"))
            continue
        try:
            read[kind.field] = kind.read(spec, folder / path, opened)
        except _FileError as error:
            mistakes.append(Diagnostic(kind.code, str(error), origins.get(kind.key), error.hint))
    return SpecFiles(**({"rate_table": table} | read)), tuple(mistakes)  # type: ignore[arg-type]
