"""FLOPs of training on a token, by the definition that DeepSeek-V3's published MFU comes out exactly with.

3 · (2 · parameters of matrix products + attention core): a backward is two forwards, what is computed again counts
once. The products are those of the main model without the embedding, which is looked up, and without the gates; MTP is
left out. The core is q·k and the weights' sum of values, over half the sequence (causal) or all of it (full).
"""

from __future__ import annotations

from compiler.predict.prediction import Flops
from dsl.counts import active_layer_parameters, bias_parameters
from dsl.schema import Dense, Gqa, Model, Moe


def flops_per_token(model: Model, sequence: int) -> Flops:
    """FLOPs of a token of a sequence of so many."""
    products = 6 * product_parameters(model)
    core = 3 * 2 * model.num_layers * _core_width(model) * sequence
    return Flops(causal=products + core / 2, full=float(products + core))


def product_parameters(model: Model) -> int:
    """Weights of matrix products that one token uses."""
    spans = ((span.ffn, span.last - span.first + 1) for span in model.layers)
    return model.vocab * model.hidden + sum(count * _layer(model, ffn) for ffn, count in spans)


def _layer(model: Model, ffn: Dense | Moe) -> int:
    """Active parameters less those that are in no product: norms, the gate and its bias."""
    gate = model.hidden * ffn.experts + bias_parameters(ffn) if isinstance(ffn, Moe) else 0
    return active_layer_parameters(model, ffn) - gate - 2 * model.hidden - _norms(model)


def _norms(model: Model) -> int:
    """Parameters of the norms inside of attention."""
    attention = model.attention
    if isinstance(attention, Gqa):
        return 2 * attention.head_dim if attention.qk_norm else 0
    return (attention.query_rank or 0) + attention.kv_rank


def _core_width(model: Model) -> int:
    """Products of a query with one key, and of one weight with its value, over all heads."""
    attention = model.attention
    if isinstance(attention, Gqa):
        return attention.heads * 2 * attention.head_dim
    dim = attention.head_dim
    return attention.heads * (dim.nope + dim.rope + dim.value)
