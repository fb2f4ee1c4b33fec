"""The kernels of a build, from its kernels.json: what was fused into one, what each file does, what has none; and the
optimizer's, which is in no segment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from compiler.picture.console import console_of, printed
from compiler.picture.palette import DARK
from compiler.picture.values import Screen

VERSION = 1
FILE = "kernels.json"
NARROWEST, WIDEST = 72, 160


def read(build: Path) -> dict[str, Any]:
    """What a build says of its kernels, a row for each fused op, file and plain op. Calls and bytes are those of one
    micro-batch through the whole model, of its forward and backward; the optimizer's elements and bytes are those of a
    step, on the pipeline rank that updates most. Raises OSError, ValueError and KeyError."""
    told = json.loads((build / FILE).read_text("utf-8"))
    fused: dict[tuple[str, str], dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    plain: dict[str, int] = {}
    for segment in told["segments"]:
        uses, kind = int(segment["uses"]), str(segment["kind"])
        for call in segment["ops"]:
            op, file = str(call["op"]), call["kernel"]
            if "of" in call:
                row = fused.setdefault((op, file or ""), _row(op, list(call["of"]), file))
                row["calls"] += uses
                row["bytes_saved"] += uses * int(call["bytes_saved"])
            if file:
                of = files.setdefault(file, {"kernel": str(file), "ops": [], "segments": [], "calls": 0})
                of["calls"] += uses
                for key, value in (("ops", op), ("segments", kind)):
                    of[key] += [value] * (value not in of[key])
            else:
                plain[op] = plain.get(op, 0) + uses
    return {
        "version": VERSION,
        "rows": int(told["rows"]),
        "unfused": list(told["unfused"]),
        "fused": list(fused.values()),
        "kernels": [files[name] for name in sorted(files)],
        "without": [{"op": op, "calls": plain[op]} for op in sorted(plain)],
        "optimizer": {key: told["optimizer"][key] for key in ("op", "kernel", "elements", "bytes")},
    }


def _row(op: str, parts: list[str], file: str | None) -> dict[str, Any]:
    return {"op": op, "of": parts, "kernel": file, "calls": 0, "bytes_saved": 0}


def to_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1) + "\n"


def text(name: str, found: dict[str, Any], screen: Screen | None = None) -> str:
    """For people, with escape codes if the screen has colours."""
    screen = screen or Screen()
    console = console_of(screen, min(max(screen.width, NARROWEST), WIDEST))
    for part in _parts(name, found):
        console.print(part)
    return "\n".join(line.rstrip() for line in printed(console, screen).splitlines()) + "\n"


def _parts(name: str, found: dict[str, Any]) -> Iterator[RenderableType]:
    optimizer = found["optimizer"]
    num_files = len(found["kernels"]) + (optimizer["kernel"] is not None)
    yield Text(f"{name}: {num_files} kernel files", style=Style(bold=True))
    yield Text("calls and bytes are those of one micro-batch, its forward and backward", style=_quiet())
    yield Text()
    if found["fused"]:
        table = _table("fused", "stands for", "kernel", "calls", "saves")
        for row in found["fused"]:
            table.add_row(row["op"], " + ".join(row["of"]), row["kernel"] or "torch", *_numbers(row))
        calls, saved = (sum(row[key] for row in found["fused"]) for key in ("calls", "bytes_saved"))
        table.add_row("all", "", "", *_numbers({"calls": calls, "bytes_saved": saved}), style=Style(bold=True))
        yield table
        yield Text()
    if found["unfused"]:
        yield Text(f"left apart, as the run says: {', '.join(found['unfused'])}")
        yield Text()
    table = _table("kernel", "ops", "in", "calls")
    for row in found["kernels"]:
        table.add_row(row["kernel"], ", ".join(row["ops"]), ", ".join(row["segments"]), f"{row['calls']:,}")
    yield table
    yield Text()
    plain = ", ".join(row["op"] for row in found["without"])
    yield Text(f"by torch: {plain}" if plain else "no op is left to torch")
    yield Text()
    step = f"{optimizer['elements']:,} elements and {optimizer['bytes'] / 1e6:,.1f} MB a step, where it updates most"
    yield Text(f"optimizer: {optimizer['op']} by {optimizer['kernel'] or 'torch'}, {step}")


def _numbers(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['calls']:,}", f"{row['bytes_saved'] / 1e6:,.1f} MB"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style=_quiet())
    for column in columns:
        table.add_column(column, justify="right" if column in ("calls", "saves") else "left", overflow="fold")
    return table


def _quiet() -> Style:
    return Style(color=DARK.quiet)
