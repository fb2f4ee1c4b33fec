"""Answers in completions and their equality, against the texts of the data sets and human judgement."""

from __future__ import annotations

import random
import re
import time
from fractions import Fraction

import pytest

from runtime.data.rewards.scoring import answer_in, has_format, is_right, number_of


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 + 4 = <<3+4=7>>7 apples.\n#### 7", "7"),  # as GSM8K
        ("#### 1\nno, wait\n####\n 2\nDone.", "2"),
        ("The sum is $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),  # as MATH
        ("\\boxed{1} or rather \\boxed {2}", "2"),
        ("\\boxed{a \\{ b \\} c}", "a \\{ b \\} c"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed{4} and \\boxed{5", "4"),
        ("} } \\boxed{6} {", "6"),
        ("<think>\\boxed{1}</think><answer>2</answer>", "1"),
        ("<think>x</think>\n<answer> 42 </answer>", " 42 "),  # as DeepSeek-R1
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer>8 #### 9", "9"),
        ("</answer>5<answer>", "</answer>5<answer>"),
        ("  just this\nand that ", "  just this\nand that "),
        ("", ""),
    ],
)
def test_the_answer_of_a_text(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 1,234", "1234"),
        ("\\boxed{0.50}", ".5"),
        ("\\boxed{1/2}", 0.5),
        ("<answer>$1,000.00</answer>", 1000),
        ("\\boxed{\\$5}", "5."),
        ("1e3", "Natalia sold …\n#### 1000"),  # the row's answer is parsed like a completion
        ("\\boxed{\u22123}", "-3"),
        ("+7", 7),
        ("  New   York. ", "New York"),
        ("\\(x^2\\)", "$x^2$"),
        ("b", ["a", "b"]),
        ("True", True),
    ],
)
def test_right_answers(completion: str, answer: object) -> None:
    assert is_right(completion, answer)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("72 apples", "72"),
        ("1234,567", "1234567"),
        ("0.3333", "1/3"),
        ("1/0", "1/0.0"),
        ("new york", "New York"),
        ("50%", "50"),
        ("", "0"),
        ("3", []),
        ("1e9999", "1e10000"),
        ("\u0663", "3"),  # a digit, but not one of 0 to 9
    ],
)
def test_wrong_answers(completion: str, answer: object) -> None:
    assert not is_right(completion, answer)


def test_numbers_are_exact() -> None:
    source = random.Random(3)
    for _ in range(500):
        value = Fraction(source.randrange(-(10**12), 10**12), 10 ** source.randrange(0, 10))
        integer, billionths = divmod(abs(value) * 10**9, 10**9)
        sign = "-" * (value < 0)
        for text in (f"{sign}{integer}.{int(billionths):09}", f"{sign}{integer:,}.{int(billionths):09}", f"{value}"):
            assert number_of(text) == value, text
    assert number_of("0.1") == Fraction(1, 10) != Fraction(0.1)


@pytest.mark.parametrize(
    ("completion", "has"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("<think>a</think> so <answer>b</answer>", False),
        ("x<think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer>x", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<think>a</think></think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<answer>b</think></answer>", False),
        ("<think>a</think><answer>b", False),
        ("", False),
    ],
)
def test_the_format_of_r1(completion: str, has: bool) -> None:
    assert has_format(completion) == has


def test_the_format_is_the_expression_of_r1_with_each_tag_once() -> None:
    parts = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "x"]
    source = random.Random(1)
    matched = 0
    for _ in range(30_000):
        order = source.sample(parts, 7) if source.random() < 0.2 else source.choices(parts, k=source.randrange(4, 9))
        text = "".join(["<think>", "x", "</think>", *order[:2], "<answer>", "</answer>"] if order[0] == " " else order)
        once = all(text.count(tag) == 1 for tag in parts[:4])
        matches = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", text, re.DOTALL) is not None
        assert has_format(text) == (matches and once)
        matched += matches and once
    assert matched > 100


LONG = ("\\boxed{" * 200_000, "{" * 500_000 + "}" * 500_000, "<answer>" * 200_000, "1," * 500_000)


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_long_texts_are_read_once(text: str) -> None:
    start = time.process_time()
    is_right(text, text + "1")
    has_format(text)
    assert time.process_time() - start < 60, "of the processor: read again for each brace it takes hours"
