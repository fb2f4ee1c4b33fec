"""The recipe of a configuration of torchtitan, as lines of a spec: sizes of a step, optimizer, rate, and what is kept.

Defaults and rates are those of 0.3.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from compiler.tools.exporters.torchtitan import UNDECAYED
from compiler.tools.importers.literal_python import Name
from compiler.tools.importers.plan_ledger import Keys, shown
from compiler.tools.importers.plan_text import Precision, adam, rate_lines
from compiler.tools.importers.torchtitan_model import JOB
from compiler.tools.importers.write import number
from dsl.messages.diagnostics import Diagnostic

UNCLIPPED = 1e9  # a norm that no gradient has


def is_open(keys: Keys, key: str) -> bool:
    """Whether a key is left open, by -1 or by not being there."""
    is_left = key not in keys.members or keys.members[key][0].value in (-1, None)
    if is_left:
        keys.lose(key, "open: it follows from the number of devices", kind="assumed")
    return is_left


def sizes(keys: Keys, pp: int, data: int) -> tuple[list[str], int]:
    """Sequence, batches and steps, and the seed; the number of steps."""
    sequence = keys.take("training.seq_len", "train.sequence", 2048)
    local = keys.take("training.local_batch_size", "train.micro_batch" if pp == 1 else "train.batch", 8)
    micro = local
    if pp > 1:
        micro = keys.take("parallelism.pipeline_parallel_microbatch_size", "train.micro_batch", 1)
    if is_open(keys, "training.global_batch_size"):
        batch = local * data
    else:
        batch = keys.take("training.global_batch_size", "train.batch", 8)
    if pp > 1 and batch != local * data:
        why = "the pipeline is run several times a step there; once here, with more micro-batches"
        keys.note("no effect", "training.local_batch_size", local, why)
    steps = keys.take("training.steps", "train.tokens", 10000)
    lines = [f"sequence = {sequence}, micro_batch = {micro}, batch = {batch}, steps = {steps}"]
    if keys.has("debug.seed") or not keys.has("training.seed"):
        seed = keys.take("debug.seed", "train.seed", None, int)
    else:
        seed = keys.take("training.seed", "train.seed", None, int)
    return [*lines, *([f"seed = {seed}"] if seed is not None else [])], steps


def optimizer(keys: Keys, steps: int) -> list[str]:
    """The optimizer, and its rate in a run of so many steps."""
    of = "optimizer"
    groups = sorted({key.split(".")[2] for key in keys.members if key.startswith("optimizer.param_groups.")}, key=str)
    if groups:
        keys.lose(of, "an OptimizersContainer.Config is read", (Name("OptimizersContainer.Config()"),))
        of = f"optimizer.param_groups.{groups[-1]}.optimizer_kwargs"
        settings = _settings(keys, of)
        _groups(keys, groups, settings)
    else:
        keys.lose(of, "another optimizer", (Name("default_adamw()"),))
        keys.lose("optimizer.name", "AdamW stands for it", ("AdamW",), "approximated")
        settings = _settings(keys, of)
        why = "weights of norms decay there too, which they do not here"
        if settings["weight_decay"]:
            keys.note("approximated", "optimizer.weight_decay", number(settings["weight_decay"]), why)
    keys.lose("optimizer.early_step_in_backward", "gradients are clipped before the update", (False,))
    peak = settings.pop("lr")
    clip = keys.take("training.max_norm", "train.optimizer.clip", 1.0)
    return [adam(settings, clip if clip < UNCLIPPED else None), *rate(keys, peak, steps)]


def _settings(keys: Keys, of: str) -> dict[str, float]:
    """lr, beta1, beta2, eps and weight_decay, of keys below `of`."""
    lr = keys.take(f"{of}.lr", "train.rate", 8e-4)
    if f"{of}.betas" in keys.members:
        betas = keys.take(f"{of}.betas", "train.optimizer.beta1, beta2", [0.9, 0.95], list)
        if len(betas) != 2 or any(type(each) not in (int, float) for each in betas):
            keys.mistakes.append(Diagnostic("I0203", f"`betas` are two numbers, {shown(betas)} are not", None))
            betas = [0.9, 0.95]
    else:
        betas = [keys.take(f"{of}.beta{n}", path, value) for n, path, value in _BETAS]
    eps = keys.take(f"{of}.eps", "train.optimizer.eps", 1e-8)
    decay = keys.take(f"{of}.weight_decay", "train.optimizer.weight_decay", 0.1)
    return {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": decay}


_BETAS = ((1, "train.optimizer.beta1", 0.9), (2, "train.optimizer.beta2", 0.95))


def _groups(keys: Keys, groups: list[str], settings: Mapping[str, float]) -> None:
    """What groups of parameters say besides the settings of the last, which is of all that no other is of."""
    for number_of, group in enumerate(groups):
        at, is_last = f"optimizer.param_groups.{group}", number_of == len(groups) - 1
        pattern = ".*" if is_last else UNDECAYED
        keys.lose(at, "a ParamGroupConfig is read", (Name("ParamGroupConfig()"),))
        keys.lose(f"{at}.pattern", "norms and biases do not decay here, all else does", (pattern,), "approximated")
        keys.lose(f"{at}.optimizer_name", "AdamW stands for it", ("AdamW",), "approximated")
        kwargs = f"{at}.optimizer_kwargs"
        usual = {"lr": settings["lr"], "betas": [settings["beta1"], settings["beta2"]], "eps": settings["eps"]}
        for key, value in (usual | {"weight_decay": 0.0}).items():
            keys.lose(f"{kwargs}.{key}", "all groups are alike here but for the decay", (value,), "approximated")
    if len(groups) == 1 and settings["weight_decay"]:
        why = "weights of norms decay there too, which they do not here"
        keys.note("approximated", "optimizer.weight_decay", number(settings["weight_decay"]), why)


def rate(keys: Keys, peak: float, steps: int) -> list[str]:
    """The block `rate`. A decay of torchtitan ends a step behind the run, and so it is written."""
    of, path = "lr_scheduler", "train.rate"
    total = keys.take(f"{of}.total_steps", path, steps, int)
    warmup = min(total, keys.take(f"{of}.warmup_steps", path, 200, least=0))
    ratio = keys.take(f"{of}.decay_ratio", path, None, (int, float))
    shape = keys.take(f"{of}.decay_type", path, "linear")
    least = peak * keys.take(f"{of}.min_lr_factor", path, 0.0)
    falls = total - warmup if ratio is None else min(total - warmup, round(total * min(1.0, ratio)))
    if shape not in ("linear", "cosine"):
        keys.note("approximated", f"{of}.decay_type", shape, "cosine stands for it")
        shape = "cosine"
    end = total + 1
    if falls and end < steps:
        keys.note("approximated", f"{of}.total_steps", total, "the rate stays at its end until the run's")
    least = float(f"{least:.15g}") if math.isfinite(least) else 0.0
    return rate_lines(warmup, shape if falls else "constant", peak, least, (end - falls, end, steps))


def checkpoint(keys: Keys) -> list[str]:
    lines, of = [], "train.checkpoint"
    if keys.take("checkpoint.enable", f"{of}.every", False) if keys.has("checkpoint.enable") else False:
        every = keys.take("checkpoint.interval", f"{of}.every", 500)
        keep = keys.take("checkpoint.keep_latest_k", f"{of}.keep", 10, least=0)
        lines.append(f"checkpoint {{ every = {every} steps{f', keep = {keep}' if keep else ''} }}")
        why = "weights to begin with: import them with `dsc import hf`, and name them in `train { initial = … }`"
        keys.lose("checkpoint.initial_load_path", why, ("",))
    for part in ("validation", "validator"):
        keys.lose(part, "a Validator.Config is read", (Name("Validator.Config()"),))
        if keys.has(f"{part}.freq") and keys.peek(f"{part}.enable", part == "validator"):
            every, batches = keys.take(f"{part}.freq", "train.validate.every", 10), keys.peek(f"{part}.steps", -1)
            count = f", batches = {batches}" if type(batches) is int and batches > 0 else ""
            keys.lose(f"{part}.steps", "train.validate.batches", kind="said" if count else "assumed")
            lines.append(f"validate {{ every = {every} steps{count} }}")
    return lines


def recompute(keys: Keys) -> list[str]:
    key = "activation_checkpoint"
    how: Any = keys.peek(f"{key}.mode", keys.peek(key, Name("SelectiveAC.Config()")))
    whole = how == "full" or getattr(how, "text", "") == "FullAC.Config()"
    why = (
        "it changes memory and time alone: `recompute` names ops here"
        if not whole and how not in (None, "none")
        else ""
    )
    for each in (key, f"{key}.mode"):
        keys.lose(each, why or "recompute", kind="no effect" if why else "said")
    return ["recompute = [layer]"] if whole else []


def precision(keys: Keys) -> Precision:
    """A precision that is built in, and what is changed of it."""
    wide = keys.take("training.mixed_precision_param", "precision.compute", "bfloat16")
    if wide not in ("bfloat16", "float32"):
        keys.note("approximated", "training.mixed_precision_param", wide, "BF16 stands for it")
    keys.lose("training.mixed_precision_reduce", "gradients are summed in FP32", ("float32",))
    keys.lose("training.dtype", "master weights are FP32 here", ("float32",))
    narrow = keys.peek("optimizer.implementation", "") == "fused_opt_states_bf16"
    keys.lose(
        "optimizer.implementation",
        "precision.moments" if narrow else "how fast it is",
        kind="said" if narrow else "no effect",
    )
    why = "its converters scale otherwise than the tiles of a spec: it says BF16"
    keys.lose(f"{JOB}.converters", why, ([],))
    for key in [each for each in keys.members if each.startswith("model_spec.converters")]:
        keys.lose(key, why)
    return ("fp32" if wide == "float32" else "bf16"), ["moments = bf16"] if narrow else []
