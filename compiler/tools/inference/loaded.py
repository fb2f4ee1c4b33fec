"""A model with the weights of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from compiler import ir
from compiler.model.modules.named import ModuleError
from compiler.plan.blocks import model_steps
from compiler.plan.parameters import tensors
from compiler.tools.inference.language_model import LanguageModel, on_one_rank
from compiler.tools.inference.sources import InferenceError, ModelSource
from dsl.schema import Spec
from runtime.checkpoint.loading import LoadedCheckpoint
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.contract.names import AVERAGE, BIAS, TABLE, WEIGHT, StoredName, has_average

# --- The weights of a checkpoint, as the segments of a spec read them

SHOWN = 4  # parameters that a message names


def read_weights(
    spec: Spec, checkpoint: LoadedCheckpoint, progress: Callable[[str], None], average: bool
) -> dict[str, Tensor]:
    """Every tensor that the segments of a spec of one rank read, by name, in the dtype in which they read it.

    `average`: the moving average of the weights in their place. Raises InferenceError where the checkpoint is of
    another model, and CheckpointError where it is damaged.
    """
    steps = model_steps(spec)
    dtypes = {
        name: param.dtype
        for step in steps
        if isinstance(step, ir.Use)
        for param, (_, name) in zip(step.segment.params, step.params, strict=True)
    }
    rows = tensors(spec, steps)
    kind = AVERAGE if average else WEIGHT
    if average and not has_average(checkpoint.shapes):
        raise InferenceError(f"{checkpoint.path} has no moving average of the weights", "leave --average out")
    kinds = {"bias": BIAS, "frozen": WEIGHT, "table": TABLE}
    names = {row.name: [StoredName.of(kinds.get(row.role, kind), name) for name in row.names()] for row in rows}
    wanted = {name: row.shape for row in rows for name in names[row.name]}
    held = {name: checkpoint.shapes.get(name) for name in wanted}
    # published models without a balancing bias have none, which is a bias of 0
    wrong = [name for name, shape in held.items() if shape != wanted[name] and (shape or name.kind != BIAS)]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise InferenceError(
            f"{checkpoint.path} is of another model than the spec: {', '.join(map(_plain, wrong[:SHOWN]))}{more}"
            " are missing or have another shape"
        )
    found: dict[str, Tensor] = {}
    for row in rows:
        progress(f"read {row.name}")
        here = [name for name in names[row.name] if name in checkpoint.shapes]
        parts = list(checkpoint.read(here).values()) or [torch.zeros(row.shape)]
        whole = parts[0] if row.num_experts is None else torch.stack(parts)
        found[row.name] = whole.to(getattr(torch, dtypes[row.name]))
    progress("")
    return found


def _plain(name: str) -> str:
    return name.partition("/")[2]


# --- loaded

# The quickstart, 7.4M weights, writes 240 tokens a second with one thread. With two, where other processes use the two
# cores too, it writes 16: the threads wait for one another at the end of each product, of some 10 µs.
SMALL = 10**8


def load_model(source: ModelSource, dtype: str, *, average: bool, progress: Callable[[str], None]) -> LanguageModel:
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
