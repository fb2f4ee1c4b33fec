"""Near duplicates against exact Jaccard similarities, for documents well above and below the threshold."""

from __future__ import annotations

import math
import random
import re
import tracemalloc
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from runtime.data import duplicates
from runtime.data.duplicates import MINIMA, SeenDocuments, digest, signature
from runtime.data.files import DataError

ROOT = Path(__file__).parents[3]


def runs(words: list[str]) -> set[tuple[str, ...]]:
    """The runs of five words in a document."""
    return {tuple(words[first : first + 5]) for first in range(len(words) - 4)}


def jaccard(one: list[str], other: list[str]) -> float:
    return len(runs(one) & runs(other)) / len(runs(one) | runs(other))


def deviation(similarity: float) -> float:
    return math.sqrt(similarity * (1 - similarity) / MINIMA)


def changed(words: list[str], count: int, draw: random.Random) -> list[str]:
    """A document with `count` of its words replaced."""
    replaced = [*words]
    for index in draw.sample(range(len(words)), count):
        replaced[index] = f"w{draw.randrange(10**9)}"
    return replaced


def test_errors_of_estimates_follow_a_binomial() -> None:
    """The share of equal minima minus the exact similarity, over 300 pairs, has mean 0 and the documented deviation."""
    draw, errors = random.Random(1), []
    for _ in range(300):
        words = [f"w{draw.randrange(10**9)}" for _ in range(draw.randint(60, 400))]
        changed_words = changed(words, draw.randint(1, len(words) // 12), draw)
        exact = jaccard(words, changed_words)
        share = float(np.mean(signature(" ".join(words)) == signature(" ".join(changed_words))))
        errors.append((share - exact) / deviation(exact))
    assert abs(np.mean(errors)) < 4 / math.sqrt(300)
    assert 0.85 < np.std(errors) < 1.15
    assert np.abs(errors).max() < 4.5


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.7, 0.8])
def test_brute_force_finds_the_same(similarity: float) -> None:
    """In order, a document is removed if it is similar to a kept one, as a comparison of all pairs finds."""
    draw, seen, near = random.Random(similarity), SeenDocuments(similarity), 0
    documents = list[tuple[list[str], set[tuple[str, ...]]]]()
    for _ in range(160):
        base = (
            draw.choice(documents)[0]
            if documents and draw.random() < 0.8
            else [f"w{draw.randrange(10**9)}" for _ in range(600)]
        )
        words = changed(base, draw.choice([0, 1, 2, 3, 25, 60, 90]), draw)
        word_runs = runs(words)
        exact = max(
            (len(word_runs & earlier_runs) / len(word_runs | earlier_runs) for _, earlier_runs in documents),
            default=0.0,
        )
        if abs(exact - similarity) < 4 * deviation(similarity) + 0.005:
            continue
        # Case, punctuation and whitespace are not part of a word.
        text = draw.choice(["  ", " ", ", ", "\n"]).join(draw.choice([word, word.upper()]) for word in words)
        is_near = seen.add(digest(text), signature(text)) == "near"
        assert is_near == (exact > similarity), exact
        near += is_near
        documents += [] if is_near else [(words, word_runs)]
    assert near > 25 and len(documents) > 25


def test_the_probabilities_of_the_page() -> None:
    """The probability that the index finds a pair whose minima are equal independently of each other."""
    page = (ROOT / "docs/data.md").read_text("utf-8")
    similarities, percents = (
        re.findall(r"[\d.]+", line.partition(name)[2])
        for name in ("similarity to a document that stays", "probability of being left out")
        for line in page.splitlines()
        if name in line
    )
    seen, draw = SeenDocuments(0.8), np.random.default_rng(2)
    bands, rows = seen._index.b, seen._index.r
    assert f"{bands} bands of {rows} values" in page.replace("\n", " ") and bands * rows == MINIMA
    for similarity, percent in zip(similarities, percents, strict=True):
        equal = draw.random((50_000, bands, rows)) < float(similarity)
        detected = equal.all(axis=2).any(axis=1) & (equal.sum(axis=(1, 2)) >= 0.8 * MINIMA)
        share = float(percent) / 100
        assert abs(detected.mean() - share) < 0.0006 + 4 * math.sqrt(share * (1 - share) / 50_000), similarity


def test_a_document_is_compared_with_kept_documents_only() -> None:
    """The second is similar to the first, and the third only to the second."""
    first = [f"w{i}" for i in range(600)]
    second, third = first[20:] + [f"x{i}" for i in range(20)], first[110:] + [f"x{i}" for i in range(110)]
    assert jaccard(first, second) > 0.92 and jaccard(second, third) > 0.7 > jaccard(first, third) + 0.01
    seen = SeenDocuments(0.8)
    texts = [" ".join(words) for words in (first, second, third)]
    assert [seen.add(digest(text), signature(text)) for text in texts] == ["", "near", ""]


def test_equal_documents() -> None:
    seen = SeenDocuments(None)
    assert [seen.add(digest(text), None) for text in ("a b", " a\n\tb ", "a  b", "A b", "ab")] == [
        "",
        "exact",
        "exact",
        "",
        "",
    ]
    for form in ("NFC", "NFD"):
        assert digest(unicodedata.normalize(form, "é 한국어")) == digest("é 한국어")
    assert digest("ﬁ") != digest("fi")


@pytest.mark.parametrize("language", ["中文是漢語的書寫系統和文字", "ประเทศไทยมีภาษาไทย", "これは日本語の文章です"])
def test_scripts_without_blanks(language: str) -> None:
    draw = random.Random(language)
    letters = [chr(ord(draw.choice(language)) ^ draw.randrange(4)) for _ in range(400)]
    text = "".join(letters)
    edited = "".join([*letters[:200], "X", *letters[200:]])
    unlike = "".join(draw.sample(letters, len(letters)))
    seen = SeenDocuments(0.8)
    assert [seen.add(digest(copy), signature(copy)) for copy in (text, edited, unlike)] == ["", "near", ""]


@pytest.mark.parametrize("similarity", [0.999, 1.0])
def test_the_greatest_similarity(similarity: float) -> None:
    """Only documents with the same runs are near duplicates."""
    seen = SeenDocuments(similarity)
    text = " ".join(f"w{i}" for i in range(600))
    edited = text.replace("w7 ", "x ").replace("w300 ", "x ")
    assert (signature(edited) != signature(text)).any()
    assert [seen.add(digest(copy), signature(copy)) for copy in (text, text.upper(), edited)] == ["", "near", ""]


def test_texts_of_few_or_no_words() -> None:
    """A document of fewer than five words is one run; documents without words are never near duplicates."""
    seen = SeenDocuments(0.5)
    texts = ["yes we can", "Yes, we can!", "yes we can not", "…", "!!", "?", "…"]
    assert [seen.add(digest(text), signature(text)) for text in texts] == ["", "near", "", "", "", "", "exact"]


def test_real_text() -> None:
    """The pages of the docs are not duplicates of each other; a page with one more line is a duplicate."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))[:12]]
    words = [[*duplicates.words(text)] for text in texts]
    assert max(jaccard(page, other) for page in words for other in words if page is not other) < 0.3
    seen = SeenDocuments(0.8)
    assert {seen.add(digest(text), signature(text)) for text in texts} == {""}
    assert {seen.add(digest(text), signature(f"One line more.\n{text}")) for text in texts} == {"exact"}
    assert {seen.add(digest(f"{text}!"), signature(f"One line more.\n{text}")) for text in texts} == {"near"}


def test_a_long_document_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of 60,000 runs at once would take 60 MB."""
    text = " ".join(f"{number:x}" for number in range(60_000))
    signature("warm")
    tracemalloc.start()
    try:
        minima = signature(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6
    monkeypatch.setattr(duplicates, "AT_ONCE", 10**6)
    assert (signature(text) == minima).all()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(DataError, match=r'datasketch has to be installed: pip install "dsc-trainer\[data\]"'):
        duplicates.version()
