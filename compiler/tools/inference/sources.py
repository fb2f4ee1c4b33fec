"""Finds the model that a command names: a run or checkpoint with its spec and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.plan.read_files import load_with_files
from dsl.load import load
from dsl.messages.diagnostics import SpecError
from dsl.resolve.chosen import split
from dsl.schema import Spec
from runtime.build.run_copy import folder_of_phase
from runtime.checkpoint.durable_files import num_published
from runtime.checkpoint.loading import LoadedCheckpoint, published_checkpoints, with_base
from runtime.checkpoint.loading import load as load_checkpoint
from runtime.checkpoint.shard_manifest import AT_STEP, MANIFEST, CheckpointError, find_manifest, phase_of
from runtime.data import store
from runtime.data.tokenizer_files import TOKENIZER

# --- Errors


class InferenceError(Exception):
    """A run, checkpoint, text or option cannot be used. `hint` says how to fix it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


# --- Sources

RESOLVED = "spec.resolved"


@dataclass(frozen=True)
class ModelSource:
    """A verified checkpoint with its spec, and if they exist: the folder of the run, the folder of its data, a
    tokenizer.json, and a chat template file outside of the tokenizer's folder."""

    spec: Spec
    checkpoint: LoadedCheckpoint
    run: Path | None = None
    data: Path | None = None
    tokenizer: Path | None = None
    template: Path | None = None
    published: str = ""  # folder of the published model that the checkpoint was imported from

    @property
    def name(self) -> str:
        """Where the weights come from, for messages."""
        return self.published or str(self.checkpoint.path)


def find_source(argument: str, spec: str | None = None) -> ModelSource:
    """Find the model named by RUN, RUN@STEP, a checkpoint folder, or a spec with initial weights.

    `spec`: the spec of a checkpoint whose run is missing. Raises InferenceError, or SpecError if the spec has errors.
    """
    path, step = Path(argument), None
    if not path.exists() and (named := AT_STEP.fullmatch(argument)):
        path, step = Path(named[1]), int(named[2])
    if not path.is_dir() and (path.suffix == ".dsc" or ".dsc:" in argument):
        return _source_of_spec(argument)
    if not path.is_dir():
        raise InferenceError(
            f"there is no folder {path}", "name the folder of a run, RUN@STEP, or a checkpoint in RUN/checkpoints"
        )
    try:
        if (path / RESOLVED).is_file() and (path / "plan.json").exists():
            raise InferenceError(f"{path} is a build, which has no weights", f"train it: dsc train {path}")
        if (path / MANIFEST).is_file() and step is None:
            checkpoint, run = load_checkpoint(path), path.absolute().parent.parent
        elif step is None and num_published(path):
            checkpoint, run = load_checkpoint(path), path.absolute().parent
        else:
            checkpoint, run = _checkpoint_of_run(path, step), path
        checkpoint = with_base(checkpoint)
    except CheckpointError as error:
        raise InferenceError(str(error), "`dsc verify` says which checkpoints of a run are whole") from None
    run_folder = run if (run / RESOLVED).is_file() else None
    data = _data(run, checkpoint)
    beside = checkpoint.path.parent / TOKENIZER
    file = data / TOKENIZER if data else beside
    tokenizer = file if file.is_file() else None
    return ModelSource(
        _spec(folder_of_phase(run, phase_of(checkpoint.meta)), spec), checkpoint, run_folder, data, tokenizer
    )


def _source_of_spec(argument: str) -> ModelSource:
    """The initial checkpoint of a spec's run."""
    spec, folder = load(argument), Path(split(argument)[0]).parent
    if spec.model.customs:
        raise InferenceError(f"{argument} has user-defined modules", "name a run of it, which has their graphs")
    if spec.train.initial is None:
        raise InferenceError(
            f"{argument} has no initial weights (`train.initial`)", "name its run: dsc train writes runs/<run>"
        )
    try:
        checkpoint = load_checkpoint(find_manifest(folder / spec.train.initial).path)
    except CheckpointError as error:
        raise InferenceError(str(error), "`dsc verify` says which checkpoints are whole") from None
    chat = spec.data.chat
    tokenizer = folder / spec.data.tokenizer if isinstance(spec.data.tokenizer, str) else None
    return ModelSource(
        spec,
        checkpoint,
        tokenizer=tokenizer if tokenizer is not None and tokenizer.is_file() else None,
        template=folder / chat.template if chat is not None and chat.template is not None else None,
    )


def _checkpoint_of_run(run: Path, step: int | None) -> LoadedCheckpoint:
    """The newest good checkpoint of a run, or the newest at `step`. Raises CheckpointError if that is damaged."""
    checkpoints, refused = published_checkpoints(run / "checkpoints")
    if not checkpoints and not refused and (run / "config.json").is_file():
        raise InferenceError(f"{run} is a published model", f"import it: dsc import hf {run} -o model.dsc")
    if not checkpoints and not refused:
        raise InferenceError(f"{run} holds no checkpoint", "`dsc train` saves one at the end of a run")
    if step is None:
        return load_checkpoint(run / "checkpoints")
    for checkpoint in checkpoints:
        if checkpoint.step == step:
            return checkpoint.verify()
    steps = ", ".join(f"{saved_step:,}" for saved_step in sorted({checkpoint.step for checkpoint in checkpoints}))
    raise InferenceError(f"{run} holds no checkpoint of step {step:,}", f"it has those of steps {steps}")


def _spec(run: Path, spec: str | None) -> Spec:
    path = Path(spec) if spec is not None else run / RESOLVED
    if spec is None and not path.is_file():
        raise InferenceError(f"there is no {path}, which describes the model", "name its spec: --spec SPEC")
    try:
        parsed = load(path)
        return load_with_files(path) if parsed.model.customs else parsed
    except OSError as error:
        raise InferenceError(f"{path} cannot be read: {error.strerror or error}") from None
    except SpecError as error:
        if spec is not None:
            raise
        raise InferenceError(f"{path} is damaged: {error}") from None


def _data(run: Path, checkpoint: LoadedCheckpoint) -> Path | None:
    """The folder of prepared data that a checkpoint names, if the run has it."""
    try:
        metas: list[tuple[Path, Any]] = [(folder, store.meta_of(folder)) for folder in store.folders(run / "data")]
    except OSError:
        return None
    wanted = checkpoint.meta.get("data")
    return next((folder for folder, meta in metas if meta is not None and meta.get("sha256") == wanted), None)
