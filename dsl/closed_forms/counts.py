"""Parameter counts of a model in closed form, exact. Custom modules count as 0: their parameters are unknown before
they are traced.

Sources: DeepSeek-V2, arXiv 2405.04434, §2 (experts); DeepSeek-V3, arXiv 2412.19437, §2 (router, MTP); for attention,
see dsl/schema/attention.py. D hidden · V vocabulary · H heads · E routed experts · I inner width of a feed-forward
part.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsl.schema import AnyAttention, Custom, Dense, Model, Moe
from dsl.schema.model import is_gated


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts of a model. `total` includes the balancing biases of the routers, but not `mtp`."""

    total: int  # of the main model
    active: int  # of the main model, for one token: without the routed experts that it does not use
    active_without_embedding: int
    embedding: int
    head: int  # 0 if tied to the embedding
    attention: int  # of the first layer, including the norms inside attention
    mtp: int  # of the MTP blocks, without embedding and head, which they share with the main model
    bias: int  # balancing biases of the routers, part of `total`; the optimizer does not train them


def parameters(model: Model) -> Parameters:
    """Count the parameters of a model: total = V·D + Σ layers + D (final norm) + V·D (head, if it is not tied).
    Hyper-connections add parameters that merge the streams before the final norm."""
    embedding = model.vocab * model.hidden
    head = 0 if model.tied else embedding
    counts = [len(model.layers_of(index)) for index in range(len(model.layers))]
    ends = embedding + model.hidden + hyper_parameters(model, end=True) + head
    total = active = ends
    for count, span in zip(counts, model.layers, strict=True):
        size = _layer_parameters(model, span.ffn, span.attention or model.attention)
        total += count * size
        active += count * (size - _idle_parameters(model, span.ffn))
    return Parameters(
        total=total,
        active=active,
        active_without_embedding=active - embedding,
        embedding=embedding,
        head=head,
        attention=attention_parameters(model, model.attention_of(0)),
        mtp=mtp_parameters(model),
        bias=sum(count * bias_parameters(span.ffn) for count, span in zip(counts, model.layers, strict=True)),
    )


def layer_parameters(model: Model, layer: int) -> int:
    """Parameters of main layer `layer`: attention and FFN, each with a norm of D. Raises IndexError beyond the last."""
    return _layer_parameters(model, model.ffn(layer), model.attention_of(layer))


def attention_parameters(model: Model, attention: AnyAttention) -> int:
    """Parameters of one attention block, without the norm before it; its class has the formula."""
    return sum(attention.parameters(model.hidden).values())


def expert_parameters(moe: Moe, hidden: int) -> int:
    """Parameters of one routed expert of width I: 3·D·I, or 2·D·I if the activation has no gate, and its biases."""
    return _network_parameters(moe, hidden, moe.inner)


def _network_parameters(ffn: Dense | Moe, D: int, inner: int) -> int:
    """Parameters of a network from D to `inner` and back; biases have one element per output column."""
    return _num_matrices(ffn) * D * inner + (((_num_matrices(ffn) - 1) * inner + D) if ffn.bias else 0)


def _num_matrices(ffn: Dense | Moe) -> int:
    """Number of matrices between hidden and inner width: 3 with a gate, else 2."""
    return 3 if is_gated(ffn) else 2


def routed_expert_parameters(model: Model, ffn: Dense | Moe | Custom) -> int:
    """Parameters of all routed experts of a layer, which expert parallelism shards."""
    return ffn.experts * expert_parameters(ffn, model.hidden) if isinstance(ffn, Moe) else 0


def bias_parameters(ffn: Dense | Moe | Custom) -> int:
    """Elements of the balancing bias of one router: E if a bias balances the experts, else 0."""
    return ffn.experts if isinstance(ffn, Moe) and ffn.balance.bias_rate is not None else 0


def active_layer_parameters(model: Model, layer: int) -> int:
    """Parameters of a layer that one token uses: only `top_k` routed experts, but the whole router."""
    return layer_parameters(model, layer) - _idle_parameters(model, model.ffn(layer))


def _idle_parameters(model: Model, ffn: Dense | Moe | Custom) -> int:
    """Parameters of the routed experts of a layer that a token does not use."""
    return (ffn.experts - ffn.top_k) * expert_parameters(ffn, model.hidden) if isinstance(ffn, Moe) else 0


def mtp_parameters(model: Model) -> int:
    """Parameters of the MTP blocks, without embedding and head (arXiv 2412.19437, §2.2). Each has two norms of D, a
    projection 2D → D, a layer like the last one (perhaps with other attention) with its router bias, and a final norm.
    With several residual streams, the projection is two of D → D."""
    if model.mtp is None:
        return 0
    D = model.hidden
    layer = _layer_parameters(model, model.ffn(model.num_layers - 1), model.attention_of_mtp)
    return model.mtp.depth * (2 * D + 2 * D * D + layer + D + hyper_parameters(model, end=True))


def hyper_parameters(model: Model, *, end: bool = False) -> int:
    """Parameters that mix n residual streams before one part of a layer: n·D weights and a bias for each of n² + 2n
    outputs, and three scales. At the `end` of the model: n outputs and one scale (arXiv 2512.24880)."""
    if model.hyper_connections is None:
        return 0
    n = model.hyper_connections.streams
    numbers, scales = (n, 1) if end else (n * n + 2 * n, 3)
    return numbers * (n * model.hidden + 1) + scales


def _layer_parameters(model: Model, ffn: Dense | Moe | Custom, attention: AnyAttention) -> int:
    norms = 4 if model.norm == "sandwich" else 2
    mixing = 2 * hyper_parameters(model)
    return attention_parameters(model, attention) + _ffn_parameters(ffn, model.hidden) + norms * model.hidden + mixing


def _ffn_parameters(ffn: Dense | Moe | Custom, D: int) -> int:
    """Dense: 3·D·I. MoE: routed and shared experts, a router D·E with its biases (arXiv 2412.19437, §2.1.2), and a gate
    D for the shared experts. 2·D·I instead of 3·D·I if the activation has no gate. All shared experts are one
    network."""
    if isinstance(ffn, Custom):
        return 0
    if isinstance(ffn, Dense):
        return _network_parameters(ffn, D, ffn.inner)
    inner = ffn.shared * (ffn.shared_inner or ffn.inner)
    shared = (_network_parameters(ffn, D, inner) if ffn.shared else 0) + (D if _has_shared_gate(ffn) else 0)
    router = D * ffn.experts + (ffn.experts if ffn.router_bias else 0) + bias_parameters(ffn)
    return ffn.experts * expert_parameters(ffn, D) + shared + router


def _has_shared_gate(moe: Moe) -> bool:
    """Whether there are shared experts and they have a gate."""
    return moe.shared > 0 and moe.shared_gate
