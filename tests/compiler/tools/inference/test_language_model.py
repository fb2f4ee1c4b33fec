"""A model in one process against the reference in float64, whole and token by token."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compiler.tools.inference.loaded import SMALL, limit_threads
from compiler.tools.inference.op_tables import CachedForward, Forward
from tests.compiler.tools.inference.models import DRAFTING, KINDS, Pair, pair, reference_logits, tokens_of
from tests.reference.cases import EXACT, close

TOKENS = 24
SPLITS = ([1] * TOKENS, [TOKENS], [7, 1, 1, 5, 2, 8], [1, 23], [23, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_reference(kind: str) -> None:
    for seed in range(3):
        models = pair(kind, seed)
        tokens_T = tokens_of(models, TOKENS, seed)
        expected = reference_logits(models, tokens_T)
        assert expected.std() > 0.1, "logits near zero would agree with anything"
        assert close(models.ours.logits(models.ours.hidden(tokens_T, TOKENS)), expected, 10 * EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_do_not_see_one_another(kind: str) -> None:
    models = pair(kind)
    tokens_T = tokens_of(models, TOKENS)
    expected = torch.cat([reference_logits(models, part) for part in tokens_T.split(8)])
    assert close(models.ours.logits(models.ours.hidden(tokens_T, 8)), expected, 10 * EXACT)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_changes_no_result(kind: str, split: list[int]) -> None:
    models = pair(kind)
    tokens_T = tokens_of(models, TOKENS)
    cache = models.ours.cache()
    hidden = torch.cat([models.ours.extend(part, cache) for part in tokens_T.split(split)])
    assert cache.length == TOKENS
    assert close(hidden, models.ours.hidden(tokens_T, TOKENS), 10 * EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_can_be_truncated(kind: str) -> None:
    """Dropping any number of tokens from a cache leaves no trace."""
    models = pair(kind)
    tokens_T, others_T = tokens_of(models, TOKENS, 0), tokens_of(models, 200, 1)
    cache = models.ours.cache()
    models.ours.extend(tokens_T[:5], cache)
    for part in others_T.split(40):
        models.ours.extend(part, cache)
    cache.length = 5
    hidden = models.ours.extend(tokens_T[5:], cache)
    assert close(hidden, models.ours.hidden(tokens_T, TOKENS)[5:], 10 * EXACT)
    cache.length = 0
    assert close(models.ours.extend(tokens_T, cache), models.ours.hidden(tokens_T, TOKENS), 10 * EXACT)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", DRAFTING)
def test_drafts_equal_the_reference(kind: str, split: list[int]) -> None:
    models = pair(kind)
    tokens_Z = tokens_of(models, TOKENS + 1)
    with torch.no_grad():
        output = models.reference(tokens_Z[None, :-1], tokens_Z[None, 1:])
    h_TD, cache = models.ours.hidden(tokens_Z[:-1], TOKENS), models.ours.draft_cache()
    end = 0
    for next_T, h_tD in zip(tokens_Z[1:].split(split), h_TD.split(split), strict=True):
        end += len(next_T)
        expected = output.mtp_logits_BSV[0, end - 1]
        assert close(models.ours.draft(next_T, h_tD, cache), expected, 10 * EXACT)


class Again(CachedForward):
    """An op table without cached attention."""

    def __init__(self, table: CachedForward) -> None:
        super().__init__([], None)
        self._weights = table._weights
        for op in ("gqa_attention", "bounded_attention", "mla_attention", "rotate"):
            forward = Forward.__getattr__(self, op)
            setattr(self, op, partial(self._attention, op, forward))

    def _attention(self, op: str, whole: object, *args: object) -> Tensor:
        return self._run_on_all_tokens(op, whole, args)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", SPLITS, ids=str)
# Entries of DeepSeek-V4's attention are not rows of tokens; attention over chosen keys has a separate form.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("v4", "v32"))])
def test_attention_without_a_cached_form_is_recomputed(kind: str, split: list[int]) -> None:
    models = pair(kind)
    tokens_T = tokens_of(models, TOKENS)
    cache = models.ours.cache()
    cache._tables = {site: Again(table) for site, table in cache._tables.items()}
    hidden = torch.cat([models.ours.extend(part, cache) for part in tokens_T.split(split)])
    assert close(hidden, models.ours.hidden(tokens_T, TOKENS), 10 * EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_per_token_in_a_cache(kind: str) -> None:
    """Numbers of a token in one layer: the latent, the rope key and the key of an indexer, or keys and values of
    all groups. Of compressed attention also what entries are made of, and the entries, of many tokens each."""
    models = pair(kind)
    cache = models.ours.cache()
    models.ours.extend(tokens_of(models, TOKENS), cache)
    models.ours.extend(tokens_of(models, 1), cache)
    rows = cache._tables["L1.attention"]._cached.values()
    attention = models.ours.spec.model.attention_of(1)
    if attention.kind == "mla":
        numbers = attention.kv_rank + attention.head_dim.rope
        numbers += attention.indexer.head_dim if attention.indexer else 0
    elif attention.kind == "compressed":
        numbers = (1 + 2 + 1) * attention.head_dim
    else:
        numbers = 2 * attention.kv_heads * attention.head_dim
    assert sum(kept_rows._rows.shape[1] for kept_rows in rows) == numbers  # type: ignore[union-attr]


def scored(both: Pair, tokens_BZ: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's cross entropy of each target, and whether the target is the likeliest token."""
    logits_BSV = torch.stack([reference_logits(both, row[:-1]) for row in tokens_BZ])
    nats = torch.nn.functional.cross_entropy(logits_BSV.transpose(1, 2), tokens_BZ[:, 1:], reduction="none")
    return nats, logits_BSV.argmax(dim=2) == tokens_BZ[:, 1:]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_the_reference(kind: str) -> None:
    models = pair(kind)
    tokens_BZ = tokens_of(models, 3 * 13).view(3, 13)
    nats, best = scored(models, tokens_BZ)
    our_nats, is_best = models.ours.score(tokens_BZ[:, :-1], tokens_BZ[:, 1:])
    assert close(our_nats, nats, 10 * EXACT) and our_nats.dtype == torch.float64
    assert torch.equal(is_best, best)
    greedy = torch.stack([reference_logits(models, row[:-1]).argmax(1) for row in tokens_BZ])
    assert models.ours.score(tokens_BZ[:, :-1], greedy)[1].all()
    masked = tokens_BZ[:, 1:].masked_fill(torch.arange(12) % 3 == 0, -1)
    assert close(models.ours.score(tokens_BZ[:, :-1], masked)[0], nats.masked_fill(masked < 0, 0), 10 * EXACT)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_are_near(kind: str, dtype: str, tolerance: float) -> None:
    """Whole and with a cache. In BF16 a choice of experts may be another, so the median of a few tokens is compared."""
    models, exact = pair(kind, dtype=dtype), pair(kind)
    tokens_T = tokens_of(models, TOKENS)
    cache = models.ours.cache()
    expected = exact.ours.logits(exact.ours.hidden(tokens_T, TOKENS))
    cached = torch.cat([models.ours.extend(part, cache) for part in tokens_T.split([10, 1, 3, 10])])
    for h_TD in (models.ours.hidden(tokens_T, TOKENS), cached):
        difference_T = (models.ours.logits(h_TD).double() - expected).abs().amax(dim=1) / expected.abs().max()
        assert difference_T.median() < tolerance


@pytest.mark.parametrize(
    ("weights", "said", "threads"), [(SMALL - 1, None, [1]), (SMALL, None, []), (1, "2", [])], ids=str
)
def test_one_thread_computes_a_small_model(
    weights: int, said: str | None, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread, unless the user has set OMP_NUM_THREADS."""
    chosen = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    limit_threads(SimpleNamespace(num_weights=weights))  # type: ignore[arg-type]
    assert chosen == threads
