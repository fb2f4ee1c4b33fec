"""A model with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from compiler.inference.checkpoint_weights import read_weights
from compiler.inference.faults import InferenceError
from compiler.inference.language_model import LanguageModel, on_one_rank
from compiler.inference.sources import Source
from runtime.checkpoint.shard_manifest import CheckpointError


def load_model(source: Source, dtype: str, *, average: bool, progress: Callable[[str], None]) -> LanguageModel:
    """The model of a run, with the weights of its checkpoint. InferenceError where they do not fit.

    `dtype`: "" for the run's own. `average`: take the moving average of the weights.
    """
    spec = on_one_rank(source.spec, dtype)
    try:
        return LanguageModel(spec, read_weights(spec, source.checkpoint, progress, average))
    except CheckpointError as error:
        raise InferenceError(str(error), "`dsc verify` says which files are damaged") from None
