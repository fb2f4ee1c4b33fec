"""Random specs draw every field of a model, and each is counted or listed as not counted: none can be forgotten.

Parameters and FLOPs are compared with the reference model of tests/reference, which is built of modules and runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import torch
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from compiler.ir import Use
from compiler.plan.blocks import model_steps
from dsl.closed_forms import counts
from dsl.schema import (
    Clamp,
    Compressed,
    Csa,
    Custom,
    CustomAttention,
    DeltaNet,
    Dense,
    Gqa,
    Hca,
    HyperConnections,
    Indexer,
    LayerRange,
    LinearScaling,
    Llama3Scaling,
    Mla,
    Model,
    Moe,
    Node,
    Rope,
    YarnScaling,
)
from dsl.schema.base import FieldType, fields_of
from tests.reference.config import Config
from tests.reference.delta import delta_rule
from tests.reference.model import Reference
from tests.specs.counted import flops_of_model
from tests.specs.shipped import shipped
from tests.specs.strategies import models
from tests.specs.test_counts import of_states, twice_seen

TOKENS = 5
any_model = st.tuples(st.integers(1, 3), st.integers(1, 5)).flatmap(lambda sizes: models(*sizes))
# Fields that change neither the number of parameters nor the FLOPs, by the ends of their paths.
NOT_COUNTED = {
    "name", "init_std", "norm_eps", "theta", "score", "normalize", "scale", "ffn.groups", "top_groups", "max_nodes",
    "sequence_loss", "weight", "width", "softcap", "factor", "original", "low_freq_factor", "high_freq_factor",
    "attention.rope", "beta_fast", "beta_slow", "truncate", "scaling", "attention_factor", "mscale", "mscale_all_dim",
    "limit", "alpha", "shift", "clamp", "loss", "embedding_scale", "residual_scale", "logit_scale", "logit_cap",
    "rounds", "eps", "choice",
}  # fmt: skip
ONE_VALUE = {("Mtp", "depth"), ("Phase", "until_tokens")}  # one MTP block can be trained so far; ends are none or some
# Their parameters are only known after tracing: tests/compiler/model/modules counts them.
TRACED: set[type[Node]] = {Custom, CustomAttention}


def reference(model: Model) -> Reference:
    return Reference(Config.from_plan({**model.model_dump(), "sequence": TOKENS}))


# ---------------------------------------------------------------- drawn fields


def values_in(node: Node, found: dict[tuple[type[Node], str], list[Any]]) -> None:
    """The values of every field of every block in a block, by the class that has it."""
    for name, value in node:
        found[type(node), name].append(value)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Node):
                values_in(item, found)


def classes_of(cls: type[Node]) -> Iterator[type[Node]]:
    """A class of the schema and those of its fields."""
    yield cls
    for info in cls.model_fields.values():
        todo = [info.annotation]
        while todo:
            annotation = todo.pop()
            if isinstance(annotation, type) and issubclass(annotation, Node):
                yield from classes_of(annotation)
            todo += get_args(annotation)


def missing(kind: FieldType, values: list[Any], is_single: bool) -> list[str]:
    """Possible values of a field that were not drawn: an alternative of a union, a word, none, true or false, a second
    number."""
    lacking = ["none"] if kind.optional and None not in values else []
    present = [value for value in values if value is not None]
    for type_ in kind.types:
        if type_ in TRACED:
            continue
        if isinstance(type_, type) and issubclass(type_, Node):
            lacking += [type_.__name__] if not any(isinstance(value, type_) for value in present) else []
        elif get_origin(type_) is Literal:
            lacking += [str(word) for word in get_args(type_) if word not in present]
        elif type_ is bool:
            lacking += [str(word) for word in (True, False) if word not in present]
        elif len({*present}) < (1 if is_single else 2):
            lacking.append("another value")
    return lacking


def test_random_models_draw_every_field_and_every_alternative() -> None:
    drawn: dict[tuple[type[Node], str], list[Any]] = defaultdict(list)

    @settings(max_examples=600, database=None, derandomize=True, phases=(Stage.generate,))
    @given(any_model)
    def draw(model: Model) -> None:
        values_in(model, drawn)

    draw()
    lacking = {
        f"{cls.__name__}.{name}": undrawn
        for cls in {*classes_of(Model)} - TRACED
        for name, kind in fields_of(cls).items()
        if kind.form != "label" and (undrawn := missing(kind, drawn[cls, name], (cls.__name__, name) in ONE_VALUE))
    }
    assert lacking == {}, "tests/specs/strategies.py draws none of these"


# ---------------------------------------------------------------- counts


@settings(max_examples=60, deadline=None)
@given(any_model)
def test_parameters_equal_the_reference(model: Model) -> None:
    count, tensors = counts.parameters(model), reference(model).state_dict()
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("router.table")}  # no parameter
    main = {name: tensor.numel() for name, tensor in tensors.items() if not name.startswith("mtp.")}
    assert sum(main.values()) == count.total
    assert sum(tensor.numel() for tensor in tensors.values()) == count.total + count.mtp
    assert sum(size for name, size in main.items() if name.endswith("router.bias")) == count.bias
    for layer in range(model.num_layers):
        mine = [size for name, size in main.items() if name.startswith(f"layers.{layer}.")]
        assert sum(mine) == counts.layer_parameters(model, layer)


@settings(max_examples=100, deadline=None)
@given(any_model)
def test_segments_with_different_functions_are_shown_differently(model: Model) -> None:
    """Otherwise two layers would share an emitted module with the text of one of them."""
    keys = defaultdict[Any, set[Any]](set)
    for step in model_steps(shipped("tiny.dsc").model_copy(update={"model": model})):
        if isinstance(step, Use):
            keys[step.segment.emitted_key].add(step.segment.key)
    assert {len(segment_keys) for segment_keys in keys.values()} == {1}


def of_recurrence(net: DeltaNet) -> int:
    """FLOPs of the delta rule of the reference, token by token."""
    keys, values, gates = ((1, TOKENS, net.heads, width) for width in (net.key_dim, net.value_dim, 1))
    with FlopCounterMode(display=False) as counter:
        delta_rule(*(torch.zeros(shape) for shape in (keys, keys, values, gates[:-1], keys)))
    return counter.get_total_flops()


@settings(max_examples=40, deadline=None)
@given(any_model)
def test_flops_equal_the_reference(model: Model) -> None:
    """FLOPs follow the published definition: the gates' products are left out, and a step takes three forwards."""
    alone = model.model_copy(update={"mtp": None})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(alone)(torch.zeros(1, TOKENS, dtype=torch.int64))
    mixtures = [ffn for ffn in map(alone.ffn, range(alone.num_layers)) if isinstance(ffn, Moe)]
    gates = [alone.hidden * (ffn.experts + ffn.shared_gate) for ffn in mixtures]
    forward = counter.get_total_flops() - 2 * TOKENS * sum(gates)
    for attention in map(alone.attention_of, range(alone.num_layers)):
        if isinstance(attention, Gqa):  # the reference computes scores outside of a window too
            unseen = max(0, TOKENS - (attention.window or TOKENS)) ** 2
            forward -= 4 * attention.heads * attention.head_dim * unseen
        elif isinstance(attention, Compressed):  # and scores of all entries, and the indexer that chooses them
            entries = TOKENS // attention.compress.rate if attention.compress else 0
            unseen = TOKENS * (TOKENS + entries) - twice_seen(attention, TOKENS)
            forward -= 4 * attention.heads * attention.head_dim * unseen
            if indexer := attention.indexer:  # one head is multiplied, and no product sums it
                forward -= 2 * TOKENS * entries * indexer.heads * (indexer.head_dim + (indexer.heads > 1))
        elif isinstance(attention, DeltaNet):  # the reference continues token by token
            forward += TOKENS * of_states(attention, TOKENS) - of_recurrence(attention)
            columns = 2 * attention.key_heads * attention.key_dim + attention.heads * attention.value_dim
            gates_of_states = attention.parameters(alone.hidden)["gates"]
            forward -= 2 * TOKENS * (gates_of_states + attention.convolution * columns)
        elif isinstance(attention, Mla) and attention.indexer:  # scores of unchosen keys, and the indexer's
            indexer, dim = attention.indexer, attention.head_dim
            unseen = max(0, TOKENS - indexer.top_k) ** 2
            forward -= 2 * attention.heads * (dim.nope + dim.rope + dim.value) * unseen
            forward -= 2 * TOKENS**2 * indexer.heads * indexer.head_dim
    assert 3 * forward == TOKENS * flops_of_model(alone, TOKENS).full


def changes(node: Any, path: str = "model") -> Iterator[tuple[str, Any]]:
    """(path, block with another value there) of every field of a block and of those in it."""
    for name, kind in fields_of(type(node)).items():
        value, place = getattr(node, name), f"{path}.{name}"
        if isinstance(value, Node):
            yield from ((inner, node.model_copy(update={name: new})) for inner, new in changes(value, place))
        if kind.form == "layers":
            for index, span in enumerate(value):
                for inner, new in changes(span, place):
                    yield inner, node.model_copy(update={name: (*value[:index], new, *value[index + 1 :])})
        elif name not in ("kind", "first", "by"):
            for new in others(kind, value):
                yield place, node.model_copy(update={name: new})


def others(kind: FieldType, value: Any) -> Iterator[Any]:
    """Other values of a field: none, another word, its opposite, twice as much, or one where it was none."""
    if kind.optional and value is not None:
        yield None
    for type_ in kind.types:
        if get_origin(type_) is Literal:
            yield from (word for word in get_args(type_) if word != value)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value * 2
    elif value is None and int in kind.types:
        yield 2  # pairs of columns are even
    elif kind.form == "phases" and value is not None:
        yield (value[0].model_copy(update={"value": value[0].value / 2}),)
    elif kind.form == "label":
        yield f"{value}_2"


def _clamped(model: Model) -> Model:
    """A model whose feed-forward parts clamp their gates."""
    ffns = (span.ffn.model_copy(update={"clamp": Clamp(limit=7.0)}) for span in model.layers)
    spans = (span.model_copy(update={"ffn": ffn}) for span, ffn in zip(model.layers, ffns, strict=True))
    return model.model_copy(update={"layers": tuple(spans), "logit_cap": 30.0})


def counted(model: Model) -> Any:
    """Numbers of parameters, and FLOPs for one MTP block, as more cannot be built so far."""
    mtp = None if model.mtp is None else model.mtp.model_copy(update={"depth": 1})
    return counts.parameters(model), flops_of_model(model.model_copy(update={"mtp": mtp}), TOKENS)


SCALINGS = (
    LinearScaling(factor=2.0),
    Llama3Scaling(factor=2.0, original=64, low_freq_factor=0.5),
    YarnScaling(factor=2.0, original=64, attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0),
)


COMPRESSED = Compressed(
    heads=4,
    head_dim=4,
    query_rank=3,
    window=2,
    groups=2,
    out_rank=3,
    compress=Hca(rate=2),
    rope=Rope(theta=100.0, width=2),
)
CHOSEN = COMPRESSED.model_copy(update={"compress": Csa(rate=2, indexer=Indexer(heads=2, head_dim=4, top_k=1))})
DELTA = DeltaNet(heads=4, key_heads=2, key_dim=3, value_dim=5, gate="head", convolution=3)


def _extended(model: Model, scaling: LinearScaling | Llama3Scaling | YarnScaling) -> Model:
    """The model with a value for every key of its attention that may be left out."""
    attention, options = model.attention, {"scale": 0.5}
    assert attention.rope
    rope = attention.rope.model_copy(update={"scaling": scaling})
    if isinstance(attention, Gqa):
        rope = rope.model_copy(update={"width": 2})
        options |= {"window": TOKENS - 2, "softcap": 1.0}
    else:
        options |= {"indexer": Indexer(heads=2, head_dim=32, top_k=TOKENS - 2)}
    return model.model_copy(update={"attention": attention.model_copy(update={"rope": rope, **options})})


def test_every_field_of_a_model_is_counted_or_listed() -> None:
    """Each field of the model, its attention and feed-forward kinds and the MTP block changes a count, or is listed."""
    bases = [shipped("quickstart.dsc").model, shipped("laptop-gqa.dsc").model]
    bases += [_extended(base, scaling) for base in bases for scaling in SCALINGS]
    attentions = (COMPRESSED, CHOSEN, DELTA)
    bases += [_clamped(bases[0]), *(bases[0].model_copy(update={"attention": attention}) for attention in attentions)]
    bases += [bases[0].model_copy(update={"hyper_connections": HyperConnections(streams=2)})]
    is_counted_by_path: dict[str, bool] = defaultdict(bool)
    for base in bases:
        for path, model in changes(base):
            is_counted_by_path[path] |= counted(model) != counted(base)
    kinds = {type(part) for base in bases for part in (base.attention, *(span.ffn for span in base.layers))}
    assert kinds == {Mla, Gqa, Compressed, DeltaNet, Dense, Moe}
    names = {path.rpartition(".")[2] for path in is_counted_by_path}
    blocks = {"attention", "head_dim", "rope", "scaling", "layers", "ffn", "balance", "kind", "first", "by"}
    fields = {name for cls in {*classes_of(Model)} - TRACED if cls.__name__ != "Phase" for name in cls.model_fields}
    assert fields - blocks <= names and LayerRange in {*classes_of(Model)}
    listed = {path for path in is_counted_by_path if path.endswith(tuple(f".{name}" for name in NOT_COUNTED))}
    forgotten = {path for path, is_counted in is_counted_by_path.items() if is_counted == (path in listed)}
    assert not forgotten, "fields that are not counted, and not listed as such; or listed, and counted"
