"""What blocks of a model hold on a device that runs them, and of how many micro-batches: what `balance` breaks ties by.

A block holds its weights, gradients and part of the optimizer's state all the time; of a micro-batch, what its backward
reads from the end of its forward on; and what weight gradients read that are put off. Left out are the few values that
only the action that runs has: they do not hang on which layers are on which stage.
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
from compiler.schedule import AUTO, DEFAULT_CHUNKS, schedule_of, stand_in
from compiler.schedule.schedule import Schedule
from dsl.closed_forms import ramp
from dsl.closed_forms.memory import bytes_per_element
from dsl.schema import Spec
from runtime.contract.actions import actions_of

MOST_MOMENTS = 64  # of a rank: more are looked at as one that has the most of each stage at the same time


def holding_of(model: CutModel, chains: Sequence[Chains], copies: int, room: Sequence[int]) -> Holding:
    """What the blocks of a model hold, by the `chains` of each; moments are left out. `copies`: ranks that hold each
    stage; `room`: bytes of each rank's device."""
    steps_of = {id(each): (each, block.steps) for each, block in zip(chains, model.blocks, strict=True)}
    bytes_of: dict[int, Bytes] = {
        key: (sum(_always(model, steps, copies).values()), kept_bytes(each, "F"), kept_bytes(each, "I"))
        for key, (each, steps) in steps_of.items()
    }
    first, *layers, last = (bytes_of[id(each)] for each in chains)
    before, behind = (_always(model, model.blocks[at].steps, copies) for at in (0, -1))
    shared = sum(size for tensor, size in before.items() if tensor in behind)
    return Holding(tuple(layers), first, last, shared, (), tuple(room))


# ---------------------------------------------------------------- of a block


def _always(model: CutModel, steps: Iterable[StageStep], copies: int) -> dict[str, int]:
    """Bytes that a device holds at least for each tensor of a block: memory_state.py has them to the byte, with padding
    and the balancing biases, once there is a plan. `copies`: ranks that hold each stage."""
    spec = model.spec
    p, optimizer = spec.parallel, spec.train.optimizer
    sizes = [bytes_per_element(spec, row) for row in optimizer.rows]
    found: dict[str, int] = {}
    for use in (step for step in steps if isinstance(step, Use)):
        quantised = {each.param: each.num_bytes for each in model.cuts[use.site].quantised}
        for param, (_, tensor) in zip(use.segment.params, use.params, strict=True):
            slices = p.expert_tensor if param.stack else p.tensor
            groups = (p.expert if param.stack else 1) * (slices if param.split else 1)
            holders = max(1, p.columns // groups)  # on a pipeline rank
            frozen = param.role == "frozen"
            elements = prod(param.shape) if param.grad or frozen else 0
            size = sizes[optimizer.is_rest(param.matrices)]
            part = elements // (copies * holders) if p.zero else elements
            kept = [elements // holders if p.zero >= level else elements for level in (3, 2)]  # weights, and gradients
            trained = 0 if frozen else kept[1] * size.gradients + part * size.optimizer
            held = kept[0] * size.weights + trained
            found[tensor] = held + quantised.get(param.name, 0)
    return found


def kept_bytes(chains: Chains, kind: str) -> int:
    """What a block's F keeps of a micro-batch for its backward, or its I for its weight gradients.

    The hidden state that it takes is kept by the block that reads it, not by the one that made it.
    """
    kinds = {"F": ("F",), "I": ("F", "I")}[kind]
    buffers = {buffer.name: buffer for each in kinds for node in chains.of(each) for buffer in node.writes}
    taken = _taken(chains)
    for name, buffer in (taken | buffers).items():  # of values that other blocks give a gradient for
        buffers.setdefault(gradient_of(name), Buffer(gradient_of(name), buffer.shape, buffer.dtype))
    later = chains.of({"F": "B", "I": "W"}[kind])
    written = {buffer.name for node in later for buffer in node.writes}
    reads = {name for node in later for name in node.instruction.reads} - written
    if kind == "F":
        reads = {name for name in reads if not is_gradient(name)}
    sizes = taken | buffers
    roots = {_root(name, sizes) for name in reads if name in sizes}
    return sum(sizes[name].fixed_bytes + chains.rows * sizes[name].row_bytes for name in roots)


def _taken(chains: Chains) -> dict[str, Buffer]:
    """What the segments of a block take, as buffers of their own."""
    found: dict[str, Buffer] = {}
    for use in (step for step in chains.stage.steps if isinstance(step, Use)):
        inputs: Iterable[tuple[str, Input]] = zip(use.inputs, use.segment.inputs, strict=True)
        found |= {value: Buffer(value, each.shape, each.dtype) for value, each in inputs}
    return found


def _root(name: str, buffers: Mapping[str, Buffer]) -> str:
    """The value in whose storage a value lives."""
    while buffers[name].alias in buffers:
        name = buffers[name].alias
    return name


# ---------------------------------------------------------------- of how many micro-batches


def schedule_on(spec: Spec, stage_placement: StagePlacement, num_ranks: int) -> Schedule:
    """The schedule of a spec's largest batch, or one on the same stage placement where it is not known yet."""
    given = schedule_of_file(spec)
    if given is not None and given.num_ranks == num_ranks:
        return given
    count, name = ramp.micro_batches(spec)[-1], spec.schedule.name
    if name is not None and name != AUTO:
        found = schedule_of(name, num_ranks, count, spec.schedule.chunks or DEFAULT_CHUNKS)
        if found.stage_placement == stage_placement:
            return found
    return stand_in(stage_placement, num_ranks, count, prompt=False)


def moments_of(schedule: Schedule, within: bool = True) -> Moments:
    """The fullest moments of each pipeline rank: how often each of its stages holds (1, what a forward keeps, what is
    deferred). A moment is left out if another one holds as much of everything.

    `within` pairs, a forward is counted as if it ended before the backward gives anything back; else only what is left
    behind them.
    """
    return tuple(_moments(schedule, rank, within) for rank in range(schedule.num_ranks))


def _moments(schedule: Schedule, rank: int, within: bool) -> tuple[Moment, ...]:
    stages = schedule.stages_of(rank)
    kept, late = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    most: list[tuple[int, ...]] = []
    for step in schedule.actions[rank]:
        actions = sorted(actions_of(step), key=lambda each: each.kind != "F")
        for action in actions:
            s, kind = action.stage, action.kind
            if kind == "F":
                kept[s] += 1
            elif kind == "W":
                late[s] -= 1
            else:
                kept[s] -= 1
                late[s] += kind == "I"
            if kind in "FI" and (within or action is actions[-1]):
                most = _with((*(kept[s] for s in stages), *(late[s] for s in stages)), most)
    if len(most) > MOST_MOMENTS:
        most = [tuple(map(max, zip(*most, strict=True)))]
    half = len(stages)
    return tuple(tuple((1, one[i], one[half + i]) for i in range(half)) for one in most)


def _with(one: tuple[int, ...], most: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """With one more, unless another has all of it; those that have no more than it are left out."""
    if any(all(map(int.__le__, one, other)) for other in most):
        return most
    return [*(other for other in most if not all(map(int.__le__, other, one))), one]
