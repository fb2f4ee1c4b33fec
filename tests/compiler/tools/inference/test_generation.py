"""Generated tokens are the same with and without a cache, and with and without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compiler.tools.inference.generation import Drafts, Sampler, generate_tokens, generate_with_drafts
from compiler.tools.inference.language_model import Cache, LanguageModel
from tests.compiler.tools.inference.models import DRAFTING, KINDS, Pair, pair, reference_logits, tokens_of

COUNT = 20


def by_reference(both: Pair, prompt: list[int]) -> Iterator[int]:
    """Greedy tokens by the reference, each computed from the whole text before it."""
    text = list(prompt)
    while True:
        text.append(int(reference_logits(both, torch.tensor(text))[-1].argmax()))
        yield text[-1]


def first(tokens: Iterator[int]) -> list[int]:
    return list(islice(tokens, COUNT))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_without_a_cache(kind: str) -> None:
    """Without drafts, and with drafts if the model has an MTP block."""
    words: set[int] = set()
    for seed in range(4):
        models, drafts = pair(kind, seed), Drafts()
        prompt = tokens_of(models, 1 + 3 * seed, seed).tolist()
        expected = first(by_reference(models, prompt))
        assert first(generate_tokens(models.ours, prompt, Sampler())) == expected
        if models.ours.can_draft:
            assert first(generate_with_drafts(models.ours, prompt, Sampler(), drafts)) == expected
            assert COUNT / 2 - 1 <= drafts.drafted <= COUNT and 0 <= drafts.accepted <= drafts.drafted
        words.update(expected)
    assert len(words) > 3, "models that say one word would agree with anything"


class Oracle(LanguageModel):
    """A model whose drafts are always right, or always wrong."""

    def __init__(self, of: LanguageModel, right: bool) -> None:
        self.__dict__.update(of.__dict__)
        self.right = right

    def draft(self, next_T: Tensor, h_TD: Tensor, cache: Cache) -> Tensor:
        """Logits of the token after the text so far, which is all tokens passed to this model."""
        self.text = [*getattr(self, "text", self.prompt[:1]), *next_T.tolist()]
        logits_V = reference_logits(self.both, torch.tensor(self.text))[-1]
        return logits_V if self.right else -logits_V

    both: Pair
    prompt: list[int]


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in DRAFTING if "," not in kind])
def test_drafts_that_are_right_or_wrong(kind: str, right: bool) -> None:
    models, drafts = pair(kind), Drafts()
    prompt = tokens_of(models, 5).tolist()
    oracle = Oracle(models.ours, right)
    oracle.both, oracle.prompt = models, prompt
    assert first(generate_with_drafts(oracle, prompt, Sampler(), drafts)) == first(by_reference(models, prompt))
    assert drafts.accepted == (drafts.drafted if right else 0)
    assert drafts.drafted == (COUNT // 2 if right else COUNT - 1)


class Markov:
    """A model of three words, in which the last two decide on the next; its drafts have other probabilities."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.table_VVV, self.draft_VV = (torch.randn(*(3,) * n, generator=random, dtype=torch.float64) for n in (3, 2))

    def cache(self) -> SimpleNamespace:
        return SimpleNamespace(length=0, text=[])

    draft_cache = cache

    def extend(self, tokens_T: Tensor, cache: SimpleNamespace) -> Tensor:
        cache.text[cache.length :] = tokens_T.tolist()
        pairs = [cache.text[i - 1 : i + 1] for i in range(cache.length, len(cache.text))]
        cache.length = len(cache.text)
        return torch.tensor([pair or [0, 0] for pair in pairs])

    def logits(self, h_TD: Tensor) -> Tensor:
        return self.table_VVV[h_TD[:, 0], h_TD[:, 1]]

    def draft(self, next_T: Tensor, h_TD: Tensor, cache: SimpleNamespace) -> Tensor:
        return self.draft_VV[next_T[-1]]

    def probabilities(self, prompt: list[int], sampler: Sampler) -> dict[tuple[int, ...], float]:
        """The probabilities of all sequences of three words."""
        shares = {(): 1.0}
        for _ in range(3):
            shares = {
                (*words, word): share * p
                for words, share in shares.items()
                for word, p in enumerate(sampler.probabilities(self.table_VVV[*[*prompt, *words][-2:]]).tolist())
                if p > 0
            }
        return shares


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampled_drafts_keep_the_probabilities(top_p: float) -> None:
    """Sequences of three words, one or two of them from drafts, are as frequent as without drafts, by a χ² test with
    fixed seeds and p = 0.001; the test fails if one word is drawn differently."""
    model, prompt, count, drafts = Markov(), [0, 1], 1200, Drafts()
    expected = model.probabilities(prompt, Sampler(0.9, top_p))
    assert len(expected) > 4 and abs(sum(expected.values()) - 1) < 1e-9
    histograms: dict[bool, Counter[tuple[int, ...]]] = {True: Counter(), False: Counter()}
    for seed in range(count):
        language_model: LanguageModel = model  # type: ignore[assignment]
        histograms[False][tuple(islice(generate_tokens(language_model, prompt, Sampler(0.9, top_p, seed)), 3))] += 1
        histograms[True][
            tuple(islice(generate_with_drafts(language_model, prompt, Sampler(0.9, top_p, seed), drafts), 3))
        ] += 1
    assert 0.2 < drafts.accepted / drafts.drafted < 0.9
    for counts in histograms.values():
        assert counts.keys() <= expected.keys(), "what has no probability was drawn"
        assert chi_square_is_likely(counts, expected, count)
    colder = model.probabilities(prompt, Sampler(0.7, top_p))
    assert not chi_square_is_likely(histograms[True], colder, count), (
        "the test sees a temperature of 0.7 instead of 0.9"
    )


def chi_square_is_likely(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], count: int) -> bool:
    """Whether counts are likely under probabilities. Rare outcomes are one class, so that each is expected 5 times."""
    frequent = {outcome: p for outcome, p in expected.items() if p * count >= 5}
    rare_share = 1 - sum(frequent.values())
    terms = [(found[outcome] - count * p) ** 2 / (count * p) for outcome, p in frequent.items()]
    if rare_share * count >= 5:
        rare_count = count - sum(found[outcome] for outcome in frequent)
        terms.append((rare_count - count * rare_share) ** 2 / (count * rare_share))
    degrees = len(terms) - 1
    # Wilson and Hilferty, 1931: the cube root of χ²/degrees is nearly normal; 3.09 deviations are p = 0.001
    deviation = ((sum(terms) / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    return deviation < 3.09
