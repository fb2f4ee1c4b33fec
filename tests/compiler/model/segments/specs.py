"""Specs for the tests of layers, cuts and graphs."""

from __future__ import annotations

from typing import Any, Literal

from dsl.schema import (
    BUILT_IN,
    AdamW,
    AnyAttention,
    Balance,
    Batch,
    Chat,
    Cluster,
    Compressed,
    Data,
    DeltaNet,
    Dense,
    Device,
    Gqa,
    Hca,
    HeadDim,
    LayerRange,
    Machine,
    Mla,
    Model,
    Moe,
    Mtp,
    Parallel,
    Phase,
    RatePhase,
    Rope,
    ScheduleBlock,
    Spec,
    Train,
)

DENSE = Dense(inner=10)


def moe(**changes: Any) -> Moe:
    """Eight experts, three chosen, with every feature of the router."""
    values: dict[str, Any] = {
        "experts": 8,
        "shared": 1,
        "top_k": 3,
        "inner": 5,
        "groups": 4,
        "top_groups": 2,
        "score": "sigmoid",
        "normalize": True,
        "scale": 2.5,
        "balance": Balance(bias_rate=(Phase(value=0.001),), sequence_loss=1e-2),
    }
    return Moe(**(values | changes))


def mla(**changes: Any) -> Mla:
    values: dict[str, Any] = {
        "heads": 3,
        "query_rank": 7,
        "kv_rank": 9,
        "head_dim": HeadDim(nope=6, rope=4, value=5),
        "rope": Rope(theta=100.0),
    }
    return Mla(**(values | changes))


def gqa(**changes: Any) -> Gqa:
    """Three query heads to each of two heads of keys and values."""
    values: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 4, "qk_norm": "head", "rope": Rope(theta=100.0)}
    return Gqa(**(values | changes))


def compressed(**changes: Any) -> Compressed:
    """The attention of DeepSeek-V4: a window and compressed entries."""
    values: dict[str, Any] = {
        "heads": 4,
        "head_dim": 6,
        "query_rank": 7,
        "window": 5,
        "sinks": True,
        "groups": 2,
        "out_rank": 3,
        "compress": Hca(rate=4),
        "rope": Rope(theta=100.0, width=4),
    }
    return Compressed(**(values | changes))


def deltanet(gate: Literal["head", "channel"]) -> DeltaNet:
    """Two heads of values to each of two heads of keys."""
    return DeltaNet(heads=4, key_heads=2, key_dim=5, value_dim=3, gate=gate, convolution=3)


def softmax_moe(**changes: Any) -> Moe:
    """An MoE like `moe`, with the gate of DeepSeek-V2, which has no bias."""
    values = {"score": "softmax", "normalize": False, "scale": 16.0, "balance": Balance(sequence_loss=1e-2)}
    return moe(**(values | changes))


def clipped(model_spec: Spec) -> Spec:
    """The spec with logits of attention that are bounded."""
    train = model_spec.train.model_copy(update={"optimizer": AdamW(qk_clip=100.0)})
    return model_spec.model_copy(update={"train": train})


def padded(model_spec: Spec) -> Spec:
    """A run on conversations, whose rows end in padding."""
    return model_spec.model_copy(update={"data": model_spec.data.model_copy(update={"chat": Chat()})})


def spec(
    layers: tuple[Dense | Moe, ...] = (DENSE, moe(), moe()),
    attention: AnyAttention = mla(),  # noqa: B008 (frozen)
    vocab: int = 31,
    hidden: int = 12,
    mtp: bool = True,
    sequence: int = 8,
    micro_batch: int = 2,
    expert: int = 1,
    precision: str = "fp64",
    **more: Any,
) -> Spec:
    """A run of a model with one layer for each of `layers`. `more`: other keys of the model."""
    model = Model(
        name="small",
        vocab=vocab,
        hidden=hidden,
        init_std=0.1,
        norm_eps=1e-6,
        attention=attention,
        layers=tuple(LayerRange(first=i, last=i, ffn=ffn) for i, ffn in enumerate(layers)),
        mtp=Mtp(depth=1, weight=(Phase(value=0.3),)) if mtp else None,
        **more,
    )
    rate = (RatePhase(shape="constant", start=1e-4, end=1e-4, end_tokens=10**9),)
    return Spec(
        name="test",
        model=model,
        cluster=Cluster(name="any", nodes=expert, node=Machine(devices=1, device=Device(name="cpu", memory=10**9))),
        precision=BUILT_IN[precision],
        parallel=Parallel(pipeline=1, expert=expert, data=expert),
        schedule=ScheduleBlock(name="1f1b"),
        train=Train(
            sequence=sequence,
            micro_batch=micro_batch,
            batch=Batch(start=64, end=64),
            tokens=10**9,
            optimizer=AdamW(),
            rate=rate,
        ),
        data=Data(source="python_stdlib", tokenizer="tokenizer.json"),
    )


def deepseek_v3(precision: str = "bf16") -> Spec:
    """The published model, 64 expert ranks (arXiv 2412.19437, §4.2)."""
    experts = moe(experts=256, top_k=8, inner=2048, groups=8, top_groups=4)
    attention = mla(
        heads=128,
        query_rank=1536,
        kv_rank=512,
        head_dim=HeadDim(nope=128, rope=64, value=128),
        rope=Rope(theta=10_000.0),
    )
    return spec(
        layers=(*(Dense(inner=18432),) * 3, *(experts,) * 58),
        attention=attention,
        vocab=129_280,
        hidden=7168,
        sequence=4096,
        micro_batch=1,
        expert=64,
        precision=precision,
    )


def quickstart_sized() -> Spec:
    """A few million parameters, two expert ranks."""
    experts = moe(experts=16, top_k=4, inner=128, groups=4, top_groups=2)
    attention = mla(heads=4, query_rank=96, kv_rank=64, head_dim=HeadDim(nope=32, rope=16, value=32))
    return spec(
        layers=(Dense(inner=512), experts, experts, experts),
        attention=attention,
        vocab=4096,
        hidden=256,
        sequence=256,
        micro_batch=1,
        expert=2,
        precision="fp32",
    )
