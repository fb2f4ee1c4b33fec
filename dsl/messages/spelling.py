"""Which known word a misspelt one was meant to be: the nearest, if no other is as near.

Nearness is the number of edits: letters put in, left out, changed, or two neighbours swapped. An abbreviation of one
word only (`warm`, `seq`) is near to it. What differs in a digit is another name, not another spelling: `fp16`, `fp64`.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_LETTERS = 64  # of a word that is compared: as many as a name may have
MAX_COMPARED = 30_000  # pairs of letters, for one word: some 5 ms, met only where very many names are known
ABBREVIATION = 3  # letters of the shortest one


def nearest(word: str, words: Iterable[str]) -> tuple[str, ...]:
    """The known words that a word may have been meant to be: one, or several that are equally near, or none."""
    if not 0 < len(word) <= MAX_LETTERS:
        return ()
    names = sorted(set(words) - {word})
    far: dict[str, int] = {}
    compared = 0
    for name in names:
        # edits of a misspelling: less than every third letter, or every third where none is another one
        changes = len(word) == len(name) and sorted(word) != sorted(name)
        most = (max(len(word), len(name)) - changes) // 3
        if len(name) > MAX_LETTERS or abs(len(word) - len(name)) > most or not _same_digits(word, name):
            continue
        compared += len(word) * len(name)
        if compared > MAX_COMPARED:
            break
        count = edits(word.lower(), name.lower())
        if count <= most:
            far[name] = count
    least = min(far.values(), default=0)
    begun = [name for name in names if len(word) >= ABBREVIATION and name.startswith(word)]
    return tuple(name for name, count in far.items() if count == least) or tuple(begun)


def edits(one: str, other: str) -> int:
    """Letters to put in, leave out, change or swap with their neighbour, to make one word of the other."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        new = [row]
        for column, its in enumerate(other, 1):
            count = min(last[column] + 1, new[column - 1] + 1, last[column - 1] + (letter != its))
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == its:
                count = min(count, before[column - 2] + 1)
            new.append(count)
        before, last = last, new
    return last[-1]


def _same_digits(word: str, name: str) -> bool:
    """Whether the digits are the same ones, or one of the two has none."""
    mine, its = (sorted(each for each in text if each.isdigit()) for text in (word, name))
    return not mine or not its or mine == its
