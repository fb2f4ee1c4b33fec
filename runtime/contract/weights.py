"""Requests of `dsc import hf` and `dsc export hf` to the process that converts weights, as JSON on its stdin.

A published tensor consists of pieces of a checkpoint's tensors. The list is the same in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from runtime.contract.recipe import Amount, Count
from runtime.system.strict_json import FormError, Pattern, Tree, read

Key = Annotated[str, Pattern(r"[A-Za-z0-9_.]{1,500}")]  # of a published tensor
FileName = Annotated[str, Pattern(r"(?!\.)[A-Za-z0-9_.=+-]{1,255}")]  # in the folder of a published model
Path = Annotated[str, Pattern(r".{1,4096}")]
Stored = Annotated[str, Pattern(r"(weight|bias|table)/[A-Za-z0-9_.]{1,500}")]  # of a tensor of a checkpoint
Format = Literal["bf16", "fp32", "fp8"]
# Files of a published model, the suffix of the scales of FP8 weights, and the suffixes of data and scales of MXFP4
# weights.
ONE, INDEX, SCALE = "model.safetensors", "model.safetensors.index.json", "_scale_inv"
FP4_DATA, FP4_SCALE = "_blocks", "_scales"


def factor_of(meta: Mapping[str, Any]) -> float:
    """Return the factor of B · A from the metadata of a checkpoint of adapters. Raises FormError."""
    value: Any = meta
    for key in ("plan", "adapter", "factor"):
        value = value.get(key) if isinstance(value, Mapping) else None
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise FormError("plan.adapter.factor: expected a positive finite number")
    return float(value)


@dataclass(frozen=True)
class Halves:
    """Rows of heads of width `head`. The rows [first, first + width) of each are rotated: pairs are adjacent in a
    checkpoint, and half the width apart in a published tensor."""

    head: Count
    first: Amount
    width: Count


@dataclass(frozen=True)
class RowPiece:
    """Rows [start, end) of a checkpoint's tensor. A vector has rows of one number. `in_turn`: the published rows
    interleave the first and the second half of these."""

    tensor: Stored
    start: Amount
    end: Count
    halves: Halves | None = None
    in_turn: bool = False


@dataclass(frozen=True)
class PublishedTensor:
    """A published tensor. Its rows are the concatenated rows of its pieces.

    `kind`: a "linear" may be stored as FP8 blocks, a "buffer" is always FP32. `optional`: it repeats another tensor or
    is empty, so it may be missing. `stacked`: the first dimension counts its pieces; each is a vector, or a matrix
    whose columns are the rows of the piece; it may be stored as MXFP4. `from_one`: it has differences from 1. `rows`:
    its shape as rows, if the published shape differs. A "table" has rows of distinct integers below `below`. A "spread"
    interleaves the columns of its pieces: the first column of each, then the second.
    """

    name: Key
    shape: tuple[Amount, ...]
    kind: Literal["linear", "plain", "buffer", "table", "spread"]
    pieces: tuple[RowPiece, ...]
    optional: bool = False
    stacked: bool = False
    from_one: bool = False
    rows: tuple[Amount, ...] = ()
    below: Amount = 0


@dataclass(frozen=True)
class ImportRequest:
    """Published tensors to convert to a checkpoint. `files`: the file of each tensor and scale; missing optional
    tensors are in neither list. `block`: rows and columns that share a scale."""

    folder: Path
    out: Path  # folder of checkpoints
    tensors: tuple[PublishedTensor, ...]
    files: Mapping[Key, FileName]
    block: tuple[Count, Count]
    meta: Tree  # of the checkpoint

    @staticmethod
    def from_json(text: str | bytes) -> ImportRequest:
        """Parse a request. Raises FormError."""
        return read(ImportRequest, text, "a request")


@dataclass(frozen=True)
class Export:
    """A checkpoint to publish. `average`: publish the moving average instead of the weights."""

    checkpoint: Path
    out: Path  # an empty folder
    tensors: tuple[PublishedTensor, ...]
    format: Format
    average: bool

    @staticmethod
    def from_json(text: str | bytes) -> Export:
        """Parse a request. Raises FormError."""
        return read(Export, text, "a request")


# --- Names of the parameters of a low-rank adapter: the name of its weight, and a suffix. PEFT's lora_A and lora_B
#
# Emitted segments depend on these names (compiler/emit/segment_cache.py).

A, B = "_lora_a", "_lora_b"


def is_adapter(name: str) -> bool:
    """Whether a parameter, by local or logical name, belongs to an adapter."""
    return name.endswith((A, B))


def weight_of(name: str) -> str:
    """Return the weight of an adapter's parameter; any other name unchanged."""
    return name.removesuffix(A).removesuffix(B)


def matrix_of(name: str) -> str:
    """Return the matrix of an adapter's parameter: A or B; "" for any other parameter."""
    return name.removeprefix(weight_of(name))


def adds_to(name: str) -> str:
    """Return the weight to whose product the product with this parameter is added: matrix B is multiplied last."""
    return weight_of(name) if matrix_of(name) == B else name
