"""`dsc export hf RUN|CHECKPOINT -o DIR`, `dsc export torchtitan|megatron-bridge|chakra SPEC -o DIR`: write
a model or a plan for other systems.

dsc export hf runs/mine -o mine-hf                             the newest checkpoint, in BF16
dsc export hf runs/mine/checkpoints/step-00002000 -o mine-hf --dtype fp32
dsc export hf runs/mine -o mine-hf --average                   the moving average of the weights
dsc export hf runs/mine -o mine-lora --adapter                 only the trained adapters, as PEFT loads them
dsc export torchtitan spec.dsc -o titan                        a configuration, and the schedule as CSV
dsc export megatron-bridge spec.dsc -o bridge --lossy          a recipe, even if it changes what is computed
dsc export chakra spec.dsc -o traces                           the predicted step as execution traces, one per rank

hf: a trained model as transformers, vLLM and others load it. Trained adapters are merged into the weights. DIR has
config.json, safetensors with their index, and the tokenizer if the run has one.

torchtitan, megatron-bridge: a plan. Settings that the other system does not have are listed on stderr and in the file.
If that changes what is computed, nothing is written without --lossy. See docs/exchange.md.

chakra: the step that `dsc plan` predicts, as execution traces of MLCommons Chakra 0.0.4 (pip install
'dsc-trainer[chakra]').

DIR appears only when it is complete.

Exit codes: 0 DIR is written · 2 there is no such checkpoint or spec, no known model family matches, or the other system
cannot compute it · 75 the disk is full
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compiler.cli.commands.common import add_overrides, report_error

PLANS = ("torchtitan", "megatron-bridge", "chakra")
OF_WEIGHTS = {"dtype": None, "adapter": False, "average": False}  # options of hf only, and their defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    text = "hf: weights, as Hugging Face publishes models; torchtitan, megatron-bridge, chakra: a plan"
    parser.add_argument("system", choices=("hf", *PLANS), help=text)
    text = "hf: a run (its newest checkpoint) or a checkpoint; else a spec file, or SPEC:RUN"
    parser.add_argument("source", metavar="RUN|CHECKPOINT|SPEC", help=text)
    parser.add_argument(
        "-o", "--out", metavar="DIR", type=Path, required=True, help="folder to write; must not exist or be empty"
    )
    add_overrides(parser)
    parser.add_argument(
        "--lossy", action="store_true", help="write a plan even if the other system would compute something else"
    )
    text = "for plans: list what is written and what is lost, as text or json; default: text"
    parser.add_argument("--format", choices=("text", "json"), default="text", help=text)
    text = "hf: bf16, fp32, or fp8 (matrices of layers in E4M3 with 128 x 128 blocks); default: bf16"
    parser.add_argument("--dtype", choices=("bf16", "fp32", "fp8"), help=text)
    parser.add_argument("--adapter", action="store_true", help="hf: write only the adapters, as PEFT loads them")
    parser.add_argument("--average", action="store_true", help="hf: write the moving average of the weights")


def run(args: argparse.Namespace) -> int:
    """Write the folder. Returns the exit code."""
    if args.system in PLANS:
        refused = [name for name, absent in OF_WEIGHTS.items() if getattr(args, name) != absent]
        if refused:
            return report_error(f"--{refused[0]} is an option of hf, not of {args.system}", "leave it out", args.format)
        from compiler.cli.commands import export_plan

        return export_plan.run(args)
    if args.lossy or args.set or args.format != "text":
        return report_error("--lossy, --set and --format are options for plans, not for hf", "leave them out")
    from compiler.cli.commands import export_weights  # imported late: the exporters import much

    args.source, args.dtype = Path(args.source), args.dtype or "bf16"
    return export_weights.run(args)
