"""Rules across fields. Each says the rule, the numbers, and an edit that mends it.

A rule reads only the paths its row names, and is left out when one of them has no usable value: what is wrong there
has been told already. `train_refusals` are the rules of what passes check and plan, but does not run yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from dsl import ramp
from dsl.diagnostics import Diagnostic, Note
from dsl.schema import Moe, Spec, TrainTokenizer
from dsl.source import Span

EVEN = ("dualpipe",)  # schedules that want even numbers of ranks and micro-batches
RUNS = ("dualpipe", "1f1b")
STAGES_PER_RANK = {"dualpipev": 2, "zbv": 2}


@dataclass(frozen=True)
class Finding:
    """A broken rule, at a path of the spec; notes point at other paths."""

    code: str
    message: str
    at: str
    hint: str
    notes: tuple[tuple[str, str], ...] = ()


Rule = Callable[[Spec], Iterator[Finding]]


def check(spec: Spec, origins: Mapping[str, Span], failed: Collection[str]) -> tuple[Diagnostic, ...]:
    """Every broken rule of a spec, of which the paths `failed` may be missing."""
    found = (finding for reads, rule in RULES if not _missing(reads, failed) for finding in rule(spec))
    return tuple(_located(finding, origins) for finding in found)


def train_refusals(spec: Spec, origins: Mapping[str, Span] | None = None) -> tuple[Diagnostic, ...]:
    """Why `dsc train` does not run a spec that is otherwise right; empty if it does."""
    found = (_located(finding, origins or {}) for rule in REFUSALS for finding in rule(spec))
    return tuple(replace(item, severity="warning") for item in found)


def _missing(reads: tuple[str, ...], failed: Collection[str]) -> bool:
    return any(_related(read.split("."), path.split(".")) for read in reads for path in failed)


def _related(read: list[str], path: list[str]) -> bool:
    """Whether one path leads to the other; `*` stands for any part."""
    return all(mine in ("*", other) for mine, other in zip(read, path, strict=False))


def _located(finding: Finding, origins: Mapping[str, Span]) -> Diagnostic:
    notes = tuple(Note(text, origins[path]) for text, path in finding.notes if path in origins)
    return Diagnostic(finding.code, finding.message, _origin(finding.at, origins), finding.hint, notes)


def _origin(path: str, origins: Mapping[str, Span]) -> Span | None:
    """Where a value, or the block that leaves it to its default, is written."""
    while path not in origins and "." in path:
        path = path.rpartition(".")[0]
    return origins.get(path, origins.get(""))


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is closest to `wanted`, the smaller one of two."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    divisors = {*small, *(number // each for each in small)}
    return min(divisors, key=lambda each: (abs(each - wanted), each))


# ---------------------------------------------------------------- layers and phases


def layer_ranges(spec: Spec) -> Iterator[Finding]:
    """Ranges follow each other from layer 0 on. Layers are never dropped or added silently."""
    expected, furthest = 0, -1
    for index, span in enumerate(spec.model.layers):
        at = f"model.layers.{index}"
        before = (("the range before ends here", f"model.layers.{furthest}"),) if index else ()
        if span.first > expected:
            missing = f"{expected}..{span.first - 1}" if span.first - 1 > expected else str(expected)
            word = "layers" if span.first - 1 > expected else "layer"
            message = f"no range holds {word} {missing}"
            yield Finding("E0701", message, at, f"write `layers {expected}..{span.last}`", before)
        elif span.first < expected:
            hint = f"write `layers {expected}..{span.last}`" if span.last >= expected else "remove this range"
            yield Finding("E0702", f"layer {span.first} is in two ranges", at, hint, before)
        if span.last >= expected:
            expected, furthest = span.last + 1, index


def rate_covers(spec: Spec) -> Iterator[Finding]:
    """The learning rate is known for every token of the run, and no phase lies beyond it."""
    train = spec.train
    end = train.rate[-1].end_tokens
    if end < train.tokens:
        message = f"the rate ends at token {end:,}, the run at token {train.tokens:,}"
        last = f"train.rate.{len(train.rate) - 1}"
        hint = f"add a phase over {train.tokens - end:,} tokens, or leave out the end of the last one"
        yield Finding("E0705", message, last, hint, (("the run's length", "train.tokens"),))
    for index, phase in enumerate(train.rate[:-1]):
        if phase.end_tokens >= train.tokens:
            message = f"this phase begins at token {phase.end_tokens:,}, the run ends at token {train.tokens:,}"
            hint = "remove the phase, or train longer"
            yield Finding("E0705", message, f"train.rate.{index + 1}", hint, (("the run's length", "train.tokens"),))


def batch_grows(spec: Spec) -> Iterator[Finding]:
    """A ramp goes up, in a bounded number of sizes."""
    batch = spec.train.batch
    if batch.end < batch.start:
        message = f"the batch shrinks from {batch.start:,} to {batch.end:,}"
        yield Finding("E0706", message, "train.batch", f"write `from = {batch.end}, to = {batch.start}`")
        return
    quantum = ramp.quantum_of(spec.parallel, spec.train.micro_batch)
    if ramp.num_sizes(batch, quantum) > ramp.MAX_SIZES:
        growth = f"from {batch.start:,} to {batch.end:,} by {quantum:,}"
        message = f"the batch grows {growth}, in more than {ramp.MAX_SIZES:,} sizes"
        yield Finding("E0706", message, "train.batch", "grow it by less")


# ---------------------------------------------------------------- parallelism


def world_is_used(spec: Spec) -> Iterator[Finding]:
    """world = pipeline·data·tensor·context."""
    p, world = spec.parallel, spec.cluster.world
    used = p.pipeline * p.data * p.tensor * p.context
    if used == world:
        return
    rest = p.pipeline * p.tensor * p.context
    degrees = f"{p.pipeline}·{p.data}·{p.tensor}·{p.context} = {used:,}"
    message = f"pipeline·data·tensor·context = {degrees}, the cluster has {world:,} devices"
    hint = (
        "write `data = auto`"
        if world % rest == 0
        else f"write `pipeline = {nearest_divisor(world, p.pipeline)}` and `data = auto`"
    )
    notes = (("devices of a node", "cluster.node.devices"), ("nodes", "cluster.nodes"))
    yield Finding("E0801", message, "parallel.data", hint, notes)


def expert_divides_data(spec: Spec) -> Iterator[Finding]:
    """Expert parallel groups are made of the data ranks of a stage."""
    p = spec.parallel
    if p.data % p.expert:
        message = f"expert = {p.expert} does not divide data = {p.data}"
        hint = f"write `expert = {nearest_divisor(p.data, p.expert)}`"
        yield Finding("E0802", message, "parallel.expert", hint, (("data is given here", "parallel.data"),))


def experts_are_spread(spec: Spec) -> Iterator[Finding]:
    """Each expert rank holds the same number of experts."""
    expert = spec.parallel.expert
    for index, span in enumerate(spec.model.layers):
        if isinstance(span.ffn, Moe) and span.ffn.experts % expert:
            message = f"{span.ffn.experts} experts cannot be spread over expert = {expert} ranks"
            hint = f"write `expert = {nearest_divisor(span.ffn.experts, expert)}`, or a multiple of {expert} experts"
            note = ("the experts", f"model.layers.{index}.ffn.experts")
            yield Finding("E0803", message, "parallel.expert", hint, (note,))


def _fits(spec: Spec) -> bool:
    """Whether the degrees make up the world; if not, that is the mistake, and not what follows from it."""
    p = spec.parallel
    return p.pipeline * p.data * p.tensor * p.context == spec.cluster.world


def even_pipeline(spec: Spec) -> Iterator[Finding]:
    """DualPipe feeds the pipeline from both ends; rank r holds stages r and P−1−r."""
    pipeline = spec.parallel.pipeline
    if spec.schedule.name in EVEN and pipeline % 2:
        message = f"{spec.schedule.name} needs an even pipeline, pipeline = {pipeline} is odd"
        even = f"write `pipeline = {pipeline - 1}`, or " if pipeline > 1 else "write "
        hint = f"{even}`schedule {{ name = 1f1b }}`"
        yield Finding("E0804", message, "parallel.pipeline", hint, (("the schedule", "schedule.name"),))


def batch_divides(spec: Spec) -> Iterator[Finding]:
    """Every data rank runs the same number of micro-batches, an even one under DualPipe."""
    p, train = spec.parallel, spec.train
    if not _fits(spec):
        return
    even = spec.schedule.name in EVEN
    unit = p.data * train.micro_batch
    least = 2 * p.pipeline * unit if even else unit
    notes = (("data is given here", "parallel.data"), ("micro_batch is given here", "train.micro_batch"))
    constant = train.batch.start == train.batch.end
    sizes = (("to", train.batch.end),) if constant else (("from", train.batch.start), ("to", train.batch.end))
    for key, size in sizes:
        at = "train.batch" if constant else f"train.batch.{key}"
        multiple = _multiple(size, 2 * unit if even else unit)
        hint = f"write `{'batch' if constant else key} = {max(multiple, least) if key == 'to' else multiple}`"
        if size % unit:
            product = f"data·micro_batch = {p.data}·{train.micro_batch} = {unit:,}"
            yield Finding("E0807", f"a batch of {size:,} is no multiple of {product}", at, hint, notes)
        elif even and size // unit % 2 and (key == "from" or size >= least):
            count = f"{size // unit} micro-batches on each of {p.data} data ranks"
            message = f"a batch of {size:,} makes {count}, {spec.schedule.name} needs an even number"
            yield Finding("E0806", message, at, hint, notes)


def _multiple(size: int, unit: int) -> int:
    """The multiple of `unit` that is closest to `size`, the larger one of two."""
    return max(unit, (2 * size + unit) // (2 * unit) * unit)


def enough_micro_batches(spec: Spec) -> Iterator[Finding]:
    """Below two micro-batches per rank DualPipe has no steady state; a ramp may begin there, not stay there."""
    p, train = spec.parallel, spec.train
    unit = p.data * train.micro_batch
    largest = train.batch.end // unit
    if spec.schedule.name not in EVEN or train.batch.end % unit or largest >= 2 * p.pipeline or not _fits(spec):
        return
    count = f"a batch of {train.batch.end:,} makes {largest} on each of {p.data} data ranks"
    message = f"{spec.schedule.name} over {p.pipeline} ranks needs {2 * p.pipeline} micro-batches, {count}"
    constant = train.batch.start == train.batch.end
    hint = f"write `{'batch' if constant else 'to'} = {2 * p.pipeline * unit}`, or `schedule {{ name = 1f1b }}`"
    paths = ("parallel.pipeline", "parallel.data", "train.micro_batch")
    notes = tuple((f"{path.rpartition('.')[2]} is given here", path) for path in paths)
    yield Finding("E0805", message, "train.batch" if constant else "train.batch.to", hint, notes)


def stages_have_layers(spec: Spec) -> Iterator[Finding]:
    """No stage is empty."""
    stages = spec.parallel.pipeline * STAGES_PER_RANK.get(spec.schedule.name, 1)
    layers = spec.model.num_layers
    if stages > layers:
        message = f"{stages} stages for {layers} layers"
        most = layers // STAGES_PER_RANK.get(spec.schedule.name, 1)
        most -= most % 2 if spec.schedule.name in EVEN and most > 1 else 0
        yield Finding("E0808", message, "parallel.pipeline", f"write `pipeline = {max(1, most)}`")


def one_tensor_and_context(spec: Spec) -> Iterator[Finding]:
    """Keys of the language that nothing behind it runs yet."""
    for name, what in (("tensor", "a matrix"), ("context", "a sequence")):
        degree = getattr(spec.parallel, name)
        if degree > 1:
            message = f"{name} = {degree}: no layer splits {what} over ranks yet"
            yield Finding(
                "E0809", message, f"parallel.{name}", f"write `{name} = 1`; expert and pipeline ranks divide the model"
            )


def zero_runs(spec: Spec) -> Iterator[Finding]:
    """Optimizer states can have one owner; gradients and weights cannot yet."""
    zero = spec.parallel.zero
    if zero > 1:
        what = "gradients" if zero == 2 else "weights"
        yield Finding(
            "E0810", f"zero = {zero}: {what} are not divided over ranks yet", "parallel.zero", "write `zero = 1`"
        )


# ---------------------------------------------------------------- the model


def moe_groups(spec: Spec) -> Iterator[Finding]:
    """Groups are equal, and a token finds its experts in those it may choose from."""
    for index, span in enumerate(spec.model.layers):
        ffn, at = span.ffn, f"model.layers.{index}.ffn"
        if not isinstance(ffn, Moe):
            continue
        experts = ("the experts", f"{at}.experts")
        if ffn.experts % ffn.groups:
            message = f"{ffn.experts} experts do not divide into {ffn.groups} groups"
            hint = f"write `groups = {nearest_divisor(ffn.experts, ffn.groups)}`"
            yield Finding("E0901", message, f"{at}.groups", hint, (experts,))
        if ffn.top_groups > ffn.groups:
            message = f"top_groups = {ffn.top_groups} of {ffn.groups} groups"
            hint = f"write `top_groups = {ffn.groups}`"
            yield Finding("E0905", message, f"{at}.top_groups", hint, (("the groups", f"{at}.groups"),))
        elif ffn.experts % ffn.groups == 0 and ffn.top_k > ffn.top_groups * ffn.experts // ffn.groups:
            most = ffn.top_groups * ffn.experts // ffn.groups
            message = (
                f"top_k = {ffn.top_k}, but {ffn.top_groups} of {ffn.groups} groups hold {most} of {ffn.experts} experts"
            )
            notes = (experts, ("the groups", f"{at}.groups"), ("the groups kept", f"{at}.top_groups"))
            yield Finding("E0902", message, f"{at}.top_k", f"write `top_k = {most}`", notes)


def even_rope(spec: Spec) -> Iterator[Finding]:
    """Rotation is of pairs."""
    rope = spec.model.attention.head_dim.rope
    if rope % 2:
        yield Finding(
            "E0903",
            f"rope = {rope} is odd, it is rotated in pairs",
            "model.attention.head_dim.rope",
            f"write `rope = {rope + 1}`",
        )


def one_mtp(spec: Spec) -> Iterator[Finding]:
    """One token beyond the next."""
    if spec.model.mtp is not None and spec.model.mtp.depth > 1:
        message = f"mtp depth = {spec.model.mtp.depth}: one block of multi-token prediction runs so far"
        yield Finding("E0904", message, "model.mtp.depth", "write `depth = 1`")


def vocabulary_fits(spec: Spec) -> Iterator[Finding]:
    """Every token has a row of the embedding."""
    tokenizer = spec.data.tokenizer
    if isinstance(tokenizer, TrainTokenizer) and tokenizer.vocab > spec.model.vocab:
        message = f"the tokenizer has {tokenizer.vocab:,} entries, the model's vocab {spec.model.vocab:,}"
        hint = f"write `tokenizer = train({spec.model.vocab})`"
        yield Finding("E0906", message, "data.tokenizer", hint, (("the model's vocabulary", "model.vocab"),))


def compute_keeps_sms(spec: Spec) -> Iterator[Finding]:
    """Communication takes some of the SMs."""
    sms = spec.cluster.node.device.sms
    if sms is not None and spec.sm.communication >= sms:
        message = f"communication = {spec.sm.communication} of {sms} SMs leaves none to compute"
        note = ("the device", "cluster.node.device.sms")
        yield Finding("E0907", message, "sm.communication", f"write `communication = {min(20, sms - 1)}`", (note,))


WORLD = (
    *(f"parallel.{degree}" for degree in ("pipeline", "data", "tensor", "context")),
    "cluster.nodes",
    "cluster.node.devices",
)
RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model.layers.*.first", "model.layers.*.last"), layer_ranges),
    (("train.rate", "train.tokens"), rate_covers),
    (("train.batch", "train.micro_batch", "parallel.data"), batch_grows),
    (WORLD, world_is_used),
    (("parallel.expert", "parallel.data"), expert_divides_data),
    (("parallel.expert", "model.layers.*.ffn.experts"), experts_are_spread),
    (("parallel.pipeline", "schedule"), even_pipeline),
    ((*WORLD, "train.micro_batch", "train.batch", "schedule"), batch_divides),
    ((*WORLD, "train.micro_batch", "train.batch", "schedule"), enough_micro_batches),
    (("parallel.pipeline", "schedule", "model.layers.*.last"), stages_have_layers),
    (("parallel.tensor", "parallel.context"), one_tensor_and_context),
    (("parallel.zero",), zero_runs),
    (tuple(f"model.layers.*.ffn.{key}" for key in ("experts", "groups", "top_groups", "top_k")), moe_groups),
    (("model.attention.head_dim.rope",), even_rope),
    (("model.mtp.depth",), one_mtp),
    (("data.tokenizer", "model.vocab"), vocabulary_fits),
    (("cluster.node.device.sms", "sm"), compute_keeps_sms),
)


# ---------------------------------------------------------------- what does not train yet


def trains_in_full_precision(spec: Spec) -> Iterator[Finding]:
    """One of the built-in FP64 and FP32 recipes, or one that equals it."""
    dtypes = {
        role: getattr(spec.precision, role)
        for role in (
            "parameter", "compute", "linear", "accumulate", "gradients", "master", "moments", "dispatch", "combine",
        )
    }  # fmt: skip
    if len(set(dtypes.values())) == 1 and dtypes["parameter"] in ("fp64", "fp32"):
        return
    lower = ", ".join(f"{role} in {dtype}" for role, dtype in dtypes.items() if dtype not in ("fp64", "fp32"))
    message = f"precision {spec.precision.name} has {lower or 'several dtypes'}; training runs in fp64 or fp32"
    yield Finding("E1001", message, "precision", "write `precision = fp32`")


def trains_with_sigmoid(spec: Spec) -> Iterator[Finding]:
    """The gate of V3."""
    for index, span in enumerate(spec.model.layers):
        if isinstance(span.ffn, Moe) and span.ffn.score != "sigmoid":
            at = f"model.layers.{index}.ffn.score"
            yield Finding(
                "E1002", f"score = {span.ffn.score} is planned, not trained yet", at, "write `score = sigmoid`"
            )


def trains_without_recompute(spec: Spec) -> Iterator[Finding]:
    """Nothing is computed twice yet."""
    if spec.recompute:
        message = f"recompute of {', '.join(spec.recompute)} is planned, not run yet"
        yield Finding("E1003", message, "recompute", "write `recompute = []`")


def trains_under(spec: Spec) -> Iterator[Finding]:
    """Schedules that are written."""
    if spec.schedule.name not in RUNS:
        message = f"schedule {spec.schedule.name} is known, not run yet"
        yield Finding("E1004", message, "schedule.name", "write `name = dualpipe` or `name = 1f1b`")


REFUSALS: tuple[Rule, ...] = (
    trains_in_full_precision,
    trains_with_sigmoid,
    trains_without_recompute,
    trains_under,
)
