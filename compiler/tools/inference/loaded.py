"""A model with the weights of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from compiler.model.modules.named import ModuleError
from compiler.tools.inference.checkpoint_weights import read_weights
from compiler.tools.inference.faults import InferenceError
from compiler.tools.inference.language_model import LanguageModel, on_one_rank
from compiler.tools.inference.sources import Source
from runtime.checkpoint.shard_manifest import CheckpointError

# The quickstart, 7.4M weights, writes 240 tokens a second with one thread. With two, where other processes use the two
# cores too, it writes 16: the threads wait for one another at the end of each product, of some 10 µs.
SMALL = 10**8


def load_model(source: Source, dtype: str, *, average: bool, progress: Callable[[str], None]) -> LanguageModel:
    """The model of a run, with the weights of its checkpoint. InferenceError where they do not fit.

    `dtype`: "" for the run's own. `average`: take the moving average of the weights.
    """
    spec = on_one_rank(source.spec, dtype)
    try:
        return LanguageModel(spec, read_weights(spec, source.checkpoint, progress, average))
    except ModuleError as error:
        raise InferenceError(str(error), "leave --dtype out") from None
    except CheckpointError as error:
        raise InferenceError(str(error), "`dsc verify` says which files are damaged") from None


def divide_work(model: LanguageModel) -> None:
    """Let one thread of this process compute a model that is small, if the user has not said how many are to."""
    if model.num_weights < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
