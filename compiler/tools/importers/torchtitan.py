"""A configuration of torchtitan → a spec and a ledger of every key.

Two forms are read: a module with functions that return a `Trainer.Config` (0.3.0), which is parsed and never run, and
the older TOML job file, which names a flavour of a model. Keys have the names of `Trainer.Config`, `training.seq_len`;
what a job file calls otherwise is in `RENAMED`. Defaults and stages are those of 0.3.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    shown,
    spec_of,
    string,
)
from compiler.tools.importers.python_calls import DottedName
from compiler.tools.importers.torchtitan_model import JOB, LAYERS, model_lines, with_flavour
from compiler.tools.importers.write import number
from dsl.facts.schedules import DEFAULT_CHUNKS, FACTS, PLAIN, PLAIN_CHUNKED
from dsl.messages.diagnostics import Diagnostic

# --- The recipe of a configuration of torchtitan, as lines of a spec: sizes of a step, optimizer, rate, and what is
# kept
#
# Defaults and rates are those of 0.3.0.

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
        keys.lose(of, "an OptimizersContainer.Config is read", (DottedName("OptimizersContainer.Config()"),))
        of = f"optimizer.param_groups.{groups[-1]}.optimizer_kwargs"
        settings = _settings(keys, of)
        _groups(keys, groups, settings)
    else:
        keys.lose(of, "another optimizer", (DottedName("default_adamw()"),))
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
        usual = [value for *_, value in _BETAS]
        betas = keys.take(f"{of}.betas", "train.optimizer.beta1, beta2", usual, list)
        if len(betas) != 2 or any(type(each) not in (int, float) for each in betas):
            keys.mistakes.append(Diagnostic("I0203", f"`betas` are two numbers, {shown(betas)} are not", None))
            betas = usual
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
        keys.lose(at, "a ParamGroupConfig is read", (DottedName("ParamGroupConfig()"),))
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
        keys.lose(part, "a Validator.Config is read", (DottedName("Validator.Config()"),))
        if keys.has(f"{part}.freq") and keys.peek(f"{part}.enable", part == "validator"):
            every, batches = keys.take(f"{part}.freq", "train.validate.every", 10), keys.peek(f"{part}.steps", -1)
            count = f", batches = {batches}" if type(batches) is int and batches > 0 else ""
            keys.lose(f"{part}.steps", "train.validate.batches", kind="said" if count else "assumed")
            lines.append(f"validate {{ every = {every} steps{count} }}")
    return lines


def recompute(keys: Keys) -> list[str]:
    key = "activation_checkpoint"
    how: Any = keys.peek(f"{key}.mode", keys.peek(key, DottedName("SelectiveAC.Config()")))
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


# --- torchtitan

CONFIG = "Trainer.Config"  # what a function of a module returns
RENAMED = {"lr_scheduler.lr_min": "lr_scheduler.min_lr_factor", "checkpoint.enable_checkpoint": "checkpoint.enable"}
MOST_STAGES = 10_000
CSV = re.compile(r"with_name\('([^/\\']+)'\)")  # the name of a file beside the module
# Classes of the parts of a configuration.
CLASSES = {
    "return": CONFIG, "training": "TrainingConfig", "parallelism": "ParallelismConfig", "debug": "DebugConfig",
    "lr_scheduler": "LRSchedulersContainer.Config", "checkpoint": "CheckpointManager.Config",
}  # fmt: skip
# Keys that change nothing of what is computed, by how they begin: logs, files, checks and how fast it is.
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
class Beside:
    """What is outside of the file: the text of a file beside it, and how a spec names that file."""

    text: Callable[[str], str | None] = lambda name: None
    name: Callable[[str], str] = lambda name: name


def from_toml(tables: Mapping[str, JsonValue]) -> Members:
    """The keys of a job file, by their paths."""
    found: dict[str, list[JsonValue]] = {}
    for path, value in tables.items():
        found.setdefault(RENAMED.get(path, path), []).append(value)
    return found


def imported(members: Members, name: str, devices: int | None, beside: Beside | None = None) -> ImportedPlan:
    """A spec of a run `name`. `devices`: of the cluster, where `data_parallel_shard_degree` leaves them open."""
    keys = Keys(members)
    members = with_flavour(members, keys)
    known, keys = keys.mistakes, Keys(members)
    keys.mistakes += known
    model = model_lines(keys, members, name)
    for key, kind in CLASSES.items():
        keys.lose(key, f"a {kind} is read", (DottedName(f"{kind}()"),))
    degrees, data, zero = _degrees(keys, devices)
    layout, stages = _layout(keys, members, degrees.pipeline)
    of_step, steps = sizes(keys, degrees.pipeline, data)
    schedule = _schedule(keys, degrees.pipeline, stages, beside or Beside())
    run = [degrees.block(zero, f", layout = {string(layout)}" if layout else ""), schedule, *recompute(keys)]
    dtypes = precision(keys)
    run += ["train {", *of_step, *optimizer(keys, steps), *checkpoint(keys), "}"]
    for key in members:
        if key.startswith(DATA):
            keys.lose(key, "name the text and the tokenizer in `data`", kind="assumed")
        elif key.startswith(IDLE):
            keys.lose(key, "logs, files, checks, or how it is computed", kind="no effect")
    return spec_of(
        "torchtitan", name, keys, degrees.pipeline * data * degrees.tensor * degrees.context, run, model, dtypes
    )


def _degrees(keys: Keys, devices: int | None) -> tuple[Degrees, int, int]:
    """The degrees, the data ranks, and the part of training state that these share."""
    pp, tp, cp, ep = (
        keys.take(f"parallelism.{theirs}_parallel_degree", f"parallel.{theirs}", 1)
        for theirs in ("pipeline", "tensor", "context", "expert")
    )
    etp = keys.take("parallelism.expert_tensor_parallel_degree", "parallel.expert_tensor", 1) if keys.has(_ETP) else 1
    degrees = Degrees(pp, tp, cp, ep, etp)
    copies = keys.take("parallelism.data_parallel_replicate_degree", "parallel.data", 1)
    if is_open(keys, _SHARDS):
        world = degrees.devices(keys, devices)
        data, rest = divmod(world, pp * tp * cp)
        if rest or not data or data % copies:
            text = f"{world} devices are not a multiple of {pp * tp * cp * copies}, which the other degrees need"
            keys.mistakes.append(Diagnostic("I0203", text, None, f"write --devices {pp * tp * cp * copies}"))
            data = copies
        shards = data // copies
    else:
        shards = keys.take(_SHARDS, "parallel.data", 1)
        data = copies * shards
        if devices is not None and devices != pp * tp * cp * data:
            text = f"the degrees are those of {pp * tp * cp * data} devices, --devices says {devices}"
            keys.mistakes.append(Diagnostic("I0203", text, None, "leave --devices out"))
    when = keys.take("parallelism.fsdp_reshard_after_forward", "parallel.zero", "default")
    if copies > 1 and shards > 1:
        why = f"each of {copies} groups of ranks shards by itself there; all data ranks share here"
        keys.note("no effect", "parallelism.data_parallel_replicate_degree", copies, why)
    always = when == "always" or (when == "default" and pp == 1)
    keys.lose("parallelism.enable_sequence_parallel", "tensor ranks split rows here", (True, *[False] * (tp == 1)))
    return degrees, data, 0 if shards == 1 else 3 if always else 2


_ETP = "parallelism.expert_tensor_parallel_degree"
_SHARDS = "parallelism.data_parallel_shard_degree"


def _layout(keys: Keys, members: Members, pp: int) -> tuple[str, int]:
    """The layers of each stage in the words of a spec, and the number of stages; "" where there is one."""
    if pp == 1:
        return "", 1
    keys.lose("parallelism.pipeline_parallel_split_points", "layers are divided evenly here", ([],), "approximated")
    written = keys.take(_PARTS, "parallel.layout", None, list)
    if written:
        modules = [[str(module) for module in stage] if isinstance(stage, list) else [] for stage in written]
        parts = ["".join(map(_letter, stage)) for stage in modules]
        if "?" in "".join(parts):
            odd = next(module for stage in modules for module in stage if _letter(module) == "?")
            keys.note("not expressible", _PARTS, odd, "a spec has the embedding, the layers and the head")
        return "|".join(part.replace("?", "") for part in parts), len(parts)
    layers = members.get(f"{LAYERS}.n_layers", ())
    total = layers[0].value if layers and type(layers[0].value) is int else 0
    if not total:  # which is a mistake that was said
        return "", pp
    first = keys.take("parallelism.pipeline_parallel_first_stage_less_layers", "parallel.layout", 1, least=0)
    last = keys.take("parallelism.pipeline_parallel_last_stage_less_layers", "parallel.layout", 1, least=0)
    each = keys.take("parallelism.pipeline_parallel_layers_per_stage", "parallel.layout", 0, int)
    named = keys.peek(_NAME, "1F1B")
    facts = FACTS.get(_ours(str(named)) or PLAIN)
    per_rank = facts.stages_per_rank() if facts else 1
    stages = min(MOST_STAGES, -(-(total + first + last) // each) if each else pp * per_rank)
    base, more = divmod(total + first + last, stages)
    counts = [base + (stage < more) for stage in range(stages)]
    counts[0], counts[-1] = counts[0] - first, counts[-1] - last
    if min(counts) < 0 or stages % pp:
        keys.mistakes.append(
            Diagnostic("I0203", f"{total} layers are not cut into {stages} stages on {pp} ranks", None)
        )
        return "", stages
    return "|".join(f"{'E' * (i == 0)}{'t' * n}{'L' * (i == stages - 1)}" for i, n in enumerate(counts)), stages


_PARTS = "parallelism.module_fqns_per_model_part"
_NAME = "parallelism.pipeline_parallel_schedule"


def _letter(module: str) -> str:
    """The letter of a module in a layout: the norm goes with the head."""
    if re.fullmatch(r"layers\.\d+", module):
        return "t"
    return {"tok_embeddings": "E", "norm": "", "lm_head": "L", "output": "L"}.get(module, "?")


def _ours(name: str) -> str | None:
    """A schedule by torch's name for it, without regard to case."""
    low = name.lower()
    return low if low in FACTS else next((key for key, facts in FACTS.items() if low in facts.elsewhere), None)


def _schedule(keys: Keys, pp: int, stages: int, beside: Beside) -> str:
    """The block `schedule`: that of the CSV, if there is one, by its name where it has one."""
    if pp == 1:
        return f"schedule {{ name = {PLAIN} }}"
    chunks = stages // pp
    named = keys.take(_NAME, "schedule.name", "1F1B")
    key = "parallelism.pipeline_parallel_schedule_csv"
    if file := keys.peek(key, ""):
        found = CSV.search(getattr(file, "text", ""))
        path = found[1] if found else str(file)
        text = beside.text(path)
        try:
            if text is None:
                raise ScheduleError("it cannot be read")
            schedule = from_torch_csv(text)
            if schedule.num_ranks != pp:
                raise ScheduleError(f"it is of {schedule.num_ranks} ranks")
        except ScheduleError as error:
            keys.mistakes.append(Diagnostic("I0203", f"the schedule {shown(path)}: {error}", keys.members[key][0].span))
        else:
            keys.take(key, "schedule", "", object)
            name = _named(schedule, _ours(named), chunks)
            return _block(name, chunks) if name else f"schedule {{ file = {string(beside.name(path))} }}"
    keys.lose(key, "there is no such file", ("",))
    name = _ours(named)
    if name is None:
        name = PLAIN_CHUNKED if chunks > 1 else PLAIN
        keys.note("approximated", _NAME, named, f"{name} stands for it")
    return _block(name, chunks)


def _block(name: str, chunks: int) -> str:
    more = f", chunks = {chunks}" if FACTS[name].is_chunked else ""
    return f"schedule {{ name = {name}{more} }}"


def _named(schedule: Schedule, first: str | None, chunks: int) -> str | None:
    """The name of a schedule that has a name; `first` is tried before the others."""
    text = to_torch_csv(schedule)
    for name in dict.fromkeys([*([first] if first else []), PLAIN, PLAIN_CHUNKED, *SCHEDULES]):
        row = SCHEDULES[name]
        if row.facts.is_mirrored or not row.has(schedule.num_ranks, schedule.num_micro_batches):
            continue
        if row.facts.is_folded != (schedule.stage_placement == V) or (row.facts.is_chunked and chunks < DEFAULT_CHUNKS):
            continue
        try:
            found = row.generate(schedule.num_ranks, schedule.num_micro_batches, max(chunks, DEFAULT_CHUNKS))
        except ValueError:
            continue
        if to_torch_csv(found) == text:
            return name
    return None
