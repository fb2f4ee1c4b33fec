"""The configuration of the reference: frozen, with the attribute names of the spec's `model` block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

Built = TypeVar("Built")


@dataclass(frozen=True)
class Phase:
    """A value that holds until `until_tokens` tokens have been trained on (None: for ever)."""

    value: float
    until_tokens: int | None = None


@dataclass(frozen=True)
class HeadDim:
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Scaling:
    """Scaling of frequencies for a longer context: `kind` is linear, llama3 or yarn."""

    kind: str
    factor: float
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True)
class Rope:
    theta: float
    width: int | None = None
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Indexer:
    heads: int
    head_dim: int
    top_k: int
    loss: float = 1.0


@dataclass(frozen=True)
class Mla:
    heads: int
    query_rank: int | None
    kv_rank: int
    head_dim: HeadDim
    rope: Rope | None
    scale: float | None = None
    indexer: Indexer | None = None


@dataclass(frozen=True)
class Gqa:
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: str | None
    rope: Rope | None
    bias: str | None = None
    scale: float | None = None
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    output_gate: bool = False


@dataclass(frozen=True)
class DeltaNet:
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    gate: str
    convolution: int


@dataclass(frozen=True)
class Entries:
    """Compressed entries of `rate` tokens each, which an indexer chooses, if there is one."""

    kind: str
    rate: int
    indexer: Indexer | None = None


@dataclass(frozen=True)
class Compressed:
    heads: int
    head_dim: int
    query_rank: int
    window: int
    groups: int
    out_rank: int
    rope: Rope | None
    sinks: bool = False
    compress: Entries | None = None


Attention = Mla | Gqa | Compressed | DeltaNet


@dataclass(frozen=True)
class Clamp:
    limit: float
    alpha: float
    shift: float


@dataclass(frozen=True)
class Dense:
    inner: int
    activation: str = "swiglu"
    clamp: Clamp | None = None
    bias: bool = False


@dataclass(frozen=True)
class Balance:
    bias_rate: tuple[Phase, ...] | None
    sequence_loss: float


@dataclass(frozen=True)
class Moe:
    experts: int
    shared: int
    top_k: int
    inner: int
    groups: int
    top_groups: int
    score: str
    normalize: bool
    scale: float
    balance: Balance
    activation: str = "swiglu"
    clamp: Clamp | None = None
    shared_inner: int | None = None
    shared_gate: bool = False
    bias: bool = False
    router_bias: bool = False
    choice: str = "scores"

    def __post_init__(self) -> None:
        assert self.experts % self.groups == 0, "groups are equal"
        assert self.choice in ("scores", "table"), self.choice
        assert self.score in ("sigmoid", "softmax", "sqrt_softplus"), self.score
        assert self.top_groups <= self.groups, "cannot keep more groups than there are"
        assert self.top_k <= self.experts // self.groups * self.top_groups, "the kept groups hold fewer than top_k"


@dataclass(frozen=True)
class Mtp:
    depth: int
    weight: tuple[Phase, ...]
    attention: Attention | None = None

    def __post_init__(self) -> None:
        assert self.depth == 1, "the reference predicts one further token"


@dataclass(frozen=True)
class HyperConnections:
    streams: int
    rounds: int = 20
    eps: float = 1e-6


WHOLE = ("tied", "norm", "embedding_scale", "residual_scale", "logit_scale", "logit_cap")  # keys of a whole model


@dataclass(frozen=True)
class Config:
    """A model and its sequence length. `layers` has one entry per layer; so has `attentions`, if they differ in it."""

    vocab: int
    hidden: int
    init_std: float
    norm_eps: float
    attention: Attention
    layers: tuple[Dense | Moe, ...]
    mtp: Mtp | None
    sequence: int
    tied: bool = False
    norm: str = "pre"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    attentions: tuple[Attention, ...] = ()
    hyper_connections: HyperConnections | None = None

    @classmethod
    def from_plan(cls, model: Mapping[str, Any]) -> Config:
        """Read the JSON dump of a spec's `model` with `sequence` added; further keys such as `name` are ignored."""
        layers: dict[int, Mapping[str, Any]] = {}
        for layer_range in sorted(model["layers"], key=lambda layer_range: layer_range.get("by", 1) > 1):
            first, last, stride = layer_range["first"], layer_range["last"], layer_range.get("by", 1)
            layers |= {layer: layer_range for layer in range(first, last + 1, stride)}
        assert sorted(layers) == list(range(len(layers))), "layer ranges must leave no hole"
        ranges = [layers[layer] for layer in sorted(layers)]
        return cls(
            vocab=model["vocab"],
            hidden=model["hidden"],
            init_std=model["init_std"],
            norm_eps=model["norm_eps"],
            attention=_attention(model["attention"]),
            layers=tuple(_ffn(layer_range["ffn"]) for layer_range in ranges),
            mtp=None if model["mtp"] is None else _mtp(model["mtp"]),
            sequence=model["sequence"],
            **{key: model[key] for key in WHOLE if key in model},
            attentions=tuple(_attention(layer_range.get("attention") or model["attention"]) for layer_range in ranges)
            if any(layer_range.get("attention") for layer_range in ranges)
            else (),
            hyper_connections=HyperConnections(**hyper) if (hyper := model.get("hyper_connections")) else None,
        )

    def attention_of(self, layer: int) -> Attention:
        """The attention of a layer."""
        return self.attentions[layer] if self.attentions else self.attention


def phase_value(phases: Sequence[Phase], tokens: int) -> float:
    """The value for a step that begins after `tokens` trained tokens: a phase ends when `until_tokens` is reached."""
    for phase in phases:
        if phase.until_tokens is None or tokens < phase.until_tokens:
            return phase.value
    raise AssertionError("the last phase must be without end")


def _phases(phases: Sequence[Mapping[str, Any]]) -> tuple[Phase, ...]:
    return tuple(Phase(phase["value"], phase["until_tokens"]) for phase in phases)


def _mtp(mtp: Mapping[str, Any]) -> Mtp:
    attention = mtp.get("attention")
    return Mtp(mtp["depth"], _phases(mtp["weight"]), None if attention is None else _attention(attention))


def _attention(attention: Mapping[str, Any]) -> Attention:
    if attention["kind"] == "deltanet":
        return _built(DeltaNet, {key: value for key, value in attention.items() if key != "kind"})
    keys = {key: value for key, value in attention.items() if key not in ("kind", "head_dim", "rope")}
    rope, dims = _rope(attention["rope"]), attention["head_dim"]
    if attention["kind"] == "compressed":
        entries = keys.pop("compress", None)
        if entries and entries.get("indexer"):
            entries = {**entries, "indexer": Indexer(**entries["indexer"])}
        compress = Entries(**entries) if entries else None
        return _built(Compressed, {**keys, "head_dim": dims, "rope": rope, "compress": compress})
    if attention["kind"] == "gqa":
        return _built(Gqa, {"qk_norm": None, **keys, "head_dim": dims, "rope": rope})
    indexer = Indexer(**keys.pop("indexer")) if keys.get("indexer") else keys.pop("indexer", None)
    return _built(Mla, {**keys, "head_dim": HeadDim(**dims), "rope": rope, "indexer": indexer})


def _built(cls: type[Built], keys: Mapping[str, Any]) -> Built:
    """An instance of a class of this file. Names the file to change if the schema has a key that it lacks."""
    unknown = sorted(keys.keys() - {field.name for field in fields(cls)})  # type: ignore[arg-type]
    assert not unknown, f"the reference has no {cls.__name__}.{unknown[0]}: add it to {__file__}, and compute it"
    return cls(**keys)


def _rope(rope: Mapping[str, Any] | None) -> Rope | None:
    if rope is None:
        return None
    scaling = rope.get("scaling")
    return Rope(rope["theta"], rope.get("width"), None if scaling is None else Scaling(**scaling))


def _ffn(ffn: Mapping[str, Any]) -> Dense | Moe:
    clamp = Clamp(**ffn["clamp"]) if ffn.get("clamp") else None
    activation = {"activation": ffn.get("activation", "swiglu"), "clamp": clamp, "bias": ffn.get("bias", False)}
    if ffn["kind"] == "dense":
        return Dense(inner=ffn["inner"], **activation)
    keys = ("experts", "shared", "top_k", "inner", "groups", "top_groups", "score", "normalize", "scale")
    rate = ffn["balance"]["bias_rate"]
    balance = Balance(None if rate is None else _phases(rate), ffn["balance"]["sequence_loss"])
    defaults = {"shared_inner": None, "shared_gate": False, "router_bias": False, "choice": "scores"}
    shared = {key: ffn.get(key, default) for key, default in defaults.items()}
    return Moe(**{key: ffn[key] for key in keys}, balance=balance, **activation, **shared)
