"""The reference against `transformers`: equal logits for equal weights, and unequal ones for anything else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.cases import config, gqa, moe, samples, trained_like
from tests.reference.config import Config, Dense, Gqa, Rope, Scaling
from tests.reference.huggingface import transformers_logits
from tests.reference.model import Reference

TOLERANCE = 1e-5
DIFFERENT = 100 * TOLERANCE

V2_MOE = moe(score="softmax", normalize=False, scale=16.0, bias_rate=None)
QWEN_MOE = moe(score="softmax", shared=0, groups=1, top_groups=1, scale=1.0, bias_rate=None)

LINEAR = Scaling("linear", factor=4.0)
LLAMA3 = Scaling("llama3", factor=8.0, original=64)
YARN = Scaling("yarn", factor=40.0, original=16, mscale=0.7, mscale_all_dim=1.0)
GPT_YARN = Scaling("yarn", factor=32.0, original=16, truncate=False)


def llama(**changes: Any) -> Config:
    return config(attention=gqa(head_dim=8, **changes), layers=(Dense(20), Dense(20)), mtp=None, sequence=40)


CONFIGS = {
    "as deepseek-v3": config(),
    "without query rank": config(query_rank=None),
    "dense layers only": config(layers=(Dense(20), Dense(20)), mtp=None),
    "moe layers only": config(layers=(moe(), moe(), moe())),
    "without mtp": config(mtp=None),
    "one group": config(layers=(Dense(20), moe(groups=1, top_groups=1))),
    "two shared experts, top 6, as v2-lite": config(
        query_rank=None, layers=(Dense(20), moe(experts=16, shared=2, top_k=6, groups=1, top_groups=1))
    ),
    "without shared expert": config(layers=(Dense(20), moe(shared=0))),
    "one group kept, one expert chosen": config(layers=(Dense(20), moe(top_k=1, top_groups=1))),
    "gates not normalised": config(layers=(Dense(20), moe(normalize=False, scale=1.0))),
    "another theta and eps": config(theta=50.0, norm_eps=1e-2),
    "one head, longer": config(heads=1, sequence=40),
    "sigmoid without bias": config(layers=(Dense(20), moe(bias_rate=None))),
    "as deepseek-v2": config(layers=(Dense(20), V2_MOE, V2_MOE), mtp=None),
    "as v2-lite": config(query_rank=None, layers=(Dense(20), replace(V2_MOE, groups=1, top_groups=1)), mtp=None),
    "v2, groups of one expert": config(layers=(replace(V2_MOE, groups=8, top_groups=4),), mtp=None),
    "as llama": config(attention=gqa(), layers=(Dense(20), Dense(20)), mtp=None),
    "as llama, multi-head, longer": config(attention=gqa(kv_heads=6), layers=(Dense(20),), mtp=None, sequence=40),
    "as llama, multi-query": config(attention=gqa(kv_heads=1), layers=(Dense(20),), mtp=None),
    "as qwen3-moe": config(attention=gqa(qk_norm="head"), layers=(QWEN_MOE, QWEN_MOE), mtp=None),
    "llama, linear": llama(rope=Rope(100.0, scaling=LINEAR)),
    "llama, llama3": llama(rope=Rope(100.0, scaling=LLAMA3)),
    "llama, yarn": llama(rope=Rope(100.0, scaling=YARN)),
    "llama, yarn with ends between pairs": llama(rope=Rope(100.0, scaling=GPT_YARN)),
    "llama, yarn with a factor of its own": llama(rope=Rope(100.0, scaling=replace(YARN, attention_factor=1.2))),
    "llama, all biases": llama(bias="all"),
    "as qwen2": llama(bias="qkv"),
    "as mistral": llama(window=7),
    "as smollm3, without position": llama(rope=None),
    "as olmoe": config(attention=gqa(qk_norm="width"), layers=(QWEN_MOE, QWEN_MOE), mtp=None),
    "as glm-4.5": config(
        attention=gqa(head_dim=8, bias="qkv", qk_norm="head", rope=Rope(100.0, width=4)),
        layers=(Dense(20), moe(groups=1, top_groups=1)),
        mtp=None,
    ),
    "deepseek-v3, linear": config(rope=Rope(100.0, scaling=LINEAR), mtp=None),
    "deepseek-v3, yarn": config(rope=Rope(100.0, scaling=YARN), mtp=None, sequence=40),
    "deepseek-v3, yarn without mscale": config(rope=Rope(100.0, scaling=GPT_YARN), mtp=None, sequence=40),
    "qwen3-moe after a dense layer, not normalised": config(
        attention=gqa(qk_norm="head"), layers=(Dense(20), replace(QWEN_MOE, normalize=False)), mtp=None, norm_eps=1e-2
    ),
}


def differences(
    model: Reference, z_BZ: Tensor, logical: dict[str, Tensor], other: Config | None = None
) -> tuple[float, float]:
    """max |Δlogits| of the main model and of MTP: the reference against `transformers` with `logical` tensors."""
    S = model.config.sequence
    tokens_BS, mtp_tokens_BS = z_BZ[:, :S], z_BZ[:, 1 : S + 1] if model.mtp else None
    with torch.no_grad():
        ours = model(tokens_BS, mtp_tokens_BS)
    main_BSV, mtp_BSV = transformers_logits(logical, other or model.config, tokens_BS, mtp_tokens_BS)
    main = (main_BSV - ours.logits_BSV).abs().max().item()
    return main, 0.0 if mtp_BSV is None else (mtp_BSV - ours.mtp_logits_BSV).abs().max().item()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # their way to have no shared expert
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_agree(name: str, seed: int) -> None:
    model = trained_like(CONFIGS[name], seed, torch.float32)
    z_BZ = samples(model.config, seed=seed)
    assert model(z_BZ[:, : model.config.sequence]).logits_BSV.std() > 0.1, "logits near zero would agree with anything"
    assert max(differences(model, z_BZ, model.logical_parameters())) < TOLERANCE


def kind(name: str) -> str:
    """The name with every layer and expert index replaced by *."""
    return re.sub(r"\b\d+\b", "*", name)


@pytest.mark.parametrize(
    "name", sorted({kind(name) for config in CONFIGS.values() for name in Reference(config).state_dict()})
)
def test_a_changed_tensor_changes_the_logits(name: str) -> None:
    """Noise of a tenth on one tensor of the kind; on a bias, a push that makes one expert everyone's choice."""
    has_it = [config for config in CONFIGS.values() if any(kind(n) == name for n in Reference(config).state_dict())]
    model = trained_like(has_it[0], 0, torch.float32)
    logical = model.logical_parameters()
    tensor = next(tensor for n, tensor in logical.items() if kind(n) == name)
    generator = torch.Generator().manual_seed(0)
    if name.endswith("router.bias"):
        tensor[0] += 1.0
    else:
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    main, mtp = differences(model, samples(model.config), logical)
    assert (mtp if name.startswith("mtp") else main) > DIFFERENT
    assert main < TOLERANCE or not name.startswith("mtp"), "MTP has no part in the main logits"


def roll(
    names: str, shift: Callable[[Config], int], per_head: bool = False
) -> Callable[[dict[str, Tensor], Config], None]:
    """Rolls the rows of the tensors of kind `names`, in each head or as a whole."""

    def change(logical: dict[str, Tensor], config: Config) -> None:
        for name, tensor in logical.items():
            if re.fullmatch(names, name):
                heads = config.attention.heads if per_head else 1
                rows = tensor.unflatten(0, (heads, -1)).roll(shift(config), dims=1)
                logical[name] = rows.flatten(0, 1)

    return change


def half(part: str) -> Callable[[dict[str, Tensor], Config], None]:
    """Swaps the gate and up halves of an `up`."""

    def change(logical: dict[str, Tensor], config: Config) -> None:
        for name, tensor in logical.items():
            if name.endswith(part):
                logical[name] = torch.cat(tensor.chunk(2)[::-1])

    return change


def rope_in_halves(logical: dict[str, Tensor], config: Config) -> None:
    """Pairs (x_i, x_{i+R/2}) in queries and keys alike, as rotate-half models have them."""
    dims = config.attention.head_dim
    order = torch.arange(dims.rope).view(2, -1).T.flatten()
    for name, tensor in logical.items():
        if name.endswith("kv_down"):
            tensor[-dims.rope :] = tensor[-dims.rope :][order]
        if name.endswith("q_up"):
            rows = tensor.view(config.attention.heads, dims.nope + dims.rope, -1)
            rows[:, dims.nope :] = rows[:, dims.nope :][:, order]


def biases_forgotten(logical: dict[str, Tensor], config: Config) -> None:
    for name, tensor in logical.items():
        if name.endswith("router.bias"):
            tensor.zero_()


def experts_renumbered(logical: dict[str, Tensor], config: Config) -> None:
    first, second = (f"layers.1.ffn.experts.{e}.down" for e in (0, 1))
    logical[first], logical[second] = logical[second], logical[first]


def hidden_before_embedding(logical: dict[str, Tensor], config: Config) -> None:
    logical["mtp.0.projection"] = torch.cat(logical["mtp.0.projection"].chunk(2, dim=1)[::-1], dim=1)


CONVENTIONS = {
    "up before gate, dense": half("layers.0.ffn.up"),
    "up before gate, shared": half("shared.up"),
    "up before gate, experts": half("experts.0.up"),
    "rope key before the latent": roll(r".*kv_down", lambda config: config.attention.head_dim.rope),
    "rope before nope": roll(r".*q_up", lambda config: config.attention.head_dim.rope, per_head=True),
    "value before key": roll(r".*kv_up", lambda config: config.attention.head_dim.value, per_head=True),
    "rope in halves": rope_in_halves,
    "biases forgotten": biases_forgotten,
    "experts renumbered": experts_renumbered,
    "hidden before embedding": hidden_before_embedding,
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_another_convention_changes_the_logits(name: str) -> None:
    model = trained_like(CONFIGS["as deepseek-v3"], 0, torch.float32)
    logical = model.logical_parameters()
    CONVENTIONS[name](logical, model.config)
    assert max(differences(model, samples(model.config), logical)) > DIFFERENT


V3, V2, QWEN = CONFIGS["as deepseek-v3"], CONFIGS["as deepseek-v2"], CONFIGS["as qwen3-moe"]


def with_gate(model: Config, **changes: object) -> Config:
    """`model` with another gate in every MoE layer."""
    layers = tuple(ffn if isinstance(ffn, Dense) else replace(ffn, **changes) for ffn in model.layers)
    return replace(model, layers=layers)


MISTRAL, YARNED = CONFIGS["as mistral"], CONFIGS["deepseek-v3, yarn"]


def attending(model: Config, **changes: Any) -> Config:
    """`model` with another attention."""
    return replace(model, attention=replace(model.attention, **changes))


FORMULAS = {
    "window": (MISTRAL, attending(MISTRAL, window=6)),
    "yarn, mscale_all_dim": (YARNED, attending(YARNED, rope=Rope(100.0, scaling=replace(YARN, mscale_all_dim=None)))),
    "yarn, original": (YARNED, attending(YARNED, rope=Rope(100.0, scaling=replace(YARN, original=64)))),
    "norm_eps": (V3, replace(V3, norm_eps=1e-2)),
    "theta": (V3, replace(V3, attention=replace(V3.attention, rope=Rope(100.0)))),
    "top_groups": (V3, with_gate(V3, top_groups=4)),
    "groups": (V3, with_gate(V3, groups=2, top_groups=1)),
    "top_k": (V3, with_gate(V3, top_k=2)),
    "normalize": (V3, with_gate(V3, normalize=False)),
    "scale": (V3, with_gate(V3, scale=1.0)),
    "v2, score": (V2, with_gate(V2, score="sigmoid")),
    "v2, top_groups": (V2, with_gate(V2, top_groups=4)),
    "v2, scale": (V2, with_gate(V2, scale=1.0)),
    "gqa, norm_eps": (QWEN, replace(QWEN, norm_eps=1e-2)),
    "gqa, theta": (QWEN, replace(QWEN, attention=replace(QWEN.attention, rope=Rope(1e4)))),
    "gqa, normalize": (QWEN, with_gate(QWEN, normalize=False)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_another_formula_changes_the_logits(name: str) -> None:
    base_config, changed_config = FORMULAS[name]
    model = trained_like(base_config, 0, torch.float32)
    assert max(differences(model, samples(base_config), model.logical_parameters(), changed_config)) > DIFFERENT


def pairs_in_halves(logical: dict[str, Tensor], attention: Gqa) -> None:
    """Our weights passed without reordering: rows of queries and keys have another order of pairs."""
    pairs = torch.arange(attention.head_dim).view(2, -1).T.flatten()
    for name, tensor in logical.items():
        if name.endswith("qkv"):
            heads = tensor.unflatten(0, (-1, attention.head_dim))
            heads[: attention.heads + attention.kv_heads] = heads[: attention.heads + attention.kv_heads][:, pairs]


def keys_after_values(logical: dict[str, Tensor], attention: Gqa) -> None:
    for name, tensor in logical.items():
        if name.endswith("qkv"):
            heads = tensor.unflatten(0, (-1, attention.head_dim))
            heads[attention.heads :] = heads[attention.heads :].roll(attention.kv_heads, dims=0)


def neighbours_apart(logical: dict[str, Tensor], attention: Gqa) -> None:
    """Query head h with keys h % kv_heads."""
    for name, tensor in logical.items():
        if name.endswith("qkv"):
            heads = tensor.unflatten(0, (-1, attention.head_dim))[: attention.heads]
            heads.copy_(heads.unflatten(0, (attention.kv_heads, -1)).transpose(0, 1).flatten(0, 1).clone())


@pytest.mark.parametrize("change", [pairs_in_halves, keys_after_values, neighbours_apart])
def test_another_convention_of_grouped_queries_changes_the_logits(
    change: Callable[[dict[str, Tensor], Gqa], None],
) -> None:
    model = trained_like(CONFIGS["as llama"], 0, torch.float32)
    logical = model.logical_parameters()
    assert isinstance(model.config.attention, Gqa)
    change(logical, model.config.attention)
    assert max(differences(model, samples(model.config), logical)) > DIFFERENT
