"""A picture as one self-contained HTML page, with a canvas to zoom, pan and inspect. The page loads nothing and runs
only its own script, whose hash is in its content security policy.

The page holds the steps in the notation of schedules, and their times as indices into a table of distinct times: about
20 bytes per step. The script draws only what is visible, so 64 ranks with 512 micro-batches scroll smoothly.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from markupsafe import Markup

from compiler.tools.picture import labels, palette
from compiler.tools.picture.drawing import BoxRow, Panel, Picture
from compiler.tools.picture.geometry import Style, layout
from compiler.tools.picture.palette import KINDS
from compiler.tools.picture.sheet import legend_entries, summary_of
from compiler.tools.picture.template import FOLDER, environment

STYLE = Style(memory=16.0, lane=6.0, gap=9.0)
SCRIPTS = ("viewer.js", "viewer_input.js")


def html(picture: Picture) -> str:
    """Return the page. Pure: equal values give equal bytes, and every text is escaped."""
    script = "\n".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        environment()
        .get_template("viewer.html.j2")
        .render(
            picture=picture,
            notes=(*([picture.facts] if picture.facts else []), *picture.notes, f"time in {picture.unit}"),
            legend=legend_entries(picture, lambda panel: panel.num_exchanges > 0),
            summary=summary_of(picture),
            ranks=[_numbers(picture, panel, row) for panel in picture.panels for row in panel.rows],
            style=Markup(palette.css() + (FOLDER / "viewer.css").read_text("utf-8")),
            script=Markup(script),
            hash=f"sha256-{digest}",
            data=Markup(_json(data_of(picture))),
        )
    )


def data_of(picture: Picture) -> dict[str, Any]:
    """Return the data of the script. Rows are placed by `geometry.layout`; lengths `t` and gaps `g` index `times`."""
    times: dict[float, int] = {}
    top, panels = 0.0, []
    for panel in picture.panels:
        head = 26.0 if len(picture.panels) > 1 else 0.0
        lines, height = layout(panel, STYLE)
        rows = []
        for row, line in zip(panel.rows, lines, strict=True):
            place = {"y": top + head + line.y, "height": line.height, "lane": top + head + line.lane_y}
            place |= {"floor": top + head + line.floor}
            rows.append(
                {"rank": row.rank, "track": row.track, "end": panel.end_of(row.track), **place, **_steps(row, times)}
            )
        panels.append(
            {
                "name": panel.name if head else "",
                "y": top + head,
                "bottom": top + head + height,
                "makespan": panel.makespan,
                "directions": panel.directions,
                "latency": max((m.arrived - m.sent for m in panel.messages), default=0.0),
                "rows": rows,
            }
        )
        top += head + height + 22.0
    return {
        "unit": picture.unit,
        "height": top,
        "memory": STYLE.memory,
        "makespan": picture.makespan,
        "kinds": KINDS,
        "times": list(times),
        "panels": panels,
    }


def _steps(row: BoxRow, times: dict[float, int]) -> dict[str, Any]:
    """Return steps as text, their tints as digits, the gaps before them, their lengths and notes, and the lane."""
    last, gaps, lengths = 0.0, [], []
    for cell in row.cells:
        gap, length = float(f"{cell.start - last:.7g}"), float(f"{cell.end - cell.start:.7g}")
        gaps.append(times.setdefault(gap if gap > 1e-9 * cell.end else 0.0, len(times)))
        lengths.append(times.setdefault(length, len(times)))
        last = cell.end
    fields: dict[str, Any] = {
        "steps": " ".join(cell.label for cell in row.cells),
        "d": "".join(str(drawn.direction) for cell in row.cells for drawn in cell.actions),
        "g": gaps,
        "t": lengths,
        "one": row.activation,
    }
    if row.keeps != 1:
        fields["keeps"] = float(row.keeps)
    if any(cell.note for cell in row.cells):
        fields["notes"] = [cell.note for cell in row.cells]
    if any(cell.error is not None for cell in row.cells):
        fields["errors"] = [None if cell.error is None else round(cell.error, 4) for cell in row.cells]
    if row.copies:
        fields["copies"] = [[c.label, int(c.is_return), c.start, c.end, c.before, c.time] for c in row.copies]
    if row.lanes:
        fields["x"] = {
            body: [[e.label, e.slot, round(e.start, 5), round(e.end, 5)] for e in shares] for body, shares in row.lanes
        }
    return fields


def _numbers(picture: Picture, panel: Panel, row: BoxRow) -> tuple[str, tuple[str, ...]]:
    prefix = f"{panel.name}, " if len(picture.panels) > 1 else ""
    name = f"{prefix}rank {row.rank}{f' {row.track}' if row.track else ''}"
    start, end = (row.cells[0].start, row.cells[-1].end) if row.cells else (0.0, 0.0)
    idle = f"{panel.idle_of(row):.1%}"
    return name, (idle, labels.number(start), labels.number(end), labels.number(row.peak) if row.live else "")


def _json(value: Any) -> str:
    """Return JSON in which no HTML parser can find the end of the element."""
    text = json.dumps(_clean_values(value), ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _clean_values(value: Any) -> Any:
    if isinstance(value, str):
        return labels.clean(value)
    if isinstance(value, dict):
        return {key: _clean_values(item) for key, item in value.items()}
    return [_clean_values(item) for item in value] if isinstance(value, list | tuple) else value
