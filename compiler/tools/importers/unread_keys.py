"""What is known of the keys of Hugging Face configurations that are not read into a model."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.tools.importers.reader import Place

# key → why it makes no difference to what is trained
IRRELEVANT = {
    "architectures": "the class of the model; model_type says the same",
    "auto_map": "where the code of the class is",
    "base_model_tp_plan": "how inference splits the weights",
    "bos_token_id": "the tokenizer's",
    "cache_implementation": "how inference keeps keys and values",
    "chunk_size_feed_forward": "how inference is cut",
    "dtype": "how the published weights are stored",
    "eos_token_id": "the tokenizer's",
    "ep_size": "how inference spreads the experts",
    "head_dim_original": "a note of the converter",
    "id2label": "of classification",
    "initial_context_length": "the context before it was extended; rope_scaling says the same",
    "is_encoder_decoder": "false of these models",
    "label2id": "of classification",
    "max_position_embeddings": "a run says how long its sequences are",
    "max_window_layers": "where layers begin to have a window, of types that read it",
    "num_return_sequences": "of generation",
    "output_attentions": "what inference returns",
    "output_hidden_states": "what inference returns",
    "output_router_logits": "what the forward returns",
    "pad_token_id": "the tokenizer's",
    "prefix": "of generation",
    "pretraining_tp": "repeats the rounding of a tensor-parallel run",
    "problem_type": "of classification",
    "qk_head_dim": "nope + rope",
    "quantization_config": "how the published weights are stored",
    "return_dict": "what inference returns",
    "rope_interleave": "the order of rotated pairs: weights that are trained anew do not depend on it",
    "tokenizer_class": "the tokenizer's",
    "torch_dtype": "how the published weights are stored",
    "transformers_version": "who wrote the file",
    "use_cache": "of generation",
}

# key → the key that it repeats in published configurations, whose value is taken
REPEATED = {"hidden_act": "hidden_activation", "sliding_window_size": "sliding_window"}

# Keys that classes of some types read, and values of them that are as if they were absent.
OF_TYPES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (),
    "layer_types": (),
    "mlp_layer_types": (),
    "norm_topk_prob": (),
    "scoring_func": ("sigmoid",),
    "sliding_window": (False, 0),
    "topk_method": ("noaux_tc",),
    "use_sliding_window": (False,),
}
MLA = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear")
REMOTE = ("deepseek", "kimi_k2")  # types whose code lies beside their weights: what it reads is not known here


@dataclass(frozen=True)
class Refused:
    """A key that asks for something a spec cannot say.

    `harmless`: values that ask for nothing. `place`: where the comment belongs. `types`: those whose classes in
    `transformers` 5.23 compute it; None: all. Of another type the key is not read, neither there nor here.
    """

    harmless: tuple[object, ...]
    meaning: str
    place: Place
    types: tuple[str, ...] | None = None

    def is_read(self, model_type: str) -> bool:
        """Whether models of a type compute what the key asks for."""
        return self.types is None or model_type in (*self.types, *REMOTE)


_DROPOUT = "dropout; a spec has none"
_NORMS = "norms on queries and keys that this model type does not have"
REFUSED = {
    "attention_bias": Refused(
        (False,), "biases on the projections of latent attention; a spec has none", "attention", MLA
    ),
    "attention_dropout": Refused((0, 0.0), _DROPOUT, "attention"),
    "attn_logit_softcapping": Refused((), "logits of attention bent by tanh", "attention", ()),
    "clip_qkv": Refused((), "queries, keys and values cut off at a value", "attention", ("olmoe",)),
    "embd_pdrop": Refused((0, 0.0), _DROPOUT, "model", ()),
    "final_logit_softcapping": Refused((), "logits of the head bent by tanh", "model", ()),
    "hidden_dropout": Refused((0, 0.0), _DROPOUT, "model", ()),
    "index_topk": Refused((), "attention to chosen tokens only", "attention", ()),
    "mlp_bias": Refused((False,), "biases in the feed-forward layers", "ffn", ("deepseek_v2", "deepseek_v4")),
    "partial_rotary_factor": Refused(
        (1, 1.0), "a part of each head is rotated, which this model type does not do", "rope"
    ),
    "qk_layernorm": Refused((False,), _NORMS, "attention", ()),
    "resid_pdrop": Refused((0, 0.0), _DROPOUT, "model", ()),
    "router_jitter_noise": Refused((0, 0.0), "noise on what the gate reads; a spec has none", "ffn", ("mixtral",)),
    "shared_expert_intermediate_size": Refused((0,), "a shared expert of its own width", "ffn", ()),
    "use_bidirectional_attention": Refused(
        (False,), "attention to later tokens; a spec attends to earlier ones", "attention", ("gemma3_text",)
    ),
    "use_mrope": Refused((False,), "positions in height and width as well; a spec has those in time", "rope", ()),
    "use_qk_norm": Refused((False,), _NORMS, "attention", ()),
}
