"""The training recipe by hand: AdamW, clipping by the global norm, loss-free balancing (arXiv 2408.15664)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.reference.config import Moe, phase_value
from tests.reference.model import Reference


@dataclass(frozen=True)
class Recipe:
    """rates: the learning rate of each step. Others are named as in a spec's `optimizer` block (clip None: off)."""

    rates: tuple[float, ...]
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    @classmethod
    def from_plan(cls, optimizer: Mapping[str, Any], rates: Sequence[float]) -> Recipe:
        """Read the JSON dump of a spec's `train.optimizer`."""
        keys = ("beta1", "beta2", "eps", "weight_decay", "clip")
        return cls(tuple(rates), **{key: optimizer[key] for key in keys})


@dataclass(frozen=True)
class Step:
    """What one step measured: losses before its update (`mtp` without its weight), and the norm before clipping."""

    main: float
    mtp: float
    sequence: float
    gradient_norm: float
    loads: dict[str, list[int]]


def train_steps(model: Reference, batches: Sequence[Tensor], recipe: Recipe) -> list[Step]:
    """Trains `model` in place from zero moments, one step on each batch z_BZ ([B, S + 2]; B may vary)."""
    assert len(batches) == len(recipe.rates), "one learning rate a step"
    parameters = dict(model.named_parameters())
    optimizer = AdamW(parameters, recipe)
    tokens, steps = 0, []
    for z_BZ, rate in zip(batches, recipe.rates, strict=True):
        model.zero_grad(set_to_none=True)
        losses = model.losses(z_BZ)
        mtp_weight = 0.0 if model.config.mtp is None else phase_value(model.config.mtp.weight, tokens)
        losses.total(mtp_weight).backward()
        gradients = model.logical_gradients()
        norm = clip_(gradients, recipe.clip)
        optimizer.step_(gradients, rate)
        balance_(model, losses.loads, tokens)
        tokens += z_BZ.shape[0] * model.config.sequence
        loads = {block: load_E.tolist() for block, load_E in losses.loads.items()}
        steps.append(Step(losses.main.item(), losses.mtp.item(), losses.sequence.item(), norm, loads))
    return steps


def clip_(gradients: Mapping[str, Tensor], clip: float | None) -> float:
    """Scales all gradients by min(1, clip / norm), with no eps. Returns the norm before, over every element once."""
    norm = math.sqrt(sum(gradient.double().pow(2).sum().item() for gradient in gradients.values()))
    if clip is not None and norm > clip:
        for gradient in gradients.values():
            gradient.mul_(clip / norm)
    return norm


class AdamW:
    """AdamW with bias correction and decoupled decay (arXiv 1711.05101); norms, biases, scales, sinks and rates
    of decay are not decayed.

    p ← p − rate · (m̂ / (√v̂ + eps) + weight_decay · p), with m̂ = m / (1 − β1^t) and v̂ = v / (1 − β2^t).
    """

    def __init__(self, parameters: Mapping[str, Tensor], recipe: Recipe) -> None:
        self.parameters, self.recipe, self.t = parameters, recipe, 0
        self.m = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.v = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def step_(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        recipe = self.recipe
        self.t += 1
        for name, p in self.parameters.items():
            self.m[name] = recipe.beta1 * self.m[name] + (1 - recipe.beta1) * gradients[name]
            self.v[name] = recipe.beta2 * self.v[name] + (1 - recipe.beta2) * gradients[name] ** 2
            m_hat = self.m[name] / (1 - recipe.beta1**self.t)
            v_hat = self.v[name] / (1 - recipe.beta2**self.t)
            vector = name.endswith(("norm", "_bias", "sinks", "decay_rate", "_hyper.base", "_hyper.scale")) or (
                ".module." in name and p.dim() < 2
            )
            decay = 0.0 if vector else recipe.weight_decay
            p -= rate * (m_hat / (v_hat.sqrt() + recipe.eps) + decay * p)


@torch.no_grad()
def balance_(model: Reference, loads: Mapping[str, Tensor], tokens: int) -> None:
    """b += rate·sign(mean load − load) in every MoE block, MTP's too; `tokens`: trained on before this step."""
    for block, load_E in loads.items():
        ffn = model.config.layers[-1 if block == "mtp.0" else int(block.removeprefix("layers."))]
        assert isinstance(ffn, Moe)
        if ffn.balance.bias_rate is None:
            continue
        bias_E = model.get_buffer(f"{block}.ffn.router.bias")
        bias_E += phase_value(ffn.balance.bias_rate, tokens) * torch.sign(load_E.double().mean() - load_E).to(bias_E)
