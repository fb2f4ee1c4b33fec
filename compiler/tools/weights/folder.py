"""The weight files of a published model: lists their tensors and checks them against a model.

The safetensors library reads only the file headers. All errors are reported at once, each with its file and tensor.
Pickle files are never opened, because reading one can run code in it.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from compiler.tools.weights.tensors import DERIVED
from runtime.contract.weights import FP4_DATA, FP4_SCALE, INDEX, ONE, SCALE, PublishedTensor
from runtime.system.outcome import printable

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
INTEGERS = frozenset({"I64", "I32"})
BLOCKS = "F8_E4M3"
FP4_BLOCK = 32  # MXFP4 numbers per scale; two numbers are a byte
MAX_INDEX_BYTES = 64 << 20
MAX_SHOWN = 20  # errors in a message
_FILE = re.compile(r"(?!\.)[A-Za-z0-9_.=+-]{1,255}")


class FolderError(Exception):
    """A folder of weights cannot be used. The message has a line for each reason."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as described in a file's header."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors weights. Raises FolderError if it has only pickles."""
    if (folder / INDEX).exists() or (folder / ONE).exists():
        return True
    if pickle_name := next((name for name in PICKLES if (folder / name).exists()), None):
        raise FolderError(
            f"{folder / pickle_name} is a pickle, and reading one can run code in it: convert it to safetensors first"
            " (`save_pretrained` of transformers writes them)"
        )
    return False


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name. Raises FolderError if files and index do not agree or cannot be read."""
    indexed = _index(folder / INDEX) if (folder / INDEX).exists() else None
    files = [ONE] if indexed is None else sorted(set(indexed.values()))
    tensors: dict[str, StoredTensor] = {}
    errors: list[str] = []
    for file in files:
        try:
            for name, tensor in _header(folder, file):
                if name in tensors:
                    errors.append(f"{folder / file}: {printable(name)} is in {tensors[name].file} already")
                tensors[name] = tensor
        except FolderError as error:
            errors.append(str(error))
    for name, file in (indexed or {}).items():
        if name not in tensors and not errors:
            errors.append(f"{folder / INDEX}: {printable(name)} is in no file; the index names {file}")
        elif name in tensors and tensors[name].file != file:
            errors.append(f"{folder / INDEX}: {printable(name)} is in {tensors[name].file}, and the index names {file}")
    if indexed is not None:
        errors += [
            f"{folder / tensor.file}: {printable(n)} is not in the index"
            for n, tensor in tensors.items()
            if n not in indexed
        ]
    _raise_errors(errors)
    return tensors


def _index(path: Path) -> dict[str, str]:
    """Tensor → file, from an index."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FolderError(f"{path} is not a regular file")
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise FolderError(f"{path} has more than {MAX_INDEX_BYTES >> 20} MiB")
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise FolderError(
            f"{path} cannot be read: {printable(str(getattr(error, 'strerror', None) or error))}"
        ) from None
    files = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise FolderError(f"{path} has no `weight_map` of names and files")
    _raise_errors(
        [
            f"{path}: {printable(name)} is listed in {printable(file)}, which is not a file name in this folder"
            for name, file in files.items()
            if not _FILE.fullmatch(file)
        ]
    )
    return files


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen = set[str]()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{duplicate} occurs twice")
    return values


def _header(folder: Path, file: str) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of one file. The library checks the header against the file size."""
    path = folder / file
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FolderError(f"{path} is not a regular file")
        with safe_open(path, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                part = opened.get_slice(name)
                yield name, StoredTensor(file, str(part.get_dtype()), tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FolderError(f"{path} cannot be read: {printable(str(reason))}") from None


def check(
    folder: Path,
    tensors: Sequence[PublishedTensor],
    stored_tensors: Mapping[str, StoredTensor],
    block: tuple[int, int] | None,
) -> dict[str, str]:
    """The file of each tensor and scale that a model needs. A tensor of the folder that the model does not need is an
    error.

    `block`: rows and columns that share a scale, from the config. Raises FolderError with all errors.
    """
    files: dict[str, str] = {}
    errors: list[str] = []
    missing: list[str] = []
    for tensor in tensors:
        stored = stored_tensors.get(tensor.name)
        if stored is None and tensor.stacked and tensor.name + FP4_DATA in stored_tensors:
            errors += _errors_of_fp4_stack(folder, tensor, stored_tensors)
            names = (tensor.name + FP4_DATA, tensor.name + FP4_SCALE)
            files |= {name: stored_tensors[name].file for name in names if name in stored_tensors}
            continue
        if stored is None:
            missing += [] if tensor.optional else [tensor.name]
            continue
        files[tensor.name] = stored.file
        place = f"{folder / stored.file}: {tensor.name}"
        if stored.shape != tensor.shape:
            errors.append(f"{place} is {_extents(stored.shape)}, but {_extents(tensor.shape)} by the config")
        if stored.dtype == BLOCKS and tensor.kind != "table":
            errors += _errors_of_fp8_blocks(folder, tensor, stored, stored_tensors, block)
            if scale := stored_tensors.get(tensor.name + SCALE):
                files[tensor.name + SCALE] = scale.file
        elif tensor.kind == "table" and stored.dtype not in INTEGERS:
            errors.append(f"{place} is {stored.dtype}, but a table needs integers: {', '.join(sorted(INTEGERS))}")
        elif tensor.kind != "table" and stored.dtype not in FLOATS:
            errors.append(f"{place} is {stored.dtype}, which is not supported for weights")
    foreign = [name for name in stored_tensors if name not in files and not DERIVED.fullmatch(name)]
    errors += [f"{folder}: {name} is missing" for name in missing]
    errors += [
        f"{folder / stored_tensors[name].file}: {printable(name)} is not a tensor of this model" for name in foreign
    ]
    _raise_errors(errors)
    return files


def lacks_mtp(tensors: Sequence[PublishedTensor], stored_names: Iterable[str], block: str) -> bool:
    """Whether the model has a multi-token prediction block named `block` that the folder lacks completely."""
    return any(tensor.name.startswith(block) for tensor in tensors) and not any(
        name.startswith(block) for name in stored_names
    )


def _errors_of_fp8_blocks(
    folder: Path,
    tensor: PublishedTensor,
    stored: StoredTensor,
    stored_tensors: Mapping[str, StoredTensor],
    block: tuple[int, int] | None,
) -> Iterator[str]:
    """Errors of a matrix in FP8 blocks."""
    place, scale = f"{folder / stored.file}: {tensor.name}", stored_tensors.get(tensor.name + SCALE)
    if len(stored.shape) != 2:
        yield f"{place} is {BLOCKS}, but not a matrix"
    elif scale is None:
        yield f"{place} is {BLOCKS}, but its scales are missing: {tensor.name + SCALE}"
    elif block is None:
        yield f"{place} is {BLOCKS}, but the config has no `quantization_config` with a `weight_block_size`"
    else:
        expected = tuple(-(-extent // size) for extent, size in zip(stored.shape, block, strict=True))
        if scale.dtype != "F32" or scale.shape != expected:
            name = f"{folder / scale.file}: {tensor.name + SCALE}"
            yield f"{name} is {scale.dtype} of {_extents(scale.shape)}; such blocks need F32 of {_extents(expected)}"


def _errors_of_fp4_stack(
    folder: Path, tensor: PublishedTensor, stored_tensors: Mapping[str, StoredTensor]
) -> Iterator[str]:
    """Errors of a stack of matrices in MXFP4, which are stored by the rows of a checkpoint."""
    experts, columns, rows = tensor.shape
    blocks = (experts, rows, -(-columns // FP4_BLOCK))
    for end, expected in ((FP4_DATA, (*blocks, FP4_BLOCK // 2)), (FP4_SCALE, blocks)):
        stored = stored_tensors.get(tensor.name + end)
        if stored is None:
            data = tensor.name + FP4_DATA
            file = folder / stored_tensors[data].file
            yield f"{file}: {data} is MXFP4, but its scales are missing: {tensor.name + end}"
        elif columns % FP4_BLOCK or stored.dtype != "U8" or stored.shape != expected:
            name = f"{folder / stored.file}: {tensor.name + end}"
            yield f"{name} is {stored.dtype} of {_extents(stored.shape)}; MXFP4 needs U8 of {_extents(expected)}"


def _extents(shape: Sequence[int]) -> str:
    return " × ".join(f"{extent:,}" for extent in shape) or "a scalar"


def _raise_errors(errors: Sequence[str]) -> None:
    """Raise FolderError with the first errors, if there are any."""
    if errors:
        omitted = [f"and {len(errors) - MAX_SHOWN:,} more"] if len(errors) > MAX_SHOWN else []
        raise FolderError("\n".join([*errors[:MAX_SHOWN], *omitted]))
