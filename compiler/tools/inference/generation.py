"""Generates tokens with a cache, and with drafts of the MTP block if the model has one.

With drafts, each forward checks two tokens: the next one, and the MTP block's draft of the token after it (DeepSeek-V3,
arXiv 2412.19437, §2.2 and §5.4.3). If the draft is accepted, the step yields two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiler.tools.inference.language_model import LanguageModel

# --- Sampling, and the acceptance of drafts
#
# Acceptance follows Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192,
# algorithm 1: tokens have the model's distribution whatever the drafts are. V vocabulary.


@dataclass(frozen=True)
class Sample:
    """A token, and the probabilities that it was sampled from; None if it is the likeliest."""

    token: int
    p_V: Tensor | None = None


@dataclass
class Sampler:
    """Samples tokens. `temperature` 0 is greedy: it picks the largest logit, the first of equal ones.

    `top_p`: keep only the fewest most probable tokens whose probabilities sum to at least this.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    _random: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)

    def sample(self, logits_V: Tensor) -> Sample:
        """Sample a token."""
        if self.temperature == 0:  # without the probabilities, which would take longer than a small model
            return Sample(int(logits_V.argmax()))
        p_V = self.probabilities(logits_V)
        return Sample(self.draw(p_V), p_V)

    def replace(self, logits_V: Tensor, drafted: Sample) -> int | None:
        """The token that replaces a drafted one, given the model's logits; None if the draft is accepted."""
        if drafted.p_V is None:
            token = int(logits_V.argmax())
            return None if token == drafted.token else token
        p_V = self.probabilities(logits_V)
        return None if self.accepts(p_V, drafted.p_V, drafted.token) else self.draw(instead(p_V, drafted.p_V))

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """logits_V -> p_V, FP64, summing to 1."""
        if self.temperature == 0:
            return torch.zeros(logits_V.shape, dtype=torch.float64).index_fill_(0, logits_V.argmax(), 1.0)
        p_V = torch.softmax((logits_V.double() - logits_V.max()) / self.temperature, dim=0)
        if self.top_p < 1:
            ordered_V, index_V = p_V.sort(descending=True, stable=True)
            ordered_V[ordered_V.cumsum(0) - ordered_V >= self.top_p] = 0  # more probable tokens reach top_p already
            p_V = torch.zeros_like(p_V).scatter_(0, index_V, ordered_V)
            p_V /= p_V.sum()
        return p_V

    def draw(self, p_V: Tensor) -> int:
        """Sample a token from these probabilities."""
        if self.temperature == 0:
            return int(p_V.argmax())
        return int(torch.multinomial(p_V, 1, generator=self._random))

    def accepts(self, p_V: Tensor, q_V: Tensor, drafted: int) -> bool:
        """Whether to accept a token drafted from the probabilities q_V, given the model's p_V."""
        share = float(acceptance(p_V, q_V)[drafted])
        return share >= 1 or (share > 0 and float(torch.rand((), generator=self._random, dtype=torch.float64)) < share)


def acceptance(p_V: Tensor, q_V: Tensor) -> Tensor:
    """p_V of the model, q_V of the draft -> the probability of accepting each token if it is drafted: min(1, p/q)."""
    return torch.where(q_V > 0, p_V / q_V, 0.0).clamp_(max=1.0)


def instead(p_V: Tensor, q_V: Tensor) -> Tensor:
    """p_V of the model, q_V of the draft -> the probabilities of the token that replaces a rejected draft:
    max(0, p − q), normalized."""
    left_V = (p_V - q_V).clamp_(min=0)
    return left_V / left_V.sum()


# --- Generation


@dataclass
class Drafts:
    """The number of tokens drafted so far, and of those accepted."""

    drafted: int = 0
    accepted: int = 0


def generate_tokens(model: LanguageModel, prompt: Sequence[int], sampler: Sampler) -> Iterator[int]:
    """Endlessly generate the tokens that follow a prompt, one per forward."""
    cache, new = model.cache(), list(prompt)
    while True:
        h_TN = model.extend(torch.tensor(new), cache)
        new = [sampler.sample(model.logits(h_TN[-1:])[0]).token]
        yield new[0]


def generate_with_drafts(
    model: LanguageModel, prompt: Sequence[int], sampler: Sampler, drafts: Drafts
) -> Iterator[int]:
    """Endlessly generate tokens with the same distribution as `generate_tokens`; if greedy, the same tokens.

    `drafts` is updated.
    """
    cache, draft_cache = model.cache(), model.draft_cache()
    seen_TN = model.extend(torch.tensor(list(prompt)), cache)  # hidden states that the MTP block has not processed
    token = sampler.sample(model.logits(seen_TN[-1:])[0]).token
    following = [*prompt[1:], token]  # the token after each state
    while True:
        yield token
        drafted = sampler.sample(model.draft(torch.tensor(following), seen_TN, draft_cache))
        h_2N = model.extend(torch.tensor([token, drafted.token]), cache)
        first_V, second_V = model.logits(h_2N)
        drafts.drafted += 1
        replacement = sampler.replace(first_V, drafted)
        if replacement is None:
            drafts.accepted += 1
            yield drafted.token
            token = sampler.sample(second_V).token
            seen_TN, following = h_2N, [drafted.token, token]
        else:
            cache.length -= 1
            token = replacement
            seen_TN, following = h_2N[:1], [token]
