"""What `dsc import hf` and `dsc export hf` ask of the process that reads and writes weights, as JSON on its stdin.

A published tensor is made of pieces of tensors of a checkpoint. The list is the same in both directions.
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
# Files of a published model, what is behind the name of a weight in blocks of FP8 in that of its scales, and what is
# behind the name of a weight in MXFP4 in those of its data and of its scales.
ONE, INDEX, SCALE = "model.safetensors", "model.safetensors.index.json", "_scale_inv"
FP4_DATA, FP4_SCALE = "_blocks", "_scales"


def factor_of(meta: Mapping[str, Any]) -> float:
    """What B · A is multiplied by, by what a checkpoint of adapters says. Raises FormError."""
    found: Any = meta
    for key in ("plan", "adapter", "factor"):
        found = found.get(key) if isinstance(found, Mapping) else None
    if type(found) not in (int, float) or not 0 < found < float("inf"):
        raise FormError("plan.adapter.factor: not what a checkpoint of adapters has there")
    return float(found)


@dataclass(frozen=True)
class Halves:
    """Rows of heads that are `head` wide. Of each, the rows [first, first + width) are rotated: pairs lie side by side
    in a checkpoint, and half of the width apart in a published tensor."""

    head: Count
    first: Amount
    width: Count


@dataclass(frozen=True)
class RowPiece:
    """Rows [start, end) of a tensor of a checkpoint. A vector has rows of one number. `in_turn`: the published rows are
    those of the first and of the second half of these, in turn."""

    tensor: Stored
    start: Amount
    end: Count
    halves: Halves | None = None
    in_turn: bool = False


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor as it is published; its rows are those of its pieces, one piece after the other.

    `kind`: a "linear" may be stored in blocks of FP8, a "buffer" is FP32 always. `optional`: it repeats what another
    one has, or is empty, so it may be missing. `stacked`: the first dimension counts its pieces, and each is a vector
    or a matrix whose columns are the rows of the piece; it may be stored in MXFP4. `from_one`: it holds differences
    from 1. `rows`: its shape as rows, where it is published in another. A "table" holds rows of different whole numbers
    below `below`. The columns of a "spread" are those of its pieces in turn: the first of each, then the second.
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
    """Published tensors that become a checkpoint. `files`: where each of them and each scale is; what is optional and
    missing is in neither list. `block`: rows and columns that share a scale."""

    folder: Path
    out: Path  # folder of checkpoints
    tensors: tuple[PublishedTensor, ...]
    files: Mapping[Key, FileName]
    block: tuple[Count, Count]
    meta: Tree  # of the checkpoint

    @staticmethod
    def from_json(text: str | bytes) -> ImportRequest:
        """Raises FormError."""
        return read(ImportRequest, text, "a request")


@dataclass(frozen=True)
class Export:
    """A checkpoint whose tensors are published. `average`: the moving average of the weights, not the weights."""

    checkpoint: Path
    out: Path  # an empty folder
    tensors: tuple[PublishedTensor, ...]
    format: Format
    average: bool

    @staticmethod
    def from_json(text: str | bytes) -> Export:
        """Raises FormError."""
        return read(Export, text, "a request")


# --- Names of the parameters of an adapter of low rank: those of its weight, and an end. PEFT's lora_A and lora_B
#
# A module of its own without imports, for emitted segments depend on it (compiler/emit/segment_cache.py).

A, B = "_lora_a", "_lora_b"


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its local or its logical name, is one of an adapter."""
    return name.endswith((A, B))


def weight_of(name: str) -> str:
    """The name of the weight of an adapter's parameter; any other name as it is."""
    return name.removesuffix(A).removesuffix(B)


def matrix_of(name: str) -> str:
    """Which matrix of an adapter a parameter is: A, B, or "" of any other parameter."""
    return name.removeprefix(weight_of(name))


def adds_to(name: str) -> str:
    """The weight to whose product the product with a parameter is added: matrix B is multiplied last."""
    return weight_of(name) if matrix_of(name) == B else name
