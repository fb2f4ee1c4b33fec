"""A recipe of Megatron-Bridge, or a command line of Megatron-LM → a spec and a ledger of every key.

The names are those of Megatron-LM's arguments; what Megatron-Bridge calls otherwise is in `RENAMED`. Defaults are those
of Megatron-LM (megatron/training/arguments.py, Megatron-Core 0.16).
"""

from __future__ import annotations

from typing import Any

from compiler.tools.exporters.megatron_bridge import RECOMPUTED
from compiler.tools.importers.json_text import Json
from compiler.tools.importers.literal_python import Name
from compiler.tools.importers.megatron_model import model_lines
from compiler.tools.importers.plan_ledger import Keys, shown
from compiler.tools.importers.plan_text import Degrees, Imported, Members, adam, rate_lines, spec_of, string
from dsl.messages.diagnostics import Diagnostic

RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "sequence_length": "seq_length",
    "random_seed": "seed",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
CONFIG = "ConfigContainer"  # what a recipe returns
PARTS = {  # of a recipe, and their classes
    "train": "TrainingConfig", "optimizer": "OptimizerConfig", "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig", "dataset": "GPTDatasetConfig", "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig", "checkpoint": "CheckpointConfig", "rng": "RNGConfig",
    "dist": "DistributedInitConfig", "comm_overlap": "CommOverlapConfig", "model": "MLAModelProvider", "return": CONFIG,
}  # fmt: skip
IDLE_PARTS = ("logger", "tokenizer", "checkpoint", "rng", "dist", "comm_overlap", "dataset")
USUAL = {"return": "_pretrain_common", "model": "GPTModelProvider"}  # of a part too
# Precisions of Megatron-Bridge by their names (megatron/bridge/training/mixed_precision.py), behind bf16_ or fp16_.
PRECISIONS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "with_fp8_delayed_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "with_fp8_current_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "with_fp8_subchannel_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "with_mxfp8_mixed": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
OF_MODULES = {theirs: ours for ours, theirs in RECOMPUTED.items()}
# Keys that change nothing of what is computed, by how they begin: logs, files, checks and how fast it is.
IDLE = (
    *("log_", "tensorboard_", "wandb_", "timing_", "logging_", "distributed_", "manual_gc", "exit_", "dist_ckpt_"),
    *("num_workers", "data_cache_path", "mmap_", "no_mmap", "use_mcore", "use_flash_attn", "transformer_impl"),
    *("cross_entropy_", "no_check_for_nan", "check_for_nan", "create_attention_mask", "no_create_attention"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "transformer_layer_spec", "pipeline_dtype"),
    *("params_dtype", "autocast_", "nproc", "nnodes", "node_rank", "master_", "rdzv_", "save", "load", "no_load"),
    *("no_save", "auto_detect", "ckpt_", "async_save", "max_position_embeddings", "enable_experimental", "split"),
    *("no_rope_fusion", "apply_rope_fusion", "attention_backend", "overlap_param_gather", "profile", "gradient_acc"),
    "use_transformer_engine",
)


def from_recipe(found: Members) -> Members:
    """The keys of a recipe by Megatron-LM's names: `model.num_moe_experts` is `num_experts`.

    A precision that has a name is the keys that it stands for, `config.train` the class of a part.
    """
    members: dict[str, list[Json]] = {}
    for path, values in found.items():
        name = path.rpartition(".")[2]
        name = f"config.{path}" if path in PARTS else RENAMED.get(name, name)
        members.setdefault(name, []).extend(values)
    for each in found.get("mixed_precision", ()):
        for key, value in (_named(each.value) or {}).items():
            if f"mixed_precision.{key}" not in found:
                members.setdefault(key, []).append(Json(value, each.span, each.key))
    for each in found.get("model", ()):
        members.setdefault("multi_latent_attention", [Json("MLA" in shown(each.value), each.span, each.key)])
    return members


def _named(precision: Any) -> dict[str, Any] | None:
    """The keys of a precision that is named, by a text or by a function; None if it is not known."""
    name = precision.text.removesuffix("()") if isinstance(precision, Name) else precision
    base, _, rest = name.replace("-", "_").partition("_") if isinstance(name, str) else ("", "", "")
    if base not in ("bf16", "fp16") or rest not in PRECISIONS:
        return None
    return {base: True, "grad_reduce_in_fp32": base == "bf16"} | PRECISIONS[rest]


def imported(members: Members, name: str, devices: int | None, vocab: int | None) -> Imported:
    """A spec of a run `name`. `devices`, `vocab`: where the configuration leaves them to the launcher and tokenizer."""
    keys = Keys(members)
    model = model_lines(keys, name, vocab)
    parallel, world = _parallel(keys, devices)
    schedule = _schedule(keys)
    again, precision, train = _recompute(keys), _precision(keys), _train(keys)
    for each in list(members):
        if each.startswith(IDLE):
            keys.lose(each, "logs, files, or how it is computed", kind="no effect")
        elif each.startswith(("if ", "for ")):
            keys.lose(each, "its statements are taken for executed, once", kind="assumed")
    for part, named in PARTS.items():
        harmless = tuple(Name(f"{each}()") for each in (named, USUAL.get(part, named)))
        why = f"a {named} is read: defaults of what stands there are not known"
        keys.lose(f"config.{part}", why, harmless, "assumed" if part in IDLE_PARTS else "not expressible")
    keys.lose("tokenizer_type", "name the tokenizer in `data`", kind="assumed")
    keys.lose("tokenizer_model", "name the tokenizer in `data`", kind="assumed")
    keys.lose("data_path", "name the text in `data`", kind="assumed")
    keys.lose("mock_data", "name the text in `data`", kind="assumed")
    run = [*parallel, *schedule, *again, *train]
    return spec_of("Megatron", name, keys, world, run, model, precision)


def _parallel(keys: Keys, devices: int | None) -> tuple[list[str], int]:
    """The block of degrees, and how many devices there are."""
    pp = keys.take("pipeline_model_parallel_size", "parallel.pipeline", 1)
    tp = keys.take("tensor_model_parallel_size", "parallel.tensor", 1)
    cp = keys.take("context_parallel_size", "parallel.context", 1)
    ep = keys.take("expert_model_parallel_size", "parallel.expert", 1)
    etp = keys.take("expert_tensor_parallel_size", "parallel.expert_tensor", tp)
    zero = keys.take("use_distributed_optimizer", "parallel.zero", False)
    overlap = keys.take("overlap_grad_reduce", "parallel.overlap_reduce", False)
    keys.lose(
        "sequence_parallel", "tensor ranks always split rows here", (True,) if tp > 1 else (True, False), "approximated"
    )
    keys.lose("moe_token_dispatcher_type", "the plan routes rows itself", ("alltoall", "flex"), "approximated")
    keys.lose("moe_enable_deepep", "see `parallel.route`", kind="no effect")
    keys.lose("moe_flex_dispatcher_backend", "see `parallel.route`", kind="no effect")
    degrees = Degrees(pp, tp, cp, ep, etp)
    devices = degrees.devices(keys, devices)
    layout = keys.take("pipeline_model_parallel_layout", "parallel.layout", None, (str, list)) if pp > 1 else None
    if isinstance(layout, list):
        letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
        stages = [stage if isinstance(stage, list) else [] for stage in layout]
        layout = "|".join("".join(letters.get(str(item), "?") for item in stage) for stage in stages)
    keys.lose("pipeline_model_parallel_layout", "there is one stage")
    more = (f", layout = {string(layout)}" if layout is not None else "") + ", overlap_reduce = false" * (not overlap)
    return [degrees.block(int(zero), more)], devices


def _schedule(keys: Keys) -> list[str]:
    chunks = keys.take("num_virtual_stages_per_pipeline_rank", "schedule.chunks", 1)
    return [f"schedule {{ name = interleaved, chunks = {chunks} }}" if chunks > 1 else "schedule { name = 1f1b }"]


def _recompute(keys: Keys) -> list[str]:
    how = keys.take("recompute_granularity", "recompute", "")
    method = keys.take("recompute_method", "recompute_layers" if how == "full" else "", "")
    count = keys.take("recompute_num_layers", "recompute_layers" if how == "full" else "", 1)
    modules = keys.take("recompute_modules", "recompute" if how == "selective" else "", [], (str, list))
    if how == "full":
        if method == "uniform" and count > 1:
            keys.note("approximated", "recompute_num_layers", count, "each layer is computed again by itself here")
        return ["recompute = [layer]", *([f"recompute_layers = {count}"] if method == "block" else [])]
    if how != "selective":
        return []
    names = modules.split() if isinstance(modules, str) else modules or ["core_attn"]
    for each in (each for each in names if each not in OF_MODULES):
        keys.note("approximated", "recompute_modules", each, "a spec has no name for it, so it is kept in memory")
    found = [OF_MODULES[each] for each in names if each in OF_MODULES]
    return [f"recompute = [{', '.join(found)}]"] if found else []


def _precision(keys: Keys) -> tuple[str, list[str]]:
    """A precision that is built in, or else the lines of a block."""
    named = keys.take("mixed_precision", "precision", None, object) if keys.has("mixed_precision") else None
    if named not in (None, Name("MixedPrecisionConfig()")) and _named(named) is None:
        keys.note("not expressible", "mixed_precision", named, "no precision of Megatron-Bridge: BF16 or FP32 is said")
    bf16 = keys.take("bf16", "precision.compute", False)
    keys.lose("fp32", "`bf16` is set too", (not bf16,))
    keys.lose("fp16", "there is no FP16: BF16 or FP32 is", (False,))
    wide = keys.take("grad_reduce_in_fp32", "precision.gradients", True)
    wide = keys.take("accumulate_allreduce_grads_in_fp32", "", wide)
    eight = keys.take("fp8", "precision.linear", keys.take("fp8_format", "precision.linear", ""))
    recipe = keys.take("fp8_recipe", "precision.linear" if eight else "", "delayed")
    keys.lose("use_precision_aware_optimizer", "see the dtypes of moments", kind="no effect")
    keys.lose("main_params_dtype", "master weights are FP32 here", (Name("torch.float32"), "fp32"))
    keys.lose(
        "main_grads_dtype", "gradients are summed in another dtype", (Name("torch.float32"), "fp32"), "approximated"
    )
    narrow = [keys.take(key, "precision.moments", "fp32", object) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    lines = [] if wide or not bf16 else ["gradients = bf16"]
    if all(getattr(each, "text", each) in ("torch.bfloat16", "bf16") for each in narrow):
        lines.append("moments = bf16")
    if eight and (eight, recipe) in (("e4m3", "blockwise"),):
        lines += ["linear = e4m3, activation_tile = 1x128, weight_tile = 128x128"]
    elif eight:
        keys.note("not expressible", "fp8", f"{eight}, {recipe}", "of FP8 a spec has blocks and MX: it says BF16")
    return "bf16" if bf16 else "fp32", lines if bf16 else []


def _train(keys: Keys) -> list[str]:
    sequence = keys.take("seq_length", "train.sequence", 0)
    micro, batch = (
        keys.take("micro_batch_size", "train.micro_batch", 1),
        keys.take("global_batch_size", "train.batch", 0),
    )
    if not sequence or not batch:
        missing = "seq_length" if not sequence else "global_batch_size"
        keys.mistakes.append(Diagnostic("I0202", f"`{missing}` is missing", None, f"add it, such as {missing} 4096"))
    keys.lose("rampup_batch_size", "write `batch { … }` in `train`")

    def steps_of(what: str, path: str, default: int | None) -> int | None:
        samples = keys.take(f"{what}_samples", path, 0) if keys.has(f"{what}_samples") else 0
        if keys.has(f"{what}_iters") or not samples:
            return keys.take(f"{what}_iters", path, default, int)
        if batch and samples % batch:
            keys.note("approximated", f"{what}_samples", samples, "steps are whole here")
        return round(samples / max(1, batch))

    steps = steps_of("train", "train.tokens", None)
    if steps is None:
        keys.mistakes.append(Diagnostic("I0202", "`train_iters` is missing", None, "add it, such as train_iters 10000"))
        steps = 1
    warmup = steps_of("lr_warmup", "train.rate", 0) or 0
    decay = steps_of("lr_decay", "train.rate", None) or steps
    peak, least = keys.take("lr", "train.rate", 0.0), keys.take("min_lr", "train.rate", 0.0)
    style = keys.take("lr_decay_style", "train.rate", "linear")
    keys.lose("lr_warmup_init", "a warm-up begins at 0 here", (0, 0.0), "approximated")
    falls = keys.take("lr_wsd_decay_iters", "train.rate", 0, int) if style == "WSD" else decay - warmup
    shape = keys.take("lr_wsd_decay_style", "train.rate", "exponential") if style == "WSD" else style
    if shape not in ("constant", "linear", "cosine"):
        keys.note("approximated", "lr_decay_style", shape, "cosine stands for it")
        shape = "cosine"
    begin = min(steps, max(warmup, decay - falls))
    if shape != "constant" and decay > steps:
        keys.note("approximated", "lr_decay_iters", decay, "the decay ends with the run here")
    decay_of = keys.take("weight_decay", "train.optimizer.weight_decay", 0.01)
    for key in ("start_weight_decay", "end_weight_decay"):
        keys.lose(key, "weight decay does not change in a run here", (decay_of, float(decay_of)))
    clip = keys.take("clip_grad", "train.optimizer.clip", 1.0)
    keys.lose("optimizer", "AdamW stands for it", ("adam",), "approximated")
    defaults = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    of_adam = {key: keys.take(f"adam_{key}", f"train.optimizer.{key}", value) for key, value in defaults.items()}
    of_adam |= {"weight_decay": decay_of}
    lines = [
        "train {",
        f"sequence = {sequence}, micro_batch = {micro}, batch = {batch}, steps = {steps}",
        f"seed = {keys.take('seed', 'train.seed', 1234, least=0)}",
        adam(of_adam, clip),
        *rate_lines(warmup, shape, peak, least, (begin, min(decay, steps), steps)),
    ]
    every = keys.take("save_interval", "train.checkpoint.every" if keys.has("save_interval") else "", 0, int)
    keep = keys.take("most_recent_k", "train.checkpoint.keep" if keys.has("most_recent_k") else "", -1, int, -1)
    if every:
        lines.append(f"checkpoint {{ every = {every} steps{f', keep = {keep}' if keep > 0 else ''} }}")
    often = keys.take("eval_interval", "train.validate.every" if keys.has("eval_interval") else "", 0, int)
    many = keys.take("eval_iters", "train.validate.batches" if keys.has("eval_iters") else "", 100, int, 0)
    if often and many:
        lines.append(f"validate {{ every = {often} steps, batches = {many} }}")
    return [*lines, "}"]
