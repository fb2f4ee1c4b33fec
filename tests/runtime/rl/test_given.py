"""Steps on fixed completions against a plain torch.nn model with ordinary autograd, in float64 and in real processes:
losses, gradients of the first step, and weights after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from compiler.plan.plan import make_plan
from dsl.schema import Reward, Spec
from runtime.contract import RecipeRatePhase
from runtime.contract.rate import learning_rate
from tests.reference.losses import PolicyRecipe, group_advantages, policy_loss
from tests.reference.training import Recipe, balance_, clip_
from tests.runtime.rl.given import Given, earned
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec, with_rewards, without_mtp
from tests.runtime.step.test_differential import close, compare, optimizer_of, reference_of, value

SEQUENCE, GROUP, STEPS, LOGP_TOLERANCE = 10, 4, 5, 1e-12
REWARDS = (Reward(name="first", check="exact"), Reward(name="second", check="format", weight=-0.7))


@dataclass(frozen=True)
class Case:
    """A model, its mesh, and its training. `keys`: those of `grpo`."""

    of: str
    schedule: str
    mesh: tuple[int, int, int, int]  # pipeline, expert and data ranks, ZeRO stage
    keys: Mapping[str, Any]
    recompute: tuple[str, ...] = ()

    @property
    def spec(self) -> Spec:
        pp, ep, dp, zero = self.mesh
        base = spec(pp, ep, dp, 16 // (2 * dp), STEPS, zero, self.of, self.schedule, sequence=SEQUENCE)
        base = base.model_copy(update={"recompute": self.recompute})
        return with_rewards(without_mtp(base), group=GROUP, prompt=4, completion=6, rewards=REWARDS, **self.keys)


CASES = {
    "alone": Case("v3", "1f1b", (1, 1, 1, 0), {}),
    "to a reference": Case(
        "v3", "dualpipe", (2, 2, 2, 1), {"kl": 0.4, "kl_form": "k3", "loss": "grpo", "scale": "batch"}
    ),
    "again": Case("llama", "zbv", (2, 1, 2, 2), {"iterations": 2, "loss": "dr_grpo", "scale": "none"}),
    "hot": Case("qwen", "interleaved", (2, 1, 1, 0), {"temperature": 1.6, "kl": 0.2, "clip_high": 0.3}, ("layer",)),
    "bounded": Case("split", "1f1b", (1, 1, 2, 3), {"temperature": 0.7, "clip_low": 0.1}),
}


def recipe_of(chosen: Spec) -> PolicyRecipe:
    grpo = chosen.train.grpo
    assert grpo is not None
    names = ("group", "temperature", "clip_low", "clip_high", "kl", "kl_form", "loss", "scale")
    return PolicyRecipe(**{name: getattr(grpo, name) for name in names}, longest=grpo.completion)


class Trained:
    """A reference trained on completions, which are drawn at the first step of each rollout."""

    def __init__(self, chosen: Spec) -> None:
        self.spec, self.recipe = chosen, recipe_of(chosen)
        self.model = reference_of(chosen.model, SEQUENCE)
        names = self.model.logical_parameters().items()
        self.model.load_logical({name: value(self.model, name, tensor) for name, tensor in names})

    def draw(self, number: int) -> Given:
        """Prompts and completions of all lengths, sampled with weights that are close to the model's."""
        random, num, grpo = np.random.default_rng([3, number]), self.spec.train.batch.start, self.spec.train.grpo
        assert grpo is not None
        lengths = random.integers(1, grpo.prompt + 1, num // GROUP)
        prompts = [random.integers(0, self.spec.model.vocab, length) for length in lengths]
        tokens_NC = torch.full((num, grpo.completion), -1)
        for i in range(num):
            length = 1 + (i + number) % grpo.completion
            tokens_NC[i, :length] = torch.from_numpy(random.integers(0, self.spec.model.vocab, length))
        blank_NC = torch.zeros(tokens_NC.shape, dtype=torch.float64)
        drawn = Given([prompts[i // GROUP] for i in range(num)], tokens_NC, blank_NC, blank_NC.clone())
        with torch.no_grad():
            logps, _ = self.forward(drawn, self.recipe.temperature)
        for i, logp_C in enumerate(logps):
            for near_NC in (drawn.old_NC, drawn.reference_NC):
                noise_C = torch.from_numpy(random.normal(scale=0.3, size=len(logp_C)))
                near_NC[i, : len(logp_C)] = (logp_C + noise_C).clamp(max=-1e-3)
        return drawn

    def forward(self, given: Given, temperature: float) -> tuple[list[Tensor], Any]:
        """The log-probabilities of each completion, and the other results of the forward of all sequences."""
        tokens_NS = torch.zeros((len(given.prompts), SEQUENCE), dtype=torch.int64)
        for tokens_S, prompt, completion in zip(tokens_NS, given.prompts, given.completions, strict=True):
            text = np.concatenate([prompt, completion])
            tokens_S[: len(text)] = torch.from_numpy(text)
        output = self.model(tokens_NS)
        pairs = zip(given.prompts, given.completions, strict=True)
        lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
        output.routings.update({name: replace(routing, lengths_B=lengths) for name, routing in output.routings.items()})
        logp_NSV = (output.logits_BSV / temperature).log_softmax(dim=2)
        logps = []
        for logp_SV, prompt, completion in zip(logp_NSV, given.prompts, given.completions, strict=True):
            first = len(prompt) - 1
            logps.append(torch.stack([logp_SV[first + c, token] for c, token in enumerate(completion)]))
        return logps, output

    def backward(self, given: Given, recipe: PolicyRecipe) -> tuple[list[float], dict[str, Tensor], Any, list[Tensor]]:
        """Losses of a step (policy, MTP, balance), gradients, loads of experts, log-probabilities."""
        logps, output = self.forward(given, recipe.temperature)
        rewards_NR = [earned(*pair) for pair in zip(given.prompts, given.completions, strict=True)]
        weights_R = torch.tensor([reward.weight for reward in REWARDS], dtype=torch.float64)
        totals_N = torch.tensor(rewards_NR, dtype=torch.float64) @ weights_R
        lengths = [len(completion) for completion in given.completions]
        olds, references = (
            [values_C[:length] for values_C, length in zip(values_NC, lengths, strict=True)]
            for values_NC in (given.old_NC, given.reference_NC)
        )
        loss = policy_loss(logps, olds, references, group_advantages(totals_N, recipe), recipe)
        sequence = self.model.sequence_loss(output)
        self.model.zero_grad()
        (loss + sequence).backward()
        loads = {block: routing.load_E for block, routing in output.routings.items()}
        results = [loss.item(), 0.0, sequence.item()], self.model.logical_gradients(), loads
        return *results, [logp_C.detach() for logp_C in logps]

    def steps(self, folder: Path) -> dict[str, Any]:
        """The results of all steps. Writes the completions of each rollout into a folder."""
        train = self.spec.train
        assert train.grpo is not None
        optimizer = optimizer_of(
            self.model, train.optimizer, Recipe((), weight_decay=0.1, clip=train.optimizer.clip, eps=1e-8)
        )
        phases = [RecipeRatePhase(p.shape, p.start, p.end, p.end_tokens) for p in train.rate]
        tokens, rows, expected = 0, [], dict[str, Any]()
        for step in range(STEPS):
            number, again = divmod(step, train.grpo.iterations)
            if not again:
                drawn = self.draw(number)
                drawn.save(folder / f"{number}.safetensors")
            losses, gradients, loads, logps = self.backward(drawn, self.recipe)
            if step == 0:
                expected = {"gradients": {n: g.clone() for n, g in gradients.items()}, "loads": loads, "logps": logps}
            norm = clip_(gradients, train.optimizer.clip)
            before, tokens = tokens, tokens + len(drawn.prompts) * SEQUENCE
            optimizer.step_(gradients, learning_rate(phases, tokens))
            balance_(self.model, loads, before)
            rows.append([*losses, norm])
        return expected | {"rows": rows, "weights": self.model.logical_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_steps_on_given_completions_equal_autograd(tmp_path: Path, segments: Segments, name: str) -> None:
    chosen = CASES[name].spec
    write_build(tmp_path / "builds" / "only", compile_spec(chosen, segments=segments).files)
    expected = Trained(chosen).steps(tmp_path / "given" / "only")
    world = chosen.parallel.pipeline * chosen.parallel.data
    run_module("tests.runtime.rl.given_ranks", tmp_path, world)
    plan, gradient_names, compared = make_plan(chosen), set[str](), set[tuple[int, int]]()
    of_ranks = [load_file(tmp_path / "out" / "only" / f"rank_{rank}.safetensors") for rank in range(world)]
    for rank, tensors in enumerate(of_ranks):
        gradient_names |= compare(
            tensors, expected, {replica.name: replica.slice for replica in plan.replicas if rank in replica.holders}
        )
        column = rank % chosen.parallel.data
        for a, logp_T in micro_batches(tensors):
            sequences = np.arange(16).reshape(-1, chosen.parallel.data, 2)[a, column]
            compared.add((a, column))
            logps = torch.cat([expected["logps"][i] for i in sequences])
            close(f"log-probabilities {a}", logp_T, logps, LOGP_TOLERANCE)
    assert gradient_names == expected["gradients"].keys() and len(compared) == 8
    head = "embedding" if chosen.model.tied else "head"
    gradients = [tensors[f"gradient/{head}"] for tensors in of_ranks if f"gradient/{head}" in tensors]
    for mistake in mistakes(chosen):
        wrong = Trained(chosen)
        gradient = wrong.backward(wrong.draw(0), mistake)[1][head]
        for ours in gradients:
            assert (ours - gradient).abs().max() > 1e-4 * gradient.abs().max(), mistake


def micro_batches(left: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    for name, logp_T in left.items():
        if name.startswith("logp/"):
            yield int(name.removeprefix("logp/")), logp_T


def mistakes(chosen: Spec) -> Iterator[PolicyRecipe]:
    """Recipes that each differ from a spec's in one thing."""
    right = recipe_of(chosen)
    yield replace(right, temperature=right.temperature * 1.01)
    yield replace(right, clip_low=right.clip_low + 0.2)
    yield replace(right, clip_high=right.clip_high + 0.2)
    yield replace(right, kl=right.kl + 0.01)
    yield replace(right, loss="grpo" if right.loss != "grpo" else "dapo")
    yield replace(right, scale="none" if right.scale != "none" else "group")
