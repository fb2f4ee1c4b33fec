"""Text token by token: with a cache, and with drafts of the MTP block where the model has one.

A step of drafting asks the model for two tokens at once: the one that is next, and the one that the MTP block expects
after it (DeepSeek-V3, arXiv 2412.19437, §2.2 and §5.4.3). If that is taken, the step has given two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiler.tools.inference.language_model import LanguageModel

# --- Choosing the next token: probabilities of logits, a draw of them, and the rule by which a draft is taken or
# replaced
#
# The rule is that of Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192,
# algorithm 1: what comes out has the probabilities of the model, whatever drafts. V vocabulary.


@dataclass
class Sampler:
    """Draws tokens. `temperature` 0 is greedy: all probability is that of the largest logit, the first of equals.

    `top_p`: of the probable tokens only as many as have this probability together; the last of them whole.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    _random: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """logits_V -> p_V, FP64, whose sum is 1."""
        if self.temperature == 0:
            return torch.zeros(logits_V.shape, dtype=torch.float64).index_fill_(0, logits_V.argmax(), 1.0)
        p_V = torch.softmax((logits_V.double() - logits_V.max()) / self.temperature, dim=0)
        if self.top_p < 1:
            ordered_V, index_V = p_V.sort(descending=True, stable=True)
            ordered_V[ordered_V.cumsum(0) - ordered_V >= self.top_p] = 0  # what comes before has enough
            p_V = torch.zeros_like(p_V).scatter_(0, index_V, ordered_V)
            p_V /= p_V.sum()
        return p_V

    def draw(self, p_V: Tensor) -> int:
        """A token with these probabilities."""
        if self.temperature == 0:
            return int(p_V.argmax())
        return int(torch.multinomial(p_V, 1, generator=self._random))

    def takes(self, p_V: Tensor, q_V: Tensor, drafted: int) -> bool:
        """Whether to take a token that was drawn with the probabilities q_V, where the model's are p_V."""
        share = float(acceptance(p_V, q_V)[drafted])
        return share >= 1 or (share > 0 and float(torch.rand((), generator=self._random, dtype=torch.float64)) < share)


def acceptance(p_V: Tensor, q_V: Tensor) -> Tensor:
    """p_V of the model, q_V of the drafts -> the probability with which each token is taken if drafted: min(1, p/q)."""
    return torch.where(q_V > 0, p_V / q_V, 0.0).clamp_(max=1.0)


def instead(p_V: Tensor, q_V: Tensor) -> Tensor:
    """p_V of the model, q_V of the drafts -> the probabilities of the token in the place of a draft that is not taken:
    max(0, p − q), divided by its sum."""
    left_V = (p_V - q_V).clamp_(min=0)
    return left_V / left_V.sum()


# --- generation


@dataclass
class Drafts:
    """How many tokens were drafted so far, and how many of them the model has taken."""

    drafted: int = 0
    taken: int = 0


def plain(model: LanguageModel, prompt: Sequence[int], sampler: Sampler) -> Iterator[int]:
    """Tokens that follow a prompt, without end: each from one forward of the token before."""
    cache, new = model.cache(), list(prompt)
    while True:
        h_TN = model.extend(torch.tensor(new), cache)
        new = [sampler.draw(sampler.probabilities(model.logits(h_TN[-1:])[0]))]
        yield new[0]


def drafted(model: LanguageModel, prompt: Sequence[int], sampler: Sampler, drafts: Drafts) -> Iterator[int]:
    """Tokens that follow a prompt, without end, with the probabilities of `plain`; if greedy, the same tokens.

    `drafts` counts.
    """
    cache, draft_cache = model.cache(), model.draft_cache()
    seen_TN = model.extend(torch.tensor(list(prompt)), cache)  # hidden states of tokens that the MTP block has not had
    token = sampler.draw(_probabilities(model, sampler, seen_TN[-1:])[0])
    following = [*prompt[1:], token]  # the token after each of them
    while True:
        yield token
        q_V = sampler.probabilities(model.draft(torch.tensor(following), seen_TN, draft_cache))
        draft = sampler.draw(q_V)
        h_2N = model.extend(torch.tensor([token, draft]), cache)
        first_V, second_V = _probabilities(model, sampler, h_2N)
        drafts.drafted += 1
        if sampler.takes(first_V, q_V, draft):
            drafts.taken += 1
            yield draft
            token = sampler.draw(second_V)
            seen_TN, following = h_2N, [draft, token]
        else:
            cache.length -= 1
            token = sampler.draw(instead(first_V, q_V))
            seen_TN, following = h_2N[:1], [token]


def _probabilities(model: LanguageModel, sampler: Sampler, h_TN: Tensor) -> list[Tensor]:
    return [sampler.probabilities(logits_V) for logits_V in model.logits(h_TN)]
