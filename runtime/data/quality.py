"""The rules of quality of Gopher (arXiv 2112.11446, appendix A.1.1 and table A1) that need no list of words.

A rule that is left out, the one on stop words, is of English. Words are parted by white space, lines of white space
alone count nowhere, and paragraphs are parted by such lines. Shares of characters are of those of all words, or lines,
or paragraphs. What was there before in the document is a repetition: of two equal lines one is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

WORDS = (50, 100_000)
WORD_LENGTH = (3, 10)  # the mean, in characters
MOST = {  # percent of the words, or of the lines
    "hash_signs": 10,
    "ellipses": 10,
    "bullet_lines": 90,
    "ellipsis_lines": 30,
}
LETTERS = 80  # percent of the words that have one, at least
REPEATED = {  # percent: of the lines or paragraphs, and of their characters
    "repeated_lines": 30,
    "repeated_paragraphs": 30,
    "repeated_line_characters": 20,
    "repeated_paragraph_characters": 20,
}
TOP = {2: 20, 3: 18, 4: 16}  # percent of the characters that are in the n-gram that occurs most often
REPEATED_GRAMS = {5: 15, 6: 14, 7: 13, 8: 12, 9: 11, 10: 10}  # percent of those in n-grams that were there before
RULES = (
    "words",
    "word_length",
    *MOST,
    "letters",
    *REPEATED,
    *(f"top_{n}_gram" for n in TOP),
    *(f"repeated_{n}_grams" for n in REPEATED_GRAMS),
)
BULLETS = ("-", "*", "•", "‣", "◦", "▪", "●", "–")
ELLIPSES = ("...", "…")
PARAGRAPHS = re.compile(r"\n\s*\n")
Numbers = npt.NDArray[np.int64]


def fault(text: str) -> str:
    """The first of RULES that a document breaks, "" where it keeps all."""
    words = text.split()
    if not WORDS[0] <= len(words) <= WORDS[1]:
        return "words"
    characters = sum(map(len, words))
    if not WORD_LENGTH[0] * len(words) <= characters <= WORD_LENGTH[1] * len(words):
        return "word_length"
    lines = [line for each in text.splitlines() if (line := each.strip())]
    found = {
        "hash_signs": (text.count("#"), len(words)),
        "ellipses": (sum(map(text.count, ELLIPSES)), len(words)),
        "bullet_lines": (sum(line.startswith(BULLETS) for line in lines), len(lines)),
        "ellipsis_lines": (sum(line.endswith(ELLIPSES) for line in lines), len(lines)),
    }
    for name, (count, of) in found.items():
        if count * 100 > MOST[name] * of:
            return name
    if sum(any(map(str.isalpha, word)) for word in words) * 100 < LETTERS * len(words):
        return "letters"
    paragraphs = [part for each in PARAGRAPHS.split(text) if (part := each.strip())]
    return next(_repetitions(lines, paragraphs), "") or next(_grams(words, characters), "")


def _repetitions(lines: Sequence[str], paragraphs: Sequence[str]) -> Iterator[str]:
    """The rules on lines and paragraphs that are broken."""
    parts = {"line": lines, "paragraph": paragraphs}
    repeated = {kind: _repeated(each) for kind, each in parts.items()}
    for kind, each in parts.items():
        if len(repeated[kind]) * 100 > REPEATED[f"repeated_{kind}s"] * len(each):
            yield f"repeated_{kind}s"
    for kind, each in parts.items():
        name = f"repeated_{kind}_characters"
        if sum(map(len, repeated[kind])) * 100 > REPEATED[name] * sum(map(len, each)):
            yield name


def _repeated(parts: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return [part for part in parts if part in seen or seen.add(part)]  # type: ignore[func-returns-value]


def _grams(words: Sequence[str], characters: int) -> Iterator[str]:
    """The rules on runs of n words that are broken.

    Runs get numbers: a run of n words is that of its first n-1 words and its last word. So equal numbers are equal
    runs, and no hash decides. Where all runs of n words differ, all longer ones do.
    """
    number: dict[str, int] = {}
    words_W = np.fromiter((number.setdefault(word, len(number)) for word in words), np.int64, len(words))
    lengths_W = np.fromiter(map(len, words), np.int64, len(words))
    runs_G = words_W
    for n in range(2, max(REPEATED_GRAMS) + 1):
        if len(runs_G) < 2:
            return
        pairs_G = runs_G[:-1] * len(number) + words_W[n - 1 :]
        kinds_K, first_K, runs_G, counts_K = np.unique(
            pairs_G, return_index=True, return_inverse=True, return_counts=True
        )
        if len(kinds_K) == len(runs_G):
            return
        if n in TOP:
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_W)])
            sizes_K = ends[first_K + n] - ends[first_K]
            often_K = counts_K == counts_K.max()
            best_K = often_K & (sizes_K == sizes_K[often_K].max())
            top = int(np.where(best_K, first_K, len(runs_G)).argmin())  # the first of the longest of the most frequent
            if _inside(runs_G == top, n, lengths_W) * 100 > TOP[n] * characters:
                yield f"top_{n}_gram"
        elif n in REPEATED_GRAMS:
            again_G = first_K[runs_G] != np.arange(len(runs_G))
            if _inside(again_G, n, lengths_W) * 100 > REPEATED_GRAMS[n] * characters:
                yield f"repeated_{n}_grams"


def _inside(begins_G: npt.NDArray[np.bool_], n: int, lengths_W: Numbers) -> int:
    """Characters of the words that are in some of the runs of n words that begin where it says, each counted once."""
    steps = np.zeros(len(lengths_W) + 1, np.int64)
    begins = np.flatnonzero(begins_G)
    np.add.at(steps, begins, 1)
    np.add.at(steps, begins + n, -1)
    return int(lengths_W[np.cumsum(steps)[:-1] > 0].sum())
