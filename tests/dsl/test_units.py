"""Units are exact, decimal and binary prefixes differ, and printed values read back."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.facts import units

BYTE, RATE, FLOPS = (("byte", 1),), (("byte", 1), ("s", -1)), (("flop", 1), ("s", -1))


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("129_280", 129_280, ()),
        ("2.2e-4", Fraction(22, 100_000), ()),
        ("0.1%", Fraction(1, 1000), ()),
        ("469B", 469 * 10**9, ()),
        ("14.8T", 14_800_000_000_000, ()),
        ("80GB", 80 * 10**9, BYTE),
        ("79.1GiB", Fraction(791, 10) * 2**30, BYTE),
        ("4KB", 4000, BYTE),
        ("4kB", 4000, BYTE),
        ("4KiB", 4096, BYTE),
        ("512bytes", 512, BYTE),
        ("80Gb", 80 * 10**9, (("bit", 1),)),
        ("80Gbit", 80 * 10**9, (("bit", 1),)),
        ("3.35TB/s", 3_350_000_000_000, RATE),
        ("400Gb/s", 50 * 10**9, RATE),
        ("1GB/ms", 10**12, RATE),
        ("989TFLOPS", 989 * 10**12, FLOPS),
        ("989TFLOP/s", 989 * 10**12, FLOPS),
        ("2USD/h", Fraction(2, 3600), (("USD", 1), ("s", -1))),
        ("5ms", Fraction(5, 1000), (("s", 1),)),
        ("10tokens", 10, (("token", 1),)),
    ],
)
def test_meaning_of_numbers(text: str, value: int | Fraction, dimension: units.Dimension) -> None:
    assert units.quantity(text) == units.Quantity(Fraction(value), dimension)


@pytest.mark.parametrize("text", ["80gb", "1x128", "1f1b", "4B/s", "3TB/nodes", "3/s", "1GBs", "2e", "5k", "1Eib"])
def test_invalid_units(text: str) -> None:
    assert units.quantity(text) is None


def read(text: str, name: str) -> Fraction:
    """A printed value, read back in unit `name`."""
    number, _, word = text.partition(" ")
    quantity, unit = units.quantity(number), units.unit(name)
    assert quantity is not None and unit is not None
    if word:
        assert units.WORDS[word] == name
        return quantity.value
    assert quantity.dimension == unit.dimension
    return quantity.value / unit.value


@given(st.integers(1, 10**16), st.sampled_from(["token", "step", "byte"]))
def test_whole_values_read_back(value: int, name: str) -> None:
    assert int(read(units.unit_text(value, name), name)) == value


@given(st.floats(1e-3, 1e21), st.sampled_from(["byte/s", "flop/s", "USD/h", "s"]))
def test_rates_read_back(value: float, name: str) -> None:
    assert float(read(units.unit_text(value, name), name)) == value


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(["GiB", "GB", "TiB", "MB"]))
def test_bytes_are_printed_as_they_would_be_written(digits: int, places: int, unit: str) -> None:
    text = units.decimal_text(Fraction(digits + 1, 10**places)) + unit
    quantity = units.quantity(text)
    assert quantity is not None
    assert len(units.unit_text(int(quantity.value), "byte")) <= len(text) or int(quantity.value) != quantity.value


@given(st.fractions(0, 10**8, max_denominator=10**6) | st.decimals(0, 10**8, places=6).map(Fraction))
def test_exact_numbers_read_back(value: Fraction) -> None:
    over, _, under = units.exact_text(value).partition(" / ")
    parts = [units.quantity(part) for part in (over, under or "1")]
    assert parts[0] is not None and parts[1] is not None
    assert parts[0].value / parts[1].value == value


def test_shortest_forms() -> None:
    assert [units.exact_text(Fraction(*pair)) for pair in ((9, 1), (17, 2), (25, 3), (1, 40))] == [
        "9", "8.5", "25 / 3", "0.025"
    ]  # fmt: skip
    assert units.unit_text(84_932_977_459, "byte") == "84932977459bytes"
    assert units.unit_text(int(Fraction(791, 10) * 2**30), "byte") == "79.1GiB"
    assert units.unit_text(14_800_000_000_000, "token") == "14.8T tokens"
    assert units.unit_text(200e9, "byte/s") == "200GB/s"
