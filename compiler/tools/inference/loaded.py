"""Loads a model with the weights of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from compiler import ir
from compiler.model.modules.named import ModuleError
from compiler.plan.blocks import model_steps
from compiler.plan.parameters import tensors
from compiler.tools.inference.language_model import LanguageModel, spec_for_one_rank
from compiler.tools.inference.sources import InferenceError, ModelSource
from dsl.schema import Spec
from runtime.checkpoint.loading import LoadedCheckpoint
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.contract.names import AVERAGE, BIAS, TABLE, WEIGHT, StoredName, has_average

# --- Weights

SHOWN = 4  # parameters listed in a message


def read_weights(
    spec: Spec, checkpoint: LoadedCheckpoint, progress: Callable[[str], None], average: bool
) -> dict[str, Tensor]:
    """Read the tensors that the segments of a single-rank spec need, by name, in the dtype that they expect.

    `average`: read the moving average of the weights instead. Raises InferenceError if the checkpoint belongs to
    another model, CheckpointError if it is damaged.
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
    expected = {name: row.shape for row in rows for name in names[row.name]}
    shapes = {name: checkpoint.shapes.get(name) for name in expected}
    # an imported model may lack the balancing bias, which is then 0
    mismatched = [name for name, shape in shapes.items() if shape != expected[name] and (shape or name.kind != BIAS)]
    if mismatched:
        omitted = f" and {len(mismatched) - SHOWN} more" if len(mismatched) > SHOWN else ""
        raise InferenceError(
            f"{checkpoint.path} does not fit the spec's model: {', '.join(map(_name_in_model, mismatched[:SHOWN]))}"
            f"{omitted} are missing or have another shape"
        )
    weights: dict[str, Tensor] = {}
    for row in rows:
        progress(f"read {row.name}")
        present = [name for name in names[row.name] if name in checkpoint.shapes]
        parts = list(checkpoint.read(present).values()) or [torch.zeros(row.shape)]
        tensor = parts[0] if row.num_experts is None else torch.stack(parts)
        weights[row.name] = tensor.to(getattr(torch, dtypes[row.name]))
    progress("")
    return weights


def _name_in_model(name: str) -> str:
    return name.partition("/")[2]


# --- The model

# Products of few rows use one thread. With two threads on two busy cores, the ops of a small model that is not recorded
# wait for each other after every matrix product of about 10 µs.
SMALL = 10**8


def load_model(source: ModelSource, dtype: str, *, average: bool, progress: Callable[[str], None]) -> LanguageModel:
    """Load the model of a run with the weights of its checkpoint. Raises InferenceError if they do not fit.

    `dtype`: "" for the run's dtype. `average`: use the moving average of the weights.
    """
    spec = spec_for_one_rank(source.spec, dtype)
    try:
        return LanguageModel(spec, read_weights(spec, source.checkpoint, progress, average))
    except ModuleError as error:
        raise InferenceError(str(error), "leave --dtype out") from None
    except CheckpointError as error:
        raise InferenceError(str(error), "`dsc verify` says which files are damaged") from None


def limit_threads(model: LanguageModel) -> None:
    """Use one thread for a small model, unless the user has set OMP_NUM_THREADS."""
    if model.num_weights < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
