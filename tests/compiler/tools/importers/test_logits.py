"""Models of `transformers` with random weights, imported and computed by the reference: the same logits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING as CONFIGS
from transformers import AutoModelForCausalLM

from compiler.tools.importers import huggingface
from compiler.tools.importers.json_text import parse
from dsl.messages.diagnostics import Source
from dsl.schema import Gqa, Model, Moe
from tests.reference.config import Config
from tests.reference.model import Reference

SEQUENCE, TOLERANCE = 12, 1e-5
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "hidden_act": "gelu"},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.3,
        "tie_word_embeddings": True,
    },
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 5},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 14,
        "experts_implementation": "eager",
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"},
}
NORMS = {  # ours → theirs
    "pre": {"attention.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"},
    "post": {"attention.post_norm": "post_attention_layernorm", "ffn.post_norm": "post_feedforward_layernorm"},
    "sandwich": {
        "attention.norm": "input_layernorm",
        "attention.post_norm": "post_attention_layernorm",
        "ffn.norm": "pre_feedforward_layernorm",
        "ffn.post_norm": "post_feedforward_layernorm",
    },
}


def logical(theirs: dict[str, Tensor], model: Model, from_one: bool) -> dict[str, Tensor]:
    """The transformers tensors by our names: rotated columns in pairs, gains not relative to 1."""
    gain = 1.0 if from_one else 0.0
    tensors = {"embedding": theirs["model.embed_tokens.weight"], "final_norm": gain + theirs["model.norm.weight"]}
    if not model.tied:
        tensors["head"] = theirs["lm_head.weight"]
    for layer in range(model.num_layers):
        in_layer = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in theirs.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        names = NORMS[model.norm]
        mine = {ours: gain + in_layer[f"{name}.weight"] for ours, name in names.items()}
        attention = model.attention_of(layer)
        assert isinstance(attention, Gqa)
        mine |= attended(in_layer, attention.head_dim)
        mine |= mixture(in_layer, ffn) if isinstance(ffn := model.ffn(layer), Moe) else network(in_layer, "mlp", "ffn")
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in mine.items()}
    return {name: tensor.detach().double() for name, tensor in tensors.items()}


def attended(of: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """Reorder pairs (i, i + W/2) of theirs to our (2i, 2i + 1), for queries and keys and for their biases and norms."""
    in_pairs = torch.arange(width).view(2, -1).T.flatten()

    def paired(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, width))[:, in_pairs].flatten(0, 1)

    tensors = {"attention.out": of["self_attn.o_proj.weight"]}
    for kind, ours in (("weight", "qkv"), ("bias", "qkv_bias")):
        if f"self_attn.q_proj.{kind}" in of:
            q, k, v = (of[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
            tensors[f"attention.{ours}"] = torch.cat([paired(q), paired(k), v])
    if "self_attn.q_norm.weight" in of:
        tensors |= {f"attention.{name}": paired(of[f"self_attn.{name}.weight"]) for name in ("q_norm", "k_norm")}
    return tensors


def network(of: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    gate, up, down = (of[f"{theirs}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return {f"{ours}.up": torch.cat([gate, up]), f"{ours}.down": down}


def mixture(of: dict[str, Tensor], moe: Moe) -> dict[str, Tensor]:
    tensors = {"ffn.router.weight": of["mlp.gate.weight"]}
    for expert in range(moe.experts):
        tensors[f"ffn.experts.{expert}.up"] = of["mlp.experts.gate_up_proj"][expert]
        tensors[f"ffn.experts.{expert}.down"] = of["mlp.experts.down_proj"][expert]
    if moe.shared:
        tensors |= network(of, "mlp.shared_expert", "ffn.shared")
        tensors["ffn.shared.gate"] = of["mlp.shared_expert_gate.weight"]
    return tensors


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_equal_transformers(model_type: str) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[model_type](**SIZES | MODELS[model_type]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (0.7 if parameter.dim() == 1 else 0.0))
    imported_config = huggingface.read(parse(Source("config.json", json.dumps(theirs.config.to_dict()))), "mine")
    model = imported_config.model
    assert model is not None, imported_config.diagnostics
    reference = Reference(Config.from_plan(model.model_dump() | {"sequence": SEQUENCE}))
    reference.load_logical(logical(dict(theirs.state_dict()), model, model_type == "gemma2"))
    tokens_BS = torch.randint(1, 61, (3, SEQUENCE))
    with torch.no_grad():
        expected = theirs.eval()(input_ids=tokens_BS, use_cache=False).logits
        logits = reference(tokens_BS).logits_BSV
    assert expected.std() > 0.1, "zeros would agree with anything"
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
