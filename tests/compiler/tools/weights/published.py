"""Tiny published models: random models of `transformers`, saved by `save_pretrained`, and imported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RMSNorm
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm

from compiler.cli.main import main
from compiler.tools.weights.families import FAMILIES
from runtime.checkpoint.loading import load
from runtime.contract.weights import ONE, Export, ImportRequest
from runtime.state.huggingface.exporting import export_weights
from runtime.state.huggingface.importing import write_checkpoint

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 3, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": None}  # an embedding of padding has no gradient in their classes
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
MLA = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 22,
    "aux_loss_alpha": 0.0,
}
DENSE = {"intermediate_size": 22}
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
THETA = {"rope_type": "default", "rope_theta": 100.0}
# Settings of a model of each type: all sizes, and keys that switch off balancing losses.
KEYS: Mapping[str, dict[str, Any]] = {
    "deepseek_v3": MLA | EXPERTS | {"num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5},
    "deepseek_v32": MLA
    | EXPERTS
    | {"num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5}
    | {"index_n_heads": 16, "index_head_dim": 10, "index_topk": 5},
    "deepseek_v4": {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 12,
        "o_groups": 2,
        "o_lora_rank": 6,
        "sliding_window": 5,
        "index_n_heads": 16,  # with few, some scores are 0 and equal, and the choice between them is undefined
        "index_head_dim": 8,
        "index_topk": 2,
        "layer_types": [WINDOW, CSA, HCA, CSA, HCA, WINDOW],
        "compress_rates": {CSA: 2, HCA: 4},
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "swiglu_limit": 0.3,
        "hc_mult": 2,
        "num_nextn_predict_layers": 0,
        "router_aux_loss_coef": 0.0,
    },
    "deepseek_v2": MLA | EXPERTS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "llama": GQA | DENSE,
    "qwen2": DENSE | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "glm4_moe": GQA
    | EXPERTS
    | {"head_dim": 8, "num_nextn_predict_layers": 0, "use_qk_norm": True, "attention_bias": True}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "olmoe": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 10, "num_experts": 8}
    | {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.0},
    "olmo2": DENSE | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2_moe": DENSE
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 10, "shared_expert_intermediate_size": 14, "router_aux_loss_coef": 0.0}
    | {"mlp_only_layers": [0]},
    "gemma2": GQA
    | DENSE
    | {"sliding_window": 5, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0}
    | {"final_logit_softcapping": 3.0, "hidden_size": 20},
    "gemma3_text": GQA
    | DENSE
    | {"sliding_window": 5, "query_pre_attn_scalar": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"num_hidden_layers": 4}
    | {"rope_parameters": {"full_attention": THETA, "sliding_attention": THETA | {"rope_theta": 7.0}}},
    "granite": GQA
    | DENSE
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 8.0, "attention_multiplier": 0.3}
    | {"mlp_bias": True, "attention_bias": True},
    "smollm3": DENSE | {"num_attention_heads": 4, "num_key_value_heads": 2, "no_rope_layer_interval": 2},
    "gpt_oss": GQA
    | {"intermediate_size": 10, "num_local_experts": 6, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
    | {"sliding_window": 5, "swiglu_limit": 0.3, "swiglu_alpha": 1.5},
    "mistral": GQA | DENSE | {"sliding_window": None},
    "mixtral": GQA | DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    "qwen3": GQA | DENSE,
    "qwen3_next": GQA
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "router_aux_loss_coef": 0.0}
    | {"shared_expert_intermediate_size": 14, "intermediate_size": 22, "mlp_only_layers": [1], "head_dim": 8}
    | {"num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6}
    | {"linear_value_head_dim": 5, "linear_conv_kernel_dim": 3}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "kimi_linear": {key: value for key, value in MLA.items() if key != "q_lora_rank"}
    | {"intermediate_size": 22, "moe_intermediate_size": 10, "num_local_experts": 8, "num_experts_per_tok": 3}
    | {"n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "q_lora_rank": None}
    | {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_head_dim": 6}
    | {"linear_num_heads": 3, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-6},
    "qwen3_moe": GQA
    | DENSE
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "norm_topk_prob": True}
    | {"mlp_only_layers": [0], "router_aux_loss_coef": 0.0},
}


@torch.no_grad()
def random_model(model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A model with norm gains other than 1 and nonzero balancing biases, so that a missing one shows."""
    config = AutoConfig.for_model(model_type, **(SIZES | {"rope_parameters": dict(THETA)} | KEYS[model_type] | more))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bfloat16:  # published files have them in FP32
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = buffer.float()
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith("tid2eid"):  # distinct experts for each token
            drawn = torch.rand(len(tensor), config.n_routed_experts, generator=generator)
            tensor.copy_(drawn.argsort(dim=1)[:, : tensor.shape[1]])
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        size = 0.1 if name.endswith("bias") else 0.2 if "norm" in name else 0.3
        tensor.copy_(size * noise + ("norm" in name))
    if model_type == "kimi_linear":
        model.save_pretrained = partial(_save_as_published, model.save_pretrained)
    return model.eval()


def _save_as_published(save: Callable[[Path], None], folder: Path) -> None:
    """Save a Kimi Linear model by published names: `transformers` names dense layers like experts, and reads both."""
    save(folder)
    tensors = load_file(folder / ONE)
    dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
    save_file({dense.sub(r"mlp.\1_proj", name): tensor for name, tensor in tensors.items()}, folder / ONE)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> PreTrainedModel:
    """A folder as `transformers` loads it; no key may be missing, unexpected or of another shape."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype, output_loading_info=True, **how
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    model.set_experts_implementation("eager")
    return model.eval()


def import_(folder: Path, spec: Path, *options: str) -> int:
    """`dsc import hf`, without a separate process for the weights."""
    with in_this_process():
        return main(["import", "hf", str(folder), "-o", str(spec), *options])


def export(checkpoint: Path, out: Path, *options: str) -> int:
    """`dsc export hf`, without a separate process for the weights."""
    with in_this_process():
        return main(["export", "hf", str(checkpoint), "-o", str(out), *options])


@contextmanager
def in_this_process() -> Iterator[None]:
    """Run in this process what commands run in a subprocess."""

    def ask(command: list[str], request: str, tell: Callable[[str], None]) -> tuple[int, Any]:
        if command[1] == "import":
            return 0, write_checkpoint(ImportRequest.from_json(request))
        return 0, export_weights(Export.from_json(request))

    with patch("compiler.cli.commands.import_.ask", ask), patch("compiler.cli.commands.export_weights.ask", ask):
        yield


def weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint of a folder, by their names in it."""
    checkpoint = load(folder)
    return checkpoint.read(checkpoint.shapes)


def logical(
    model: PreTrainedModel, folder: Path, values: Callable[[Tensor], Tensor | None], *, gradients: bool = False
) -> dict[str, Tensor]:
    """`values` of each parameter as tensors of a checkpoint: saved instead of the parameters, and imported.
    `gradients`: the values are gradients, so the import must not add 1 to those of gains."""
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.parameters():
            saved = values(tensor)
            tensor.copy_(torch.zeros_like(tensor) if saved is None else saved)
        model.save_pretrained(folder / "hf")
        model.load_state_dict(original)
    assert import_(folder / "hf", folder / "m.dsc") == 0
    saved = weights(folder / "m.weights")
    if gradients and FAMILIES[model.config.model_type].gains_from_one:
        gains = [name for name in saved if name.endswith("norm") and not name.endswith("out_norm")]
        saved |= {name: saved[name].double() - 1 for name in gains}
    return saved


class Wide(TorchFunctionMode):
    """Replace FP32 by FP64 in `transformers`, whose norms, routers and softmax compute in FP32 for any weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        kwargs = {
            key: torch.float64 if argument is torch.float32 else argument for key, argument in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


def with_wide_angles(model: PreTrainedModel) -> PreTrainedModel:
    """The model with RoPE frequencies in FP64; `transformers` rounds them to FP32 on construction."""
    if not hasattr(model.model, "rotary_emb"):
        return model
    parameters = model.config.rope_parameters
    of_kinds = {f"{kind}_inv_freq": settings for kind, settings in parameters.items() if isinstance(settings, dict)}
    rotaries = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    for rotary in rotaries:
        for name, settings in (of_kinds or {"inv_freq": parameters}).items():
            pairs = getattr(rotary, name).numel()
            exponents = torch.arange(pairs, dtype=torch.float64) / pairs
            exact = settings["rope_theta"] ** -exponents
            assert torch.allclose(exact.float(), getattr(rotary, name))
            setattr(rotary, name, exact)
    return model


def with_eps(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the config's eps in its latent norms; `transformers` always uses 1e-6."""
    for module in model.modules():
        if isinstance(module, DeepseekV3RMSNorm | DeepseekV2RMSNorm | KimiLinearRMSNorm):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return config
