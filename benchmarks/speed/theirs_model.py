"""DeepSeek-V3 as a user would train it with torch: the model of `transformers`, or the one in plain_model.py.

Both get the initial weights, the samples and the recipe of one of our builds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.speed.plain_model import Plain
from runtime.contract import EXTRA_TOKENS, RunPlan
from runtime.data.samples import Samples
from runtime.state.state import initial_value
from runtime.system.strict_json import tree
from tests.reference.config import Config
from tests.reference.huggingface import to_transformers


@dataclass(frozen=True)
class Choice:
    """The options that a user would try. The fastest choice counts."""

    attention: str = "sdpa"  # or eager
    split: int = 1  # parts of the batch, with gradient accumulation
    optimizer: str = "fused"  # or foreach


@dataclass(frozen=True)
class Batches:
    """The samples of our training, in its order."""

    samples: Samples
    size: int

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """tokens, targets [batch, sequence] of a step, counted from 0."""
        rows = [self.samples.tokens(step * self.size + i) for i in range(self.size)]
        z_BZ = torch.stack([torch.from_numpy(row.astype("int64")) for row in rows])
        sequence = self.samples.sequence
        return z_BZ[:, :sequence].contiguous(), z_BZ[:, 1 : sequence + 1].contiguous()


def batches_of(plan: RunPlan, corpus: Path) -> Batches:
    """The training samples of a build, in batches of its largest size."""
    train = plan.train
    return Batches(Samples(corpus, "train", train.sequence, EXTRA_TOKENS, seed=train.seed), train.batch.end)


def model_of(plan: RunPlan, experts: str, attention: str) -> PreTrainedModel:
    """The model of `transformers` in float32 with our initial weights."""
    model = to_transformers(*_initial(plan)).train()
    model.config._experts_implementation = experts
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    return model


def plain_of(plan: RunPlan, attention: str) -> Plain:
    """The plain model in float32 with our initial weights. Raises RuntimeError if a build has other parameters."""
    logical, config = _initial(plan)
    model = Plain(config, attention)
    model.load_state_dict(logical)
    return model


def _initial(plan: RunPlan) -> tuple[dict[str, Tensor], Config]:
    """The initial value of each parameter by its name, and the sizes of the model."""
    seed = plan.train.seed
    logical = {p.name: initial_value(seed, p.name, p.shape, p.init) for p in plan.parameters}
    return logical, Config.from_plan(tree(plan.model) | {"sequence": plan.train.sequence})


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean cross entropy of a part of the batch, in float32."""

    def loss(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        out = model(tokens_BS)
        logits_BSV = out if isinstance(out, Tensor) else out.logits
        return functional.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten())

    return loss


class Optimizer:
    """AdamW with clipping by the global norm, with the recipe of the plan.

    Norms have no weight decay. If the weights are not float32, master weights are updated and copied back.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], plan: RunPlan, kind: str) -> None:
        recipe = plan.train.optimizer
        settings = recipe.settings
        assert recipe.clip is not None, "gradients are clipped in every contest"
        self.clip = recipe.clip
        self.weights: list[nn.Parameter] = list(parameters)
        copied = any(weight.dtype != torch.float32 for weight in self.weights)
        self.masters = [nn.Parameter(w.detach().float().clone()) for w in self.weights] if copied else self.weights
        self.copied = copied
        is_norm = [weight.ndim == 1 for weight in self.weights]
        groups: list[dict[str, Any]] = [
            {"params": [m for m, norm in zip(self.masters, is_norm, strict=True) if not norm]},
            {"params": [m for m, norm in zip(self.masters, is_norm, strict=True) if norm], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=plan.train.rate[0].start,
            betas=(settings["beta1"], settings["beta2"]),
            eps=settings["eps"],
            weight_decay=recipe.weight_decay,
            **{kind: True},
        )

    def step(self, norm_over: Callable[[Tensor], Tensor] | None = None) -> None:
        """Clip, update and clear the gradients. `norm_over`: sums a squared norm over the ranks that hold the model."""
        if self.copied:
            for master, weight in zip(self.masters, self.weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
        if norm_over is None:
            nn.utils.clip_grad_norm_(self.masters, self.clip)
        else:
            squared = nn.utils.get_total_norm(_gradients(self.masters)) ** 2
            nn.utils.clip_grads_with_norm_(self.masters, self.clip, norm_over(squared).sqrt())
        self.adamw.step()
        if self.copied:
            with torch.no_grad():
                torch._foreach_copy_([*self.weights], [*self.masters])
        for parameter in (*self.weights, *self.masters):
            parameter.grad = None


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
