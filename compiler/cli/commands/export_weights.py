"""`dsc export hf`: write a trained model as transformers, vLLM and others load it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import progress, reason, report_error, say
from compiler.cli.commands.output_files import new_folder
from compiler.plan.initial import published_model
from compiler.tools.importers.huggingface import LATENT_EPS
from compiler.tools.processes import ask
from compiler.tools.weights.adapter import CONFIG as ADAPTER_CONFIG
from compiler.tools.weights.adapter import WEIGHTS as ADAPTER_WEIGHTS
from compiler.tools.weights.adapter import Adapters, adapter_config, published_adapters
from compiler.tools.weights.checkpoint import ModelError, check_tensors, model_of, published_name, sequence_of
from compiler.tools.weights.config import NoFamilyError, Publication, publication, with_format
from compiler.tools.weights.tokenizer import files_for
from dsl.messages.diagnostics import make_visible
from runtime.checkpoint.shard_manifest import CheckpointError, Manifest, base_of, find_manifest
from runtime.contract.weights import ONE, Export
from runtime.data.files import DataError
from runtime.system.outcome import refusal_code
from runtime.system.strict_json import pretty

CONFIG = "config.json"
NAME_BASE = "export them without --adapter, and write that folder as `base_model_name_or_path`"


def run(args: argparse.Namespace) -> int:
    """Write the folder. Returns the exit code."""
    try:
        folder, manifest = find_manifest(args.source)
        model_type, context = published_model(manifest.meta)
        context = max(context, sequence_of(manifest), 1)
        model = model_of(manifest)
        base = base_of(folder, manifest)
        check_tensors(manifest, model, average=args.average, base=base[1] if base else None)
        published = publication(model, context, model_type)
        adapters = published_adapters(manifest, published.tensors, published.family) if args.adapter else None
        if args.dtype == "fp8" and any(tensor.stacked for tensor in published.tensors):
            raise ModelError(f"{published.model_type} does not support FP8 blocks: choose --dtype bf16")
    except CheckpointError as error:
        return report_error(str(error), "name a run, or a checkpoint of one")
    except (ModelError, NoFamilyError) as error:
        return report_error(f"{args.source}: {error}")
    try:
        if adapters is None:
            return _write(args, folder, manifest, published, context)
        loads = published_name(base[1]) if base else None
        return _write(args, folder, manifest, published, context, (adapters, adapter_config(manifest, adapters, loads)))
    except DataError as error:
        return report_error(str(error), "correct that file of the tokenizer, or remove it")
    except FileExistsError as error:
        return report_error(str(error), "name a new folder")
    except OSError as error:
        report_error(f"{args.out} cannot be written: {reason(error)}")
        return refusal_code(error)


def _write(
    args: argparse.Namespace,
    folder: Path,
    manifest: Manifest,
    published: Publication,
    context: int,
    peft: tuple[Adapters, dict[str, Any]] | None = None,
) -> int:
    """Write a folder beside DIR, then move it into place. `peft`: write only these adapters, with this
    configuration."""
    with new_folder(args.out) as (new, publish):
        files, end = files_for(folder, manifest.meta.get("tokenizer"), context)
        tokens = {
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": None,
        }  # override the defaults of the configuration class
        config = with_format(published, args.dtype) | tokens
        name, config = (ADAPTER_CONFIG, peft[1]) if peft else (CONFIG, config)
        files = {name: (json.dumps(config, indent=2) + "\n").encode(), **files}
        for name, content in files.items():
            (new / name).write_bytes(content)
        tensors = peft[0].tensors if peft else published.tensors
        request = Export(str(folder.absolute()), str(new), tensors, args.dtype, args.average)
        tell = progress("export")
        code, result = ask(
            ["runtime.state.huggingface", "export"], pretty(request), lambda text: tell(text and f"weights {text}")
        )
        if code:
            return code
        if peft:
            (new / ONE).rename(new / ADAPTER_WEIGHTS)
        publish()
    notes = _notes(published, has_tokenizer=len(files) > 1)
    if peft and peft[1]["base_model_name_or_path"] is None:
        notes.append(f"{ADAPTER_CONFIG} names no base model, as its weights were trained here: {NAME_BASE}")
    for note in notes:
        say(f"note: {note}")
    size = f"{result['tensors']:,} tensors, {result['bytes']:,} bytes"
    say(make_visible(f"wrote {args.out}: {published.model_type}, {size}, from {folder}"))
    return 0


def _notes(published: Publication, *, has_tokenizer: bool) -> list[str]:
    """Notes for the user on an exported model."""
    notes = []
    if published.family.remote:
        notes.append(f"transformers loads {published.model_type} only with the code published with such models")
    if "kv_lora_rank" in published.config and published.config["rms_norm_eps"] != LATENT_EPS:
        eps = published.config["rms_norm_eps"]
        notes.append(f"norm_eps is {eps:g} here; transformers always uses {LATENT_EPS:g} in the norms of latents")
    if not has_tokenizer:
        notes.append("the checkpoint has no tokenizer: none was written")
    return notes
