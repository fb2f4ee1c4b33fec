"""`dsc export hf RUN|CHECKPOINT -o DIR`, `dsc export torchtitan|megatron-bridge|chakra SPEC -o DIR`: for other systems.

dsc export hf runs/mine -o mine-hf                             its newest checkpoint, in BF16
dsc export hf runs/mine/checkpoints/step-00002000 -o mine-hf --dtype fp32
dsc export hf runs/mine -o mine-hf --average                   the moving average of the weights
dsc export hf runs/mine -o mine-lora --adapter                 of a run with adapters, these alone, as PEFT loads them
dsc export torchtitan spec.dsc -o titan                        its plan: a configuration, and the schedule as a CSV
dsc export megatron-bridge spec.dsc -o bridge --lossy          a recipe, though it says less than the spec
dsc export chakra spec.dsc -o traces                           its step as execution traces, one of each rank

hf: a trained model as transformers, vLLM and others load it. Weights beside which adapters were trained are written
with what these add. DIR has config.json, safetensors with their index, and the tokenizer if the run has one.

torchtitan, megatron-bridge: a plan. What the other system cannot be told is listed on stderr and in the file. Where
that changes what is computed, nothing is written without --lossy. docs/exchange.md says what is translated.

chakra: the step that `dsc plan` predicts, as execution traces of MLCommons Chakra 0.0.4 (pip install
'dsc-trainer[chakra]').

DIR appears when it is complete.

Exit codes: 0 DIR is written · 2 there is no such checkpoint or spec, no family describes its model, or the other system
cannot compute it · 75 the disk is full
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compiler.cli.commands.common import add_overrides, wrong

PLANS = ("torchtitan", "megatron-bridge", "chakra")
OF_WEIGHTS = {"dtype": None, "adapter": False, "average": False}  # options of hf alone, and what they are if not given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    what = "hf: weights, as Hugging Face publishes models; torchtitan, megatron-bridge, chakra: a plan"
    parser.add_argument("system", choices=("hf", *PLANS), help=what)
    text = "hf: a run's newest checkpoint, or this one; else a spec file, or SPEC:RUN"
    parser.add_argument("source", metavar="RUN|CHECKPOINT|SPEC", help=text)
    parser.add_argument("-o", "--out", metavar="DIR", type=Path, required=True, help="folder to write, a new one")
    add_overrides(parser)
    parser.add_argument("--lossy", action="store_true", help="write a plan though the other system computes another")
    how = "of a plan: what was written, and what is lost; default: text"
    parser.add_argument("--format", choices=("text", "json"), default="text", help=how)
    text = "hf: bf16, fp32 or fp8: matrices of layers in E4M3 blocks of 128 x 128; default: bf16"
    parser.add_argument("--dtype", choices=("bf16", "fp32", "fp8"), help=text)
    parser.add_argument("--adapter", action="store_true", help="hf: the adapters alone, as PEFT loads them")
    parser.add_argument("--average", action="store_true", help="hf: the moving average of the weights, not the weights")


def run(args: argparse.Namespace) -> int:
    """Write the folder; the exit code."""
    if args.system in PLANS:
        given = [name for name, absent in OF_WEIGHTS.items() if getattr(args, name) != absent]
        if given:
            return wrong(f"--{given[0]} is an option of hf, not of {args.system}", "leave it out", args.format)
        from compiler.cli.commands import export_plan

        return export_plan.run(args)
    if args.lossy or args.set or args.format != "text":
        return wrong("--lossy, --set and --format are of plans, not of hf", "leave them out")
    from compiler.cli.commands import export_weights  # each brings what the other does not need

    args.source, args.dtype = Path(args.source), args.dtype or "bf16"
    return export_weights.run(args)
