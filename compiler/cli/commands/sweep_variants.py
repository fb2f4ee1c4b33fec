"""The variants of a sweep: every combination of the values in `-s KEY=A,B`, and a folder name for each."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

MAX_VARIANTS = 256  # variants; each is a training run
NAME = 60  # maximum characters of a folder name
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_LISTS = ("train.rate",)  # keys whose values have commas: only `|` separates alternatives


class SweepError(ValueError):
    """The values do not make a sweep. `hint` says what to change."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Variant:
    """One run of a sweep. `name`: of its folder; `overrides`: KEY=VALUE; `varied`: the overrides that vary; `label`:
    the words in which its values differ from those of other variants."""

    name: str
    overrides: tuple[str, ...]
    varied: tuple[str, ...]
    label: str = ""


def variants(settings: Sequence[str]) -> tuple[Variant, ...]:
    """All combinations, the last key varying fastest. Raises SweepError if nothing varies, or if there are too many."""
    keys = [setting.partition("=")[0] for setting in settings]
    choices = [alternatives(setting) for setting in settings]
    for key, values in zip(keys, choices, strict=True):
        if len(set(values)) < len(values):
            raise SweepError(f"{key} has a value twice: {', '.join(map(str, values))}", "leave one of them out")
    if not any(len(values) > 1 for values in choices):
        raise SweepError("nothing varies", "give a key several values: -s train.batch=16,32")
    if (total := math.prod(map(len, choices))) > MAX_VARIANTS:
        raise SweepError(
            f"{total:,} combinations are more than {MAX_VARIANTS}", "leave values out, or sweep key by key"
        )
    combinations = []
    for values in product(*choices):
        pairs = [key if value is None else f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        varied = tuple(pair for pair, options in zip(pairs, choices, strict=True) if len(options) > 1)
        differ = [
            _differing_words(value or key, options) for key, value, options in zip(keys, values, choices, strict=True)
        ]
        label = ", ".join(f"{_last_name(pair)} {words}" for pair, words in zip(pairs, differ, strict=True) if words)
        combinations.append(Variant(_name(varied), tuple(pairs), varied, label))
    return tuple(combinations)


def _last_name(pair: str) -> str:
    """The last part of a key that is not a number: `rate` of train.rate.0=…"""
    return next(word for word in reversed(pair.partition("=")[0].split(".")) if not word.isdigit())


def _differing_words(value: str, choices: Sequence[str | None]) -> str:
    """The words of a value without the common first and last words of all choices of its key."""
    if len(choices) < 2:
        return ""
    words, lists = value.split(), [str(choice).split() for choice in choices]
    limit = min(map(len, lists)) - 1
    first = _num_equal_words(lists, limit)
    last = _num_equal_words([word_list[::-1] for word_list in lists], limit - first)
    return " ".join(words[first : len(words) - last])


def _num_equal_words(lists: Sequence[Sequence[str]], limit: int) -> int:
    """How many of the first `limit` words are the same in all lists."""
    return next((index for index in range(limit) if len({words[index] for words in lists}) > 1), max(0, limit))


def alternatives(setting: str) -> tuple[str | None, ...]:
    """The values in KEY=A,B or KEY=A | B. The separator is `|` if there is one, or if values of this key have commas;
    else a comma. Separators in brackets and quotes do not count. (None,) without a `=`."""
    key, equals, text = setting.partition("=")
    if not equals:
        return (None,)
    bars, commas = _parts(text, "|"), _parts(text, ",")
    return tuple(part.strip() for part in (bars if len(bars) > 1 or key.strip() in _LISTS else commas))


def _parts(text: str, separator: str) -> list[str]:
    parts, open_, quoted = [""], list[str](), False
    for letter in text:
        if letter == separator and not open_ and not quoted:
            parts.append("")
            continue
        parts[-1] += letter
        if letter == '"':
            quoted = not quoted
        elif not quoted and letter in _CLOSING:
            open_.append(_CLOSING[letter])
        elif not quoted and open_ and letter == open_[-1]:
            open_.pop()
    return parts


def _name(varied: Sequence[str]) -> str:
    """A folder name from the varied values, with a digest if it had to be shortened or changed."""
    keys = [pair.partition("=")[0] for pair in varied]
    lasts = [key.rpartition(".")[2] for key in keys]
    short_keys = [
        key if last.isdigit() or lasts.count(last) > 1 else last for key, last in zip(keys, lasts, strict=True)
    ]
    plain = ",".join(f"{key}={pair.partition('=')[2]}" for key, pair in zip(short_keys, varied, strict=True))
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", plain).strip("-.")
    if name == plain and len(name) <= NAME:
        return name
    return f"{name[:NAME].rstrip('-.')}-{hashlib.sha256(','.join(varied).encode()).hexdigest()[:6]}"
