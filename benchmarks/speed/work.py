"""The work of a training step: every matrix product by shape, and causal attention. No torch.

A product of m×k by k×n counts three times in training (forward, gradient of the input, gradient of the weight), with
2·m·k·n FLOPs each.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsl.schema import Custom, Model


@dataclass(frozen=True)
class Product:
    """x [m, k] · Wᵀ, W [n, k], with its two gradients; `times` of them, each with its own weights."""

    m: int
    k: int
    n: int
    times: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of the forward and both gradients."""
        return 6 * self.m * self.k * self.n * self.times


@dataclass(frozen=True)
class Work:
    """FLOPs of a step of `tokens` tokens."""

    tokens: int
    products: tuple[Product, ...]
    attention: int

    @property
    def flops(self) -> int:
        """FLOPs of products and attention."""
        return self.attention + self.product_flops

    @property
    def product_flops(self) -> int:
        """FLOPs of the products, without attention."""
        return sum(product.flops for product in self.products)


def work_of(model: Model, batch: int, sequence: int) -> Work:
    """The work of a step of `batch` sequences, with evenly loaded experts. The embedding counts nothing."""
    attention, tokens = model.attention, batch * sequence
    assert attention.kind == "mla" and model.mtp is None, "the benchmark's models are of this kind"
    dim, hidden = attention.head_dim, model.hidden
    layers = sum(block.last - block.first + 1 for block in model.layers)
    query = (
        [(hidden, attention.query_rank), (attention.query_rank, attention.heads * (dim.nope + dim.rope))]
        if attention.query_rank
        else [(hidden, attention.heads * (dim.nope + dim.rope))]
    )
    projections = [
        *query,
        (hidden, attention.kv_rank + dim.rope),
        (attention.kv_rank, attention.heads * (dim.nope + dim.value)),
        (attention.heads * dim.value, hidden),
    ]
    products = [Product(tokens, k, n, layers) for k, n in projections]
    for block in model.layers:
        ffn, count = block.ffn, block.last - block.first + 1
        assert not isinstance(ffn, Custom), "no measured model has a custom module"
        if ffn.kind == "dense":
            products += [Product(tokens, hidden, 2 * ffn.inner, count), Product(tokens, ffn.inner, hidden, count)]
            continue
        rows, shared = tokens * ffn.top_k // ffn.experts, ffn.inner * ffn.shared
        products += [
            Product(tokens, hidden, ffn.experts, count),
            Product(tokens, hidden, 2 * shared, count),
            Product(tokens, shared, hidden, count),
            Product(rows, hidden, 2 * ffn.inner, count * ffn.experts),
            Product(rows, ffn.inner, hidden, count * ffn.experts),
        ]
    products.append(Product(tokens, hidden, model.vocab))
    pairs = batch * attention.heads * sequence * (sequence + 1) // 2  # of a query and a key that is not later
    causal = 6 * pairs * (dim.nope + dim.rope + dim.value) * layers
    return Work(tokens, tuple(products), causal)
