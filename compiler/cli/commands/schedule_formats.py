"""The output formats of `dsc schedule`: text, tables, JSON (docs/json.md) and others.

`FORMATS` maps each format to a function that renders an `Answer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from compiler.cli.commands.schedule_answer import Answer, ScheduleAnswer, cells, columns, number_text, percent
from compiler.schedule.costs import ALIKE, Costs
from compiler.schedule.measure import MeasuredSchedule
from compiler.schedule.memory import gigabytes
from compiler.schedule.torch_csv import to_torch_csv
from compiler.schedule.weights import StageWeight, Weight
from compiler.tools.picture.formats import TooMuchError
from dsl.facts.schedules import join_names


def as_text(answer: Answer) -> str:
    """One schedule in its notation, which can be read back; several as a table."""
    if answer.compared:
        return "\n".join(table(answer)) + "\n"
    schedule = answer.entries[0].schedule
    assert schedule is not None
    return schedule.to_text()


def as_json(answer: Answer) -> str:
    """A JSON document on one line."""
    if answer.compared:
        assert answer.costs is not None
        cap = [*map(number, answer.cap)] if isinstance(answer.cap, tuple) else answer.cap and number(answer.cap)
        schedules = [_comparison_value(entry) for entry in answer.entries]
        memory = None if answer.memory is None else number(answer.memory)
        value = {"costs": costs_value(answer.costs), "unit": answer.unit or None, "cap": cap, "memory": memory}
        return json.dumps({**value, "schedules": schedules}) + "\n"
    entry = answer.entries[0]
    assert entry.schedule is not None
    value = json.loads(entry.schedule.to_json())
    if (measured := entry.measured) is not None:
        value |= {"unit": answer.unit or None, "costs": costs_value(measured.costs)}
        value |= {
            "makespan": number(measured.makespan),
            "bubble": [number(idle) for idle in measured.totals.idle],
            "peak_activations": [number(Fraction(peak, entry.parts)) for peak in measured.totals.peak_activations],
            "peak_bytes": [number(num_bytes) for num_bytes in measured.peak_bytes],
            "parts": entry.parts,
            "lower_bound": number(measured.lower_bound),
            "gap": number(measured.gap),
            "excess": number(measured.excess),
            **_order_value(entry),
        }
    return json.dumps(value) + "\n"


def as_torch_csv(answer: Answer) -> str:
    """One schedule as CSV for torch.distributed.pipelining."""
    schedule = answer.entries[0].schedule
    assert schedule is not None
    try:
        return to_torch_csv(schedule)
    except ValueError as error:
        raise TooMuchError(str(error)) from None


def as_megatron_layout(answer: Answer) -> str:
    """The layers of each stage, in the notation of Megatron."""
    if answer.layout is None:
        raise TooMuchError("a layout needs the layers of a model: name a SPEC, and leave --name out")
    return answer.layout + "\n"


def as_picture(name: str) -> Callable[[Answer], str]:
    """A function that draws an answer in a format of compiler/tools/picture, imported only when called."""

    def draw(answer: Answer) -> str:
        from compiler.cli.commands import schedule_pictures

        return schedule_pictures.draw(answer, name)

    return draw


FORMATS: dict[str, Callable[[Answer], str]] = {
    "text": as_text,
    "json": as_json,
    "torch-csv": as_torch_csv,
    "megatron-layout": as_megatron_layout,
    "terminal": as_picture("terminal"),
    "svg": as_picture("svg"),
    "html": as_picture("html"),
    "trace": as_picture("trace"),
}


# ---------------------------------------------------------------- text


def summary(answer: Answer) -> list[str]:
    """Times and memory of one schedule, as lines of text; empty without costs."""
    entry = answer.entries[0]
    if (measured := entry.measured) is None:
        return []
    unit, N = f" {answer.unit}" if answer.unit else "", measured.schedule.num_micro_batches
    pair, parts = measured.costs.pair_time("FB") * measured.stages_a_rank, entry.parts
    peak, cap = (number_text(Fraction(activations, parts)) for activations in (measured.peak_activations, measured.cap))
    if answer.memory is not None:
        limit = gigabytes(answer.memory)
    else:
        limit = "the caps of the ranks" if isinstance(answer.cap, tuple) else f"{cap} activations"
    lines = [
        f"makespan {number_text(measured.makespan)}{unit} · bubble {percent(measured.idle)} ·"
        f" {peak} activations on the fullest rank",
        _bound(entry, measured, limit, unit),
        f"excess {number_text(measured.excess)}{unit} over {N} F&B of {number_text(pair)}",
    ]
    if held_bytes := measured.peak_bytes:
        rank = held_bytes.index(max(held_bytes))
        beside = gigabytes(measured.costs.bytes.of_rank(rank))
        lines.append(
            f"memory {gigabytes(held_bytes[rank])} on rank {rank}, the fullest, {beside} of it not activations"
        )
    if copied := measured.num_offloaded:
        forwards = measured.schedule.num_stages * N
        lines.append(f"{copied:,} of {forwards:,} activations go to the host and come back")
    if entry.unordered is not None:
        gain = percent(1 - measured.makespan / entry.unordered)
        lines.append(f"order {' '.join(map(str, entry.order))}")
        lines.append(f"the order of the data takes {number_text(entry.unordered)}{unit}; this one takes {gain} less")
    elif measured.costs.micro_batches:
        lines.append("micro-batches are in the order of the data: --order searches for a shorter one")
    if parts > 1:
        note = f"an action costs 1/{parts} of the costs of 1/P of the model, and its activation counts as 1/{parts}"
        lines.append(f"{parts} stages per rank: {note}")
    return lines


def _bound(entry: ScheduleAnswer, measured: MeasuredSchedule, cap: str, unit: str) -> str:
    """The line of the lower bound, what it covers, and the gap to it."""
    placements = [str(placement) for placement in entry.bounded or (measured.schedule.stage_placement,)]
    several = len(placements) > 1
    named = f"placement{'s' if several else ''} {join_names(placements)}"
    line = f"lower bound {number_text(measured.lower_bound)}{unit} for {named} and at most {cap}"
    if measured.gap:
        return f"{line} · gap {percent(measured.gap)}"
    order = " and in this order of micro-batches" if measured.costs.micro_batches else ""
    subject = "these placements" if several else "this placement"
    return f"{line} · gap 0.0%: no schedule on {subject} within that cap{order} is shorter"


def table(answer: Answer) -> list[str]:
    """A table with a line for each schedule, or why it does not exist."""
    assert answer.costs is not None
    head = columns(answer.costs)
    rows: list[tuple[str, ...]] = [head]
    for entry in answer.entries:
        rows.append((entry.name, *(cells(entry.measured) if entry.measured else ())))
    widths = [max(len(row[k]) for row in rows if len(row) > k) for k in range(len(head))]
    lines = [_line(row, widths) for row in rows]
    faults = {entry.name: entry.fault for entry in answer.entries if entry.fault}
    lines[1:] = [
        f"{entry.name:<{widths[0]}}  {faults[entry.name]}" if entry.fault else line
        for entry, line in zip(answer.entries, lines[1:], strict=True)
    ]
    unit = f" in {answer.unit}" if answer.unit else ""
    note = f"Times{unit} and activations are for 1/P of the model: with v stages per rank, an action costs 1/v of that."
    return [*lines, "", note]


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    tail = "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=False))
    return f"{row[0]:<{widths[0]}}{tail}".rstrip()


# ---------------------------------------------------------------- values


def number(value: Fraction) -> int | float:
    """The value for JSON: an integer if it is one, else a float."""
    return value.numerator if value.denominator == 1 else float(value)


def costs_value(costs: Costs) -> dict[str, Any]:
    """Costs in the format of --costs."""
    return {
        **{kind: number(costs.lone_time(kind)) for kind in "FIWB"},
        **{kind: None if time is None else number(time) for kind, time in (("O", costs.O), ("R", costs.R))},
        "pairs": {"".join(sorted(kinds, key="FBIW".index)): number(time) for kinds, time in costs.pairs},
        "latency": number(costs.latency) if costs.links == ALIKE else _links_value(costs),
        "keeps": number(costs.keeps),
        "bytes": {
            "activation": number(costs.bytes.activation),
            "beside": [number(size) for size in costs.bytes.beside],
        },
        "stages": [_weight_value(weight) for weight in costs.stages],
        "ranks": [number(weight) for weight in costs.ranks],
        "micro_batches": [number(weight) for weight in costs.micro_batches],
    }


def _weight_value(weight: StageWeight) -> int | float | dict[str, int | float]:
    """A stage's weight in the format of --costs: a number, or one per kind of action."""
    if isinstance(weight, Weight):
        return {kind: number(weight.factor(kind)) for kind in "FIWB"}
    return number(weight)


def _links_value(costs: Costs) -> dict[str, Any]:
    links = costs.links
    table = [[number(time) for time in row] for row in links.table]
    return {"inside": number(costs.latency), "node": links.node, "between": number(links.between), "table": table}


def _order_value(entry: ScheduleAnswer) -> dict[str, Any]:
    """The order that was searched for, and the makespan without it; empty and None without a search."""
    return {"order": list(entry.order), "unordered": None if entry.unordered is None else number(entry.unordered)}


def _comparison_value(entry: ScheduleAnswer) -> dict[str, Any]:
    measured = entry.measured
    if measured is None:
        keys = (
            *("placement", "makespan", "idle", "peak_activations", "peak_bytes", "copies", "lower_bound", "gap"),
            "excess",
        )
        return {"schedule": entry.name, **dict.fromkeys(keys), **_order_value(entry), "fault": entry.fault}
    return {
        "schedule": entry.name,
        "placement": str(measured.schedule.stage_placement),
        "makespan": number(measured.makespan),
        "idle": number(measured.idle),
        "peak_activations": number(Fraction(measured.peak_activations, measured.stages_a_rank)),
        "peak_bytes": number(max(measured.peak_bytes)) if measured.peak_bytes else None,
        "copies": measured.copies,
        "lower_bound": number(measured.lower_bound),
        "gap": number(measured.gap),
        "excess": number(measured.excess),
        **_order_value(entry),
        "fault": None,
    }
