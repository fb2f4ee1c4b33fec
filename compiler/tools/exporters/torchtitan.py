"""Exports a plan as a configuration of torchtitan 0.3.0: a module with a function that returns a `Trainer.Config`.

torchtitan's `build_mla_moe_layers` builds the model, so only MLA models with experts can be exported. The schedule is
a CSV that `torch.distributed.pipelining` loads.
"""

from __future__ import annotations

from typing import Any

from compiler.ir.stage_placement import V
from compiler.schedule.torch_csv import to_torch_csv
from compiler.tools.exporters.planned import (
    Code,
    ExportedFiles,
    ExportedLayers,
    ExportedRate,
    ExportError,
    PlannedSpec,
    PythonCall,
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
from dsl.schema import Mla, Rope, Spec
from dsl.schema.rotation import YarnScaling

# --- The exported files

VERSION, SYSTEM = "0.3.0", "torchtitan"
MODULE, CSV = "config_registry.py", "schedule.csv"
TEMPLATE = """\
# A configuration for torchtitan {version}, written by dsc. In its folder:
#
#   PYTHONPATH=. torchrun ... -m torchtitan.train --module config_registry --config {name}
#
# What this export drops or changes:
{lost}
from functools import partial
from pathlib import Path

import torch.nn as nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    register_moe_load_balancing_hook,
)
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.deepseek_v3 import (
    DeepSeekV3Model,
    DeepSeekV3StateDictAdapter,
    MTPLoss,
    _build_mtp_layers,
    build_mla_moe_layers,
    parallelize_deepseekv3,
)
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

NORMAL = partial(nn.init.normal_, std={std})
LINEAR = {{"weight": NORMAL, "bias": nn.init.zeros_}}
NORM = {{"weight": nn.init.ones_}}
EXPERTS = {{"w1_EFD": NORMAL, "w2_EDF": NORMAL, "w3_EFD": NORMAL}}


def model_spec() -> ModelSpec:
    layers = {layers}
    for layer in layers:
        attention = layer.attention
        for norm in (layer.attention_norm, layer.ffn_norm, attention.q_norm, attention.kv_norm):
            norm.eps = {eps}
        if layer.moe is not None:
            layer.moe.load_balance_coeff = {bias}
    return {spec}


def {name}() -> Trainer.Config:
    return {config}
"""


# --- The configuration

UNDECAYED = r"(norm[^.]*\.weight|\.bias)$"  # names of parameters without weight decay


def export(planned: PlannedSpec) -> ExportedFiles:
    """The module, the schedule and the losses. Raises ExportError for a model that torchtitan cannot build."""
    spec, ledger = planned.spec, SpecLedger(planned.spec)
    attention, layers = latent_attention(spec, SYSTEM), layers_of(spec, SYSTEM)
    say_run(ledger)
    model = _model(spec, attention, layers, ledger)
    config = _config(planned, ledger)
    losses = ledger.losses(SYSTEM)
    files = {MODULE: _module(planned, model, config, comments(losses)).encode()}
    if spec.parallel.pipeline > 1:
        files[CSV] = to_torch_csv(planned.schedule).encode()
    return ExportedFiles(files, losses)


# ---------------------------------------------------------------- the model
def _model(spec: Spec, attention: Mla, layers: ExportedLayers, ledger: SpecLedger) -> dict[str, Any]:
    """The arguments of `build_mla_moe_layers`."""
    model, dim, moe = spec.model, attention.head_dim, layers.moe
    if moe is None:
        raise ExportError("torchtitan's deepseek_v3 has experts, this model has none", "export a model with experts")
    if not moe.shared:
        raise ExportError("torchtitan's deepseek_v3 has shared experts, this model has none", "write `shared = 1`")
    if moe.score == "sqrt_softplus":
        raise ExportError("torchtitan has no `score = sqrt_softplus`", "write `score = sigmoid` or `score = softmax`")
    say_sizes(ledger)
    for key in ("kind", "inner", "experts", "shared", "top_k", "score", "normalize", "scale", "groups", "top_groups"):
        ledger.say(f"model.layers.*.ffn.{key}")
    why = "top_groups also limits how many nodes a token goes to"
    ledger.lose("model.layers.*.ffn.max_nodes", why, changes=False)
    ledger.lose("model.layers.*.ffn.balance.sequence_loss", "torchtitan has no balancing loss, only a bias")
    if moe.groups > 1 and moe.score == "softmax":
        why = "torchtitan scores a group by the sum of its two best experts; dsc, with softmax, by its best expert"
        ledger.record("model.layers.*.ffn.groups", str(moe.groups), why)
    rate = moe.balance.bias_rate
    if rate is not None and len(rate) > 1:
        ledger.lose("model.layers.*.ffn.balance.bias_rate", f"constant in torchtitan: {rate[0].value:g}")
    ledger.say("model.layers.*.ffn.balance.bias_rate")
    return {
        "n_layers": layers.total,
        "n_dense_layers": layers.dense,
        "dim": model.hidden,
        "n_heads": attention.heads,
        "q_lora_rank": attention.query_rank or 0,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": dim.nope,
        "qk_rope_head_dim": dim.rope,
        "v_head_dim": dim.value,
        "mscale": _mscale(attention.rope),
        "dense_hidden_dim": layers.dense_ffn.inner if layers.dense_ffn else moe.inner,
        "moe_hidden_dim": moe.inner,
        "num_experts": moe.experts,
        "num_shared_experts": moe.shared,
        "router_top_k": moe.top_k,
        "router_score_func": moe.score,
        "router_num_expert_groups": moe.groups if moe.groups > 1 else None,
        "router_num_limited_groups": moe.top_groups if moe.groups > 1 else None,
        "router_route_scale": moe.scale,
        "router_route_norm": moe.normalize,
        "attn_backend": "flex",
        "moe_comm_backend": "standard",
        "non_blocking_capacity_factor": None,
        "linear_init": Code("LINEAR"),
        "norm_init": Code("NORM"),
        "depth_init": Code("lambda layer: LINEAR"),
        "depth_experts_init": Code("lambda layer: EXPERTS"),
        "rope": _rope(spec, attention.rope, ledger),
    }


def _mscale(rope: Rope | None) -> float:
    scaling = rope.scaling if rope else None
    return (scaling.mscale_all_dim or 0.0) if isinstance(scaling, YarnScaling) else 1.0


def _rope(spec: Spec, rope: Rope | None, ledger: SpecLedger) -> PythonCall:
    """RoPE. torchtitan does not scale the sines, so the spec's factor must be 1."""
    if rope is None:
        raise ExportError(
            "torchtitan's attention always has RoPE, this model's has none", "write `rope { theta = 10_000 }`"
        )
    ledger.say("model.attention.rope.theta")
    settings: dict[str, Any] = {
        "dim": spec.model.attention.head_dim.rope if isinstance(spec.model.attention, Mla) else 0,
        "max_seq_len": spec.train.sequence,
        "theta": float(rope.theta),
    }
    if isinstance(scaling := rope.scaling, YarnScaling):
        factor_is_one = scaling.attention_factor == 1 or (
            scaling.attention_factor is None and scaling.mscale == scaling.mscale_all_dim is not None
        )
        if not factor_is_one:
            ledger.lose(
                "model.attention.rope.scaling.*", "torchtitan does not scale the sines: set `mscale = mscale_all_dim`"
            )
        ledger.say("model.attention.rope.scaling.*")
        settings |= {
            "scaling": "yarn",
            "rope_factor": float(scaling.factor),
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_seq_len": scaling.original,
            "truncate": scaling.truncate,
        }
    elif scaling is not None:
        ledger.lose("model.attention.rope.scaling.*", "torchtitan's latent attention supports only YaRN")
    return PythonCall("ComplexRoPE.Config", settings)


# ---------------------------------------------------------------- the run
def _config(planned: PlannedSpec, ledger: SpecLedger) -> dict[str, Any]:
    """The arguments of `Trainer.Config`."""
    spec = planned.spec
    train, rate = spec.train, approximate_rate(planned, ledger, SYSTEM)
    if train.batch.start != train.batch.end:
        ledger.lose("train.batch", f"torchtitan has no batch ramp: the batch is {train.batch.end}")
    ledger.say("train.batch", "train.sequence", "train.micro_batch", "train.tokens", "train.seed")
    ledger.lose("train.grpo.*", "this recipe trains on text, without rewards")
    ledger.lose("train.ema.*", "this recipe keeps no moving average of the weights", changes=False)
    ledger.lose("train.health.*", "torchtitan has no such response to a bad loss")
    ledger.lose("train.initial", "give the weights to `checkpoint.initial_load_path`, in torchtitan's format")
    ledger.lose("train.within.*", "torchtitan has no phases: this config has a single phase of the run")
    ledger.lose("train.validate.*", "set `validator` of the returned config", changes=False)
    ledger.lose("adapter.*", "torchtitan's LoRA converter adapts other matrices")
    ledger.lose("data.*", "set `dataloader` and `hf_assets_path` of the returned config", changes=False)
    arguments: dict[str, Any] = {
        "model_spec": Code("model_spec()"),
        "loss": PythonCall("CrossEntropyLoss.Config", {"global_vocab_size": spec.model.vocab}),
        "optimizer": _optimizer(spec, rate, ledger),
        "lr_scheduler": _scheduler(planned, rate, ledger),
        "training": _training(planned, ledger),
        "parallelism": _parallelism(planned, ledger),
        "activation_checkpoint": _recompute(spec, ledger),
        "debug": PythonCall("DebugConfig", {"seed": train.seed}),
    }
    if checkpoint := train.checkpoint:
        if checkpoint.keep < 2:
            ledger.lose("train.checkpoint.keep", "torchtitan keeps at least two", changes=False)
        ledger.say("train.checkpoint.every", "train.checkpoint.keep")
        ledger.lose("train.checkpoint.*", "torchtitan's checkpoints have no such option", changes=False)
        settings = {"enable": True, "interval": checkpoint.every, "keep_latest_k": max(2, checkpoint.keep)}
        arguments["checkpoint"] = PythonCall("CheckpointManager.Config", settings)
    if spec.model.mtp is not None and "mtp" not in _lost_mtp(spec, ledger):
        weight = spec.model.mtp.weight[0].value
        arguments["loss"] = PythonCall("MTPLoss.Config", {"mtp_scale": weight, "global_vocab_size": spec.model.vocab})
    return arguments


def _lost_mtp(spec: Spec, ledger: SpecLedger) -> tuple[str, ...]:
    """("mtp",) if multi-token prediction is lost, which torchtitan does not support with pipeline stages."""
    mtp = spec.model.mtp
    assert mtp is not None
    if spec.parallel.pipeline > 1:
        ledger.lose("model.mtp.*", "torchtitan does not support multi-token prediction in a pipeline: left out")
        return ("mtp",)
    if len(mtp.weight) > 1:
        ledger.lose("model.mtp.weight", f"constant in torchtitan: {mtp.weight[0].value:g}")
    ledger.say("model.mtp.*")
    return ()


def _optimizer(spec: Spec, exported_rate: ExportedRate, ledger: SpecLedger) -> PythonCall:
    """AdamW with two groups: norms and biases without weight decay, and all other parameters."""
    adam = optimizer_to_export(spec, ledger, SYSTEM)
    kwargs = {"lr": exported_rate.peak, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}

    def group(pattern: str, decay: float) -> PythonCall:
        settings = {"pattern": pattern, "optimizer_name": "AdamW", "optimizer_kwargs": kwargs | {"weight_decay": decay}}
        return PythonCall("ParamGroupConfig", settings)

    groups: dict[str, Any] = {"param_groups": [group(UNDECAYED, 0.0), group(".*", adam.weight_decay)]}
    if spec.precision.moments == "bf16":
        groups["implementation"] = "fused_opt_states_bf16"
    return PythonCall("OptimizersContainer.Config", groups)


def _scheduler(planned: PlannedSpec, exported_rate: ExportedRate, ledger: SpecLedger) -> PythonCall:
    """The learning rate. torchtitan decays as if there were one more step; `total_steps` compensates for it."""
    total, early = exported_rate.steps, int(exported_rate.decay > 0 and exported_rate.stable > 0)
    if exported_rate.decay and not exported_rate.stable:
        text = f"{exported_rate.shape} right after the warm-up"
        ledger.record("train.rate", text, "torchtitan's decay is one step late", changes=False)
    total -= early
    settings: dict[str, Any] = {"warmup_steps": exported_rate.warmup, "total_steps": total}
    settings |= {
        "decay_ratio": exported_rate.decay / total if exported_rate.decay else 0.0,
        "decay_type": exported_rate.shape,
    }
    return PythonCall(
        "LRSchedulersContainer.Config",
        settings | {"min_lr_factor": exported_rate.least / exported_rate.peak if exported_rate.peak else 0},
    )


def _training(planned: PlannedSpec, ledger: SpecLedger) -> PythonCall:
    """Sizes and dtypes."""
    spec, precision = planned.spec, planned.spec.precision
    rank_batch = spec.train.batch.end // spec.parallel.data
    local_batch = rank_batch if spec.parallel.pipeline > 1 else spec.train.micro_batch
    ledger.say("precision.compute", "precision.linear", "precision.accumulate")
    if precision.linear not in ("bf16", "fp32"):
        written = f"{precision.linear}, with its tiles and scales"
        ledger.record("precision.linear", written, "exported as bf16: torchtitan's converters have other tiles")
        ledger.lose("precision.attention_output", "torchtitan keeps it in bf16")
    ledger.say(
        "precision.activation_tile",
        "precision.weight_tile",
        "precision.scale",
        "precision.tensor_scale",
        "precision.gradient_rounding",
    )
    ledger.say("precision.hadamard", "precision.promote", "precision.attention_output")
    dtype = "float32" if precision.compute == "fp32" else "bfloat16"
    if precision.compute == "fp64":
        ledger.record("precision.compute", "fp64", "torchtitan computes in bfloat16 or float32: exported as bfloat16")
    for role, dtypes in (("gradients", ("fp32",)), ("master", ("fp32",)), ("moments", ("fp32", "bf16"))):
        if getattr(precision, role) in dtypes:
            ledger.say(f"precision.{role}")
    for role in ("parameter", "dispatch", "combine"):
        if getattr(precision, role) == precision.compute:
            ledger.say(f"precision.{role}")
    clip = spec.train.optimizer.clip
    settings = {
        "local_batch_size": local_batch,
        "global_batch_size": spec.train.batch.end,
        "seq_len": spec.train.sequence,
        "max_norm": 1e9 if clip is None else clip,
        "steps": planned.steps,
        "mixed_precision_param": dtype,
        "disable_cuda_graphs": True,
    }
    return PythonCall("TrainingConfig", settings)


def _parallelism(planned: PlannedSpec, ledger: SpecLedger) -> PythonCall:
    """Degrees, stages and schedule."""
    spec, parallel = planned.spec, planned.spec.parallel
    shards = parallel.zero > 0 or parallel.expert > 1
    ledger.say("parallel.pipeline", "parallel.data", "parallel.tensor", "parallel.context", "parallel.expert")
    ledger.say("parallel.layout", "schedule.*")
    if parallel.expert_tensor > 1:
        ledger.lose("parallel.expert_tensor", "torchtitan does not shard an expert's weights", changes=False)
    if shards and parallel.zero < 2:
        why = "torchtitan uses FSDP2, which shards gradients and, between uses, weights"
        ledger.record("parallel.zero", str(parallel.zero), why, changes=False)
    ledger.say("parallel.zero", "parallel.shard", "parallel.expert_tensor")
    overlaps = "true" if parallel.overlap_reduce else "false"
    ledger.record("parallel.overlap_reduce", overlaps, "torchtitan decides when to reduce gradients", changes=False)
    ledger.say("parallel.overlap_reduce")
    ledger.lose("parallel.route", "torchtitan sends each token to the rank of its expert", changes=False)
    ledger.lose("parallel.placement", "torchtitan places experts in order", changes=False)
    settings: dict[str, Any] = {
        "data_parallel_replicate_degree": parallel.copies if shards else parallel.data,
        "data_parallel_shard_degree": parallel.data // parallel.copies if shards else 1,
        "fsdp_reshard_after_forward": "always" if parallel.zero == 3 else "never",
        "tensor_parallel_degree": parallel.tensor,
        "context_parallel_degree": parallel.context,
        "expert_parallel_degree": parallel.expert,
        "pipeline_parallel_degree": parallel.pipeline,
    }
    if parallel.pipeline > 1:
        if planned.replaced:
            why = f"torch cannot hold a stage on two ranks: replaced by {planned.schedule.name}"
            ledger.record("schedule.name", planned.replaced, why)
        is_v = planned.schedule.stage_placement == V
        # torchtitan derives the stage placement from the name (V-shaped for DualPipeV), the order from the CSV
        name = "DualPipeV" if is_v else "1F1B" if len(planned.stages) == parallel.pipeline else "Interleaved1F1B"
        settings |= {
            "module_fqns_per_model_part": _modules(planned),
            "pipeline_parallel_schedule": name,
            "pipeline_parallel_schedule_csv": Code(f"str(Path(__file__).with_name({CSV!r}))"),
            "pipeline_parallel_microbatch_size": spec.train.micro_batch,
        }
    return PythonCall("ParallelismConfig", settings)


def _modules(planned: PlannedSpec) -> list[list[str]]:
    """The modules of each stage, by their names in torchtitan."""
    stages = [[f"layers.{index}" for index in range(begin, end)] for begin, end in planned.stages]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def _recompute(spec: Spec, ledger: SpecLedger) -> Any:
    """Activation checkpointing: whole layers, torchtitan's own selection, or none."""
    if not spec.recompute:
        ledger.say("recompute")
        return None
    if spec.recompute == ("layer",) and spec.recompute_layers is None:
        ledger.say("recompute")
        return PythonCall("FullAC.Config", {})
    ledger.lose("recompute", "torchtitan's SelectiveAC chooses the ops", changes=False)
    ledger.lose("recompute_layers", "torchtitan recomputes every layer alike", changes=False)
    return PythonCall("SelectiveAC.Config", {})


# ---------------------------------------------------------------- the module
def _module(planned: PlannedSpec, model: dict[str, Any], config: dict[str, Any], lost: list[str]) -> str:
    """The text of the module."""
    spec = planned.spec
    name = free_name(spec.name, TEMPLATE)
    moe = layers_of(spec, SYSTEM).moe
    assert moe is not None
    bias = moe.balance.bias_rate
    mtp = spec.model.mtp if "MTPLoss.Config" in render_python(config["loss"]) else None
    vocab, hidden = spec.model.vocab, spec.model.hidden
    embedding = {"num_embeddings": vocab, "embedding_dim": hidden, "param_init": Code("LINEAR")}
    norm = {"normalized_shape": hidden, "eps": spec.model.norm_eps, "param_init": Code("NORM")}
    head = {"in_features": hidden, "out_features": vocab, "param_init": Code("LINEAR")}
    model_config = {
        "vocab_size": vocab,
        "dim": hidden,
        "tok_embeddings": PythonCall("Embedding.Config", embedding),
        "norm": PythonCall("RMSNorm.Config", norm),
        "lm_head": PythonCall("Linear.Config", head),
        "layers": Code("layers"),
        "mtp_layers": Code(f"_build_mtp_layers(layers[-1], dim={hidden}, num_mtp_layers={mtp.depth if mtp else 0})"),
    }
    registered = {
        "name": "deepseek_v3",
        "flavor": spec.model.name,
        "model": PythonCall("DeepSeekV3Model.Config", model_config),
        "parallelize_fn": Code("parallelize_deepseekv3"),
        "pipelining_fn": Code("pipeline_llm"),
        "post_optimizer_build_fn": Code("register_moe_load_balancing_hook"),
        "state_dict_adapter": Code("DeepSeekV3StateDictAdapter"),
    }
    return TEMPLATE.format(
        version=VERSION,
        name=name,
        lost="".join(f"# {line}\n" for line in lost) or "# Nothing of the spec is lost.\n",
        std=render_python(spec.model.init_std),
        layers=render_python(PythonCall("build_mla_moe_layers", model), "    "),
        eps=render_python(spec.model.norm_eps),
        bias=render_python(bias[0].value if bias and bias[0].value else None),
        spec=render_python(PythonCall("ModelSpec", registered), "    "),
        config=render_python(PythonCall("Trainer.Config", config), "    "),
    )
