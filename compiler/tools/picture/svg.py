"""A picture as one stand-alone SVG file: light and dark by what the reader prefers, titles to hover over, no script."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from markupsafe import Markup

from compiler.tools.picture import palette
from compiler.tools.picture.drawing import Picture
from compiler.tools.picture.geometry import Figure
from compiler.tools.picture.labels import px
from compiler.tools.picture.sheet import sheet_of
from compiler.tools.picture.template import FOLDER, environment

STYLE = """\
text { font-family: "Liberation Sans", "DejaVu Sans", Arial, Helvetica, sans-serif; fill: var(--ink); }
.paper { fill: var(--paper); }
.title { font-weight: 600; } .heading { font-weight: 600; } .quiet { fill: var(--quiet); }
.rule { stroke: var(--rule); }
"""


def svg(picture: Picture) -> str:
    """The file. Pure: equal values give equal bytes, and every text in them is escaped.

    Above `geometry.MANY` actions a panel is drawn in bulk: a path a colour, without numbers and titles.
    """
    return (
        environment()
        .get_template("sheet.svg.j2")
        .render(sheet=sheet_of(picture), style=Markup(STYLE + palette.css() + figure_css()), bulk=bulk)
    )


def figure_css() -> str:
    """The rules of what `figure.svg.j2` draws."""
    return (FOLDER / "figure.css").read_text("utf-8")


def bulk(figure: Figure) -> Iterable[tuple[str, str]]:
    """(css, path) of all boxes of a colour, and of all bubbles: a few bytes a box."""
    areas = [(area.css, area.x, area.y, area.width, area.height) for area in (*figure.bubbles, *figure.lanes)]
    areas += [(box.css, box.x, box.y, box.width, box.height) for box in figure.boxes]
    for css, group in groupby(sorted(areas), key=lambda area: area[0]):
        yield css, "".join(f"M{px(x)} {px(y)}h{px(w)}v{px(h)}h{px(-w)}z" for _, x, y, w, h in group)
