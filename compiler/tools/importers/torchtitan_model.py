"""The model of a torchtitan configuration as lines of a spec, from its own sizes or from those of a flavour.

A flavour is a named set of sizes in torchtitan's Python. `FLAVOURS` has those of
torchtitan/models/deepseek_v3/__init__.py of 0.3.0, by the names of the arguments of `build_mla_moe_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.plan_ledger import Keys, Members, value_text
from compiler.tools.importers.python_calls import DottedName
from compiler.tools.importers.write import number
from dsl.messages.diagnostics import Diagnostic

JOB = "model"  # the table of a job file that names the model
MODEL = "model_spec.model"
LAYERS = f"{MODEL}.layers"
ROPE = f"{LAYERS}.rope"
MOST_LAYERS = 100_000  # the rules of a spec refuse more
ORIGINAL = 4096  # tokens up to which the model of a job file uses no YaRN
_MLA = {"q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_SMALL = {"n_dense_layers": 1, "n_heads": 16, "mscale": 0.7, "num_shared_experts": 2, "router_score_func": "softmax"}
_GROUPS = {"router_num_expert_groups": 8, "q_lora_rank": 1536, "mscale": 1.0, "n_heads": 128}
FLAVOURS: dict[str, dict[str, Any]] = {
    "debugmodel": _MLA | _SMALL | {
        "vocab_size": 2048, "n_layers": 6, "dim": 256, "dense_hidden_dim": 1024, "moe_hidden_dim": 256,
        "num_experts": 8, "router_top_k": 3,
    },
    "16B": _MLA | _SMALL | {
        "vocab_size": 102400, "n_layers": 27, "dim": 2048, "dense_hidden_dim": 10944, "moe_hidden_dim": 1408,
        "num_experts": 64, "router_top_k": 6,
    },
    "236B": _MLA | _SMALL | _GROUPS | {
        "vocab_size": 102400, "n_layers": 60, "dim": 5120, "dense_hidden_dim": 12288, "moe_hidden_dim": 1536,
        "num_experts": 160, "router_top_k": 6, "router_num_limited_groups": 3, "router_route_scale": 16.0,
    },
    "671B": _MLA | _GROUPS | {
        "vocab_size": 129280, "n_layers": 61, "dim": 7168, "dense_hidden_dim": 18432, "moe_hidden_dim": 2048,
        "n_dense_layers": 3, "num_experts": 256, "num_shared_experts": 1, "router_top_k": 8,
        "router_score_func": "sigmoid", "router_num_limited_groups": 4, "router_route_scale": 2.5,
        "router_route_norm": True,
    },
}  # fmt: skip
YARN = {"theta": 10000.0, "scaling": "yarn", "rope_factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_seq_len": 4096}  # fmt: skip
# Keys whose value is fixed in dsc: key → the torchtitan values that mean the same.
ALWAYS = {
    f"{LAYERS}.attn_backend": ("flex", "sdpa", "varlen"),
    f"{LAYERS}.moe_comm_backend": ("standard", "deepep", "hybridep"),
    f"{LAYERS}.non_blocking_capacity_factor": (None,),
    "model_spec.attn_backend": ("flex", "sdpa", "varlen"),
    "model_spec.moe_comm_backend": ("standard", "deepep", "hybridep"),
    "model_spec.name": ("deepseek_v3",),
    "model_spec.parallelize_fn": (DottedName("parallelize_deepseekv3"),),
    "model_spec.pipelining_fn": (DottedName("pipeline_llm"),),
    "model_spec.post_optimizer_build_fn": (DottedName("register_moe_load_balancing_hook"),),
    "model_spec.state_dict_adapter": (DottedName("DeepSeekV3StateDictAdapter"),),
    "model_spec": (DottedName("ModelSpec()"),),
    MODEL: (DottedName("DeepSeekV3Model.Config()"),),
    LAYERS: (DottedName("build_mla_moe_layers()"),),
    ROPE: (DottedName("ComplexRoPE.Config()"), DottedName("CosSinRoPE.Config()")),
    f"{MODEL}.tok_embeddings": (DottedName("Embedding.Config()"),),
    f"{MODEL}.norm": (DottedName("RMSNorm.Config()"),),
    f"{MODEL}.lm_head": (DottedName("Linear.Config()"),),
    f"{MODEL}.mtp_layers": (DottedName("_build_mtp_layers(layers[-1])"),),
    "attention": (DottedName("layer.attention"),),
    "for layer": (DottedName("layers"),),
    "for norm": (DottedName("(layer.attention_norm, layer.ffn_norm, attention.q_norm, attention.kv_norm)"),),
    "if layer.moe is not None": (True,),
}


def with_flavour(members: Members, keys: Keys) -> Members:
    """The keys, followed by those of the flavour that they name. Errors of the flavour are added to `keys`."""
    named = members.get(f"{JOB}.flavor") or members.get("model_spec") or ()
    text = str(getattr(named[0].value, "text", named[0].value)) if named else ""
    if LAYERS in members:
        return members
    if not text:
        hint = f'write `flavor = "16B"` below `[{JOB}]`, or `model_spec = ModelSpec(…)` in a module'
        keys.mistakes.append(Diagnostic("I0202", "no model is named: its sizes are missing", None, hint))
        return members
    call, _, arguments = text.partition("(")
    flavour = arguments.rstrip(")").strip("'\"") if arguments else text
    name = members[f"{JOB}.name"][0].value if f"{JOB}.name" in members else "deepseek_v3"
    is_registry = not arguments or call.rpartition(".")[2] == "model_registry"
    if name != "deepseek_v3" or not is_registry or flavour not in FLAVOURS:
        message = f"the sizes of {value_text(name)} {value_text(flavour)} are in torchtitan's Python, and unknown here"
        hint = (
            f"known for deepseek_v3: {', '.join(FLAVOURS)}; `dsc import hf` takes the config.json of a published model"
        )
        keys.mistakes.append(Diagnostic("I0202", message, named[0].span, hint))
        return members
    sizes = {f"{LAYERS}.{key}": value for key, value in FLAVOURS[flavour].items() if key != "vocab_size"}
    sizes[f"{MODEL}.vocab_size"] = FLAVOURS[flavour]["vocab_size"]
    length = members["training.seq_len"][0].value if "training.seq_len" in members else 0
    scaled = bool(arguments) or (type(length) is int and length > ORIGINAL)
    sizes |= {f"{ROPE}.{key}": value for key, value in YARN.items() if scaled or key == "theta"}
    return {**members, **{key: [JsonValue(value, named[0].span, named[0].span)] for key, value in sizes.items()}}


def model_lines(keys: Keys, members: Members, name: str) -> list[str]:
    """The block of the model."""
    by_flavour = LAYERS not in members

    def size(key: str, path: str) -> int:
        is_reported = by_flavour and not keys.has(key)  # the missing flavour or model is an error already
        return 1 if is_reported else keys.size(key, path)

    if by_flavour and keys.has("model_spec"):
        keys.lose("model_spec", "the registry is assumed to be that of torchtitan's deepseek_v3", kind="assumed")
    for key in (f"{JOB}.name", f"{JOB}.flavor", "model_spec.flavor"):
        keys.lose(key, "the name of the sizes", kind="no effect")
    vocab, hidden = size(f"{MODEL}.vocab_size", "model.vocab"), size(f"{LAYERS}.dim", "model.hidden")
    eps = keys.take(f"{MODEL}.norm.eps", "model.norm_eps", 1e-5)
    if not by_flavour and not keys.has("norm.eps") and eps != 1e-5:
        keys.note("approximated", "norm.eps", 1e-5, f"layers use it there; all norms use {number(eps)} here")
    keys.lose("norm.eps", f"all norms use `norm_eps` = {number(eps)} here", (eps,), "approximated")
    lines = [f"model {name}_model {{", f"vocab = {vocab}, hidden = {hidden}, init_std = {number(_std(keys, members))}"]
    lines.append(f"norm_eps = {number(eps)}")
    for key in (f"{MODEL}.dim", f"{MODEL}.tok_embeddings.embedding_dim", f"{MODEL}.norm.normalized_shape"):
        keys.lose(key, "a width other than that of the layers", (hidden,))
    for key in (f"{MODEL}.lm_head.in_features", f"{MODEL}.mtp_layers.dim"):
        keys.lose(key, "a width other than that of the layers", (hidden,))
    for key in (f"{MODEL}.tok_embeddings.num_embeddings", f"{MODEL}.lm_head.out_features"):
        keys.lose(key, "a vocabulary other than that of the model", (vocab,))
    lines += _attention(keys, size)
    lines += _layers(keys, size)
    depth = keys.take("model_spec.num_mtp_layers", "model.mtp.depth", 0) if by_flavour else 0
    depth = depth or (keys.take(f"{MODEL}.mtp_layers.num_mtp_layers", "model.mtp.depth", 0) if not by_flavour else 0)
    if depth:
        weight = keys.take("loss.mtp_scale", "model.mtp.weight", 0.3)
        lines.append(f"mtp {{ depth = {depth}, weight = {number(weight)} }}")
    keys.lose("loss.mtp_scale", "there is no multi-token prediction", kind="no effect")
    losses = ("CrossEntropyLoss.Config()", "ChunkedLossWrapper.Config()", "MTPLoss.Config()")
    keys.lose("loss", "the loss is the cross entropy here", tuple(map(DottedName, losses if depth else losses[:2])))
    keys.lose("loss.loss_fn", "the loss is the cross entropy here", (DottedName(losses[0]),))
    for key in ("loss.global_vocab_size", "loss.loss_fn.global_vocab_size"):
        keys.lose(key, "a vocabulary other than that of the model", (vocab, *map(DottedName, _VOCABULARIES)))
    for key, values in ALWAYS.items():
        keys.lose(key, f"models have {key} = {value_text(values[0])} here", values)
    return [*lines, "}"]


_VOCABULARIES = ("decoder_vocab_size(model_spec)", "decoder_vocab_size(config.model_spec)")


def _std(keys: Keys, members: Members) -> float:
    """The standard deviation of the initial weights; that of the projections if torchtitan has several."""
    if LAYERS not in members:
        why = "there, weights have std 0.02, deeper ones less, embeddings 1, the head hidden^-0.5; here, all have 0.02"
        keys.note("approximated", "init", "the flavour's", why)
        return 0.02
    std_key = f"{LAYERS}.linear_init.weight.std"
    std = keys.take(std_key, "model.init_std", 0.02)
    for key in members:
        stem, _, last = key.rpartition(".")
        if last == "std" and "_init." in key:
            keys.lose(key, f"all weights have `init_std` = {number(std)} here", (std,), "approximated")
        elif stem.endswith("_init") and last != "std":
            is_norm = key.startswith((f"{LAYERS}.norm_init", f"{MODEL}.norm."))
            usual = ("nn.init.ones_",) if is_norm else ("nn.init.zeros_",) if last == "bias" else _NORMAL
            keys.lose(
                key, "weights are drawn from a normal distribution here", tuple(map(DottedName, usual)), "approximated"
            )
    return float(std)


_NORMAL = ("partial(nn.init.normal_)",)


def _attention(keys: Keys, size: Any) -> list[str]:
    path = "model.attention"
    heads, rank = (
        size(f"{LAYERS}.n_heads", f"{path}.heads"),
        keys.take(f"{LAYERS}.q_lora_rank", f"{path}.query_rank", 0),
    )
    kv = size(f"{LAYERS}.kv_lora_rank", f"{path}.kv_rank")
    nope, rotated = (size(f"{LAYERS}.qk_{part}_head_dim", f"{path}.head_dim.{part}") for part in ("nope", "rope"))
    value = size(f"{LAYERS}.v_head_dim", f"{path}.head_dim.value")
    theta = keys.take(f"{ROPE}.theta", f"{path}.rope.theta", 10000.0)
    kind, factor = keys.take(f"{ROPE}.scaling", f"{path}.rope.scaling", "none"), 1.0
    rope = f"rope {{ theta = {number(theta)} }}"
    if kind == "yarn":
        factor = keys.take(f"{ROPE}.rope_factor", f"{path}.rope.scaling.factor", 1.0)
    if factor > 1:
        rope = f"rope {{ theta = {number(theta)}\n{_yarn(keys, factor)} }}"
    elif kind not in ("none", "yarn"):
        keys.note("not expressible", f"{ROPE}.scaling", kind, "latent attention supports only YaRN here")
    keys.lose(f"{ROPE}.dim", "another width than that of the heads", (rotated,))
    keys.lose(f"{ROPE}.max_seq_len", "the length of the table of rotations", kind="no effect")
    for key in ("rope_factor", "beta_fast", "beta_slow", "original_seq_len", "truncate"):
        keys.lose(f"{ROPE}.{key}", "the rotation is not scaled", kind="no effect")
    keys.lose(f"{LAYERS}.mscale", "the rotation is not scaled", kind="no effect")
    return [
        "attention mla {",
        f"heads = {heads}, query_rank = {rank or 'none'}, kv_rank = {kv}",
        f"head_dim {{ nope = {nope}, rope = {rotated}, value = {value} }}",
        rope,
        "}",
    ]


def _yarn(keys: Keys, factor: float) -> str:
    """The YaRN block. torchtitan applies `mscale` to the attention scores and does not scale the sines."""
    path = "model.attention.rope.scaling"
    original = keys.take(f"{ROPE}.original_seq_len", f"{path}.original", ORIGINAL)
    fast, slow = (keys.take(f"{ROPE}.beta_{bound}", f"{path}.beta_{bound}", default) for bound, default in _BETAS)
    truncate = keys.take(f"{ROPE}.truncate", f"{path}.truncate", True)
    mscale = keys.take(f"{LAYERS}.mscale", f"{path}.mscale_all_dim", 1.0)
    written = f"factor = {number(factor)}, original = {original}, beta_fast = {number(fast)}"
    written += f", beta_slow = {number(slow)}, mscale = {number(mscale)}, mscale_all_dim = {number(mscale)}"
    return f"scaling yarn {{ {written}{'' if truncate else ', truncate = false'} }}"


_BETAS = (("fast", 32.0), ("slow", 1.0))


def _layers(keys: Keys, size: Any) -> Iterator[str]:
    layers = min(MOST_LAYERS, size(f"{LAYERS}.n_layers", "model.layers"))
    dense = min(layers, keys.take(f"{LAYERS}.n_dense_layers", "model.layers", 0))
    if dense:
        width = size(f"{LAYERS}.dense_hidden_dim", "model.layers.0.ffn.inner")
        yield f"layers 0..{dense - 1} {{ ffn dense {{ inner = {width} }} }}"
    keys.lose(f"{LAYERS}.dense_hidden_dim", "there are no dense layers", kind="no effect")
    if dense == layers:
        for key in ("moe_hidden_dim", "num_experts", "num_shared_experts"):
            keys.lose(f"{LAYERS}.{key}", "there are no layers with experts", kind="no effect")
        return
    path = f"model.layers.{int(dense > 0)}.ffn"
    experts, shared = (
        size(f"{LAYERS}.num_experts", f"{path}.experts"),
        size(f"{LAYERS}.num_shared_experts", f"{path}.shared"),
    )
    inner, top_k = size(f"{LAYERS}.moe_hidden_dim", f"{path}.inner"), size(f"{LAYERS}.router_top_k", f"{path}.top_k")
    score = keys.take(f"{LAYERS}.router_score_func", f"{path}.score", "sigmoid")
    if score not in ("sigmoid", "softmax"):
        keys.mistakes.append(Diagnostic("I0203", f"scores must be sigmoid or softmax, not {value_text(score)}", None))
        score = "softmax"
    groups = keys.take(f"{LAYERS}.router_num_expert_groups", f"{path}.groups", 1, int)
    top_groups = keys.take(f"{LAYERS}.router_num_limited_groups", f"{path}.top_groups", 1, int)
    scale = keys.take(f"{LAYERS}.router_route_scale", f"{path}.scale", 1.0)
    normalize = keys.take(f"{LAYERS}.router_route_norm", f"{path}.normalize", False)
    if groups > 1 and score == "softmax":
        why = "there, a group's score is the sum of its two best experts; here, with softmax, its best expert"
        keys.note("approximated", f"{LAYERS}.router_num_expert_groups", groups, why)
    key = "layer.moe.load_balance_coeff"
    usual = None if keys.peek(key, 0) is None else 1e-3
    rate = keys.take(key, f"{path}.balance.bias_rate", usual, (int, float))
    yield f"layers {dense}..{layers - 1} {{ ffn moe {{"
    yield f"experts = {experts}, shared = {shared}, top_k = {top_k}, inner = {inner}"
    if groups > 1:
        yield f"groups = {groups}, top_groups = {top_groups}"
    yield f"score = {score}, normalize = {'true' if normalize else 'false'}, scale = {number(scale)}"
    if rate is not None:
        yield f"balance {{ bias_rate = {number(rate)} }}"
    yield "} }"
