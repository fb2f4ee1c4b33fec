"""What the commands are given: a run or a checkpoint, and the spec and the tokenizer that belong to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.inference.faults import InferenceError
from dsl.diagnostics import SpecError
from dsl.load import load
from dsl.schema import Spec
from runtime.checkpoint.loading import MANIFEST, Checkpoint, published
from runtime.checkpoint.loading import load as load_checkpoint
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.data import store
from runtime.data.encode import TOKENIZER

RESOLVED = "spec.resolved"
AT_STEP = re.compile(r"(.+)@([0-9]+)")


@dataclass(frozen=True)
class Source:
    """A verified checkpoint and its spec; the folders of its run and of the run's data, if they are there."""

    spec: Spec
    checkpoint: Checkpoint
    run: Path | None
    data: Path | None

    @property
    def tokenizer(self) -> Path | None:
        """The run's tokenizer.json."""
        return self.data / TOKENIZER if self.data else None


def find_source(argument: str, spec: str | None = None) -> Source:
    """What RUN, RUN@STEP or the folder of a checkpoint names. `spec`: of the checkpoint, where its run is not there.

    Raises InferenceError, or SpecError for a spec that has mistakes.
    """
    path, step = Path(argument), None
    if not path.exists() and (named := AT_STEP.fullmatch(argument)):
        path, step = Path(named[1]), int(named[2])
    if not path.is_dir():
        raise InferenceError(
            f"there is no folder {path}", "name the folder of a run, RUN@STEP, or a checkpoint in RUN/checkpoints"
        )
    try:
        if (path / MANIFEST).is_file() and step is None and not (path / "plan.json").exists():
            checkpoint, run = load_checkpoint(path), path.absolute().parent.parent
        elif (path / RESOLVED).is_file() and (path / "plan.json").exists():
            raise InferenceError(f"{path} is a build, which has no weights", f"train it: dsc train {path}")
        else:
            checkpoint, run = _of_run(path, step), path
    except CheckpointError as error:
        raise InferenceError(str(error), "`dsc verify` says which checkpoints of a run are whole") from None
    here = run if (run / RESOLVED).is_file() else None
    return Source(_spec(run, spec), checkpoint, here, _data(run, checkpoint))


def _of_run(run: Path, step: int | None) -> Checkpoint:
    """The newest good checkpoint of a run, or the newest of a step. CheckpointError if that is damaged."""
    found, refused = published(run / "checkpoints")
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
        return load(path)
    except OSError as error:
        raise InferenceError(f"{path} cannot be read: {error.strerror or error}") from None
    except SpecError as error:
        if given is not None:
            raise
        raise InferenceError(f"{path} is damaged: {error}") from None


def _data(run: Path, checkpoint: Checkpoint) -> Path | None:
    """The folder of prepared data that a checkpoint names, if the run has it."""
    try:
        metas: list[tuple[Path, Any]] = [(folder, store.meta_of(folder)) for folder in store.folders(run / "data")]
    except OSError:
        return None
    wanted = checkpoint.meta.get("data")
    return next((folder for folder, meta in metas if meta is not None and meta.get("sha256") == wanted), None)
