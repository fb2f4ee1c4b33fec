"""The quality rules against a second implementation, and at their thresholds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest

from runtime.data.filters import RULES, broken_rule


def broken(text: str) -> Iterator[str]:
    """All rules that a text breaks, in their order, computed with strings and fractions as the paper states them."""
    words, lines = text.split(), [line.strip() for line in text.splitlines() if line.strip()]
    paragraphs, part = list[str](), list[str]()
    for line in [*text.split("\n"), ""]:
        if line.strip():
            part.append(line)
        elif part:
            paragraphs.append("\n".join(part).strip())
            part = []
    if len(words) < 50 or len(words) > 100_000:
        yield "words"
        return
    characters = len("".join(words))
    if not 3 <= Fraction(characters, len(words)) <= 10:
        yield "word_length"
    if Fraction(text.count("#"), len(words)) > Fraction("0.1"):
        yield "hash_signs"
    if Fraction(text.count("...") + text.count("…"), len(words)) > Fraction("0.1"):
        yield "ellipses"
    if Fraction(sum(line[0] in "-*•‣◦▪●–" for line in lines), len(lines)) > Fraction("0.9"):
        yield "bullet_lines"
    if Fraction(sum(line[-3:] == "..." or line[-1] == "…" for line in lines), len(lines)) > Fraction("0.3"):
        yield "ellipsis_lines"
    if Fraction(len([word for word in words if [c for c in word if c.isalpha()]]), len(words)) < Fraction("0.8"):
        yield "letters"
    for share, of_characters in (("0.3", False), ("0.2", True)):
        for kind, parts in (("line", lines), ("paragraph", paragraphs)):
            again = [item for index, item in enumerate(parts) if item in parts[:index]]
            if not of_characters and Fraction(len(again), len(parts)) > Fraction(share):
                yield f"repeated_{kind}s"
            if of_characters and Fraction(len("".join(again)), len("".join(parts))) > Fraction(share):
                yield f"repeated_{kind}_characters"
    for n, share in ((2, "0.20"), (3, "0.18"), (4, "0.16")):
        grams = [tuple(words[first : first + n]) for first in range(len(words) - n + 1)]
        counts = Counter(grams)
        highest = max(counts.values())
        if highest > 1:
            top = max((gram for gram, count in counts.items() if count == highest), key=lambda gram: len("".join(gram)))
            inside = {first + i for first, gram in enumerate(grams) if gram == top for i in range(n)}
            if Fraction(sum(len(words[index]) for index in inside), characters) > Fraction(share):
                yield f"top_{n}_gram"
    for n in range(5, 11):
        grams = [tuple(words[first : first + n]) for first in range(len(words) - n + 1)]
        seen, places = set[tuple[str, ...]](), set[int]()
        for first, gram in enumerate(grams):
            if gram in seen:
                places |= {*range(first, first + n)}
            seen.add(gram)
        if Fraction(sum(len(words[index]) for index in places), characters) > Fraction(20 - n, 100):
            yield f"repeated_{n}_grams"


def document(draw: random.Random) -> str:
    """A text that may break some rule: lines and paragraphs of few or many words, some of them repeated."""
    count = draw.choice([6, 40, 400, 4000])
    words = [
        "".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, draw.choice([4, 9, 14])))) for _ in range(count)
    ]
    words += draw.choice([[], ["#x"], ["7", "12"] * (count // 3), ["so...", "on…"], ["é", "中文字"]])
    begins = draw.choice([[""], ["", "- ", "• "], ["•", "  * "]])
    lines = [
        draw.choice(begins)
        + " ".join(draw.choices(words, k=draw.randint(1, 14)))
        + draw.choice(["", "", "", "...", "…", " "])
        for _ in range(draw.randint(2, 30))
    ]
    if draw.random() < 0.5:
        passage = draw.choices(words, k=draw.randint(5, 12))
        lines += [" ".join(draw.choices(words, k=3) + passage) for _ in range(draw.randint(1, 4))]
    lines += draw.choices(lines, k=draw.choice([0, 0, 1, len(lines) // 3, len(lines)]))
    draw.shuffle(lines)
    return "".join(line + draw.choice(["\n", "\n", "\n\n", "\n \n"]) for line in lines)


def test_a_second_implementation_finds_the_same() -> None:
    draw, counts = random.Random(5), Counter[str]()
    for _ in range(700):
        text = document(draw)
        first = next(broken(text), "")
        assert broken_rule(text) == first, text
        counts[first] += 1
    assert counts.keys() >= {"", "words", "word_length", "hash_signs", "ellipses", "bullet_lines", "ellipsis_lines"}
    assert counts.keys() >= {"letters", "repeated_lines", "repeated_line_characters", "repeated_5_grams"}


def fresh(count: int, size: int = 5, begin: int = 0) -> list[str]:
    """`count` different words of `size` letters."""
    letters = "bcdfghjklmnpqrstvwxz"
    return [
        "".join(letters[(number // 20**digit) % 20] for digit in range(size)) for number in range(begin, begin + count)
    ]


def marked(total: int, count: int, mark: str) -> str:
    """`total` words of six characters, `count` of which have `mark` in their middle."""
    words = fresh(total, 6)
    return " ".join(word[:3] + mark + word[3:] if index < count else word for index, word in enumerate(words))


def some_lines(total: int, count: int, begin: str = "", end: str = "") -> str:
    """`total` lines of twenty words, `count` of which have this begin and end."""
    lines = [" ".join(fresh(20, begin=20 * number)) for number in range(total)]
    return "\n".join(f"{begin}{line}{end}" if index < count else line for index, line in enumerate(lines))


def repeated(count: int, total: int, part: str, other: str, between: str) -> str:
    """`total` parts of two words, of which `count` repeat an earlier one, each after a part that does not."""
    words = iter(fresh(2 * total))
    kinds = [part.format(next(words), next(words)) for _ in range(count)]
    singles = [other.format(next(words), next(words)) for _ in range(total - 2 * count)]
    pairs = [text for pair in zip(kinds, singles, strict=False) for text in pair]
    return between.join([*kinds, *pairs, *kinds[len(singles) :], *singles[len(kinds) :]])


def of_grams(n: int, kinds: int, times: int, total: int) -> str:
    """`total` words with `kinds` different runs of n words, each `times` times, and other words between them."""
    fillers = iter(fresh(total, begin=100_000))
    grams = [fresh(n, begin=n * kind) for kind in range(kinds)] * times
    words = [word for gram in grams for word in (*gram, next(fillers))]
    return " ".join([*words, *(next(fillers) for _ in range(total - len(words)))])


def with_numbers(words: int, numbers: int) -> str:
    return " ".join([*fresh(words), *map(str, range(10_000, 10_000 + numbers))])


SHORT = "\n".join(["alone"] * 4 + [some_lines(6, 0)])  # three of ten lines repeat an earlier one
LONG = ["\n".join(fresh(10, begin=10 * number)) for number in range(6)]
AT_AND_BEYOND = [
    ("words", " ".join(fresh(50)), " ".join(fresh(49))),
    ("words", " ".join(fresh(100_000)), " ".join(fresh(100_001))),
    ("word_length", " ".join(fresh(60, 3)), " ".join([*fresh(60, 3), "ab"])),
    ("word_length", " ".join(fresh(60, 10)), " ".join([*fresh(60, 10), "elevenchars"])),
    ("hash_signs", marked(100, 10, "#"), marked(100, 11, "#")),
    ("ellipses", marked(100, 10, "..."), marked(100, 11, "...")),
    ("ellipses", marked(100, 10, "…"), marked(100, 11, "…")),
    *(("bullet_lines", some_lines(10, 9, begin=mark), some_lines(10, 10, begin=mark)) for mark in "-*•‣◦▪●–"),
    ("ellipsis_lines", some_lines(10, 3, end="..."), some_lines(10, 4, end="...")),
    ("ellipsis_lines", some_lines(10, 3, end=" …"), some_lines(10, 4, end=" …")),
    (
        "letters",
        " ".join([*fresh(80), *map(str, range(10_000, 10_020))]),
        " ".join([*fresh(79), *map(str, range(10_000, 10_021))]),
    ),
    ("repeated_lines", SHORT, "alone\n" + SHORT),
    ("repeated_paragraphs", "\n\n".join(["alone"] * 4 + LONG), "\n\n".join(["alone"] * 5 + LONG)),
    ("repeated_line_characters", repeated(20, 100, "{}{}", "{}{}", "\n"), repeated(21, 100, "{}{}", "{}{}", "\n")),
    (
        "repeated_paragraph_characters",
        repeated(20, 100, "{}\n{}", "{} {}", "\n \n"),
        repeated(21, 100, "{}\n{}", "{} {}", "\n \n"),
    ),
    ("top_2_gram", of_grams(2, 1, 10, 100), of_grams(2, 1, 11, 100)),
    ("top_3_gram", of_grams(3, 1, 6, 100), of_grams(3, 1, 7, 100)),
    ("top_4_gram", of_grams(4, 1, 4, 100), of_grams(4, 1, 5, 100)),
    *((f"repeated_{n}_grams", of_grams(n, 20 - n, 2, 100 * n), of_grams(n, 21 - n, 2, 100 * n)) for n in range(5, 11)),
]


@pytest.mark.parametrize(
    ("rule", "at", "beyond"), AT_AND_BEYOND, ids=[f"{rule}{n}" for n, (rule, *_) in enumerate(AT_AND_BEYOND)]
)
def test_a_rule_holds_at_its_threshold_and_breaks_beyond(rule: str, at: str, beyond: str) -> None:
    assert (broken_rule(at), broken_rule(beyond)) == ("", rule)


def test_every_rule_has_its_texts() -> None:
    assert {rule for rule, *_ in AT_AND_BEYOND} == {*RULES}


def test_texts_without_words_or_lines() -> None:
    assert {broken_rule(text) for text in ("", " \n \n", "\n", "…", "#")} == {"words"}
