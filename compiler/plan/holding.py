"""The memory that blocks of a model take on a device, and for how many micro-batches: the split of layers needs both.

A block always holds its weights, gradients and part of the optimizer state. For each micro-batch it holds the values
that its backward reads, from the end of its forward on, and those that deferred weight gradients read. Values of the
running action alone are left out: they hardly depend on the split of layers over stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from compiler.ir import Buffer, Input, StageStep, Use
from compiler.ir.names import gradient_of, is_gradient
from compiler.ir.stage_placement import StagePlacement
from compiler.plan.actions.chains import Chains
from compiler.plan.blocks import CutModel
from compiler.plan.layer_runs import Bytes, Holding, Moment, Moments
from compiler.plan.spec_files import schedule_of_file
from compiler.schedule import AUTO, schedule_of_block, stand_in
from compiler.schedule.schedule import Schedule
from dsl.closed_forms import ramp
from dsl.closed_forms.memory import bytes_per_element, kept_under_zero
from dsl.schema import Spec
from runtime.contract.actions import Action, actions_of

MOST_MOMENTS = 64  # of a rank; more are merged into one moment that has the most of each stage


def holding_of(model: CutModel, chains: Sequence[Chains], copies: int, room: Sequence[int]) -> Holding:
    """The memory of a model's blocks, from the `chains` of each, without moments.

    `copies`: number of ranks that hold each stage. `room`: bytes of each rank's device.
    """
    steps_of = {
        id(block_chains): (block_chains, block.steps) for block_chains, block in zip(chains, model.blocks, strict=True)
    }
    bytes_of: dict[int, Bytes] = {
        key: (sum(_always(model, steps, copies).values()), kept_bytes(block_chains, "F"), kept_bytes(block_chains, "I"))
        for key, (block_chains, steps) in steps_of.items()
    }
    first, *layers, last = (bytes_of[id(block_chains)] for block_chains in chains)
    before, behind = (_always(model, model.blocks[index].steps, copies) for index in (0, -1))
    shared = sum(size for tensor, size in before.items() if tensor in behind)
    return Holding(tuple(layers), first, last, shared, (), tuple(room))


# ---------------------------------------------------------------- memory of a block


def _always(model: CutModel, steps: Iterable[StageStep], copies: int) -> dict[str, int]:
    """By tensor of a block, a lower bound of the bytes that a device always holds for it.

    Once there is a plan, memory_state.py computes them to the byte, with padding and balancing biases. `copies`: number
    of ranks that hold each stage.
    """
    spec = model.spec
    p, optimizer = spec.parallel, spec.train.optimizer
    sizes = [bytes_per_element(spec, row) for row in optimizer.rows]
    tensor_bytes: dict[str, int] = {}
    for use in (step for step in steps if isinstance(step, Use)):
        quantised = {weight.param: weight.num_bytes for weight in model.cuts[use.site].quantised}
        for param, (_, tensor) in zip(use.segment.params, use.params, strict=True):
            slices = p.expert_tensor if param.stack else p.tensor
            groups = (p.expert if param.stack else 1) * (slices if param.split else 1)
            holders = max(1, p.columns // groups)  # on a pipeline rank
            frozen = param.role == "frozen"
            elements = prod(param.shape) if param.grad or frozen else 0
            size = sizes[optimizer.is_rest(param.matrices)]
            shard, owned = elements * p.copies // holders, elements // (copies * holders)
            rank_bytes = kept_under_zero(p.zero, elements, shard, owned).bytes(size)
            tensor_bytes[tensor] = (rank_bytes.weights if frozen else rank_bytes.total) + quantised.get(param.name, 0)
    return tensor_bytes


def kept_bytes(chains: Chains, kind: str) -> int:
    """Bytes that a block's F keeps of a micro-batch for its backward, or its I for its weight gradients.

    A hidden state counts for the block that reads it, not for the one that produces it.
    """
    kinds = {"F": ("F",), "I": ("F", "I")}[kind]
    buffers = {buffer.name: buffer for action in kinds for node in chains.chain(action) for buffer in node.writes}
    inputs = _input_buffers(chains)
    for name, buffer in (inputs | buffers).items():  # of values whose gradient comes from other blocks
        buffers.setdefault(gradient_of(name), Buffer(gradient_of(name), buffer.shape, buffer.dtype))
    later = chains.chain({"F": "B", "I": "W"}[kind])
    written = {buffer.name for node in later for buffer in node.writes}
    reads = {name for node in later for name in node.instruction.reads} - written
    if kind == "F":
        reads = {name for name in reads if not is_gradient(name)}
    sizes = inputs | buffers
    roots = {_root(name, sizes) for name in reads if name in sizes}
    return sum(sizes[name].fixed_bytes + chains.rows * sizes[name].row_bytes for name in roots)


def _input_buffers(chains: Chains) -> dict[str, Buffer]:
    """The inputs of a block's segments, as buffers."""
    buffers: dict[str, Buffer] = {}
    for use in (step for step in chains.stage.steps if isinstance(step, Use)):
        inputs: Iterable[tuple[str, Input]] = zip(use.inputs, use.segment.inputs, strict=True)
        buffers |= {value: Buffer(value, argument.shape, argument.dtype) for value, argument in inputs}
    return buffers


def _root(name: str, buffers: Mapping[str, Buffer]) -> str:
    """The value whose storage a value shares."""
    while buffers[name].alias in buffers:
        name = buffers[name].alias
    return name


# ---------------------------------------------------------------- number of micro-batches


def schedule_on(spec: Spec, stage_placement: StagePlacement, num_ranks: int) -> Schedule:
    """The schedule of a spec's largest batch, or a stand-in on the same stage placement if it is not known yet."""
    from_file = schedule_of_file(spec)
    if from_file is not None and from_file.num_ranks == num_ranks:
        return from_file
    count, name = ramp.micro_batches(spec)[-1], spec.schedule.name
    if name is not None and name != AUTO:
        schedule = schedule_of_block(spec.schedule, num_ranks, count)
        if schedule.stage_placement == stage_placement:
            return schedule
    return stand_in(stage_placement, num_ranks, count, prompt=False).deferring_at_most(spec.schedule.deferred)


def moments_of(schedule: Schedule, within: bool = True) -> Moments:
    """The fullest moments of each pipeline rank.

    A moment says, for each stage of the rank, how often it holds (its state: 1, what a forward keeps, what is
    deferred). Moments that hold no more of anything than another one are left out. With `within`, moments inside pairs
    count too, as if the forward of a pair ended before its backward frees anything; otherwise only the ends of pairs.
    """
    return tuple(_moments(schedule, rank, within) for rank in range(schedule.num_ranks))


def _moments(schedule: Schedule, rank: int, within: bool) -> tuple[Moment, ...]:
    stages = schedule.stages_of(rank)
    forwards, deferred = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    moments: list[tuple[int, ...]] = []
    seen: set[tuple[int, ...]] = set()  # most moments of a long schedule repeat
    for step in schedule.actions[rank]:
        actions: Sequence[Action] = actions_of(step)
        if len(actions) > 1:
            actions = sorted(actions, key=lambda action: action.kind != "F")
        for action in actions:
            s, kind = action.stage, action.kind
            if kind == "F":
                forwards[s] += 1
            elif kind == "W":
                deferred[s] -= 1
            else:
                forwards[s] -= 1
                deferred[s] += kind == "I"
            if kind in "FI" and (within or action is actions[-1]):
                moment = (*[forwards[s] for s in stages], *[deferred[s] for s in stages])
                if moment not in seen:
                    seen.add(moment)
                    moments = _add_moment(moment, moments)
    if len(moments) > MOST_MOMENTS:
        moments = [tuple(map(max, zip(*moments, strict=True)))]
    half = len(stages)
    return tuple(tuple((1, moment[i], moment[half + i]) for i in range(half)) for moment in moments)


def _add_moment(moment: tuple[int, ...], moments: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Add a moment unless another one has as much of everything. Drops those that have no more than it of anything."""
    if any(all(map(int.__le__, moment, listed)) for listed in moments):
        return moments
    return [*(listed for listed in moments if not all(map(int.__le__, listed, moment))), moment]
