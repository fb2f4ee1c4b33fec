"""The model as a list of segments and communications, and its split into pipeline stages.

Stage 0 begins with the embedding; the last stage ends with the final norm, the head and the MTP block. Names of stage
values begin with their block: `L3_rows` in layer 3, `M0_rows` in the MTP block.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler import ir
from compiler.layers import LAYERS, Place
from compiler.layers.value_dtypes import back, to_experts
from compiler.plan.balance import partition
from compiler.plan.block_costs import Cuts, blocks_of, chains_of
from compiler.plan.holding import holding_of, schedule_on
from compiler.plan.layer_runs import Pipeline, Runs
from compiler.rates import rates_of
from compiler.schedules.placement import BIDIRECTIONAL, V, loops
from compiler.schedules.schedule import Schedule
from compiler.topology.rank_kinds import parts_of_ranks
from dsl.layout import stages_of_layout
from dsl.schema import Moe, Spec

Step = ir.Use | ir.Communication

OVERLAPPING = ("dualpipe", "dualpipev", "auto")  # schedules that have pairs of actions; a file may
MODEL_TENSORS = ("embedding", "head")  # those that the MTP block shares with the main model


@dataclass(frozen=True)
class Block:
    """Consecutive steps that stay on one stage, and the hidden state they end with."""

    steps: tuple[Step, ...]
    output: str

    @property
    def uses(self) -> tuple[ir.Use, ...]:
        return tuple(step for step in self.steps if isinstance(step, ir.Use))


def build_stages(
    spec: Spec,
    num_stages: int,
    placement: str = "loop(1)",
    cuts: Cuts | None = None,
    own: Schedule | None = None,
) -> tuple[ir.Stage, ...]:
    """Contiguous runs of layers: the layout's, or the best there are for the stages of a placement (balance.py).

    `own`: the schedule of the file that the spec names.
    """
    first, *layers, last = model_blocks(spec)
    runs = _runs(spec, (first, *layers, last), num_stages, placement, {} if cuts is None else cuts, own)
    stages: list[ir.Stage] = []
    for index, (begin, end) in enumerate(runs):
        blocks = layers[begin:end]
        before = layers[begin - 1] if begin else first
        blocks = [first, *blocks] if index == 0 else blocks
        blocks = [*blocks, last] if index == num_stages - 1 else blocks
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


def _runs(
    spec: Spec, blocks: tuple[Block, ...], num_stages: int, placement: str, cuts: Cuts, own: Schedule | None
) -> Runs:
    """(begin, end) of the layers of each stage."""
    if spec.parallel.layout is not None:
        num_layers, mtp = len(blocks) - 2, spec.model.mtp.depth if spec.model.mtp else 0
        runs = stages_of_layout(spec.parallel.layout, num_layers, mtp)
        assert len(runs) == num_stages, "the rules hold a layout to the schedule's stages"
        return runs
    return partition(pipeline_of(spec, blocks, num_stages, placement, cuts, own)).runs


def pipeline_of(
    spec: Spec,
    blocks: tuple[Block, ...],
    num_stages: int,
    placement: str,
    cuts: Cuts,
    own: Schedule | None = None,
) -> Pipeline:
    """What a model is split by: the times that its blocks are predicted to take where they run, and what they hold."""
    overlaps = spec.schedule.name in OVERLAPPING or spec.schedule.file is not None
    num_ranks = num_stages // (1 if placement == BIDIRECTIONAL else 2 if placement == V else loops(placement))
    parts = parts_of_ranks(spec) if num_ranks == spec.parallel.pipeline else (0,) * num_ranks
    chains = {part: chains_of(rates_of(spec, rank=parts.index(part)), blocks, cuts) for part in dict.fromkeys(parts)}
    on = {part: blocks_of(each, overlaps) for part, each in chains.items()}
    room = [spec.cluster.parts[part][1].device.memory for part in parts]
    schedule = schedule_on(spec, placement, num_ranks, own)
    holding = holding_of(spec, [block.steps for block in blocks], chains[parts[0]], schedule, room)
    return Pipeline(placement, tuple(on[part] for part in parts), holding)


# ---------------------------------------------------------------- the model


def model_blocks(spec: Spec) -> tuple[Block, ...]:
    """The embedding, every layer, and the end of the model."""
    model = spec.model
    blocks = [_embedding(Place(spec, model.ffn(0)))]
    for layer in range(model.num_layers):
        place = Place(spec, model.ffn(layer))
        blocks.append(_layer(place, f"L{layer}", f"layers.{layer}", blocks[-1].output))
    last = Place(spec, model.ffn(model.num_layers - 1))
    return (*blocks, _end(last, blocks[-1].output))


def model_steps(spec: Spec) -> tuple[Step, ...]:
    """The whole model, in order."""
    return tuple(step for block in model_blocks(spec) for step in block.steps)


def _use(place: Place, kind: str, site: str, prefix: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> ir.Use:
    """A segment at a place; its tensors are `prefix`.<path>, but for those of the whole model."""
    layer = LAYERS[kind]
    segment = layer.build(place)
    paths = ((param.name, layer.parameters[param.name]) for param in segment.params)
    params = tuple((name, f"{prefix}.{path}" if prefix and path not in MODEL_TENSORS else path) for name, path in paths)
    assert len(inputs) == len(segment.inputs) and len(outputs) == len(segment.outputs), site
    return ir.Use(site, segment, params, inputs, outputs)


def _embedding(place: Place) -> Block:
    return Block((_use(place, "embed", "embed", "", ("tokens",), ("embed_h",)),), "embed_h")


def _layer(place: Place, name: str, prefix: str, h: str) -> Block:
    """Attention and the feed-forward part of one layer, or of the MTP block."""
    attended, out = (f"{name}_entered", f"{name}_attended"), f"{name}_h"
    attention = _use(place, "attention", f"{name}.attention", prefix, (h,), attended)
    if not isinstance(place.ffn, Moe):
        return Block((attention, _use(place, "dense", f"{name}.dense", prefix, attended, (out,))), out)
    return Block((attention, *_mixture(place, name, prefix, attended, out)), out)


def _mixture(place: Place, name: str, prefix: str, attended: tuple[str, str], out: str) -> tuple[Step, ...]:
    """Router, dispatch, experts, combine, join; the shared experts where they can hide the dispatch."""
    router = LAYERS["router"].build(place)
    made = {output.name: f"{name}_{output.name}" for output in router.outputs}
    rows, gate, offsets = f"{name}_received_rows", f"{name}_received_gate", f"{name}_offsets"
    y, returned = f"{name}_expert_rows", f"{name}_returned_rows"
    shared = (f"{name}_shared",) if place.moe.shared else ()
    normed = tuple(made[value] for value in ("x", "residual")[: len(LAYERS["shared"].build(place).inputs)] if shared)
    S, D, experts, groups = place.S, place.D, place.moe.experts, place.spec.parallel.expert * place.experts_local
    there, here = to_experts(place), back(place)
    stays = place.spec.parallel.expert == 1  # nothing moves: rows come as the tensors that were sent
    dispatch = ir.Communication(
        kind="dispatch",
        site=name,
        axis="ep",
        inputs=(made["rows"], made["gate"], made["counts"]),
        outputs=(
            ir.Buffer(rows, ("R", D), there, made["rows"] if stays else ""),
            ir.Buffer(gate, ("R",), place.wide_dtype, made["gate"] if stays else ""),
            ir.Buffer(offsets, (groups,), "int32"),
        ),
        sizes=(
            ir.Buffer(made["rows"], (S, D), there),
            ir.Buffer(made["gate"], (S,), place.wide_dtype),
            ir.Buffer(made["counts"], (experts,), "int64"),
        ),
        back=here,
    )
    combine = ir.Communication(
        kind="combine",
        site=name,
        axis="ep",
        inputs=(y,),
        outputs=(ir.Buffer(returned, (S, D), here, y if stays else ""),),
        sizes=(ir.Buffer(y, ("R", D), here),),
        back=there,
    )
    return (
        _use(place, "router", f"{name}.router", prefix, attended, tuple(made.values())),
        dispatch,
        *(_use(place, "shared", f"{name}.shared", prefix, normed, (value,)) for value in shared),
        _use(place, "experts", f"{name}.experts", prefix, (rows, gate, offsets), (y,)),
        combine,
        _use(place, "join", f"{name}.join", prefix, (made["residual"], *shared, returned, made["order"]), (out,)),
    )


def _end(place: Place, h: str) -> Block:
    """Final norm, head and loss, and the MTP block, which takes the normed hidden state."""
    mtp = place.model.mtp
    normed = ("final_h", "final_h_mtp") if mtp else ("final_h",)
    steps: list[Step] = [
        _use(place, "final_norm", "final_norm", "", (h,), normed),
        _use(place, "head", "head", "", ("final_h", "targets"), ("loss",)),
    ]
    if mtp:
        assert mtp.depth == 1, "one MTP block"
        inside = Place(place.spec, place.ffn, mtp=True)
        block = _layer(inside, "M0", "mtp.0", "M0_input")
        steps += [
            _use(inside, "mtp_input", "M0.input", "mtp.0", ("mtp_tokens", "final_h_mtp"), ("M0_input",)),
            *block.steps,
            _use(inside, "final_norm", "M0.final_norm", "mtp.0", (block.output,), ("M0_final_h",)),
            _use(inside, "head", "M0.head", "mtp.0", ("M0_final_h", "mtp_targets"), ("mtp_loss",)),
        ]
    return Block(tuple(steps), "")


# ---------------------------------------------------------------- what a stage exchanges


def _hidden(spec: Spec, value: str) -> ir.Buffer:
    place = Place(spec, spec.model.ffn(0))
    return ir.Buffer(value, (place.T, place.D), place.dtype)


def _loads(steps: tuple[Step, ...]) -> tuple[ir.Buffer, ...]:
    """The data tensors a stage reads."""
    data = ("tokens", "targets", "mtp_tokens", "mtp_targets")
    return tuple(
        ir.Buffer(value, argument.shape, argument.dtype)
        for use in steps
        if isinstance(use, ir.Use)
        for value, argument in zip(use.inputs, use.segment.inputs, strict=True)
        if value in data
    )


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
