"""The model's split into pipeline stages: which layers each runs, and what it exchanges with its neighbours.

Stage 0 begins with the embedding; the last stage ends with the final norm, the head and the MTP block.
"""

from __future__ import annotations

from compiler import ir
from compiler.layers import Place
from compiler.plan.balance import partition
from compiler.plan.block_costs import blocks_of, chains_of
from compiler.plan.blocks import CutModel, Step
from compiler.plan.holding import holding_of, schedule_on
from compiler.plan.layer_runs import Pipeline, Runs
from compiler.rates import rates_of
from compiler.rates.rank_rates import parts_of_ranks
from compiler.stage_placement import ONE_STAGE, StagePlacement
from dsl.layout import stages_of_layout
from dsl.schema import Spec
from dsl.stages import may_overlap


def build_stages(model: CutModel, num_stages: int, stage_placement: StagePlacement = ONE_STAGE) -> tuple[ir.Stage, ...]:
    """Contiguous runs of layers: the layout's, or the best there are for the stages of a stage placement (balance.py).

    `own`: the schedule of the file that the spec names.
    """
    spec, (first, *layers, last) = model.spec, model.blocks
    count = spec.recompute_layers or 0
    stages: list[ir.Stage] = []
    for index, (begin, end) in enumerate(_runs(model, num_stages, stage_placement)):
        blocks = layers[begin:end]
        if model.again:
            blocks[:count] = model.again[1:-1][begin:end][:count]
        before = layers[begin - 1] if begin else first
        blocks = [first, *blocks] if index == 0 else blocks
        if index == num_stages - 1:
            blocks.append(model.again[-1] if model.again and end - begin < count else last)
        steps = tuple(step for block in blocks for step in block.steps)
        stages.append(
            ir.Stage(
                index=index,
                steps=steps,
                loads=_loads(steps),
                input=_hidden(spec, before.output) if index else None,
                output=_hidden(spec, blocks[-1].output) if index < num_stages - 1 else None,
                records=(*_losses(steps), *_loads_of_experts(steps)),
                tangents=_tangents(steps),
            )
        )
    return tuple(stages)


def _runs(model: CutModel, num_stages: int, stage_placement: StagePlacement) -> Runs:
    """(begin, end) of the layers of each stage."""
    spec = model.spec
    if spec.parallel.layout is not None:
        num_layers, mtp = len(model.blocks) - 2, spec.model.mtp.depth if spec.model.mtp else 0
        runs = stages_of_layout(spec.parallel.layout, num_layers, mtp)
        assert len(runs) == num_stages, "the rules hold a layout to the schedule's stages"
        return runs
    return partition(pipeline_of(model, num_stages, stage_placement)).runs


def pipeline_of(model: CutModel, num_stages: int, stage_placement: StagePlacement) -> Pipeline:
    """What a model is split by: the times that its blocks are predicted to take where they run, and what they hold."""
    spec = model.spec
    overlaps = may_overlap(spec.schedule)
    num_ranks = num_stages // stage_placement.stages_per_rank
    parts = parts_of_ranks(spec) if num_ranks == spec.parallel.pipeline else (0,) * num_ranks
    chains = {part: chains_of(rates_of(spec, rank=parts.index(part)), model) for part in dict.fromkeys(parts)}
    on = {part: blocks_of(each, overlaps) for part, each in chains.items()}
    room = [spec.cluster.parts[part][1].device.memory for part in parts]
    schedule = schedule_on(spec, stage_placement, num_ranks)
    holding = holding_of(model, chains[parts[0]], schedule, room)
    return Pipeline(stage_placement, tuple(on[part] for part in parts), holding)


# ---------------------------------------------------------------- what a stage exchanges

PARTS = ("part_targets", "part_mtp_targets", "tensor_rank")  # what a head reads that has a part of the vocabulary


def _hidden(spec: Spec, value: str) -> ir.Buffer:
    place = Place(spec, spec.model.ffn(0))
    return ir.Buffer(value, (place.T, place.D), place.dtype)


def _loads(steps: tuple[Step, ...]) -> tuple[ir.Buffer, ...]:
    """The data tensors a stage reads, each once."""
    data = ("tokens", "starts", "positions", "targets", "mtp_tokens", "mtp_targets", *PARTS)
    found = (
        ir.Buffer(value, argument.shape, argument.dtype)
        for use in steps
        if isinstance(use, ir.Use)
        for value, argument in zip(use.inputs, use.segment.inputs, strict=True)
        if value in data
    )
    return tuple(dict.fromkeys(found))


def _losses(steps: tuple[Step, ...]) -> tuple[tuple[str, str], ...]:
    """(metric, value) of the losses a stage computes; a sequence-wise loss is named with its layer."""
    values = [
        value
        for use in steps
        if isinstance(use, ir.Use)
        for value, output in zip(use.outputs, use.segment.outputs, strict=True)
        if output.name in ("loss", "sequence_loss")
    ]
    blocks = {value: value.removesuffix("_sequence_loss") for value in values}
    return tuple((value if block == value else f"sequence_loss {block}", value) for value, block in blocks.items())


def _loads_of_experts(steps: tuple[Step, ...]) -> tuple[tuple[str, str], ...]:
    """(metric, value): the tokens of each expert, by the prefix of the layer's tensors."""
    routers = [step for step in steps if isinstance(step, ir.Use) and step.segment.kind == "router"]
    metrics = [f"load {block_of(use)}" for use in routers]
    counts = [[output.name for output in use.segment.outputs].index("counts") for use in routers]
    return tuple((metric, use.outputs[k]) for metric, use, k in zip(metrics, routers, counts, strict=True))


def block_of(router: ir.Use) -> str:
    """The prefix of the tensors of a router's block: layers.3, mtp.0."""
    return dict(router.params)["weight"].removesuffix(".ffn.router.weight")


def _tangents(steps: tuple[Step, ...]) -> tuple[tuple[str, str], ...]:
    """(loss, constant): which constant of the step is the gradient of each loss: that of its metric."""
    return tuple((value, "mtp" if metric == "mtp_loss" else metric) for metric, value in _losses(steps))
