"""Attention of the reference against modules of `transformers` from models that differ in other parts: GPT-OSS,
Gemma 2."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, GptOssConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from tests.reference.attention import GroupedQueryAttention
from tests.reference.cases import gqa, noise
from tests.reference.config import Gqa, Rope, Scaling
from tests.reference.huggingface import grouped_tensors, rope_parameters

HIDDEN, SEQUENCE, EPS = 24, 20, 1e-6
TOLERANCE = 1e-5  # of float32, of results of order one
DIFFERENT = 100 * TOLERANCE
GPT_OSS = gqa(
    head_dim=8,
    bias="all",
    sinks=True,
    rope=Rope(100.0, scaling=Scaling("yarn", factor=32.0, original=16, truncate=False)),
)
GEMMA = gqa(head_dim=8, softcap=2.0, scale=0.5, rope=Rope(100.0))


def theirs(attention: Gqa) -> tuple[nn.Module, nn.Module]:
    """The attention of one layer, with a window if ours has one, and its rotation."""
    keys = dict(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        rope_parameters=rope_parameters(attention),
        max_position_embeddings=SEQUENCE,
        sliding_window=attention.window,
        layer_types=["sliding_attention" if attention.window else "full_attention"],
        attn_implementation="eager",
    )
    if attention.sinks:
        oss = GptOssConfig(**keys)
        return GptOssAttention(oss, 0), GptOssRotaryEmbedding(oss)
    assert attention.scale
    gemma = Gemma2Config(
        query_pre_attn_scalar=round(attention.scale**-2), attn_logit_softcapping=attention.softcap, **keys
    )
    return Gemma2Attention(gemma, 0), Gemma2RotaryEmbedding(gemma)


@torch.no_grad()
def results(attention: Gqa, other: Gqa | None = None) -> tuple[Tensor, Tensor]:
    """[2, S, D] of the reference, and of their module with the same weights and perhaps other settings."""
    ours = GroupedQueryAttention(HIDDEN, attention, EPS)
    for seed, (name, tensor) in enumerate(sorted(ours.state_dict().items())):
        tensor.copy_(1 + 0 * tensor if name == "norm" else 0.25 * noise(*tensor.shape, seed=seed))
    ours = ours.float()
    x_BSD = noise(2, SEQUENCE, HIDDEN, seed=99).float()
    x_BSD *= torch.rsqrt(x_BSD.square().mean(-1, keepdim=True) + EPS)  # normed already: the norm changes nothing
    module, rotary = theirs(other or attention)
    logical = {f"a.{name}": tensor for name, tensor in ours.state_dict().items()}
    state = {name.removeprefix("b."): tensor for name, tensor in grouped_tensors(logical, "a", "b", attention).items()}
    module.load_state_dict(state, strict=True)
    distance_SS = torch.arange(SEQUENCE)[:, None] - torch.arange(SEQUENCE)
    window = (other or attention).window or SEQUENCE
    mask_SS = torch.zeros(SEQUENCE, SEQUENCE).masked_fill((distance_SS < 0) | (distance_SS >= window), -torch.inf)
    angles = rotary(x_BSD, torch.arange(SEQUENCE)[None])
    return ours(x_BSD), module.eval()(x_BSD, position_embeddings=angles, attention_mask=mask_SS[None, None])[0]


@pytest.mark.parametrize("window", [None, 5], ids=["all keys", "a window"])
@pytest.mark.parametrize("attention", [GPT_OSS, GEMMA], ids=["gpt-oss", "gemma2"])
def test_results_agree(attention: Gqa, window: int | None) -> None:
    ours, module = results(replace(attention, window=window))
    assert 0.3 < ours.std() < 3 and (ours - module).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("attention", "other"),
    [
        (GPT_OSS, replace(GPT_OSS, window=5)),
        (GPT_OSS, replace(GPT_OSS, rope=Rope(100.0))),
        (GEMMA, replace(GEMMA, softcap=4.0)),
        (GEMMA, replace(GEMMA, scale=0.25)),
    ],
    ids=["window", "yarn", "softcap", "scale"],
)
def test_another_setting_gives_other_results(attention: Gqa, other: Gqa) -> None:
    ours, module = results(attention, other)
    assert (ours - module).abs().max() > DIFFERENT
