"""What the commands are given: a run or a checkpoint, and the spec and the tokenizer that belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.plan.read_files import load_with_files
from dsl.load import load
from dsl.messages.diagnostics import SpecError
from dsl.resolve.chosen import split
from dsl.schema import Spec
from runtime.build.run_copy import described
from runtime.checkpoint.durable_files import num_published
from runtime.checkpoint.loading import LoadedCheckpoint, published, with_base
from runtime.checkpoint.loading import load as load_checkpoint
from runtime.checkpoint.shard_manifest import AT_STEP, MANIFEST, CheckpointError, find_manifest, phase_of
from runtime.data import store
from runtime.data.tokenizer_files import TOKENIZER

# --- What a user has to mend before a model can be evaluated or asked for text


class InferenceError(Exception):
    """A run, a checkpoint, a text or an option that cannot be used; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


# --- sources

RESOLVED = "spec.resolved"


@dataclass(frozen=True)
class ModelSource:
    """A verified checkpoint and its spec; what belongs to them and is there: the folder of the run, that of the run's
    data, a tokenizer.json, and a file of a chat template that is not beside it."""

    spec: Spec
    checkpoint: LoadedCheckpoint
    run: Path | None = None
    data: Path | None = None
    tokenizer: Path | None = None
    template: Path | None = None
    published: str = ""  # the folder of a published model that the checkpoint was made of

    @property
    def name(self) -> str:
        """What the weights are read from."""
        return self.published or str(self.checkpoint.path)


def find_source(argument: str, spec: str | None = None) -> ModelSource:
    """What RUN, RUN@STEP, the folder of a checkpoint, or a spec whose run begins with a checkpoint names.

    `spec`: of the checkpoint, where its run is not there. Raises InferenceError, or SpecError for a spec that has
    mistakes.
    """
    path, step = Path(argument), None
    if not path.exists() and (named := AT_STEP.fullmatch(argument)):
        path, step = Path(named[1]), int(named[2])
    if not path.is_dir() and (path.suffix == ".dsc" or ".dsc:" in argument):
        return _of_spec(argument)
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
            checkpoint, run = _of_run(path, step), path
        checkpoint = with_base(checkpoint)
    except CheckpointError as error:
        raise InferenceError(str(error), "`dsc verify` says which checkpoints of a run are whole") from None
    here = run if (run / RESOLVED).is_file() else None
    data = _data(run, checkpoint)
    beside = checkpoint.path.parent / TOKENIZER
    file = data / TOKENIZER if data else beside
    tokenizer = file if file.is_file() else None
    return ModelSource(_spec(described(run, phase_of(checkpoint.meta)), spec), checkpoint, here, data, tokenizer)


def _of_spec(argument: str) -> ModelSource:
    """The checkpoint that the run of a spec begins with."""
    spec, folder = load(argument), Path(split(argument)[0]).parent
    if spec.model.customs:
        raise InferenceError(f"{argument} has modules of its own", "name a run of it, which has their graphs")
    if spec.train.initial is None:
        raise InferenceError(
            f"{argument} says no weights to begin with (`train.initial`)", "name its run: dsc train writes runs/<run>"
        )
    try:
        checkpoint = load_checkpoint(find_manifest(folder / spec.train.initial)[0])
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


def _of_run(run: Path, step: int | None) -> LoadedCheckpoint:
    """The newest good checkpoint of a run, or the newest of a step. CheckpointError if that is damaged."""
    found, refused = published(run / "checkpoints")
    if not found and not refused and (run / "config.json").is_file():
        raise InferenceError(f"{run} is a published model", f"import it: dsc import hf {run} -o model.dsc")
    if not found and not refused:
        raise InferenceError(f"{run} holds no checkpoint", "`dsc train` saves one at the end of a run")
    if step is None:
        return load_checkpoint(run / "checkpoints")
    for checkpoint in found:
        if checkpoint.step == step:
            return checkpoint.verify()
    steps = ", ".join(f"{each:,}" for each in sorted({checkpoint.step for checkpoint in found}))
    raise InferenceError(f"{run} holds no checkpoint of step {step:,}", f"it has those of steps {steps}")


def _spec(run: Path, given: str | None) -> Spec:
    path = Path(given) if given is not None else run / RESOLVED
    if given is None and not path.is_file():
        raise InferenceError(f"there is no {path}, which says what the model is", "name its spec: --spec SPEC")
    try:
        found = load(path)
        return load_with_files(path) if found.model.customs else found
    except OSError as error:
        raise InferenceError(f"{path} cannot be read: {error.strerror or error}") from None
    except SpecError as error:
        if given is not None:
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
