"""What is known of the keys of Hugging Face configurations that are not read into a model."""

from __future__ import annotations

from compiler.importers.reader import Place

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

# key → (values that ask for nothing, what other values ask for, where the comment belongs)
REFUSED: dict[str, tuple[tuple[object, ...], str, Place]] = {
    "attention_bias": ((False,), "biases on the projections of latent attention; a spec has none", "attention"),
    "attention_dropout": ((0, 0.0), "dropout; a spec has none", "attention"),
    "attn_logit_softcapping": ((), "logits of attention bent by tanh, which this model type does not do", "attention"),
    "clip_qkv": ((), "queries, keys and values cut off at a value", "attention"),
    "embd_pdrop": ((0, 0.0), "dropout; a spec has none", "model"),
    "final_logit_softcapping": ((), "logits of the head bent by tanh, which this model type does not do", "model"),
    "hidden_dropout": ((0, 0.0), "dropout; a spec has none", "model"),
    "index_topk": ((), "attention to chosen tokens only, which this model type does not do", "attention"),
    "mlp_bias": ((False,), "biases in the feed-forward layers, which this model type does not have", "ffn"),
    "partial_rotary_factor": ((1, 1.0), "a part of each head is rotated, which this model type does not do", "rope"),
    "qk_layernorm": ((False,), "norms on queries and keys that this model type does not have", "attention"),
    "resid_pdrop": ((0, 0.0), "dropout; a spec has none", "model"),
    "router_jitter_noise": ((0, 0.0), "noise on what the gate reads; a spec has none", "ffn"),
    "shared_expert_intermediate_size": (
        (0,),
        "a shared expert of its own width, which this model type does not have",
        "ffn",
    ),
    "use_bidirectional_attention": ((False,), "attention to later tokens; a spec attends to earlier ones", "attention"),
    "use_mrope": ((False,), "positions in height and width as well; a spec has those in time", "rope"),
    "use_qk_norm": ((False,), "norms on queries and keys that this model type does not have", "attention"),
}
