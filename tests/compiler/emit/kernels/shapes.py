"""The calls of kernels that the shipped specs make, and their arguments as meta tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, get_args

from torch import Tensor

from compiler.emit.emission import num_sms
from compiler.emit.kernels import KERNELS
from compiler.emit.kernels.calls import KernelCall, calls
from compiler.ir import Buffer
from compiler.ir.expert_placement import ExpertPlacement, LayerPlacement
from compiler.plan.experts.spec_placement import layers_with_experts
from compiler.plan.plan import make_plan
from compiler.plan.spec_files import with_expert_placement
from dsl.load import load
from dsl.schema import Spec
from dsl.schema.run import Fusion
from tests.specs.shipped import RUNS, SPECS

ROWS = 32768  # rows received by an expert rank: a multiple of 16, which Triton specialises on
ODD_ROWS = (1023, 1)  # neither is a multiple of 16

Variant = tuple[str, str, tuple[str, ...]]  # file, run, overrides

UNFUSED = f"unfused=[{', '.join(get_args(Fusion))}]"
MASKED = "data.documents=masked"
PLACED = 'parallel.placement="placement.json"'
CONTEXT = "parallel.context=2"

# Every run unchanged and in other precisions; without fusion, and with optional fusions.
OTHERWISE: tuple[tuple[str, ...], ...] = (
    (),
    ("precision=bf16",),
    ("precision=fp32",),
    (UNFUSED,),
    ("recompute=[logits]", "recompute_layers=none", "precision=bf16"),
)
# Features of published models that no shipped spec has: bounded attention, and other activations.
GROUPED, DENSE = "model.attention", "model.layers.0.ffn"
MISTRAL = (f"{GROUPED}.window=4096",)
GEMMA2 = (
    *(f"{GROUPED}.{setting}" for setting in ("heads=16", "head_dim=256", "softcap=50", "window=4096")),
    f"{DENSE}.activation=geglu_tanh",
)
GEMMA2_27B = (*(f"{GROUPED}.{setting}" for setting in ("kv_heads=16", "softcap=50")), f"{DENSE}.activation=geglu")
GPT_OSS = (
    *(f"{GROUPED}.{setting}" for setting in ("heads=64", "head_dim=64", "window=128", "sinks=true")),
    *(f"{DENSE}.clamp.{setting}" for setting in ("limit=7", "alpha=1.702", "shift=1")),
)
NEMOTRON, GPT_2 = (f"{DENSE}.activation=relu2",), (f"{DENSE}.activation=gelu_tanh",)
SMALL = (f"{GROUPED}.window=50", f"{GROUPED}.softcap=20", f"{GROUPED}.sinks=true", f"{DENSE}.activation=gelu")
CLIPPED = "train.optimizer.qk_clip=100"
CONTEXT_LAPTOP = (*SMALL, CONTEXT, "parallel.pipeline=1", MASKED)
BOUNDED = (MISTRAL, GEMMA2, GEMMA2_27B, GPT_OSS, NEMOTRON, GPT_2)
LARGE = ("deepseek-v3.dsc", "llama3-8b.dsc")
ON_DEVICES = tuple(row for row in RUNS if row[0] != "r1-tiny.dsc")  # the second run generates completions, on CPUs
VARIANTS: tuple[Variant, ...] = (
    *((file, run, values) for file, run in ON_DEVICES for values in OTHERWISE),
    ("quickstart.dsc", "quickstart", ("train.sequence=127", "train.micro_batch=1")),  # an odd number of tokens
    ("quickstart.dsc", "quickstart", (PLACED, UNFUSED)),
    ("deepseek-v3.dsc", "pretrain", (PLACED, UNFUSED, "model.layers.1.ffn.max_nodes=none")),
    ("deepseek-v3.dsc", "pretrain", ("unfused=[residual_norm]",)),
    ("deepseek-v3.dsc", "pretrain", ("precision.attention_output=bf16",)),
    ("deepseek-v3.dsc", "pretrain", ("train.sequence=4000",)),  # no multiple of a tile
    ("deepseek-v3.dsc", "pretrain", ("recompute=[]",)),
    ("deepseek-v3.dsc", "pretrain", ("recompute=[]", UNFUSED)),
    ("deepseek-v3.dsc", "pretrain", ("precision=bf16", "model.attention.scale=0.2")),  # turned in front of attention
    *(("llama3-8b.dsc", "pretrain", (*model, *values)) for model in BOUNDED for values in ((), ("precision=fp32",))),
    *(("laptop-gqa.dsc", "laptop_gqa", (*SMALL, *values)) for values in ((), ("precision=bf16",))),
    # Parts of a vocabulary.
    *(("llama3-8b.dsc", "pretrain", ("parallel.tensor=2", *values)) for values in ((), ("recompute=[logits]",))),
    # Sequences of several documents.
    *((file, run, (MASKED,)) for file, run in ON_DEVICES),
    *((file, "pretrain", (MASKED, "precision=fp32")) for file in LARGE),
    ("deepseek-v3.dsc", "pretrain", (MASKED, "train.sequence=4000")),
    ("deepseek-v3.dsc", "pretrain", (MASKED, "precision=bf16", "model.attention.scale=0.2")),
    *(
        ("llama3-8b.dsc", "pretrain", (*model, MASKED, *values))
        for model in (MISTRAL, GEMMA2, GEMMA2_27B, GPT_OSS)
        for values in ((), ("precision=fp32",))
    ),
    *(("laptop-gqa.dsc", "laptop_gqa", (*SMALL, MASKED, *values)) for values in ((), ("precision=bf16",))),
    # Runs that need the largest logit of each head.
    *(
        ("llama3-8b.dsc", "pretrain", (*model, CLIPPED, *values))
        for model in ((), MISTRAL)
        for values in ((), ("precision=fp32",), (MASKED,), (CONTEXT,))
    ),
    # Sequences that context ranks split.
    ("quickstart.dsc", "quickstart", (CONTEXT,)),
    *((file, "pretrain", (CONTEXT, *values)) for file in LARGE for values in ((), ("precision=fp32",))),
    ("deepseek-v3.dsc", "pretrain", (CONTEXT, "train.sequence=4000")),
    *(
        ("llama3-8b.dsc", "pretrain", (*model, CONTEXT, *values))
        for model in (MISTRAL, GEMMA2, GEMMA2_27B, GPT_OSS)
        for values in ((), ("precision=fp32",))
    ),
    *(("laptop-gqa.dsc", "laptop_gqa", (*CONTEXT_LAPTOP, *values)) for values in ((), ("precision=bf16",))),
)
SAMPLE: tuple[Variant, ...] = (
    ("quickstart.dsc", "quickstart", ()),
    ("deepseek-v3.dsc", "pretrain", ()),
    ("deepseek-v3.dsc", "pretrain", ("precision=bf16",)),
    ("deepseek-v3.dsc", "pretrain", (MASKED, "precision=bf16", "model.attention.scale=0.2")),
    ("laptop-gqa.dsc", "laptop_gqa", (*SMALL, MASKED, "precision=bf16")),
    ("laptop-gqa.dsc", "laptop_gqa", (*CONTEXT_LAPTOP, "precision=bf16")),
)

# Rows of KERNELS that no spec calls, and the op whose arguments the gate uses for them.
NOT_IN_A_SPEC: dict[str, str] = {
    "quantise_columns": "quantise",  # half of quantise_both (the other half is quantise): its tests compare with it
    "quantise_kept_e5m6": "quantise_e5m6",  # part of attention if heads are a tile wide, as in all specs
}


def calls_in(spec: Spec) -> tuple[KernelCall, ...]:
    """Calls of kernels in the segments of a spec's plan."""
    return calls(spec, (use.segment for use in make_plan(spec).uses))


def by_number(spec: Spec) -> ExpertPlacement:
    """The placement that gives each expert rank equally many experts, in numerical order."""
    placements = {}
    for name, ffn in layers_with_experts(spec):
        size = ffn.experts // spec.parallel.expert
        placements[name] = LayerPlacement(
            name, tuple(tuple(range(first, first + size)) for first in range(0, ffn.experts, size))
        )
    return ExpertPlacement(placements)


@cache
def kernel_calls(file: str, run: str, values: tuple[str, ...] = ()) -> tuple[tuple[KernelCall, int], ...]:
    """The calls of a run's ops that have a row of KERNELS, with the SMs its kernels may use; and of ops like them."""
    spec = load(SPECS / file, run, [value for value in values if value != UNFUSED])
    if PLACED in values:
        spec = with_expert_placement(spec, by_number(spec))
    if UNFUSED in values:  # all names; a spec may only list ops that it fuses
        spec = spec.model_copy(update={"unfused": get_args(Fusion)})
    spec_calls = [call for call in calls_in(spec) if call.op in KERNELS]
    spec_calls += [
        replace(call, op=op) for op, listed_op in NOT_IN_A_SPEC.items() for call in spec_calls if call.op == listed_op
    ]
    return tuple((call, num_sms(spec)) for call in spec_calls)


def rows_of(call: KernelCall) -> tuple[int, ...]:
    """Numbers of rows to try for a call's R; rows of eight bits come in tiles of 128, one at least."""
    parts = [part for part in call.arguments if isinstance(part, Buffer)]
    if not any("R" in part.shape for part in parts):
        return (ROWS,)
    return (ROWS, 128) if any(part.dtype.startswith("float8") for part in parts) else (ROWS, *ODD_ROWS)


def describe(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with tensors as the compiler knows them."""
    return tuple(
        Buffer("argument", tuple(argument.shape), str(argument.dtype).removeprefix("torch."))
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    )
