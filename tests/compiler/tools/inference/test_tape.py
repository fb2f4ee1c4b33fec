"""Recorded calls of C++ functions give what ops that run one by one give, and how many there are for a token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.generating import random_model
from compiler.tools.inference.language_model import Cache, LanguageModel, spec_for_one_rank
from compiler.tools.inference.tape import MOST, Tape, Tapes
from dsl.load import load
from tests.compiler.tools.inference.models import KINDS, pair, tokens_of

SPECS = Path(__file__).parents[4] / "specs"
# Kinds with no other ops than those of a tape.
RECORDED = (
    *("v3", "v2", "llama", "qwen", "latent", "post", "yarn", "v3, yarn", "v3, no position"),
    *("llama, biases", "llama, partial, llama3", "llama, no position"),
)
TOKENS = 24
NEAR = {"fp32": 1e-5, "bf16": 0.05}


def tapes_of(cache: Cache) -> dict[tuple[str, int], Tape]:
    return cache._tapes._tapes


def logits(model: LanguageModel, tokens_T: Tensor, split: list[int]) -> tuple[Tensor, Cache]:
    """The logits after each token, part by part."""
    cache = model.cache()
    parts = [model.logits(model.extend(part, cache)) for part in tokens_T.split(split)]
    return torch.cat(parts), cache


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [[5] + [1] * 19, [3, 2, 2, 1, 1, 2, 8, 1, 4]], ids=str)
def test_a_tape_changes_no_result(kind: str, split: list[int], dtype: str) -> None:
    model = pair(kind, dtype=dtype).ours
    tokens_T = torch.randint(model.vocab, (TOKENS,), generator=torch.Generator().manual_seed(0))
    found, cache = logits(model, tokens_T, split)
    with patch.object(Tapes, "run", lambda *_: None):
        expected, _ = logits(model, tokens_T, split)
    assert (found - expected).abs().max() <= NEAR[dtype] * expected.abs().max()
    assert {new for _, new in tapes_of(cache)} == ({*split[1:]} if kind in RECORDED else set())


@pytest.mark.parametrize("kind", RECORDED)
def test_caches_that_grow_or_lose_tokens_are_recorded_again(kind: str) -> None:
    """More tokens than a cache has room for at first, then fewer, then others."""
    model = pair(kind, dtype="fp32", sequence=300).ours
    first_T, second_T = (torch.randint(model.vocab, (250,)) for _ in range(2))
    cache = model.cache()
    parts = [model.extend(part, cache) for part in first_T.split([3, *[1] * 80, 100, *[2] * 30, *[1] * 7])]
    assert torch.allclose(torch.cat(parts), model.hidden(first_T, 250), rtol=1e-4, atol=1e-4)
    cache.length = 40
    text_T = torch.cat((first_T[:40], second_T[:100]))
    parts = [model.extend(part, cache) for part in second_T[:100].split([1, 2, 60, *[1] * 37])]
    assert torch.allclose(torch.cat(parts), model.hidden(text_T, 140)[40:], rtol=1e-4, atol=1e-4)


def test_the_input_of_a_tape_is_copied() -> None:
    """A result stays as it is when the tape runs again."""
    model = pair("v3", dtype="fp32").ours
    tokens_T = tokens_of(pair("v3"), 6)
    cache = model.cache()
    model.extend(tokens_T[:3], cache)
    rows = [model.extend(token, cache) for token in tokens_T[3:].split(1)]
    before = [row.clone() for row in rows]
    model.extend(tokens_T[:1], cache)
    assert all(torch.equal(row, was) for row, was in zip(rows, before, strict=True))


def test_many_tokens_are_not_recorded() -> None:
    model = pair("v3", dtype="fp32").ours
    cache = model.cache()
    for new in (3, MOST + 1, 1):
        model.extend(torch.zeros(new, dtype=torch.int64), cache)
    assert {new for _, new in tapes_of(cache)} == {1}


class Dispatches(TorchDispatchMode):
    """Counts the ops that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("spec", "dtype", "layers", "head"),
    [(SPECS / "quickstart.dsc", "fp32", 87, 2), (SPECS / "laptop-gqa.dsc", "bf16", None, 2)],
    ids=["quickstart", "laptop-gqa"],
)
def test_calls_for_a_token(spec: Path, dtype: str, layers: int | None, head: int) -> None:
    """A token costs one C++ call for each op that computes, and torch only copies its input and its output."""
    model = random_model(spec_for_one_rank(load(spec), dtype))
    cache = model.cache()
    for new in (3, 1):
        h_TN = model.extend(torch.arange(new), cache)
    model.logits(h_TN[-1:])
    tapes = tapes_of(cache)
    if layers is not None:
        assert len(tapes["_extended", 1]) == layers and len(model._tapes._tapes["_logits_of", 1]) == head
    with Dispatches() as dispatches:
        h_TN = model.extend(torch.arange(1), cache)
        model.logits(h_TN)
    assert dispatches.counts == {"arange": 1, "copy_": 2, "clone": 2}
