"""What other training systems call the keys and words of the language, for hints and `dsc explain`.

No spec may use these names: one thing has one name. A word is looked up as it is written, without regard to case.
"""

from __future__ import annotations

from dataclasses import dataclass

# A key of others → the path of the key that takes the same value here, without kinds of blocks.
KEYS: dict[str, tuple[str, ...]] = {
    # degrees of parallelism
    "pp": ("parallel.pipeline",),
    "pp_size": ("parallel.pipeline",),
    "pipeline_parallel": ("parallel.pipeline",),
    "pipeline_parallel_size": ("parallel.pipeline",),
    "pipeline_parallel_degree": ("parallel.pipeline",),
    "pipeline_model_parallel_size": ("parallel.pipeline",),
    "dp": ("parallel.data",),
    "dp_size": ("parallel.data",),
    "data_parallel": ("parallel.data",),
    "data_parallel_size": ("parallel.data",),
    "tp": ("parallel.tensor",),
    "tp_size": ("parallel.tensor",),
    "tensor_parallel": ("parallel.tensor",),
    "tensor_parallel_size": ("parallel.tensor",),
    "tensor_parallel_degree": ("parallel.tensor",),
    "tensor_model_parallel_size": ("parallel.tensor",),
    "ep": ("parallel.expert",),
    "ep_size": ("parallel.expert",),
    "expert_parallel": ("parallel.expert",),
    "expert_parallel_size": ("parallel.expert",),
    "expert_parallel_degree": ("parallel.expert",),
    "expert_model_parallel_size": ("parallel.expert",),
    "cp": ("parallel.context",),
    "cp_size": ("parallel.context",),
    "context_parallel": ("parallel.context",),
    "context_parallel_size": ("parallel.context",),
    "context_parallel_degree": ("parallel.context",),
    "zero_stage": ("parallel.zero",),
    "zero_level": ("parallel.zero",),
    "virtual_pipeline": ("schedule.chunks",),
    "num_model_chunks": ("schedule.chunks",),
    # the run
    "global_batch": ("train.batch",),
    "global_batch_size": ("train.batch",),
    "batch_size": ("train.batch",),
    "train_batch_size": ("train.batch",),
    "gbs": ("train.batch",),
    "micro_batch_size": ("train.micro_batch",),
    "microbatch": ("train.micro_batch",),
    "microbatch_size": ("train.micro_batch",),
    "per_device_train_batch_size": ("train.micro_batch",),
    "train_micro_batch_size_per_gpu": ("train.micro_batch",),
    "local_batch_size": ("train.micro_batch",),
    "mbs": ("train.micro_batch",),
    "seq": ("train.sequence",),
    "seq_len": ("train.sequence",),
    "seqlen": ("train.sequence",),
    "seq_length": ("train.sequence",),
    "sequence_length": ("train.sequence",),
    "max_seq_len": ("train.sequence",),
    "max_seq_length": ("train.sequence",),
    "context_length": ("train.sequence",),
    "block_size": ("train.sequence",),
    "iters": ("train.steps",),
    "max_iters": ("train.steps",),
    "train_iters": ("train.steps",),
    "iterations": ("train.steps",),
    "max_steps": ("train.steps",),
    "num_steps": ("train.steps",),
    "train_steps": ("train.steps",),
    "total_steps": ("train.steps",),
    "max_tokens": ("train.tokens",),
    "num_tokens": ("train.tokens",),
    "train_tokens": ("train.tokens",),
    "total_tokens": ("train.tokens",),
    "random_seed": ("train.seed",),
    "wd": ("train.optimizer.weight_decay",),
    "adam_beta1": ("train.optimizer.beta1",),
    "adam_beta2": ("train.optimizer.beta2",),
    "adam_eps": ("train.optimizer.eps",),
    "epsilon": ("train.optimizer.eps", "model.norm_eps"),
    "clip_grad": ("train.optimizer.clip",),
    "grad_clip": ("train.optimizer.clip",),
    "max_grad_norm": ("train.optimizer.clip",),
    "max_norm": ("train.optimizer.clip",),
    "gradient_clipping": ("train.optimizer.clip",),
    "save_interval": ("train.checkpoint.every",),
    "save_steps": ("train.checkpoint.every",),
    "save_every": ("train.checkpoint.every",),
    "interval": ("train.checkpoint.every", "train.validate.every"),
    "save_total_limit": ("train.checkpoint.keep",),
    "eval_interval": ("train.validate.every",),
    "eval_steps": ("train.validate.every",),
    "eval_iters": ("train.validate.batches",),
    "path": ("data.source",),
    "data_path": ("data.source",),
    "dataset": ("data.source",),
    "files": ("data.source",),
    "tokenizer_path": ("data.tokenizer",),
    "tokenizer_model": ("data.tokenizer",),
    "val_split": ("data.validation",),
    "validation_split": ("data.validation",),
    "dtype": ("precision",),
    "recompute_modules": ("recompute",),
    "activation_checkpointing": ("recompute",),
    "num_sms": ("sm.communication", "cluster.node.device.sms"),
    # the cluster
    "num_nodes": ("cluster.nodes",),
    "nnodes": ("cluster.nodes",),
    "n_nodes": ("cluster.nodes",),
    "gpus": ("cluster.node.devices",),
    "num_gpus": ("cluster.node.devices",),
    "n_gpus": ("cluster.node.devices",),
    "gpus_per_node": ("cluster.node.devices",),
    "num_devices": ("cluster.node.devices",),
    "devices_per_node": ("cluster.node.devices",),
    "nproc_per_node": ("cluster.node.devices",),
    "network": ("cluster.node.nic",),
    "net": ("cluster.node.nic",),
    "infiniband": ("cluster.node.nic",),
    "ib": ("cluster.node.nic",),
    "gpu": ("cluster.node.device",),
    "flops": ("cluster.node.device.bf16",),
    "tflops": ("cluster.node.device.bf16",),
    "peak_flops": ("cluster.node.device.bf16",),
    "bf16_flops": ("cluster.node.device.bf16",),
    "fp8_flops": ("cluster.node.device.fp8",),
    "mem": ("cluster.node.device.memory",),
    "vram": ("cluster.node.device.memory",),
    "bandwidth": ("cluster.node.device.hbm",),
    "memory_bandwidth": ("cluster.node.device.hbm",),
    "hbm_bandwidth": ("cluster.node.device.hbm",),
    "num_cores": ("cluster.node.device.cores",),
    "cpus": ("cluster.node.device.cores",),
    # the model
    "vocab_size": ("model.vocab",),
    "n_vocab": ("model.vocab",),
    "hidden_size": ("model.hidden",),
    "hidden_dim": ("model.hidden",),
    "d_model": ("model.hidden",),
    "n_embd": ("model.hidden",),
    "dim": ("model.hidden",),
    "initializer_range": ("model.init_std",),
    "init_method_std": ("model.init_std",),
    "rms_norm_eps": ("model.norm_eps",),
    "layernorm_epsilon": ("model.norm_eps",),
    "norm_epsilon": ("model.norm_eps",),
    "num_heads": ("model.attention.heads",),
    "n_heads": ("model.attention.heads",),
    "n_head": ("model.attention.heads",),
    "num_attention_heads": ("model.attention.heads",),
    "num_key_value_heads": ("model.attention.kv_heads",),
    "num_kv_heads": ("model.attention.kv_heads",),
    "n_kv_heads": ("model.attention.kv_heads",),
    "num_query_groups": ("model.attention.kv_heads",),
    "head_size": ("model.attention.head_dim",),
    "kv_channels": ("model.attention.head_dim",),
    "qk_layernorm": ("model.attention.qk_norm",),
    "use_qk_norm": ("model.attention.qk_norm",),
    "q_lora_rank": ("model.attention.query_rank",),
    "kv_lora_rank": ("model.attention.kv_rank",),
    "qk_nope_head_dim": ("model.attention.head_dim.nope",),
    "qk_rope_head_dim": ("model.attention.head_dim.rope",),
    "v_head_dim": ("model.attention.head_dim.value",),
    "rope_theta": ("model.attention.rope.theta",),
    "rotary_base": ("model.attention.rope.theta",),
    "base": ("model.attention.rope.theta",),
    "intermediate_size": ("model.layers.ffn.inner",),
    "ffn_hidden_size": ("model.layers.ffn.inner",),
    "ffn_dim": ("model.layers.ffn.inner",),
    "d_ff": ("model.layers.ffn.inner",),
    "moe_intermediate_size": ("model.layers.ffn.inner",),
    "moe_ffn_hidden_size": ("model.layers.ffn.inner",),
    "num_experts": ("model.layers.ffn.experts",),
    "n_experts": ("model.layers.ffn.experts",),
    "num_local_experts": ("model.layers.ffn.experts",),
    "num_moe_experts": ("model.layers.ffn.experts",),
    "n_routed_experts": ("model.layers.ffn.experts",),
    "routed_experts": ("model.layers.ffn.experts",),
    "n_shared_experts": ("model.layers.ffn.shared",),
    "num_shared_experts": ("model.layers.ffn.shared",),
    "shared_experts": ("model.layers.ffn.shared",),
    "topk": ("model.layers.ffn.top_k",),
    "num_experts_per_tok": ("model.layers.ffn.top_k",),
    "moe_router_topk": ("model.layers.ffn.top_k",),
    "n_activated_experts": ("model.layers.ffn.top_k",),
    "n_group": ("model.layers.ffn.groups",),
    "num_groups": ("model.layers.ffn.groups",),
    "n_expert_groups": ("model.layers.ffn.groups",),
    "topk_group": ("model.layers.ffn.top_groups",),
    "n_limited_groups": ("model.layers.ffn.top_groups",),
    "scoring_func": ("model.layers.ffn.score",),
    "score_func": ("model.layers.ffn.score",),
    "norm_topk_prob": ("model.layers.ffn.normalize",),
    "routed_scaling_factor": ("model.layers.ffn.scale",),
    "route_scale": ("model.layers.ffn.scale",),
    "aux_loss_alpha": ("model.layers.ffn.balance.sequence_loss",),
    "moe_aux_loss_coeff": ("model.layers.ffn.balance.sequence_loss",),
    "bias_update_speed": ("model.layers.ffn.balance.bias_rate",),
    "moe_router_bias_update_rate": ("model.layers.ffn.balance.bias_rate",),
    "num_nextn_predict_layers": ("model.mtp.depth",),
    "mtp_num_layers": ("model.mtp.depth",),
    "mtp_loss_scaling_factor": ("model.mtp.weight",),
}


@dataclass(frozen=True)
class Other:
    """What says the same in another form, at a path. `{}` is the value that was given."""

    path: str
    hint: str
    topic: str = ""  # what `dsc explain` tells about it, where that is not the path


RATE = "write `rate { constant at {} }`, or phases: `warmup 100 steps to {}`, `cosine to 0`"
RANGES = "write a block for each range of layers, counted from 0, as in `layers 0..3 { ffn dense { inner = 512 } }`"
# A key of others whose value is written in another way here.
OTHERS: dict[str, Other] = {
    "lr": Other("train.rate", RATE),
    "learning_rate": Other("train.rate", RATE),
    "max_lr": Other("train.rate", RATE),
    "min_lr": Other("train.rate", "write it as the goal of a phase of `rate`: `cosine to {}`"),
    "warmup_steps": Other("train.rate", "write it as a phase of `rate`: `warmup {} steps to 1e-4`"),
    "warmup": Other("train.rate", "write it as a phase of `rate`: `warmup {} steps to 1e-4`"),
    "lr_warmup_iters": Other("train.rate", "write it as a phase of `rate`: `warmup {} steps to 1e-4`"),
    "lr_scheduler": Other("train.rate", "write the phases of `rate`: `warmup 100 steps to 1e-4`, `cosine to 0`"),
    "lr_decay_style": Other("train.rate", "write the phases of `rate`: `warmup 100 steps to 1e-4`, `cosine to 0`"),
    "epochs": Other("train.tokens", "a run ends after a number of `tokens` or `steps`, not of epochs"),
    "num_epochs": Other("train.tokens", "a run ends after a number of `tokens` or `steps`, not of epochs"),
    "num_train_epochs": Other("train.tokens", "a run ends after a number of `tokens` or `steps`, not of epochs"),
    "grad_accum": Other("train.batch", "it follows from the others: batch / (data · micro_batch)"),
    "gradient_accumulation_steps": Other("train.batch", "it follows from the others: batch / (data · micro_batch)"),
    "betas": Other("train.optimizer.beta1", "write `beta1 = 0.9, beta2 = 0.95`"),
    "momentum": Other("train.optimizer.beta1", "AdamW has two: write `beta1 = 0.9, beta2 = 0.95`"),
    "world_size": Other("cluster.nodes", "it follows from the others: nodes · devices of a node"),
    "num_layers": Other("model.layers", RANGES),
    "n_layers": Other("model.layers", RANGES),
    "n_layer": Other("model.layers", RANGES),
    "num_hidden_layers": Other("model.layers", RANGES),
    "first_k_dense_replace": Other("model.layers", RANGES),
    "moe": Other("model.layers.ffn", "write `ffn moe { … }` in a range of layers", "model.layers.ffn.moe"),
    "mlp": Other("model.layers.ffn", "write `ffn dense { … }` in a range of layers", "model.layers.ffn.dense"),
}

# A word of others for what a block or a value is → where it stands, and what to write. None of them is a misspelling.
WORDS: dict[str, Other] = {
    "mha": Other("model.attention", "write `attention gqa { … }` with `kv_heads = heads`", "model.attention.gqa"),
    "mqa": Other("model.attention", "write `attention gqa { … }` with `kv_heads = 1`", "model.attention.gqa"),
    "adam": Other(
        "train.optimizer",
        "write `optimizer adamw { … }`, which decays weights apart from the gradient",
        "train.optimizer.adamw",
    ),
    "sgd": Other("train.optimizer", "write `optimizer adamw { … }`, which is the only one", "train.optimizer.adamw"),
    "muon": Other("train.optimizer", "write `optimizer adamw { … }`, which is the only one", "train.optimizer.adamw"),
    "mlp": Other("model.layers.ffn", "write `ffn dense { … }`", "model.layers.ffn.dense"),
    "swiglu": Other("model.layers.ffn", "write `ffn dense { … }`, which is a SwiGLU", "model.layers.ffn.dense"),
    "fp16": Other("precision", "write `bf16`: fp16 needs a scale of the loss, which nothing here has", "bf16"),
    "float16": Other("precision", "write `bf16`: fp16 needs a scale of the loss, which nothing here has", "bf16"),
    "half": Other("precision", "write `bf16`: fp16 needs a scale of the loss, which nothing here has", "bf16"),
}

# A word that is the same as one of ours.
SAME: dict[str, str] = {
    "float32": "fp32", "float": "fp32", "float64": "fp64", "double": "fp64", "bfloat16": "bf16", "fp8": "e4m3",
    "float8_e4m3fn": "e4m3", "yes": "true", "on": "true", "no": "false", "off": "false", "one_f_one_b": "1f1b",
    "zb_v": "zbv", "zb_h1": "zb1p", "afab": "gpipe", "warm_up": "warmup", "hold": "constant",
    "stable": "constant",
}  # fmt: skip


def places(word: str) -> tuple[str, ...]:
    """The paths of the keys here that a key of others stands for."""
    name = word.lower()
    return KEYS.get(name) or ((OTHERS[name].path,) if name in OTHERS else ())


def topics(word: str) -> tuple[str, ...]:
    """What to explain for a key or word of others."""
    found = (table.get(word.lower()) for table in (OTHERS, WORDS))
    others = dict.fromkeys(each.topic or each.path for each in found if each is not None)
    return KEYS.get(word.lower()) or tuple(others)


def hint_of(word: str) -> str:
    """What to write for a key or word of others that is said in another way here; "" for the rest."""
    found = OTHERS.get(word.lower()) or WORDS.get(word.lower())
    return found.hint.replace("{}", "…") if found is not None else ""


def key_in(word: str, block: str) -> str:
    """The key of the block at a path that takes what a key of others does; "" if there is none."""
    paths = (path.rpartition(".") for path in KEYS.get(word.lower(), ()))
    return next((key for parent, _, key in paths if parent == block), "")


def said_in(word: str, block: str, value: str) -> str:
    """What to write in the block at a path for a key of others, with the value it was given; "" if that is unknown."""
    other = OTHERS.get(word.lower())
    is_here = other is not None and block == other.path.rpartition(".")[0]
    return other.hint.replace("{}", value) if other is not None and is_here else ""


def word_at(word: str, path: str) -> str:
    """What to write for a word of others that stands at a path; "" if that is unknown."""
    other = WORDS.get(word.lower())
    return other.hint if other is not None and other.path == path else ""
