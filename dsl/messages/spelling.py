"""Find the known word that a misspelt word was meant to be: the nearest one.

The distance is the number of edits: letters inserted, left out or changed, or two neighbours swapped. An abbreviation
of a word (`warm`, `seq`) is near to it. Words that differ in a digit are different names: `fp16`, `fp64`.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_LETTERS = 64  # of a word to compare: as many as a name may have
MAX_COMPARED = 30_000  # pairs of letters for one word: about 5 ms, reached only with very many known names
ABBREVIATION = 3  # letters of the shortest abbreviation


def nearest_words(word: str, words: Iterable[str]) -> tuple[str, ...]:
    """Return the known words that a word may have been meant to be: one, several that are equally near, or none."""
    if not 0 < len(word) <= MAX_LETTERS:
        return ()
    names = sorted(set(words) - {word})
    distances: dict[str, int] = {}
    compared = 0
    for name in names:
        # edits of a misspelling: fewer than a third of the letters, or up to a third if letters are only moved or
        # missing
        changes = len(word) == len(name) and sorted(word) != sorted(name)
        limit = (max(len(word), len(name)) - changes) // 3
        if len(name) > MAX_LETTERS or abs(len(word) - len(name)) > limit or not _have_same_digits(word, name):
            continue
        compared += len(word) * len(name)
        if compared > MAX_COMPARED:
            break
        count = num_edits(word.lower(), name.lower())
        if count <= limit:
            distances[name] = count
    fewest_edits = min(distances.values(), default=0)
    completions = [name for name in names if len(word) >= ABBREVIATION and name.startswith(word)]
    return tuple(name for name, count in distances.items() if count == fewest_edits) or tuple(completions)


def num_edits(word: str, name: str) -> int:
    """The number of letters to insert, leave out, change or swap with their neighbour to turn one word into the
    other."""
    row_before_last: list[int] = []
    last_row = list(range(len(name) + 1))
    for row, letter in enumerate(word, 1):
        new_row = [row]
        for column, name_letter in enumerate(name, 1):
            count = min(last_row[column] + 1, new_row[column - 1] + 1, last_row[column - 1] + (letter != name_letter))
            if row > 1 and column > 1 and letter == name[column - 2] and word[row - 2] == name_letter:
                count = min(count, row_before_last[column - 2] + 1)
            new_row.append(count)
        row_before_last, last_row = last_row, new_row
    return last_row[-1]


def _have_same_digits(word: str, name: str) -> bool:
    """Whether two words have the same digits, or one of them has none."""
    word_digits, name_digits = (sorted(letter for letter in text if letter.isdigit()) for text in (word, name))
    return not word_digits or not name_digits or word_digits == name_digits
