"""Values that follow from others: the data degree, the default schedule, tokens from steps.

The other values are read silently: their own mistakes are reported where they are resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from dsl.closed_forms import ramp as ramps
from dsl.facts.devices import FIELDS as PEAK_FIELDS
from dsl.facts.devices import peaks_of
from dsl.facts.schedules import DEFAULT_CHUNKS, default_of, facts_of
from dsl.messages.diagnostics import Span
from dsl.resolve.context import Context, RejectedError, Scope
from dsl.resolve.evaluate import STEP, TOKEN, convert, phrase, whole_number
from dsl.resolve.merge import key_of, lost_keys
from dsl.schema import Batch, Device, MoreNodes, Node, Parallel, PhaseWithin, ScheduleBlock, Sm, Spec, StoredUnit, Train
from dsl.schema.base import MAX_TOKENS, broken_bound, fields_of
from dsl.schema.parallel import MAX_DEGREE
from dsl.text.syntax import Attribute, Block, Word


def peek(context: Context, path: str) -> Any:
    """Return the value at a path of the run, such as `cluster.node.devices`, or its default.

    Raises RejectedError if there is none, or if it is out of bounds.
    """
    silent = context.silent_copy()
    *parents, name = path.split(".")
    cls: type[Node] = Spec
    scope = Scope((context.run,))
    block: Block | None = context.run
    for part in parents:
        cls = fields_of(cls)[part].nodes[0]
        statement = _statement(block, part)
        if isinstance(statement, Attribute):
            word = statement.phrase.items[0]
            if not isinstance(word, Word):
                raise RejectedError
            block = silent.block(part, word.text, word.span)
            scope = Scope((block,), part)
        elif isinstance(statement, Block):
            block, scope = statement, scope.inner_scope(statement, part)
        else:
            block = None
    statement = _statement(block, name)
    if statement is None:
        if block is not None and name in lost_keys(block):
            raise RejectedError
        default = DEFAULTS.get(cls, {}).get(name)
        info = cls.model_fields[name]
        if default is not None:
            return default(silent)
        if info.is_required():
            raise RejectedError
        return info.default
    assert isinstance(statement, (Attribute, Block))
    value = context.read_field(silent, scope, cls, name, statement)
    if broken_bound(fields_of(cls)[name], value) is not None:
        raise RejectedError
    return value


def _statement(block: Block | None, name: str) -> Any:
    if block is None:
        return None
    return next(
        (
            statement
            for statement in block.body
            if key_of(statement) == name and isinstance(statement, (Attribute, Block))
        ),
        None,
    )


def _positive_number(context: Context, path: str) -> int:
    value = peek(context, path)
    if not isinstance(value, int) or value < 1:
        raise RejectedError
    return value


def _devices_of_more(block: MoreNodes | None) -> int:
    """The number of devices in `cluster.more`. Raises RejectedError if a part of it could not be read."""
    if block is None:
        return 0
    try:
        return block.nodes * block.node.devices + _devices_of_more(block.more)
    except AttributeError:
        raise RejectedError from None


def data_degree(context: Context, span: Span | None = None) -> int:
    """`data = auto`: the devices of the cluster divided by the pipeline, tensor and context degrees."""
    world = _positive_number(context, "cluster.nodes") * _positive_number(context, "cluster.node.devices")
    world += _devices_of_more(peek(context, "cluster.more"))
    pipeline, *splits = (_positive_number(context, f"parallel.{name}") for name in ("pipeline", "tensor", "context"))
    ranks = pipeline * prod(splits)
    place = span or context.origins.get("parallel.pipeline") or context.origins.get("parallel") or context.run.head
    if world % ranks == 0 and world // ranks > MAX_DEGREE:
        degree = f"data = {world // ranks:,}"
        message = f"the cluster's {world:,} devices leave {degree}, but at most {MAX_DEGREE:,} are possible"
        raise context.reject("E0801", message, place, "plan for fewer devices")
    if world % ranks == 0:
        return world // ranks
    devices = f"{world:,} device{'s'[: world > 1]}"
    split = {name: degree for name, degree in zip(("tensor", "context"), splits, strict=True) if degree > 1}
    of_split = "".join(f" · {name} {degree:,}" for name, degree in split.items())
    message = f"the cluster's {devices} cannot be divided into pipelines of {pipeline:,}{of_split}"
    possible = (count for count in range(1, min(pipeline, world) + 1) if world % (count * prod(splits)) == 0)
    nearest_pipeline = max(possible, default=0)
    hint = (
        f"write `pipeline = {nearest_pipeline}`"
        if nearest_pipeline
        else " and ".join(f"write `{name} = 1`" for name in split)
    )
    raise context.reject("E0801", message, place, hint)


def default_schedule(context: Context) -> ScheduleBlock:
    """The default schedule for the number of pipeline ranks."""
    return ScheduleBlock.model_construct(name=default_of(peek(context, "parallel.pipeline")))


def default_name(context: Context) -> str | None:
    """The name of the default schedule; None if the schedule is a file."""
    return default_schedule(context).name if peek(context, "schedule.file") is None else None


def default_chunks(context: Context) -> int | None:
    """Default stages per rank; None if the schedule fixes them."""
    return DEFAULT_CHUNKS if facts_of(peek(context, "schedule.name")).is_chunked else None


def default_parallel(context: Context) -> Parallel:
    """The default degrees: only data parallelism."""
    return Parallel.model_construct(data=data_degree(context))


def communicating_sms(context: Context) -> int:
    """Default of `sm.communication`: 20 of 132 SMs, as in DeepSeek-V3 (arXiv 2412.19437, 3.2.2), and the same share of
    other devices. With several kinds of devices, the share of the smallest one.

    These SMs exchange token rows of expert, tensor or context ranks while another micro-batch computes, and sharded
    state while the same micro-batch computes. 0 if nothing overlaps: an action that waits for its rows can use all SMs.
    """
    try:
        shards_state = peek(context, "parallel.zero") > 1 and peek(context, "parallel.data") > 1
        axes = ("expert", "expert_tensor", "tensor", "context")
        exchanges_rows = any(peek(context, f"parallel.{axis}") > 1 for axis in axes)
        if not shards_state and not (exchanges_rows and facts_of(peek(context, "schedule.name")).overlaps):
            return 0
        sms, more_nodes = [peek(context, "cluster.node.device").sms], peek(context, "cluster.more")
        while more_nodes is not None:
            sms, more_nodes = [*sms, more_nodes.node.device.sms], more_nodes.more
    except (RejectedError, AttributeError):
        return 0
    return 0 if None in sms else min(sms) * 20 // 132


def default_sm(context: Context) -> Sm:
    return Sm.model_construct(communication=communicating_sms(context))


DEFAULTS: dict[type[Node], dict[str, Callable[[Context], Any]]] = {
    Parallel: {"data": data_degree},
    ScheduleBlock: {"name": default_name, "chunks": default_chunks},
    Sm: {"communication": communicating_sms},
    Train: {"within": lambda context: context.within},
    Spec: {"parallel": default_parallel, "schedule": default_schedule, "sm": default_sm},
}


def values_of_name(cls: type[Node], values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that follow from the name of a block: the peaks of a device with a known data sheet."""
    peaks = peaks_of(values.get("name") or "") if cls is Device else None
    return {} if peaks is None else {field: getattr(peaks, field) for field in PEAK_FIELDS}


# ---------------------------------------------------------------- steps and tokens


def ramp_of(context: Context) -> ramps.Ramp | None:
    """The batch ramp of the whole run, including earlier phases; None if a value that it needs has failed."""
    ramp = own_ramp(context)
    try:
        place_in_run: PhaseWithin | None = peek(context, "train.within")
        return ramp and (
            ramp.with_earlier_sizes(context.earlier_sizes, place_in_run.first_step, place_in_run.first_token)
            if place_in_run
            else ramp
        )
    except (RejectedError, AttributeError):  # AttributeError: a part of `within` has failed
        return None


def own_ramp(context: Context) -> ramps.Ramp | None:
    """The batch ramp from the beginning of this phase; None if a value that it needs has failed."""
    try:
        batch: Batch = peek(context, "train.batch")
        sequence, micro_batch = (_positive_number(context, f"train.{name}") for name in ("sequence", "micro_batch"))
        quantum = 2 * _positive_number(context, "parallel.data") * micro_batch
    except RejectedError:
        return None
    if batch.end < batch.start or ramps.num_sizes(batch, quantum) > ramps.MAX_SIZES:
        return None
    return ramps.ramp(batch, sequence, quantum)


def tokens_of_steps(context: Context, scope: Scope, statement: Attribute | Block) -> int:
    """`steps = 150`: the tokens in that many steps from the beginning of the run or phase."""
    if isinstance(statement, Block):
        raise context.reject("E0204", "`steps` is a value, not a block", statement.head, "write `steps = 1000`")
    span = statement.phrase.span
    quantity = phrase(context, scope, statement.phrase)
    steps = whole_number(
        context, convert(context, quantity, StoredUnit("step", bare=True), "steps", span), span, "steps"
    )
    if not 1 <= steps <= 10**9:
        message = f"`steps = {span.text}` is out of bounds: at least 1 and at most 1,000,000,000"
        raise context.reject("E0303", message, span, "write `steps = 1000`")
    ramp = own_ramp(context)
    if ramp is None:
        raise RejectedError
    tokens = ramp.tokens_at(steps)
    if tokens > MAX_TOKENS:
        message = f"`steps = {span.text}` are {tokens:,} tokens: at most {MAX_TOKENS:,}"
        raise context.reject("E0303", message, span, "write fewer steps")
    return tokens


def total_tokens(context: Context) -> int | None:
    """Tokens of the run or phase; None if unknown."""
    train = _statement(context.run, "train")
    if not isinstance(train, Block):
        return None
    for statement in train.body:
        if key_of(statement) not in ("tokens", "steps") or not isinstance(statement, Attribute):
            continue
        silent, scope = context.silent_copy(), Scope((context.run, train), "train")
        try:
            quantity = phrase(silent, scope, statement.phrase)
            if key_of(statement) == "steps" or quantity.dimension == STEP:
                return tokens_of_steps(silent, scope, statement)
            value = convert(silent, quantity, StoredUnit("token", bare=True), "tokens", statement.phrase.span)
        except RejectedError:
            return None
        return int(value) if value.denominator == 1 and 0 < value <= MAX_TOKENS else None
    return None


def tokens_at_end(context: Context) -> int | None:
    """Tokens of the run at the end of this phase; None if unknown."""
    tokens, ramp = total_tokens(context), ramp_of(context)
    if tokens is None or ramp is None:
        return None
    return tokens + ramp.sizes[len(context.earlier_sizes)].first_token


__all__ = [
    "DEFAULTS",
    "STEP",
    "TOKEN",
    "data_degree",
    "own_ramp",
    "peek",
    "ramp_of",
    "tokens_at_end",
    "tokens_of_steps",
    "total_tokens",
    "values_of_name",
]
