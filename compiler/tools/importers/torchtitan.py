"""Imports a torchtitan configuration as a spec and a ledger of every key.

Two forms are read: a module with functions that return a `Trainer.Config` (0.3.0), which is parsed and never run, and
the older TOML job file, which names a flavour of a model. Keys have the names of `Trainer.Config`, such as
`training.seq_len`; `RENAMED` maps differing names in job files. Defaults and stages are those of 0.3.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from compiler.ir.stage_placement import V
from compiler.schedule import SCHEDULES
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.torch_csv import from_torch_csv, to_torch_csv
from compiler.tools.exporters.torchtitan import UNDECAYED
from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.plan_ledger import (
    Degrees,
    ImportedPlan,
    Keys,
    Members,
    Precision,
    adam,
    rate_lines,
    spec_of,
    string,
    value_text,
)
from compiler.tools.importers.python_calls import DottedName
from compiler.tools.importers.torchtitan_model import JOB, LAYERS, model_lines, with_flavour
from compiler.tools.importers.write import number
from dsl.facts.schedules import DEFAULT_CHUNKS, FACTS, PLAIN, PLAIN_CHUNKED
from dsl.messages.diagnostics import Diagnostic

# --- The recipe as lines of a spec: sizes of a step, optimizer, rate, checkpoints
#
# Defaults and rates are those of 0.3.0.

UNCLIPPED = 1e9  # max_norm at or above this means no clipping


def is_open(keys: Keys, key: str) -> bool:
    """Whether a key is left open: absent, null or -1. Records it in the ledger if so."""
    is_unset = key not in keys.members or keys.members[key][0].value in (-1, None)
    if is_unset:
        keys.lose(key, "open: it follows from the number of devices", kind="assumed")
    return is_unset


def sizes(keys: Keys, pp: int, data: int) -> tuple[list[str], int]:
    """The lines for sequence, batches, steps and seed; and the number of steps. `data`: data-parallel ranks."""
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
        why = "there, the pipeline runs several times per step; here, once, with more micro-batches"
        keys.note("no effect", "training.local_batch_size", local, why)
    steps = keys.take("training.steps", "train.tokens", 10000)
    lines = [f"sequence = {sequence}, micro_batch = {micro}, batch = {batch}, steps = {steps}"]
    if keys.has("debug.seed") or not keys.has("training.seed"):
        seed = keys.take("debug.seed", "train.seed", None, int)
    else:
        seed = keys.take("training.seed", "train.seed", None, int)
    return [*lines, *([f"seed = {seed}"] if seed is not None else [])], steps


def optimizer(keys: Keys, steps: int) -> list[str]:
    """The lines for the optimizer and its learning rate."""
    prefix = "optimizer"
    groups = sorted({key.split(".")[2] for key in keys.members if key.startswith("optimizer.param_groups.")}, key=str)
    if groups:
        keys.lose(prefix, "expected an OptimizersContainer.Config", (DottedName("OptimizersContainer.Config()"),))
        prefix = f"optimizer.param_groups.{groups[-1]}.optimizer_kwargs"
        settings = _settings(keys, prefix)
        _groups(keys, groups, settings)
    else:
        keys.lose(prefix, "not AdamW", (DottedName("default_adamw()"),))
        keys.lose("optimizer.name", "replaced by AdamW", ("AdamW",), "approximated")
        settings = _settings(keys, prefix)
        why = "there, norm weights decay too; here, they do not"
        if settings["weight_decay"]:
            keys.note("approximated", "optimizer.weight_decay", number(settings["weight_decay"]), why)
    keys.lose("optimizer.early_step_in_backward", "gradients are clipped before the update", (False,))
    peak = settings.pop("lr")
    clip = keys.take("training.max_norm", "train.optimizer.clip", 1.0)
    return [adam(settings, clip if clip < UNCLIPPED else None), *rate(keys, peak, steps)]


def _settings(keys: Keys, prefix: str) -> dict[str, float]:
    """lr, beta1, beta2, eps and weight_decay, from the keys under `prefix`."""
    lr = keys.take(f"{prefix}.lr", "train.rate", 8e-4)
    if f"{prefix}.betas" in keys.members:
        default = [value for *_, value in _BETAS]
        betas = keys.take(f"{prefix}.betas", "train.optimizer.beta1, beta2", default, list)
        if len(betas) != 2 or any(type(beta) not in (int, float) for beta in betas):
            keys.mistakes.append(Diagnostic("I0203", f"`betas` must be two numbers, not {value_text(betas)}", None))
            betas = default
    else:
        betas = [keys.take(f"{prefix}.beta{index}", path, value) for index, path, value in _BETAS]
    eps = keys.take(f"{prefix}.eps", "train.optimizer.eps", 1e-8)
    decay = keys.take(f"{prefix}.weight_decay", "train.optimizer.weight_decay", 0.1)
    return {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": decay}


_BETAS = ((1, "train.optimizer.beta1", 0.9), (2, "train.optimizer.beta2", 0.95))


def _groups(keys: Keys, groups: list[str], settings: Mapping[str, float]) -> None:
    """Account for the parameter groups. `settings`: those of the last group, which has all remaining parameters."""
    for index, group in enumerate(groups):
        prefix, is_last = f"optimizer.param_groups.{group}", index == len(groups) - 1
        pattern = ".*" if is_last else UNDECAYED
        keys.lose(prefix, "expected a ParamGroupConfig", (DottedName("ParamGroupConfig()"),))
        keys.lose(f"{prefix}.pattern", "here, all but norms and biases decay", (pattern,), "approximated")
        keys.lose(f"{prefix}.optimizer_name", "replaced by AdamW", ("AdamW",), "approximated")
        kwargs = f"{prefix}.optimizer_kwargs"
        usual = {"lr": settings["lr"], "betas": [settings["beta1"], settings["beta2"]], "eps": settings["eps"]}
        for key, value in (usual | {"weight_decay": 0.0}).items():
            keys.lose(f"{kwargs}.{key}", "groups differ only in weight decay here", (value,), "approximated")
    if len(groups) == 1 and settings["weight_decay"]:
        why = "there, norm weights decay too; here, they do not"
        keys.note("approximated", "optimizer.weight_decay", number(settings["weight_decay"]), why)


def rate(keys: Keys, peak: float, steps: int) -> list[str]:
    """The block `rate`. In torchtitan the decay ends one step after the run, and the block says the same."""
    prefix, path = "lr_scheduler", "train.rate"
    total = keys.take(f"{prefix}.total_steps", path, steps, int)
    warmup = min(total, keys.take(f"{prefix}.warmup_steps", path, 200, least=0))
    ratio = keys.take(f"{prefix}.decay_ratio", path, None, (int, float))
    shape = keys.take(f"{prefix}.decay_type", path, "linear")
    least = peak * keys.take(f"{prefix}.min_lr_factor", path, 0.0)
    decay_steps = total - warmup if ratio is None else min(total - warmup, round(total * min(1.0, ratio)))
    if shape not in ("linear", "cosine"):
        keys.note("approximated", f"{prefix}.decay_type", shape, "replaced by cosine")
        shape = "cosine"
    end = total + 1
    if decay_steps and end < steps:
        keys.note("approximated", f"{prefix}.total_steps", total, "the rate keeps its final value until the run ends")
    least = float(f"{least:.15g}") if math.isfinite(least) else 0.0
    return rate_lines(warmup, shape if decay_steps else "constant", peak, least, (end - decay_steps, end, steps))


def checkpoint(keys: Keys) -> list[str]:
    """The lines for checkpoints and validation."""
    lines, path = [], "train.checkpoint"
    if keys.take("checkpoint.enable", f"{path}.every", False) if keys.has("checkpoint.enable") else False:
        interval = keys.take("checkpoint.interval", f"{path}.every", 500)
        keep = keys.take("checkpoint.keep_latest_k", f"{path}.keep", 10, least=0)
        lines.append(f"checkpoint {{ every = {interval} steps{f', keep = {keep}' if keep else ''} }}")
        why = "initial weights: import them with `dsc import hf`, and name them in `train { initial = … }`"
        keys.lose("checkpoint.initial_load_path", why, ("",))
    for part in ("validation", "validator"):
        keys.lose(part, "expected a Validator.Config", (DottedName("Validator.Config()"),))
        if keys.has(f"{part}.freq") and keys.peek(f"{part}.enable", part == "validator"):
            interval, batches = keys.take(f"{part}.freq", "train.validate.every", 10), keys.peek(f"{part}.steps", -1)
            count = f", batches = {batches}" if type(batches) is int and batches > 0 else ""
            keys.lose(f"{part}.steps", "train.validate.batches", kind="said" if count else "assumed")
            lines.append(f"validate {{ every = {interval} steps{count} }}")
    return lines


def recompute(keys: Keys) -> list[str]:
    key = "activation_checkpoint"
    mode: Any = keys.peek(f"{key}.mode", keys.peek(key, DottedName("SelectiveAC.Config()")))
    is_full = mode == "full" or getattr(mode, "text", "") == "FullAC.Config()"
    why = (
        "it changes only memory and time; `recompute` lists ops here"
        if not is_full and mode not in (None, "none")
        else ""
    )
    for name in (key, f"{key}.mode"):
        keys.lose(name, why or "recompute", kind="no effect" if why else "said")
    return ["recompute = [layer]"] if is_full else []


def precision(keys: Keys) -> Precision:
    """A built-in precision, and the lines that change it."""
    dtype = keys.take("training.mixed_precision_param", "precision.compute", "bfloat16")
    if dtype not in ("bfloat16", "float32"):
        keys.note("approximated", "training.mixed_precision_param", dtype, "replaced by BF16")
    keys.lose("training.mixed_precision_reduce", "gradients are summed in FP32", ("float32",))
    keys.lose("training.dtype", "master weights are FP32 here", ("float32",))
    bf16_moments = keys.peek("optimizer.implementation", "") == "fused_opt_states_bf16"
    keys.lose(
        "optimizer.implementation",
        "precision.moments" if bf16_moments else "how fast it is",
        kind="said" if bf16_moments else "no effect",
    )
    why = "torchtitan's converters scale differently from a spec's tiles: imported as BF16"
    keys.lose(f"{JOB}.converters", why, ([],))
    for key in [key for key in keys.members if key.startswith("model_spec.converters")]:
        keys.lose(key, why)
    return ("fp32" if dtype == "float32" else "bf16"), ["moments = bf16"] if bf16_moments else []


# --- torchtitan

CONFIG = "Trainer.Config"  # the return type that marks a configuration function
RENAMED = {"lr_scheduler.lr_min": "lr_scheduler.min_lr_factor", "checkpoint.enable_checkpoint": "checkpoint.enable"}
MOST_STAGES = 10_000
CSV = re.compile(r"with_name\('([^/\\']+)'\)")  # the name of a file beside the module
# key → its expected class
CLASSES = {
    "return": CONFIG, "training": "TrainingConfig", "parallelism": "ParallelismConfig", "debug": "DebugConfig",
    "lr_scheduler": "LRSchedulersContainer.Config", "checkpoint": "CheckpointManager.Config",
}  # fmt: skip
# Prefixes of keys that do not change the computation: logs, files, checks and speed.
IDLE = (
    *("job.", "profiling.", "profiler", "metrics", "comm.", "compile", "debug.", "memory_estimation.", "dump_folder"),
    *("training.gc_", "training.compile", "training.disable_cuda_graphs", "training.enable_cpu_offload", "checkpoint."),
    *("training.deterministic", "parallelism.enable_", "parallelism.spmd_backend", "parallelism.disable_loss_parallel"),
    *("parallelism.context_parallel_", "parallelism.module_fqns", "parallelism.pipeline_parallel_", "experimental."),
    *("activation_checkpoint.", "optimizer.implementation", f"{JOB}.print_after", "float8.", "quantize.", "mx."),
    *("validator.", "validation."),
)
DATA = (
    "dataloader",
    "hf_assets_path",
    "tokenizer",
    "training.dataset",
    f"{JOB}.tokenizer_path",
    f"{JOB}.hf_assets_path",
)


@dataclass(frozen=True)
class SideFiles:
    """Access to files next to the configuration: their text, and their path from the spec."""

    text: Callable[[str], str | None] = lambda name: None
    name: Callable[[str], str] = lambda name: name


def keys_of_job_file(tables: Mapping[str, JsonValue]) -> Members:
    """The keys of a job file by their `Trainer.Config` paths."""
    members: dict[str, list[JsonValue]] = {}
    for path, value in tables.items():
        members.setdefault(RENAMED.get(path, path), []).append(value)
    return members


def import_keys(members: Members, name: str, devices: int | None, beside: SideFiles | None = None) -> ImportedPlan:
    """Import the keys as a run `name`. `devices`: cluster size, used if `data_parallel_shard_degree` is open."""
    keys = Keys(members)
    members = with_flavour(members, keys)
    mistakes, keys = keys.mistakes, Keys(members)
    keys.mistakes += mistakes
    model = model_lines(keys, members, name)
    for key, kind in CLASSES.items():
        keys.lose(key, f"expected a {kind}", (DottedName(f"{kind}()"),))
    degrees, data, sharding = _degrees(keys, devices)
    layout, stages = _layout(keys, members, degrees.pipeline)
    size_lines, steps = sizes(keys, degrees.pipeline, data)
    schedule = _schedule(keys, degrees.pipeline, stages, beside or SideFiles())
    more_keys = f", shard = {sharding.ranks}" if sharding.ranks < data and sharding.zero >= 2 else ""
    more_keys += f", layout = {string(layout)}" if layout else ""
    run = [degrees.block(sharding.zero, more_keys), schedule, *recompute(keys)]
    dtypes = precision(keys)
    run += ["train {", *size_lines, *optimizer(keys, steps), *checkpoint(keys), "}"]
    for key in members:
        if key.startswith(DATA):
            keys.lose(key, "name the text and the tokenizer in `data`", kind="assumed")
        elif key.startswith(IDLE):
            keys.lose(key, "logs, files, checks or speed", kind="no effect")
    return spec_of(
        "torchtitan", name, keys, degrees.pipeline * data * degrees.tensor * degrees.context, run, model, dtypes
    )


class _StateSharding(NamedTuple):
    zero: int  # the ZeRO stage
    ranks: int  # data ranks that share a copy


def _degrees(keys: Keys, devices: int | None) -> tuple[Degrees, int, _StateSharding]:
    """The degrees, the number of data-parallel ranks, and how they shard."""
    pp, tp, cp, ep = (
        keys.take(f"parallelism.{axis}_parallel_degree", f"parallel.{axis}", 1)
        for axis in ("pipeline", "tensor", "context", "expert")
    )
    etp = keys.take("parallelism.expert_tensor_parallel_degree", "parallel.expert_tensor", 1) if keys.has(_ETP) else 1
    degrees = Degrees(pp, tp, cp, ep, etp)
    copies = keys.take(_COPIES, "parallel.data", 1)
    if is_open(keys, _SHARDS):
        world = degrees.devices(keys, devices)
        data, remainder = divmod(world, pp * tp * cp)
        if remainder or not data or data % copies:
            text = f"{world} devices are not a multiple of {pp * tp * cp * copies}, which the other degrees need"
            keys.mistakes.append(Diagnostic("I0203", text, None, f"write --devices {pp * tp * cp * copies}"))
            data = copies
        shards = data // copies
    else:
        shards = keys.take(_SHARDS, "parallel.data", 1)
        data = copies * shards
        if devices is not None and devices != pp * tp * cp * data:
            text = f"the degrees need {pp * tp * cp * data} devices, but --devices is {devices}"
            keys.mistakes.append(Diagnostic("I0203", text, None, "leave --devices out"))
    reshard = keys.take("parallelism.fsdp_reshard_after_forward", "parallel.zero", "default")
    sharing = shards
    if copies > 1 and shards > 1 and shards * tp * cp % (ep * etp):
        why = f"{shards} ranks hold no whole expert group of {ep * etp}, so all data ranks share one copy here"
        keys.note("approximated", _COPIES, copies, why)
        sharing = data
    reshards = reshard == "always" or (reshard == "default" and pp == 1)
    keys.lose("parallelism.enable_sequence_parallel", "tensor ranks split rows here", (True, *[False] * (tp == 1)))
    return degrees, data, _StateSharding(0 if shards == 1 else 3 if reshards else 2, sharing)


_COPIES = "parallelism.data_parallel_replicate_degree"
_ETP = "parallelism.expert_tensor_parallel_degree"
_SHARDS = "parallelism.data_parallel_shard_degree"


def _layout(keys: Keys, members: Members, pp: int) -> tuple[str, int]:
    """The layout of stages in the syntax of a spec ("" for a single stage), and the number of stages."""
    if pp == 1:
        return "", 1
    keys.lose("parallelism.pipeline_parallel_split_points", "layers are divided evenly here", ([],), "approximated")
    written = keys.take(_PARTS, "parallel.layout", None, list)
    if written:
        modules = [[str(module) for module in stage] if isinstance(stage, list) else [] for stage in written]
        parts = ["".join(map(_letter, stage)) for stage in modules]
        if "?" in "".join(parts):
            odd = next(module for stage in modules for module in stage if _letter(module) == "?")
            keys.note("not expressible", _PARTS, odd, "stages in a spec hold the embedding, layers and the head")
        return "|".join(part.replace("?", "") for part in parts), len(parts)
    layers = members.get(f"{LAYERS}.n_layers", ())
    total = layers[0].value if layers and type(layers[0].value) is int else 0
    if not total:  # reported as an error already
        return "", pp
    first = keys.take("parallelism.pipeline_parallel_first_stage_less_layers", "parallel.layout", 1, least=0)
    last = keys.take("parallelism.pipeline_parallel_last_stage_less_layers", "parallel.layout", 1, least=0)
    per_stage = keys.take("parallelism.pipeline_parallel_layers_per_stage", "parallel.layout", 0, int)
    torch_name = keys.peek(_NAME, "1F1B")
    facts = FACTS.get(_ours(str(torch_name)) or PLAIN)
    per_rank = facts.stages_per_rank() if facts else 1
    stages = min(MOST_STAGES, -(-(total + first + last) // per_stage) if per_stage else pp * per_rank)
    base, remainder = divmod(total + first + last, stages)
    counts = [base + (stage < remainder) for stage in range(stages)]
    counts[0], counts[-1] = counts[0] - first, counts[-1] - last
    if min(counts) < 0 or stages % pp:
        keys.mistakes.append(
            Diagnostic("I0203", f"{total} layers cannot be cut into {stages} stages on {pp} ranks", None)
        )
        return "", stages
    return "|".join(f"{'E' * (i == 0)}{'t' * count}{'L' * (i == stages - 1)}" for i, count in enumerate(counts)), stages


_PARTS = "parallelism.module_fqns_per_model_part"
_NAME = "parallelism.pipeline_parallel_schedule"


def _letter(module: str) -> str:
    """The letter of a module in a layout; "" for the norm, which goes with the head, and "?" for others."""
    if re.fullmatch(r"layers\.\d+", module):
        return "t"
    return {"tok_embeddings": "E", "norm": "", "lm_head": "L", "output": "L"}.get(module, "?")


def _ours(name: str) -> str | None:
    """The name of a schedule here, from torch's name for it in any case; None if there is none."""
    low = name.lower()
    return low if low in FACTS else next((key for key, facts in FACTS.items() if low in facts.elsewhere), None)


def _schedule(keys: Keys, pp: int, stages: int, beside: SideFiles) -> str:
    """The block `schedule`: from the CSV file if there is one, by name if the schedule has a name here."""
    if pp == 1:
        return f"schedule {{ name = {PLAIN} }}"
    chunks = stages // pp
    torch_name = keys.take(_NAME, "schedule.name", "1F1B")
    key = "parallelism.pipeline_parallel_schedule_csv"
    if file := keys.peek(key, ""):
        match = CSV.search(getattr(file, "text", ""))
        path = match[1] if match else str(file)
        text = beside.text(path)
        try:
            if text is None:
                raise ScheduleError("it cannot be read")
            schedule = from_torch_csv(text)
            if schedule.num_ranks != pp:
                raise ScheduleError(f"it has {schedule.num_ranks} ranks, not {pp}")
        except ScheduleError as error:
            keys.mistakes.append(
                Diagnostic("I0203", f"the schedule {value_text(path)}: {error}", keys.members[key][0].span)
            )
        else:
            keys.take(key, "schedule", "", object)
            name = _schedule_name(schedule, _ours(torch_name), chunks)
            return _block(name, chunks) if name else f"schedule {{ file = {string(beside.name(path))} }}"
    keys.lose(key, "there is no such file", ("",))
    name = _ours(torch_name)
    if name is None:
        name = PLAIN_CHUNKED if chunks > 1 else PLAIN
        keys.note("approximated", _NAME, torch_name, f"replaced by {name}")
    return _block(name, chunks)


def _block(name: str, chunks: int) -> str:
    option = f", chunks = {chunks}" if FACTS[name].is_chunked else ""
    return f"schedule {{ name = {name}{option} }}"


def _schedule_name(schedule: Schedule, first: str | None, chunks: int) -> str | None:
    """The name of a schedule among `SCHEDULES`, or None. `first` is tried before the others."""
    text = to_torch_csv(schedule)
    for name in dict.fromkeys([*([first] if first else []), PLAIN, PLAIN_CHUNKED, *SCHEDULES]):
        row = SCHEDULES[name]
        if row.facts.is_mirrored or not row.has_size(schedule.num_ranks, schedule.num_micro_batches):
            continue
        if row.facts.is_folded != (schedule.stage_placement == V) or (row.facts.is_chunked and chunks < DEFAULT_CHUNKS):
            continue
        try:
            generated = row.generate(schedule.num_ranks, schedule.num_micro_batches, max(chunks, DEFAULT_CHUNKS))
        except ValueError:
            continue
        if to_torch_csv(generated) == text:
            return name
    return None
