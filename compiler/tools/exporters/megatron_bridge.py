"""Exports a plan as a Megatron-Bridge 0.3.1 recipe: a module with a function that returns a `ConfigContainer`.

The keys are those of its configuration classes and of Megatron-Core 0.16. It schedules 1F1B, plain or interleaved, on
the stages in `pipeline_model_parallel_layout`.
"""

from __future__ import annotations

from typing import Any

from compiler.ir.stage_placement import loop
from compiler.tools.exporters.planned import (
    Code,
    ExportedFiles,
    ExportedRate,
    ExportError,
    PlannedSpec,
    SpecLedger,
    approximate_rate,
    comments,
    free_name,
    latent_attention,
    layers_of,
    optimizer_to_export,
    render_python,
    say_run,
    say_sizes,
)
from dsl.facts.schedules import PLAIN, PLAIN_CHUNKED
from dsl.schema import Moe, Rope, Spec
from dsl.schema.rotation import YarnScaling

# --- The exported files

VERSION, SYSTEM = "0.3.1", "megatron-bridge"
MODULE, LAYOUT = "recipe.py", "layout.txt"
TEMPLATE = """\
# A recipe for Megatron-Bridge {version}, written by dsc: {name}() for {world} devices.
#
# What this export drops or changes:
{lost}
from functools import partial

import torch
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.utils import init_method_normal


def {name}() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = MLAModelProvider(
{model}    )
    cfg.mixed_precision = MixedPrecisionConfig(
{precision}    )
{parts}    return cfg
"""


# --- The model as arguments of Megatron-Bridge's `MLAModelProvider`, which have Megatron-Core's names

Settings = dict[str, Any]  # by the argument's name


def model_settings(spec: Spec, ledger: SpecLedger) -> Settings:
    """The arguments of `MLAModelProvider`. Raises ExportError for a model that Megatron cannot build."""
    model, attention = spec.model, latent_attention(spec, SYSTEM)
    layers, mtp = layers_of(spec, SYSTEM), spec.model.mtp
    say_sizes(ledger)
    ledger.say("model.layers.*.ffn.kind", "model.layers.*.ffn.inner", "model.tied")
    if mtp is not None and len(mtp.weight) > 1:
        ledger.lose("model.mtp.weight", f"constant in Megatron: {mtp.weight[0].value:g}")
    ledger.say("model.mtp.*")
    ffn = layers.dense_ffn or layers.moe
    assert ffn is not None
    return {
        "transformer_layer_spec": Code("partial(get_gpt_decoder_block_spec, use_transformer_engine=True)"),
        "num_layers": layers.total,
        "hidden_size": model.hidden,
        "ffn_hidden_size": ffn.inner,
        "vocab_size": model.vocab,
        "num_attention_heads": attention.heads,
        "kv_channels": attention.head_dim.nope + attention.head_dim.rope,
        "q_lora_rank": attention.query_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_head_dim": attention.head_dim.nope,
        "qk_pos_emb_head_dim": attention.head_dim.rope,
        "v_head_dim": attention.head_dim.value,
        "qk_layernorm": True,
        **_rope(attention.rope, ledger),
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "activation_func": Code("torch.nn.functional.silu"),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": model.init_std,
        "output_layer_init_method": Code(f"init_method_normal({model.init_std!r})"),
        "share_embeddings_and_output_weights": model.tied,
        "seq_length": spec.train.sequence,
        "mtp_num_layers": mtp.depth if mtp else None,
        **({"mtp_loss_scaling_factor": mtp.weight[0].value} if mtp else {}),
        **(_moe(layers.moe, layers.dense, layers.total, ledger) if layers.moe else {}),
    }


def _moe(moe: Moe, num_dense: int, num_layers: int, ledger: SpecLedger) -> Settings:
    """The experts and their router."""
    if moe.score == "sqrt_softplus":
        raise ExportError(
            "Megatron-Core 0.16 has no `score = sqrt_softplus`", "write `score = sigmoid` or `score = softmax`"
        )
    for key in ("experts", "shared", "shared_inner", "shared_gate", "top_k", "score", "scale", "groups", "top_groups"):
        ledger.say(f"model.layers.*.ffn.{key}")
    why = "top_groups also limits how many nodes a token goes to"
    ledger.lose("model.layers.*.ffn.max_nodes", why, changes=False)
    theirs, ours = moe.top_k // moe.top_groups, 1 if moe.score == "softmax" else 2  # experts that score a group
    if moe.groups > 1 and theirs != ours:
        why = f"Megatron scores a group by the sum of its {theirs} best experts, dsc by the sum of its {ours} best"
        ledger.record("model.layers.*.ffn.top_groups", str(moe.top_groups), why)
    if moe.score == "sigmoid" and moe.top_k > 1 and not moe.normalize:
        ledger.lose("model.layers.*.ffn.normalize", "Megatron divides sigmoid scores by their sum")
    ledger.say("model.layers.*.ffn.normalize")
    rate = moe.balance.bias_rate
    if rate is not None and len(rate) > 1:
        ledger.lose("model.layers.*.ffn.balance.bias_rate", f"constant in Megatron: {rate[0].value:g}")
    if rate is not None and moe.score != "sigmoid":
        ledger.lose("model.layers.*.ffn.balance.bias_rate", "Megatron supports a bias only with sigmoid scores")
        rate = None
    ledger.say("model.layers.*.ffn.balance.*")
    shared = moe.shared * (moe.shared_inner or moe.inner)
    groups = {"moe_router_num_groups": moe.groups, "moe_router_group_topk": moe.top_groups} if moe.groups > 1 else {}
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.inner,
        "moe_layer_freq": Code(f"[0] * {num_dense} + [1] * {num_layers - num_dense}"),
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_topk": moe.top_k,
        **groups,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "sigmoid" or not moe.normalize,
        "moe_router_topk_scaling_factor": moe.scale,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": rate is not None,
        "moe_router_bias_update_rate": rate[0].value if rate else 0.0,
        "moe_router_load_balancing_type": "seq_aux_loss" if moe.balance.sequence_loss else "none",
        "moe_aux_loss_coeff": moe.balance.sequence_loss,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _rope(rope: Rope | None, ledger: SpecLedger) -> Settings:
    """RoPE. Without YaRN `rotary_scaling_factor` is 1, which leaves the softmax scale unchanged."""
    if rope is None:
        raise ExportError(
            "Megatron's latent attention always has RoPE, this model's has none", "write `rope { theta = 10_000 }`"
        )
    ledger.say("model.attention.rope.theta")
    settings: Settings = {"rope_type": "rope", "position_embedding_type": "rope", "rotary_base": rope.theta}
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        if scaling is not None:
            ledger.lose("model.attention.rope.scaling.*", "Megatron's latent attention supports only YaRN")
        return settings | {"rotary_scaling_factor": 1.0}
    has_mscales = scaling.mscale is not None and scaling.mscale_all_dim is not None
    if (
        scaling.attention_factor is not None
        or not scaling.truncate
        or (scaling.mscale_all_dim is not None and not has_mscales)
    ):
        why = "Megatron scales the sines by m(mscale) / m(mscale_all_dim), and its ramp ends at whole pairs"
        ledger.lose("model.attention.rope.scaling.*", why)
    ledger.say("model.attention.rope.scaling.*")
    return settings | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale if has_mscales else 1.0,
        "mscale_all_dim": scaling.mscale_all_dim if has_mscales else 0.0,
    }


# --- The recipe

BF16, FP32 = Code("torch.bfloat16"), Code("torch.float32")
# Op of `recompute` → Megatron's name for it.
RECOMPUTED = {
    "rmsnorm": "layernorm",
    "mla_up": "mla_up_proj",
    "swiglu": "moe_act",
    "shared": "shared_experts",
    "dense": "mlp",
}
BLOCKWISE = {  # precision values that match Megatron's FP8 recipe `blockwise`
    "linear": "e4m3", "scale": "fp32", "tensor_scale": False, "gradient_rounding": "nearest", "hadamard": False,
}  # fmt: skip


def export(planned: PlannedSpec) -> ExportedFiles:
    """The recipe, the layout and the losses. Raises ExportError for a model that Megatron cannot build."""
    spec, ledger = planned.spec, SpecLedger(planned.spec)
    say_run(ledger)
    model = model_settings(spec, ledger) | _parallel(planned, ledger) | _recompute(spec, ledger)
    precision, optimizer = _precision(spec, ledger)
    parts = _run(planned, optimizer, ledger)
    losses = ledger.losses(SYSTEM)
    text = TEMPLATE.format(
        version=VERSION,
        name=free_name(spec.name, TEMPLATE),
        lost="".join(f"# {line}\n" for line in comments(losses)) or "# Nothing of the spec is lost.\n",
        world=spec.cluster.world,
        model="".join(f"        {key}={render_python(value, '        ')},\n" for key, value in model.items()),
        precision="".join(f"        {key}={render_python(value)},\n" for key, value in precision.items()),
        parts="".join(
            f"    cfg.{part}.{key} = {render_python(value, '    ')}\n"
            for part, settings in parts.items()
            for key, value in settings.items()
        ),
    )
    return ExportedFiles({MODULE: text.encode(), LAYOUT: f"{planned.layout}\n".encode()}, losses)


def _parallel(planned: PlannedSpec, ledger: SpecLedger) -> Settings:
    """The arguments for degrees, stages and schedule."""
    spec, parallel = planned.spec, planned.spec.parallel
    chunks = len(planned.stages) // parallel.pipeline
    ledger.say("parallel.pipeline", "parallel.data", "parallel.tensor", "parallel.context", "parallel.expert")
    ledger.say("parallel.expert_tensor", "parallel.layout", "schedule.chunks", "parallel.overlap_reduce")
    if parallel.zero > 1:
        ledger.lose("parallel.zero", "the recipe shards only optimizer states: see `use_megatron_fsdp`", changes=False)
    ledger.lose("parallel.shard", "see `num_distributed_optimizer_instances`", changes=False)
    ledger.lose("parallel.route", "set `moe_token_dispatcher_type` and its backend", changes=False)
    ledger.lose("parallel.placement", "Megatron places experts in order", changes=False)
    ledger.say("parallel.zero")
    schedule = PLAIN if chunks == 1 else PLAIN_CHUNKED
    if planned.spec.schedule.name != schedule and parallel.pipeline > 1:
        ledger.lose("schedule.*", f"Megatron runs {schedule} on these stages")
    if planned.schedule.stage_placement != loop(chunks):
        why = f"Megatron places stage s on rank s mod {parallel.pipeline}"
        ledger.record("schedule.placement", str(planned.schedule.stage_placement), why)
    ledger.say("schedule.*")
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "pipeline_model_parallel_layout": planned.layout if parallel.pipeline > 1 else None,
        "pipeline_dtype": FP32 if spec.precision.compute == "fp32" else BF16,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.tensor > 1,
    }


def _recompute(spec: Spec, ledger: SpecLedger) -> Settings:
    """Activation recomputation: whole layers, or the ops that Megatron has a name for."""
    ledger.say("recompute_layers")
    if "layer" in spec.recompute:
        ledger.say("recompute")
        if spec.recompute_layers is None:
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": spec.recompute_layers,
        }
    if unnamed := [op for op in spec.recompute if op not in RECOMPUTED]:
        ledger.lose("recompute", f"Megatron has no name for {', '.join(unnamed)}", changes=False)
    ledger.say("recompute")
    modules = [RECOMPUTED[op] for op in spec.recompute if op in RECOMPUTED]
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


def _precision(spec: Spec, ledger: SpecLedger) -> tuple[Settings, Settings]:
    """The arguments of `MixedPrecisionConfig`, and the dtypes of the optimizer states."""
    precision = spec.precision
    params_dtype = FP32 if precision.compute == "fp32" else BF16
    settings: Settings = {
        "fp32" if params_dtype == FP32 else "bf16": True,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "autocast_enabled": False,
        "grad_reduce_in_fp32": precision.gradients == "fp32",
    }
    if precision.compute in ("bf16", "fp32"):
        ledger.say("precision.compute")
    for role in ("gradients", "accumulate", "master"):
        if getattr(precision, role) == "fp32":
            ledger.say(f"precision.{role}")
    for role in ("parameter", "dispatch", "combine"):
        if getattr(precision, role) == precision.compute:
            ledger.say(f"precision.{role}")
    if precision.linear == precision.compute:
        ledger.say("precision.linear", "precision.activation_tile", "precision.weight_tile")
        ledger.say("precision.scale", "precision.tensor_scale")
        ledger.say("precision.gradient_rounding", "precision.hadamard", "precision.promote")
        ledger.say("precision.attention_output")
    elif all(getattr(precision, key) == value for key, value in BLOCKWISE.items()) and (
        str(precision.activation_tile),
        str(precision.weight_tile),
    ) == ("1x128", "128x128"):
        settings |= {"fp8": "e4m3", "fp8_recipe": "blockwise"}
        for key in (*BLOCKWISE, "activation_tile", "weight_tile"):
            ledger.say(f"precision.{key}")
        why = "scales are powers of two unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 is set"
        ledger.record("precision.scale", "fp32", why)
        ledger.lose("precision.promote", "Transformer Engine decides when sums are promoted to FP32")
    if precision.moments not in ("fp32", "bf16"):
        return settings, {}
    ledger.say("precision.moments")
    if precision.moments == "fp32":
        return settings, {}
    moments = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
    return settings, {"use_precision_aware_optimizer": True, "main_params_dtype": FP32, **moments}


def _run(planned: PlannedSpec, optimizer: Settings, ledger: SpecLedger) -> dict[str, Settings]:
    """The settings of each part of a configuration."""
    spec, train = planned.spec, planned.spec.train
    rate, adam = approximate_rate(planned, ledger, SYSTEM), optimizer_to_export(spec, ledger, SYSTEM)
    if train.batch.start != train.batch.end:
        ledger.lose("train.batch", f"this recipe has no batch ramp: the batch is {train.batch.end}")
    ledger.say("train.batch", "train.sequence", "train.micro_batch", "train.tokens", "train.seed")
    ledger.lose("train.grpo.*", "this recipe trains on text, without rewards")
    ledger.lose("train.ema.*", "this recipe keeps no moving average of the weights", changes=False)
    ledger.lose("train.health.*", "Megatron responds to a bad loss in another way")
    ledger.lose("train.initial", "give the weights to `checkpoint.pretrained_checkpoint`, in Megatron's format")
    ledger.lose("train.within.*", "a recipe has no phases: this one has a single phase of the run")
    ledger.lose("adapter.*", "set `peft` of the returned configuration")
    ledger.lose("data.*", "set `dataset` and `tokenizer` of the returned configuration", changes=False)
    if rate.warmup or rate.decay:
        ledger.record("train.rate", f"{rate.peak:g}", "Megatron's learning rates are one step late", changes=False)
    parts: dict[str, Settings] = {
        "train": {
            "train_iters": planned.steps,
            "global_batch_size": train.batch.end,
            "micro_batch_size": train.micro_batch,
        },
        "optimizer": {
            "lr": rate.peak,
            "min_lr": rate.least,
            "weight_decay": adam.weight_decay,
            "adam_beta1": adam.beta1,
            "adam_beta2": adam.beta2,
            "adam_eps": adam.eps,
            "clip_grad": adam.clip or 0.0,
            "use_distributed_optimizer": spec.parallel.zero > 0,
            **optimizer,
        },
        "scheduler": _scheduler(rate)
        | {"start_weight_decay": adam.weight_decay, "end_weight_decay": adam.weight_decay},
        "ddp": {
            "use_distributed_optimizer": spec.parallel.zero > 0,
            "grad_reduce_in_fp32": spec.precision.gradients == "fp32",
            "overlap_grad_reduce": spec.parallel.overlap_reduce,
            "overlap_param_gather": spec.parallel.zero > 0 and spec.parallel.overlap_reduce,
        },
        "rng": {"seed": train.seed},
        "dataset": {"seq_length": train.sequence},
    }
    if checkpoint := train.checkpoint:
        ledger.say("train.checkpoint.every", "train.checkpoint.keep")
        ledger.lose("train.checkpoint.*", "Megatron's checkpoints have no such option", changes=False)
        parts["checkpoint"] = {"save_interval": checkpoint.every, "most_recent_k": checkpoint.keep}
    if validate := train.validate:
        ledger.say("train.validate.every", "train.validate.batches")
        ledger.lose("train.validate.*", "Megatron's validation has no such option", changes=False)
        parts["train"] |= {"eval_interval": validate.every, "eval_iters": validate.batches}
    return parts


def _scheduler(rate: ExportedRate) -> Settings:
    """The learning rate, in iterations."""
    settings: Settings = {"lr_warmup_iters": rate.warmup, "lr_decay_iters": rate.steps, "lr_warmup_init": 0.0}
    if not rate.decay:
        return settings | {"lr_decay_style": "constant"}
    if not rate.stable:
        return settings | {"lr_decay_style": rate.shape}
    return settings | {
        "lr_decay_style": "WSD",
        "lr_wsd_decay_iters": rate.decay,
        "lr_wsd_decay_style": rate.shape,
    }
