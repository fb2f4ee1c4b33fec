"""The kernels of a build, from its kernels.json: fused ops, kernel files, ops without a kernel, and kernels outside
segments, which quantize or update weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from compiler.tools.picture.drawing import Screen
from compiler.tools.picture.labels import num_bytes
from compiler.tools.picture.palette import DARK
from compiler.tools.picture.terminal import console_of, text_of_console
from dsl.messages.diagnostics import SpecError, make_visible
from runtime.build.files import read as read_build
from runtime.contract import GraphCalls, KernelList, PlainCalls
from runtime.system.strict_json import tree

VERSION = 1
FILE = "kernels.json"
MIN_WIDTH = 72  # columns, even on a narrower screen
Cells = tuple[str | list[str], ...]
UNBOUNDED = 100_000  # columns: no wrapping
ON_CPUS = "the build is for CPUs, where C++ or torch run its ops: these kernels run only on a GPU (--device cuda)"


def read(build: Path) -> dict[str, Any]:
    """Read the kernels of a build. Raises BuildError if the build was changed, and ValueError if kernels.json has the
    format of another version of dsc."""
    return rows_of(read_build(build).files[FILE])


def rows_of(data: bytes) -> dict[str, Any]:
    """Parse kernels.json into rows for fused ops, kernel files, and ops without a kernel. Raises ValueError.

    Calls and bytes are those of the forward and backward of one micro-batch through the whole model. The optimizer's
    elements and bytes are those of one step, on the pipeline rank that updates the most elements.
    """
    listed = KernelList.from_json(data)
    fused: dict[tuple[str, str], dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    without: dict[tuple[str, str], int] = {}  # op and reason → calls
    for segment in listed.segments:
        for call in segment.ops:
            if call.of:
                row = fused.setdefault((call.op, call.kernel or ""), _row(call.op, [*call.of], call.kernel))
                row["calls"] += segment.uses
                row["bytes_saved"] += segment.uses * (call.bytes_saved or 0)
            if call.kernel:
                file = files.setdefault(call.kernel, {"kernel": call.kernel, "ops": [], "segments": [], "calls": 0})
                file["calls"] += segment.uses
                for field, value in (("ops", call.op), ("segments", segment.kind)):
                    file[field] += [value] * (value not in file[field])
            else:
                key = call.op, call.reason or ""
                without[key] = without.get(key, 0) + segment.uses
    return {
        "version": VERSION,
        "rows": listed.rows,
        "unfused": list(listed.unfused),
        "fused": list(fused.values()),
        "kernels": [files[name] for name in sorted(files)],
        "without": [{"op": op, "calls": calls, "reason": reason} for (op, reason), calls in sorted(without.items())],
        "quantised": [tree(op) for op in listed.quantised],
        "optimizer": tree(listed.optimizer),
        "rest": tree(listed.rest) if listed.rest else None,
        "graphs": tree(listed.graphs) if listed.graphs else None,
    }


def _row(op: str, parts: list[str], file: str | None) -> dict[str, Any]:
    return {"op": op, "of": parts, "kernel": file, "calls": 0, "bytes_saved": 0}


def to_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=1) + "\n"


def runs_on_cpus(build: Path) -> bool:
    """Whether all devices of a build are CPUs: devices without SMs. False if its spec cannot be read."""
    from dsl.load import load  # imports pydantic

    try:
        return all(device.sms is None for device in load(build / "spec.resolved").cluster.devices)
    except SpecError:
        return False


def text(name: str, report: dict[str, Any], screen: Screen | None = None, on_cpus: bool = False) -> str:
    """The kernels as text, with escape codes if the screen has colours. Lists are wrapped to the screen's width;
    without a screen (a pipe or a file) they stay on one line. `on_cpus`: the build is for CPUs."""
    console = console_of(screen or Screen(), UNBOUNDED)
    for part in _parts(name, report, max(screen.width, MIN_WIDTH) if screen else UNBOUNDED, on_cpus):
        console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in text_of_console(console, screen or Screen()).splitlines()) + "\n"


def _parts(name: str, report: dict[str, Any], width: int, on_cpus: bool) -> Iterator[RenderableType]:
    updates = [row for row in (report["optimizer"], report["rest"]) if row]
    files = {row["kernel"] for row in (*report["kernels"], *report["quantised"], *updates)} - {None}
    yield Text(make_visible(f"{name}: {len(files)} kernel files"), style=Style(bold=True))
    yield Text("calls and bytes are per micro-batch, forward and backward", style=_quiet_style())
    if on_cpus:
        yield Text(_wrap_names(ON_CPUS.split(" "), " ", width), style=_quiet_style())
    yield Text()
    if report["fused"]:
        rows: list[Cells] = [
            (row["op"], row["of"], row["kernel"] or "torch", *_numbers(row)) for row in report["fused"]
        ]
        calls, saved = (sum(row[key] for row in report["fused"]) for key in ("calls", "bytes_saved"))
        total: Cells = ("all", [], "", *_numbers({"calls": calls, "bytes_saved": saved}))
        table = _table(("fused", "stands for", "kernel", "calls", "saves"), [*rows, total], " + ", width)
        table.rows[-1].style = Style(bold=True)
        yield table
        yield Text()
    if report["unfused"]:
        yield Text(f"the spec turns these fusions off: {', '.join(report['unfused'])}")
        yield Text()
    calls_of_files = [(row["kernel"], row["ops"], row["segments"], f"{row['calls']:,}") for row in report["kernels"]]
    yield _table(("kernel", "ops", "in", "calls"), calls_of_files, ", ", width)
    yield Text()
    reasons: dict[str, list[str]] = {}
    for row in report["without"]:
        reasons.setdefault(row["reason"], []).append(row["op"])
    for reason, (first, *rest) in reasons.items():
        yield Text(_wrap_names([f"by torch: {first}", *rest], ", ", width))
        yield Text(_wrap_names(f"  {reason}".split(" "), " ", width), style=_quiet_style())
    if not reasons:
        yield Text("every op has a kernel")
    yield Text()
    for row in report["quantised"]:
        line = f"quantized weights: {row['op']} by {row['kernel'] or 'torch'}, {row['calls']:,} calls per step"
        yield Text(_wrap_names(line.split(" "), " ", width))
    for row in updates:
        step = f"{row['elements']:,} elements and {num_bytes(row['bytes'])} per step"
        line = f"optimizer: {row['op']} by {row['kernel'] or 'torch'}, {step} on the pipeline rank that updates most"
        yield Text(_wrap_names(line.split(" "), " ", width))
    if report["graphs"]:
        others = tuple(PlainCalls(**row) for row in report["graphs"]["others"])
        calls = GraphCalls(report["graphs"]["replayed"], others)
        yield Text(_wrap_names(f"graphs: {calls.sentence}".split(" "), " ", width))


def _numbers(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['calls']:,}", num_bytes(row["bytes_saved"])


def _table(headers: tuple[str, ...], rows: Sequence[Cells], separator: str, width: int) -> Table:
    """A table whose cells are texts or lists of names. Texts are not wrapped. Columns with lists share the remaining
    width equally; `separator` stands between the names of a list."""
    lists = {column for row in rows for column, cell in enumerate(row) if isinstance(cell, list)}
    table = Table(box=None, pad_edge=False, header_style=_quiet_style())
    used_width = 2 * (len(headers) - 1)
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if header in ("calls", "saves") else "left", no_wrap=True)
        used_width += 0 if column in lists else max(len(str(cell)) for cell in (header, *(row[column] for row in rows)))
    list_width = (width - used_width) // max(1, len(lists))
    for row in rows:
        cells = (
            _wrap_names([*map(make_visible, cell)], separator, list_width)
            if isinstance(cell, list)
            else make_visible(cell)
            for cell in row
        )
        table.add_row(*map(Text, cells))
    return table


def _wrap_names(names: Sequence[str], separator: str, width: int) -> str:
    """Join names into lines of at most `width` columns. Lines break only between names."""
    return fill(separator.join(names), max(width, 1), break_long_words=False, break_on_hyphens=False)


def _quiet_style() -> Style:
    return Style(color=DARK.quiet)
