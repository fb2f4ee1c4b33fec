"""`dsc import hf FILE|FOLDER`, `dsc import megatron-bridge|torchtitan FILE`: write a spec from a model or a plan.

dsc import hf DeepSeek-V3/config.json -o v3.dsc
dsc import hf Qwen3-30B-A3B -o qwen.dsc       with weights, if the folder has them: qwen.weights
dsc import hf Qwen3-30B-A3B --model-only      only the model, to stdout
dsc import megatron-bridge recipe.py -o v3.dsc --devices 2048
dsc import megatron-bridge pretrain.sh --vocab 129280 -D TP=1 -D PP=16
dsc import torchtitan config_registry.py -o v3.dsc --config pretrain
dsc import torchtitan deepseek_v3_671b.toml -o v3.dsc --devices 2048 --lossy

hf: a config.json, and its weights as a checkpoint. The spec names the checkpoint (`train { initial = … }`), so that
`dsc train` starts from these weights.

megatron-bridge: a recipe in Python, or arguments of Megatron-LM in a shell script or in YAML. The file is not
executed.

torchtitan: a DeepSeek-V3 configuration: a Python module with a function that returns a Trainer.Config, and the
schedule.csv beside it; or the older job file in TOML. The file is not executed.

Every key of a plan is accounted for, in comments of the spec and on stderr, or as JSON (docs/exchange.md). The cluster
of the spec is only a starting point: if it is too small, the spec is written all the same, with errors.

Exit codes: 0 the spec is written · 1 it is written, but has errors to fix · 2 the configuration or the weights cannot
be read, or need something that a spec cannot express · 75 the disk is full
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import EXIT_SPEC, progress, report_error, say
from compiler.cli.commands.output_files import replace, write_new
from compiler.emit.folder import put_folder
from compiler.tools.importers import huggingface
from compiler.tools.importers.first_run import RunBeginning, run_text
from compiler.tools.importers.json_text import JsonValue, parse
from compiler.tools.importers.reader import Remark
from compiler.tools.importers.write import identifier, model_text
from compiler.tools.processes import ask
from compiler.tools.weights.checkpoint import imported_meta
from compiler.tools.weights.families import FAMILIES
from compiler.tools.weights.folder import FolderError, StoredTensor, check, has_weights, lacks_mtp, read_folder
from compiler.tools.weights.tensors import DERIVED, copies_of, mtp_block, publish_tensors
from compiler.tools.weights.tokenizer import NAME, published_files
from dsl.messages.diagnostics import Diagnostic, Source, SpecError, make_visible, plural, render_all
from dsl.resolve.files import read
from dsl.schema import Model
from dsl.text.formatter import format_source
from runtime.contract.weights import FP4_DATA, ImportRequest
from runtime.system.outcome import refusal_code
from runtime.system.strict_json import pretty

# --- The weights of a published model. `dsc import hf -o SPEC.dsc` writes them to the folder SPEC.weights.
#
# The folder holds a checkpoint of step 0, which any plan can load, and the tokenizer files.

SUFFIX = ".weights"
NO_BLOCK = (1, 1)
# prefixes of the file names that an import writes
OURS = ("step-", "LATEST", "tokenizer", "special_tokens_map", "chat_template", "generation_config")
_PLAIN = re.compile(r"[^\"\\\x00-\x1f\x7f]+")  # characters allowed in a string of a spec


class WeightsExitError(Exception):
    """The weights cannot be imported; the reason was printed. `code`: the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Weights:
    """The weights in a folder, checked against the model in its configuration."""

    folder: Path
    model: Model  # without MTP if the folder has no weights for it
    request: ImportRequest  # its `out` is filled in later
    remarks: tuple[str, ...]


def find(folder: Path, root: JsonValue, model: Model, model_type: str) -> Weights | None:
    """The weights in a folder, or None. Raises FolderError with everything wrong with them."""
    if not folder.is_dir() or not has_weights(folder):
        return None
    if (family := FAMILIES.get(model_type)) is None:
        raise FolderError(f"{folder}: weights of type {model_type} are not supported; --config-only leaves them out")
    stored = read_folder(folder)
    remarks = []
    rotates = "halves" if family.reads_order and _value_at(root, "rope_interleave") is False else ""
    tensors = (*publish_tensors(model, family, rotates), *copies_of(model))
    if model.mtp is not None and lacks_mtp(tensors, stored, mtp_block(model, 0)):
        remarks.append(
            "the configuration has multi-token prediction, but the weights do not: it is left out of the spec"
        )
        model = model.model_copy(update={"mtp": None})
        tensors = publish_tensors(model, family, rotates)
    if not published_files(folder):
        text = f"there is no {NAME} beside the weights: a run would use other tokens; name their tokenizer in `data`"
        remarks.append(text)
    block = _block(root)
    files = check(folder, tensors, stored, block)
    remarks += _left_out(stored)
    meta = imported_meta(model, model_type, _context(root), folder)
    present = tuple(tensor for tensor in tensors if tensor.name in files or tensor.name + FP4_DATA in files)
    request = ImportRequest(str(folder.absolute()), "", present, files, block or NO_BLOCK, meta)
    return Weights(folder, model, request, tuple(remarks))


def start_of(weights: Weights, spec: Path) -> RunBeginning:
    """How a run of a spec starts from the weights. Raises FolderError if a spec cannot name their folder."""
    name = spec.stem + SUFFIX
    if not _PLAIN.fullmatch(name) or not name.isprintable():
        raise FolderError(f"{spec}: a spec cannot name the weights beside it: choose a plainer name with -o")
    return RunBeginning(name, f"{name}/{NAME}" if published_files(weights.folder) else "")


def write(weights: Weights, spec: Path, *, force: bool) -> None:
    """Write the weights beside a spec, completely or not at all. Raises OSError, and WeightsExitError after printing
    why."""
    place = spec.absolute().with_name(spec.stem + SUFFIX)
    if place.exists() and not (force and _is_ours(place)):
        hint = "--force replaces a folder written by dsc" if not force else "it has files that dsc did not write"
        raise WeightsExitError(report_error(f"{place.name} exists beside {spec}", hint))
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for name, content in published_files(weights.folder).items():
            (new / name).write_bytes(content)
        request = ImportRequest(**(vars(weights.request) | {"out": str(new)}))
        tell = progress("import")
        code, result = ask(
            ["runtime.state.huggingface", "import"], pretty(request), lambda text: tell(text and f"weights {text}")
        )
        if code:
            raise WeightsExitError(code)
        put_folder(new, place)
    size = f"{plural(result['tensors'], 'tensor')}, {result['bytes']:,} bytes"
    say(make_visible(f"wrote {spec.with_name(place.name)}: {size}"))


def _is_ours(place: Path) -> bool:
    """Whether all files in a folder have names that an import writes."""
    return place.is_dir() and all(path.name.startswith(OURS) for path in place.iterdir())


def _value_at(root: JsonValue, *path: str) -> Any:
    """The value at a path of a configuration, or None."""
    for key in path:
        if not isinstance(root.value, Mapping) or key not in root.value:
            return None
        root = root.value[key]
    return root.value


def _block(root: JsonValue) -> tuple[int, int] | None:
    """Rows and columns of an FP8 block; None if the weights have none. Raises FolderError."""
    if _value_at(root, "quantization_config") is None:
        return None
    method, sizes = (
        _value_at(root, "quantization_config", "quant_method"),
        _value_at(root, "quantization_config", "weight_block_size"),
    )
    if method == "mxfp4":  # FP4 tensors are recognized by their names
        return None
    if method != "fp8":
        raise FolderError(
            f"weights with the `quantization_config` {method!r} are not supported; fp8 and mxfp4 blocks are"
        )
    block = [size.value for size in sizes] if isinstance(sizes, tuple) else []
    if len(block) != 2 or not all(type(size) is int and 0 < size <= 1 << 20 for size in block):
        raise FolderError("`quantization_config` has no `weight_block_size` of two numbers, as [128, 128]")
    return block[0], block[1]


def _context(root: JsonValue) -> int:
    value = _value_at(root, "max_position_embeddings")
    return value if type(value) is int and 0 < value <= 1 << 40 else 0


def _left_out(stored_tensors: Mapping[str, StoredTensor]) -> list[str]:
    """A remark on tensors that are left out because they follow from the configuration."""
    derived = [name for name in stored_tensors if DERIVED.fullmatch(name)]
    if not derived:
        return []
    return [f"{plural(len(derived), 'tensor')} that follow from the configuration are left out, {derived[0]} first"]


# --- import

CONFIG = "config.json"
STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    text = "hf: config.json of a Hugging Face model; megatron-bridge: a recipe, or arguments of Megatron-LM; "
    text += "torchtitan: a module with configurations, or a job file in TOML"
    parser.add_argument("system", choices=("hf", "megatron-bridge", "torchtitan"), help=text)
    parser.add_argument("path", metavar="FILE|FOLDER", type=Path, help=f"the file, or a folder with a {CONFIG}")
    parser.add_argument("-o", "--out", metavar="SPEC", default=STDOUT, help="file to write; default: stdout")
    parser.add_argument("--name", help="name of the model; default: from the config or the folder")
    parser.add_argument("--model-only", action="store_true", help="write only the model, without a run and a cluster")
    parser.add_argument(
        "--lossy", action="store_true", help="write what a spec cannot express as comments, instead of refusing it"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="for plans: devices of the cluster")
    parser.add_argument("--vocab", type=int, metavar="N", help="for plans: size of the padded vocabulary")
    text = "for plans: set a variable of the script, overriding the file"
    parser.add_argument("-D", "--define", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "for plans in Python: the function to use, if several return a configuration"
    parser.add_argument("--config", metavar="NAME", help=text)
    text = "for plans: print the keys and the spec as text or json; default: text"
    parser.add_argument("--format", choices=("text", "json"), default="text", help=text)
    parser.add_argument("--config-only", action="store_true", help="do not import the weights of the folder")
    parser.add_argument("--force", action="store_true", help="replace SPEC and its weights if they exist")


def run(args: argparse.Namespace) -> int:
    if args.out != STDOUT and not args.out.endswith(".dsc"):
        return report_error(f"{args.out} is not a .dsc file", "name the spec like -o model.dsc", args.format)
    if args.name is not None and identifier(args.name) != args.name:
        return report_error(
            f"`{args.name}` is not a valid model name", f"write `--name {identifier(args.name)}`", args.format
        )
    if args.system != "hf":
        if args.model_only or args.config_only:
            return report_error("--model-only and --config-only are options of hf", "leave them out", args.format)
        if args.system == "torchtitan" and (args.vocab or args.define):
            return report_error(f"--vocab and -D are not options of {args.system}", "leave them out", args.format)
        if args.config and args.path.suffix != ".py":
            return report_error("--config is only for Python modules", "leave it out", args.format)
        from compiler.cli.commands import import_plan  # imports the checks of specs

        spelled = import_plan.spec_of(args, args.name or identifier(args.path.stem))
        if spelled is None:
            return EXIT_SPEC
        is_printed = args.format == "json" and args.out == STDOUT
        code = 0 if is_printed else _write(args.out, spelled.text, force=args.force)
        return code or spelled.exit_code()
    if args.devices or args.vocab or args.define or args.config or args.format != "text":
        return report_error(
            "--devices, --vocab, -D, --config and --format are options for plans, not for hf", "leave them out"
        )
    try:
        file, root = read_config(args.path)
    except SpecError as error:
        say(str(error))
        return EXIT_SPEC
    imported = huggingface.read(root, args.name or _name(root, file), lossy=args.lossy)
    say(render_all(imported.diagnostics))
    if imported.model is None:
        say(f"\n{_count(imported.diagnostics)}")
        return EXIT_SPEC
    weights, start, model, remarks = None, RunBeginning(), imported.model, imported.remarks
    try:
        if args.out != STDOUT and not args.config_only and not args.model_only:
            weights = find(args.path, root, imported.model, imported.model_type)
        if weights is not None:
            start, model = start_of(weights, Path(args.out)), weights.model
            say("\n".join(f"warning: {text}" for text in weights.remarks))
            remarks = (*remarks, *(Remark("model", text) for text in weights.remarks))
    except FolderError as error:
        return _wrong_weights(error)
    text = model_text(model, imported.model_type, remarks)
    if not args.model_only:
        begin = run_text(model, imported.context, start)
        if not begin:
            say("warning: no cluster of up to 32,768 devices is expected to hold this model: the spec has no run")
        text = f"{begin}\n{text}" if begin else text
    content = format_source(Source(args.out, text))
    if weights is not None and (code := _write_weights(weights, Path(args.out), args.force)):
        return code
    return _write(args.out, content, force=args.force)


def _wrong_weights(error: FolderError) -> int:
    """Print what is wrong with the weights, one line each. Returns the exit code."""
    for line in str(error).splitlines():
        report_error(line)
    return EXIT_SPEC


def _write_weights(weights: Weights, spec: Path, force: bool) -> int:
    """Write the weights, if the spec beside them can be written too. Returns the exit code."""
    if os.path.lexists(spec) and not (force and spec.is_file() and not spec.is_symlink()):
        return report_error(
            f"{spec} is not a regular file" if force else f"{spec} exists", "" if force else "see --force"
        )
    try:
        write(weights, spec, force=force)
    except WeightsExitError as error:
        return error.code
    except OSError as error:
        report_error(f"{spec} cannot be written: {error.strerror}")
        return refusal_code(error)
    return 0


def read_config(path: Path) -> tuple[Path, JsonValue]:
    """Read a configuration, or config.json in a folder: its path and JSON. Raises SpecError."""
    file = path / CONFIG if path.is_dir() else path
    source, mistakes = read(str(file))
    if mistakes:
        raise SpecError(mistakes)
    return file, parse(source)


def _name(root: JsonValue, file: Path) -> str:
    """A model name from the config, its folder or its file. In a Hugging Face cache the folder name is a hash."""
    members: Mapping[str, JsonValue] = root.value if isinstance(root.value, Mapping) else {}
    config_name, kind = (members[key].value if key in members else None for key in ("_name_or_path", "model_type"))
    folder = (Path.cwd() / file).parent  # links stay unresolved: a Hugging Face cache links files into a store
    if re.fullmatch("[0-9a-f]{40}", folder.name):
        folder = Path(folder.parent.parent.name.rpartition("--")[2])
    fallback = identifier(kind) if isinstance(kind, str) else identifier("")
    if isinstance(config_name, str) and config_name.strip("./"):
        return identifier(config_name, fallback)
    return identifier(folder.name if file.name == CONFIG else file.name.removesuffix(".json"), fallback)


def _count(diagnostics: Sequence[Diagnostic]) -> str:
    """The last line: the number of errors, and whether --lossy would write a spec."""
    errors = [item for item in diagnostics if item.severity == "error"]
    refused = all(item.code == "I0301" for item in errors)
    return plural(len(errors), "error") + ("; --lossy writes the spec without what it cannot express" * refused)


def _write(name: str, text: str, *, force: bool) -> int:
    if name == STDOUT:
        print(text, end="")
        return 0
    try:
        if force:
            replace(Path(name), text.encode())
        else:
            write_new(Path(name), text)
    except FileExistsError:
        return report_error(
            f"{name} is not a regular file" if force else f"{name} exists", "" if force else "see --force"
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the path is not valid"
        return report_error(f"{name} cannot be written: {reason}")
    say(make_visible(f"wrote {name}"))
    return 0
