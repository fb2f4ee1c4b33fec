"""Colours that everybody can distinguish, and readable text on them."""

from __future__ import annotations

import itertools
import math

import pytest

from compiler.tools.picture import palette
from compiler.tools.picture.palette import THEMES, Theme

# Linear RGB as seen without cones of a kind: Machado, Oliveira and Fernandes, 2009, severity 1.
VISION = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
Colour = tuple[float, float, float]


def linear(colour: str) -> Colour:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return r, g, b


def oklab(colour: str, vision: str) -> Colour:
    linear_rgb = linear(colour)
    r, g, b = (min(1.0, max(0.0, sum(m * v for m, v in zip(row, linear_rgb, strict=True)))) for row in VISION[vision])
    l, m, s = (
        (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3),
        (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3),
        (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3),
    )
    return (
        0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
        1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
        0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
    )


def contrast(a: str, b: str) -> float:
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (a, b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
@pytest.mark.parametrize("vision", VISION)
def test_tints_are_distinguishable(theme: Theme, vision: str) -> None:
    tints = {name: oklab(colour, vision) for name, colour in theme.tints.items()}
    assert len(tints) == 8
    for a, b in itertools.combinations(tints, 2):
        assert math.dist(tints[a], tints[b]) > 0.07, (a, b)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_series_are_distinguishable_and_have_contrast(theme: Theme) -> None:
    for vision in VISION:
        for a, b in itertools.combinations(theme.series, 2):
            assert math.dist(oklab(a, vision), oklab(b, vision)) > 0.07, (a, b, vision)
    assert all(contrast(colour, theme.paper) >= 3 for colour in theme.series)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_text_can_be_read(theme: Theme) -> None:
    for name, colour in theme.tints.items():
        assert contrast(theme.on[int(name[1])], colour) > 4.5, name
    assert contrast(theme.ink, theme.paper) > 7 and contrast(theme.quiet, theme.paper) > 4.5
    assert all(contrast(colour, theme.idle) > 1.15 for colour in theme.tints.values())  # boxes differ from bubbles


def test_style_sheets_hold_every_colour_of_both_themes() -> None:
    css = palette.css()
    for theme in THEMES.values():
        for name, value in theme.variables().items():
            assert f"--{name}: {value};" in css
    assert all(f".{kind}.d{i} {{" in css for kind in palette.KINDS for i in (0, 1))
