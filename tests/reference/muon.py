"""Muon by hand, used with the AdamW of training.py: Jordan et al., 2024, as in Moonlight (arXiv 2502.16982, §2.2).

Matrices are found by the names and sizes of the model: queries, keys, values and gates of outputs separately, gate and
up separately, each expert separately. Embedding, head and vectors use AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from tests.reference.config import Config, DeltaNet, Gqa
from tests.reference.training import AdamW, Recipe


@dataclass(frozen=True)
class MuonRecipe:
    """Settings of a spec's `optimizer muon` block that AdamW does not have."""

    momentum: float
    nesterov: bool
    newton_schulz: int
    polish: int
    rms: float


class Muon:
    """Muon for the matrices of layers, AdamW for all else, at the same rate and weight decay.

    M ← μM + G; O = orthogonal(G + μM), or of M; W ← W − rate · (rms · √max(m, n) · O + weight_decay · W).
    """

    def __init__(self, config: Config, parameters: Mapping[str, Tensor], recipe: Recipe, muon: MuonRecipe) -> None:
        self.matrices = {name: p for name, p in parameters.items() if is_matrix(name, p)}
        self.adamw = AdamW({n: p for n, p in parameters.items() if n not in self.matrices}, recipe)
        self.config, self.recipe, self.muon = config, recipe, muon
        self.momentum = {name: torch.zeros_like(p) for name, p in self.matrices.items()}

    @torch.no_grad()
    def step_(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        self.adamw.step_(gradients, rate)
        mu = self.muon.momentum
        for name, weight in self.matrices.items():
            self.momentum[name] = mu * self.momentum[name] + gradients[name]
            along = gradients[name] + mu * self.momentum[name] if self.muon.nesterov else self.momentum[name]
            rows = rows_of(self.config, name, self.matrices)
            for w, m in zip(weight.split(rows), along.split(rows), strict=True):
                update = self.muon.rms * sqrt(max(w.shape)) * orthogonal(m, self.muon.newton_schulz, self.muon.polish)
                w.sub_(rate * (update + self.recipe.weight_decay * w))


def orthogonal(m: Tensor, iterations: int, polish: int) -> Tensor:
    """p(p(…p(M / ‖M‖))) with p(X) = aX + b(XXᵀ)X + c(XXᵀ)²X."""
    x = m / (m.square().sum().sqrt() + 1e-7)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * iterations + [(2.0, -1.5, 0.5)] * polish:
        cubed = x @ x.mT @ x
        x = a * x + b * cubed + c * (x @ x.mT @ cubed)
    return x


def is_matrix(name: str, parameter: Tensor) -> bool:
    last = name.rpartition(".")[2]
    return (
        parameter.dim() == 2
        and last not in ("embedding", "head", "convolution")
        and not name.endswith(("_bias", "final_hyper.fn"))
    )


def rows_of(config: Config, name: str, matrices: Mapping[str, Tensor]) -> list[int]:
    """Rows of each matrix in a parameter: a gated up projection has two, with as many rows as down has inputs."""
    block, _, part = name.rpartition(".")
    if part == "up":
        inner = matrices[f"{block}.down"].shape[1]
        return [inner] * (len(matrices[name]) // inner)
    if part == "fn":  # of pre, of post, and of what mixes n streams
        assert config.hyper_connections is not None
        n = config.hyper_connections.streams
        return [n, n, n * n]
    if part == "pool":  # values and gates
        return [len(matrices[name]) // 2] * 2
    if part == "group_out":
        columns = len(matrices[f"{block}.q_up"])
        return [len(matrices[name]) * matrices[name].shape[1] // columns] * (columns // matrices[name].shape[1])
    if part == "qkv":
        layer = name.split(".")[1] if name.startswith("layers.") else -1
        attention = config.attention_of(int(layer))
        if isinstance(attention, DeltaNet):
            keys = attention.key_heads * attention.key_dim
            return [keys, keys, attention.heads * attention.value_dim]
        assert isinstance(attention, Gqa)
        heads = (attention.heads, attention.kv_heads, attention.kv_heads)
        gates = (attention.heads,) if attention.output_gate else ()
        return [number * attention.head_dim for number in (*heads, *gates)]
    return [len(matrices[name])]
