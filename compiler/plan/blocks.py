"""The model of a spec as blocks: the embedding, every layer, and its end, each a list of segments and exchanges.

Names of stage values begin with their block: `L3_rows` in layer 3, `M0_rows` in the MTP block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from compiler import ir
from compiler.ir import StageStep
from compiler.ir.dtypes import flat_tensors
from compiler.ir.names import gradient_of
from compiler.ir.segment import SUM
from compiler.machine.rates import Rates
from compiler.model.layers import LAYERS, Place, indexer, qk_clip
from compiler.model.layers.attention import norms_across_ranks
from compiler.model.layers.ends import LOGP, sample_inputs
from compiler.model.layers.hyper import following
from compiler.model.layers.moe import replays_choices
from compiler.model.layers.residual import is_changed
from compiler.model.layers.value_dtypes import combine_dtype_of, dispatch_dtype_of
from compiler.plan.actions.chains import Chains
from compiler.plan.actions.lanes import end_of
from compiler.plan.actions.order import jobs_of
from compiler.plan.actions.search import best_order
from compiler.plan.layer_runs import Blocks, Cost, CutOf, Cutter, RecomputedSteps
from compiler.plan.split_blocks import (
    copies_of,
    gather,
    gather_choices,
    gather_sequences,
    scatter,
    scatter_parts,
    sum_everywhere,
)
from dsl.schema import Moe, Spec
from runtime.contract.names import DataName, Site

CutsByKey = Mapping[Hashable, ir.Cut]  # by the key of a segment
LAYER = "layer"  # value of `recompute`: whole layers
MODEL_TENSORS = ("embedding", "head")  # tensors that the MTP block shares with the main model
NO_CUTS: CutsByKey = MappingProxyType({})


@dataclass(frozen=True)
class StageBlock:
    """Consecutive steps that stay on one stage, and the name of the hidden state that they end with."""

    steps: tuple[StageStep, ...]
    output: str

    @property
    def uses(self) -> tuple[ir.Use, ...]:
        return tuple(step for step in self.steps if isinstance(step, ir.Use))


@dataclass(frozen=True)
class CutModel:
    """The blocks of a spec's model, and the cut of each of their segments by site. Equal segments share one cut.

    If the first layers of each stage are recomputed, `recomputed_blocks` has the blocks with every layer recomputed.
    The stages are not known yet.
    """

    spec: Spec
    blocks: tuple[StageBlock, ...]
    cuts: Mapping[str, ir.Cut]
    recomputed_blocks: tuple[StageBlock, ...] = ()
    cuts_by_key: CutsByKey = field(default_factory=dict, repr=False)


def cut_model(spec: Spec, cuts_by_key: CutsByKey = NO_CUTS, *, alike: bool = False) -> CutModel:
    """The model with its cuts. Cuts in `cuts_by_key` are reused. `alike`: as for `model_blocks`."""
    by_key = dict(cuts_by_key)
    cut_of = Cutter(by_key)
    all_layers, some_layers = LAYER in spec.recompute, spec.recompute_layers is not None
    recomputed_blocks = model_blocks(spec, cut_of, alike) if all_layers else ()
    blocks = model_blocks(spec, alike=alike) if some_layers or not all_layers else recomputed_blocks
    distinct = {id(block): block for block in blocks}.values()
    cuts: dict[str, ir.Cut] = {use.site: cut_of(use.segment) for block in distinct for use in block.uses}
    return CutModel(spec, blocks, cuts, recomputed_blocks if some_layers else (), by_key)


def cuts_by_site(uses: Iterable[ir.Use], cuts_by_key: CutsByKey = NO_CUTS) -> dict[str, ir.Cut]:
    """Site → cut of its segment. Each distinct segment that is not in `cuts_by_key` is cut once."""
    cut_of = Cutter(dict(cuts_by_key))
    return {use.site: cut_of(use.segment) for use in uses}


def model_blocks(spec: Spec, cut_of: CutOf | None = None, alike: bool = False) -> tuple[StageBlock, ...]:
    """The embedding, every layer, and the end of the model.

    With `cut_of`, all layers are recomputed. With `alike`, one layer stands for all that differ from it only in names,
    which is enough to find costs.
    """
    model = spec.model
    places = [_place(spec, layer) for layer in range(model.num_layers)]
    places_by_kind = {(id(place.ffn), id(place.attention), place.is_high_precision): place for place in places[::-1]}
    # So that segments are built once:
    places = [places_by_kind[id(p.ffn), id(p.attention), p.is_high_precision] for p in places]
    build = {id(place): _layer if cut_of is None else _RecomputedLayer(place, cut_of) for place in places}
    blocks, first = [_embedding(places[0])], dict[int, StageBlock]()
    for layer, place in enumerate(places):
        if not alike or id(place) not in first:
            first[id(place)] = build[id(place)](place, f"L{layer}", f"layers.{layer}", blocks[-1].output)
        blocks.append(first[id(place)])
    return (*blocks, _end(places[-1], blocks[-1].output, cut_of))


def _place(spec: Spec, layer: int) -> Place:
    model, high = spec.model, spec.precision.high
    is_high = high is not None and (layer < high.first or layer >= model.num_layers - high.last)
    return Place(spec, model.ffn(layer), is_high_precision=is_high, attention=model.attention_of(layer))


def model_steps(spec: Spec) -> tuple[StageStep, ...]:
    """The steps of the whole model, in order."""
    return tuple(step for block in model_blocks(spec) for step in block.steps)


def _use(place: Place, kind: str, site: str, prefix: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> ir.Use:
    """A segment at a site. Its tensors are named `prefix`.<path>, except for those of the whole model.

    A tied head reads the embedding.
    """
    layer = LAYERS[kind]
    segment = layer.build(place)
    tied = {"head": "embedding"} if place.model.tied else {}
    own_paths = ((param.name, param.path or layer.path(param.name)) for param in segment.params)
    paths = ((name, tied.get(path, path)) for name, path in own_paths)
    params = tuple((name, f"{prefix}.{path}" if prefix and path not in MODEL_TENSORS else path) for name, path in paths)
    if dict(segment.constants).get("blanked"):
        inputs = (*inputs, *_real(place))
    assert len(inputs) == len(segment.inputs) and len(outputs) == len(segment.outputs), site
    return ir.Use(Site(site), segment, params, inputs, outputs)


def _embedding(place: Place) -> StageBlock:
    embedded = _embedding_steps(place, "embed", "tokens", "embed_h")
    if place.model.hyper_connections is None:
        return StageBlock(embedded, "embed_h")
    return StageBlock((*embedded, _use(place, "streams", "streams", "", ("embed_h",), ("streams_h",))), "streams_h")


def _embedding_steps(place: Place, site: str, tokens: str, output: str) -> tuple[StageStep, ...]:
    """The embeddings of tokens. With vocabulary shards, a tensor rank embeds all rows, and the results are summed."""
    if not place.spec.splits_vocabulary:
        return (_use(place, "embed", site, "", (tokens,), (output,)),)
    sums, part = f"{output}_sums", replace(place, is_tensor_shard=True)
    return _use(part, "embed", site, "", (tokens,), (sums,)), scatter(place, site, sums, output)


def _head(place: Place, block: str, h: str, targets: str, loss: str) -> tuple[StageStep, ...]:
    """Head and loss. With vocabulary shards, each tensor rank computes the logits of all rows for its shard."""
    site = f"{block}head"
    if not place.spec.splits_vocabulary:
        grpo = place.spec.train.grpo
        return (_use(place, "head", site, "", (h, targets, *sample_inputs(grpo)), (loss, *((LOGP,) if grpo else ()))),)
    rows, parts, all_parts = f"{h}_rows", f"{loss}_part", f"{loss}_parts"
    return (
        gather(place, site, h, rows),
        _use(
            replace(place, is_tensor_shard=True), "head", site, "", (rows, f"part_{targets}", "tensor_rank"), (parts,)
        ),
        scatter_parts(place, site, parts, all_parts),
        _use(place, "loss", f"{block}loss", "", (all_parts, targets), (loss,)),
    )


def _layer(place: Place, name: str, prefix: str, h: str) -> StageBlock:
    """Attention and feed-forward part of one layer, or of the MTP block."""
    if place.spec.parallel.tensor > 1:
        return StageBlock(_split_layer(place, name, prefix, h), f"{name}_h")
    mixing, hidden = tuple(f"{name}_attention_{coefficient}" for coefficient in following(place)), f"{name}_h"
    attended = (f"{name}_entered", f"{name}_attended", *mixing)
    attention = _attention(place, name, prefix, h, attended[1], attended[:1], mixing)
    if not isinstance(place.ffn, Moe):
        return StageBlock((*attention, _use(place, "dense", f"{name}.dense", prefix, attended, (hidden,))), hidden)
    return StageBlock((*attention, *_mixture(place, name, prefix, attended, hidden)), hidden)


def _attention(
    place: Place,
    name: str,
    prefix: str,
    x: str,
    output: str,
    handed: tuple[str, ...] = (),
    mixing: tuple[str, ...] = (),
) -> tuple[StageStep, ...]:
    """Attention, from `x` to `output`. `handed`: values that it passes through. `mixing`: coefficients of its streams.

    Tensor ranks whose heads are normed together sum squares before it. Context ranks gather keys and values inside it.
    """
    positions, context = tuple(argument.name for argument in place.places), place.spec.parallel.context
    peaks = tuple(f"{name}_{peak.name}" for peak in qk_clip.outputs(place))
    operands: tuple[str, ...] = (x,)
    first: tuple[StageStep, ...] = ()
    if norms_across_ranks(place):
        operands, site = (f"{name}_heads", f"{name}_all_squares"), f"{name}.squares"
        squares, sums = f"{name}_squares", f"{name}_summed_squares"
        products = _use(place, "products", f"{name}.products", prefix, (x,), (operands[0], squares))
        first = products, *sum_everywhere(place, site, squares, sums, operands[1])
    losses = tuple(f"{name}_{loss}" for loss in indexer.losses(place))
    if context == 1:
        outputs = (*handed, output, *losses, *peaks, *mixing)
        return (*first, _use(place, "attention", f"{name}.attention", prefix, (*operands, *positions), outputs))
    queries, keys, whole_keys = (f"{name}_{value}" for value in ("queries", "keys", "whole_keys"))
    scoring = tuple(f"{name}_{argument.name}" for argument in indexer.scoring(place))
    outputs = (*handed, queries, keys, *scoring, *mixing)
    project = _use(place, "project", f"{name}.project", prefix, (*operands, *positions), outputs)
    attend = _use(
        place,
        "attend",
        f"{name}.attend",
        prefix,
        (queries, whole_keys, *scoring, *positions),
        (output, *losses, *peaks),
    )
    width = attend.segment.inputs[1].shape[1]
    parts = ir.Buffer(keys, (place.T, width), place.dtype)
    return *first, project, gather_sequences(f"{name}.keys", parts, whole_keys, context), attend


class _RecomputedLayer:
    """Builds recomputed layers at one place."""

    def __init__(self, place: Place, cut_of: CutOf) -> None:
        self._plain, self._inside = replace(place, recomputed=()), replace(place, recomputed=(*LAYERS, SUM))
        self._recomputed = RecomputedSteps(cut_of)

    def __call__(self, _: Place, name: str, prefix: str, h: str) -> StageBlock:
        plain, inside = (_layer(place, name, prefix, h) for place in (self._plain, self._inside))
        return StageBlock(self._recomputed.steps(plain.steps, inside.steps), plain.output)


def _split_layer(place: Place, name: str, prefix: str, h: str) -> tuple[StageStep, ...]:
    """A layer that tensor ranks split, with rows shared out between the parts. For experts they act as data ranks."""
    part = replace(place, is_tensor_shard=True)
    steps: list[StageStep] = []

    def between(kind: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        steps.append(_use(place, kind, f"{name}.{kind}", prefix, inputs, outputs))

    def split(kind: str, x: str, output: str) -> None:
        site, rows, sums = f"{name}.{kind}", f"{name}_{kind}_rows", f"{name}_{kind}_sums"
        steps.append(gather(place, site, x, rows))
        if kind == "attention":
            steps.extend(_attention(part, name, prefix, rows, sums))
        else:
            steps.append(_use(part, kind, site, prefix, (rows,), (sums,)))
        steps.append(scatter(place, site, sums, output))

    entered, attended, residual, fed = (f"{name}_{value}" for value in ("entered", "attended", "residual", "fed"))
    mixing, of_dense = (
        tuple(f"{name}_{part}_{coefficient}" for coefficient in following(place)) for part in ("attention", "dense")
    )
    between("enter", (h,), (entered, f"{name}_attention_x", *mixing))
    split("attention", f"{name}_attention_x", attended)
    if isinstance(place.ffn, Moe):
        if is_changed(place):
            attended, y = f"{name}_added", attended
            between("added", (y,), (attended,))
        return (*steps, *_mixture(place, name, prefix, (entered, attended, *mixing), f"{name}_h"))
    between("between", (entered, attended, *mixing), (residual, f"{name}_dense_x", *of_dense))
    split("dense", f"{name}_dense_x", fed)
    between("leave", (residual, fed, *of_dense), (f"{name}_h",))
    return tuple(steps)


def _mixture(place: Place, name: str, prefix: str, attended: tuple[str, ...], output: str) -> tuple[StageStep, ...]:
    """Router, dispatch, experts, combine and join, with the shared experts where they can hide the dispatch."""
    router = LAYERS["router"].build(place)
    values = {result.name: f"{name}_{result.name}" for result in router.outputs}
    rows, gate, offsets = f"{name}_received_rows", f"{name}_received_gate", f"{name}_offsets"
    y, returned = f"{name}_expert_rows", f"{name}_returned_rows"
    shared = (f"{name}_shared",) if place.moe.shared else ()
    normed = tuple(values[value] for value in ("x", "residual")[: len(LAYERS["shared"].build(place).inputs)] if shared)
    S, D, alignment = place.S, place.D, place.spec.row_alignment
    slices = place.moe.experts * place.spec.parallel.expert_tensor
    dispatch_dtype, combine_dtype, wide = dispatch_dtype_of(place), combine_dtype_of(place), place.wide_dtype
    order = values["order"] if place.spec.routes_by_nodes else ""
    copies = place.T * copies_of(place.spec, place.moe) if order else 0

    def forwarded_buffers(value: str, count: str, dtype: str, *, gate: bool) -> tuple[ir.Buffer, ...]:
        gates = (ir.Buffer(f"{value}_gate", ("X",), wide),) if gate else ()
        return (*_rows(f"{value}_rows", count, D, dtype), *gates) if order else ()

    stays = place.spec.parallel.expert_group == alignment == 1  # nothing moves: received tensors are those sent
    counts, returns = ir.Buffer(values["counts"], (slices,), "int64"), gradient_of(returned)
    dispatch = ir.Communication(
        kind="dispatch",
        site=Site(name),
        axis="ep",
        inputs=(*(b.name for b in _rows(values["rows"], S, D, dispatch_dtype)), values["gate"], counts.name),
        outputs=(
            *_rows(rows, "R", D, dispatch_dtype, values["rows"] if stays else ""),
            ir.Buffer(gate, ("R",), wide, values["gate"] if stays else ""),
            ir.Buffer(offsets, (place.experts_local,), "int32"),
        ),
        sizes=(*_rows(values["rows"], S, D, dispatch_dtype), ir.Buffer(values["gate"], (S,), wide), counts),
        arriving=(*_rows(gradient_of(rows), "R", D, combine_dtype), ir.Buffer(gradient_of(gate), ("R",), wide)),
        returned=(
            *_rows(gradient_of(values["rows"]), S, D, combine_dtype, gradient_of(rows) if stays else ""),
            ir.Buffer(gradient_of(values["gate"]), (S,), wide, gradient_of(gate) if stays else ""),
        ),
        alignment=alignment,
        order=order,
        copies=copies,
        forwarded=forwarded_buffers(f"{name}_forwarded", "P", dispatch_dtype, gate=True),
        forwarded_back=forwarded_buffers(f"d_{name}_forwarded", "X", combine_dtype, gate=True),
    )
    combine = ir.Communication(
        kind="combine",
        site=Site(name),
        axis="ep",
        inputs=tuple(b.name for b in _rows(y, "R", D, combine_dtype)),
        outputs=_rows(returned, S, D, combine_dtype, y if stays else ""),
        sizes=_rows(y, "R", D, combine_dtype),
        arriving=_rows(returns, S, D, dispatch_dtype),
        returned=_rows(gradient_of(y), "R", D, dispatch_dtype, returns if stays else ""),
        alignment=alignment,
        order=order,
        copies=copies,
        forwarded=forwarded_buffers(f"{name}_added", "X", combine_dtype, gate=False),
        forwarded_back=forwarded_buffers(f"d_{name}_added", "P", dispatch_dtype, gate=False),
    )
    counted, balance = _balance(place, name, prefix, values)
    joined = (values["residual"], *shared, returned, values["order"], *(values[key] for key in following(place)))
    joined = (*joined, *(attended if len(joined) < len(LAYERS["join"].build(place).inputs) else ()))
    entering = (*attended, *_real(place), *_tokens(place), *_routes(place, name))
    return (
        _use(place, "router", f"{name}.router", prefix, entering, tuple(values.values())),
        *counted,
        dispatch,
        *(_use(place, "shared", f"{name}.shared", prefix, normed, (value,)) for value in shared),
        *balance,
        _use(place, "experts", f"{name}.experts", prefix, (rows, gate, offsets), (y,)),
        combine,
        _use(place, "join", f"{name}.join", prefix, joined, (output,)),
    )


def _routes(place: Place, name: str) -> tuple[str, ...]:
    """The choices that the router of a layer replays, if it does."""
    return (DataName.routes(name),) if replays_choices(place) else ()


def _real(place: Place) -> tuple[str, ...]:
    """The mask of real tokens among a router's rows, if some rows may be padding."""
    return ("mtp_real" if place.is_mtp else "real",) * place.spec.data.pads_rows


def _tokens(place: Place) -> tuple[str, ...]:
    """The tokens of a layer's rows, if a table chooses its experts by token.

    With vocabulary shards, `tokens` are those of all rows, which an embedding reads, so the rows' own have other names.
    """
    if place.moe.choice != "table":
        return ()
    tokens = "mtp_tokens" if place.is_mtp else "tokens"
    return (f"row_{tokens}" if place.spec.splits_vocabulary else tokens,)


def _balance(
    place: Place, name: str, prefix: str, values: Mapping[str, str]
) -> tuple[tuple[ir.Communication, ...], tuple[ir.Use, ...]]:
    """If ranks have parts of sequences: the gather of choices, and the sequence-wise loss that is computed from them.

    `values`: outputs of the router, by their names in it.
    """
    if "choices" not in values:
        return (), ()
    use = _use(
        place,
        "balance",
        f"{name}.balance",
        prefix,
        (values["scores"], f"{name}_all_choices", *_real(place)),
        (f"{name}_sequence_loss",),
    )
    counts, experts = use.segment.inputs[1].shape
    ranks = place.spec.sequence_ranks
    sent = ir.Buffer(values["choices"], (int(counts) // ranks, experts), "int64")
    return (gather_choices(f"{name}.choices", sent, f"{name}_all_choices", ranks),), (use,)


def _rows(name: str, count: int | str, columns: int, dtype: str, alias: str = "") -> tuple[ir.Buffer, ...]:
    """The tensors of exchanged rows. With `alias`, each shares the storage of that value's tensor."""
    flat = flat_tensors((count, columns), dtype)
    return tuple(
        ir.Buffer(f"{name}{tensor.suffix}", tensor.shape, tensor.dtype, f"{alias}{tensor.suffix}" if alias else "")
        for tensor in flat
    )


def _end(place: Place, h: str, cut_of: CutOf | None) -> StageBlock:
    """Final norm, head and loss, and the MTP block, which reads the normed hidden state."""
    mtp = place.model.mtp
    normed = ("final_h", "final_h_mtp") if mtp else ("final_h",)
    steps: list[StageStep] = [
        _use(place, "final_norm", "final_norm", "", (h,), normed),
        *_head(place, "", "final_h", "targets", "loss"),
    ]
    if mtp:
        assert mtp.depth == 1, "one MTP block"
        inside = replace(place, is_mtp=True, attention=place.model.attention_of_mtp)
        build = _layer if cut_of is None else _RecomputedLayer(inside, cut_of)
        block = build(inside, "M0", "mtp.0", "M0_input")
        embedded = (
            _embedding_steps(inside, "M0.embed", "mtp_tokens", "M0_embedded") if place.spec.splits_vocabulary else ()
        )
        following = "M0_embedded" if embedded else "mtp_tokens"
        steps += [
            *embedded,
            _use(inside, "mtp_input", "M0.input", "mtp.0", (following, "final_h_mtp"), ("M0_input",)),
            *block.steps,
            _use(inside, "final_norm", "M0.final_norm", "mtp.0", (block.output,), ("M0_final_h",)),
            *_head(inside, "M0.", "M0_final_h", "mtp_targets", "mtp_loss"),
        ]
    return StageBlock(tuple(steps), "")


# --- Times of a model's blocks on the devices that may run them, for the split of layers over stages
#
# If a schedule overlaps pairs of micro-batches, compute and exchanges run at the same time, each on its lane, and the
# fuller lane of a rank counts. Otherwise an action runs alone and hides only a part of its own exchanges.


def chains_of(rates: Rates, model: CutModel) -> tuple[Chains, ...]:
    """The chains of each block as a stage, on one kind of device. Blocks that differ only in names share them."""
    chains_by_key: dict[Hashable, Chains] = {}
    chains: dict[int, Chains] = {}
    for block in {id(block): block for block in model.blocks}.values():
        key = tuple(
            (step.segment.key if isinstance(step, ir.Use) else (step.kind, step.sizes[0].shape), step.is_repeated)
            for step in block.steps
        )
        if key not in chains_by_key:
            chains_by_key[key] = Chains(ir.Stage(0, block.steps, (), None, None, (), ()), model.cuts, rates)
        chains[id(block)] = chains_by_key[key]
    return tuple(chains[id(block)] for block in model.blocks)


def blocks_of(chains: Sequence[Chains], overlaps: bool) -> Blocks:
    """Nanoseconds of a model's blocks, forward and backward, with evenly loaded experts."""
    costs = {id(block): _cost(block, overlaps) for block in {id(block): block for block in chains}.values()}
    first, *layers, last = (costs[id(block)] for block in chains)
    return Blocks(tuple(layers), first, last)


def _cost(chains: Chains, overlaps: bool) -> Cost:
    nodes = [chains.chain(kind) for kind in "FB"]
    if not overlaps:
        jobs = [jobs_of([chain]) for chain in nodes]
        return (sum(end_of(chain_jobs, best_order(chain_jobs)) for chain_jobs in jobs),)
    lanes = [[node.time_ns for chain in nodes for node in chain if node.is_exchange == lane] for lane in (False, True)]
    return sum(lanes[0]), sum(lanes[1])
