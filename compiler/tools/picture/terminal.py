"""A picture as text as wide as the terminal, with a line per rank, and colours if the terminal has them.

With colours a pair is an upper and a lower half block. Without them a forward is `f`, a backward `b`, its input half
`i`, a weight gradient `w`, each in capitals for direction 1; a pair is `%`, and idle time is a dot.
"""

from __future__ import annotations

import io
import math
import textwrap

from rich.console import Console
from rich.style import Style
from rich.text import Text

from compiler.tools.picture import labels
from compiler.tools.picture.drawing import BoxRow, Panel, Picture, Screen, StepCell, TextTable
from compiler.tools.picture.palette import DARK, KINDS, Theme

# --- A console of rich that prints into a string, with a fixed width and colours, independent of the environment

_ASCII = str.maketrans({
    "█": "#", "▀": "=", "▌": "|", "│": "|", "·": ".", "–": "-", "×": "x", "…": "~", "→": ">",
})  # fmt: skip


def console_of(screen: Screen, width: int) -> Console:
    """Return a console to print on. `text_of_console` returns its text."""
    return Console(
        file=io.StringIO(), width=width, force_terminal=screen.colours, no_color=not screen.colours,
        color_system="truecolor" if screen.colours else None, highlight=False, legacy_windows=False, _environ={},
    )  # fmt: skip


def text_of_console(console: Console, screen: Screen) -> str:
    """Return the printed text, in ASCII if the screen shows only that."""
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.translate(_ASCII) if screen.ascii else text


# --- terminal

NARROWEST, WIDEST = 40, 400
PAIR, IDLE = "%", "·"


def terminal(picture: Picture, screen: Screen | None = None) -> str:
    """Return the text, with escape codes if the screen has colours. Lines fit the screen, with at least 40 columns."""
    screen = screen or Screen()
    width = min(max(screen.width, NARROWEST), WIDEST)
    console = console_of(screen, width)
    for line in _lines(picture, width, screen, DARK):
        line.truncate(width)
        console.print(line, soft_wrap=True, end="\n")
    return text_of_console(console, screen)


def _lines(picture: Picture, width: int, screen: Screen, theme: Theme) -> list[Text]:
    quiet = Style(color=theme.quiet)
    lines = [Text(labels.clean(picture.title), style=Style(bold=True))]
    names = [_name(row) for panel in picture.panels for row in panel.rows]
    name_width = max(map(len, names)) + 1
    columns = width - name_width - 6  # " 100%" of idle time
    scale = _scale(picture, columns)
    for panel in picture.panels:
        lines.append(Text())
        if len(picture.panels) > 1:
            lines.append(Text(labels.clean(panel.name), style=Style(bold=True)))
        for row in panel.rows:
            line = Text(f"{_name(row):<{name_width}}", style=quiet)
            line.append(_draw_row(row, panel, math.ceil(picture.makespan * scale - 1e-9), scale, screen, theme))
            line.append(f" {panel.idle_of(row):4.0%}", style=quiet)
            lines.append(line)
        lines.append(Text(" " * name_width + _axis(picture.makespan, scale), style=quiet))
    lines += [Text(), *_legend(picture, screen, theme).wrap(Console(width=width), width)]
    notes = (f"time in {picture.unit}; idle time at the right", picture.facts, *picture.notes)
    lines += [Text(part, style=quiet) for note in notes for part in textwrap.wrap(labels.clean(note), width)]
    return lines + (_table(picture.table) if picture.table else [])


def _name(row: BoxRow) -> str:
    return f"rank {row.rank}{f' {labels.clean(row.track)}' if row.track else ''}"


def _draw_row(row: BoxRow, panel: Panel, columns: int, scale: float, screen: Screen, theme: Theme) -> Text:
    """Draw a row. Each column shows the step at its middle, and the number of an action if there is room in colours."""
    line, index, end = Text(), 0, panel.end_of(row.track)
    for column in range(columns):
        time = (column + 0.5) / scale
        while index < len(row.cells) and row.cells[index].end <= time:
            index += 1
        if time > end:
            line.append(" ")
        elif index == len(row.cells) or row.cells[index].start > time:
            line.append(IDLE, style=Style(color=theme.hatch) if screen.colours else "")
        else:
            line.append(_sign(row.cells[index], column, scale, screen, theme))
    return line


def _sign(cell: StepCell, column: int, scale: float, screen: Screen, theme: Theme) -> Text:
    first, second = cell.actions[0], cell.actions[-1]
    if not screen.colours:
        letter = first.kind.lower() if not first.direction else first.kind
        return Text(PAIR if first is not second else letter)
    upper, lower = (theme.tints[f"{drawn.kind}{drawn.direction}"] for drawn in (first, second))
    if first is not second:
        return Text("▀", style=Style(color=upper, bgcolor=lower))
    start, end = int(cell.start * scale + 0.5), int(cell.end * scale + 0.5)
    number = str(first.micro_batch)
    inside = column - start - (end - start - len(number)) // 2
    letter = number[inside] if 0 <= inside < len(number) and len(number) < end - start else " "
    return Text(letter, style=Style(color=theme.on[first.direction], bgcolor=upper))


def _scale(picture: Picture, columns: int) -> float:
    """Return the columns per unit of time: the full width, or a bit less if steps then begin at column boundaries."""
    full_scale = columns / picture.makespan
    times = {cell.start for panel in picture.panels for cell in panel.cells}
    if full_scale > columns:  # one unit is wider than the screen
        return full_scale
    for candidate in (
        m / k for k in (1, 2, 3, 4, 5) for m in range(int(full_scale * k), int(full_scale * k * 0.7), -1)
    ):
        if all(abs(time * candidate - round(time * candidate)) < 1e-6 for time in times):
            return candidate
    return full_scale


def _axis(makespan: float, scale: float) -> str:
    columns = int(makespan * scale + 1e-9)
    marks, step = labels.ticks(0, makespan, max(2, columns // 12))
    line = ""
    for mark in marks:
        label = labels.tick(mark, step)
        place = int(mark * scale + 1e-9)
        if place >= len(line) + bool(line) and place + len(label) <= columns:
            line = f"{line:<{place}}{label}"
    return line


def _legend(picture: Picture, screen: Screen, theme: Theme) -> Text:
    cells = [cell for panel in picture.panels for cell in panel.cells]
    present = {(drawn.kind, drawn.direction) for cell in cells for drawn in cell.actions}
    legend = Text()
    for kind, meaning in KINDS.items():
        tints = [i for i in (0, 1) if (kind, i) in present]
        for i in tints:
            style = Style(color=theme.on[i], bgcolor=theme.tints[f"{kind}{i}"]) if screen.colours else ""
            legend.append(f" {kind} " if screen.colours else f"{kind if i else kind.lower()} ", style=style)
        legend.append(
            f" {meaning.partition(',')[0]}  "
            if screen.colours and tints
            else f"{meaning.partition(',')[0]}  "
            if tints
            else ""
        )
    if any(len(cell.actions) > 1 for cell in cells):
        pair = Style(color=theme.tints["F0"], bgcolor=theme.tints["B1"])
        legend.append("▀▀▀" if screen.colours else f"{PAIR} ", style=pair if screen.colours else "")
        legend.append(" pair  " if screen.colours else "pair  ")
    return legend.append(f"{IDLE} idle")


def _table(table: TextTable) -> list[Text]:
    rows = [tuple(map(labels.clean, row)) for row in (table.heads, *table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.heads))]
    lines = [Text()]
    for row in rows:
        first, *rest = zip(row, widths, strict=True)
        words = [f"{first[0]:<{first[1]}}", *(f"{value:>{width}}" for value, width in rest)]
        lines.append(Text("  ".join(words).rstrip(), style=Style(bold=row is rows[0])))
    return lines
