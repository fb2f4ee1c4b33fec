"""Numbers for reading, and axes that are round."""

from __future__ import annotations

import io
import unicodedata
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from compiler.tools.picture import labels
from compiler.tools.picture.drawing import Screen
from compiler.tools.picture.formats import screen_of

FINITE = st.floats(-1e12, 1e12)


@given(FINITE, FINITE, st.integers(2, 12))
def test_ticks_are_round_few_and_inside(low: float, high: float, most: int) -> None:
    assume(high - low > 1e-6 * max(abs(low), abs(high), 1e-3))
    ticks, step = labels.ticks(low, high, most)
    assert 1 <= len(ticks) <= most or step > high - low  # an interval may hold no multiple of so coarse a step
    slack = 1e-6 * step
    assert all(low - slack <= value <= high + slack for value in ticks)
    assert f"{step:e}"[0] in "125" and float(f"{step:.0e}") == pytest.approx(step)
    missing = [ticks[0] - step, ticks[-1] + step] if ticks else []
    assert all(value < low or value > high for value in missing)


@given(FINITE, FINITE, st.integers(2, 12))
def test_labels_of_ticks_are_distinct(low: float, high: float, most: int) -> None:
    assume(high - low > 1e-3 * max(abs(low), abs(high), 1e-3))
    ticks, step = labels.ticks(low, high, most)
    assert len({labels.tick(value, step) for value in ticks}) == len(ticks)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (9_999, "9,999"), (10_000, "10.0K"), (8_234_112, "8.23M"), (671 * 10**9, "671B"), (14.8e12, "14.8T")],
)
def test_counts(value: int, shown: str) -> None:
    assert labels.count(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (43_200_000, "41.2 MiB"), (2**37, "128 GiB")]
)
def test_bytes(value: int, shown: str) -> None:
    assert labels.num_bytes(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (3.14159, "3.142"), (12345.6, "12,346"), (2.2e-5, "2.2e-5"), (1.5e9, "1.5e9"), (-2.5, "-2.5")],
)
def test_numbers(value: float, shown: str) -> None:
    assert labels.number(value) == shown


@pytest.mark.parametrize(
    ("value", "step", "shown"),
    [
        (0, 5e-4, "0"),
        (5e-4, 5e-4, "5e-4"),
        (1e-3, 5e-4, "1e-3"),
        (1.5, 0.5, "1.5"),
        (2000, 1000, "2,000"),
        (0.30000000000000004, 0.1, "0.3"),
    ],
)
def test_tick_labels(value: float, step: float, shown: str) -> None:
    assert labels.tick(value, step) == shown


@given(st.text(st.characters()))
def test_cleaned_text_is_valid_xml_and_keeps_harmless_characters(raw: str) -> None:
    cleaned = labels.clean(raw)
    assert len(cleaned) == len(raw)
    escaped = cleaned.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    ElementTree.fromstring(f"<a>{escaped}</a>".encode())
    assert all(a == b or unicodedata.category(a) in ("Cc", "Cs", "Cf", "Cn") for a, b in zip(raw, cleaned, strict=True))


def test_text_cannot_be_reordered() -> None:
    assert labels.clean("safe\u202egnp.exe\x1b[2J") == "safe\ufffdgnp.exe\ufffd[2J"


class Stream(io.StringIO):
    def __init__(self, encoding: str, is_terminal: bool) -> None:
        super().__init__()
        self.of, self.is_terminal = encoding, is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.of

    def isatty(self) -> bool:
        return self.is_terminal


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert screen_of(Stream("utf-8", False)) == Screen(100)
    assert screen_of(Stream("ascii", False)) == Screen(100, ascii=True)
    monkeypatch.setenv("COLUMNS", "72")
    assert screen_of(Stream("utf-8", False)) == Screen(72)
    assert screen_of(Stream("UTF-8", True)) == Screen(72, colours=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert screen_of(Stream("utf-8", True)) == Screen(72)
    monkeypatch.setenv("NO_COLOR", "")
    assert screen_of(Stream("utf-8", True)).colours
    monkeypatch.setenv("TERM", "dumb")
    assert not screen_of(Stream("utf-8", True)).colours
