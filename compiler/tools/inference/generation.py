"""Text token by token: with a cache, and with drafts of the MTP block where the model has one.

A step of drafting asks the model for two tokens at once: the one that is next, and the one that the MTP block expects
after it (DeepSeek-V3, arXiv 2412.19437, §2.2 and §5.4.3). If that is taken, the step has given two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiler.tools.inference.language_model import LanguageModel
from compiler.tools.inference.sampling import Sampler, instead


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
