"""A picture as PNG: the sheet that SVG draws, drawn with Pillow at two pixels a pixel, or fewer where it is large."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING

from compiler.tools.picture import labels
from compiler.tools.picture.drawing import Picture
from compiler.tools.picture.geometry import Figure
from compiler.tools.picture.palette import LIGHT, Theme
from compiler.tools.picture.sheet import Sheet, Swatch, Words, sheet_of

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

MOST_PIXELS = 24_000_000  # of the file; a larger sheet is drawn at less than one pixel a pixel
PLAIN = {ord("–"): "-", ord("−"): "-", ord("…"): "..."}  # that font has ASCII and Latin letters
BOLD = 0.25  # pixels that the strokes of a heading are wider: the font that comes with Pillow has one weight


def png(picture: Picture, theme: Theme = LIGHT) -> bytes:
    """The file. Equal values give equal bytes under one version of Pillow."""
    from PIL import Image, ImageDraw  # a tenth of a second that nothing else should wait for

    sheet = sheet_of(picture)
    scale = min(2.0, (MOST_PIXELS / (sheet.width * sheet.height)) ** 0.5)
    image = Image.new("RGB", (round(sheet.width * scale), round(sheet.height * scale)), theme.paper)
    _Pen(ImageDraw.Draw(image), scale, theme).sheet(sheet)
    file = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG")
    return file.getvalue()


class _Pen:
    """Draws in pixels of the sheet."""

    def __init__(self, draw: ImageDraw.ImageDraw, scale: float, theme: Theme) -> None:
        self.draw, self.scale, self.theme = draw, scale, theme
        self.faint = _mixed(theme.accent, theme.paper, 0.2)
        self.line = _mixed(theme.accent, theme.paper, 0.6)

    def sheet(self, sheet: Sheet) -> None:
        for x, y, figure in sheet.figures:
            self.figure(x, y, figure)
        for swatch in sheet.swatches:
            self.swatch(swatch)
        for x1, x2, y in sheet.rules:
            self.stroke(x1, y, x2, y, self.theme.rule)
        for words in sheet.words:
            self.words(words)

    def figure(self, left: float, top: float, figure: Figure) -> None:
        for x, label in figure.ticks:
            self.stroke(left + x, top, left + x, top + figure.axis_y, self.theme.rule)
            anchor = "start" if x == 0 else "middle"
            self.words(Words(left + x, top + figure.axis_y + 15, 11, "quiet", label, anchor))
        for area in (*figure.bubbles, *figure.lanes):
            self.box(left + area.x, top + area.y, area.width, area.height, self.fill(area.css))
        for x1, y1, x2, y2 in figure.hatch:
            self.stroke(left + x1, top + y1, left + x2, top + y2, self.theme.hatch)
        for box in figure.boxes:
            self.box(left + box.x, top + box.y, box.width, box.height, self.fill(box.css))
            if box.label:
                x, y = box.middle
                size = 9.0 if box.height < 16 else 10.5
                self.label(left + x, top + y, size, box.label, self.theme.on[int(box.css[-1])])
        for x, y, css, height in figure.sends if figure.detailed else ():
            corners = [(left + x - 2.6, top + y), (left + x + 2.6, top + y), (left + x, top + y + height)]
            self.polygon(corners, self.fill(f"{css} d1"))
        for curve in figure.curves:
            if curve:
                self.polygon([(left + x, top + y) for x, y in curve], self.faint)
                self.path([(left + x, top + y) for x, y in curve[1:-1]], self.line)

    def swatch(self, swatch: Swatch) -> None:
        x, y = swatch.x, swatch.y
        if swatch.css == "pair":
            self.box(x, y, 14, 6, self.fill("F d0"))
            self.box(x, y + 6, 14, 6, self.fill("B d1"))
        elif swatch.css == "send":
            self.polygon([(x, y + 4), (x + 6, y + 4), (x + 3, y + 9)], self.fill("F d1"))
            self.polygon([(x + 8, y + 9), (x + 14, y + 9), (x + 11, y + 4)], self.fill("B d1"))
        elif swatch.css == "curve":
            self.polygon(
                [(x, y + 12), (x, y + 8), (x + 5, y + 8), (x + 5, y + 3), (x + 14, y + 3), (x + 14, y + 12)], self.faint
            )
        elif swatch.css in ("exchange", "error", "error fast"):
            self.box(x, y + 4, 14, 5, self.fill(swatch.css))
        else:
            self.box(x, y, 14, 12, self.fill(swatch.css))
            if swatch.css == "bubble":
                self.stroke(x, y + 8, x + 8, y, self.theme.hatch)
                self.stroke(x + 3, y + 12, x + 14, y + 1, self.theme.hatch)

    def fill(self, css: str) -> str:
        name, _, direction = css.partition(" d")
        plain = {"bubble": self.theme.idle, "exchange": self.theme.warm if direction == "1" else self.theme.accent}
        plain |= {"error": self.theme.warm, "error fast": self.theme.accent}
        return plain.get(name) or self.theme.tints[name + direction]

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Whole pixels: neighbours share an edge, and no edge is blurred."""
        left, top, right, bottom = (round(v * self.scale) for v in (x, y, x + width, y + height))
        self.draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), fill=colour)

    def stroke(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        self.path([(x1, y1), (x2, y2)], colour)

    def path(self, points: list[tuple[float, float]], colour: str) -> None:
        placed = [(round(x * self.scale), round(y * self.scale)) for x, y in points]
        self.draw.line(placed, fill=colour, width=max(1, round(self.scale)))

    def polygon(self, points: list[tuple[float, float]], colour: str) -> None:
        self.draw.polygon([(x * self.scale, y * self.scale) for x, y in points], fill=colour)

    def words(self, words: Words) -> None:
        colour = self.theme.quiet if words.css == "quiet" else self.theme.ink
        bold = BOLD * self.scale * words.size / 13 if words.css in ("title", "heading") else 0.0
        place = (words.x * self.scale, words.y * self.scale)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[words.anchor]
        font = _font(words.size * self.scale)
        line = labels.clean(words.text).translate(PLAIN)
        self.draw.text(place, line, fill=colour, font=font, anchor=anchor, stroke_width=bold)

    def label(self, x: float, y: float, size: float, words: str, colour: str) -> None:
        """Write words in the middle of a box; digits and capitals are 0.7 of the size high."""
        place = (x * self.scale, (y + size * 0.355) * self.scale)
        self.draw.text(place, words, fill=colour, font=_font(size * self.scale), anchor="ms")


@cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _mixed(colour: str, paper: str, share: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(paper[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)
