"""Units and their exact values: `80GB` is 80·10⁹ bytes, `79.1GiB` 79.1·2³⁰ bytes, `469B` 469·10⁹.

Values are fractions, so that no decimal is rounded before it reaches its field: `14.8T` tokens are 14,800,000,000,000.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# A dimension is a product of powers, sorted by name: byte/s is (("byte", 1), ("s", -1)).
Dimension = tuple[tuple[str, int], ...]

PLAIN: Dimension = ()
DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
COUNTS: dict[str, int | Fraction] = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "%": Fraction(1, 100)}
TIMES = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
# Units that are words of the language: they may follow a number after a space.
WORDS = {"tokens": "token", "token": "token", "steps": "step", "step": "step", "bytes": "byte", "byte": "byte"}
BIT_IN_BYTES = Fraction(1, 8)

NUMBER = re.compile(r"(?P<mantissa>[0-9][0-9_]*(?:\.[0-9][0-9_]*)?(?:[eE][+-]?[0-9]+)?)(?P<suffix>.*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its dimension, in bytes, bits, seconds, flop, tokens, steps and USD."""

    value: Fraction
    dimension: Dimension = PLAIN


def split(text: str) -> tuple[Fraction, str]:
    """Split a number from its suffix: `79.1GiB` → (79.1, "GiB")."""
    match = NUMBER.fullmatch(text)
    assert match is not None, text
    return Fraction(match["mantissa"].replace("_", "")), match["suffix"]


def quantity(text: str) -> Quantity | None:
    """The quantity of a number with its suffix; None if there is no such unit."""
    number, suffix = split(text)
    scale = unit(suffix)
    return None if scale is None else Quantity(number * scale.value, scale.dimension)


def unit(suffix: str) -> Quantity | None:
    """The quantity of one unit: `unit("GB/s")` is 10⁹ byte/s. None if there is no such unit."""
    if suffix in COUNTS:
        return Quantity(Fraction(COUNTS[suffix]))
    numerator, slash, denominator = suffix.partition("/")
    top = _prefixed_unit(numerator)
    if top is None or (slash and denominator not in TIMES):
        return None
    if not slash:
        return top
    rate = Quantity(top.value / TIMES[denominator], combine(top.dimension, (("s", 1),), -1))
    if rate.dimension == (("bit", 1), ("s", -1)):  # networks are specified in bits; rates are stored in bytes
        return Quantity(rate.value * BIT_IN_BYTES, (("byte", 1), ("s", -1)))
    return rate


def _prefixed_unit(name: str) -> Quantity | None:
    if name in WORDS:
        return Quantity(Fraction(1), ((WORDS[name], 1),))
    if name in TIMES:
        return Quantity(TIMES[name], (("s", 1),))
    if name == "USD":
        return Quantity(Fraction(1), (("USD", 1),))
    families: tuple[tuple[str, Dimension, bool], ...] = (
        ("FLOPS", (("flop", 1), ("s", -1)), False),
        ("FLOP", (("flop", 1),), False),
        ("flop", (("flop", 1),), False),
        ("bit", (("bit", 1),), True),
        ("B", (("byte", 1),), True),
        ("b", (("bit", 1),), True),
    )
    for ending, dimension, binary in families:
        prefix = name.removesuffix(ending)
        if prefix == name:
            continue
        if prefix in DECIMAL and (prefix or len(ending) > 1):
            return Quantity(Fraction(DECIMAL[prefix]), dimension)
        if binary and prefix in BINARY:
            return Quantity(Fraction(BINARY[prefix]), dimension)
    return None


def combine(left: Dimension, right: Dimension, sign: int = 1) -> Dimension:
    """The dimension of a product (sign 1) or a quotient (sign −1)."""
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + sign * power
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def dimension_words(dimension: Dimension) -> str:
    """A dimension in words, for messages."""
    words = {"byte": "bytes", "bit": "bits", "s": "seconds", "token": "tokens", "step": "steps"}
    if dimension == PLAIN:
        return "a plain number"
    if dimension == (("flop", 1), ("s", -1)):
        return "FLOPS"
    numerator = "·".join(words.get(n, n) + (f"^{p}" if p > 1 else "") for n, p in dimension if p > 0)
    denominator = "·".join(n + (f"^{-p}" if p < -1 else "") for n, p in dimension if p < 0)
    return f"{numerator or '1'}/{denominator}" if denominator else numerator


# ---------------------------------------------------------------- printing

SUFFIXES = {
    "token": (("T tokens", 10**12), ("B tokens", 10**9), ("M tokens", 10**6), (" tokens", 1)),
    "step": ((" steps", 1),),
    "byte": (
        ("TiB", 2**40),
        ("TB", 10**12),
        ("GiB", 2**30),
        ("GB", 10**9),
        ("MiB", 2**20),
        ("MB", 10**6),
        ("bytes", 1),
    ),
    "byte/s": (("TB/s", 10**12), ("GB/s", 10**9), ("MB/s", 10**6), ("bytes/s", 1)),
    "flop/s": (("PFLOPS", 10**15), ("TFLOPS", 10**12), ("GFLOPS", 10**9), ("FLOPS", 1)),
    "USD/h": (("USD/h", 1),),
    "s": (("h", 3600), ("min", 60), ("s", 1)),
}


def bound_text(limit: int | float, name: str) -> str:
    """A limit in unit `name`, as it may be written: `1 byte`, `0bytes/s`."""
    if limit in (0, 1):
        return f"{limit:g} byte" if name == "byte" else f"{limit:g}{SUFFIXES[name][-1][0]}"
    return unit_text(limit, name)


def exact_text(value: Fraction) -> str:
    """A number as written in a spec: `9`, `8.5`, or `25 / 3` if there is no exact decimal."""
    denominator = value.denominator
    for factor in (2, 5):
        while denominator % factor == 0:
            denominator //= factor
    return decimal_text(value) if denominator == 1 else f"{value.numerator} / {value.denominator}"


def decimal_text(value: Fraction) -> str:
    """An exact decimal, without exponent; the value must have one."""
    digits = 0
    while (value * 10**digits).denominator != 1:
        digits += 1
        assert digits < 400, f"{value} has no short decimal"
    text = str(int(value * 10**digits)).rjust(digits + 1, "0")
    return f"{text[:-digits]}.{text[-digits:]}" if digits else text


def unit_text(value: int | float, name: str) -> str:
    """The shortest text of a value in unit `name` that reads back as the same value.

    Bytes are whole numbers: `79.1GiB` is read as 84,932,977,459 bytes, so it is a valid text for them.
    """
    exact = Fraction(value)
    candidates = []
    for suffix, scale in SUFFIXES[name]:
        for digits in (0, 1, 2, 3):
            number = Fraction(round(exact / scale * 10**digits), 10**digits)
            if isinstance(value, int):
                reads_back = number * scale == value if name != "byte" else int(number * scale) == value
            else:
                reads_back = float(number * scale) == value
            if reads_back and number:
                candidates.append((len(decimal_text(number) + suffix), number < 1, decimal_text(number) + suffix))
                break
    assert candidates or isinstance(value, float), f"{value} {name}"
    return min(candidates)[2] if candidates else repr(value) + SUFFIXES[name][-1][0]
