"""Numbers of costs: exact, and bounded before anything is made of them, for 1e999999999 would be one of a gigabyte."""

from __future__ import annotations

import re
from fractions import Fraction

_ANY = re.compile(r"(\d+)(?:\.(\d+))?(?:[eE]([+-]?)(\d+))?|\d+/0*[1-9]\d*", re.ASCII)
_NUMBER = re.compile(r"\d{1,20}(\.\d{1,20})?([eE][+-]?[0-3]?\d)?|\d{1,20}/0*[1-9]\d{0,19}", re.ASCII)
LEAST, MOST = Fraction(1, 10**20), Fraction(10**15)  # of a time that is not 0: in ns, ten days
TOO_LARGE, TOO_SMALL = "is too large: at most 1e15", "is too small: at least 1e-20, or 0"


def exact(text: str, name: str = "") -> Fraction:
    """The number that a text is; ValueError says what is wrong with it, and of what it is."""
    if wrong := _fault(text):
        raise ValueError(f"{f'{name[:40]}: ' if name else ''}{text[:40]!r} {wrong}")
    return Fraction(text)


def _fault(text: str) -> str:
    """What is wrong with a number, if anything is."""
    match = _ANY.fullmatch(text)
    if match is None:
        return "is not a number of 0 or more, as 1.8 or 9/5"
    if not _NUMBER.fullmatch(text):
        whole, decimals, sign, exponent = match.groups(default="")
        if not whole:
            return "has too many digits: at most 20 on each side"
        if len(decimals) > 20:
            return "has too many decimals: at most 20"
        return TOO_SMALL if exponent and sign == "-" and len(whole) <= 20 else TOO_LARGE
    value = Fraction(text)
    if value > MOST:
        return TOO_LARGE
    return TOO_SMALL if 0 < value < LEAST else ""
