"""Random small specs: every kind of attention, feed-forward part and gate, on every mesh that fits."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from dsl.closed_forms.stages import fewest_stages_of_rank
from dsl.schema import (
    BUILT_IN,
    Balance,
    Batch,
    Clamp,
    Cluster,
    Compressed,
    Csa,
    DeltaNet,
    Dense,
    Device,
    Gqa,
    Hca,
    HeadDim,
    HyperConnections,
    Indexer,
    LayerRange,
    LinearScaling,
    Llama3Scaling,
    Machine,
    Mla,
    Model,
    Moe,
    Mtp,
    Parallel,
    Phase,
    Precision,
    Rope,
    ScheduleBlock,
    Spec,
    YarnScaling,
)
from dsl.schema.model import Act
from tests.specs.shipped import shipped

ALWAYS = (Phase(value=0.001),)
FALLING = (Phase(value=0.01, until_tokens=1000), Phase(value=0.0))
MIXED = Precision(name="mixed", moments="bf16")  # bf16 weights, fp32 master weights
PRECISIONS = (BUILT_IN["fp64"], BUILT_IN["fp32"], BUILT_IN["bf16"], MIXED)
widths = st.integers(1, 9)
evens = st.integers(1, 4).map(lambda half: 2 * half)

factors = st.sampled_from([4.0, 8.0])
contexts = st.sampled_from([16, 64])
slopes = st.none() | st.sampled_from([0.7, 1.0])
llama3 = st.builds(
    Llama3Scaling,
    factor=factors,
    original=contexts,
    low_freq_factor=st.sampled_from([0.5, 1.0]),
    high_freq_factor=st.sampled_from([2.0, 4.0]),
)
yarn = st.builds(
    YarnScaling,
    factor=factors,
    original=contexts,
    beta_fast=st.sampled_from([8.0, 32.0]),
    beta_slow=st.sampled_from([0.5, 1.0]),
    truncate=st.booleans(),
    attention_factor=slopes,
    mscale=slopes,
    mscale_all_dim=slopes,
)
scalings = st.none() | st.builds(LinearScaling, factor=factors) | llama3 | yarn
thetas = st.sampled_from([100.0, 10_000.0])
ropes = st.none() | st.builds(Rope, theta=thetas, scaling=scalings)
scales = st.none() | st.sampled_from([0.2, 0.5])
head_dims = st.builds(HeadDim, nope=widths, rope=evens, value=widths)
indexers = st.builds(
    Indexer,
    heads=st.integers(1, 3),
    head_dim=st.integers(8, 10),
    top_k=st.integers(1, 6),
    loss=st.sampled_from([0.5, 1.0]),
)


@st.composite
def latents(draw: st.DrawFn) -> Mla:
    """With or without a query latent and, with one, with or without an indexer."""
    rank = draw(st.none() | widths)
    return Mla(
        heads=draw(widths),
        query_rank=rank,
        kv_rank=draw(widths),
        head_dim=draw(head_dims),
        scale=draw(scales),
        indexer=draw(st.none() | indexers) if rank else None,
        rope=draw(ropes),
    )


latent = latents()


@st.composite
def grouped(draw: st.DrawFn) -> Gqa:
    """Plain attention, or attention with any options."""
    kv_heads = draw(st.integers(1, 3))
    heads, head_dim = kv_heads * draw(st.integers(1, 3)), draw(evens)
    rope = draw(ropes)
    if rope and draw(st.booleans()):
        rope = rope.model_copy(update={"width": 2 * draw(st.integers(1, head_dim // 2))})
    return Gqa(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bias=draw(st.sampled_from([None, "qkv", "all"])),
        qk_norm=draw(st.sampled_from([None, "head", "width"])),
        scale=draw(scales),
        window=draw(st.none() | st.integers(1, 6)),
        softcap=draw(st.none() | st.sampled_from([1.0, 5.0])),
        rope=rope,
        **{name: draw(st.booleans()) for name, field in Gqa.model_fields.items() if field.annotation is bool},
    )


chosen = st.builds(
    Csa,
    rate=st.integers(2, 4),
    indexer=st.builds(
        Indexer,
        heads=st.integers(1, 3),
        head_dim=st.integers(8, 10),
        top_k=st.integers(1, 3),
        loss=st.sampled_from([0.5, 1.0]),
    ),
)


@st.composite
def compressed(draw: st.DrawFn) -> Compressed:
    """A window, perhaps with all or chosen entries."""
    groups, head_dim = draw(st.integers(1, 3)), draw(evens)
    rope = draw(ropes)
    if rope and draw(st.booleans()):
        rope = rope.model_copy(update={"width": 2 * draw(st.integers(1, head_dim // 2))})
    return Compressed(
        heads=groups * draw(st.integers(1, 2)),
        head_dim=head_dim,
        query_rank=draw(widths),
        window=draw(st.integers(1, 6)),
        sinks=draw(st.booleans()),
        groups=groups,
        out_rank=draw(widths),
        compress=draw(st.none() | st.builds(Hca, rate=st.integers(2, 4)) | chosen),
        rope=rope,
    )


@st.composite
def deltanets(draw: st.DrawFn) -> DeltaNet:
    """States that decay by head or by channel."""
    key_heads = draw(st.integers(1, 3))
    return DeltaNet(
        heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        key_dim=draw(widths),
        value_dim=draw(widths),
        gate=draw(st.sampled_from(["head", "channel"])),
        convolution=draw(st.integers(1, 5)),
    )


attentions = latent | grouped() | compressed() | deltanets()
mtps = st.builds(Mtp, depth=st.just(1), weight=st.sampled_from([ALWAYS, FALLING]), attention=st.none() | attentions)
clamps = st.builds(
    Clamp, limit=st.sampled_from([0.5, 7.0]), alpha=st.sampled_from([1.0, 1.7]), shift=st.sampled_from([0.0, 1.0])
)
activations = st.fixed_dictionaries({"activation": st.sampled_from(get_args(Act))}) | st.fixed_dictionaries(
    {"clamp": clamps}
)


@st.composite
def mixtures(draw: st.DrawFn, expert: int) -> Moe:
    """Experts that `expert` ranks can share."""
    experts = expert * draw(st.integers(1, 4))
    bias, loss = draw(st.sampled_from([None, ALWAYS, FALLING])), draw(st.sampled_from([0.0, 0.01]))
    groups = draw(st.sampled_from([divisor for divisor in range(1, experts + 1) if experts % divisor == 0]))
    top_groups = draw(st.integers(1, groups))
    shared, by_table = draw(st.integers(0, 2)), draw(st.booleans()) and groups == 1
    return Moe(
        experts=experts,
        shared=shared,
        **draw(activations),
        bias=draw(st.booleans()),
        router_bias=draw(st.booleans()),
        shared_inner=draw(st.none() | widths) if shared else None,
        shared_gate=draw(st.booleans()) if shared else False,
        top_k=draw(st.integers(1, experts // groups * top_groups)),
        inner=draw(widths),
        groups=groups,
        top_groups=top_groups,
        max_nodes=draw(st.none() | st.integers(1, 4)),
        scale=draw(st.sampled_from([1.0, 2.5])),
        score=draw(st.sampled_from(["sigmoid", "softmax", "sqrt_softplus"])),
        normalize=draw(st.booleans()),
        choice="table" if by_table else "scores",
        balance=Balance() if by_table else Balance(bias_rate=bias, sequence_loss=loss),
    )


@st.composite
def models(draw: st.DrawFn, expert: int, layers: int) -> Model:
    dense = st.builds(
        lambda bias, options, **sizes: Dense(bias=bias, **options, **sizes), st.booleans(), activations, inner=widths
    )
    ffn = dense | mixtures(expert)
    spans: list[LayerRange] = []
    while not spans or spans[-1].last < layers - 1:
        first = spans[-1].last + 1 if spans else 0
        attention = draw(st.none() | attentions)
        spans.append(
            LayerRange(first=first, last=draw(st.integers(first, layers - 1)), ffn=draw(ffn), attention=attention)
        )
    if layers > 2 and draw(st.booleans()):  # every n-th layer, if one layer of each other range remains
        first, stride = draw(st.integers(0, layers - 2)), draw(st.integers(2, layers))
        every = LayerRange(
            first=first, last=layers - 1, by=stride, ffn=draw(ffn), attention=draw(st.none() | attentions)
        )
        if not any({*span.layers} <= {*every.layers} for span in spans):
            spans = sorted([*spans, every], key=lambda span: (span.first, span.last, span.by))
    return Model(
        name="random",
        vocab=draw(st.sampled_from([2, 40, 2000])),
        hidden=draw(widths),
        init_std=draw(st.sampled_from([0.006, 0.02])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        attention=draw(attentions),
        layers=tuple(spans),
        tied=draw(st.booleans()),
        norm=draw(st.sampled_from(["pre", "pre", "post", "sandwich"])),
        embedding_scale=draw(st.sampled_from([1.0, 3.0])),
        residual_scale=draw(st.sampled_from([1.0, 0.5])),
        logit_scale=draw(st.sampled_from([1.0, 0.25])),
        logit_cap=draw(st.none() | st.sampled_from([30.0, 50.0])),
        hyper_connections=draw(
            st.none()
            | st.builds(
                HyperConnections,
                streams=st.sampled_from([2, 3]),
                rounds=st.sampled_from([1, 3]),
                eps=st.sampled_from([1e-6, 1e-3]),
            )
        ),
        mtp=draw(st.none() | mtps),
    )


names = st.sampled_from(["gpipe", "1f1b", "zb1p", "zbv", "dualpipev", "dualpipe"])
schedules = st.builds(ScheduleBlock, name=names | st.just("interleaved"))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Small enough to be planned in some 10 ms."""
    pipeline, expert, copies = draw(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 2)))
    data = expert * copies
    schedule = draw(schedules) if pipeline > 1 else ScheduleBlock(name="1f1b")
    model = draw(models(expert, pipeline * fewest_stages_of_rank(schedule) + draw(st.integers(0, 3))))
    batch = data * 2 * pipeline * draw(st.integers(1, 2))
    base = shipped("tiny.dsc")
    device = Device(name="cpu", memory=10**9)
    return base.model_copy(
        update={
            "model": model,
            "cluster": Cluster(name="any", nodes=pipeline, node=Machine(devices=data, device=device)),
            "precision": draw(st.sampled_from(PRECISIONS)),
            "parallel": Parallel(pipeline=pipeline, expert=expert, data=data, zero=draw(st.integers(0, 1))),
            "schedule": schedule,
            "train": base.train.model_copy(
                update={"batch": Batch(start=batch, end=batch), "sequence": 4, "tokens": 20 * batch}
            ),
        }
    )
