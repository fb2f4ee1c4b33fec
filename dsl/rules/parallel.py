"""Rules on the degrees of parallelism, the batch and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate
from math import gcd

from dsl.closed_forms import ramp
from dsl.closed_forms.memory import ITEMSIZE
from dsl.closed_forms.stages import fewest_stages_of_rank, most_stages, most_stages_of_rank, stages_of_rank
from dsl.facts.devices import group_nodes
from dsl.facts.layout import LayoutError, stages_of_layout
from dsl.facts.schedules import AUTO, CHUNKED, PLAIN, facts_of, join_names
from dsl.facts.units import exact_text
from dsl.rules.finding import Finding, nearest_divisor, nearest_multiple
from dsl.schema import Compressed, CustomAttention, DeltaNet, Moe, Parallel, Spec

MOST_HINTED = 16  # the most caps that a hint lists
MAX_PLANNED = 2**18  # micro-batches of all stages of all ranks and sizes of the batch


def world_is_used(spec: Spec) -> Iterator[Finding]:
    """world = pipeline·data·tensor·context."""
    p, world = spec.parallel, spec.cluster.world
    used = p.pipeline * p.data * p.tensor * p.context
    if used == world:
        return
    split = p.tensor * p.context
    ranks = p.pipeline * split
    degrees = f"{p.pipeline}·{p.data}·{p.tensor}·{p.context} = {used:,}"
    message = f"pipeline·data·tensor·context = {degrees}, but the cluster has {world:,} devices"
    hint = (
        "write `data = auto`"
        if world % ranks == 0
        else f"write `pipeline = {nearest_divisor(world // split, p.pipeline)}` and `data = auto`"
        if world % split == 0
        else "write `tensor = 1`, `context = 1` and `data = auto`"
        if p.context > 1
        else "write `tensor = 1` and `data = auto`"
    )
    notes = (("devices of a node", "cluster.node.devices"), ("nodes", "cluster.nodes"))
    yield Finding("E0801", message, "parallel.data", hint, notes)


def data_ranks_are_of_one_kind(spec: Spec) -> Iterator[Finding]:
    """The data ranks of a pipeline rank run the same stages, and so need devices of one kind."""
    columns, pipeline, world = spec.parallel.columns, spec.parallel.pipeline, spec.cluster.world
    sizes = [nodes * node.devices for nodes, node in spec.cluster.parts]
    if not _fits(spec):
        return
    for index, earlier_devices in enumerate(accumulate(sizes[:-1]), 1):
        if earlier_devices % columns:
            ranks = f"{columns} {'data ' * (columns == spec.parallel.data)}ranks"
            message = f"pipeline rank {earlier_devices // columns} has {ranks}, on devices of two kinds"
            degrees = [
                degree for degree in range(1, world + 1) if world % degree == 0 and gcd(*sizes) % (world // degree) == 0
            ]
            closest = min(degrees, key=lambda degree: (abs(degree - pipeline), degree))
            hint = f"write `pipeline = {closest}` and `data = auto`"
            notes = (("the other kind begins here", f"cluster.{'more.' * index}node"),)
            yield Finding("E0817", message, "parallel.pipeline", hint, notes)
            return


def expert_divides_columns(spec: Spec) -> Iterator[Finding]:
    """Expert groups are neighbouring ranks of a stage; for experts, a tensor or context rank counts as a data rank."""
    p = spec.parallel
    if p.columns % p.expert_group:
        degrees = {"data": p.data} | {name: n for name in ("tensor", "context") if (n := getattr(p, name)) > 1}
        split = p.expert_tensor > 1
        group = f"·expert_tensor = {p.expert}·{p.expert_tensor}" if split else ""
        message = f"expert{group} = {p.expert_group} does not divide {'·'.join(degrees)} = {p.columns}"
        hint = f"write `expert = {nearest_divisor(p.columns // gcd(p.columns, p.expert_tensor), p.expert)}`"
        hint += " and `expert_tensor = 1`" if p.columns % p.expert_tensor else ""
        names = [*degrees, *(["expert_tensor"] if split else [])]
        notes = tuple((f"{name} is given here", f"parallel.{name}") for name in names)
        yield Finding("E0802", message, "parallel.expert", hint, notes)


def experts_are_spread(spec: Spec) -> Iterator[Finding]:
    """Each expert rank holds the same number of experts, in every layer."""
    expert = spec.parallel.expert
    columns = spec.parallel.columns // gcd(spec.parallel.columns, spec.parallel.expert_tensor)
    divisor = gcd(columns, *(span.ffn.experts for span in spec.model.layers if isinstance(span.ffn, Moe)))
    for index, span in enumerate(spec.model.layers):
        if isinstance(span.ffn, Moe) and span.ffn.experts % expert:
            message = f"{span.ffn.experts} experts cannot be spread over expert = {expert} ranks"
            hint = f"write `expert = {nearest_divisor(divisor, expert)}`, or a multiple of {expert} experts"
            note = ("the experts", f"model.layers.{index}.ffn.experts")
            yield Finding("E0803", message, "parallel.expert", hint, (note,))


def rows_go_through_nodes(spec: Spec) -> Iterator[Finding]:
    """`route = nodes`: a rank has a partner of the same index on each node of its group, which sums the returning
    rows."""
    group, split = spec.parallel.expert_group, spec.parallel.expert_tensor
    if spec.parallel.route != "nodes" or all(not isinstance(span.ffn, Moe) for span in spec.model.layers):
        return
    devices = [node.devices for _, node in spec.cluster.parts]
    sizes = [size for size in devices if group_nodes(size, group) is None]
    if sizes:
        message = f"route = nodes, but groups of {group} expert ranks do not fill nodes of {sizes[0]} devices"
        hint = f"write `route = flat`, or a multiple of {sizes[0]} expert ranks"
        yield Finding("E0818", message, "parallel.route", hint, (("the expert ranks", "parallel.expert"),))
    elif sizes := [size for size in devices if size % split]:
        message = (
            f"route = nodes, but nodes of {sizes[0]} devices do not hold whole experts, which have {split} ranks each"
        )
        note = ("the ranks of an expert", "parallel.expert_tensor")
        yield Finding("E0818", message, "parallel.route", "write `route = flat`", (note,))
    elif spec.precision.combine == "e4m3" and spec.routes_by_nodes:
        message = "route = nodes sums the returning token rows, but combine = e4m3 sends them in FP8"
        notes = (("the dtype of returning rows", "precision.combine"),)
        yield Finding("E0818", message, "parallel.route", "write `route = flat`", notes)


def _fits(spec: Spec) -> bool:
    """Whether the degrees multiply to the world; if not, only that mistake is reported, not what follows from it."""
    p = spec.parallel
    return p.pipeline * p.columns == spec.cluster.world


def even_pipeline(spec: Spec) -> Iterator[Finding]:
    """A schedule that feeds the pipeline from both ends needs an even pipeline: rank r holds stages r and P−1−r."""
    pipeline, name = spec.parallel.pipeline, spec.schedule.name
    placed = name == AUTO and spec.schedule.placement == "bidirectional"
    if (facts_of(name).needs_even or placed) and pipeline % 2:
        subject = "placement = bidirectional" if placed else name
        message = f"{subject} needs an even pipeline, but pipeline = {pipeline} is odd"
        pipeline_hint = f"write `pipeline = {pipeline - 1}`, or " if pipeline > 1 else "write "
        hint = f"{pipeline_hint}{'`placement = v`' if placed else f'`schedule {{ name = {PLAIN} }}`'}"
        note = ("the placement", "schedule.placement") if placed else ("the schedule", "schedule.name")
        yield Finding("E0804", message, "parallel.pipeline", hint, (note,))


def one_schedule(spec: Spec) -> Iterator[Finding]:
    """A schedule has either a name or a file."""
    name, file = spec.schedule.name, spec.schedule.file
    if name is not None and file is not None:
        message = f"the schedule has both the name {name} and a file"
        yield Finding("E0813", message, "schedule.file", "remove `name` or `file`", (("the name", "schedule.name"),))
    elif name is None and file is None:
        yield Finding("E0813", "the schedule has neither a name nor a file", "schedule.name", f"write `name = {PLAIN}`")


def options_of_schedules(spec: Spec) -> Iterator[Finding]:
    """`chunks` is for schedules with a variable number of stages; the other keys are for the search."""
    schedule, searched = spec.schedule, spec.schedule.name == AUTO
    chunked = facts_of(schedule.name).is_chunked or (searched and schedule.placement == "loop")
    for key, readers, reads in (
        ("chunks", CHUNKED, chunked),
        ("cap", (AUTO,), searched),
        ("host_copies", (AUTO,), searched),
        ("placement", (AUTO,), searched),
        ("copies", (AUTO,), searched),
    ):
        value = getattr(schedule, key)
        if value in (None, False) or reads:
            continue
        named = schedule.name is not None
        text = _value_text(value)
        message = (
            f"{key} = {text} is for {join_names(readers)}; "
            f"{f'schedule {schedule.name}' if named else 'a schedule file'} "
            f"{'uses it with placement = loop' if searched else 'does not use it'}"
        )
        alternative = "placement = loop" if searched else f"name = {readers[0]}"
        notes = (("the schedule", "schedule.name" if named else "schedule.file"),)
        yield Finding("E0814", message, f"schedule.{key}", f"remove `{key}`, or write `{alternative}`", notes)


def _value_text(value: Fraction | int | str | tuple[Fraction, ...]) -> str:
    """A value of a schedule block, as it is written in a spec."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(exact_text, value))}]"
    return exact_text(value) if isinstance(value, Fraction) else f"{value}".lower()


def caps_match_ranks(spec: Spec) -> Iterator[Finding]:
    """A list of caps has one number for each pipeline rank."""
    caps, ranks = spec.schedule.cap, spec.parallel.pipeline
    if isinstance(caps, tuple) and len(caps) != ranks and spec.schedule.name == AUTO:
        message = f"`cap` has {len(caps)} {'entries' if len(caps) > 1 else 'entry'}, but pipeline = {ranks}"
        padded = (*caps, *(caps[-1:] * ranks))[:ranks]
        hint = f"write `cap = {_value_text(padded)}`" if ranks <= MOST_HINTED else "write one for each pipeline rank"
        note = ("the pipeline ranks", "parallel.pipeline")
        yield Finding("E0820", message, "schedule.cap", hint, (note,))


def copied_activations_stay_in_order(spec: Spec) -> Iterator[Finding]:
    """Micro-batches are ordered by cost only for schedules without copies to the host."""
    schedule = spec.schedule
    if schedule.name == AUTO and schedule.host_copies and schedule.order == "cost":
        message = "host_copies = true plans copies for micro-batches in data order, but order = cost reorders them"
        note = ("the order", "schedule.order")
        yield Finding(
            "E0814", message, "schedule.host_copies", "remove `host_copies`, or write `order = drawn`", (note,)
        )


def copies_are_placed(spec: Spec) -> Iterator[Finding]:
    """A bidirectional pipeline needs two copies of each stage."""
    schedule = spec.schedule
    if schedule.name == AUTO and schedule.placement == "bidirectional" and schedule.copies == 1:
        message = "copies = 1, but placement = bidirectional has two copies of every stage"
        note = ("the placement", "schedule.placement")
        yield Finding("E0814", message, "schedule.copies", "remove `copies`, or write `placement = v`", (note,))


def batch_is_a_multiple_of_micro_batches(spec: Spec) -> Iterator[Finding]:
    """The batch is a multiple of the micro-batch, whatever the number of data ranks."""
    batch, micro_batch = spec.train.batch, spec.train.micro_batch
    constant = batch.start == batch.end
    for key, size in (("to", batch.end),) if constant else (("from", batch.start), ("to", batch.end)):
        if size % micro_batch:
            path = "train.batch" if constant else f"train.batch.{key}"
            message = f"a batch of {size:,} is not a multiple of micro_batch = {micro_batch:,}"
            hint = f"write `{'batch' if constant else key} = {nearest_multiple(size, micro_batch)}`"
            yield Finding("E0807", message, path, hint, (("micro_batch is given here", "train.micro_batch"),))


def batch_divides(spec: Spec) -> Iterator[Finding]:
    """Every data rank runs the same number of micro-batches, an even number if the schedule needs it."""
    p, train = spec.parallel, spec.train
    if not _fits(spec):
        return
    facts = facts_of(spec.schedule.name)
    unit = p.data * train.micro_batch
    smallest_batch = max(1, facts.fewest_micro_batches * p.pipeline) * unit
    notes = (("data is given here", "parallel.data"), ("micro_batch is given here", "train.micro_batch"))
    constant = train.batch.start == train.batch.end
    sizes = (("to", train.batch.end),) if constant else (("from", train.batch.start), ("to", train.batch.end))
    for key, size in sizes:
        path = "train.batch" if constant else f"train.batch.{key}"
        multiple = nearest_multiple(size, facts.multiple * unit)
        hint = f"write `{'batch' if constant else key} = {max(multiple, smallest_batch) if key == 'to' else multiple}`"
        if size % train.micro_batch:
            continue
        if size % unit:
            product = f"data·micro_batch = {p.data}·{train.micro_batch} = {unit:,}"
            yield Finding("E0807", f"a batch of {size:,} is not a multiple of {product}", path, hint, notes)
        elif facts.needs_even and size // unit % 2 and (key == "from" or size >= smallest_batch):
            count = f"{size // unit} micro-batches{_data_ranks_text(p.data)}"
            message = f"a batch of {size:,} makes {count}, but {spec.schedule.name} needs an even number"
            yield Finding("E0806", message, path, hint, notes)


def enough_micro_batches(spec: Spec) -> Iterator[Finding]:
    """The largest batch has enough micro-batches for the schedule's steady state; a ramp may begin with fewer."""
    p, train, name = spec.parallel, spec.train, spec.schedule.name
    facts, unit = facts_of(name), p.data * train.micro_batch
    largest, fewest_micro_batches = train.batch.end // unit, facts.fewest_micro_batches * p.pipeline
    if largest >= fewest_micro_batches or train.batch.end % unit or not _fits(spec):
        return
    count = f"a batch of {train.batch.end:,} makes {largest}{_data_ranks_text(p.data)}"
    ranks = f"{p.pipeline} rank{'s' if p.pipeline > 1 else ''}"
    message = f"{name} over {ranks} needs {fewest_micro_batches} micro-batches, but {count}"
    constant = train.batch.start == train.batch.end
    key = "batch" if constant else "to"
    hint = f"write `{key} = {fewest_micro_batches * unit}`, or `schedule {{ name = {facts.roomier} }}`"
    paths = ("parallel.pipeline", "parallel.data", "train.micro_batch")
    notes = tuple((f"{path.rpartition('.')[2]} is given here", path) for path in paths)
    yield Finding("E0805", message, "train.batch" if constant else "train.batch.to", hint, notes)


def _data_ranks_text(data_ranks: int) -> str:
    return f" on each of {data_ranks} data ranks" if data_ranks > 1 else ""


def schedules_are_bounded(spec: Spec) -> Iterator[Finding]:
    """Bound the work of planning: every batch size has a schedule, whose proof takes about 1 ms per micro-batch.

    DeepSeek-V3's run has 49 sizes, and 56,448 micro-batches on all ranks.
    """
    p, train = spec.parallel, spec.train
    unit = p.data * train.micro_batch
    if not _fits(spec) or train.batch.end < train.batch.start:
        return
    sizes = ramp.num_sizes(train.batch, ramp.quantum_of(p, train.micro_batch))
    stages = p.pipeline * most_stages_of_rank(spec.schedule, p.pipeline)
    planned = stages * sizes * (train.batch.start + train.batch.end) // (2 * unit)
    if sizes > ramp.MAX_SIZES or planned <= MAX_PLANNED:
        return
    constant = train.batch.start == train.batch.end
    ranks = f"{p.pipeline} pipeline rank{'s' if p.pipeline > 1 else ''}"
    ranks += f" of {stages // p.pipeline} stages" if stages > p.pipeline else ""
    subject = f"a batch of {train.batch.end:,} makes" if constant else f"the {sizes:,} sizes of the batch make"
    message = f"{subject} {planned:,} micro-batches on {ranks}, more than the limit of {MAX_PLANNED:,}"
    limit = MAX_PLANNED // stages // 2 * 2 * unit
    hint = f"write `batch = {limit}` or less" if constant else "grow it by less"
    yield Finding(
        "E0811",
        message,
        "train.batch",
        f"{hint}, or write a larger `micro_batch`",
        (("micro_batch is given here", "train.micro_batch"),),
    )


def stages_have_layers(spec: Spec) -> Iterator[Finding]:
    """No stage is empty. The first has the embedding and the last the head, so these two may have no layers."""
    per_rank = fewest_stages_of_rank(spec.schedule)
    stages, layers = spec.parallel.pipeline * per_rank, spec.model.num_layers
    if stages > most_stages(layers):
        on_ranks = f" ({per_rank} on each of {spec.parallel.pipeline} ranks)" if per_rank > 1 else ""
        message = f"{stages} stages{on_ranks} for {layers} layers; only the first and the last may have no layer"
        limit = (layers + 2) // per_rank
        needs_even = facts_of(spec.schedule.name).needs_even or spec.schedule.placement == "bidirectional"
        limit -= limit % 2 if needs_even and limit > 1 else 0
        hint = f"write `pipeline = {limit}`" if limit else f"write `schedule {{ name = {PLAIN} }}`"
        yield Finding("E0808", message, "parallel.pipeline", hint)


def sequences_are_split(spec: Spec) -> Iterator[Finding]:
    """Each context rank has two chunks of every sequence, all of equal size."""
    context, sequence = spec.parallel.context, spec.train.sequence
    if context > 1 and sequence % (2 * context):
        message = (
            f"context = {context} splits a sequence into {2 * context} equal chunks, but {sequence:,} tokens do "
            f"not divide by {2 * context}"
        )
        nearest_sequence = nearest_multiple(sequence, 2 * context)
        hint = (
            f"write `sequence = {nearest_sequence}`, or `context = {nearest_divisor(max(1, sequence // 2), context)}`"
        )
        note = ("the sequence", "train.sequence")
        yield Finding("E0809", message, "parallel.context", hint, (note,))


def attention_is_split(spec: Spec) -> Iterator[Finding]:
    """Custom, compressed and linear attention need whole sequences, which no context rank has."""
    reasons = {
        CustomAttention: "custom attention needs whole sequences",
        Compressed: "compressed attention needs whole sequences",
        DeltaNet: "linear attention needs whole sequences",
    }
    attentions = [(path, reasons[type(part)]) for path, part in spec.model.attentions if type(part) in reasons]
    if spec.parallel.context > 1 and attentions:
        (path, reason), *_ = attentions
        message = f"context = {spec.parallel.context}: {reason}"
        yield Finding("E0809", message, "parallel.context", "write `context = 1`", (("which is given here", path),))


def zero_runs(spec: Spec) -> Iterator[Finding]:
    """ZeRO 2 and 3 shard gradients and weights elementwise; low-precision copies of the weights are not sharded."""
    zero, precision, optimizer = spec.parallel.zero, spec.precision, spec.train.optimizer
    if zero < 2:
        return
    sharded = "gradients" if zero == 2 else "gradients and weights"
    if optimizer.unit == "matrix":
        message = f"zero = {zero} shards {sharded} elementwise, but {optimizer.kind} updates whole matrices"
        note = ("the optimizer", "train.optimizer")
        yield Finding("E0810", message, "parallel.zero", "write `zero = 1`", (note,))
    elif zero == 3 and ITEMSIZE[precision.linear] == 1:
        message = (
            f"zero = 3 shards weights, but products in {precision.linear} read copies of whole weights on every data "
            "rank"
        )
        yield Finding("E0810", message, "parallel.zero", "write `zero = 2`", (("the precision", "precision"),))


def shards_divide_data(spec: Spec) -> Iterator[Finding]:
    """Groups of data ranks that shard gradients or weights are of one size, and hold whole expert groups."""
    p = spec.parallel
    if p.shard is None:
        return
    note = ("the data ranks", "parallel.data")
    if p.zero < 2:
        message = f"shard = {p.shard}, but zero = {p.zero} shards neither gradients nor weights"
        hint = "write `zero = 2` or `zero = 3`, or remove `shard`"
        yield Finding("E0821", message, "parallel.shard", hint, (("the sharding", "parallel.zero"),))
    elif p.data % p.shard:
        message = f"shard = {p.shard} does not divide data = {p.data}"
        yield Finding("E0821", message, "parallel.shard", _hint_of_shard(p), (note,))
    elif p.shard * p.tensor * p.context % p.expert_group and p.columns % p.expert_group == 0:
        split = {name: n for name in ("tensor", "context") if (n := getattr(p, name)) > 1}
        names = "·".join(("shard", *split))
        message = (
            f"{names} = {p.shard * p.tensor * p.context} is not a multiple of the {p.expert_group} ranks of an expert "
            "group"
        )
        notes = (("the expert ranks", "parallel.expert"), note)
        yield Finding("E0821", message, "parallel.shard", _hint_of_shard(p), notes)


def _hint_of_shard(p: Parallel) -> str:
    """The nearest size of a group that divides the data ranks and has whole expert groups."""
    sizes = [
        size
        for size in range(1, p.data + 1)
        if p.data % size == 0 and size * p.tensor * p.context % p.expert_group == 0
    ]
    size = min(sizes, key=lambda size: (abs(size - (p.shard or size)), size), default=p.data)
    return f"write `shard = {size}`" if size < p.data else "remove `shard`"


def layout_fits_the_model(spec: Spec) -> Iterator[Finding]:
    """A layout has every layer of the model, on as many stages as the schedule has."""
    layout, model = spec.parallel.layout, spec.model
    if layout is None:
        return
    notes = (("the layers", f"model.layers.{len(model.layers) - 1}"),)
    try:
        runs = stages_of_layout(layout, model.num_layers, model.mtp.depth if model.mtp else 0)
    except LayoutError as error:
        yield Finding("E0815", str(error), "parallel.layout", "remove `layout`, for stages of equal cost", notes)
        return
    stages = spec.parallel.pipeline * stages_of_rank(spec)
    if spec.schedule.file is None and len(runs) != stages:
        a_rank = f" of {stages // spec.parallel.pipeline} stages" if stages > spec.parallel.pipeline else ""
        ranks = f"{spec.parallel.pipeline} pipeline rank{'s' if spec.parallel.pipeline > 1 else ''}{a_rank}"
        message = f"the layout has {len(runs)} stages, but {ranks} have {stages}"
        hint = f"write {stages - 1} `|` in it, or remove `layout`"
        yield Finding("E0815", message, "parallel.layout", hint, (("the ranks", "parallel.pipeline"),))


def placement_has_experts(spec: Spec) -> Iterator[Finding]:
    """A placement needs experts, and several ranks to spread them over."""
    if spec.parallel.placement is None:
        return
    if not any(isinstance(span.ffn, Moe) for span in spec.model.layers):
        notes = (("the layers", f"model.layers.{len(spec.model.layers) - 1}"),)
        yield Finding("E0816", "no layer has experts to place", "parallel.placement", "remove `placement`", notes)
    elif spec.parallel.expert == 1:
        note = ("the expert ranks", "parallel.expert")
        message = "expert = 1: all experts are on one rank, so there is nothing to place"
        yield Finding("E0816", message, "parallel.placement", "remove `placement`", (note,))
