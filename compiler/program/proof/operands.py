"""The operands of every instruction of a stage, derived only from the plan's stage and the cuts of its segments.

This is a second derivation, independent of lowering. The proof compares the two, with their order, as emitted code
passes operands by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from compiler.ir import Buffer, Communication, Cut, Instruction, Plan, ShardedTensors, Signature, Stage, Use
from compiler.ir.names import accumulator_of, gradient_of
from compiler.ir.program import GATHERS

Cuts = Mapping[str, Cut]  # by site of use
Steps = Mapping[tuple[str, str], Use | Communication]  # by site and kind; a segment's kind is "run"
Names = tuple[str, ...]


class Operands(NamedTuple):
    """The operands of an instruction. `weights`: those that W reads. `params_in`, `weights_in`: for each parameter and
    weight, the value that holds it if it was gathered, else ""; empty if none was."""

    reads: Names = ()
    params: Names = ()
    weights: Names = ()
    writes: tuple[Buffer, ...] = ()
    params_in: Names = ()
    weights_in: Names = ()


def has_work(use: Use, phase: str, cuts: Cuts) -> bool:
    """Whether the segment has anything to do in a phase."""
    return phase == "F" or signature_of(use, phase, cuts) != Signature()


def signature_of(use: Use, phase: str, cuts: Cuts) -> Signature:
    """The arguments and returns of F, I or W of a segment."""
    signature: Signature = getattr(cuts[use.site], phase)
    return signature


def steps_of(stage: Stage) -> Steps:
    return {(s.site, s.kind if isinstance(s, Communication) else "run"): s for s in stage.steps}


def needs_gather(use: Use, phase: str, plan: Plan) -> bool:
    """Whether the segment needs weights in a phase of which its rank holds a shard."""
    shards = plan.sharded.get(use.site)
    args = signature_of(use, phase, plan.cuts).args
    return (
        shards is not None
        and shards.weights is not None
        and any(tensor in shards.tensors for local, tensor in use.params if local in args)
    )


def needs_scatter(use: Use, plan: Plan) -> bool:
    """Whether the W of the segment adds to gradients of which its rank keeps a shard."""
    shards, args = plan.sharded.get(use.site), signature_of(use, "W", plan.cuts).args
    return shards is not None and any(
        tensor in shards.tensors for local, tensor in use.params if accumulator_of(local) in args
    )


def operands(instruction: Instruction, stage: Stage, steps: Steps, plan: Plan) -> Operands:
    """The operands that an instruction must have. Its stage must need an instruction of its kind, phase and site."""
    shards = plan.sharded.get(instruction.site)
    if instruction.kind == "run":
        use = steps[instruction.site, "run"]
        assert isinstance(use, Use)
        run_operands = _of_run(use, instruction.phase, plan.cuts)
        return _read_gathered_values(run_operands, instruction.phase, shards) if shards else run_operands
    if shards and (instruction.wait or instruction.kind) in ("zeros", "gather", "scatter"):
        return _of_sharded(instruction, shards)
    return _of_other(instruction, stage, steps, plan.cuts)


def _read_gathered_values(operands_of_run: Operands, phase: str, shards: ShardedTensors) -> Operands:
    """The operands of a segment with sharded tensors, which it reads from gathered values."""
    params, weights = operands_of_run.params, operands_of_run.weights
    gathered = f"{shards.weights.name}_{phase}" if shards.weights else ""
    added = shards.gradients.name if phase == "W" else gathered
    params_in, weights_in = _places(params, shards, added), _places(weights, shards, gathered)
    values = dict.fromkeys(value for value in (*weights_in, *params_in) if value)
    return operands_of_run._replace(reads=(*operands_of_run.reads, *values), params_in=params_in, weights_in=weights_in)


def _places(names: Names, shards: ShardedTensors, value: str) -> Names:
    """For each tensor, the value that holds it, or ""; empty if no value holds any of them."""
    values = tuple([value if name in shards.tensors else "" for name in names])
    return values if any(values) else ()


def _of_sharded(instruction: Instruction, shards: ShardedTensors) -> Operands:
    """The operands of an instruction on sharded tensors: the wait of a gather writes weights, zeros write gradients,
    and a scatter reads gradients until its wait."""
    kind = instruction.wait or instruction.kind
    if kind == "scatter":
        return Operands((shards.gradients.name,))
    if kind == "zeros":
        return Operands(writes=(shards.gradients,))
    assert shards.weights is not None
    weights = shards.weights.with_name(f"{shards.weights.name}_{instruction.phase}", shards.weights.alias)
    return Operands(writes=(weights,) if instruction.wait else ())


def _of_other(instruction: Instruction, stage: Stage, steps: Steps, cuts: Cuts) -> Operands:
    kind, phase = instruction.kind, instruction.phase
    exchanged = instruction.wait or kind
    if exchanged in ("gather_rows", "scatter_rows", "gather_sequences", "scatter_sequences", "gather_choices"):
        return _of_rows(instruction, steps)
    if kind in ("send", "receive"):
        message = stage.output if (kind == "send") == (phase == "F") else stage.input
        assert message is not None
        message = message if phase == "F" else _gradient(message)
        return Operands((message.name,)) if kind == "send" else Operands(writes=(message,))
    if kind in ("counts", "dispatch", "combine", "wait"):
        step = steps[instruction.site, exchanged.replace("counts", "dispatch")]
        assert isinstance(step, Communication)
        reads, writes = _of_exchange(step, exchanged, phase)
        return Operands(reads, writes=writes if kind == "wait" else ())
    if kind == "load":
        return Operands(writes=tuple(b for b in stage.loads if b.name == instruction.site))
    if kind == "constant":
        values = [value for value, constant in stage.tangents if constant == instruction.site]
        return Operands(writes=tuple(Buffer(gradient_of(value), (), _dtype(stage, value, cuts)) for value in values))
    assert kind in ("record", "tell")
    pairs = stage.records if kind == "record" else stage.tells
    return Operands(tuple(value for name, value in pairs if name == instruction.site))


def _of_rows(instruction: Instruction, steps: Steps) -> Operands:
    """The operands of a gather or scatter of rows. Where a forward gathers rows, its backward scatters their gradients,
    and the other way round."""
    kind, forward = instruction.wait or instruction.kind, instruction.phase == "F"
    gathers = (kind in GATHERS) == forward
    step = steps[instruction.site, "choices" if kind == "gather_choices" else "gather" if gathers else "scatter"]
    assert isinstance(step, Communication)
    (sent,), (received,) = (step.sizes, step.outputs) if forward else (step.arriving, step.returned)
    return Operands((sent.name,), writes=(received,) if instruction.wait else ())


def _of_run(use: Use, phase: str, cuts: Cuts) -> Operands:
    cut, signature = cuts[use.site], signature_of(use, phase, cuts)
    values, tensors = _values(use, cut), dict(use.params)
    for weight in cut.quantised:  # the name of an FP8 parameter's tensor is the parameter's, with a suffix
        tensors |= weight.names_of(tensors[weight.param])
    buffers = {b.name: b for b in (*cut.outputs, *cut.saved, *cut.gradients, *cut.deferred)}
    accumulators = {accumulator_of(local): tensor for local, tensor in use.params}
    params = tensors | accumulators
    added, read = (tuple(names[a] for a in signature.args if a in names) for names in (accumulators, tensors))
    writes = (buffers[local] for local in signature.returns)
    return Operands(
        tuple(values[local] for local in signature.args if local not in params),
        *((added, read) if phase == "W" else (read, ())),
        tuple(b.with_name(values[b.name], values[b.alias] if b.alias else "") for b in writes),
    )


def _values(use: Use, cut: Cut) -> dict[str, str]:
    """Local names of a segment → values of its stage; names of saved and deferred values begin with the site."""
    outer = dict(zip((i.name for i in use.segment.inputs), use.inputs, strict=True))
    outer |= zip((o.name for o in use.segment.outputs), use.outputs, strict=True)
    outer |= {f"{local}_scales": f"{value}_scales" for local, value in outer.items()}
    inner = {b.name: f"{use.site.replace('.', '_')}_{b.name}" for b in (*cut.saved, *cut.deferred)}
    return outer | {gradient_of(local): gradient_of(value) for local, value in outer.items()} | inner


def _of_exchange(step: Communication, kind: str, phase: str) -> tuple[tuple[str, ...], tuple[Buffer, ...]]:
    """Values that an exchange reads, and buffers that its wait writes. A backward moves gradients the other way.

    A dispatch sends all of its inputs but the last, the counts. These go ahead, and return as the route, which every
    exchange of the layer reads, and as offsets, the last output of the dispatch. Where rows are forwarded inside nodes,
    the order goes ahead with the counts, two tables return that all other exchanges read, and each exchange also
    returns the rows that it forwarded.
    """
    sent, received, route = step.sizes, step.outputs, f"{step.site}_route"
    copies, forwards = f"{step.site}_copies", f"{step.site}_forwards"
    maps = (copies, forwards, route) if step.order else (route,)
    if kind == "counts":
        routed = (Buffer(route, (2, sent[-1].shape[0]), "int64"), received[-1])
        if not step.order:
            return (sent[-1].name,), routed
        tables = (Buffer(copies, sent[0].shape[:1], "int64"), Buffer(forwards, (2, "X"), "int64"))
        return (sent[-1].name, step.order), (*routed, *tables)
    if phase != "F":
        return (*(b.name for b in step.arriving), *maps), (*step.returned, *step.forwarded_back)
    if kind == "dispatch":
        sent, received = sent[:-1], received[:-1]
    return (*(b.name for b in sent), *maps), (*received, *step.forwarded)


def _gradient(buffer: Buffer) -> Buffer:
    return buffer.with_name(gradient_of(buffer.name))


def _dtype(stage: Stage, value: str, cuts: Cuts) -> str:
    uses = [step for step in stage.steps if isinstance(step, Use) and value in step.outputs]
    local = uses[0].segment.outputs[uses[0].outputs.index(value)].name
    return next(b.dtype for b in cuts[uses[0].site].outputs if b.name == local)
