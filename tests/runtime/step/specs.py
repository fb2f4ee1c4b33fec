"""Small specs for tests that train, with every part of a model and different sizes in all dimensions."""

from __future__ import annotations

from typing import Literal

from dsl.schema import (
    BUILT_IN,
    AdamW,
    AnyAttention,
    Balance,
    Batch,
    Clamp,
    Cluster,
    Compressed,
    Csa,
    Data,
    DeltaNet,
    Dense,
    Device,
    Ema,
    Gqa,
    Grpo,
    Hca,
    HeadDim,
    HyperConnections,
    Indexer,
    LayerRange,
    Machine,
    Mla,
    Model,
    Moe,
    Mtp,
    Parallel,
    Phase,
    Prompts,
    RatePhase,
    Reward,
    Rope,
    ScheduleBlock,
    Spec,
    Train,
    TrainTokenizer,
    Validate,
    YarnScaling,
)

SEQUENCE, MICRO_BATCH = 6, 2


MOE = Moe(
    experts=8,
    shared=1,
    top_k=3,
    inner=10,
    groups=4,
    top_groups=2,
    score="sigmoid",
    normalize=True,
    scale=2.5,
    balance=Balance(bias_rate=(Phase(value=0.001),), sequence_loss=0.02),
)
V2_MOE = MOE.model_copy(
    update={"score": "softmax", "normalize": False, "scale": 4.0, "balance": Balance(sequence_loss=0.02)}
)
QWEN_MOE = MOE.model_copy(
    update={"score": "softmax", "shared": 0, "groups": 1, "top_groups": 1, "scale": 1.0, "balance": Balance()}
)


PATTERN_MOE = MOE.model_copy(
    update={
        "score": "sqrt_softplus",
        "clamp": Clamp(limit=0.7, alpha=1.702, shift=1.0),
        "shared": 2,
        "shared_inner": 7,
        "shared_gate": True,
        "bias": True,
        "router_bias": True,
    }
)


# Experts chosen by a table, in all layers, so that the MTP block has a table, too.
TABLE_MOE = MOE.model_copy(
    update={"score": "sqrt_softplus", "choice": "table", "groups": 1, "top_groups": 1, "balance": Balance()}
)
BIASED_MOE = QWEN_MOE.model_copy(update={"bias": True, "router_bias": True})


def mla(query_rank: int | None = 12, kv_rank: int = 9) -> Mla:
    return Mla(
        heads=2,
        query_rank=query_rank,
        kv_rank=kv_rank,
        head_dim=HeadDim(nope=6, rope=4, value=5),
        rope=Rope(theta=100.0),
    )


def gqa(qk_norm: Literal["head"] | None) -> Gqa:
    return Gqa(heads=4, kv_heads=2, head_dim=6, qk_norm=qk_norm, rope=Rope(theta=100.0))


YARN = YarnScaling(factor=40.0, original=16, mscale=0.7, mscale_all_dim=1.0)
# Grouped queries with all options, and latent attention with scaled positions.
EVERYTHING = Gqa(
    heads=4,
    kv_heads=2,
    head_dim=6,
    bias="all",
    qk_norm="width",
    scale=0.3,
    window=5,
    sinks=True,
    softcap=1.5,
    output_gate=True,
    rope=Rope(theta=100.0, width=4, scaling=YARN),
)


def deltanet(gate: Literal["head", "channel"], key_heads: int = 2) -> DeltaNet:
    return DeltaNet(heads=4, key_heads=key_heads, key_dim=6, value_dim=5, gate=gate, convolution=3)


def hybrid() -> Model:
    """Four layers with different attention, two of them with states, one of which is also the MTP block's."""
    dense = Dense(inner=22)
    spans = (
        LayerRange(first=0, last=0, ffn=dense, attention=deltanet("head")),
        LayerRange(first=1, last=1, ffn=MOE, attention=gqa("head").model_copy(update={"output_gate": True})),
        LayerRange(first=2, last=2, ffn=dense, attention=mla(query_rank=None).model_copy(update={"rope": None})),
        LayerRange(first=3, last=3, ffn=MOE),
    )
    return model(deltanet("channel"), dense, MOE, mtp=True).model_copy(update={"layers": spans})


def model(attention: AnyAttention, first: Dense | Moe, rest: Dense | Moe, mtp: bool) -> Model:
    """Four layers and, with `mtp`, one more."""
    return Model(
        name="small",
        vocab=61,
        hidden=16,
        init_std=0.2,
        norm_eps=1e-6,
        attention=attention,
        layers=(LayerRange(first=0, last=0, ffn=first), LayerRange(first=1, last=3, ffn=rest)),
        mtp=Mtp(depth=1, weight=(Phase(value=0.3),)) if mtp else None,
    )


def pattern() -> Model:
    """Four layers of three kinds in turn, two with their own attention, and a tied embedding and head."""
    dense, own_attention = (
        Dense(inner=22, activation="geglu_tanh"),
        gqa(qk_norm="head").model_copy(update={"rope": Rope(theta=7.0)}),
    )
    base = model(gqa(qk_norm=None), dense, dense, mtp=True)
    spans = (
        LayerRange(first=0, last=3, ffn=dense),
        LayerRange(first=1, last=3, by=2, ffn=PATTERN_MOE, attention=own_attention),
        LayerRange(first=2, last=2, by=2, ffn=Dense(inner=12, activation="relu2")),
    )
    ends = {"tied": True, "embedding_scale": 4.0, "logit_scale": 0.5, "logit_cap": 2.0}
    return base.model_copy(update={"layers": spans, "norm": "sandwich", "residual_scale": 0.5, **ends})


def with_own_mtp(base: Model, attention: AnyAttention) -> Model:
    """A model whose MTP block has its own attention."""
    assert base.mtp is not None
    return base.model_copy(update={"mtp": base.mtp.model_copy(update={"attention": attention})})


def split() -> Model:
    """Dense layers with everything that tensor ranks shard: two kinds, one with its own attention."""
    keys = EVERYTHING.model_copy(update={"qk_norm": "head"})
    spans = (
        LayerRange(first=0, last=2, ffn=Dense(inner=22, bias=True), attention=keys),
        LayerRange(first=1, last=3, by=2, ffn=Dense(inner=12, activation="geglu_tanh")),
    )
    base = model(gqa(qk_norm=None), spans[0].ffn, spans[1].ffn, mtp=True)
    ends = {"tied": True, "embedding_scale": 4.0, "logit_scale": 0.5, "logit_cap": 2.0}
    return base.model_copy(update={"layers": spans, "norm": "sandwich", "residual_scale": 0.5, **ends})


def v4() -> Model:
    """The attention of DeepSeek-V4: only a window in the first layer, a window and entries in the others, with chosen
    entries in one of them."""
    entries = Compressed(
        heads=4,
        head_dim=6,
        query_rank=7,
        window=3,
        sinks=True,
        groups=2,
        out_rank=5,
        compress=Hca(rate=2),
        rope=Rope(theta=160.0, width=4, scaling=YARN.model_copy(update={"attention_factor": 1.0})),
    )
    window = entries.model_copy(update={"compress": None, "rope": Rope(theta=100.0, width=4)})
    base = model(entries, Dense(inner=22), MOE.model_copy(update={"score": "sqrt_softplus"}), mtp=True)
    first, second = base.layers
    chosen = Csa(rate=2, indexer=Indexer(heads=2, head_dim=4, top_k=2, loss=0.7))
    of_chosen = LayerRange(first=2, last=3, by=2, ffn=MOE, attention=entries.model_copy(update={"compress": chosen}))
    return base.model_copy(update={"layers": (first.model_copy(update={"attention": window}), second, of_chosen)})


def streams(of: Model, streams: int = 3) -> Model:
    """The model with several residual streams instead of one, and few rounds."""
    return of.model_copy(update={"hyper_connections": HyperConnections(streams=streams, rounds=4, eps=1e-3)})


MODELS = {
    "v3": model(mla(), Dense(inner=22), MOE, mtp=True),
    "v2": model(mla(query_rank=None, kv_rank=10), Dense(inner=22), V2_MOE, mtp=False),
    "llama": model(gqa(qk_norm=None), Dense(inner=22), Dense(inner=22), mtp=False),
    "qwen": model(gqa(qk_norm="head"), QWEN_MOE, QWEN_MOE, mtp=True),
    "pattern": pattern(),
    "everything": model(EVERYTHING, Dense(inner=22, bias=True), BIASED_MOE, mtp=False).model_copy(
        update={"norm": "post"}
    ),
    "split": split(),
    "plain": model(  # experts without a gate, chosen as in DeepSeek-V4
        gqa(qk_norm=None),
        Dense(inner=22),
        MOE.model_copy(update={"inner": 12, "score": "sqrt_softplus", "activation": "relu2"}),
        mtp=True,
    ),
    "together": model(EVERYTHING, Dense(inner=22, bias=True), Dense(inner=12), mtp=True),  # all heads normed as one
    "latent": model(mla(), Dense(inner=22), Dense(inner=12), mtp=True),
    "post": model(
        gqa(qk_norm="head").model_copy(update={"kv_heads": 4, "bias": "all"}),
        Dense(inner=24),
        Dense(inner=12),
        mtp=False,
    ).model_copy(update={"norm": "post"}),
    "tables": with_own_mtp(
        model(mla(), TABLE_MOE.model_copy(update={"score": "sigmoid", "normalize": False}), TABLE_MOE, mtp=True),
        EVERYTHING,
    ),
    "v4": v4(),
    "hybrid": hybrid(),
    "v32": model(
        mla().model_copy(update={"indexer": Indexer(heads=4, head_dim=6, top_k=3, loss=0.7)}),
        Dense(inner=22),
        MOE,
        mtp=True,
    ),
    "yarn": model(mla().model_copy(update={"rope": Rope(theta=100.0, scaling=YARN)}), Dense(inner=22), MOE, mtp=True),
}


# Latent and grouped attention, experts and none, all options between sublayers; with several streams.
WITH_STREAMS = ("v3", "pattern", "everything", "split", "tables", "v4", "hybrid", "v32")
MODELS |= {f"{name}_streams": streams(MODELS[name]) for name in WITH_STREAMS}


def spec(
    pp: int,
    ep: int,
    dp: int,
    num_micro_batches: int,
    steps: int = 5,
    zero: int = 0,
    of: str = "v3",
    schedule: str = "dualpipe",
    precision: str = "fp64",
    documents: Literal["joined", "masked"] = "joined",
    tensor: int = 1,
    vocab: int | None = None,
    expert_tensor: int = 1,
    context: int = 1,
    sequence: int = SEQUENCE,
) -> Spec:
    """`dp` data ranks per pipeline rank; their columns form expert groups; each pipeline runs
    `num_micro_batches`. One rank runs 1f1b. By default, several tensor ranks have a vocabulary that they can
    shard, and one rank the model's."""
    vocab = vocab or (60 if tensor > 1 else MODELS[of].vocab)
    batch = num_micro_batches * dp * MICRO_BATCH
    tokens, columns = steps * batch * sequence, dp * tensor * context
    return Spec(
        name="differential",
        model=MODELS[of].model_copy(update={"vocab": vocab}),
        cluster=Cluster(
            name="c", nodes=1, node=Machine(devices=pp * columns, device=Device(name="cpu", memory=4 * 10**9))
        ),
        precision=BUILT_IN[precision],
        parallel=Parallel(
            pipeline=pp, expert=ep, expert_tensor=expert_tensor, data=dp, tensor=tensor, context=context, zero=zero
        ),
        schedule=ScheduleBlock(name="1f1b" if pp == 1 else schedule),
        train=Train(
            sequence=sequence,
            micro_batch=MICRO_BATCH,
            batch=Batch(start=batch, end=batch),
            tokens=tokens,
            optimizer=AdamW(weight_decay=0.1, clip=0.5),
            rate=(
                RatePhase(shape="linear", start=0.0, end=1e-2, end_tokens=2 * batch * sequence),
                RatePhase(shape="cosine", start=1e-2, end=1e-3, end_tokens=tokens),
            ),
            validate=Validate(every=5),
        ),
        data=Data(source="python_stdlib", tokenizer=TrainTokenizer(vocab=300), documents=documents),
    )


def with_host_state(spec: Spec, offload: tuple[str, ...] = (), decay: float = 0.75) -> Spec:
    """A spec whose optimizer state is offloaded, with a moving average of the weights that is validated too."""
    validate = Validate(every=5, ema=True)
    train = spec.train.model_copy(update={"ema": Ema(decay=decay), "validate": validate})
    return spec.model_copy(update={"offload": offload, "train": train})


def with_copies(spec: Spec, shard: int) -> Spec:
    """A spec in which groups of `shard` data ranks each keep a copy of what they shard."""
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"shard": shard})})


def with_rewards(spec: Spec, **keys: object) -> Spec:
    """A spec that learns from rewards. `keys`: of `grpo`. Prompts and completions fill the sequence by default."""
    assert not spec.model.mtp, "a model that predicts one token"
    longest, rewards = spec.train.sequence // 2, (Reward(name="right", check="exact"),)
    usual = {"group": 2, "prompt": spec.train.sequence - longest, "completion": longest, "rewards": rewards}
    train = spec.train.model_copy(update={"validate": None, "grpo": Grpo.model_validate(usual | keys)})
    data = spec.data.model_copy(update={"prompts": Prompts()})
    return spec.model_copy(update={"train": train, "data": data})


def without_mtp(spec: Spec) -> Spec:
    """A spec whose model predicts only the next token."""
    return spec.model_copy(update={"model": spec.model.model_copy(update={"mtp": None})})
