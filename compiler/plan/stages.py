"""The model's split into pipeline stages: the layers of each, and its messages to its neighbours.

Stage 0 begins with the embedding; the last stage ends with the final norm, the head and the MTP block.
"""

from __future__ import annotations

from typing import cast

from compiler import ir
from compiler.ir import StageStep
from compiler.ir.stage_placement import ONE_STAGE, StagePlacement
from compiler.model.layers import Place, ends, qk_clip
from compiler.model.layers.moe import LOAD
from compiler.plan.blocks import CutModel
from compiler.plan.layer_runs import Runs
from compiler.plan.splitting import Splitting
from dsl.schema import Spec
from runtime.contract.names import DataName, ParameterName, RecordKind, RecordName


def build_stages(model: CutModel, num_stages: int, stage_placement: StagePlacement = ONE_STAGE) -> tuple[ir.Stage, ...]:
    """The stages of a stage placement, with layers split over them as splitting.py decides."""
    return stages_of(model, Splitting(model, num_stages, stage_placement).runs)


def stages_of(model: CutModel, runs: Runs) -> tuple[ir.Stage, ...]:
    """A stage for each of the contiguous runs of layers."""
    spec, (first, *layers, last) = model.spec, model.blocks
    count, num_stages = spec.recompute_layers or 0, len(runs)
    stages: list[ir.Stage] = []
    for index, (begin, end) in enumerate(runs):
        blocks = layers[begin:end]
        if model.recomputed_blocks:
            blocks[:count] = model.recomputed_blocks[1:-1][begin:end][:count]
        before = layers[begin - 1] if begin else first
        blocks = [first, *blocks] if index == 0 else blocks
        if index == num_stages - 1:
            blocks.append(model.recomputed_blocks[-1] if model.recomputed_blocks and end - begin < count else last)
        steps = tuple(step for block in blocks for step in block.steps)
        stages.append(
            ir.Stage(
                index=index,
                steps=steps,
                loads=_loads(steps),
                input=_hidden_buffer(spec, before.output) if index else None,
                output=_hidden_buffer(spec, blocks[-1].output) if index < num_stages - 1 else None,
                records=(*_losses(steps), *_loads_of_experts(steps), *_logits_of_heads(steps)),
                tangents=_tangents(steps),
                tells=_tells(steps),
            )
        )
    return tuple(stages)


# ---------------------------------------------------------------- inputs and outputs of a stage

ROWS = ("row_tokens", "row_mtp_tokens")  # tokens of a rank's own rows, if embeddings with vocabulary shards read all
OF_LAYERS = ("sequence_loss", "index_loss")
PARTS = ("part_targets", "part_mtp_targets", "tensor_rank")  # inputs of a head with a vocabulary shard


def _hidden_buffer(spec: Spec, value: str) -> ir.Buffer:
    place = Place(spec, spec.model.ffn(0))
    return ir.Buffer(value, (place.T, place.N), place.dtype)


def _loads(steps: tuple[StageStep, ...]) -> tuple[ir.Buffer, ...]:
    """The data tensors that a stage reads, each once."""
    data = (
        "tokens",
        "real",
        "mtp_real",
        "starts",
        "positions",
        "targets",
        "mtp_tokens",
        "mtp_targets",
        *ROWS,
        *PARTS,
        *ends.SAMPLED,
    )
    buffers = (
        ir.Buffer(value, argument.shape, argument.dtype)
        for use in steps
        if isinstance(use, ir.Use)
        for value, argument in zip(use.inputs, use.segment.inputs, strict=True)
        if value in data or DataName(value).router
    )
    return tuple(dict.fromkeys(buffers))


def _losses(steps: tuple[StageStep, ...]) -> tuple[tuple[RecordName, str], ...]:
    """(metric, value) of each loss that a stage computes. The metric of a layer's loss names the layer."""
    return tuple(
        (_loss_name(use, output, value), value)
        for use in steps
        if isinstance(use, ir.Use)
        for value, output in zip(use.outputs, use.segment.outputs, strict=True)
        if output.name in ("loss", *OF_LAYERS)
    )


def _loss_name(use: ir.Use, output: ir.Output, value: str) -> RecordName:
    return (
        RecordName.of(cast(RecordKind, output.name), use.site.block) if output.name in OF_LAYERS else RecordName(value)
    )


def _tells(steps: tuple[StageStep, ...]) -> tuple[tuple[str, str], ...]:
    """(name, value) of each value that a stage tells the executor for each micro-batch."""
    return tuple(
        (output.name, value)
        for use in steps
        if isinstance(use, ir.Use)
        for value, output in zip(use.outputs, use.segment.outputs, strict=True)
        if output.name == ends.LOGP
    )


def _loads_of_experts(steps: tuple[StageStep, ...]) -> tuple[tuple[RecordName, str], ...]:
    """(metric, value) of the number of tokens per expert. The metric names the layer by the prefix of its tensors."""
    routers = [step for step in steps if isinstance(step, ir.Use) and step.segment.kind == "router"]
    metrics = [RecordName.of("load", block_of(use)) for use in routers]
    counts = [_names(use).index(LOAD if LOAD in _names(use) else "counts") for use in routers]
    return tuple((metric, use.outputs[k]) for metric, use, k in zip(metrics, routers, counts, strict=True))


def _logits_of_heads(steps: tuple[StageStep, ...]) -> tuple[tuple[RecordName, str], ...]:
    """(metric, value) of the largest logit per head, for layers that clip logits. The metric names the layer."""
    clipped = [use for use in steps if isinstance(use, ir.Use) and clips_logits(use)]
    values = (use.outputs[_names(use).index(qk_clip.OUTPUT)] for use in clipped)
    return tuple((RecordName.of("logits", block_of(use)), value) for use, value in zip(clipped, values, strict=True))


def clips_logits(use: ir.Use) -> bool:
    """Whether a segment returns the largest logit of each head."""
    return qk_clip.OUTPUT in _names(use)


def _names(use: ir.Use) -> list[str]:
    return [output.name for output in use.segment.outputs]


def block_of(use: ir.Use) -> str:
    """The prefix of the tensors of a segment's block, such as layers.3 or mtp.0."""
    return ParameterName(use.params[0][1]).block


def _tangents(steps: tuple[StageStep, ...]) -> tuple[tuple[str, str], ...]:
    """(loss, constant): for each loss, the constant of the step that is its gradient, named by its metric."""
    return tuple((value, "mtp" if metric == "mtp_loss" else metric) for metric, value in _losses(steps))
