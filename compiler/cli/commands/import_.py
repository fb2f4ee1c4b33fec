"""`dsc import hf FILE|FOLDER`, `dsc import megatron-bridge|torchtitan FILE`: a spec from a model, or from a plan.

dsc import hf DeepSeek-V3/config.json -o v3.dsc
dsc import hf Qwen3-30B-A3B -o qwen.dsc       weights too, if the folder has them: qwen.weights
dsc import hf Qwen3-30B-A3B --model-only      the model alone, on standard output
dsc import megatron-bridge recipe.py -o v3.dsc --devices 2048
dsc import megatron-bridge pretrain.sh --vocab 129280 -D TP=1 -D PP=16
dsc import torchtitan config_registry.py -o v3.dsc --config pretrain
dsc import torchtitan deepseek_v3_671b.toml -o v3.dsc --devices 2048 --lossy

hf: a configuration, and a checkpoint from its weights. The spec names the checkpoint (`train { initial = … }`), so that
`dsc train` continues from the weights.

megatron-bridge: a recipe in Python, or arguments of Megatron-LM in a shell script or in YAML. Nothing of it is
executed.

torchtitan: a module in Python with a function that returns a Trainer.Config, and the schedule.csv beside it, or the
older job file in TOML, of DeepSeek-V3. Nothing of it is executed.

Every key of a plan is in a ledger, in comments of the spec and on stderr, or as JSON (docs/exchange.md). The cluster of
its spec is one to begin with: where it is too small, the spec is written with its errors.

Exit codes: 0 the spec is written · 1 it is written, and has errors to be edited · 2 the configuration or the weights
cannot be read, or ask for what a spec cannot express · 75 the disk is full
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from compiler.cli.commands import import_weights
from compiler.cli.commands.common import EXIT_SPEC, say, wrong
from compiler.cli.commands.output_files import replace, write_new
from compiler.tools.importers import huggingface
from compiler.tools.importers.first_run import Start, run_text
from compiler.tools.importers.json_text import Json, parse
from compiler.tools.importers.reader import Remark
from compiler.tools.importers.write import identifier, model_text
from compiler.tools.weights.folder import FolderError
from dsl.messages.diagnostics import Diagnostic, SpecError, plural, render_all, visible
from dsl.messages.source import Source
from dsl.resolve.files import read
from dsl.text.formatter import formatted
from runtime.system.outcome import refusal_code

CONFIG = "config.json"
STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    what = "hf: config.json of a Hugging Face model; megatron-bridge: a recipe, or arguments of Megatron-LM; "
    what += "torchtitan: a module with configurations, or a job file in TOML"
    parser.add_argument("system", choices=("hf", "megatron-bridge", "torchtitan"), help=what)
    parser.add_argument("path", metavar="FILE|FOLDER", type=Path, help=f"the file, or a folder with a {CONFIG}")
    parser.add_argument("-o", "--out", metavar="SPEC", default=STDOUT, help="file to write; default: standard output")
    parser.add_argument("--name", help="name of the model; default: the config's, or the folder's")
    parser.add_argument("--model-only", action="store_true", help="write the model, without a run and a cluster")
    parser.add_argument(
        "--lossy", action="store_true", help="write a comment for what a spec cannot express, instead of refusing it"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="of a plan: devices of the cluster")
    parser.add_argument("--vocab", type=int, metavar="N", help="of a plan: size of the padded vocabulary")
    text = "of a plan: a variable of the script, also in place of what the file sets"
    parser.add_argument("-D", "--define", action="append", default=[], metavar="NAME=VALUE", help=text)
    which = "of a plan in Python: the function of the module, where several return a configuration"
    parser.add_argument("--config", metavar="NAME", help=which)
    how = "of a plan: the ledger and the spec; default: text"
    parser.add_argument("--format", choices=("text", "json"), default="text", help=how)
    parser.add_argument("--config-only", action="store_true", help="leave the weights of the folder where they are")
    parser.add_argument("--force", action="store_true", help="replace SPEC and its weights if they exist")


def run(args: argparse.Namespace) -> int:
    if args.out != STDOUT and not args.out.endswith(".dsc"):
        return wrong(f"{args.out} is not a .dsc file", "a spec is named so: -o model.dsc", args.format)
    if args.name is not None and identifier(args.name) != args.name:
        return wrong(f"`{args.name}` is no name of a model", f"write `--name {identifier(args.name)}`", args.format)
    if args.system != "hf":
        if args.model_only or args.config_only:
            return wrong("--model-only and --config-only are options of hf", "leave them out", args.format)
        if args.system == "torchtitan" and (args.vocab or args.define):
            return wrong(f"--vocab and -D are not of {args.system}", "leave them out", args.format)
        if args.config and args.path.suffix != ".py":
            return wrong("--config is of a module in Python", "leave it out", args.format)
        from compiler.cli.commands import import_plan  # brings what specs are checked with

        spelled = import_plan.spec_of(args, args.name or identifier(args.path.stem))
        if spelled is None:
            return EXIT_SPEC
        is_printed = args.format == "json" and args.out == STDOUT
        code = 0 if is_printed else _write(args.out, spelled.text, force=args.force)
        return code or spelled.exit_code()
    if args.devices or args.vocab or args.define or args.config or args.format != "text":
        return wrong("--devices, --vocab, -D, --config and --format are of plans, not of hf", "leave them out")
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
    weights, start, model, remarks = None, Start(), imported.model, imported.remarks
    try:
        if args.out != STDOUT and not args.config_only and not args.model_only:
            weights = import_weights.find(args.path, root, imported.model, imported.model_type)
        if weights is not None:
            start, model = import_weights.start_of(weights, Path(args.out)), weights.model
            say("\n".join(f"warning: {text}" for text in weights.remarks))
            remarks = (*remarks, *(Remark("model", text) for text in weights.remarks))
    except FolderError as error:
        return _wrong_weights(error)
    text = model_text(model, imported.model_type, remarks)
    if not args.model_only:
        begin = run_text(model, imported.context, start)
        if not begin:
            say(
                "warning: no cluster of up to 32,768 devices is thought to hold this model: it is written without a run"
            )
        text = f"{begin}\n{text}" if begin else text
    content = formatted(Source(args.out, text))
    if weights is not None and (code := _write_weights(weights, Path(args.out), args.force)):
        return code
    return _write(args.out, content, force=args.force)


def _wrong_weights(error: FolderError) -> int:
    """Say what is wrong with weights, a line each; the exit code."""
    for line in str(error).splitlines():
        wrong(line)
    return EXIT_SPEC


def _write_weights(weights: import_weights.Weights, spec: Path, force: bool) -> int:
    """Write the weights beside a spec that can then be written; the exit code."""
    if os.path.lexists(spec) and not (force and spec.is_file() and not spec.is_symlink()):
        return wrong(f"{spec} is not a regular file" if force else f"{spec} exists", "" if force else "see --force")
    try:
        import_weights.write(weights, spec, force=force)
    except import_weights.WeightsExitError as error:
        return error.code
    except OSError as error:
        wrong(f"{spec} cannot be written: {error.strerror}")
        return refusal_code(error)
    return 0


def read_config(path: Path) -> tuple[Path, Json]:
    """The file that is meant and its JSON. Raises SpecError where it is none."""
    file = path / CONFIG if path.is_dir() else path
    source, mistakes = read(str(file))
    if mistakes:
        raise SpecError(mistakes)
    return file, parse(source)


def _name(root: Json, file: Path) -> str:
    """What the config, its folder or its file calls the model; in a cache of the hub the folder is a hash."""
    members: Mapping[str, Json] = root.value if isinstance(root.value, Mapping) else {}
    named, kind = (members[key].value if key in members else None for key in ("_name_or_path", "model_type"))
    folder = (Path.cwd() / file).parent  # as it is written: a hub keeps files as links into a store
    if re.fullmatch("[0-9a-f]{40}", folder.name):
        folder = Path(folder.parent.parent.name.rpartition("--")[2])
    fallback = identifier(kind) if isinstance(kind, str) else identifier("")
    if isinstance(named, str) and named.strip("./"):
        return identifier(named, fallback)
    return identifier(folder.name if file.name == CONFIG else file.name.removesuffix(".json"), fallback)


def _count(diagnostics: Sequence[Diagnostic]) -> str:
    """The last line: how many mistakes, and whether a spec can be had all the same."""
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
        return wrong(f"{name} is not a regular file" if force else f"{name} exists", "" if force else "see --force")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the path is not valid"
        return wrong(f"{name} cannot be written: {reason}")
    say(visible(f"wrote {name}"))
    return 0
