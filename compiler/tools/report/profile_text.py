"""The profile of a run as text for the terminal: the step, its actions and phases, its ops, its communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from compiler.tools.picture.drawing import Screen
from compiler.tools.picture.palette import DARK
from compiler.tools.picture.terminal import console_of, text_of_console
from compiler.tools.report.profile import Document

NARROWEST, WIDEST, SHOWN, BAR = 72, 160, 24, 16
COMMUNICATION = ("copy", "wait", "bubble")

Row = dict[str, Any]


@dataclass(frozen=True)
class RowSums:
    """Sums over rows: calls, milliseconds and FLOPs per step, as a mean of the ranks."""

    calls: float
    clock: float
    processor: float
    flops: float

    def rate(self, device: str) -> float:
        """Return FLOP/s. On a CPU they are per second of processor time, which other load does not lengthen."""
        took_ms = self.clock if device == "cuda" else self.processor
        return self.flops / took_ms * 1e3 if took_ms else 0.0


def text(document: Document, screen: Screen | None = None) -> str:
    """Return the text, with escape codes if the screen has colours."""
    screen = screen or Screen()
    console = console_of(screen, min(max(screen.width, NARROWEST), WIDEST))
    for part in _parts(document):
        console.print(part)
    return "\n".join(line.rstrip() for line in text_of_console(console, screen).splitlines()) + "\n"


def _parts(document: Document) -> Iterator[RenderableType]:
    ranks, steps = document["ranks"], document["steps"]
    rows = [row for rank in ranks for row in rank["rows"]]
    per = steps * len(ranks)
    step_ms = sum(rank["clock_ns"] for rank in ranks) / per / 1e6
    plain = [max(rank["plain"][field] for rank in ranks) / 1e6 for field in ("clock_ns", "processor_ns")]
    ranks_text = f"{len(ranks)} ranks, their mean" if len(ranks) > 1 else "1 rank"
    total, python, profiling = (
        _sum(group, per) for group in (rows, _rows_of_kinds(rows, "python"), _rows_of_kinds(rows, "profile"))
    )
    yield _bold(f"{step_ms:.1f} ms per step, {total.processor:.1f} of the processor", f"{steps} steps, {ranks_text}")
    yield Text(f"without the profile: {plain[0]:.1f} and {plain[1]:.1f}, the better of two steps", style=_quiet_style())
    shares = f"{python.clock / total.clock:.1%} by the clock, {python.processor / total.processor:.1%} of the processor"
    yield Text(f"Python: {shares}; the profile itself: {profiling.clock:.1f} ms", style=_quiet_style())
    yield Text()
    yield _ranks(ranks, steps)
    yield Text()
    yield _bold("actions and phases", "ms per step; shares of the row")
    yield _places(rows, per, step_ms, set(ranks[0]["actions"]).union(*(rank["actions"] for rank in ranks)))
    yield Text()
    timer = "the clock" if document["device"] == "cuda" else "the processor"
    yield _bold(
        "ops", f"ms per step; GFLOP/s by {timer}" + (", and as a share of the machine's" * bool(_gemm(document)))
    )
    yield _ops(_rows_of_kinds(rows, "op"), per, step_ms, document)
    if _rows_of_kinds(rows, *COMMUNICATION):
        yield Text()
        yield _bold("communication", "ms per step; waits are for other ranks")
        yield _communication(rows, per)
    yield Text()
    yield _bold("segments", "ms per step; ops, and the Python between them")
    yield _segments([row for row in rows if row["segment"]], per, step_ms)


def _gemm(document: Document) -> float | None:
    rate: float | None = document["gemm_flops_s"]
    return rate


def _sum(rows: Iterable[Row], per: int) -> RowSums:
    listed = list(rows)

    def total(name: str) -> float:
        return sum(row.get(name, 0) for row in listed) / per

    return RowSums(total("calls"), total("clock_ns") / 1e6, total("processor_ns") / 1e6, total("flops"))


def _kinds(rows: Sequence[Row], per: int, *kinds: str) -> RowSums:
    return _sum(_rows_of_kinds(rows, *kinds), per)


def _rows_of_kinds(rows: Sequence[Row], *kinds: str) -> list[Row]:
    return [row for row in rows if row["kind"] in kinds]


# ---------------------------------------------------------------- tables


def _ranks(ranks: Sequence[Document], steps: int) -> Table:
    table = _table("rank", "step", "processor", "actions", "bubble", "phases", "ops", "copies", "waits", "Python")
    for rank in ranks[:SHOWN]:
        rows, actions = rank["rows"], set(rank["actions"])
        bubble = _kinds(rows, steps, "bubble").clock
        inside = _sum((row for row in rows if row["place"] in actions and row["kind"] != "bubble"), steps).clock
        step = rank["clock_ns"] / steps / 1e6
        parts = [_kinds(rows, steps, kind).clock for kind in ("op", "copy", "wait", "python")]
        listed = [step, rank["processor_ns"] / steps / 1e6, inside, bubble, step - inside - bubble, *parts]
        table.add_row(str(rank["rank"]), *(f"{value:.1f}" for value in listed))
    return _cut(table, len(ranks))


def _places(rows: Sequence[Row], per: int, step_ms: float, actions: set[str]) -> Table:
    table = _table("", "clock", "processor", "of step", "ops", "comm.", "bubble", "Python")
    groups = _group_rows(rows, lambda row: row["place"])
    for place in sorted(groups, key=lambda place: (place not in actions, place == "metrics")):
        group = groups[place]
        total = _sum(group, per)
        shares = [_kinds(group, per, *kinds).clock for kinds in (("op",), ("copy", "wait"), ("bubble",), ("python",))]
        style = Style(bold=True) if place in actions else Style()
        cells = (_share(part, total.clock) for part in shares)
        table.add_row(Text(place, style=style), *_times(total), _bar(total.clock, step_ms), *cells)
    return table


def _ops(rows: Sequence[Row], per: int, step_ms: float, document: Document) -> Table:
    gemm = _gemm(document)
    table = _table("", "calls", "clock", "processor", "of step", "GFLOP/s", *(["of GEMM"] if gemm else []))
    sums = {name: _sum(group, per) for name, group in _group_rows(rows, lambda row: row["name"]).items()}
    for name, total in sorted(sums.items(), key=lambda item: -item[1].clock)[:SHOWN]:
        rate = total.rate(document["device"])
        cells: list[str | Text] = [f"{rate / 1e9:.1f}" if rate else "", *([_share(rate, gemm)] if gemm else [])]
        table.add_row(name, f"{total.calls:g}", *_times(total), _bar(total.clock, step_ms), *cells)
    return _cut(table, len(sums))


def _communication(rows: Sequence[Row], per: int) -> Table:
    table = _table("", "calls", "copies", "waits", "processor")
    for name, group in _group_rows(_rows_of_kinds(rows, *COMMUNICATION), lambda row: row["name"]).items():
        copies, waits = _kinds(group, per, "copy"), _kinds(group, per, "wait", "bubble")
        processor = copies.processor + waits.processor
        table.add_row(name, f"{copies.calls:g}", f"{copies.clock:.2f}", f"{waits.clock:.2f}", f"{processor:.2f}")
    return table


def _segments(rows: Sequence[Row], per: int, step_ms: float) -> Table:
    table = _table("", "calls", "clock", "of step", "ops", "Python")
    groups = _group_rows(rows, lambda row: f"{row['segment']}.{row['function']}")
    ordered = sorted(groups.items(), key=lambda item: -_sum(item[1], per).clock)
    for name, group in ordered[:SHOWN]:
        total, python = _sum(group, per), _kinds(group, per, "python")
        ops = _kinds(group, per, "op").clock
        cells = (f"{ops:.2f}", f"{python.clock:.2f}")
        table.add_row(name, f"{python.calls:g}", f"{total.clock:.2f}", _bar(total.clock, step_ms), *cells)
    return _cut(table, len(ordered))


def _group_rows(rows: Iterable[Row], name: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


# ---------------------------------------------------------------- cells


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=_quiet_style(), pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index and head != "of step" else "left", no_wrap=True)
    return table


def _cut(table: Table, number: int) -> Table:
    if number > SHOWN:
        table.add_row(Text(f"and {number - SHOWN} more: profile.json", style=_quiet_style()))
    return table


def _times(total: RowSums) -> tuple[str, str]:
    return f"{total.clock:.2f}", f"{total.processor:.2f}"


def _share(part: float, total: float) -> Text:
    share = part / total if total else 0.0
    return Text(f"{share:.0%}" if share >= 0.005 else "·", style=_quiet_style() if share < 0.005 else Style())


def _bar(part: float, total: float) -> Text:
    share = part / total if total else 0.0
    return Text(f"{share:>6.1%} ").append("█" * round(BAR * share), style=Style(color=DARK.accent))


def _quiet_style() -> Style:
    return Style(color=DARK.quiet)


def _bold(words: str, note: str = "") -> Text:
    return Text(words, style=Style(bold=True)).append(f"  {note}" if note else "", style=Style(bold=False))
