"""Small models of every kind in float64, as the reference has them and as `compiler.tools.inference` computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compiler.plan.blocks import model_steps
from compiler.plan.parameters import tensors
from compiler.tools.inference.language_model import LanguageModel, spec_for_one_rank
from dsl.schema import Llama3Scaling, Rope, Spec, YarnScaling
from tests.reference.cases import trained_like
from tests.reference.config import Config
from tests.reference.model import Reference
from tests.runtime.step.specs import MODELS, gqa, mla, spec

YARN = Rope(theta=100.0, scaling=YarnScaling(factor=4.0, original=8, mscale=0.7, mscale_all_dim=1.0))
LLAMA3 = Rope(
    theta=100.0, scaling=Llama3Scaling(factor=8.0, original=16, low_freq_factor=1.0, high_freq_factor=4.0), width=4
)
GROUPED = gqa(None)
ATTENTION = {  # of the model named first
    ("v3", "yarn"): mla().model_copy(update={"rope": YARN}),
    ("v3", "no position"): mla().model_copy(update={"rope": None}),
    ("llama", "biases"): GROUPED.model_copy(update={"bias": "all", "qk_norm": "width"}),
    ("llama", "partial, llama3"): GROUPED.model_copy(update={"rope": LLAMA3, "scale": 0.3}),
    ("llama", "no position"): GROUPED.model_copy(update={"rope": None}),
    ("llama", "window"): GROUPED.model_copy(update={"window": 5}),
    ("llama", "window of one"): GROUPED.model_copy(update={"window": 1}),
    ("qwen", "window, sinks"): GROUPED.model_copy(update={"window": 4, "sinks": True, "rope": YARN, "bias": "qkv"}),
    ("llama", "softcap"): GROUPED.model_copy(update={"softcap": 1.5}),
}
ALL = MODELS | {
    f"{base}, {name}": MODELS[base].model_copy(update={"attention": attention})
    for (base, name), attention in ATTENTION.items()
}
KINDS = tuple(ALL)  # latent attention, grouped queries, experts, with and without MTP
DRAFTING = tuple(name for name, model in ALL.items() if model.mtp)


@dataclass(frozen=True)
class Pair:
    """A model twice, with the same weights."""

    ours: LanguageModel
    reference: Reference

    @property
    def vocab(self) -> int:
        return self.ours.vocab


def pair(kind: str, seed: int = 0, dtype: str = "fp64", sequence: int = 24) -> Pair:
    """A model of `KINDS` with weights as after training, for sequences of `length` tokens."""
    run = spec(2, 2, 2, 2)
    run = run.model_copy(update={"model": ALL[kind], "train": run.train.model_copy(update={"sequence": sequence})})
    config = Config.from_plan(run.model.model_dump(mode="json") | {"sequence": sequence})
    reference = trained_like(config, seed)
    single_rank = spec_for_one_rank(run, dtype)
    return Pair(LanguageModel(single_rank, stacked(single_rank, reference.state_dict())), reference)


def stacked(spec: Spec, logical: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as segments read them, from logical ones."""
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[spec.precision.compute]
    weights = {}
    for row in tensors(spec, model_steps(spec)):
        parts = [
            logical[name].detach().to(torch.float32 if row.role == "bias" and dtype.itemsize < 4 else dtype)
            for name in row.names()
        ]
        weights[row.name] = parts[0] if row.num_experts is None else torch.stack(parts)
    return weights


def tokens_of(pair: Pair, count: int, seed: int = 0) -> Tensor:
    """Random tokens."""
    return torch.randint(pair.vocab, (count,), generator=torch.Generator().manual_seed(seed))


def reference_logits(pair: Pair, tokens_T: Tensor) -> Tensor:
    """The reference's logits for one whole sequence."""
    with torch.no_grad():
        return pair.reference(tokens_T[None], tokens_T[None] if pair.reference.mtp else None).logits_BSV[0]
