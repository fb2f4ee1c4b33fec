"""The canonical text of any spec parses to an equal spec."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsl import schema
from dsl.canonical import canonical
from dsl.closed_forms.ramp import ramp_of_spec
from dsl.closed_forms.stages import fewest_stages_of_rank
from dsl.load import analyse, load
from dsl.messages.diagnostics import Source, SpecError
from dsl.text.formatter import format_source
from dsl.text.parser import decode
from tests.specs.shipped import NAMES, path_of

Draw = st.DrawFn

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in schema.BUILT_IN)
SHORTEST = 8  # tokens of a sequence, and maximum tokens of entries
widths = st.integers(1, 100_000)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), min_size=1)
wide = st.sampled_from(["fp64", "fp32", "bf16"])


def small(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


def maybe(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | values


@st.composite
def phases(draw: Draw) -> tuple[schema.Phase, ...]:
    ends = sorted(draw(st.sets(st.integers(1, 10**16), max_size=3)))
    return tuple(schema.Phase(value=draw(small(0, 1000)), until_tokens=end) for end in (*ends, None))


hyper_connections = st.builds(
    schema.HyperConnections, streams=st.integers(2, 16), rounds=st.integers(1, 100), eps=small(1e-12, 0.1)
)
clamps = st.builds(schema.Clamp, limit=small(0.01, 1e6), alpha=small(0.01, 1000), shift=small(-100, 100))
acts = st.sampled_from(["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"])
activations = st.fixed_dictionaries({"activation": acts}) | st.fixed_dictionaries({"clamp": clamps})


@st.composite
def moes(draw: Draw, expert: int) -> schema.Moe:
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = expert * groups * draw(st.integers(1, 8))
    top_groups = draw(st.integers(1, groups))
    shared, by_table = draw(st.integers(0, 4)), draw(st.booleans()) and groups == 1
    balance = schema.Balance(bias_rate=draw(maybe(phases())), sequence_loss=draw(small(0, 1)))
    return schema.Moe(
        experts=experts,
        shared=shared,
        shared_inner=draw(maybe(widths)) if shared else None,
        shared_gate=draw(st.booleans()) if shared else False,
        top_k=draw(st.integers(1, min(1024, top_groups * experts // groups))),
        inner=draw(widths),
        groups=groups,
        top_groups=top_groups,
        score=draw(st.sampled_from(["sigmoid", "softmax", "sqrt_softplus"])),
        **draw(activations),
        normalize=draw(st.booleans()),
        scale=draw(small(0.001, 1000)),
        choice="table" if by_table else "scores",
        balance=schema.Balance() if by_table else balance,
    )


@st.composite
def mlas(draw: Draw) -> schema.Mla:
    rank = draw(maybe(widths))
    indexers = st.builds(
        schema.Indexer,
        heads=st.integers(1, 128),
        head_dim=st.integers(128, 512),
        top_k=st.integers(1, 10**6),
        loss=small(1e-3, 10),
    )
    return schema.Mla(
        heads=draw(st.integers(1, 256)),
        query_rank=rank,
        kv_rank=draw(widths),
        head_dim=schema.HeadDim(
            nope=draw(st.integers(1, 512)), rope=2 * draw(st.integers(1, 64)), value=draw(st.integers(1, 99))
        ),
        scale=draw(maybe(small(1e-3, 10))),
        indexer=draw(maybe(indexers)) if rank else None,
        rope=draw(maybe(ropes(st.none()))),
    )


@st.composite
def ropes(draw: Draw, columns: st.SearchStrategy[int | None]) -> schema.Rope:
    factor, original = st.integers(1, 64).map(float), st.integers(1, 10**6)
    linear = st.builds(schema.LinearScaling, factor=factor)
    llama3 = st.builds(
        schema.Llama3Scaling, factor=factor, original=original, high_freq_factor=st.sampled_from([4.0, 8.5])
    )
    yarn = st.builds(
        schema.YarnScaling,
        factor=factor,
        original=original,
        beta_fast=st.sampled_from([32.0, 24.5]),
        truncate=st.booleans(),
        attention_factor=maybe(small(0.1, 10)),
        mscale=maybe(small(0.1, 10)),
        mscale_all_dim=maybe(small(0.1, 10)),
    )
    scaling = draw(maybe(linear | llama3 | yarn))
    return schema.Rope(theta=draw(small(1.5, 1e9)), width=draw(columns), scaling=scaling)


@st.composite
def gqas(draw: Draw) -> schema.Gqa:
    kv_heads = draw(st.integers(1, 16))
    head_dim = 2 * draw(st.integers(1, 256))
    return schema.Gqa(
        heads=kv_heads * draw(st.integers(1, 16)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        bias=draw(st.sampled_from([None, "qkv", "all"])),
        qk_norm=draw(st.sampled_from([None, "head", "width"])),
        scale=draw(maybe(small(1e-3, 10))),
        window=draw(maybe(st.integers(1, 10**6))),
        sinks=draw(st.booleans()),
        softcap=draw(maybe(small(1e-3, 100))),
        rope=draw(maybe(ropes(maybe(st.integers(1, head_dim // 2).map(lambda pairs: 2 * pairs))))),
    )


@st.composite
def compresseds(draw: Draw) -> schema.Compressed:
    groups, head_dim = draw(st.integers(1, 16)), 2 * draw(st.integers(1, 256))
    rates = st.integers(2, SHORTEST)
    indexers = st.builds(
        schema.Indexer, heads=st.integers(1, 128), head_dim=st.integers(512, 1024), top_k=st.integers(1, 10**6)
    )
    return schema.Compressed(
        heads=groups * draw(st.integers(1, 16)),
        head_dim=head_dim,
        query_rank=draw(widths),
        window=draw(st.integers(1, 10**6)),
        sinks=draw(st.booleans()),
        groups=groups,
        out_rank=draw(widths),
        compress=draw(maybe(st.builds(schema.Hca, rate=rates) | st.builds(schema.Csa, rate=rates, indexer=indexers))),
        rope=draw(maybe(ropes(maybe(st.integers(1, head_dim // 2).map(lambda pairs: 2 * pairs))))),
    )


@st.composite
def models(draw: Draw, expert: int, least: int) -> schema.Model:
    lasts = sorted(draw(st.sets(st.integers(least - 1, least + 60), min_size=1, max_size=3)))
    firsts = [0, *(last + 1 for last in lasts[:-1])]
    dense = st.builds(lambda inner, options: schema.Dense(inner=inner, **options), widths, activations)
    ffns = [draw(dense | moes(expert)) for _ in lasts]
    attentions = mlas() | gqas() | compresseds()
    spans = [
        schema.LayerRange(first=first, last=last, ffn=ffn, attention=draw(maybe(attentions)))
        for first, last, ffn in zip(firsts, lasts, ffns, strict=True)
    ]
    if lasts[-1] > 4 * len(lasts) and draw(st.booleans()):
        every = schema.LayerRange(first=1, last=lasts[-1], by=2, ffn=ffns[0], attention=draw(attentions))
        if all(len(span.layers) > 1 for span in spans):
            spans = sorted([*spans, every], key=lambda span: (span.first, span.last, span.by))
    return schema.Model(
        name=draw(names),
        vocab=draw(st.integers(4096, 200_000)),
        hidden=draw(widths),
        init_std=draw(small(1e-9, 10)),
        norm_eps=draw(small(1e-12, 1)),
        attention=draw(attentions),
        layers=tuple(spans),
        tied=draw(st.booleans()),
        norm=draw(st.sampled_from(["pre", "post", "sandwich"])),
        embedding_scale=draw(small(0.01, 1e6)),
        residual_scale=draw(small(0.01, 1000)),
        logit_scale=draw(small(0.01, 1000)),
        logit_cap=draw(maybe(small(0.01, 1e6))),
        hyper_connections=draw(maybe(hyper_connections)),
        mtp=draw(maybe(st.builds(schema.Mtp, depth=st.just(1), weight=phases()))),
    )


@st.composite
def machines(draw: Draw, world: int, linear: str) -> tuple[int, schema.Machine]:
    """(number of nodes, machine) for `world` devices that multiply in the dtype of linears."""
    nodes = draw(st.sampled_from([divisor for divisor in range(1, world + 1) if world % divisor == 0]))
    rates = small(1, 1e17)
    fp8 = draw(maybe(rates))
    bf16 = draw(maybe(rates)) if fp8 or linear != "e4m3" else None
    cores = st.integers(1, 512)
    device = schema.Device(
        name=draw(names),
        sms=draw(maybe(st.integers(64, 256))),
        memory=draw(st.integers(2**58, 2**60)),
        hbm=draw(maybe(rates)),
        bf16=bf16,
        fp8=fp8,
        cores=draw(maybe(cores) if bf16 else cores),
        price=draw(maybe(small(0, 1000))),
    )
    return nodes, schema.Machine(
        devices=world // nodes, device=device, nvlink=draw(maybe(rates)), nic=draw(maybe(rates))
    )


@st.composite
def clusters(draw: Draw, pipeline: int, data: int, linear: str) -> schema.Cluster:
    """A cluster of one to three kinds of nodes. Each kind has the devices of whole pipeline ranks."""
    begins = sorted(draw(st.sets(st.integers(1, pipeline), max_size=2)) - {pipeline})
    ranks = [end - begin for begin, end in pairwise((0, *begins, pipeline))]
    (nodes, node), *further = (draw(machines(num_ranks * data, linear)) for num_ranks in ranks)
    more_nodes = None
    for num_nodes, machine in reversed(further):
        more_nodes = schema.MoreNodes(nodes=num_nodes, node=machine, more=more_nodes)
    return schema.Cluster(name=draw(names), nodes=nodes, node=node, more=more_nodes, rates=draw(maybe(texts)))


tiles = st.builds(schema.Tile, rows=st.integers(1, 1024), columns=st.integers(1, 1024))
narrow = st.builds(schema.Tile, rows=st.integers(1, 1024), columns=st.just(1))  # fills every width
wide_roles = ["parameter", "compute", "accumulate", "gradients", "master", "moments"]


@st.composite
def recipes(draw: Draw) -> schema.Precision:
    """A precision with 8-bit dtypes only where they are allowed, and then with tiles."""
    linear, dispatch, combine = (draw(wide | st.just("e4m3")) for _ in range(3))
    tile = narrow if linear == "e4m3" else tiles
    tiled = "e4m3" in (linear, dispatch, combine)
    return schema.Precision(
        name=draw(names),
        linear=linear,
        dispatch=dispatch,
        combine=combine,
        **{role: draw(wide) for role in wide_roles},
        activation_tile=draw(tile if tiled else maybe(tile)),
        weight_tile=draw(tile if linear == "e4m3" else maybe(tile)),
        promote=draw(maybe(st.integers(1, 4096))),
    )


precisions = st.sampled_from([schema.BUILT_IN[name] for name in ("fp64", "fp32", "bf16")]) | recipes()


@st.composite
def rates(draw: Draw, tokens: int) -> tuple[schema.RatePhase, ...]:
    ends = sorted(draw(st.sets(st.integers(1, tokens), max_size=3)) | {tokens})
    rate_phases: list[schema.RatePhase] = []
    for end in ends:
        shape = draw(st.sampled_from(["linear", "constant", "cosine"]))
        start = draw(small(0, 10))
        goal = start if shape == "constant" else draw(small(0, 10))
        rate_phases.append(schema.RatePhase(shape=shape, start=start, end=goal, end_tokens=end))
    return tuple(rate_phases)


def has_moe(model: schema.Model) -> bool:
    return any(isinstance(span.ffn, schema.Moe) for span in model.layers)


caps = st.fractions(1, 99, max_denominator=999)
schedules = (
    st.builds(schema.ScheduleBlock, name=st.sampled_from(["dualpipe", "1f1b", "zb1p", "gpipe", "dualpipev", "zbv"]))
    | st.builds(schema.ScheduleBlock, name=st.just("interleaved"), chunks=st.integers(2, 5))
    | st.builds(schema.ScheduleBlock, name=st.just("auto"), cap=maybe(caps))
    | st.builds(schema.ScheduleBlock, file=texts)
)


@st.composite
def specs(draw: Draw) -> schema.Spec:
    """A valid spec."""
    schedule = draw(schedules)
    pipeline = 2 * draw(st.integers(1, 4)) if schedule.name == "dualpipe" else draw(st.integers(1, 6))
    if schedule.cap is not None and draw(st.booleans()):  # one for each rank
        schedule = schedule.model_copy(update={"cap": tuple(draw(caps) for _ in range(pipeline))})
    expert = draw(st.integers(1, 4))
    data = expert * draw(st.integers(1, 4))
    micro_batch = draw(st.integers(1, 4))
    unit = 2 * data * micro_batch
    start, growth = unit * draw(st.integers(1, 4)), unit * draw(st.integers(0, 6))
    end = max(start, 2 * pipeline * data * micro_batch) + growth
    over = draw(st.integers(1, 10**13)) if end > start else 0
    tokens = draw(st.integers(2, 10**14))
    every = st.integers(1, 10**9)
    precision, model = draw(precisions), draw(models(expert, pipeline * fewest_stages_of_rank(schedule)))
    cluster, has_experts = draw(clusters(pipeline, data, precision.linear)), has_moe(model)
    ops = ["rmsnorm", "swiglu", "attention", *["mla_up"] * model.has_latents]
    ops += ["hyper"] * (model.hyper_connections is not None)
    ops += ["router", "experts"] * has_experts
    return schema.Spec(
        name=draw(names),
        model=model,
        cluster=cluster,
        precision=precision,
        recompute=tuple(draw(st.lists(st.sampled_from(ops), unique=True))),
        parallel=schema.Parallel(
            pipeline=pipeline,
            expert=expert,
            data=data,
            placement=draw(maybe(texts)) if has_experts and expert > 1 else None,
            zero=draw(st.integers(0, 1)),
        ),
        schedule=schedule,
        sm=schema.Sm(communication=draw(st.integers(0, 63)) if all(device.sms for device in cluster.devices) else 0),
        train=schema.Train(
            sequence=draw(st.integers(SHORTEST, 10**6)),
            micro_batch=micro_batch,
            batch=schema.Batch(start=start, end=end, over_tokens=over),
            tokens=tokens,
            optimizer=schema.AdamW(
                beta1=draw(small(0, 0.99)),
                beta2=draw(small(0, 0.99)),
                eps=draw(small(1e-12, 1)),
                weight_decay=draw(small(0, 10)),
                clip=draw(maybe(small(1e-3, 100))),
            ),
            rate=draw(rates(tokens)),
            seed=draw(st.integers(0, 2**63 - 1)),
            checkpoint=draw(maybe(st.builds(schema.Checkpoint, every=every, keep=st.integers(1, 9)))),
            validate=draw(maybe(st.builds(schema.Validate, every=every, batches=st.integers(1, 9)))),
        ),
        data=schema.Data(
            **draw(sources()),
            tokenizer=draw(texts | st.builds(schema.TrainTokenizer, vocab=st.integers(257, 4096))),
            validation=draw(small(0.001, 0.999)),
            fim=draw(st.sampled_from([0.0, 0.1])),
            filters=draw(st.none() | filters()),
        ),
    )


@st.composite
def sources(draw: st.DrawFn) -> dict[str, Any]:
    """One source, or several with their weights."""
    if draw(st.booleans()):
        return {"source": draw(texts)}
    names = draw(st.lists(st.sampled_from(("web", "code", "books", "train")), min_size=1, unique=True))
    weights = [1 + draw(st.integers(0, 99)) / 4 for _ in names]
    weighted_names = zip(names, weights, strict=True)
    fim = st.sampled_from([None, 0.0, 0.5])
    options = {"fim": fim, "filters": st.none() | filters()}
    return {
        "sources": tuple(
            schema.DataSource(name=name, files=draw(texts), weight=weight, **draw(st.fixed_dictionaries(options)))
            for name, weight in weighted_names
        )
    }


@st.composite
def filters(draw: st.DrawFn) -> schema.Filters:
    return schema.Filters(
        shortest=draw(st.none() | st.integers(1, 500)),
        longest=draw(st.none() | st.integers(500, 10**6)),
        quality=draw(st.sampled_from([None, "gopher"])),
        duplicates=draw(st.sampled_from([None, "exact", "near"])),
        similarity=draw(st.sampled_from([0.5, 0.8, 1.0])),
    )


def reread(text: str) -> schema.Spec:
    """The spec of a text, without a file."""
    source, mistakes = decode("spec.resolved", text.encode())
    analysis = analyse("spec.resolved", reader=lambda _: (source, mistakes))
    if analysis.diagnostics:
        raise SpecError(analysis.diagnostics)
    return analysis.views[0].spec


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(specs())
def test_parse_of_print_is_the_identity(spec: schema.Spec) -> None:
    text = canonical(spec)
    assert reread(text) == spec
    assert canonical(reread(text)) == text
    laid = format_source(Source("laid", text))
    assert reread(laid) == spec
    assert format_source(Source("laid", laid)) == laid


def test_shipped_specs_read_back(tmp_path: Path) -> None:
    for name in NAMES:
        spec = load(path_of(name))
        resolved = tmp_path / "spec.resolved"
        resolved.write_text(canonical(spec), encoding="utf-8", newline="")
        assert load(resolved) == spec
        assert ramp_of_spec(load(resolved)) == ramp_of_spec(spec)
