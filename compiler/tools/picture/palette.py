"""The colours of all pictures of schedules, light and dark, distinct in every kind of colour vision.

Forward is blue, backward amber, its input half purple, its weight half green; each has a tint per direction. Any two of
these eight tints are at least 0.07 apart in OKLab, with full, protan, deutan and tritan vision
(tests/compiler/tools/picture measures it). So are the eight colours of series, for curves and parts of bars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "weight gradient, deferred",
}


@dataclass(frozen=True)
class Theme:
    """Colours as #rrggbb. `tints`: by kind and direction, F0 … W1. `on`: text over tints of direction 0 and 1."""

    paper: str
    ink: str
    quiet: str
    rule: str
    accent: str
    warm: str
    idle: str  # a bubble
    hatch: str  # the strokes over a bubble
    on: tuple[str, str]
    tints: Mapping[str, str]
    series: tuple[str, ...]  # curves and parts of bars other than actions

    def variables(self, with_series: bool = False) -> dict[str, str]:
        """Return CSS custom properties. `with_series`: include the colours of series, s0, s1, …"""
        plain = ("paper", "ink", "quiet", "rule", "accent", "warm", "idle", "hatch")
        named = {name: getattr(self, name) for name in plain}
        series = {f"s{index}": colour for index, colour in enumerate(self.series)} if with_series else {}
        return named | {"on0": self.on[0], "on1": self.on[1]} | dict(self.tints) | series


LIGHT = Theme(
    paper="#fffefb",
    ink="#23211d",
    quiet="#6e6961",
    rule="#e3dfd6",
    accent="#35608f",
    warm="#b4541f",
    idle="#f4f1ea",
    hatch="#d8d2c6",
    on=("#23211d", "#ffffff"),
    tints={
        **{"F0": "#c1dffa", "F1": "#4d6d8b", "B0": "#f9d9a6", "B1": "#8f671c"},
        **{"I0": "#e3a4ea", "I1": "#5f387b", "W0": "#afcd78", "W1": "#344c06"},
    },
    series=("#1e5181", "#c76d0a", "#2ea36e", "#ad7bd2", "#6f4a0b", "#197d89", "#a4514f", "#403e3b"),
)
DARK = Theme(
    paper="#16171a",
    ink="#dcd9d2",
    quiet="#98948c",
    rule="#2f3136",
    accent="#7fa9d6",
    warm="#e0915c",
    idle="#1f2124",
    hatch="#3b3d42",
    on=("#16130d", "#f4f1ea"),
    tints={
        **{"F0": "#94c4f5", "F1": "#34628a", "B0": "#e6c894", "B1": "#8f6010"},
        **{"I0": "#d284c0", "I1": "#5e2160", "W0": "#a4b562", "W1": "#3e4a28"},
    },
    series=("#42b2f2", "#ff8542", "#add3a6", "#a468a7", "#fcc935", "#54f7ff", "#d24b53", "#a4a29e"),
)
THEMES = {"light": LIGHT, "dark": DARK}


def css(with_series: bool = False) -> str:
    """Return both themes as custom properties. Dark applies if the reader prefers it, or by the root's `data-theme`."""
    light, dark = (_block(THEMES[name].variables(with_series)) for name in ("light", "dark"))
    return (
        f":root {{ color-scheme: light dark;\n{light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{\n{dark} }} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark;\n{dark} }}\n"
        ":root[data-theme=light] { color-scheme: light }\n"
        + "\n".join(f".{kind}.d{i} {{ --c: var(--{kind}{i}); --on: var(--on{i}) }}" for kind in KINDS for i in (0, 1))
        + "\n"
    )


def _block(variables: Mapping[str, str]) -> str:
    return "  " + " ".join(f"--{name}: {value};" for name, value in variables.items())
