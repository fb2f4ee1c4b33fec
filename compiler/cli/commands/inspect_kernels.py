"""The kernels of a build, from its kernels.json: what was fused into one, what each file does, what has none; and the
optimizer's, which is in no segment.
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
from compiler.tools.picture.terminal import console_of, printed
from dsl.messages.diagnostics import SpecError, visible
from runtime.build.files import read as read_build
from runtime.contract import KernelList
from runtime.system.strict_json import tree

VERSION = 1
FILE = "kernels.json"
NARROWEST = 72
Cells = tuple[str | list[str], ...]
UNBOUNDED = 100_000  # columns of what is wrapped nowhere
ON_CPUS = "the build is for CPUs, where its ops run by C++ or torch: these kernels run only on a GPU (--device cuda)"


def read(build: Path) -> dict[str, Any]:
    """What a build says of its kernels. Raises BuildError unless it is what was compiled, and ValueError where another
    dsc has compiled it, whose list has another form."""
    return rows_of(read_build(build).files[FILE])


def rows_of(data: bytes) -> dict[str, Any]:
    """A list of kernels, a row for each fused op, file and plain op. Calls and bytes are those of one micro-batch
    through the whole model, of its forward and backward; the optimizer's elements and bytes are those of a step, on the
    pipeline rank that updates most. Raises ValueError."""
    listed = KernelList.from_json(data)
    fused: dict[tuple[str, str], dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    plain: dict[tuple[str, str], int] = {}
    for segment in listed.segments:
        for call in segment.ops:
            if call.of:
                row = fused.setdefault((call.op, call.kernel or ""), _row(call.op, [*call.of], call.kernel))
                row["calls"] += segment.uses
                row["bytes_saved"] += segment.uses * (call.bytes_saved or 0)
            if call.kernel:
                file = files.setdefault(call.kernel, {"kernel": call.kernel, "ops": [], "segments": [], "calls": 0})
                file["calls"] += segment.uses
                for key, value in (("ops", call.op), ("segments", segment.kind)):
                    file[key] += [value] * (value not in file[key])
            else:
                why = call.op, call.reason or ""
                plain[why] = plain.get(why, 0) + segment.uses
    return {
        "version": VERSION,
        "rows": listed.rows,
        "unfused": list(listed.unfused),
        "fused": list(fused.values()),
        "kernels": [files[name] for name in sorted(files)],
        "without": [{"op": op, "calls": plain[op, why], "reason": why} for op, why in sorted(plain)],
        "quantised": [tree(each) for each in listed.quantised],
        "optimizer": tree(listed.optimizer),
        "rest": tree(listed.rest) if listed.rest else None,
    }


def _row(op: str, parts: list[str], file: str | None) -> dict[str, Any]:
    return {"op": op, "of": parts, "kernel": file, "calls": 0, "bytes_saved": 0}


def to_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1) + "\n"


def runs_on_cpus(build: Path) -> bool:
    """Whether the devices that a build is for are CPUs: they have no SMs. Of a spec that cannot be read, no."""
    from dsl.load import load  # with pydantic

    try:
        return all(device.sms is None for device in load(build / "spec.resolved").cluster.devices)
    except SpecError:
        return False


def text(name: str, found: dict[str, Any], screen: Screen | None = None, on_cpus: bool = False) -> str:
    """The kernels as text, with escape codes if the screen has colours. Lists are wrapped to the screen's width, and
    stay on one line where there is none, for a pipe or a file. `on_cpus`: the build is for CPUs."""
    console = console_of(screen or Screen(), UNBOUNDED)
    for part in _parts(name, found, max(screen.width, NARROWEST) if screen else UNBOUNDED, on_cpus):
        console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in printed(console, screen or Screen()).splitlines()) + "\n"


def _parts(name: str, found: dict[str, Any], width: int, on_cpus: bool) -> Iterator[RenderableType]:
    updates = [row for row in (found["optimizer"], found["rest"]) if row]
    others = {row["kernel"] for row in (*found["quantised"], *updates)} - {row["kernel"] for row in found["kernels"]}
    num_files = len(found["kernels"]) + len(others - {None})
    yield Text(visible(f"{name}: {num_files} kernel files"), style=Style(bold=True))
    yield Text("calls and bytes are those of one micro-batch, its forward and backward", style=_quiet())
    if on_cpus:
        yield Text(_wrapped(ON_CPUS.split(" "), " ", width), style=_quiet())
    yield Text()
    if found["fused"]:
        rows: list[Cells] = [(row["op"], row["of"], row["kernel"] or "torch", *_numbers(row)) for row in found["fused"]]
        calls, saved = (sum(row[key] for row in found["fused"]) for key in ("calls", "bytes_saved"))
        total: Cells = ("all", [], "", *_numbers({"calls": calls, "bytes_saved": saved}))
        table = _table(("fused", "stands for", "kernel", "calls", "saves"), [*rows, total], " + ", width)
        table.rows[-1].style = Style(bold=True)
        yield table
        yield Text()
    if found["unfused"]:
        yield Text(f"left apart, as the run says: {', '.join(found['unfused'])}")
        yield Text()
    files = [(row["kernel"], row["ops"], row["segments"], f"{row['calls']:,}") for row in found["kernels"]]
    yield _table(("kernel", "ops", "in", "calls"), files, ", ", width)
    yield Text()
    reasons: dict[str, list[str]] = {}
    for row in found["without"]:
        reasons.setdefault(row["reason"], []).append(row["op"])
    for why, (first, *more) in reasons.items():
        yield Text(_wrapped([f"by torch: {first}", *more], ", ", width))
        yield Text(_wrapped(f"  {why}".split(" "), " ", width), style=_quiet())
    if not reasons:
        yield Text("no op is left to torch")
    yield Text()
    for row in found["quantised"]:
        line = f"weights of few bits: {row['op']} by {row['kernel'] or 'torch'}, {row['calls']:,} calls a step"
        yield Text(_wrapped(line.split(" "), " ", width))
    for row in updates:
        step = f"{row['elements']:,} elements and {num_bytes(row['bytes'])} a step"
        line = f"optimizer: {row['op']} by {row['kernel'] or 'torch'}, {step} on the pipeline rank that updates most"
        yield Text(_wrapped(line.split(" "), " ", width))


def _numbers(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['calls']:,}", num_bytes(row["bytes_saved"])


def _table(heads: tuple[str, ...], rows: Sequence[Cells], between: str, width: int) -> Table:
    """Rows of texts, and of lists of names, which share what the texts leave of the width."""
    lists = {column for row in rows for column, cell in enumerate(row) if isinstance(cell, list)}
    table = Table(box=None, pad_edge=False, header_style=_quiet())
    taken = 2 * (len(heads) - 1)
    for column, head in enumerate(heads):
        table.add_column(head, justify="right" if head in ("calls", "saves") else "left", no_wrap=True)
        taken += 0 if column in lists else max(len(str(cell)) for cell in (head, *(row[column] for row in rows)))
    room = (width - taken) // max(1, len(lists))
    for row in rows:
        cells = (
            _wrapped([*map(visible, cell)], between, room) if isinstance(cell, list) else visible(cell) for cell in row
        )
        table.add_row(*map(Text, cells))
    return table


def _wrapped(names: Sequence[str], between: str, width: int) -> str:
    """Names in a row, on more lines where they are wider; no name is broken."""
    return fill(between.join(names), max(width, 1), break_long_words=False, break_on_hyphens=False)


def _quiet() -> Style:
    return Style(color=DARK.quiet)
