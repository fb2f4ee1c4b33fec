"""The segment of compressed attention: against autograd over plain torch, and against DeepSeek-V4's own modules as
`transformers` has them, with the same weights, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.modeling_rope_utils as rope_utils
import transformers.models.deepseek_v4.modeling_deepseek_v4 as theirs
from torch import Tensor
from transformers import DeepseekV4Config

from dsl.schema import Compressed, Csa, Hca, Indexer, Rope, YarnScaling
from tests.compiler.model.segments.running import Result, assert_equal, by_autograd, by_segment, load
from tests.compiler.model.segments.specs import compressed, spec
from tests.compiler.model.segments.test_segments import arguments, segment_of

EPS = 1e-6
ORIGINAL = 16  # tokens of the context that YaRN extends
YARN = YarnScaling(factor=4.0, original=ORIGINAL, beta_fast=2.0, beta_slow=0.5, attention_factor=1.0)
KINDS = {
    "window": compressed(compress=None),
    "hca": compressed(compress=Hca(rate=8), rope=Rope(theta=160.0, width=4, scaling=YARN)),
    "csa": compressed(
        compress=Csa(rate=4, indexer=Indexer(heads=3, head_dim=8, top_k=3)),
        rope=Rope(theta=160.0, width=4, scaling=YARN),
    ),
}
TYPES = {
    "window": "sliding_attention",
    "hca": "heavily_compressed_attention",
    "csa": "compressed_sparse_attention",
}
# Our names, and theirs: matrices [out, in] that are stacked.
NAMES = {
    "q_down": ("q_a_proj.weight",),
    "q_norm": ("q_a_norm.weight",),
    "q_up": ("q_b_proj.weight",),
    "kv": ("kv_proj.weight",),
    "kv_norm": ("kv_norm.weight",),
    "pool": ("compressor.kv_proj.weight", "compressor.gate_proj.weight"),
    "pool_bias": ("compressor.position_bias",),
    "pool_norm": ("compressor.kv_norm.weight",),
    "index_q": ("compressor.indexer.q_b_proj.weight",),
    "index_pool": ("compressor.indexer.kv_proj.weight", "compressor.indexer.gate_proj.weight"),
    "index_pool_bias": ("compressor.indexer.position_bias",),
    "index_pool_norm": ("compressor.indexer.kv_norm.weight",),
    "index_weights": ("compressor.indexer.scorer.weights_proj.weight",),
    "sinks": ("sinks",),
    "group_out": ("o_a_proj.weight",),
    "out": ("o_b_proj.weight",),
}


class Wide(ModuleType):
    """Torch with float32 replaced by float64, as their modules compute in float32 for any inputs."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.float32 = self.float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (theirs, rope_utils):
        monkeypatch.setattr(module, "torch", Wide())
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    return


def module_of(kind: str, sizes: Compressed, hidden: int) -> tuple[Any, Any]:
    """Their attention of one layer of a kind, and the rotation of their model."""
    assert sizes.rope
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": ORIGINAL}
    scaling |= {"factor": YARN.factor, "beta_fast": YARN.beta_fast, "beta_slow": YARN.beta_slow}
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    indexer = sizes.indexer or Indexer(heads=1, head_dim=4, top_k=1)
    config = DeepseekV4Config(
        index_n_heads=indexer.heads,
        index_head_dim=indexer.head_dim,
        index_topk=indexer.top_k,
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        q_lora_rank=sizes.query_rank,
        sliding_window=sizes.window,
        o_groups=sizes.groups,
        o_lora_rank=sizes.out_rank,
        qk_rope_head_dim=sizes.rope.width,
        rope_theta=sizes.rope.theta,
        compress_rope_theta=sizes.rope.theta,
        rope_parameters=scaling,
        max_position_embeddings=int(ORIGINAL * YARN.factor),
        layer_types=[TYPES[kind]],
        mlp_layer_types=["moe"],
        compress_rates=rates,
        rms_norm_eps=EPS,
        attn_implementation="eager",
    )
    return theirs.DeepseekV4Attention(config, 0).double(), theirs.DeepseekV4RotaryEmbedding(config)


def by_module(kind: str, sizes: Compressed, operands: dict[str, Tensor], length: int) -> Result:
    """Outputs and gradients of their module, by our names; the norm before it is ours."""
    h_TD = operands["h"].clone().requires_grad_()
    gain_D = operands["norm"].clone().requires_grad_()
    module, rotary = module_of(kind, sizes, h_TD.shape[1])
    state = {}
    for name, parts in NAMES.items():
        if name in operands:
            state |= zip(parts, operands[name].chunk(len(parts)), strict=True)
    module.load_state_dict(state, strict=True)
    x_TD = h_TD * torch.rsqrt(h_TD.square().mean(1, keepdim=True) + EPS) * gain_D
    x_BSD = x_TD.unflatten(0, (-1, length))
    positions = torch.arange(length)[None].expand(len(x_BSD), -1)
    angles = {layer_type: rotary(x_BSD, positions, layer_type=layer_type) for layer_type in ("main", "compress")}
    distance_SS = torch.arange(length)[:, None] - torch.arange(length)
    hidden_SS = (distance_SS < 0) | (distance_SS >= sizes.window)
    mask = torch.zeros(hidden_SS.shape).double().masked_fill(hidden_SS, -torch.inf).expand(len(x_BSD), 1, -1, -1)
    y_TD = module(x_BSD, angles, positions, mask)[0].flatten(0, 1)
    torch.autograd.backward([h_TD, y_TD], [operands["d_entered"], operands["d_y"]])
    gradients = {"d_h": h_TD.grad, "g_norm": gain_D.grad}
    parameters = dict(module.named_parameters())
    for name, parts in NAMES.items():  # indexers get no gradient from the loss of the model
        if name in operands and not name.startswith("index_"):
            gradients[f"g_{name}"] = torch.cat([parameters[part].grad for part in parts])
    for name in gradients:
        if name.startswith("g_"):
            gradients[name] = gradients[name] + operands[name]
    return Result({"entered": h_TD.detach(), "y": y_TD.detach()}, gradients)


@pytest.mark.parametrize("length", [8, 23, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_published_modules(kind: str, length: int) -> None:
    """Sequences of one whole window, and of several windows with further tokens."""
    sizes = KINDS[kind]
    segment = segment_of("attention", spec(attention=sizes, sequence=length))
    operands = arguments(segment, 31)
    ours, wanted = by_segment(segment, load(segment), operands), by_module(kind, sizes, operands, length)
    ours.outputs.pop("index_loss", None)
    assert_equal(Result(ours.outputs, {}), Result(wanted.outputs, {}), 1e-10)
    of_indexers = [name for name in ours.gradients if name.startswith("g_index_")]
    assert len(of_indexers) == (5 if kind == "csa" else 0)
    for name in of_indexers:
        del ours.gradients[name]
    assert_equal(ours, wanted, 1e-8)


@pytest.mark.parametrize(("kind", "dense"), [*((kind, False) for kind in KINDS), ("csa", True)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rope", [None, Rope(theta=100.0), Rope(theta=100.0, width=2, scaling=YARN)])
def test_equals_autograd(kind: str, sinks: bool, rope: Rope | None, dense: bool) -> None:
    """`dense`: the phase in which only the indexer is trained, with attention to all entries."""
    sizes = KINDS[kind].model_copy(update={"sinks": sinks, "rope": rope})
    model_spec = spec(attention=sizes, sequence=19, norm="sandwich", residual_scale=0.5)
    if dense:
        model_spec = model_spec.model_copy(update={"train": model_spec.train.model_copy(update={"only": "indexer"})})
    segment = segment_of("attention", model_spec)
    operands = arguments(segment, 31)
    assert_equal(by_segment(segment, load(segment), operands), by_autograd(segment, operands))
