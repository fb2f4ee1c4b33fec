"""The weights of a published model, beside the spec that `dsc import hf` writes: SPEC without .dsc, and `.weights`.

The folder holds a checkpoint of step 0, which any plan loads, and the files of the tokenizer.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import progress, say, wrong
from compiler.cli.commands.train_processes import ask
from compiler.emit.folder import put_folder
from compiler.tools.importers.first_run import Start
from compiler.tools.importers.json_text import Json
from compiler.tools.weights.checkpoint import imported_meta
from compiler.tools.weights.families import FAMILIES
from compiler.tools.weights.folder import FolderError, Held, check, has_weights, read_folder, without_mtp
from compiler.tools.weights.tensors import DERIVED, copies_of, mtp_block, published
from compiler.tools.weights.tokenizer import NAME, published_files
from dsl.messages.diagnostics import plural, visible
from dsl.schema import Model
from runtime.contract.weights import FP4_DATA, Import
from runtime.system.strict_json import pretty

SUFFIX = ".weights"
NO_BLOCK = (1, 1)
# how the names of what an import writes begin
OURS = ("step-", "LATEST", "tokenizer", "special_tokens_map", "chat_template", "generation_config")
_PLAIN = re.compile(r"[^\"\\\x00-\x1f\x7f]+")  # what a string of a spec may hold


class WeightsExitError(Exception):
    """The weights cannot be imported, which was said; `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Weights:
    """The weights of a folder, checked against the model of its configuration."""

    folder: Path
    model: Model  # without MTP, if the folder has no weights of it
    request: Import  # whose `out` is not yet known
    remarks: tuple[str, ...]


def find(folder: Path, root: Json, model: Model, model_type: str) -> Weights | None:
    """The weights of a folder; None where there are none. Raises FolderError with all that is wrong with them."""
    if not folder.is_dir() or not has_weights(folder):
        return None
    if (family := FAMILIES.get(model_type)) is None:
        raise FolderError(f"{folder}: weights of type {model_type} are not read; --config-only leaves them out")
    held = read_folder(folder)
    remarks = []
    rotates = "halves" if family.reads_order and _of(root, "rope_interleave") is False else ""
    tensors = (*published(model, family, rotates), *copies_of(model))
    if model.mtp is not None and without_mtp(tensors, held, mtp_block(model, 0)):
        remarks.append("the configuration says multi-token prediction, the weights have none: not in this spec")
        model = model.model_copy(update={"mtp": None})
        tensors = published(model, family, rotates)
    if not published_files(folder):
        text = f"there is no {NAME} beside the weights: a run learns other tokens than they know; name theirs in `data`"
        remarks.append(text)
    block = _block(root)
    files = check(folder, tensors, held, block)
    remarks += _left_out(held)
    meta = imported_meta(model, model_type, _context(root), folder)
    taken = tuple(each for each in tensors if each.name in files or each.name + FP4_DATA in files)
    request = Import(str(folder.absolute()), "", taken, files, block or NO_BLOCK, meta)
    return Weights(folder, model, request, tuple(remarks))


def start_of(weights: Weights, spec: Path) -> Start:
    """What a run of a spec begins with. Raises FolderError where no string of a spec can name it."""
    name = spec.stem + SUFFIX
    if not _PLAIN.fullmatch(name) or not name.isprintable():
        raise FolderError(f"{spec}: a spec cannot name the weights beside it: choose a plainer name with -o")
    return Start(name, f"{name}/{NAME}" if published_files(weights.folder) else "")


def write(weights: Weights, spec: Path, *, force: bool) -> None:
    """Write the weights beside a spec: complete, or not at all. Raises WeightsExitError, having said why; OSError."""
    place = spec.absolute().with_name(spec.stem + SUFFIX)
    if place.exists() and not (force and _is_ours(place)):
        hint = "--force replaces a folder that dsc wrote" if not force else "it has files that dsc did not write"
        raise WeightsExitError(wrong(f"{place.name} exists beside {spec}", hint))
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for name, content in published_files(weights.folder).items():
            (new / name).write_bytes(content)
        request = Import(**(vars(weights.request) | {"out": str(new)}))
        tell = progress("import")
        code, result = ask(
            ["runtime.state.huggingface", "import"], pretty(request), lambda text: tell(text and f"weights {text}")
        )
        if code:
            raise WeightsExitError(code)
        put_folder(new, place)
    size = f"{plural(result['tensors'], 'tensor')}, {result['bytes']:,} bytes"
    say(visible(f"wrote {spec.with_name(place.name)}: {size}"))


def _is_ours(place: Path) -> bool:
    """Whether a folder has nothing but what an import writes."""
    return place.is_dir() and all(each.name.startswith(OURS) for each in place.iterdir())


def _of(root: Json, *path: str) -> Any:
    """A value of a configuration; None where there is none."""
    for key in path:
        if not isinstance(root.value, Mapping) or key not in root.value:
            return None
        root = root.value[key]
    return root.value


def _block(root: Json) -> tuple[int, int] | None:
    """Rows and columns of a block of FP8; None where weights are not in such blocks. Raises FolderError."""
    if _of(root, "quantization_config") is None:
        return None
    method, sizes = (
        _of(root, "quantization_config", "quant_method"),
        _of(root, "quantization_config", "weight_block_size"),
    )
    if method == "mxfp4":  # whose blocks have the names of what they are
        return None
    if method != "fp8":
        raise FolderError(
            f"weights that are stored by `quantization_config` of {method!r} are not read: fp8 and mxfp4 blocks are"
        )
    found = [each.value for each in sizes] if isinstance(sizes, tuple) else []
    if len(found) != 2 or not all(type(each) is int and 0 < each <= 1 << 20 for each in found):
        raise FolderError("`quantization_config` has no `weight_block_size` of two numbers, as [128, 128]")
    return found[0], found[1]


def _context(root: Json) -> int:
    value = _of(root, "max_position_embeddings")
    return value if type(value) is int and 0 < value <= 1 << 40 else 0


def _left_out(held: Mapping[str, Held]) -> list[str]:
    """Tensors of a folder that are not taken, for they follow from the configuration, in words."""
    derived = [name for name in held if DERIVED.fullmatch(name)]
    if not derived:
        return []
    return [f"{plural(len(derived), 'tensor')} that follow from the configuration are left out, {derived[0]} first"]
